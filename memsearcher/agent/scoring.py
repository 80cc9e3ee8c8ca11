r"""Is the answer right, and what is the trajectory worth?

One normalisation, SQuAD's: lower case, ASCII punctuation out, the words a, an, the out, runs of
white space to one space. Nothing else is folded: "1918–1945" (a dash that is not ASCII) is not
"1918-1945", full-width digits are not digits, "five" is not "5". A string that normalises to
nothing matches nothing, so golds such as ")" or "---" can never be matched.

Reward presets, with F1 the best over the golds:

    paper    Eq. 8: 0 for a wrong format, 0.1 where F1 is 0, else F1. An F1 below 0.1 pays less than
             a wrong answer.
    sound    as paper, but at least 0.1 for every well-formed answer.
    release  the official function on the last text of the trajectory: any \boxed counts, one inside
             <think> or in a memory message too; `\boxed Paris` counts; no end token, no reward.

The format of `paper` and `sound` is right where the parser found no fault in any turn and an answer
at the end (StopReason.ANSWERED): a box counts only in an action and outside <think>.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from memsearcher.agent.parsing import outside_think
from memsearcher.types import StopReason, Trajectory

Preset = Literal["paper", "sound", "release"]
FORMAT_REWARD = 0.1
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BRACE = re.compile(r"[{}]")


def normalise(text: str) -> str:
    """
    >>> normalise("The  Beatles!")
    'beatles'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def em(answer: str | None, golds: Sequence[str]) -> float:
    """1.0 where the answer equals a gold after normalisation."""
    said = normalise(answer or "")
    return float(bool(said) and any(said == normalise(gold) for gold in golds))


def cover_em(answer: str | None, golds: Sequence[str]) -> float:
    """1.0 where a normalised gold stands anywhere in the normalised answer."""
    said = normalise(answer or "")
    return float(any(wanted in said for wanted in map(normalise, golds) if wanted))


def f1(answer: str | None, golds: Sequence[str]) -> float:
    """Best token F1 over the golds, in [0, 1].

    >>> f1("the Eiffel Tower", ["Eiffel tower", "Tour Eiffel"])
    1.0
    """
    return max(
        (_f1(normalise(answer or "").split(), normalise(g).split()) for g in golds), default=0.0
    )


def reward(trajectory: Trajectory, preset: Preset) -> tuple[float, dict[str, float]]:
    """The reward and its parts: em, f1, format (1.0 where it is right). INFRA_FAILED is worth 0.0,
    which nobody may read: it stays out of the loss and of its group."""
    golds = trajectory.question.golds
    if preset == "release":
        answer = release_answer(*_last_text(trajectory))
        well_formed = answer is not None
    else:
        answer = trajectory.answer
        well_formed = trajectory.stop is StopReason.ANSWERED
    parts = {"em": em(answer, golds), "f1": f1(answer, golds), "format": float(well_formed)}
    if trajectory.stop is StopReason.INFRA_FAILED or not well_formed:
        return 0.0, parts
    if preset == "sound":
        return max(parts["f1"], FORMAT_REWARD), parts
    return parts["f1"] or FORMAT_REWARD, parts


def with_reward(trajectory: Trajectory, preset: Preset) -> Trajectory:
    value, parts = reward(trajectory, preset)
    return replace(trajectory, reward=value, reward_parts=parts)


def release_em(trajectory: Trajectory) -> float:
    r"""EM as the release evaluates: the last box of the last complete message, thinking taken out.
    Unlike ours it takes `\boxed Paris`, and a box in a memory that the last turn wrote."""
    text, stopped = "", False
    if trajectory.turns:
        turn, stopped = trajectory.turns[-1], trajectory.stop is not StopReason.OVERLONG
        if turn.memory_after is None:
            text = outside_think(turn.action, thinking=True)
        else:
            text = turn.memory_after
    return em(release_answer(text, stopped), trajectory.question.golds)


def release_answer(text: str, stopped: bool) -> str | None:
    r"""The official function's reading of the last message; None where it sees no answer.

    >>> release_answer(r"\boxed Paris", True), release_answer(r"\boxed{Paris", True)
    ('Paris', None)
    """
    if not stopped:
        return None
    _, spaced, bare = text.rpartition("\\boxed ")
    if spaced:
        return bare.partition("$")[0].strip()
    _, found, rest = text.rpartition("\\boxed")
    if not found or not rest.startswith("{"):
        return None
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return rest[1 : brace.start()]
    return None


def _last_text(trajectory: Trajectory) -> tuple[str, bool]:
    if not trajectory.turns:
        return "", False
    turn = trajectory.turns[-1]
    return turn.action + (turn.memory_after or ""), trajectory.stop is not StopReason.OVERLONG


def _f1(said: list[str], wanted: list[str]) -> float:
    same = sum((Counter(said) & Counter(wanted)).values())
    return 2 * same / (len(said) + len(wanted)) if same else 0.0
