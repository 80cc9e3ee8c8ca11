"""Training seeds: policies named `x-seed2`, `x-seed3` … are others of the policy `x`."""

import re
from itertools import combinations

from memsearcher.report.collect import Collected, Evaluated
from memsearcher.statistics import Interval, mean_over_seeds, over_seeds

_SEED = re.compile(r"(?P<name>.+)-seed\d+")


def groups(found: Collected) -> dict[str, list[Evaluated]]:
    """Policies by their name without the seed. Several of one name are one row over seeds."""
    out: dict[str, list[Evaluated]] = {}
    for policy in found.policies:
        match = _SEED.fullmatch(policy.name)
        out.setdefault(match["name"] if match else policy.name, []).append(policy)
    return out


def averages(found: Collected) -> list[dict]:
    """Of each policy with several seeds."""
    out = []
    for name, runs in groups(found).items():
        if len(runs) > 1 and len({run.setting for run in runs}) == 1:
            mean = mean_over_seeds([_average(run) for run in runs])
            row = {"policy": name, "seeds": [run.name for run in runs], "em": mean.mean}
            out.append(row | {"interval": [mean.low, mean.high], "n": mean.n})
    return out


def tests(found: Collected) -> list[dict]:
    """Pairs of policies of which one at least has several seeds, where all settings agree, on the
    questions that all of them answered."""
    out = []
    for (baseline, theirs), (policy, ours) in combinations(groups(found).items(), 2):
        runs = [*ours, *theirs]
        if len(runs) == 2 or len({run.setting for run in runs}) > 1:
            continue
        scores = {run.name: run.by_dataset() for run in runs}
        shared = {
            dataset: sorted(set.intersection(*(set(s.get(dataset, ())) for s in scores.values())))
            for dataset in scores[runs[0].name]
        }
        shared = {dataset: ids for dataset, ids in shared.items() if ids}
        if not shared:
            continue
        sides = [
            [[[scores[r.name][d][i] for i in ids] for d, ids in shared.items()] for r in side]
            for side in (ours, theirs)
        ]
        test = over_seeds(*sides)
        d = test.difference
        out.append(
            {"policy": policy, "baseline": baseline, "em_difference": d.mean}
            | {"interval": [d.low, d.high], "n": d.n, "p": test.p}
            | {"seeds": [len(ours), len(theirs)]}
        )
    return out


def _average(policy: Evaluated) -> Interval:
    scores = policy.metrics["average"]
    low, high = scores["em_interval"]
    return Interval(scores["em"], low, high, scores["n"])
