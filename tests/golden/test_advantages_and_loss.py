"""grpo.py against numbers that do not come from it: a float64 numpy version written from the
equations with loops and scalars, and values worked out by hand.

Each was seen failing once, by an edit of a copy of grpo.py:
    advantages          biased std; ε left out; failed members counted; no test for equal rewards
      c4, c9            one mean for the whole batch
      c5, c6            biased std; a group for each trajectory
    token loss, all 7   minimum for maximum; no clip; the ratio turned round; k3 turned round
      asymmetric, all   the lower clip's width on both sides; the upper clip's
      dual clip, all    applied to positive advantages too
      importance, all   cap left out; weight turned round
      entropy, all      its sign
    aggregation         losses outside the mask added; and by rule
      token, turn       denominator one too large; turns without a token counted
      trajectory        turns for trajectories
      release           rows left out
      release on paper  padding rows left out
    log-probs, entropy  temperature left out; sign of the entropy
    overlong masking    the others masked instead
The edits of the upper clip and of the dual clip went unseen at first: all advantages of the random
vector were negative. It has both signs and a zero since.
"""

import math

import numpy as np
import pytest
import torch

from memsearcher.grpo import (
    aggregate,
    group_advantages,
    token_logprobs,
    token_loss,
    turn_weights,
)

RULES = ["token", "turn", "trajectory", "release"]


def advantage_by_hand(rewards, groups, valid, normalise):
    out = np.zeros(len(rewards))
    for group in set(groups):
        mine = [i for i, g in enumerate(groups) if g == group and valid[i]]
        values = np.array([rewards[i] for i in mine], dtype=np.float64)
        if len(mine) < 2 or values.max() == values.min():
            continue
        scale = values.std(ddof=1) + 1e-6 if normalise == "std" else 1.0
        for i in mine:
            out[i] = (rewards[i] - values.mean()) / scale
    return out


def loss_by_hand(logp, old, ref, sampler, entropy, adv, o):
    """One token, plain floats."""
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - o["clip_low"]), 1 + o["clip_high"])
    objective = min(ratio * adv, clipped * adv)
    if o["dual_clip"] is not None and adv < 0:
        objective = max(objective, o["dual_clip"] * adv)
    if o["tis_cap"] is not None:
        objective *= min(math.exp(old - sampler), o["tis_cap"])
    k3 = math.exp(ref - logp) - (ref - logp) - 1
    return -objective + o["kl_coef"] * k3 - o["entropy_coef"] * entropy


def aggregate_by_hand(losses, mask, trajectories, rule, micros, release_rows):
    rows = range(len(losses))
    if rule == "token":
        return losses[mask].sum() / mask.sum()
    if rule == "turn":
        means = [losses[i][mask[i]].mean() for i in rows if mask[i].any()]
        return sum(means) / len(means)
    if rule == "trajectory":
        means = []
        for name in dict.fromkeys(trajectories):
            mine = [i for i in rows if trajectories[i] == name]
            tokens = np.concatenate([losses[i][mask[i]] for i in mine])
            if len(tokens):
                means.append(tokens.mean())
        return sum(means) / len(means)
    total = 0.0
    for name in dict.fromkeys(micros):
        mine = [i for i in rows if micros[i] == name]
        tokens = np.concatenate([losses[i][mask[i]] for i in mine])
        total += tokens.mean() * len(mine) / release_rows
    return total


@pytest.mark.parametrize("normalise", ["std", "mean"])
def test_advantages_agree_with_numpy(normalise):
    rng = np.random.default_rng(3)
    for _ in range(50):
        count = int(rng.integers(1, 24))
        rewards = rng.choice([0.0, 0.1, 0.3, 1.0], count).tolist()
        groups = rng.integers(0, 4, count).tolist()
        valid = (rng.random(count) < 0.8).tolist()
        ours = group_advantages(rewards, groups, valid=valid, normalise=normalise)
        np.testing.assert_allclose(
            ours, advantage_by_hand(rewards, groups, valid, normalise), rtol=0, atol=1e-12
        )


