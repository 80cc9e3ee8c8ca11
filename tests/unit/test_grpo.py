"""What must not change the loss or its gradient, and what grpo.py says to odd input."""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher.grpo import (
    aggregate,
    group_advantages,
    one_update,
    token_logprobs,
    token_loss,
    turn_weights,
)
from memsearcher.learner.model import chunked_logprobs

RULES = ["token", "turn", "trajectory"]
seeds = st.integers(0, 10**6)


def make(seed: int, rows: int = 6, width: int = 5):
    """losses-to-be (float64, requires grad), old, advantages (rows, 1), mask, trajectory names."""
    g = torch.Generator().manual_seed(seed)
    logp = torch.randn(rows, width, generator=g, dtype=torch.float64).requires_grad_()
    old = logp.detach() + 0.3 * torch.randn(rows, width, generator=g, dtype=torch.float64)
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=g) < 0.6
    mask[0, 0] = True
    return logp, old, advantages, mask, [i % 3 for i in range(rows)]


def gradient(logp, old, advantages, mask, names, rule):
    loss = aggregate(token_loss(logp, old, advantages).loss, mask, names, rule)
    return loss.item(), torch.autograd.grad(loss, logp)[0]


@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from(RULES))
def test_order_of_turns_is_free(seed, rule):
    logp, old, advantages, mask, names = make(seed)
    loss, grad = gradient(logp, old, advantages, mask, names, rule)
    order = list(range(len(names)))
    random.Random(seed).shuffle(order)
    moved = logp.detach()[order].requires_grad_()
    again, grad_again = gradient(
        moved, old[order], advantages[order], mask[order], [names[i] for i in order], rule
    )
    assert again == pytest.approx(loss, abs=1e-12)
    assert (grad_again - grad[order]).abs().max() < 1e-9


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_order_of_trajectories_and_groups_is_free(seed):
    rng = random.Random(seed)
    rewards = [rng.choice([0.0, 0.1, 0.4, 1.0]) for _ in range(12)]
    groups, valid = [i // 4 for i in range(12)], [rng.random() < 0.8 for _ in range(12)]
    before = group_advantages(rewards, groups, valid=valid)
    order = rng.sample(range(12), 12)
    names = ["x", "y", "z"]
    after = group_advantages(
        [rewards[i] for i in order],
        [names[groups[i]] for i in order],
        valid=[valid[i] for i in order],
    )
    assert after == pytest.approx([before[i] for i in order], abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from(RULES), st.integers(1, 4))
def test_padding_is_free(seed, rule, more):
    logp, old, advantages, mask, names = make(seed)
    loss, grad = gradient(logp, old, advantages, mask, names, rule)
    wide = torch.randn(len(names), more, dtype=torch.float64)
    padded = torch.cat([logp.detach(), wide], 1).requires_grad_()
    hidden = torch.cat([mask, torch.zeros_like(wide, dtype=torch.bool)], 1)
    again, padded_grad = gradient(
        padded, torch.cat([old, -wide], 1), advantages, hidden, names, rule
    )
    assert again == pytest.approx(loss, abs=1e-12)
    assert (padded_grad[:, : mask.shape[1]] - grad).abs().max() < 1e-9
    assert (padded_grad[:, mask.shape[1] :] == 0).all()
    losses = token_loss(padded, torch.cat([old, wide * float("nan")], 1), advantages).loss
    assert aggregate(losses, hidden, names, rule).item() == pytest.approx(loss, abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from(RULES))
def test_masked_tokens_are_free(seed, rule):
    logp, old, advantages, mask, names = make(seed)
    loss, grad = gradient(logp, old, advantages, mask, names, rule)
    other = torch.where(mask, logp.detach(), torch.randn_like(logp)).requires_grad_()
    again, other_grad = gradient(other, old, advantages, mask, names, rule)
    assert again == pytest.approx(loss, abs=1e-12)
    assert (other_grad - grad).abs().max() < 1e-9
    assert (grad[~mask] == 0).all()


@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from(RULES), st.integers(1, 6))
def test_microbatch_size_is_free(seed, rule, size):
    """The sum over micro-batches of Σ w ℓ, weights taken once for the step, is the loss."""
    logp, old, advantages, mask, names = make(seed)
    loss, grad = gradient(logp, old, advantages, mask, names, rule)
    weights = torch.tensor(turn_weights(mask.sum(-1).tolist(), names, rule), dtype=torch.float64)
    total, parts = 0.0, torch.zeros_like(grad)
    for start in range(0, len(names), size):
        at = slice(start, start + size)
        losses = token_loss(logp[at], old[at], advantages[at]).loss
        part = (losses * mask[at] * weights[at, None]).sum()
        parts += torch.autograd.grad(part, logp)[0]
        total += part.item()
    assert total == pytest.approx(loss, abs=1e-12)
    assert (parts - grad).abs().max() < 1e-9


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8),
    st.floats(0.1, 10),
    st.floats(-3, 3),
)
def test_scaling_a_groups_rewards_keeps_signs_and_sums_to_zero(rewards, scale, shift):
    before = group_advantages(rewards, [0] * len(rewards), normalise="mean")
    after = group_advantages([scale * r + shift for r in rewards], [0] * len(rewards))
    assert sum(before) == pytest.approx(0, abs=1e-9)
    assert all(a * b >= 0 for a, b in zip(before, after, strict=True) if abs(b) > 1e-6)


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 1e-9])
@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_equal_rewards_are_exactly_nothing(value, count):
    """In float32 with ε = 1e-6 one in eight such groups of five gets up to 0.06."""
    assert group_advantages([value] * count, ["g"] * count) == [0.0] * count


