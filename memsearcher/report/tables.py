"""The tables, once as data (results.json), once as Markdown (results.md, and a run's end)."""

from collections.abc import Iterator, Mapping
from itertools import combinations

from memsearcher import published
from memsearcher.published import COLUMNS
from memsearcher.report.collect import Collected, Evaluated, deviations
from memsearcher.statistics import paired

LABELS = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
INVENTED = (
    "The questions, names and passages of this run are invented (questions.kind is demo). "
    "Its figures show that the pipeline works. They do NOT compare with the published rows."
)
SAMPLED = "Only a seeded sample of {n} questions per benchmark was asked: mind the intervals."


def notices(found: Collected) -> list[str]:
    """What a reader must know before the first number."""
    out = [INVENTED] if found.invented else []
    if found.params.evaluate.sample is not None:
        out.append(SAMPLED.format(n=found.params.evaluate.sample))
    incomplete = [p.name for p in found.policies if set(p.metrics["datasets"]) != set(COLUMNS)]
    if incomplete:
        out.append(f"The average of {', '.join(incomplete)} is not over all seven benchmarks.")
    out += [f"Not comparable: {conflict}." for conflict in found.conflicts]
    return out


def results(found: Collected) -> dict:
    """results.json. Scores are shares in [0, 1] for our rows, EM × 100 for the published ones."""
    return {
        "experiment": found.params.tracking.experiment,
        "invented_questions": found.invented,
        "notices": notices(found),
        "policies": {
            p.name: p.metrics | {"agent": p.agent, "setting": p.setting} for p in found.policies
        },
        "paired": paired_tests(found),
        "published": [
            {
                "name": row.name,
                "em_x100": dict(zip(COLUMNS, row.scores, strict=True)) | {"average": row.average},
                "second_hand": row.second_hand,
                "note": row.note,
            }
            for row in (published.ROWS if found.params.report.published else ())
        ],
        "retrieval": found.retrieval,
        "training": {
            c.name: {"steps": len(c.rows), "last": c.rows[-1] if c.rows else {}}
            | {"summary": c.summary}
            for c in found.curves
        },
        "stages": found.stages,
        "deviations": [
            {"parameter": k, "paper": a, "ours": b} for k, a, b in deviations(found.params)
        ],
        "missing": found.missing,
        "leftovers": found.leftovers,
    }


def paired_tests(found: Collected) -> list[dict]:
    """Every pair of policies on the questions that both answered, where the settings agree."""
    out = []
    for first, second in combinations(found.policies, 2):
        ours, theirs = _by_dataset(second), _by_dataset(first)
        shared = {d: sorted(ours[d].keys() & theirs[d].keys()) for d in ours if d in theirs}
        shared = {d: ids for d, ids in shared.items() if ids}
        if not shared or first.setting != second.setting:
            continue
        test = paired(
            [[ours[d][i] for i in ids] for d, ids in shared.items()],
            [[theirs[d][i] for i in ids] for d, ids in shared.items()],
            seed=found.params.seed,
        )
        d = test.difference
        out.append(
            {"policy": second.name, "baseline": first.name, "em_difference": d.mean}
            | {"interval": [d.low, d.high], "n": d.n}
            | {"wins": test.wins, "losses": test.losses, "mcnemar_p": test.p}
        )
    return out


MEASURES = {  # in metrics.json, {k} standing for the k nearest to search.k
    "recall@{k}": "Recall@{k}: supporting titles among the first {k}, the question as the query",
    "answer@{k}": "Answer@{k}: some passage among the first {k} holds a gold answer",
    "hop_recall@{k}": "Hop recall@{k}: as recall, with the plan's own queries",
    "mrr@10": "MRR@10",
    "ndcg@10": "nDCG@10",
}


def retrieval(
    found: Mapping[str, Mapping[str, Mapping[str, dict]]], k: int
) -> Iterator[tuple[str, list[str], list[list[dict | None]]]]:
    """(title, columns, rows) per measure: modes by data sets, cells as in retrieval's metrics.json.

    The first cell of a row is {"name": mode}; None stands where nothing could be judged.
    """
    there = dict.fromkeys(name for by_set in found.values() for name in by_set)
    sets = [*(c for c in COLUMNS if c in there), *(name for name in there if name not in COLUMNS)]
    for measure, title in MEASURES.items():
        key = measure.format(k=k)
        rows = [
            [{"name": mode}, *(by_set.get(name, {}).get(key) for name in sets)]
            for mode, by_set in found.items()
        ]
        if any(cell for row in rows for cell in row[1:]):
            yield title.format(k=k), [LABELS.get(name, name) for name in sets], rows


def shown_k(found: Mapping[str, Mapping[str, Mapping[str, dict]]], k: int) -> int:
    """search.k where recall was measured at it, else the nearest k that was."""
    measured = {
        int(key.partition("@")[2])
        for by_set in found.values()
        for measures in by_set.values()
        for key in measures
        if key.startswith("recall@")
    }
    return min(measured, key=lambda other: (abs(other - k), other), default=k)


def _by_dataset(policy: Evaluated) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for row in policy.predictions:
        out.setdefault(row["dataset"], {})[row["question_id"]] = float(row["em"])
    return out


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def spread(interval: list[float]) -> str:
    return f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}"


def signed(interval: list[float]) -> str:
    return f"{100 * interval[0]:+.1f} to {100 * interval[1]:+.1f}"


def markdown(data: dict) -> str:
    """results.md from results.json's data."""
    head = ["policy", *LABELS.values(), "average"]
    lines = ["# Results", "", *(f"> **{text}**\n" for text in data["notices"])]
    lines += [
        "EM × 100 with its 95% interval (benchmarks: Wilson; average: stratified bootstrap).",
        "",
    ]
    lines += [_line(head), _line(["---"] * len(head))]
    for name, metrics in data["policies"].items():
        cells = [metrics["datasets"].get(dataset) for dataset in COLUMNS] + [metrics["average"]]
        texts = [f"{percent(c['em'])} ({spread(c['em_interval'])})" if c else "–" for c in cells]
        lines.append(_line([f"{name} (n = {metrics['count']})", *texts]))
    if data["paired"]:
        names = ["policy", "baseline", "EM difference", "n", "won", "lost", "McNemar p"]
        lines += ["", "## Paired tests", "", _line(names), _line(["---"] * len(names))]
        for test in data["paired"]:
            gap = f"{100 * test['em_difference']:+.1f} ({signed(test['interval'])})"
            counts = [str(test[key]) for key in ("n", "wins", "losses")]
            row = [test["policy"], test["baseline"], gap, *counts, f"{test['mcnemar_p']:.2g}"]
            lines.append(_line(row))
    if data["published"]:
        lines += ["", "## Published rows, not measured here", ""]
        lines += [f"> **{INVENTED}**", ""] if data["invented_questions"] else []
        lines += ["EM × 100 as printed; † second-hand: its own table was not available.", ""]
        lines += [_line(["row", *head[1:]]), _line(["---"] * len(head))]
        for row in data["published"]:
            scores = [row["em_x100"][key] for key in (*COLUMNS, "average")]
            texts = ["–" if s is None else f"{s:.1f}" for s in scores]
            lines.append(_line([row["name"] + (" †" if row["second_hand"] else ""), *texts]))
    for title, entries in (("Missing", data["missing"]), ("Left over", data["leftovers"])):
        if entries:
            lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries)]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
