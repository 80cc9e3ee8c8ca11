"""Training with the next step's roll-out behind each update, against one after the other."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from memsearcher.files import ROOT
from memsearcher.params import load
from memsearcher.statistics import wilson

sys.path.insert(0, str(ROOT / "tests"))
from plumbing import clone

TIS_CAP = 2.0  # in both, so that the only difference is when a step is rolled out


def overlap(
    demo: Path, seeds: int, steps: int, say: Callable[[str, Sequence[float]], None]
) -> None:
    """From `demo`'s data and warm-up, both read-only."""
    seconds: dict[int, list[float]] = {0: [], 1: []}
    right = {0: 0.0, 1: 0.0}
    asked = 0
    with tempfile.TemporaryDirectory() as folder:
        root = clone(Path(folder))
        (root / "models").mkdir()
        for name in ("data", "models/warmup"):
            (root / name).symlink_to(demo / name)
        for seed in range(seeds):
            for ahead in (0, 1):
                records, dev = _train(root, seed, ahead, steps)
                later = records[2:]  # the first has nothing behind it
                took = sum(r["seconds"] - r.get("seconds_dev", 0.0) for r in later) / len(later)
                seconds[ahead].append(took)
                right[ahead] += records[-1]["dev_em"] * dev
                staleness = max(r["staleness_max"] for r in records)
                assert staleness == ahead, f"sampled {staleness} updates ago"
            asked += dev
    for ahead in (0, 1):
        say(f"overlap_{ahead}_seconds_per_step", seconds[ahead])
    pairs = zip(seconds[0], seconds[1], strict=True)
    say("overlap_speedup", [one / two for one, two in pairs])
    for ahead in (0, 1):
        interval = wilson(round(right[ahead]), asked)
        say(f"overlap_{ahead}_dev_em", [right[ahead] / asked, *interval])


def _train(root: Path, seed: int, ahead: int, steps: int) -> tuple[list[dict], int]:
    """The steps' records and the number of dev questions."""
    changes = [f"seed={seed}", f"train.async_steps={ahead}", f"train.tis_cap={TIS_CAP}"]
    changes += [f"train.steps={steps}", f"train.eval_every={steps}", "tracking.enabled=false"]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "MASTER_PORT")}
    for words in (["flows.compose", *changes], ["stages.train", "memsearcher"]):
        subprocess.run(
            [sys.executable, "-m", *words],
            cwd=root,
            env=inherited,
            stdout=sys.stderr,
            check=True,
        )
    made = root / "results" / "train" / "memsearcher"
    records = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "reward" in r], load(root / "params.yaml").train.dev_questions
