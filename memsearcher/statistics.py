"""Intervals and paired tests, by scipy. Per-question scores in [0, 1] in, shares out.

The benchmarks are fixed strata: an average over them resamples questions inside each one and never
moves a question from one to another. Everything is deterministic: the seed is an argument.
Several training seeds of a policy are a second sample beside that of the questions: `over_seeds`.
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
    """Difference of two policies' scores: the same questions in the same order, by stratum.

    Where no question tells them apart, the interval is as wide as that of a score of 0 on so many
    questions, to both sides.
    """
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
    interval = bootstrap_mean(differences, seed=seed)
    if not any(difference for stratum in differences for difference in stratum):
        half = score_interval([[0.0] * len(stratum) for stratum in differences]).high
        interval = Interval(0.0, -half, half, interval.n)
    return Paired(interval, wins, losses, mcnemar(wins, losses))


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """Policy minus baseline. `p`: two-sided, by the t distribution of `difference`'s interval."""

    difference: Interval
    p: float


def over_seeds(
    policy: Sequence[Sequence[Sequence[float]]], baseline: Sequence[Sequence[Sequence[float]]]
) -> OverSeeds:
    """Scores by seed, stratum and question; the same questions in the same order everywhere.

    The difference of the averages over seeds. Its variance has two parts, which are added: that of
    the questions (of each question's difference averaged over seeds, by stratum) and that of the
    seeds (s²/k on each side that has several). Welch and Satterthwaite's degrees of freedom: a
    bootstrap of three seeds would give intervals a third too narrow. A side of one seed adds no
    spread of seeds, which then is not in the interval.
    """
    shapes = [[len(stratum) for stratum in run] for run in (*policy, *baseline)]
    if not policy or not baseline or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"over_seeds: strata of sizes {shapes}")
    sides = [
        [[np.asarray(s, dtype=np.float64) for s in run] for run in side]
        for side in (policy, baseline)
    ]
    averages = [np.array([np.mean([s.mean() for s in run]) for run in side]) for side in sides]
    mean = float(averages[0].mean() - averages[1].mean())
    parts: list[tuple[float, int]] = []  # (variance, degrees of freedom)
    for runs in averages:
        if len(runs) > 1:
            parts.append((float(runs.var(ddof=1)) / len(runs), len(runs) - 1))
    strata = len(shapes[0])
    for number in range(strata):
        mine, theirs = (np.mean([run[number] for run in side], axis=0) for side in sides)
        if (n := len(mine)) > 1:
            parts.append((float((mine - theirs).var(ddof=1)) / n / strata**2, n - 1))
    variance = sum(v for v, _ in parts)
    n = sum(shapes[0])
    if variance == 0:
        return OverSeeds(Interval(mean, mean, mean, n), 1.0 if mean == 0 else 0.0)
    freedom = variance**2 / sum(v**2 / dof for v, dof in parts)
    spread = stats.t(freedom, scale=variance**0.5)
    half = float(spread.ppf(0.975))
    return OverSeeds(Interval(mean, mean - half, mean + half, n), float(2 * spread.sf(abs(mean))))


def mean_over_seeds(runs: Sequence[Interval]) -> Interval:
    """The mean of runs that differ in their training seed alone, on the same questions.

    Questions and seeds are two samples: the questions' variance is the mean of the runs' own, since
    all runs share them, the seeds' is s²/k. One run keeps its interval.
    """
    if len(runs) == 1:
        return runs[0]
    means = np.array([run.mean for run in runs])
    z = float(stats.norm.ppf(0.975))
    questions = float(np.mean([((run.high - run.low) / 2 / z) ** 2 for run in runs]))
    seeds = float(means.var(ddof=1)) / len(runs)
    mean, n = float(means.mean()), runs[0].n
    if questions + seeds == 0:
        return Interval(mean, mean, mean, n)
    parts = [(questions, max(1, n - 1)), (seeds, len(runs) - 1)]
    freedom = (questions + seeds) ** 2 / sum(v**2 / dof for v, dof in parts)
    half = float(stats.t.ppf(0.975, freedom)) * (questions + seeds) ** 0.5
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half), n)


def ratio(parts: Sequence[float], wholes: Sequence[float], *, share: bool) -> Interval:
    """Σ parts / Σ wholes over questions; with wholes of 1 a plain mean. 0 of 0 is 0, with no width.

    The t interval of the linearised ratio, each question one draw. `share`: each part is a count
    out of its whole, so that the interval stays in [0, 1], and is Wilson's at 0 and at 1.
    """
    part, whole = (np.asarray(values, dtype=np.float64) for values in (parts, wholes))
    n, total = len(whole), float(whole.sum())
    if total == 0:
        return Interval(0.0, 0.0, 0.0, n)
    mean = float(part.sum()) / total
    if share and mean in (0.0, 1.0):
        return Interval(mean, *wilson(round(mean * total), round(total)), n)
    if n == 1:
        return Interval(mean, mean, mean, n)
    error = float((part - mean * whole).std(ddof=1)) * n**0.5 / total
    half = float(stats.t.ppf(0.975, n - 1)) * error
    low, high = mean - half, mean + half
    return (
        Interval(mean, max(0.0, low), min(1.0, high), n) if share else Interval(mean, low, high, n)
    )


def growth(steps: Sequence[float], costs: Sequence[float]) -> Interval | None:
    """The exponent b of costs ~ steps**b, least squares over logarithms: near 1 for O(n), near 2
    for O(n²). None where fewer than three points or only one number of steps is there.

    >>> round(growth([1, 2, 4, 8], [3, 12, 48, 192]).mean, 6)
    2.0
    """
    if len(steps) < 3 or len(set(steps)) < 2:
        return None
    fit = stats.linregress(np.log(steps), np.log(costs))
    half = float(stats.t.ppf(0.975, len(steps) - 2) * fit.stderr)
    return Interval(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half, len(steps))


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p-value of McNemar's test.

    >>> round(mcnemar(8, 1), 4)
    0.0391
    """
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
