"""A grid of experiments side by side, e.g. memory caps × seeds.

    python -m flows.ablate memory agent.max_memory_tokens=16,32,64 seed=17,18
    python -m flows.ablate memory-at-evaluation evaluate.max_memory_tokens=16,32,64
    python -m flows.ablate smoke-memory experiment=smoke agent.max_memory_tokens=16,24

Several values of a key are an axis of the grid (one, as in `seed=choice(17)`, may be), a plain
value holds for all cells; they are composed as `python -m flows.compose` does. The first line
trains each cell anew, the second only evaluates with another cap. Cells run one after the other in
a worktree that shares DVC's cache (workspace.py): what a cell shares with another one, or with an
earlier day, is taken from there.

Out come ablations/<name>.jsonl, one line per cell, policy and benchmark, for the report's figure,
and the MLflow experiment "ablation <name>": one run per cell and policy, its axes as parameters and
its figures under the same names.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from prefect import flow
from prefect.artifacts import create_table_artifact
from yaml import safe_load

from flows.lock import only_one
from flows.pipeline import ends_in_a_line, pipeline
from flows.workspace import compose, open_worktree
from memsearcher import files, tracking
from memsearcher.files import ROOT, BadInput
from memsearcher.params import Params, load

FOLDER = ROOT / "ablations"
AVERAGE = "average"


@flow(name="ablate", flow_run_name="ablate {name}", persist_result=False)
def ablate(name: str, overrides: list[str]) -> None:
    """The grid that the overrides span; its rows replace those of an earlier grid of this name."""
    if not re.fullmatch(r"[\w-]+", name):
        raise BadInput(f"ablate: the name {name!r} is to be letters, digits, - and _")
    fixed, axes = grid(overrides)
    rows: list[dict] = []
    with only_one():
        folder = open_worktree(f"ablate-{name}", as_edited=True)
        for cell in cells(axes):
            compose(folder, [*fixed, *(f"{key}={value}" for key, value in cell.items())])
            title = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in cell.items())
            print(f"ablate: {name}: {title or 'one cell'}", flush=True)
            pipeline.with_options(flow_run_name=title or name)(str(folder), ["evaluate"])
            for policy, found in collect(name, cell, folder):
                rows += found
                _track(name, cell, policy, found, load(folder / "params.yaml"))
    files.write_jsonl(FOLDER / f"{name}.jsonl", rows)
    averages = [row for row in rows if row["benchmark"] == AVERAGE]
    create_table_artifact(
        [
            {**row["overrides"], **{k: row[k] for k in ("policy", "em", "low", "high")}}
            for row in averages
        ],
        key=f"ablation-{name.lower().replace('_', '-')}",
    )
    print(f"{len(rows)} rows in {FOLDER / name}.jsonl; average EM:")
    for row in averages:
        where = ", ".join(f"{k}={v}" for k, v in row["overrides"].items())
        print(
            f"  {where:40} {row['policy']:16} {row['em']:.3f} ({row['low']:.3f}–{row['high']:.3f})"
        )


def grid(overrides: list[str]) -> tuple[list[str], dict[str, list[object]]]:
    """Overrides with one value as they are, and the values of each key that has several.

    >>> grid(["experiment=smoke", "agent.max_memory_tokens=16,32", "seed=range(3,5)"])
    (['experiment=smoke'], {'agent.max_memory_tokens': [16, 32], 'seed': [3, 4]})
    """
    fixed: list[str] = []
    axes: dict[str, list[object]] = {}
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as e:
        raise BadInput(f"ablate: {str(e).splitlines()[0]}") from e
    for override in parsed:
        if override.is_sweep_override():
            axes[override.key_or_group] = [safe_load(v) for v in override.sweep_string_iterator()]
        else:
            fixed.append(str(override.input_line))
    return fixed, axes


def cells(axes: Mapping[str, list[object]]) -> list[dict[str, object]]:
    """Last axis fastest, so that neighbours have most in common with the cell before them.

    >>> cells({"cap": [16, 32], "seed": [1, 2]})[:2]
    [{'cap': 16, 'seed': 1}, {'cap': 16, 'seed': 2}]
    """
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def collect(
    name: str, cell: Mapping[str, object], folder: Path
) -> Iterator[tuple[str, list[dict]]]:
    """(policy, its row per benchmark and for their average) of the cell that `folder` holds. Only
    policies that the parameters name: leftovers of another cell are never read."""
    params = load(folder / "params.yaml")
    for policy in params.policies:
        metrics = files.read_json(folder / "results" / "evaluate" / policy / "metrics.json")
        scores = {**metrics["datasets"], AVERAGE: metrics["average"]}
        yield (
            policy,
            [
                {
                    "name": name,
                    "overrides": dict(cell),
                    "seed": params.seed,
                    "policy": policy,
                    "benchmark": benchmark,
                    "em": each["em"],
                    "low": each["em_interval"][0],
                    "high": each["em_interval"][1],
                    "n": each["n"],
                    "cut_rate": metrics["behaviour"]["memory_cut_rate"],
                    "fingerprint": metrics["fingerprint"],
                }
                for benchmark, each in scores.items()
            ],
        )


def _track(
    name: str, cell: Mapping[str, object], policy: str, rows: list[dict], params: Params
) -> None:
    """A run that the compare page puts beside the other cells'."""
    title = " ".join([policy, *(f"{key.split('.')[-1]}={value}" for key, value in cell.items())])
    known = {"ablation": name, "cell": files.digest([rows[0]["fingerprint"], title])}
    run = tracking.open_run(params, title, experiment=f"ablation {name}", key=known)
    cap = params.evaluate.max_memory_tokens or params.agent.max_memory_tokens
    run.params({"policy": policy, "seed": params.seed, "memory_cap": cap, **cell})
    scores = {row["benchmark"]: row["em"] for row in rows}
    run.metrics({"em": scores.pop(AVERAGE)})  # first: it is the one that the page then plots
    run.metrics({f"em_{benchmark}": em for benchmark, em in scores.items()})
    run.metrics({"cut_rate": rows[0]["cut_rate"]})
    run.close("FINISHED")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.ablate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name")
    parser.add_argument("overrides", nargs="*", metavar="key=value,value")
    arguments = parser.parse_args()
    with ends_in_a_line():
        ablate(arguments.name, arguments.overrides)


if __name__ == "__main__":
    main()
