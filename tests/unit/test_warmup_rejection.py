"""Which trajectories become examples: every reason against one, and the two limits."""

from dataclasses import replace

import pytest
import synthetic

from memsearcher import rejection
from memsearcher.agent.scoring import with_reward
from memsearcher.types import Question, StopReason, Trajectory, Turn

DEMO = synthetic.params().warmup
STRICT = replace(DEMO, keep_wrong=False)


def attempt(
    number: int = 0,
    dataset: str = "nq",
    searches: int = 1,
    member: int = 0,
    answer: str = "Rome",
    stop: StopReason = StopReason.ANSWERED,
    said: int = 0,
    **last: object,
) -> Trajectory:
    """Right and well-formed unless told otherwise. Equal `said`, equal tokens."""
    question = Question(f"{dataset}/{number}", dataset, "Where?", ("Rome",))
    turn = Turn([1], [number, member, said], [True] * 3, [0.0] * 3, "", "")
    turns = [replace(turn, query="q", memory_after="m") for _ in range(searches)]
    made = Trajectory(question, member, (*turns, replace(turn, **last)), stop, answer)
    return with_reward(made, "sound")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, rejection.KEPT),
        ({"answer": "Paris"}, "wrong answer"),
        ({"answer": ""}, "wrong answer"),
        ({"bad_query": True}, "bad query"),
        ({"memory_cut": True}, "memory cut"),
        *(({"stop": stop}, stop.value) for stop in StopReason if stop is not StopReason.ANSWERED),
    ],
)
def test_every_reason(changes: dict, reason: str) -> None:
    made = attempt(**changes)
    assert rejection.verdicts([made], STRICT, "memsearcher", 1) == [reason]
    kept = rejection.verdicts([made], DEMO, "memsearcher", 1)  # the demo wants its mistakes
    assert kept == [reason if reason == "infra_failed" else rejection.KEPT]


def test_at_most_so_many_of_a_question_and_no_copies() -> None:
    one = [attempt(member=m, answer="Rome" if m else "Paris") for m in range(4)]
    same = replace(one[1], member=4)
    found = rejection.verdicts([*one, same], STRICT, "memsearcher", 1)
    more = "more than warmup.keep_per_question"
    assert found == ["wrong answer", "kept", more, more, "copy of another"]
    two = rejection.verdicts([*one, same], replace(STRICT, keep_per_question=2), "memsearcher", 1)
    assert two == ["wrong answer", "kept", "kept", more, "copy of another"]


def test_no_cell_drowns_the_others() -> None:
    """Cells of 20, 4 and 2: the median is 4, and at balance 1.5 none keeps more than 6."""
    made = [attempt(i) for i in range(20)]
    made += [attempt(i, searches=2) for i in range(20, 24)]
    made += [attempt(i, "hotpotqa", 2) for i in range(2)]
    balanced = replace(STRICT, balance=1.5)
    found = rejection.verdicts(made, balanced, "memsearcher", 1)
    kept = [t for t, v in zip(made, found, strict=True) if v == rejection.KEPT]
    assert [rejection.cell(t, "memsearcher") for t in kept] == (
        [("nq", 1)] * 6 + [("nq", 2)] * 4 + [("hotpotqa", 2)] * 2
    )
    assert found.count("more than warmup.balance") == 14
    assert rejection.verdicts(made, balanced, "memsearcher", 1) == found
    assert rejection.verdicts(made, balanced, "memsearcher", 2) != found
    assert rejection.verdicts([], balanced, "memsearcher", 1) == []


def test_the_searches_of_one_growing_context_are_counted() -> None:
    react = replace(attempt(), turns=(Turn([1], [1], [True], [0.0], "", "", query="a\nb"),))
    assert rejection.cell(react, "memsearcher") == ("nq", 1)
    assert rejection.cell(react, "react") == ("nq", 2)