@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.1, 10))
def test_scaling_a_groups_rewards_scales_its_gradient_or_nothing(seed, scale):
    """By the factor where advantages are only centred; not at all where they are also divided."""
    logp, old, _, mask, _ = make(seed)
    rewards, groups = [1.0, 0.0, 0.5, 0.25, 0.1, 0.9], [0, 0, 0, 1, 1, 1]
    scaled = [r * scale if g == 0 else r for r, g in zip(rewards, groups, strict=True)]
    for normalise, factor in (("mean", scale), ("std", 1.0)):
        grads = []
        for values in (rewards, scaled):
            a = group_advantages(values, groups, normalise=normalise, eps=0.0)
            spread = torch.tensor(a, dtype=torch.float64)[:, None]
            grads.append(gradient(logp, old, spread, mask, range(6), "token")[1])
        assert (grads[0][:3] * factor - grads[1][:3]).abs().max() < 1e-9
        assert (grads[0][3:] - grads[1][3:]).abs().max() < 1e-9


def test_one_turn_each_is_plain_grpo():
    """n_i = 1 (ReAct): turn and trajectory mean are the same rule."""
    counts = [3, 1, 4]
    assert turn_weights(counts, "abc", "turn") == turn_weights(counts, "abc", "trajectory")


def test_c7_each_turn_trains_its_own_mask():
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 0:6], mask[1, 6:9] = True, True
    logp = torch.zeros(2, 9, dtype=torch.float64, requires_grad=True)
    loss = aggregate(token_loss(logp, logp.detach(), torch.ones(2, 1)).loss, mask, "aa", "token")
    (grad,) = torch.autograd.grad(loss, logp)
    assert (grad != 0).equal(mask)


def test_nothing_to_train_on_is_a_zero_loss():
    losses, mask = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for rule in RULES:
        assert aggregate(losses, mask, "ab", rule).item() == 0.0
    assert group_advantages([], []) == []
    assert group_advantages([1.0, 0.0], "ab", valid=[False, False]) == [0.0, 0.0]
    assert turn_weights([], [], "token") == []


def test_turn_without_tokens_is_not_counted():
    assert turn_weights([2, 0], "ab", "turn") == [0.5, 0.0]
    assert turn_weights([2, 0, 2], "aba", "trajectory") == [0.25, 0.0, 0.25]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_chunks_of_the_vocabulary_change_nothing(chunk):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11, bias=False).double()
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(11, (7,))
    got, entropy = chunked_logprobs(
        hidden, head, ids, vocabulary=11, temperature=0.6, logits_bytes=4 * 11 * chunk
    )
    full = (head(hidden) / 0.6).log_softmax(-1)
    torch.testing.assert_close(got, full.gather(1, ids[:, None])[:, 0], rtol=0, atol=1e-9)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=0, atol=1e-9)
    assert not entropy.requires_grad
    wanted = (hidden, head.weight)
    found = torch.autograd.grad(got.sum(), wanted)
    expected = torch.autograd.grad(full.gather(1, ids[:, None]).sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_chunks_of_the_vocabulary_change_no_gradient_in_bfloat16():
    """Against float32. Added up in bfloat16, 256 chunks were 0.017 off and one 0.003."""
    torch.manual_seed(0)
    wide = torch.nn.Linear(64, 512, bias=False)
    hidden, ids, weights = torch.randn(4096, 64), torch.randint(512, (4096,)), torch.randn(4096)

    def gradient(head: torch.nn.Linear, chunks: int) -> torch.Tensor:
        budget = 4 * 512 * 4096 // chunks
        inputs = hidden.to(head.weight.dtype)
        got, _ = chunked_logprobs(inputs, head, ids, vocabulary=512, logits_bytes=budget)
        (found,) = torch.autograd.grad((got * weights).sum(), head.weight)
        return found.float()

    expected = gradient(wide, 1)
    narrow = copy.deepcopy(wide).bfloat16()
    for chunks in (1, 16, 256):
        gap = gradient(narrow, chunks) - expected
        assert gap.norm() < 0.005 * expected.norm(), chunks


def test_log_probs_are_float32_at_least():
    logits = torch.randn(3, 5).bfloat16()
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 4, 2]))
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.equal(logits.float().log_softmax(-1)[range(3), [0, 4, 2]])


def test_one_update_is_its_parts():
    """Two questions × two trajectories, one of them with two turns, by plain gradient descent."""
    logp, old, _, mask, _ = make(4, rows=5)
    before = logp.detach().clone()
    rewards, groups, turn_of = [1.0, 0.0, 0.3, 0.1], list("aabb"), [0, 0, 1, 2, 3]
    loss = one_update(
        logp, old, mask, turn_of, rewards, groups, torch.optim.SGD([logp], lr=0.5), "turn"
    )
    advantages = group_advantages(rewards, groups)
    spread = torch.tensor([advantages[i] for i in turn_of], dtype=torch.float64)[:, None]
    again = before.clone().requires_grad_()
    expected, grad = gradient(again, old, spread, mask, turn_of, "turn")
    assert loss == pytest.approx(expected, abs=1e-12)
    assert (before - 0.5 * grad - logp.detach()).abs().max() < 1e-12


def test_odd_arguments_say_what_is_wrong():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="sampler_logprobs"):
        token_loss(one, one, one, tis_cap=2.0)
    with pytest.raises(ValueError, match="micro-batch"):
        turn_weights([1], "a", "release")
    with pytest.raises(ValueError, match="batch"):
        turn_weights([1], "a", "batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max"):
        group_advantages([1.0], "a", normalise="max")  # type: ignore[arg-type]
