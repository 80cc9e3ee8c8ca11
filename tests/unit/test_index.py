"""The kinds of index: exact ids, what they take, what is refused; the index stage's own checks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memsearcher.files import BadInput, write_json
from memsearcher.params import Index, IndexKind
from memsearcher.retrieval import plan
from memsearcher.retrieval.contract import Manifest
from memsearcher.retrieval.dense import DenseIndex, build_shard, link_shard, write_manifest
from stages.index import check_shards

SIZES = (400, 0, 601)  # a shard may be empty
DIM = 24


def unit_vectors(count: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


VECTORS = unit_vectors(sum(SIZES)).astype(np.float16)


def open_index(folder: Path, kind: IndexKind) -> DenseIndex:
    index, names = Index(kind=kind, nlist=8, nprobe=8), []
    folder.mkdir()
    for number, part in enumerate(np.split(VECTORS, np.cumsum(SIZES)[:-1])):
        names.append(f"shard-{number}.{'f16' if kind == 'fp16' else 'faiss'}")
        if kind == "fp16":
            part.tofile(folder / f"{number}.vectors")
            link_shard(folder / f"{number}.vectors", folder / names[-1])
        else:
            build_shard(part, index, folder / names[-1], lambda n: None)
    manifest = Manifest(
        encoder="e",
        revision=None,
        pooling="mean",
        query_prefix="",
        passage_prefix="",
        dim=DIM,
        metric="inner_product",
        ntotal=len(VECTORS),
        corpus_sha256="none",
        kind=kind,
        shards=names,
    )
    write_manifest(folder, manifest, max_query_tokens=16, nprobe=8)
    return DenseIndex(folder)


@pytest.mark.parametrize("kind", ["flat", "fp16"])
def test_exact_kinds_find_what_numpy_finds_for_a_thousand_queries(
    tmp_path: Path, kind: IndexKind
) -> None:
    queries = unit_vectors(1000, seed=1)
    exact = queries.astype(np.float64) @ VECTORS.T.astype(np.float64)
    found = open_index(tmp_path / "i", kind).search(queries, 10)
    order = np.argsort(-exact, axis=1)[:, :11]
    scores = np.take_along_axis(exact, order, axis=1)
    for row, hits in enumerate(found):
        assert len(hits) == 10
        for rank, (position, score) in enumerate(hits):
            if position != order[row, rank]:  # a tie in float32
                assert exact[row, position] == pytest.approx(scores[row, rank], abs=1e-6)
            assert score == pytest.approx(exact[row, position], abs=1e-5)


def test_exact_search_is_done_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = unit_vectors(20, seed=2)
    index = open_index(tmp_path / "i", "fp16")
    whole = [[position for position, _ in hits] for hits in index.search(queries, 30)]
    monkeypatch.setattr("memsearcher.retrieval.exact.BLOCK", 7)
    assert [[p for p, _ in hits] for hits in index.search(queries, 30)] == whole
    assert [len(hits) for hits in index.search(queries[:1], 5000)] == [len(VECTORS)]


def test_ivf_sq8_needs_a_quarter_of_flat_and_finds_the_same(tmp_path: Path) -> None:
    flat, ivf = (open_index(tmp_path / kind, kind) for kind in ("flat", "ivf_sq8"))
    queries = unit_vectors(200, seed=3)
    same = [
        len({p for p, _ in a} & {p for p, _ in b}) / 5
        for a, b in zip(flat.search(queries, 5), ivf.search(queries, 5), strict=True)
    ]
    assert np.mean(same) == 1  # all lists are probed, and what 8 bits confuse is scored again
    for index in (flat, ivf):
        m = index.manifest
        estimate = sum(plan.index_bytes(m.kind, n, DIM, 8) for n in SIZES)
        assert index.plan.index_bytes == pytest.approx(estimate, rel=0.1)


def test_shards_that_are_cut_or_missing_are_refused(tmp_path: Path) -> None:
    kinds: tuple[IndexKind, ...] = ("flat", "ivf_sq8")
    for kind in kinds:
        open_index(tmp_path / kind, kind)
        path = tmp_path / kind / "shard-2.faiss"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(BadInput, match=r"shard-2\.faiss: not a whole FAISS index"):
            DenseIndex(tmp_path / kind)
    open_index(tmp_path / "fp16", "fp16")
    path = tmp_path / "fp16" / "shard-0.f16"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(BadInput, match=r"shard-0\.f16: 19199 bytes are no whole number of 24"):
        DenseIndex(tmp_path / "fp16")
    path.write_bytes(data[: -2 * DIM])
    with pytest.raises(BadInput, match="1000 vectors, its manifest says 1001"):
        DenseIndex(tmp_path / "fp16")
    path.unlink()
    with pytest.raises(BadInput, match=r"shard-0\.f16: no such file, the manifest names it"):
        DenseIndex(tmp_path / "fp16")


def test_a_plan_says_what_is_needed_and_names_the_ways_out(tmp_path: Path) -> None:
    needs = plan.to_build(tmp_path, "flat", [10_507_662] * 2, 768, 4096, 0)
    small = replace(needs, memory_free=24 * plan.GIB, disk_free=75 * plan.GIB)
    assert str(small) == (
        "21,015,324 vectors × 3,072 bytes (flat, 768 dimensions) = 60.1 GiB; memory to build it "
        "30.1 GiB of 24.0 GiB available; disk 60.1 GiB of 75.0 GiB free"
    )
    with pytest.raises(BadInput, match=r"does not fit in memory: 21,015,324 vectors") as refusal:
        small.check()
    for way in ("index.kind=fp16 (30.1 GiB)", "index.kind=ivf_sq8 (15.2 GiB)", "encode.shards"):
        assert way in str(refusal.value)
    with pytest.raises(BadInput, match="the index does not fit on the disk"):
        replace(small, disk_free=plan.GIB).check()
    replace(small, memory_free=64 * plan.GIB).check()

    index = open_index(tmp_path / "i", "flat")
    assert str(index.plan).startswith("1,001 vectors × 96 bytes (flat, 24 dimensions) = 0.1 MiB;")
    with pytest.raises(BadInput, match=r"fit in memory: .* a GPU for index\.kind=fp16"):
        replace(index.plan, memory_free=1000).check()


def embeddings(folder: Path, **changes: object) -> None:
    for shard, (start, count) in enumerate([(0, 3), (3, 2)]):
        row = {
            "dim": DIM,
            "encoder": "e",
            "revision": None,
            "pooling": "mean",
            "passage_prefix": "",
            "corpus_sha256": "c",
            "corpus_count": 5,
            "start": start,
            "count": count,
        }
        path = folder / f"data/embeddings/shard-{shard}"
        write_json(path / "manifest.json", row | (changes if shard else {}))
        VECTORS[start : start + count].tofile(path / "vectors.f16")


def test_shards_of_embeddings_must_be_slices_of_one_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    embeddings(tmp_path)
    assert [shard["count"] for shard in check_shards(2)] == [3, 2]
    for changes, message in (
        ({"corpus_sha256": "d"}, "corpus_sha256 is 'd', in shard-0 it is 'c'"),
        ({"start": 4}, "starts at passage 4, the shard before ends at 3"),
        ({"count": 1}, r"vectors\.f16: 96 bytes, its manifest means 48"),
    ):
        embeddings(tmp_path, **changes)
        with pytest.raises(BadInput, match=message):
            check_shards(2)
    with pytest.raises(BadInput, match="3 vectors, the corpus has 5 passages"):
        check_shards(1)
    embeddings(tmp_path)
    (tmp_path / "data/embeddings/shard-1/vectors.f16").unlink()
    with pytest.raises(BadInput, match=r"shard-1/vectors\.f16: no such file"):
        check_shards(2)
    embeddings(tmp_path)
    with pytest.raises(BadInput, match=r"shard-2/manifest\.json: no such file"):
        check_shards(3)