OPTIONS = {
    "plain": {},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.3},
    "dual clip": {"dual_clip": 1.5},
    "kl": {"kl_coef": 0.7},
    "importance": {"tis_cap": 1.2},
    "entropy": {"entropy_coef": 0.3},
    "all": {
        "clip_high": 0.28,
        "dual_clip": 2.0,
        "kl_coef": 0.5,
        "tis_cap": 1.1,
        "entropy_coef": 0.2,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_token_loss_agrees_with_numpy(name):
    o = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    o |= {"kl_coef": 0.0, "tis_cap": None, "entropy_coef": 0.0} | OPTIONS[name]
    rng = np.random.default_rng(5)
    logp, old, ref, sampler = -2 + rng.normal(0, 0.6, (4, 7, 9))
    entropy, adv = rng.random((7, 9)), rng.random((7, 1)) * [[1], [-1], [2], [-2], [0], [1], [-1]]
    expected = np.array(
        [
            [
                loss_by_hand(
                    logp[i, t], old[i, t], ref[i, t], sampler[i, t], entropy[i, t], adv[i, 0], o
                )
                for t in range(9)
            ]
            for i in range(7)
        ]
    )
    t = {n: torch.from_numpy(v) for n, v in (("ref_logprobs", ref), ("entropy", entropy))}
    ours = token_loss(
        torch.from_numpy(logp),
        torch.from_numpy(old),
        torch.from_numpy(adv),
        sampler_logprobs=torch.from_numpy(sampler),
        **t,
        **o,
    )
    np.testing.assert_allclose(ours.loss.numpy(), expected, rtol=0, atol=1e-12)
    k3 = np.exp(ref - logp) - (ref - logp) - 1
    np.testing.assert_allclose(ours.kl.numpy(), k3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_aggregation_agrees_with_numpy(rule):
    rng = np.random.default_rng(7)
    for _ in range(20):
        rows, width = int(rng.integers(2, 9)), int(rng.integers(2, 7))
        losses, mask = rng.normal(0, 1, (rows, width)), rng.random((rows, width)) < 0.5
        mask[0, 0] = True
        names = [int(n) for n in rng.integers(0, 3, rows)]
        micros = [i // 3 for i in range(rows)]
        for start in range(0, rows, 3):  # every micro-batch samples something
            mask[start, 0] = True
        ours = aggregate(
            torch.from_numpy(losses),
            torch.from_numpy(mask),
            names,
            rule,
            microbatches=micros,
            release_rows=5,
        )
        expected = aggregate_by_hand(losses, mask, names, rule, micros, 5)
        assert ours.item() == pytest.approx(expected, abs=1e-12)


def test_log_probs_and_entropy_agree_with_numpy():
    rng = np.random.default_rng(9)
    logits, ids = rng.normal(0, 3, (6, 11)), rng.integers(0, 11, 6)
    for temperature in (1.0, 0.6):
        said = token_logprobs(torch.from_numpy(logits), torch.from_numpy(ids), temperature)
        for i in range(6):
            weights = [math.exp(v / temperature) for v in logits[i]]
            p = [w / sum(weights) for w in weights]
            assert said[0][i].item() == pytest.approx(math.log(p[ids[i]]), abs=1e-12)
            assert said[1][i].item() == pytest.approx(-sum(q * math.log(q) for q in p), abs=1e-12)


@pytest.mark.parametrize("rule", ["token", "turn", "trajectory"])
def test_overlong_masking_agrees_with_numpy(rule):
    """As if the turns of trajectories that were cut had sampled nothing."""
    rng = np.random.default_rng(11)
    losses, mask = rng.normal(0, 1, (6, 4)), rng.random((6, 4)) < 0.7
    names, overlong = [0, 0, 1, 2, 2, 3], [False, False, True, True, True, False]
    ours = aggregate(
        torch.from_numpy(losses), torch.from_numpy(mask), names, rule, overlong=overlong
    )
    kept = [i for i in range(6) if not overlong[i]]
    expected = aggregate_by_hand(losses[kept], mask[kept], [names[i] for i in kept], rule, [], 5)
    assert ours.item() == pytest.approx(expected, abs=1e-12)


def test_release_rule_on_paper():
    """Two micro-batches of a rank whose mini-batch has 4 rows: turns of 1 and 3 tokens, then of 2
    and 0 (padding): 2/4 · 1/4 for each of four tokens, 2/4 · 1/2 for each of two."""
    counts, micros = [1, 3, 2, 0], [0, 0, 1, 1]
    weights = turn_weights(counts, "abcd", "release", microbatches=micros, release_rows=4)
    assert weights == [0.125, 0.125, 0.25, 0.0]
    assert turn_weights([1, 3, 2, 0], "abcd", "token") == [1 / 6, 1 / 6, 1 / 6, 0.0]


def test_c4_uneven_groups_are_centred_each_for_itself():
    rewards = [1, 2, 3, 4, 10, 12, 5, 6, 7]
    groups = list("aaaabbccc")
    ours = group_advantages(rewards, groups, normalise="mean")
    assert ours == [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]


def test_c5_turns_are_not_votes():
    """A with 3 turns and reward 1, B with 1 turn and reward 0."""
    turns = [0, 0, 0, 1]
    mean = group_advantages([1, 0], ["q", "q"], normalise="mean")
    assert [mean[i] for i in turns] == [0.5, 0.5, 0.5, -0.5]
    std = group_advantages([1, 0], ["q", "q"])
    assert [std[i] for i in turns] == pytest.approx([0.70711] * 3 + [-0.70711], abs=1e-5)


def test_c6_groups_are_questions():
    assert group_advantages([1, 0, 1, 0], list("aabb"), normalise="mean") == [0.5, -0.5, 0.5, -0.5]
    assert group_advantages([1, 1, 0, 0], list("abab"), normalise="mean") == [0.5, 0.5, -0.5, -0.5]


def test_c9_an_outage_is_no_reward():
    valid = [True, False, True, True]
    mean = group_advantages([1, 1, 0, 0], list("aaaa"), valid=valid, normalise="mean")
    assert mean == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3], abs=1e-12)
    std = group_advantages([1, 1, 0, 0], list("aaaa"), valid=valid)
    assert std == pytest.approx([1.1547, 0, -0.57735, -0.57735], abs=1e-5)
    assert std[1] == 0.0
