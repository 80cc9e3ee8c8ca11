"""What training gained over several seeds of one experiment: each seed's numbers and the pool.

    python -m benchmarks.seeds FOLDER FOLDER ... [--policy memsearcher] [--baseline warmup]

Each FOLDER is a checkout in which the experiment has run with another `seed`. Greedy EM × 100, the
average of the benchmarks. The first pooled interval is over questions (a question's seeds are one),
the second over questions and seeds.
"""

import argparse
from pathlib import Path

from memsearcher import files
from memsearcher.params import load
from memsearcher.statistics import Interval, bootstrap_mean, over_seeds, paired, score_interval


def strata(folder: Path, policy: str) -> list[list[float]]:
    """EM of each question, by benchmark, both in one order for every policy."""
    rows = files.read_jsonl(folder / "results" / "evaluate" / policy / "predictions.jsonl")
    em: dict[str, dict[str, float]] = {}
    for row in rows:
        em.setdefault(row["dataset"], {})[row["question_id"]] = row["em"]
    return [[em[name][i] for i in sorted(em[name])] for name in sorted(em)]


def percent(x: Interval, sign: str = "") -> str:
    return f"{100 * x.mean:{sign}.1f} ({100 * x.low:{sign}.1f} to {100 * x.high:{sign}.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--policy", default="memsearcher")
    parser.add_argument("--baseline", default="warmup")
    chosen = parser.parse_args()
    gains = []
    print(f"| seed | {chosen.baseline} | {chosen.policy} | difference | dev EM |\n{'|---' * 5}|")
    for folder in chosen.folders:
        after, before = strata(folder, chosen.policy), strata(folder, chosen.baseline)
        records = files.read_jsonl(folder / "results" / "train" / chosen.policy / "metrics.jsonl")
        dev = ", ".join(f"{r['dev_em']:.3f}" for r in records if r.get("dev_em") is not None)
        cells = [str(load(folder / "params.yaml").seed)]
        cells += [percent(score_interval(before)), percent(score_interval(after))]
        cells += [percent(paired(after, before).difference, "+"), dev]
        print(f"| {' | '.join(cells)} |")
        gains.append(
            [
                [a - b for a, b in zip(*pair, strict=True)]
                for pair in zip(after, before, strict=True)
            ]
        )
    pooled = [
        [sum(of_question) / len(gains) for of_question in zip(*runs, strict=True)]
        for runs in zip(*gains, strict=True)
    ]
    print(f"\npooled over questions: {percent(bootstrap_mean(pooled), '+')}")
    if len(gains) > 1:
        nothing = [[0.0] * len(stratum) for stratum in pooled]
        both = over_seeds(gains, [nothing])
        print(f"over questions and seeds: {percent(both.difference, '+')}, p = {both.p:.1g}")


if __name__ == "__main__":
    main()
