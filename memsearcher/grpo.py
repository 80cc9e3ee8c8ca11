"""Multi-context GRPO, in reading order: advantages, token log-probs, token loss, aggregation.

Pure torch: no files, no engine, no DeepSpeed, no config. `learner/` drives it, micro-batch by
micro-batch, of which nothing here knows except the `release` rule, which depends on them.

    B questions, G trajectories per question, n_i turns of trajectory i, L tokens of a turn
    R_i reward, A_i advantage of trajectory i          one number each, shared by all its turns
    π_θ policy, π_old policy before the step's first update, π_ref frozen start, μ the sampler

    A_i = (R_i − mean_g) / (std_g + ε)                                        (GRPO, unbiased std)
    r_t = π_θ(t) / π_old(t)
    ℓ_t = −min(r_t A_i, clip(r_t, 1−c_low, 1+c_high) A_i) · min(π_old/μ(t), cap) + β k3_t − η H_t
    k3_t = π_ref(t)/π_θ(t) − log(π_ref(t)/π_θ(t)) − 1                         (Schulman's estimator)
    loss = Σ_t w_t ℓ_t over every sampled token of the optimiser step         (`turn_weights`)

ReAct (one growing context per trajectory) is the special case n_i = 1.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Aggregation = Literal["token", "turn", "trajectory", "release"]


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    valid: Sequence[bool] | None = None,
    normalise: Literal["std", "mean"] = "std",
    eps: float = 1e-6,
) -> list[float]:
    """One advantage per trajectory, in float64, before any expansion to turns.

    `groups[i]` is the group of trajectory i, ids in any order. `valid[i]` False (INFRA_FAILED)
    gives exactly 0.0 and takes no part in the statistics. A group with fewer than two valid
    members, or whose max equals its min, gets exactly 0.0: tested first, since the mean of equal
    floats need not equal them and (R − mean) / (std + ε) then turns rounding into a gradient.

    >>> group_advantages([1, 0, 1, 1], ["a", "a", "b", "b"], normalise="mean")
    [0.5, -0.5, 0.0, 0.0]
    """
    if normalise not in ("std", "mean"):
        raise ValueError(f"normalise is 'std' or 'mean', got {normalise!r}")
    valid = [True] * len(rewards) if valid is None else valid
    members: dict[Hashable, list[float]] = {}
    for reward, group, ok in zip(rewards, groups, valid, strict=True):
        if ok:
            members.setdefault(group, []).append(float(reward))
    centre_scale: dict[Hashable, tuple[float, float]] = {}
    for group, values in members.items():
        if len(values) >= 2 and max(values) != min(values):
            mean = fsum(values) / len(values)
            std = sqrt(fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
            centre_scale[group] = (mean, std + eps if normalise == "std" else 1.0)
    advantages = []
    for reward, group, ok in zip(rewards, groups, valid, strict=True):
        if ok and group in centre_scale:
            mean, scale = centre_scale[group]
            advantages.append((float(reward) - mean) / scale)
        else:
            advantages.append(0.0)
    return advantages


def token_logprobs(
    hidden: Tensor,
    head: torch.nn.Module,
    ids: Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    logits_bytes: int = 2**26,
) -> tuple[Tensor, Tensor]:
    """(N, D) hidden states, (N,) ids they predict -> (N,) log-probs, (N,) entropies, float32.

    Both are of the distribution after temperature, as the sampler reports them. The vocabulary is
    visited in chunks of tokens whose float32 logits take `logits_bytes` at most, recomputed in the
    backward pass, so (N, V) float32 logits never stand in memory.
    """

    def chunk(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(h).float() / temperature  # (C, V)
        logprobs = logits.log_softmax(-1)  # (C, V)
        log_p = logprobs if entropy_grad else logprobs.detach()
        return logprobs.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    size = max(1, logits_bytes // (4 * vocabulary))
    parts = []
    for h, target in zip(hidden.split(size), ids.split(size), strict=True):
        if torch.is_grad_enabled() and len(ids) > size:
            parts.append(checkpoint(chunk, h, target, use_reentrant=False))
        else:
            parts.append(chunk(h, target))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token results, all of one shape. `loss` carries the gradient, the others are detached."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor  # True where a clip decided the value: no policy gradient there
    kl: Tensor


def token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    sampler_logprobs: Tensor | None = None,
    tis_cap: float | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> TokenLoss:
    """ℓ_t of the module docstring for any shape; `advantages` broadcasts (A_{i,j} = A_i).

    `dual_clip` c > 1 bounds the surrogate of a negative advantage by −c·A. `tis_cap` needs
    `sampler_logprobs`, weighs the surrogate alone, and carries no gradient.
    """
    ratio = (logprobs - old_logprobs).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.maximum(free, bounded)
    clipped = bounded > free
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (surrogate > ceiling)
        surrogate = torch.where(over, ceiling, surrogate)
        clipped = clipped | over
    if tis_cap is not None:
        if sampler_logprobs is None:
            raise ValueError("tis_cap needs sampler_logprobs")
        surrogate = surrogate * (old_logprobs - sampler_logprobs).exp().clamp(max=tis_cap).detach()
    loss, kl = surrogate, torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        gap = ref_logprobs - logprobs
        kl = gap.exp() - gap - 1
        loss = loss + kl_coef * kl
    if entropy_coef:
        if entropy is None:
            raise ValueError("entropy_coef needs entropy")
        loss = loss - entropy_coef * entropy
    return TokenLoss(loss, ratio.detach(), clipped.detach(), kl.detach())


def turn_weights(
    counts: Sequence[int],
    trajectories: Sequence[Hashable],
    aggregation: Aggregation,
    *,
    microbatches: Sequence[Hashable] | None = None,
    release_rows: int = 80,
) -> list[float]:
    """w_t of each turn's tokens: every rule is linear in ℓ_t with one weight inside a turn.

    `counts[j]` sampled tokens of turn j, `trajectories[j]` its trajectory, for all valid turns of
    the optimiser step on all ranks. So packing, padding, accumulation and world size cannot matter.
    Turns, and trajectories, without a sampled token weigh nothing and are not counted.
      token       1 / Σ counts
      turn        1 / (turns · counts[j])
      trajectory  1 / (trajectories · Σ counts of the trajectory)
      release     (rows of the turn's micro-batch / release_rows) / Σ counts of that micro-batch:
                  the official rule (D1, D3), dependent on packing on purpose; rows include
                  padding rows, whose count is 0
    """
    sums: dict[Hashable, int] = {}
    if aggregation == "release":
        if microbatches is None:
            raise ValueError("aggregation 'release' needs the micro-batch of every turn")
        rows: dict[Hashable, int] = {}
        for count, name in zip(counts, microbatches, strict=True):
            sums[name] = sums.get(name, 0) + count
            rows[name] = rows.get(name, 0) + 1
        return [
            rows[name] / release_rows / sums[name] if count else 0.0
            for count, name in zip(counts, microbatches, strict=True)
        ]
    for count, name in zip(counts, trajectories, strict=True):
        sums[name] = sums.get(name, 0) + count
    if aggregation == "token":
        total = sum(counts)
        return [1 / total if count else 0.0 for count in counts]
    if aggregation == "turn":
        turns = sum(count > 0 for count in counts)
        return [1 / (turns * count) if count else 0.0 for count in counts]
    if aggregation == "trajectory":
        alive = sum(total > 0 for total in sums.values())
        pairs = zip(counts, trajectories, strict=True)
        return [1 / (alive * sums[name]) if count else 0.0 for count, name in pairs]
    raise ValueError(f"aggregation is token, turn, trajectory or release, got {aggregation!r}")


def aggregate(
    losses: Tensor,
    mask: Tensor,
    trajectories: Sequence[Hashable],
    aggregation: Aggregation,
    *,
    microbatches: Sequence[Hashable] | None = None,
    release_rows: int = 80,
) -> Tensor:
    """(M, L) token losses of an optimiser step, their mask -> scalar; 0 if all is masked."""
    weights = turn_weights(
        [int(n) for n in mask.sum(-1)],
        trajectories,
        aggregation,
        microbatches=microbatches,
        release_rows=release_rows,
    )
    masked = torch.where(mask, losses, torch.zeros_like(losses))  # where, not ×: NaN · 0 is NaN
    return (masked * losses.new_tensor(weights)[:, None]).sum()
