"""Intervals and paired tests, by scipy. Per-question scores in [0, 1] in, shares out.

The benchmarks are fixed strata: an average over them resamples questions inside each one and never
moves a question from one to another. Everything is deterministic: the seed is an argument.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 2000
_CELLS = 4_000_000  # numbers that one batch of resamples may hold in memory


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval (95% unless asked otherwise) and the number of questions."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Paired:
    """Policy minus baseline on the same questions. `wins`, `losses`: only one of the two was right.

    `p` is the exact two-sided McNemar test over the discordant pairs; 1.0 where there are none.
    """

    difference: Interval
    wins: int
    losses: int
    p: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval.

    >>> [round(100 * x, 1) for x in wilson(54, 125)]
    [34.8, 52.0]
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"wilson: {successes} successes of {n}")
    interval = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def em_interval(hits: Sequence[float]) -> Interval:
    """EM is 0 or 1 per question, so the interval is Wilson's: right even at 0 of n."""
    right = sum(1 for hit in hits if hit)
    return Interval(right / len(hits), *wilson(right, len(hits)), len(hits))


def bootstrap_mean(
    strata: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Interval:
    """Unweighted mean of the strata's means, percentile bootstrap inside each stratum.

    A stratum of one question has no spread to resample, so it is doubled: it then adds none.
    Where every score of every stratum is the same, low, mean and high are equal; the reader is
    told so by the table, not here.
    """
    if not strata or any(len(stratum) == 0 for stratum in strata):
        raise ValueError(f"bootstrap: strata of sizes {[len(s) for s in strata]}")
    arrays = [np.asarray(s, dtype=np.float64) for s in strata]
    mean = float(np.mean([a.mean() for a in arrays]))

    def mean_of_means(*samples: np.ndarray, axis: int) -> np.ndarray:
        return np.mean([s.mean(axis=axis) for s in samples], axis=0)

    result = stats.bootstrap(
        [np.repeat(a, 2) if len(a) == 1 else a for a in arrays],
        mean_of_means,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        batch=max(1, _CELLS // max(len(a) for a in arrays)),
        rng=np.random.default_rng(seed),
    )
    ci = result.confidence_interval
    return Interval(mean, float(ci.low), float(ci.high), sum(map(len, arrays)))


def score_interval(strata: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """`bootstrap_mean` of scores in [0, 1], but an interval also where all are 0 or all are 1.

    Resampling equal scores gives no width, as if nothing could be learnt from more questions. There
    each stratum's Wilson interval (of the share of scores that are not 0) is used, combined by
    square-and-add (MOVER, Zou and Donner 2008).
    """
    scores = {score for stratum in strata for score in stratum}
    if scores not in ({0.0}, {1.0}):
        return bootstrap_mean(strata, seed=seed)
    mean = scores.pop()
    bounds = [wilson(round(mean * len(stratum)), len(stratum)) for stratum in strata]
    width = sum((high - low) ** 2 for low, high in bounds) ** 0.5 / len(strata)
    low, high = (0.0, width) if mean == 0 else (1 - width, 1.0)
    return Interval(mean, low, high, sum(map(len, strata)))


def paired(
    policy: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], *, seed: int = 0
) -> Paired:
    """Difference of two policies' scores: the same questions in the same order, by stratum."""
    shapes = [len(s) for s in policy], [len(s) for s in baseline]
    if shapes[0] != shapes[1]:
        raise ValueError(f"paired: strata of sizes {shapes[0]} against {shapes[1]}")
    differences = [
        [a - b for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(policy, baseline, strict=True)
    ]
    pairs = [
        (bool(a), bool(b))
        for mine, theirs in zip(policy, baseline, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    wins, losses = pairs.count((True, False)), pairs.count((False, True))
    return Paired(bootstrap_mean(differences, seed=seed), wins, losses, mcnemar(wins, losses))


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p-value of McNemar's test.

    >>> round(mcnemar(8, 1), 4)
    0.0391
    """
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
