"""The tables, once as data (results.json), once as Markdown (results.md, and a run's end)."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import combinations

from memsearcher import published
from memsearcher.published import COLUMNS, LABELS
from memsearcher.report import seeds
from memsearcher.report.collect import Collected, deviations
from memsearcher.statistics import paired

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
        "over_seeds": {"averages": seeds.averages(found), "tests": seeds.tests(found)},
        "ablation": ablation(found),
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
        "retrieval_fingerprint": found.retrieval_fingerprint,
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
        ours, theirs = second.by_dataset(), first.by_dataset()
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


def ablation(found: Collected) -> list[dict]:
    """Rows of the table by cap: {"policy", "cap", "cells": {benchmark: cell}}."""
    rows: dict[tuple[str, int], dict] = {}
    for cell in found.ablation.cells:
        row = rows.setdefault((cell.policy, cell.cap), {"policy": cell.policy, "cap": cell.cap})
        row.setdefault("cells", {})[cell.benchmark] = asdict(cell)
    return [rows[key] for key in sorted(rows)]


def si(value: float) -> str:
    """
    >>> si(23520.0), si(3.1e12), si(7)
    ('23.5 k', '3.10 T', '7')
    """
    for size, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return (
                f"{value / size:.3g}{letter}"
                if abs(value) >= 10 * size
                else f"{value / size:.2f}{letter}"
            )
    return f"{value:.3g}"


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
    if data["over_seeds"]["averages"]:
        lines += ["", "## Over training seeds", ""]
        lines += [_line(["policy", "seeds", "average EM"]), _line(["---"] * 3)]
        for row in data["over_seeds"]["averages"]:
            cell = f"{percent(row['em'])} ({spread(row['interval'])})"
            lines.append(_line([row["policy"], str(len(row["seeds"])), cell]))
        names = ["policy", "baseline", "EM difference", "seeds", "n", "p"]
        lines += ["", _line(names), _line(["---"] * len(names))]
        for test in data["over_seeds"]["tests"]:
            gap = f"{100 * test['em_difference']:+.1f} ({signed(test['interval'])})"
            counts = ["{} and {}".format(*test["seeds"]), str(test["n"]), f"{test['p']:.2g}"]
            lines.append(_line([test["policy"], test["baseline"], gap, *counts]))
    if data["policies"]:
        names = ["policy", "turns", "tokens", "FLOPs", "with the prefix kept", "seconds"]
        lines += ["", "## Cost of a question", "", _line(names), _line(["---"] * len(names))]
        for name, metrics in data["policies"].items():
            b = metrics["behaviour"]
            counts = [si(b[key]) for key in ("tokens", "flops", "flops_prefix_kept")]
            seconds = f"{b['seconds_per_question']:.2f}"
            lines.append(_line([name, f"{b['turns']:.2f}", *counts, seconds]))
    if data["ablation"]:
        names = ["policy", "memory cap", *LABELS.values(), "average"]
        lines += ["", "## EM by memory cap", "", _line(names), _line(["---"] * len(names))]
        for row in data["ablation"]:
            cells = [row["cells"].get(key) for key in (*COLUMNS, "average")]
            texts = [_em(c["em"]) if c else "–" for c in cells]
            lines.append(_line([row["policy"], str(row["cap"]), *texts]))
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


def _em(interval: dict[str, float]) -> str:
    return f"{percent(interval['mean'])} ({spread([interval['low'], interval['high']])})"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
