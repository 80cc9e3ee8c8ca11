"""Supervised steps: what a teacher's turns, and a tiny policy's copying exercise, are as rows.

The optimiser step is the learner's own; this file chooses rows and counts.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memsearcher.learner.collate import Row, row
from memsearcher.learner.deepspeed import Learner
from memsearcher.learner.losses import ImitationLoss
from memsearcher.training import Record, draw
from memsearcher.types import Trajectory

COPY_WORDS = 12
COPY_ROWS = 64


def copying_rows(words: Sequence[int], seed: int, step: int) -> list[Row]:
    """COPY_ROWS sequences of COPY_WORDS random word tokens, each written twice; loss on the second.

    Why: to use a passage a policy must copy names that it never saw in training. Attention heads
    that do so form in any language model that read enough text, but a small random transformer
    does not find them from a few hundred traces: it learns the tags and guesses the names.
    """
    rng = random.Random(f"copying {seed} {step}")
    made = []
    for _ in range(COPY_ROWS):
        ids = [rng.choice(words) for _ in range(COPY_WORDS)] * 2
        made.append(Row(ids, COPY_WORDS, [True] * COPY_WORDS, [0.0] * COPY_WORDS))
    return made


def examples(trajectories: Sequence[Trajectory]) -> list[Row]:
    """Every turn that says something, loss on what the teacher said only."""
    made = [row(turn, trajectory=each.id) for each in trajectories for turn in each.turns]
    return [replace(r, advantage=1.0) for r in made if r.count]


def turns_of(rows: Sequence[Row], seed: int, count: int) -> Callable[[int], list[Row]]:
    """step (1, 2, …) -> its rows. Fewer rows than `count` in all: every step takes all of them."""
    count = min(count, len(rows))
    return lambda step: draw(rows, seed, step - 1, count)


def renamed(
    rows_of: Callable[[int], list[Row]], pools: Sequence[Sequence[int]], seed: int
) -> Callable[[int], list[Row]]:
    """The same rows with names exchanged: in each row, at each step, every pool of name tokens goes
    through a random permutation of its own.

    Why: a small policy sees each training entity dozens of times and learns its facts by heart; on
    the entities of the test sets it then copies nothing. Under fresh names only the passage helps.
    """

    def exchanged(step: int) -> list[Row]:
        rng = random.Random(f"renamed {seed} {step}")
        made = []
        for r in rows_of(step):
            new: dict[int, int] = {}
            for pool in pools:
                new |= dict(zip(pool, rng.sample(pool, len(pool)), strict=True))
            made.append(replace(r, ids=[new.get(i, i) for i in r.ids]))
        return made

    return exchanged


def imitate(
    learner: Learner, rows_of: Callable[[int], list[Row]], done: int, steps: int
) -> Iterator[Record]:
    """Steps done+1 … steps; one record each."""
    for step in range(done + 1, steps + 1):
        yield {"step": step, **learner.update([rows_of(step)], ImitationLoss())}
