"""Is search itself sound? Runs, qrels and measures for dense, BM25 and fusion on every benchmark.

The query is the question. Where a question carries a plan, `hop_recall` says how often the plan's
own queries find their passage: what a perfect searcher would see.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.types import Hit, Question
from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    from memsearcher.retrieval.contract import Retriever
    from memsearcher.retrieval.factory import Mode
    from memsearcher.retrieval.measures import Groups, Runs

STAGE = Stage(
    "retrieval",
    params=("bm25", "search"),
    deps=("data/corpus", "data/index", "data/bm25", "data/questions"),
)
MODES = ("dense", "bm25", "fusion")
BATCH = 64
Scores = dict[str, list[float]]  # measure -> one score per question that it judges


def run(job: Job) -> None:
    """Searches every test and dev question in every mode and measures what comes back."""
    from tqdm import tqdm

    from memsearcher.retrieval import measures
    from memsearcher.retrieval.dense import opening_plan
    from memsearcher.retrieval.factory import open_modes
    from memsearcher.statistics import score_interval

    questions = _questions(Path("data/questions"))
    qrels = _qrels(Path("data"), questions)
    job.say(f"dense: {opening_plan(Path('data/index'))}")
    parts = open_modes(job.params, ("dense", "bm25"))
    words = _Words(parts["dense"])
    out = job.work / "retrieval"
    files.remove(out)
    ks = sorted(job.params.search.report_k)
    depth = max(*ks, 10)
    result: dict[str, dict[str, dict[str, dict[str, float]]]] = {mode: {} for mode in MODES}
    hops = {name: _hops(asked) for name, asked in questions.items()}
    total = sum(len(q) + sum(map(len, hops[name])) for name, q in questions.items()) * len(parts)
    with tqdm(total=total, unit=" searches", mininterval=2, desc="retrieval") as bar:
        for name, asked in questions.items():
            by_question = _search(parts, [q.text for q in asked], depth, job, bar.update)
            queries = [query for plan in hops[name] for query, _ in plan]
            by_hop = _search(parts, queries, depth, job, bar.update)
            for mode in MODES:
                runs = {q.id: hits for q, hits in zip(asked, by_question[mode], strict=True)}
                scores = _scores(runs, asked, qrels[name], ks, words)
                scores |= _hop_scores(parts["dense"], hops[name], by_hop[mode], ks)
                measured = {key: score_interval([v]) for key, v in scores.items() if v}
                result[mode][name] = {
                    key: {"value": i.mean, "low": i.low, "high": i.high, "n": i.n}
                    for key, i in measured.items()
                }
                _write(out / "runs" / f"{name}.{mode}.trec", measures.run_lines(runs, mode))
            if any(qrels[name].values()):
                _write(out / "qrels" / f"{name}.trec", measures.qrels_lines(qrels[name]))
    files.write_json(out / "metrics.json", result)
    inputs = {Path(dep).name: files.content_hash(Path(dep)) for dep in job.deps}
    files.write_json(out / "fingerprint.json", {**inputs, **job.chosen})
    files.publish(out, Path("results/retrieval"))
    _tell(job, result)


def _tell(job: Job, result: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
    flat = {
        f"{mode}/{name}/{measure}".replace("@", "_at_"): row["value"]
        for mode, sets in result.items()
        for name, rows in sets.items()
        for measure, row in rows.items()
    }
    job.track.metrics(flat)
    job.track.artifact(Path("results/retrieval/metrics.json"))
    for mode, sets in result.items():
        shown = {n: rows.get("recall@5") or rows.get("answer@5") for n, rows in sets.items()}
        job.say(
            f"{mode}: " + ", ".join(f"{n} {100 * r['value']:.1f}" for n, r in shown.items() if r)
        )


def _questions(folder: Path) -> dict[str, list[Question]]:
    from memsearcher.questions import DATASETS, read_questions

    found = {name: read_questions(folder / "test" / f"{name}.jsonl") for name in DATASETS}
    return found | {"dev": read_questions(folder / "dev.jsonl")}


def _qrels(data: Path, questions: dict[str, list[Question]]) -> dict[str, dict[str, "Groups"]]:
    """Groups by question id: from the qrels that came with the questions, else from gold titles."""
    from memsearcher.corpus import read_passages
    from memsearcher.retrieval.measures import gold_groups, gold_titles, read_qrels, title_key

    wanted = {title_key(t) for asked in questions.values() for q in asked for t in gold_titles(q)}
    ids_by_title: dict[str, list[str]] = {}
    for passage in read_passages(data / "corpus"):
        key = title_key(passage.title)
        if key in wanted:
            ids_by_title.setdefault(key, []).append(passage.id)
    qrels = {}
    for name, asked in questions.items():
        path = data / "questions" / "qrels" / f"{name}.trec"
        given = read_qrels(path) if path.is_file() else {}
        qrels[name] = {q.id: given.get(q.id) or gold_groups(q, ids_by_title) for q in asked}
    return qrels


def _search(
    parts: Mapping["Mode", "Retriever"],
    queries: Sequence[str],
    depth: int,
    job: Job,
    on_done: Callable[[int], object],
) -> dict[str, list[list[Hit]]]:
    """Hits by mode and query. Fusion is made of the two rankings at hand."""
    from memsearcher.retrieval.fusion import DEPTH, fuse

    found: dict[str, list[list[Hit]]] = {mode: [] for mode in MODES}
    for start in range(0, len(queries), BATCH):
        part = queries[start : start + BATCH]
        deep = []
        for mode, retriever in parts.items():
            deep.append(retriever.search(part, max(depth, DEPTH)))
            found[mode] += [hits[:depth] for hits in deep[-1]]
            on_done(len(part))
        rrf_k = job.params.search.rrf_k
        found["fusion"] += [fuse(rankings, depth, rrf_k) for rankings in zip(*deep, strict=True)]
    return found


def _scores(
    runs: "Runs",
    asked: Sequence[Question],
    groups: dict[str, "Groups"],
    ks: list[int],
    words: "_Words",
) -> Scores:
    from memsearcher.agent.scoring import normalise
    from memsearcher.retrieval import measures

    judged = [q.id for q in asked if groups[q.id]]
    scores: Scores = {
        f"recall@{k}": [measures.recall(runs[q], groups[q], k) for q in judged] for k in ks
    }
    scores |= measures.ranking_scores(runs, {q: groups[q] for q in judged})
    ranks = [
        measures.answer_rank(runs[q.id], q.golds, words, normalise)
        for q in asked
        if measures.has_answer_text(q, normalise)
    ]
    return scores | {
        f"answer@{k}": [float(rank is not None and rank <= k) for rank in ranks] for k in ks
    }


def _hops(asked: Sequence[Question]) -> list[list[tuple[str, str]]]:
    """(query, gold title) of each hop of each question whose plan names titles."""
    plans = [plan for q in asked if isinstance(plan := q.metadata.get("plan"), list)]
    hops = [[(hop["query"], hop["title"]) for hop in plan if hop["title"]] for plan in plans]
    return [plan for plan in hops if plan]


def _hop_scores(
    retriever: "Retriever",
    plans: Sequence[Sequence[tuple[str, str]]],
    found: Sequence[Sequence[Hit]],
    ks: list[int],
) -> Scores:
    """Share of a plan's hops whose own query finds a passage of the hop's title in the top k."""
    from memsearcher.retrieval.measures import title_key

    rankings = iter(found)
    ranks: list[list[float]] = []  # of each hop's title, by plan; infinite where it was not found
    for plan in plans:
        ranks.append([])
        for _, title in plan:
            wanted, hits = title_key(title), next(rankings)
            titles = ((h.rank, title_key(retriever.passage(h.passage_id).title)) for h in hits)
            ranks[-1].append(next((rank for rank, got in titles if got == wanted), inf))
    return {
        f"hop_recall@{k}": [sum(r <= k for r in plan) / len(plan) for plan in ranks] for k in ks
    }


class _Words:
    """Normalised title and text of a passage, remembered: modes return the same passages."""

    def __init__(self, retriever: "Retriever") -> None:
        self._retriever = retriever
        self._known: dict[str, str] = {}

    def __call__(self, passage_id: str) -> str:
        if passage_id not in self._known:
            from memsearcher.agent.scoring import normalise

            passage = self._retriever.passage(passage_id)
            self._known[passage_id] = normalise(f"{passage.title} {passage.text}")
        return self._known[passage_id]


def _write(path: Path, lines: list[str]) -> None:
    with files.atomic_write(path) as f:
        f.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main(STAGE, run)
