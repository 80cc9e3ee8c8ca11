"""Lucene: hits, odd queries, and Pyserini's own numbers on real passages."""

import json
import os
from pathlib import Path

import pytest

from memsearcher import corpus
from memsearcher.files import BadInput, read_jsonl, write_json, write_jsonl
from memsearcher.params import Bm25
from memsearcher.retrieval.lexical import LexicalRetriever, build
from memsearcher.retrieval.passages import Passages
from memsearcher.types import Passage

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
BM25 = Bm25(k1=0.9, b=0.4)
PASSAGES = [
    Passage("p1", "Marel Tovin", "Marel Tovin directed the film Grey Harbour."),
    Passage("p2", "Grey Harbour", "Grey Harbour is a film by Marel Tovin, shot in Ostrava."),
    Passage("p3", "Ostrava", "Ostrava is a city. \U0001f600 Its river is the Ostravice."),
    Passage("p4", "Nothing", ""),
]


def make_corpus(folder: Path, passages: list[Passage]) -> Passages:
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in passages]
    write_jsonl(folder / "passages.jsonl", rows)
    from memsearcher.files import sha256

    manifest = {"count": len(rows), "sha256": sha256(folder / "passages.jsonl"), "kind": "test"}
    write_json(folder / "manifest.json", manifest)
    return Passages(folder)


def open_bm25(root: Path, passages: list[Passage]) -> LexicalRetriever:
    opened = make_corpus(root / "corpus", passages)
    count = build(iter(passages), root / "bm25" / "lucene", threads=1)
    write_json(root / "bm25" / "manifest.json", {"count": count, "corpus_sha256": opened.sha256})
    return LexicalRetriever(root / "bm25", opened, BM25)


@pytest.fixture(scope="module")
def bm25(tmp_path_factory: pytest.TempPathFactory) -> LexicalRetriever:
    return open_bm25(tmp_path_factory.mktemp("bm25"), PASSAGES)


def test_the_best_passage_comes_first_and_ranks_count_from_one(bm25: LexicalRetriever) -> None:
    (hits,) = bm25.search(["rivers of Ostrava"], 5)
    assert [(h.passage_id, h.rank) for h in hits] == [("p3", 1), ("p2", 2)]
    assert hits[0].score > hits[1].score > 0
    assert bm25.passage("p3") == PASSAGES[2]


def test_k_beyond_the_index_gives_what_there_is(bm25: LexicalRetriever) -> None:
    (hits,) = bm25.search(["film"], 1_000_000)
    assert {h.passage_id for h in hits} == {"p1", "p2"}
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        bm25.search(["film"], 0)


def test_odd_queries_find_something_or_nothing_and_never_raise(bm25: LexicalRetriever) -> None:
    many_terms = " ".join(f"w{i}" for i in range(2000))  # Lucene's own limit is 1,024
    odd = [
        "",
        "   ",
        "\ud800",
        "film \udfff",
        "\x00",
        "film\x00",
        "\U0001f600",
        "AND OR (*:*",
        "x" * 10_000,
    ]
    found = bm25.search([*odd, many_terms + " film", many_terms * 3], 3)
    assert [bool(hits) for hits in found] == [False, False, False, True, False, True] + [
        bool(hits) for hits in found[6:9]
    ] + [True, False]


def test_bm25_of_another_corpus_is_refused_with_both_hashes(tmp_path: Path) -> None:
    open_bm25(tmp_path, PASSAGES[:2])
    other = make_corpus(tmp_path / "other", PASSAGES[1::-1])  # two lines swapped
    with pytest.raises(BadInput, match=other.sha256) as error:
        LexicalRetriever(tmp_path / "bm25", other, BM25)
    assert json.loads((tmp_path / "bm25" / "manifest.json").read_text())["corpus_sha256"] in str(
        error.value
    )


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> LexicalRetriever:
    if not SHARED.is_dir():
        pytest.skip("needs the real passages in ../shared/data")
    root = tmp_path_factory.mktemp("real")
    corpus.write(SHARED / "corpus.jsonl", root / "corpus", "jsonl", "real", lambda n: None)
    opened = Passages(root / "corpus")
    count = build(corpus.read_passages(root / "corpus"), root / "bm25" / "lucene", threads=2)
    write_json(root / "bm25" / "manifest.json", {"count": count, "corpus_sha256": opened.sha256})
    return LexicalRetriever(root / "bm25", opened, BM25)


REFERENCE = {
    "nq": (73, 0.877, 0.945, 0.959),
    "hotpotqa": (523, 0.620, 0.706, 0.877),
    "2wikimultihopqa": (737, 0.569, 0.628, 0.708),
    "musique": (148, 0.348, 0.424, 0.595),
}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", REFERENCE)
def test_recall_on_real_passages_is_the_reference_within_a_point(
    real: LexicalRetriever, dataset: str
) -> None:
    from memsearcher.retrieval.measures import recall

    text = {r["id"]: r["question"] for r in read_jsonl(SHARED / f"{dataset}_test.jsonl")}
    qrels = list(read_jsonl(SHARED / f"qrels_{dataset}_test.jsonl"))
    found = real.search([text[r["question_id"]] for r in qrels], 20)
    groups = [[frozenset(g) for g in r["groups"]] for r in qrels]
    measured = [
        sum(recall(h, g, k) for h, g in zip(found, groups, strict=True)) / len(qrels)
        for k in (3, 5, 20)
    ]
    assert len(qrels) == REFERENCE[dataset][0]
    assert measured == pytest.approx(REFERENCE[dataset][1:], abs=0.01)


@pytest.mark.slow
def test_hits_are_those_of_pyserinis_own_searcher(
    real: LexicalRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We leave Pyserini's Python wrapper out for its start-up time; here it searches our index."""
    monkeypatch.setenv("OPENAI_API_KEY", os.environ.get("OPENAI_API_KEY", "none"))
    from pyserini.search.lucene import LuceneSearcher

    theirs = LuceneSearcher(str(real.folder / "lucene"))
    theirs.set_bm25(BM25.k1, BM25.b)
    queries = [r["question"] for r in read_jsonl(SHARED / "bamboogle_test.jsonl")]
    for query, hits in zip(queries, real.search(queries, 10), strict=True):
        assert [(h.passage_id, h.score) for h in hits] == [
            (h.docid, h.score) for h in theirs.search(query, 10)
        ]
