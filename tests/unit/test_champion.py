"""The gate between a challenger and the champion: only what is better beyond noise gets through."""

import random

import pytest

from flows.champion import judge
from memsearcher.files import BadInput


def answers(right: set[int], n: int = 80) -> list[dict]:
    """n dev questions of two data sets, of which those numbered in `right` are answered."""
    return [
        {"dataset": ("nq", "hotpotqa")[i % 2], "question_id": f"dev/{i}", "em": float(i in right)}
        for i in range(n)
    ]


def drawn(seed: int, share: float, n: int = 80) -> set[int]:
    rng = random.Random(seed)
    return {i for i in range(n) if rng.random() < share}


CHAMPION = set(range(30))


@pytest.mark.parametrize(
    ("challenger", "promoted", "why"),
    [
        (set(range(10)), False, "is worse: -25.0 EM"),
        (CHAMPION, False, "is as good: +0.0 EM"),
        (set(range(2, 34)), False, "not shown to be better by more than 0 EM: +2.5 EM"),
        (set(range(45)), True, "better by +18.8 EM"),
    ],
    ids=["worse", "equal", "better by noise", "better beyond noise"],
)
def test_the_gate(challenger: set[int], promoted: bool, why: str) -> None:
    verdict = judge(answers(challenger), answers(CHAMPION), margin=0)
    assert verdict.promote is promoted
    assert why in verdict.why


def test_the_margin_counts() -> None:
    better = answers(set(range(45)))
    assert judge(better, answers(CHAMPION), margin=0.05).promote
    assert not judge(better, answers(CHAMPION), margin=0.15).promote


def test_equal_policies_that_err_by_chance_are_hardly_ever_promoted() -> None:
    """One in forty at most: the test is two-sided at 5%."""
    promoted = sum(
        judge(answers(drawn(2 * i, 0.5)), answers(drawn(2 * i + 1, 0.5)), 0).promote
        for i in range(20)
    )
    assert promoted <= 2


def test_without_a_champion_the_challenger_is_it() -> None:
    verdict = judge(answers(set()), None, margin=0)
    assert verdict.promote
    assert verdict.test is None


def test_other_questions_are_no_duel() -> None:
    with pytest.raises(BadInput, match="1 of 81 and 0 of 80"):
        judge(answers(CHAMPION, 81), answers(CHAMPION, 80), margin=0)
