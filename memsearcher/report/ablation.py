"""EM by memory cap, from ablations/*.jsonl (flows/ablate.py writes them, outside DVC's graph).

One line per cap, seed, policy and benchmark (or "average"):
{"name","overrides","seed","policy","benchmark","em","low","high","n","cut_rate","fingerprint"};
the cap is overrides["agent.max_memory_tokens"] where each cap was trained for, or
overrides["evaluate.max_memory_tokens"] where one policy was evaluated under all of them. A line
that comes again replaces the earlier one; lines without a cap are passed over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.published import COLUMNS, LABELS
from memsearcher.report.figure import Figure, Plot, colours
from memsearcher.statistics import Interval, mean_over_seeds

CAPS = {"agent.max_memory_tokens": "", "evaluate.max_memory_tokens": ", in evaluation only"}
FOLLOWS = ("max_memory_tokens", "max_context_tokens")  # what a cap may change of the budgets
KEYS = ("overrides", "seed", "policy", "benchmark", "em", "low", "high", "n", "cut_rate")


@dataclass(frozen=True, slots=True)
class Cell:
    """EM of one policy on one benchmark under one cap. `seeds`: whose scores these are; with
    several, `em` is their mean. `cut_rate`: share of memories that were cut at the cap."""

    policy: str
    benchmark: str
    cap: int
    em: Interval
    cut_rate: float
    seeds: list[int]
    fingerprints: list[object]


@dataclass(frozen=True, slots=True)
class Ablation:
    cells: list[Cell] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


def read(folder: Path, caps: Sequence[int] | None) -> Ablation:
    """`caps`: those to show, None for all that are there."""
    rows: dict[tuple[str, str, int, int], dict] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, row in files.numbered_jsonl(path):
            if lacks := [key for key in KEYS if key not in row]:
                raise BadInput(f"{path}:{number}: no {', '.join(lacks)}")
            for cap, where in CAPS.items():
                if row["overrides"].get(cap) is not None:
                    name = row["policy"] + where
                    rows[name, row["benchmark"], int(row["overrides"][cap]), row["seed"]] = row
    there = sorted({cap for _, _, cap, _ in rows})
    shown = there if caps is None else [cap for cap in there if cap in caps]
    kept = {key: row for key, row in rows.items() if key[2] in shown}
    return Ablation(
        list(_cells(kept)),
        [
            f"memory cap {cap}: no row of it in {folder.name}"
            for cap in caps or ()
            if cap not in there
        ],
        [f"{folder.name}: memory cap {cap}" for cap in there if cap not in shown],
        list(_conflicts(list(kept.values()))),
    )


def figures(cells: Sequence[Cell]) -> Iterator[Figure]:
    """A figure per policy, a line per benchmark, the average thick."""
    for number, policy in enumerate(dict.fromkeys(cell.policy for cell in cells)):
        mine = [cell for cell in cells if cell.policy == policy]
        there = {cell.benchmark for cell in mine}
        names = [name for name in (*COLUMNS, "average") if name in there]
        names += sorted(there - set(names))
        data: list[Plot] = []
        for name, colour in zip(names, colours(names), strict=True):
            line = sorted((c for c in mine if c.benchmark == name), key=lambda c: c.cap)
            whole = name == "average"
            trace: Plot = {
                "type": "scatter",
                "mode": "lines+markers",
                "name": LABELS.get(name, name),
            }
            trace |= {"x": [str(c.cap) for c in line], "y": [100 * c.em.mean for c in line]}
            trace |= {
                "line": {"color": "#888888" if whole else colour, "width": 4 if whole else 1.6}
            }
            trace["text"] = [f"n = {c.em.n}, cut {100 * c.cut_rate:.1f}%" for c in line]
            error: Plot = {"type": "data", "symmetric": False, "thickness": 1, "width": 3}
            error["array"] = [100 * (c.em.high - c.em.mean) for c in line]
            error["arrayminus"] = [100 * (c.em.mean - c.em.low) for c in line]
            data.append(trace | {"error_y": error})
        caps = [str(cap) for cap in sorted({c.cap for c in mine})]
        axis: Plot = {"title": "memory cap, tokens", "type": "category", "categoryarray": caps}
        layout: Plot = {"xaxis": axis | {"categoryorder": "array"}}
        layout["yaxis"] = {"title": "EM × 100", "rangemode": "tozero"}
        yield Figure(f"caps-{number}", f"EM by memory cap: {policy}", data, layout)


def _cells(rows: dict[tuple[str, str, int, int], dict]) -> Iterator[Cell]:
    groups: dict[tuple[str, str, int], list[dict]] = {}
    for (policy, benchmark, cap, _), row in sorted(rows.items(), key=lambda item: item[0][2:]):
        groups.setdefault((policy, benchmark, cap), []).append(row)
    for (policy, benchmark, cap), found in groups.items():
        yield Cell(
            policy,
            benchmark,
            cap,
            mean_over_seeds([Interval(r["em"], r["low"], r["high"], r["n"]) for r in found]),
            sum(r["cut_rate"] for r in found) / len(found),
            [r["seed"] for r in found],
            [r.get("fingerprint") for r in found],
        )


def _conflicts(rows: Sequence[dict]) -> Iterator[str]:
    """In what else than the cap do the rows differ?"""
    prints = [row.get("fingerprint") for row in rows]
    spelt = [each for each in prints if isinstance(each, dict)]
    if len(spelt) < len(prints):
        yield "rows of the memory ablation, whose fingerprints are not spelt out"
        return
    plain = [_without_cap(each) for each in spelt]
    keys = sorted({key for each in plain for key in each if each[key] != plain[0].get(key)})
    if keys:
        yield f"rows of the memory ablation differ in {', '.join(keys)}"


def _without_cap(fingerprint: dict) -> dict[str, object]:
    """All that must agree: not the policy, its seed and the budgets that follow from the cap."""
    budgets = fingerprint.get("budgets", {}).items()
    rest = {k: v for k, v in fingerprint.items() if k not in ("policy", "agent", "prompt", "seed")}
    return rest | {"budgets": {k: v for k, v in budgets if k not in FOLLOWS}}
