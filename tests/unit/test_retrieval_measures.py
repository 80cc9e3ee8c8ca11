"""Fusion, the passages on disk, and the measures of search."""

import json
from dataclasses import asdict
from math import log2
from pathlib import Path

import pytest

from memsearcher.agent.scoring import normalise
from memsearcher.files import BadInput, sha256, write_json, write_jsonl
from memsearcher.retrieval import measures
from memsearcher.retrieval.contract import clean
from memsearcher.retrieval.fusion import fuse
from memsearcher.retrieval.passages import Passages
from memsearcher.types import Hit, Passage, Question


def ranking(*ids: str) -> list[Hit]:
    return [Hit(passage, 1.0 / rank, rank) for rank, passage in enumerate(ids, 1)]


def question(name: str = "q", golds: tuple[str, ...] = ("x",), **metadata: object) -> Question:
    return Question(name, "nq", "who?", golds, metadata=metadata)


def test_fusion_sums_reciprocal_ranks() -> None:
    hits = fuse([ranking("a", "b", "c"), ranking("c", "b")], k=10, rrf_k=60)
    assert [h.passage_id for h in hits] == ["c", "b", "a"]
    assert hits[0].score == pytest.approx(1 / 63 + 1 / 61)
    assert [h.rank for h in hits] == [1, 2, 3]


def test_fusion_breaks_ties_by_best_rank_then_id() -> None:
    assert [h.passage_id for h in fuse([ranking("b"), ranking("a")], 5, 60)] == ["a", "b"]
    assert fuse([[], []], 5, 60) == []
    assert len(fuse([ranking("a", "b", "c")], 2, 60)) == 2


def test_clean_leaves_text_alone_and_blanks_what_no_library_takes() -> None:
    assert clean(" caf\u00e9 \u200b\U0001f600 ") == "caf\u00e9 \u200b\U0001f600"
    assert clean("\ud800\x00\n") == ""


def make_passages(folder: Path, passages: list[Passage]) -> Path:
    write_jsonl(folder / "passages.jsonl", map(asdict, passages))
    digest = sha256(folder / "passages.jsonl")
    write_json(folder / "manifest.json", {"count": len(passages), "sha256": digest})
    return folder


def test_passages_are_found_by_position_and_id(tmp_path: Path) -> None:
    rows = [Passage(f"id-{i}", f"T\u2028{i}", "\u00e9\n" * i) for i in range(50)]
    passages = Passages(make_passages(tmp_path, rows))
    assert [passages.at(i) for i in range(len(passages))] == rows
    assert [passages.get(p.id) for p in rows] == rows
    with pytest.raises(KeyError, match="no passage has the id 'id-50'"):
        passages.get("id-50")
    with pytest.raises(IndexError):
        passages.at(-1)


def test_passages_that_are_not_the_manifests_are_refused(tmp_path: Path) -> None:
    rows = [Passage(str(i), "t", str(i)) for i in range(3)]
    make_passages(tmp_path, rows)
    lines = (tmp_path / "passages.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "passages.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(BadInput, match="2 passages, its manifest says 3"):
        Passages(tmp_path)
    (tmp_path / "passages.jsonl").write_text("".join([lines[1], lines[0], lines[2]]))
    digest = json.loads((tmp_path / "manifest.json").read_text())["sha256"]
    with pytest.raises(BadInput, match=f"its manifest says {digest}"):
        Passages(tmp_path)


def test_gold_groups_come_from_plan_titles_or_facts() -> None:
    by_title = {"ed wood": ["p1", "p2"], "kiss & tell": ["p3"]}
    plan = [{"query": "x", "title": "Ed  Wood"}, {"query": "y", "title": "Nowhere"}]
    assert measures.gold_groups(question(plan=plan), by_title) == [{"p1", "p2"}, set()]
    titles = ["Kiss &amp; Tell", "Ed Wood", "Ed Wood"]
    assert measures.gold_groups(question(supporting_titles=titles), by_title) == [
        {"p3"},
        {"p1", "p2"},
    ]
    facts = {"title": ["Ed Wood", "Ed Wood"], "sent_id": [0, 1]}
    assert measures.gold_groups(question(supporting_facts=facts), by_title) == [{"p1", "p2"}]
    assert measures.gold_groups(question(supporting_titles=["Nowhere"]), by_title) == []
    assert measures.gold_groups(question(plan=[{"query": "x", "title": ""}]), by_title) == []


def test_recall_is_the_share_of_groups_that_were_found() -> None:
    groups = [frozenset({"a", "b"}), frozenset({"c"}), frozenset()]
    hits = ranking("x", "b", "a", "c")
    assert [measures.recall(hits, groups, k) for k in (1, 2, 3, 4)] == pytest.approx(
        [0, 1 / 3, 1 / 3, 2 / 3]
    )


def test_mrr_and_ndcg_against_hand_computed_values() -> None:
    runs = {"q1": ranking("x", "a", "y", "b"), "q2": ranking("x"), "q3": []}
    qrels = {"q1": [frozenset("a"), frozenset("b")], "q2": [frozenset("z")], "q3": [frozenset("z")]}
    scores = measures.ranking_scores(runs, qrels)
    ideal = 1 + 1 / log2(3)
    assert scores["mrr@10"] == pytest.approx([0.5, 0, 0])
    assert scores["ndcg@10"] == pytest.approx([(1 / log2(3) + 1 / log2(5)) / ideal, 0, 0])
    assert measures.ranking_scores({}, {}) == {"mrr@10": [], "ndcg@10": []}


def test_ranks_decide_where_scores_are_equal() -> None:
    runs = {"q": [Hit("z", 1.0, 1), Hit("a", 1.0, 2), Hit("m", 1.0, 3)]}
    assert measures.ranking_scores(runs, {"q": [frozenset("m")]})["mrr@10"] == pytest.approx(
        [1 / 3]
    )


def test_answers_count_as_whole_words_after_normalising() -> None:
    texts = {"a": normalise("The Beatlesque era"), "b": normalise("It was The Beatles!"), "c": ""}

    def rank(*golds: str) -> int | None:
        return measures.answer_rank(ranking("c", "a", "b"), golds, texts.__getitem__, normalise)

    assert rank("beatles") == 3
    assert rank("era", "Beatles") == 2
    assert rank("---") is None  # normalises to nothing: never found
    assert not measures.has_answer_text(question(golds=("Yes",)), normalise)
    assert not measures.has_answer_text(question(golds=(")", "---")), normalise)
    assert measures.has_answer_text(question(golds=("no", "Oslo")), normalise)


def test_qrels_survive_a_trip_through_their_file(tmp_path: Path) -> None:
    qrels = {"nq/1": [frozenset({"a", "b"}), frozenset({"c"})], "nq/2": [frozenset({"d"})]}
    path = tmp_path / "nq.trec"
    path.write_text("\n".join(measures.qrels_lines(qrels)) + "\nnq/2 0 e 0\n")
    assert measures.read_qrels(path) == qrels
    path.write_text("nq/1 0 a 1\nnq/1 a 1\n")
    with pytest.raises(BadInput, match=r"nq\.trec:2"):
        measures.read_qrels(path)


def test_run_lines_are_trec_and_refuse_ids_with_blanks() -> None:
    assert measures.run_lines({"nq/1": [Hit("p", 2.5, 1)]}, "bm25") == ["nq/1 Q0 p 1 2.500000 bm25"]
    with pytest.raises(BadInput, match="'a b'"):
        measures.run_lines({"nq/1": [Hit("a b", 1.0, 1)]}, "bm25")
