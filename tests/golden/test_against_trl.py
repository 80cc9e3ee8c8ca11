"""Single-turn data: our losses against TRL's own `_compute_loss`, on the same log-probs.

TRL's trainer is not built: the function gets an object with the settings that it reads, and
log-probs in place of a model. Seen failing with another upper clip, the loss types swapped, twice
the KL, no dual clip, no entropy bonus on our side.
"""

from types import SimpleNamespace

import pytest
import torch

from memsearcher.grpo import aggregate, token_loss

pytestmark = pytest.mark.slow
ROWS, WIDTH = 6, 9


@pytest.fixture(scope="module")
def trl_loss():
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss


def settings(logprobs, entropies, loss_type, beta, delta, entropy_coef):
    """What `_compute_loss` reads of a trainer: one process, no accumulation, no vLLM."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropies, None),
        accelerator=accelerator,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=0.28,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _entropy_bonus_enabled=bool(entropy_coef),
        _metrics={"train": dict.fromkeys(NAMES, SimpleNamespace(append=lambda x: None))},
    )


NAMES = ("policy_loss", "entropy_coef", "kl", "entropy")
NAMES += tuple(f"clip_ratio/{n}" for n in ("low_mean", "high_mean", "region_mean"))
NAMES += ("clip_ratio/low_min", "clip_ratio/high_max")


@pytest.mark.parametrize(
    ("rule", "loss_type"), [("token", "bnpo"), ("token", "dapo"), ("turn", "grpo")]
)
@pytest.mark.parametrize(
    ("beta", "delta", "entropy_coef"), [(0.0, None, 0.0), (0.3, None, 0.0), (0.3, 2.0, 0.2)]
)
def test_loss_and_gradient_agree(trl_loss, rule, loss_type, beta, delta, entropy_coef):
    """`dapo` divides by the whole step's tokens, `bnpo` by the batch's: here the same, as ours.
    TRL's entropy bonus is a mean over tokens whatever the loss type, so it is compared for `token`.
    """
    if rule == "turn":
        entropy_coef = 0.0
    g = torch.Generator().manual_seed(1)
    logprobs, old, ref, entropy = -2 + 0.5 * torch.randn(
        4, ROWS, WIDTH, generator=g, dtype=torch.float64
    )
    mask = (torch.rand(ROWS, WIDTH, generator=g) < 0.7).int()
    mask[:, 0] = 1
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, 0.0], dtype=torch.float64)
    theirs_at = logprobs.clone().requires_grad_()
    blank = torch.zeros(ROWS, 2, dtype=torch.long)
    inputs = {"prompt_ids": blank, "prompt_mask": blank, "completion_mask": mask}
    inputs |= {"completion_ids": mask, "advantages": advantages, "old_per_token_logps": old}
    inputs |= {"ref_per_token_logps": ref, "num_items_in_batch": mask.sum()}
    theirs = trl_loss(
        settings(theirs_at, entropy, loss_type, beta, delta, entropy_coef), None, inputs
    )
    ours_at = logprobs.clone().requires_grad_()
    losses = token_loss(
        ours_at,
        old,
        advantages[:, None],
        clip_high=0.28,
        dual_clip=delta,
        ref_logprobs=ref,
        kl_coef=beta,
        entropy=entropy,
        entropy_coef=entropy_coef,
    ).loss
    ours = aggregate(losses, mask.bool(), range(ROWS), rule)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    (a,), (b,) = torch.autograd.grad(ours, ours_at), torch.autograd.grad(theirs, theirs_at)
    assert a.abs().max() > 1e-3
    assert (a - b).abs().max() < 1e-6
