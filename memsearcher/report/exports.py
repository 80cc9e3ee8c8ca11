"""For DVC: metrics.json (`dvc metrics show`, `dvc exp show`) and plots/ (`dvc plots show`).

Small copies of what results.json and the journals hold. DVC draws one plot per file, so each folder
of plots/ that dvc.yaml names holds a file per policy or run.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from memsearcher import files
from memsearcher.published import COLUMNS
from memsearcher.report.collect import Collected

TRAINING = ("reward", "dev_em", "kl", "entropy", "turns")


def write(found: Collected, folder: Path) -> None:
    files.write_json(folder / "metrics.json", {p.name: _scores(p.metrics) for p in found.policies})
    for policy in found.policies:
        scores = policy.metrics["datasets"] | {"average": policy.metrics["average"]}
        rows = [(name, scores[name]["em"]) for name in (*COLUMNS, "average") if name in scores]
        _table(folder / f"plots/em/{policy.name}.csv", ("benchmark", "em"), rows)
        turns = policy.metrics["behaviour"]["context_tokens_by_turn"]
        tokens = [(row["turn"], row["mean"]) for row in turns]
        _table(folder / f"plots/context/{policy.name}.csv", ("turn", "tokens"), tokens)
    for curve in found.curves:
        for measure in TRAINING if curve.stage == "train" else ():
            points = [(row["step"], row[measure]) for row in curve.rows if measure in row]
            path = folder / f"plots/{measure}/{curve.agent}.csv"
            _table(path, ("step", measure), [p for p in points if math.isfinite(p[1])])


def _scores(metrics: dict) -> dict[str, float]:
    average, behaviour = metrics["average"], metrics["behaviour"]
    scores = {f"em_{name}": scores["em"] for name, scores in metrics["datasets"].items()}
    scores |= {f"{name}_average": average[name] for name in ("em", "f1", "cover_em")}
    return scores | {name: behaviour[name] for name in ("turns", "tokens", "flops")}


def _table(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with files.atomic_write(path) as f:
        table = csv.writer(f, lineterminator="\n")
        table.writerow(head)
        table.writerows(rows)
