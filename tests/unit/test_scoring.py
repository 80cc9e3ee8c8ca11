from dataclasses import replace

import pytest

from memsearcher.agent.scoring import (
    cover_em,
    em,
    f1,
    normalise,
    release_em,
    reward,
    with_reward,
)
from memsearcher.types import Question, StopReason, Trajectory, Turn

GOLD = ("Paris",)
FORTY = " ".join(["word"] * 39 + ["Paris"])


def _ended(action: str, stop: StopReason, answer: str | None = None) -> Trajectory:
    turn = Turn([1], [2], [True], [0.0], action, "")
    return Trajectory(Question("q", "nq", "?", GOLD), 0, (turn,), stop, answer)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("A", ""),
        ("the", ""),
        (" )", ""),
        ("---", ""),
        ("Толстой, Лев", "толстой лев"),
        ("１９１８", "１９１８"),
        ("1918–1945", "1918–1945"),
        ("1918-1945", "19181945"),
        ("Theatre an der Wien", "theatre der wien"),
        ("a\u00a0b", "b"),
    ],
)
def test_the_normalisation(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "golds", "right"),
    [
        ("beatles", ["The Beatles"], 1.0),
        ("A", ["the"], 0.0),
        (")", [")"], 0.0),
        ("", [""], 0.0),
        (None, ["x"], 0.0),
        ("five", ["5"], 0.0),
        ("ЛЕВ", ["Лев"], 1.0),
        ("1918–1945", ["1918-1945"], 0.0),
        ("yes", ["no", "Yes."], 1.0),
        ("x", [], 0.0),
    ],
)
def test_exact_match(answer: str | None, golds: list[str], right: float) -> None:  # C20
    assert em(answer, golds) == right


def test_cover_and_f1() -> None:
    assert cover_em("It is the Eiffel Tower in Paris", ["eiffel tower"]) == 1.0
    assert cover_em("It is", ["the"]) == 0.0
    assert f1("Eiffel tower of Paris", ["the Eiffel Tower"]) == pytest.approx(2 / 3)
    assert f1("a", ["the"]) == 0.0
    assert f1("x x y", ["x y y"]) == pytest.approx(2 / 3)  # bags, not sets
    assert f1(None, []) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{Paris}", 1.0),
        (r"\boxed{London}", 0.1),
        (f"\\boxed{{{FORTY}}}", 2 / 41),
        (r"\boxed{}", 0.1),
        (r"\boxed Paris", 1.0),
        (r"\boxed{Paris", 0.0),
        (r"\box{Paris}", 0.0),
        (r"\boxed{\text{Paris}}", 0.1),
        (r"\boxed{London} \boxed{Paris}", 1.0),
        (r"\boxed{Paris} \boxed{London}", 0.1),
        (r"\boxed{Paris} </think> no box here", 1.0),
    ],
)
def test_the_release_preset_to_the_last_hole(text: str, value: float) -> None:  # C10
    assert reward(_ended(text, StopReason.NO_ACTION), "release")[0] == pytest.approx(value)
    assert reward(_ended(text, StopReason.OVERLONG), "release")[0] == 0.0  # no end token


@pytest.mark.parametrize(
    ("answer", "paper", "sound"),
    [("Paris", 1.0, 1.0), ("London", 0.1, 0.1), (FORTY, 2 / 41, 0.1), ("", 0.1, 0.1)],
)
def test_paper_and_sound(answer: str, paper: float, sound: float) -> None:
    trajectory = _ended("", StopReason.ANSWERED, answer)
    assert reward(trajectory, "paper")[0] == pytest.approx(paper)
    assert reward(trajectory, "sound")[0] == pytest.approx(sound)


@pytest.mark.parametrize("stop", [s for s in StopReason if s is not StopReason.ANSWERED])
@pytest.mark.parametrize("preset", ["paper", "sound"])
def test_a_wrong_format_is_worth_nothing(stop: StopReason, preset: str) -> None:
    value, parts = reward(_ended(r"\boxed{Paris}", stop), preset)  # type: ignore[arg-type]
    assert (value, parts["format"]) == (0.0, 0.0)


def test_the_release_reads_answers_in_its_own_way() -> None:
    assert release_em(_ended(r"sure </think> \boxed{Paris}", StopReason.ANSWERED, "Paris")) == 1.0
    assert release_em(_ended(r"\boxed{Paris} </think> none", StopReason.NO_ACTION)) == 0.0
    assert release_em(_ended(r"</think> \boxed Paris", StopReason.NO_ACTION)) == 1.0
    assert release_em(_ended(r"</think> \boxed{Paris}", StopReason.OVERLONG)) == 0.0
    wrote = replace(_ended("", StopReason.MAX_TURNS).turns[0], memory_after=r"\boxed{Paris}")
    last = Trajectory(Question("q", "nq", "?", GOLD), 0, (wrote,), StopReason.MAX_TURNS)
    assert release_em(last) == 1.0
    assert release_em(replace(last, turns=())) == 0.0


def test_with_reward_keeps_the_parts() -> None:
    scored = with_reward(_ended("", StopReason.ANSWERED, "Paris"), "sound")
    assert scored.reward == 1.0
    assert scored.reward_parts == {"em": 1.0, "f1": 1.0, "format": 1.0}
