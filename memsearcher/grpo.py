"""Multi-context GRPO on one page: advantages, token log-probs, token loss, aggregation, one update.

Pure torch. `learner/` does the same micro-batch by micro-batch, which nothing here knows of.

    B questions, G trajectories per question, n_i turns of trajectory i, L tokens of a turn
    M = Σ n_i rows, a turn each (ReAct, one growing context per trajectory, is n_i = 1)
    π_θ policy, π_old policy before the step's first update, π_ref frozen start, μ the sampler

    A_i = (R_i − mean_g) / (std_g + ε), the same for all turns of trajectory i      (DeepSeekMath)
    r_t = π_θ(t) / π_old(t)
    ℓ_t = −min(r_t A_i, clip(r_t, 1−c_low, 1+c_high) A_i) · min(π_old/μ(t), cap) + β k3_t − η H_t
    k3_t = π_ref(t)/π_θ(t) − log(π_ref(t)/π_θ(t)) − 1                       (Schulman's estimator)
    loss = Σ_t w_t ℓ_t over every sampled token of the optimiser step             (`turn_weights`)
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Aggregation = Literal["token", "turn", "trajectory", "release"]


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, valid: Sequence[bool] | None = None,
    normalise: Literal["std", "mean"] = "std", eps: float = 1e-6,
) -> list[float]:  # fmt: skip
    """One advantage per trajectory (float64, unbiased std), before any expansion to turns.

    `groups[i]`: any id, in any order. `valid[i]` False (INFRA_FAILED): exactly 0.0, no part in the
    statistics. Fewer than two valid members, or max equal to min: exactly 0.0, tested first, since
    the mean of equal floats need not equal them and a tiny std turns rounding into a gradient.
    """
    if normalise not in ("std", "mean"):
        raise ValueError(f"normalise is 'std' or 'mean', got {normalise!r}")
    valid = [True] * len(rewards) if valid is None else valid
    members: dict[Hashable, list[float]] = {}
    for reward, group, ok in zip(rewards, groups, valid, strict=True):
        members.setdefault(group, []).extend([float(reward)] if ok else [])
    alive = {g: m for g, m in members.items() if len(m) >= 2 and max(m) != min(m)}
    mean = {g: fmean(m) for g, m in alive.items()}
    scale = {g: stdev(m) + eps if normalise == "std" else 1.0 for g, m in alive.items()}
    triples = zip(rewards, groups, valid, strict=True)
    return [(r - mean[g]) / scale[g] if ok and g in alive else 0.0 for r, g, ok in triples]


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(N, V) logits, the (N,) ids they predict -> (N,) log-probs and (N,) entropies of the
    distribution after temperature, as the sampler reports it. float32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    table = (logits.to(wide) / temperature).log_softmax(-1)  # (N, V)
    return table.gather(-1, ids[:, None])[:, 0], -(table.exp() * table).sum(-1)


class TokenLoss(NamedTuple):
    """Per token, all of one shape. `loss` carries the gradient, the others are detached."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor  # True where a clip decided the value: no policy gradient there
    kl: Tensor  # 0 without a reference


def token_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *,
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None, kl_coef: float = 0.0,
    sampler_logprobs: Tensor | None = None, tis_cap: float | None = None,
    entropy: Tensor | None = None, entropy_coef: float = 0.0,
) -> TokenLoss:  # fmt: skip
    """ℓ_t above for any shape; `advantages` broadcasts. `dual_clip` c > 1 bounds the surrogate of a
    negative advantage by −c·A. `tis_cap` weighs the surrogate alone and carries no gradient."""
    ratio = (logprobs - old_logprobs).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        over = (advantages < 0) & (loss > -dual_clip * advantages)
        loss, clipped = torch.where(over, -dual_clip * advantages, loss), clipped | over
    if tis_cap is not None:
        if sampler_logprobs is None:
            raise ValueError("tis_cap needs sampler_logprobs")
        loss = loss * (old_logprobs - sampler_logprobs).exp().clamp(max=tis_cap).detach()
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = (ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1
        loss = loss + kl_coef * kl
    if entropy_coef:
        if entropy is None:
            raise ValueError("entropy_coef needs entropy")
        loss = loss - entropy_coef * entropy
    return TokenLoss(loss, ratio.detach(), clipped.detach(), kl.detach())


def turn_weights(
    counts: Sequence[int], trajectories: Sequence[Hashable], aggregation: Aggregation, *,
    microbatches: Sequence[Hashable] | None = None, release_rows: int = 80,
) -> list[float]:  # fmt: skip
    """w_t of each turn's tokens. `counts[j]` sampled tokens of turn j, `trajectories[j]` its
    trajectory, for all valid turns of the optimiser step on all ranks: packing, accumulation and
    world size cannot matter. Turns and trajectories without a sampled token are not counted.

    token 1/Σ counts; turn 1/(turns · counts[j]); trajectory 1/(trajectories · Σ its counts);
    release rows/release_rows / Σ counts, both of the turn's micro-batch: the official rule (D1),
    on purpose dependent on packing; its rows include padding rows, whose count is 0.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation is one of {get_args(Aggregation)}, got {aggregation!r}")
    names = microbatches if aggregation == "release" else trajectories
    if names is None:
        raise ValueError("aggregation 'release' needs the micro-batch of every turn")
    rows, total = Counter(names), Counter[Hashable]()
    for count, name in zip(counts, names, strict=True):
        total[name] += count
    tokens, turns, alive = sum(counts), sum(c > 0 for c in counts), len(+total)
    weight: dict[str, Callable[[int, Hashable], float]] = {
        "token": lambda count, name: 1 / tokens,
        "turn": lambda count, name: 1 / (turns * count),
        "trajectory": lambda count, name: 1 / (alive * total[name]),
        "release": lambda count, name: rows[name] / release_rows / total[name],
    }
    rule = weight[aggregation]
    return [rule(c, name) if c else 0.0 for c, name in zip(counts, names, strict=True)]


def aggregate(
    losses: Tensor, mask: Tensor, trajectories: Sequence[Hashable], aggregation: Aggregation, *,
    microbatches: Sequence[Hashable] | None = None, release_rows: int = 80,
    overlong: Sequence[bool] | None = None,
) -> Tensor:  # fmt: skip
    """(M, L) token losses of an optimiser step, their mask -> scalar; 0 if all is masked.
    `overlong[j]`: turn j belongs to a trajectory that was cut and is masked whole (DAPO's filter;
    its reward stays in the statistics of its group)."""
    if overlong is not None:
        mask = mask & ~torch.tensor(overlong, device=mask.device)[:, None]
    weights = turn_weights(mask.sum(-1).tolist(), trajectories, aggregation,
                           microbatches=microbatches, release_rows=release_rows)  # fmt: skip
    masked = torch.where(mask, losses, torch.zeros_like(losses))  # where, not ×: NaN · 0 is NaN
    return (masked * losses.new_tensor(weights)[:, None]).sum()


def one_update(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, turn_of: Sequence[int],
    rewards: Sequence[float], groups: Sequence[Hashable],
    optimizer: torch.optim.Optimizer, aggregation: Aggregation = "token",
) -> float:  # fmt: skip
    """One optimiser step, whole: what the learner must equal. (M, L) log-probs with a graph, row j
    a turn of trajectory `turn_of[j]`. Returns the loss."""
    of_trajectory = group_advantages(rewards, groups)
    advantages = logprobs.new_tensor([of_trajectory[i] for i in turn_of])[:, None]  # A_{i,j} = A_i
    per_token = token_loss(logprobs, old_logprobs, advantages).loss
    loss = aggregate(per_token, mask, turn_of, aggregation)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
