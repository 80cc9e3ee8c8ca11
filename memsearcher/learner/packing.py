"""Which rows go through the policy together, on which rank, and what each token weighs there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memsearcher.grpo import turn_weights
from memsearcher.learner.collate import Row, TurnBatch, collate
from memsearcher.learner.losses import Loss

RAGGED = 0.85  # of the longest row: what is shorter goes to the next micro-batch
SMALL = 1 / 16  # of the token budget: below it a micro-batch costs more than its padding


@dataclass(frozen=True, slots=True)
class Micro:
    """Indices of the rows of one micro-batch. `padding`: weightless, only keeps ranks in step."""

    indices: list[int]
    padding: bool = False


def microbatches(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[Micro]]:
    """For each rank its micro-batches: the same number on every rank, every row exactly once.

    Rows are sorted by length and cut so that M × L ≤ budget; a row longer than the budget stands
    alone. A micro-batch of some size is also cut where the next row would be mostly padding.
    Neighbours in length go to different ranks, the missing ones are weightless copies of the
    shortest row.
    """
    if not lengths:
        return [[] for _ in range(ranks)]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packs: list[list[int]] = [[]]
    for i in order:
        longest, taken = lengths[packs[-1][0]] if packs[-1] else 0, len(packs[-1])
        ragged = lengths[i] < RAGGED * longest and taken * longest >= budget * SMALL
        if taken and ((taken + 1) * longest > budget or ragged):
            packs.append([])
        packs[-1].append(i)
    micros = [Micro(pack) for pack in packs]
    micros += [Micro([order[-1]], padding=True)] * (-len(micros) % ranks)
    return [micros[rank::ranks] for rank in range(ranks)]


def pack(
    rows: Sequence[Row], loss: Loss, budget: int, *, rank: int = 0, world: int = 1
) -> list[TurnBatch]:
    """One optimiser step's micro-batches of this rank; weights are those of the whole step on all
    ranks, so that summing Σ w ℓ over micro-batches and ranks gives the loss."""
    plan = microbatches([len(r.ids) for r in rows], budget, world)
    names = [""] * len(rows)  # of each row's micro-batch: the `release` rule asks
    for which, micros in enumerate(plan):
        for k, micro in enumerate(micros):
            for i in () if micro.padding else micro.indices:
                names[i] = f"{which}.{k}"
    weights = turn_weights(
        [r.count for r in rows],
        [r.trajectory for r in rows],
        loss.aggregation,
        microbatches=names,
        release_rows=loss.release_rows,
    )
    weighted = [replace(r, weight=w) for r, w in zip(rows, weights, strict=True)]
    return [collate([weighted[i] for i in m.indices], padding=m.padding) for m in plan[rank]]
