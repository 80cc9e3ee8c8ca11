"""Statistics against known values and against simulation."""

import numpy as np
import pytest

from memsearcher import published
from memsearcher.statistics import (
    bootstrap_mean,
    em_interval,
    mcnemar,
    paired,
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


def test_paired_refuses_different_questions() -> None:
    with pytest.raises(ValueError, match="sizes"):
        paired([[1.0, 0.0]], [[1.0]])


def test_published_averages_agree_with_their_cells() -> None:
    for row in published.ROWS:
        cells = [s for s in row.scores if s is not None]
        if len(cells) == 7 and row.average is not None:
            assert sum(cells) / 7 == pytest.approx(row.average, abs=0.051), row.name
