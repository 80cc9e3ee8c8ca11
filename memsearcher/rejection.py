"""Which of a teacher's trajectories are examples, and why the others are not.

In this order: a right answer in a sound format; no copy of another of its question; at most
`keep_per_question` of a question; at most `balance` times the median cell, where a cell is a data
set and a number of searches, so that neither the larger set nor the easy questions drown the rest.
"""

import random
from collections import Counter
from collections.abc import Sequence
from statistics import median

from memsearcher import transcripts
from memsearcher.params import AgentName, Warmup
from memsearcher.types import StopReason, Trajectory

KEPT = "kept"
Cell = tuple[str, int]  # data set, searches


def verdicts(
    trajectories: Sequence[Trajectory], w: Warmup, agent: AgentName, seed: int
) -> list[str]:
    """KEPT or the reason against it, one each. Trajectories need their reward parts."""
    found = [fault(each, w.keep_wrong) or KEPT for each in trajectories]
    said: set[tuple[str, tuple[int, ...]]] = set()
    of_question: Counter[str] = Counter()
    for i, each in enumerate(trajectories):
        if found[i] != KEPT:
            continue
        ids = tuple(token for turn in each.turns for token in turn.response_ids)
        if (each.question.id, ids) in said:
            found[i] = "copy of another"
        elif of_question[each.question.id] == w.keep_per_question:
            found[i] = "more than warmup.keep_per_question"
        else:
            said.add((each.question.id, ids))
            of_question[each.question.id] += 1
    if w.balance is not None:
        _balance(trajectories, found, w.balance, agent, seed)
    return found


def fault(trajectory: Trajectory, keep_wrong: bool) -> str | None:
    """`keep_wrong` keeps every trajectory that ended by the teacher's own doing, mistakes too."""
    if trajectory.stop is StopReason.INFRA_FAILED:
        return trajectory.stop.value
    if keep_wrong:
        return None
    if trajectory.stop is not StopReason.ANSWERED:
        return trajectory.stop.value
    if not trajectory.reward_parts["em"]:
        return "wrong answer"
    if not trajectory.reward_parts["format"]:
        return "wrong format"
    if any(turn.bad_query for turn in trajectory.turns):
        return "bad query"
    return "memory cut" if any(turn.memory_cut for turn in trajectory.turns) else None


def cell(trajectory: Trajectory, agent: AgentName) -> Cell:
    count = transcripts.searches(trajectory, keeps_history=agent == "react")
    return trajectory.question.dataset, count


def _balance(
    trajectories: Sequence[Trajectory],
    found: list[str],
    balance: float,
    agent: AgentName,
    seed: int,
) -> None:
    cells: dict[Cell, list[int]] = {}
    for i, each in enumerate(trajectories):
        if found[i] == KEPT:
            cells.setdefault(cell(each, agent), []).append(i)
    if not cells:
        return
    room = int(balance * median(map(len, cells.values())))
    for name, members in sorted(cells.items()):
        rng = random.Random(f"balance {seed} {name}")
        for i in rng.sample(members, max(0, len(members) - room)):
            found[i] = "more than warmup.balance"
