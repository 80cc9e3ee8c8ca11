"""Turns to tensors: `Row`, `TurnBatch`. The only file that makes tensors out of token lists; what
goes together is decided in `packing`, what a token weighs in `grpo`.

    M rows of a micro-batch, L its longest row, N sampled tokens in it (flat, row by row)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor

from memsearcher.files import BadInput
from memsearcher.types import StopReason, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Row:
    """One turn as the learner sees it. `mask` and `sampler_logprobs` cover `ids[start:]`."""

    ids: list[int]
    start: int
    mask: list[bool]
    sampler_logprobs: list[float]
    advantage: float = 1.0
    trajectory: str = ""
    weight: float = 0.0  # of each of its sampled tokens in the optimiser step's loss

    @property
    def count(self) -> int:
        return sum(self.mask)


def row(turn: Turn, *, advantage: float = 1.0, trajectory: str = "") -> Row:
    """Raises ValueError where a turn's lists disagree or a sampled token has no log-prob: it would
    train on shifted tokens, or on a ratio of nothing."""
    lengths = (len(turn.response_ids), len(turn.mask), len(turn.sampler_logprobs))
    if len(set(lengths)) != 1:
        raise ValueError(f"{trajectory}: response, mask, log-probs have lengths {lengths}")
    if not turn.prompt_ids:
        raise ValueError(f"{trajectory}: a turn without a prompt cannot predict its first token")
    for k, (sampled, logprob) in enumerate(zip(turn.mask, turn.sampler_logprobs, strict=True)):
        if sampled and (logprob is None or not isfinite(logprob)):
            token = turn.response_ids[k]
            raise ValueError(f"{trajectory}: sampled token {k} (id {token}) has log-prob {logprob}")
    return Row(
        ids=[*turn.prompt_ids, *turn.response_ids],
        start=len(turn.prompt_ids),
        mask=list(turn.mask),
        sampler_logprobs=list(turn.sampler_logprobs),
        advantage=advantage,
        trajectory=trajectory,
    )


def rows(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    *,
    overlong_masking: bool = False,
) -> list[Row]:
    """Every turn of every valid trajectory, A_{i,j} = A_i. Failed ones and turns that sampled
    nothing are left out; turns of zero-variance groups stay (they still carry the KL term).
    `overlong_masking` leaves OVERLONG ones out too; their rewards were in the advantages."""
    out = {StopReason.INFRA_FAILED} | ({StopReason.OVERLONG} if overlong_masking else set())
    made = [
        row(turn, advantage=advantage, trajectory=trajectory.id)
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        if trajectory.stop not in out
        for turn in trajectory.turns
    ]
    return [r for r in made if r.count]


def by_questions(trajectories: Sequence[Trajectory], count: int) -> list[list[int]]:
    """`count` mini-batches as indices into `trajectories`: sets of questions, in their order, so
    that the number of optimiser steps does not depend on how many turns the policy took (D2)."""
    of_question: dict[str, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        of_question.setdefault(trajectory.question.id, []).append(i)
    groups = list(of_question.values())
    if len(groups) < count:
        raise BadInput(f"train.minibatches: {count} sets asked of {len(groups)} questions")
    edges = [len(groups) * k // count for k in range(count + 1)]
    return [[i for g in groups[a:b] for i in g] for a, b in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class TurnBatch:
    """Right-padded, so causal attention needs no mask: a real token never sees what is behind it.

    input_ids (M, L); select (M, L): True at the position that predicts a sampled token; all others
    (N,) in the order of select.nonzero(). `real` is False for a padding micro-batch.
    """

    input_ids: Tensor
    select: Tensor
    targets: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    real: bool

    def to(self, device: torch.device) -> "TurnBatch":
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            select=self.select.to(device),
            targets=self.targets.to(device),
            sampler_logprobs=self.sampler_logprobs.to(device),
            advantages=self.advantages.to(device),
            weights=self.weights.to(device),
        )


def collate(chosen: Sequence[Row], *, padding: bool = False, pad_id: int = 0) -> TurnBatch:
    """Rows -> tensors. A sampled token at position p of a row is predicted at position p − 1."""
    width = max(len(r.ids) for r in chosen)
    input_ids = torch.full((len(chosen), width), pad_id, dtype=torch.long)
    select = torch.zeros((len(chosen), width), dtype=torch.bool)
    targets: list[int] = []
    sampler: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    for i, r in enumerate(chosen):
        input_ids[i, : len(r.ids)] = torch.tensor(r.ids)
        for k, sampled in enumerate(r.mask):
            if sampled:
                select[i, r.start + k - 1] = True
                targets.append(r.ids[r.start + k])
                sampler.append(r.sampler_logprobs[k])
                advantages.append(r.advantage)
                weights.append(0.0 if padding else r.weight)
    return TurnBatch(
        input_ids=input_ids,
        select=select,
        targets=torch.tensor(targets, dtype=torch.long),
        sampler_logprobs=torch.tensor(sampler, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
        real=not padding,
    )
