"""Encoder, FAISS shards and what they refuse."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tiny import ENCODE

from memsearcher.files import BadInput, sha256, write_json, write_jsonl
from memsearcher.params import Index
from memsearcher.retrieval.contract import Manifest
from memsearcher.retrieval.dense import (
    DenseIndex,
    DenseRetriever,
    build_shard,
    check,
    write_manifest,
)
from memsearcher.retrieval.encoder import Encoder, locate
from memsearcher.retrieval.passages import Passages
from memsearcher.types import Passage

FLAT = Index(kind="flat", nlist=4, nprobe=2)
IVF = Index(kind="ivf_sq8", nlist=8, nprobe=3)
PASSAGES = [
    Passage("p1", "Marel Tovin", "Marel Tovin is a film director."),
    Passage("p2", "Ostrava", "A city on a river, known for its steel works. " * 9),
    Passage("p3", "Grey Harbour", "A film of 1961."),
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(ENCODE)


def unit_vectors(count: int, dim: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make_index(
    folder: Path, parts: list[np.ndarray], index: Index, **changes: object
) -> DenseIndex:
    """An index over the parts; `changes` falsify its manifest."""
    folder.mkdir(parents=True)
    names = [f"shard-{i}.faiss" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        build_shard(part.astype(np.float16), index, folder / name, lambda n: None)
    source = locate(ENCODE.model, None)
    manifest = Manifest(
        encoder=source.name,
        revision=source.revision,
        pooling="mean",
        query_prefix="query: ",
        passage_prefix="passage: ",
        dim=parts[0].shape[1],
        metric="inner_product",
        ntotal=sum(map(len, parts)),
        corpus_sha256="none",
        kind=index.kind,
        shards=names,
    )
    write_manifest(folder, replace(manifest, **changes), max_query_tokens=16, nprobe=index.nprobe)
    return DenseIndex(folder)


def make_passages(folder: Path, passages: list[Passage]) -> Passages:
    write_jsonl(folder / "passages.jsonl", map(asdict, passages))
    digest = sha256(folder / "passages.jsonl")
    write_json(folder / "manifest.json", {"count": len(passages), "sha256": digest})
    return Passages(folder)


def test_two_swapped_lines_are_another_corpus(tmp_path: Path, encoder: Encoder) -> None:
    right = make_passages(tmp_path / "right", PASSAGES)
    swapped = make_passages(tmp_path / "swapped", [PASSAGES[1], PASSAGES[0], PASSAGES[2]])
    vectors = unit_vectors(3, encoder.dim)
    index = make_index(tmp_path / "i", [vectors], FLAT, corpus_sha256=right.sha256)
    check(index.manifest, encoder, right)
    with pytest.raises(BadInput, match=f"'{right.sha256}' in the index and '{swapped.sha256}'"):
        check(index.manifest, encoder, swapped)


@pytest.mark.parametrize("index", [FLAT, IVF], ids=lambda i: i.kind)
def test_asking_for_more_than_there_is_never_invents_a_passage(  # C1
    tmp_path: Path, index: Index
) -> None:
    vectors = unit_vectors(3, 8)
    (hits,) = make_index(tmp_path / "three", [vectors[:2], vectors[2:]], index).search(
        vectors[:1], 5
    )
    assert sorted(position for position, _ in hits) == [0, 1, 2]
    assert make_index(tmp_path / "none", [vectors[:0]], index).search(vectors, 5) == [[], [], []]


def test_ivf_pads_with_nothing_and_finds_most_neighbours(tmp_path: Path) -> None:
    vectors = unit_vectors(2000, 16)
    few = make_index(tmp_path / "ivf", [vectors], IVF).search(vectors[:40], 1000)
    assert {len(hits) for hits in few} != {1000}  # three of eight lists hold fewer
    assert all(position >= 0 for hits in few for position, _ in hits)
    assert sum(hits[0][0] == row for row, hits in enumerate(few)) == 40


def test_equal_scores_are_ordered_by_position(tmp_path: Path) -> None:
    same = np.repeat(unit_vectors(1, 8), 6, axis=0)
    (hits,) = make_index(tmp_path / "i", [same[:3], same[3:]], FLAT).search(same[:1], 4)
    assert [position for position, _ in hits] == [0, 1, 2, 3]


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    vectors = unit_vectors(300, 8)
    with pytest.raises(BadInput, match="300 vectors, its manifest says 299"):
        make_index(tmp_path / "count", [vectors], FLAT, ntotal=299)
    with pytest.raises(BadInput, match="dimension 8, manifest: 16"):
        make_index(tmp_path / "dim", [vectors], FLAT, dim=16)
    make_index(tmp_path / "cut", [vectors], FLAT)
    path = tmp_path / "cut" / "shard-0.faiss"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"shard-0\.faiss: not a whole FAISS index"):
        DenseIndex(tmp_path / "cut")
    path.unlink()
    with pytest.raises(BadInput, match=r"shard-0\.faiss: no such file"):
        DenseIndex(tmp_path / "cut")


def test_index_encoder_and_passages_must_belong_together(
    tmp_path: Path, encoder: Encoder
) -> None:  # C2
    passages = make_passages(tmp_path / "corpus", PASSAGES)
    vectors = unit_vectors(3, encoder.dim)
    good = {"corpus_sha256": passages.sha256}
    check(make_index(tmp_path / "good", [vectors], FLAT, **good).manifest, encoder, passages)
    for name, shape, changes, message in (
        ("dim", (3, 8), good, f"dimension is 8 in the index and {encoder.dim} here"),
        ("short", (4, encoder.dim), good, "passages is 4 in the index and 3 here"),
        (
            "swap",
            (3, encoder.dim),
            {},
            f"corpus sha256 is 'none' in the index and '{passages.sha256}",
        ),
        (
            "prefix",
            (3, encoder.dim),
            good | {"query_prefix": ""},
            "query_prefix is '' in the index",
        ),
    ):
        manifest = make_index(tmp_path / name, [unit_vectors(*shape)], FLAT, **changes).manifest
        with pytest.raises(BadInput, match=message):
            check(manifest, encoder, passages)


def test_dense_search_finds_the_passage_and_nothing_for_blank(
    tmp_path: Path, encoder: Encoder
) -> None:
    passages = make_passages(tmp_path / "corpus", PASSAGES)
    vectors = encoder.passages([f"{p.title}\n{p.text}" for p in PASSAGES])
    index = make_index(tmp_path / "i", [vectors], FLAT)
    retriever = DenseRetriever(encoder, index, passages)
    odd = ["who directs films?", "", " \n ", "\ud800", "steel \udfff works", "x" * 10_000]
    found = retriever.search(odd, 5)
    assert [len(hits) for hits in found] == [3, 0, 0, 0, 3, 3]
    assert (found[0][0].passage_id, found[4][0].passage_id) == ("p1", "p2")
    assert [hit.rank for hit in found[0]] == [1, 2, 3]
    assert retriever.search([], 5) == []
    with pytest.raises(ValueError, match="k must be at least 1, got -1"):
        retriever.search(["x"], -1)


def test_vectors_are_unit_and_do_not_depend_on_their_neighbours(encoder: Encoder) -> None:
    texts = ["short", "a much longer text about rivers and steel", "middle sized text"]
    together = encoder.passages(texts)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-5)
    for row, text in enumerate(texts):
        assert together[row] == pytest.approx(encoder.passages([text])[0], abs=1e-5)
    assert not np.allclose(encoder.queries(["short"]), encoder.passages(["short"]), atol=1e-3)


@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers(encoder: Encoder) -> None:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(locate(ENCODE.model, None).path, device="cpu")
    theirs.max_seq_length = ENCODE.max_passage_tokens
    texts = [f"{p.title}\n{p.text}" for p in PASSAGES]
    other = theirs.encode([f"passage: {text}" for text in texts], normalize_embeddings=True)
    assert (encoder.passages(texts) * other).sum(axis=1) == pytest.approx(1, abs=1e-5)


def test_unknown_encoders_are_named() -> None:
    with pytest.raises(BadInput, match="package:maxilm"):
        locate("package:maxilm", None)
    with pytest.raises(BadInput, match="/no/such/folder: no such folder"):
        locate("/no/such/folder", None)
    assert locate("intfloat/e5-base-v2", "f52b").revision == "f52b"
