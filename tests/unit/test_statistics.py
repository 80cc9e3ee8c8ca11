"""Statistics against known values and against simulation."""

import numpy as np
import pytest

from memsearcher import published
from memsearcher.statistics import (
    Interval,
    bootstrap_mean,
    em_interval,
    growth,
    mcnemar,
    mean_over_seeds,
    over_seeds,
    paired,
    ratio,
    score_interval,
    wilson,
)


def test_wilson_known_values() -> None:
    assert [round(100 * x, 1) for x in wilson(54, 125)] == [34.8, 52.0]
    # Newcombe (1998), method 3: 81/263, 15/148, 0/20, 1/29
    known = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (right, n), expected in known.items():
        assert wilson(right, n) == pytest.approx(expected, abs=1e-4)


def test_em_interval_is_never_empty_at_zero() -> None:
    none = em_interval([0.0] * 40)
    assert (none.mean, none.low, none.n) == (0.0, 0.0, 40)
    assert none.high == pytest.approx(0.0876, abs=1e-3)


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 successes of 0"):
        wilson(0, 0)
    with pytest.raises(ValueError, match="strata of sizes"):
        bootstrap_mean([[1.0], []])


def test_average_is_unweighted_over_strata() -> None:
    got = bootstrap_mean([[1.0] * 1000, [0.0] * 10])
    assert got.mean == got.low == got.high == 0.5
    assert got.n == 1010


def test_all_wrong_is_not_certainty() -> None:
    one = score_interval([[0.0] * 40])
    assert (one.low, one.high) == (0.0, pytest.approx(wilson(0, 40)[1]))
    seven = score_interval([[0.0] * 40] * 7)
    assert seven.high == pytest.approx(one.high / 7**0.5)
    right = score_interval([[1.0] * 40] * 7)
    assert (right.mean, right.low, right.high) == (1.0, pytest.approx(1 - seven.high), 1.0)
    mixed = [[0.0, 1.0, 0.5], [1.0, 0.0]]
    assert score_interval(mixed) == bootstrap_mean(mixed)


def test_bootstrap_is_deterministic_and_takes_one_question() -> None:
    strata = [[0.0, 1.0, 1.0, 0.5], [1.0]]
    assert bootstrap_mean(strata, seed=3) == bootstrap_mean(strata, seed=3)


@pytest.mark.slow
def test_bootstrap_covers_the_truth_95_times_in_100() -> None:
    rng = np.random.default_rng(5)
    rates = [0.5, 0.2, 0.35, 0.6, 0.4, 0.15, 0.45]
    hits, rounds = 0, 800
    for i in range(rounds):
        strata = [rng.binomial(1, rate, 60).astype(float) for rate in rates]
        ci = bootstrap_mean([s.tolist() for s in strata], seed=i, resamples=600)
        hits += ci.low <= np.mean(rates) <= ci.high
    assert 0.93 <= hits / rounds <= 0.97


def test_mcnemar_known_values() -> None:
    assert mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 2**9)
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 0) == 1.0


def test_paired_sees_a_small_shift_that_two_intervals_would_hide() -> None:
    rng = np.random.default_rng(0)
    base = rng.binomial(1, 0.5, 200).astype(float)
    better = base.copy()
    better[np.flatnonzero(base == 0)[:12]] = 1.0
    got = paired([better.tolist()], [base.tolist()])
    assert (got.wins, got.losses) == (12, 0)
    assert got.p < 0.001
    assert got.difference.low > 0
    assert got.difference.mean == pytest.approx(0.06)


def test_no_difference_seen_is_not_certainty() -> None:
    got = paired([[0.0] * 40, [1.0] * 40], [[0.0] * 40, [1.0] * 40])
    assert got.p == 1.0
    assert got.difference.high == -got.difference.low == pytest.approx(wilson(0, 40)[1] / 2**0.5)


def test_paired_refuses_different_questions() -> None:
    with pytest.raises(ValueError, match="sizes"):
        paired([[1.0, 0.0]], [[1.0]])


