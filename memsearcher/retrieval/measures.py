"""Is search sound? Gold groups from titles, recall by group, MRR and nDCG, answers in passages.

A question's golds are groups of passages, one group per gold title: any passage of that article
will do. A question whose titles are unknown has no groups and is judged by its answers only.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from memsearcher.files import BadInput
from memsearcher.types import Hit, Question

Groups = list[frozenset[str]]
Runs = Mapping[str, Sequence[Hit]]  # question id -> hits, best first


def gold_titles(question: Question) -> list[str]:
    """From the plan, or the list of supporting titles, or HotpotQA's supporting facts; in order,
    each once."""
    metadata = question.metadata
    plan, titles, facts = (
        metadata.get(k) for k in ("plan", "supporting_titles", "supporting_facts")
    )
    if isinstance(plan, list) and plan:
        found = [hop["title"] for hop in plan]
    elif isinstance(titles, list) and titles:
        found = titles
    elif isinstance(facts, dict):
        found = facts.get("title", [])
    else:
        found = []
    return list(dict.fromkeys(str(title) for title in found if title))


def title_key(title: str) -> str:
    """Titles of different dumps and data sets compare after this (case, blanks, NFC, entities)."""
    return " ".join(unicodedata.normalize("NFC", html.unescape(title)).casefold().split())


def gold_groups(question: Question, ids_by_title: Mapping[str, Sequence[str]]) -> Groups:
    """One group per gold title. A title without a passage is an empty group, which no search can
    find; where the corpus holds none of the titles the question cannot be judged: no groups."""
    groups = [frozenset(ids_by_title.get(title_key(t), ())) for t in gold_titles(question)]
    return groups if any(groups) else []


def read_qrels(path: Path) -> dict[str, Groups]:
    """TREC qrels (question, group, passage, relevance); the second column numbers the group."""
    found: dict[str, dict[str, set[str]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        parts = line.split()
        if len(parts) != 4 or not parts[3].lstrip("-").isdigit():
            raise BadInput(
                f"{path}:{number}: not `question group passage relevance`: {line[:80]!r}"
            )
        if int(parts[3]) > 0:
            found.setdefault(parts[0], {}).setdefault(parts[1], set()).add(parts[2])
    return {q: [frozenset(ids) for ids in groups.values()] for q, groups in found.items()}


def recall(hits: Sequence[Hit], groups: Groups, k: int) -> float:
    """Share of the groups with at least one passage among the first k hits."""
    top = {hit.passage_id for hit in hits[:k]}
    return sum(1 for group in groups if group & top) / len(groups)


def ranking_scores(runs: Runs, qrels: Mapping[str, Groups]) -> dict[str, list[float]]:
    """MRR@10 and nDCG@10 by ir_measures, one score per judged question, 0 where nothing came back.

    Ranks decide: ir_measures sorts by score, so it is given 1 / rank (equal scores keep our order).
    """
    import ir_measures
    from ir_measures import RR, nDCG

    judged = {q: dict.fromkeys(set().union(*groups), 1) for q, groups in qrels.items() if groups}
    run = {q: {hit.passage_id: 1 / hit.rank for hit in runs[q]} for q in judged}
    names = {RR @ 10: "mrr@10", nDCG @ 10: "ndcg@10"}
    scores: dict[str, dict[str, float]] = {
        name: dict.fromkeys(judged, 0.0) for name in names.values()
    }
    if judged:
        for metric in ir_measures.iter_calc(list(names), judged, run):
            scores[names[metric.measure]][metric.query_id] = float(metric.value)
    return {name: list(by_question.values()) for name, by_question in scores.items()}


def answer_rank(
    hits: Sequence[Hit],
    golds: Sequence[str],
    words: Callable[[str], str],
    normalise: Callable[[str], str],
) -> int | None:
    """Rank of the first hit whose passage holds a gold as whole words; None where none does.

    `words` gives the normalised text of a passage id.
    """
    wanted = [f" {gold} " for gold in dict.fromkeys(map(normalise, golds)) if gold]
    for hit in hits:
        text = f" {words(hit.passage_id)} "
        if any(gold in text for gold in wanted):
            return hit.rank
    return None


def has_answer_text(question: Question, normalise: Callable[[str], str]) -> bool:
    """Whether an answer in a passage means anything: not for yes and no, nor for golds that
    normalise to nothing."""
    golds = {normalise(gold) for gold in question.golds} - {""}
    return bool(golds) and not golds <= {"yes", "no"}


def run_lines(runs: Runs, tag: str) -> list[str]:
    """Lines of a TREC run: question, Q0, passage, rank, score, tag."""
    return [
        f"{_word(question)} Q0 {_word(hit.passage_id)} {hit.rank} {hit.score:.6f} {tag}"
        for question, hits in runs.items()
        for hit in hits
    ]


def qrels_lines(qrels: Mapping[str, Groups]) -> list[str]:
    """Lines of TREC qrels, the group's number in the second column."""
    return [
        f"{_word(question)} {number} {_word(passage)} 1"
        for question, groups in qrels.items()
        for number, group in enumerate(groups)
        for passage in sorted(group)
    ]


def _word(name: str) -> str:
    if not name or re.search(r"\s", name):
        raise BadInput(f"the id {name!r} cannot stand in a TREC file: it is empty or holds a blank")
    return name
