"""What the learner minimises: GRPO's token loss or imitation, with the figures worth watching.

Plain data that travels to every rank; the algorithm itself is `memsearcher/grpo.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from memsearcher.grpo import Aggregation, token_loss
from memsearcher.learner.collate import TurnBatch
from memsearcher.learner.ranks import Ranks
from memsearcher.params import Train


@dataclass(frozen=True, slots=True)
class Figures:
    """Over one micro-batch: sums over its sampled tokens, and maxima."""

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Field names and meanings of `params.Train`. Zero `kl_coef` asks for no reference at all."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    tis_cap: float | None = None
    aggregation: Aggregation = "token"
    release_rows: int = 80

    @classmethod
    def of(cls, train: Train) -> "PolicyLoss":
        """`release_rows`: the official 80 is 128 questions × 5 over 8 ranks; ours the same way."""
        rows = train.questions_per_step // train.minibatches * train.group_size // train.ranks
        return cls(
            clip_low=train.clip_low,
            clip_high=train.clip_high,
            dual_clip=train.dual_clip,
            kl_coef=train.kl_coef,
            entropy_coef=train.entropy_coef,
            tis_cap=train.tis_cap,
            aggregation=train.aggregation,
            release_rows=max(1, rows),
        )

    def tokens(
        self, logprobs: Tensor, entropy: Tensor, batch: TurnBatch, old: Tensor, ref: Tensor | None
    ) -> tuple[Tensor, Figures]:
        """(N,) each -> (N,) losses and figures."""
        result = token_loss(
            logprobs,
            old,
            batch.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            ref_logprobs=ref,
            kl_coef=self.kl_coef,
            sampler_logprobs=batch.sampler_logprobs,
            tis_cap=self.tis_cap,
            entropy=entropy,
            entropy_coef=self.entropy_coef,
        )
        gap = (old - batch.sampler_logprobs).abs()
        sums = {"clip_fraction": result.clipped.sum(), "entropy": entropy.detach().sum()}
        sums |= {"sampler_gap_mean": gap.sum()} | ({} if ref is None else {"kl": result.kl.sum()})
        maxima = {"sampler_gap_max": gap.max(), "ratio_max": result.ratio.max()}
        return result.loss, Figures(sums, maxima)


@dataclass(frozen=True, slots=True)
class ImitationLoss:
    """Supervised fine-tuning: −log π of the teacher's tokens, token mean over the step."""

    aggregation: Aggregation = "token"
    release_rows: int = 80
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def tokens(
        self, logprobs: Tensor, entropy: Tensor, batch: TurnBatch, old: Tensor, ref: Tensor | None
    ) -> tuple[Tensor, Figures]:
        sums = {"entropy": entropy.detach().sum(), "nll": -logprobs.detach().sum()}
        return -logprobs, Figures(sums, {"nll_max": (-logprobs.detach()).max()})


Loss = PolicyLoss | ImitationLoss


class Tally:
    """Figures of one optimiser step over its micro-batches and ranks. Padding micro-batches enter
    neither sums nor maxima."""

    def __init__(self) -> None:
        self._sums: list[dict[str, Tensor]] = []
        self._maxima: list[dict[str, Tensor]] = []

    def add(self, batch: TurnBatch, loss: Tensor, figures: Figures) -> None:
        """`loss`: this micro-batch's part of the step's loss, detached."""
        share, floor = (1.0, 0.0) if batch.real else (0.0, float("-inf"))
        tokens = loss.new_tensor(batch.targets.numel())
        sums = {"loss": loss, "tokens": tokens, **figures.sums}
        self._sums.append({name: value * share for name, value in sums.items()})
        self._maxima.append({name: value + floor for name, value in figures.maxima.items()})

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Means over sampled tokens and maxima; `loss` and `tokens` are sums. Collective."""
        added = ranks.reduce(_table(self._sums).sum(0), ReduceOp.SUM).tolist()
        sums = dict(zip(self._sums[0], added, strict=True))
        largest = ranks.reduce(_table(self._maxima).amax(0), ReduceOp.MAX).tolist()
        tokens = sums["tokens"]
        means = {n: v if n in ("loss", "tokens") else v / tokens for n, v in sums.items()}
        return means | dict(zip(self._maxima[0], largest, strict=True))


def _table(parts: list[dict[str, Tensor]]) -> Tensor:
    """(I, K) float64: I micro-batches, K figures."""
    return torch.stack([torch.stack([v.double() for v in part.values()]) for part in parts])