def test_published_averages_agree_with_their_cells() -> None:
    for row in published.ROWS:
        cells = [s for s in row.scores if s is not None]
        if len(cells) == 7 and row.average is not None:
            assert sum(cells) / 7 == pytest.approx(row.average, abs=0.051), row.name


def test_ratio_is_a_mean_a_share_and_never_certain_at_the_ends() -> None:
    mean = ratio([1.0, 2.0, 3.0], [1.0] * 3, share=False)
    assert mean.mean == 2.0
    assert (mean.high - mean.mean) == pytest.approx(4.302652729911275 / 3**0.5)  # t of 2
    assert ratio([], [], share=True) == Interval(0.0, 0.0, 0.0, 0)
    none = ratio([0.0] * 40, [1.0] * 40, share=True)
    assert (none.low, none.high) == (0.0, pytest.approx(wilson(0, 40)[1]))
    pooled = ratio([1.0, 0.0, 2.0], [2.0, 1.0, 4.0], share=True)
    assert pooled.mean == pytest.approx(3 / 7)
    assert 0 <= pooled.low < pooled.mean < pooled.high <= 1


def test_growth_tells_linear_from_quadratic() -> None:
    turns = [1.0, 2.0, 3.0, 4.0, 8.0]
    linear, square = (
        growth(turns, [50 * n for n in turns]),
        growth(turns, [9 * n * n for n in turns]),
    )
    assert linear is not None
    assert square is not None
    assert (linear.mean, square.mean) == (pytest.approx(1.0), pytest.approx(2.0))
    assert growth([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) is None


def test_over_seeds_known_values() -> None:
    """Seeds at 0.5 and 0.7 against 0.4 on two strata: s² of the seeds is 0.02, halved 0.01, no
    spread of questions where every difference is equal."""
    runs = [[[0.5] * 4, [0.5] * 6], [[0.7] * 4, [0.7] * 6]]
    got = over_seeds(runs, [[[0.4] * 4, [0.4] * 6]])
    assert got.difference.mean == pytest.approx(0.2)
    assert got.difference.high - 0.2 == pytest.approx(0.1 * 12.706204736174698)  # t of 1
    assert got.p == pytest.approx(2 * (0.5 - np.arctan(2) / np.pi))  # Cauchy at 0.2 / 0.1
    assert got.difference.n == 10
    with pytest.raises(ValueError, match="sizes"):
        over_seeds(runs, [[[0.4] * 4]])
    same = over_seeds([[[1.0, 0.0]]], [[[1.0, 0.0]]])
    assert (same.difference.mean, same.p) == (0.0, 1.0)


@pytest.mark.slow
def test_over_seeds_covers_the_truth_with_three_seeds() -> None:
    """Three seeds a side, whose spread is of the size of that of 200 questions."""
    rng = np.random.default_rng(7)
    hits, rounds = 0, 600
    for _ in range(rounds):
        hard = rng.normal(0, 1, (4, 50))  # the questions, the same ones for all

        def run(skill: float, hard: np.ndarray = hard) -> list[list[float]]:
            rates = 1 / (1 + np.exp(-(skill + rng.normal(0, 0.25) + hard)))
            return rng.binomial(1, rates).astype(float).tolist()

        sides = [[run(skill) for _ in range(3)] for skill in (0.5, 0.0)]
        d = over_seeds(*sides).difference
        hits += d.low <= TRUE_GAP <= d.high
    assert 0.93 <= hits / rounds <= 0.985


def _expected(skill: float) -> float:
    """Mean of the logistic function over N(skill, 1 + 0.25²), by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    values = 1 / (1 + np.exp(-(skill + nodes * (1 + 0.25**2) ** 0.5)))
    return float((values * weights).sum() / weights.sum())


TRUE_GAP = _expected(0.5) - _expected(0.0)


def test_mean_over_seeds() -> None:
    one = Interval(0.4, 0.3, 0.5, 50)
    assert mean_over_seeds([one]) == one
    two = mean_over_seeds([one, Interval(0.5, 0.4, 0.6, 50)])
    assert two.mean == pytest.approx(0.45)
    assert two.low < 0.35 < 0.55 < two.high
    flat = Interval(1.0, 1.0, 1.0, 3)
    assert mean_over_seeds([flat, flat]) == flat
