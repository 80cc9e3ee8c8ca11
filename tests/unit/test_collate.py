"""Turns to tensors, and which turns stand together."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from memsearcher.files import ROOT, BadInput
from memsearcher.grpo import group_advantages
from memsearcher.learner.collate import Row, by_questions, collate, row, rows
from memsearcher.learner.losses import PolicyLoss
from memsearcher.learner.model import check_vocabulary
from memsearcher.learner.packing import microbatches, pack
from memsearcher.training import draw
from memsearcher.types import Question, StopReason, Trajectory, Turn


def turn(prompt: int, response: int, masked: int = 0) -> Turn:
    """Ids 1, 2, …; the last `masked` tokens of the response were not sampled."""
    mask = [True] * (response - masked) + [False] * masked
    ids = list(range(1, prompt + response + 1))
    return Turn(ids[:prompt], ids[prompt:], mask, [-1.0 if m else 0.0 for m in mask], "", "")


def trajectory(question: str, member: int, turns: int, stop=StopReason.ANSWERED) -> Trajectory:
    q = Question(question, "nq", "?", ("x",))
    return Trajectory(q, member, tuple(turn(3, 2 + k) for k in range(turns)), stop)


def test_targets_are_predicted_one_position_earlier():
    made = Row([5, 6, 7, 8, 9], 2, [True, False, True], [-0.5, 0.0, -0.25], advantage=2.0)
    other = Row([5, 6, 1, 2, 3, 4], 2, [False] * 3 + [True], [0.0] * 3 + [-1.0])
    batch = collate([made, other])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0], [5, 6, 1, 2, 3, 4]]
    assert batch.select.nonzero().tolist() == [[0, 1], [0, 3], [1, 4]]
    assert batch.targets.tolist() == [7, 9, 4]
    assert batch.sampler_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert batch.advantages.tolist() == [2.0, 2.0, 1.0]


def test_only_valid_trajectories_become_rows_and_all_turns_share_the_advantage():
    group = [
        trajectory("a", 0, 3),
        trajectory("a", 1, 0),
        trajectory("a", 2, 2, StopReason.INFRA_FAILED),
        trajectory("a", 3, 1, StopReason.OVERLONG),
    ]
    made = rows(group, [1.0, 0.5, 0.0, -1.0])
    assert [(r.trajectory, r.advantage) for r in made] == [("a#0", 1.0)] * 3 + [("a#3", -1.0)]


def test_lists_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 1, 2\)"):
        row(replace(turn(2, 2), mask=[True]))
    with pytest.raises(ValueError, match="without a prompt"):
        row(turn(0, 2))


@pytest.mark.parametrize("missing", [None, float("nan"), float("-inf")])
def test_a_sampled_token_without_a_log_prob_is_refused(missing):
    broken = replace(turn(2, 3), sampler_logprobs=[-1.0, missing, -1.0])
    with pytest.raises(ValueError, match=rf"nq#1: sampled token 1 \(id 4\) has log-prob {missing}"):
        row(broken, trajectory="nq#1")
    assert row(replace(broken, mask=[True, False, True])).count == 2


def test_a_mask_that_is_longer_than_the_tokens_is_refused():
    with pytest.raises(ValueError, match=r"x: response, mask, log-probs have lengths \(2, 3, 2\)"):
        row(replace(turn(2, 2), mask=[True] * 3), trajectory="x")


def test_nothing_masked_or_all_failed_is_no_row():
    failed = [trajectory("a", i, 2, StopReason.INFRA_FAILED) for i in range(2)]
    assert rows(failed, [0.0, 0.0]) == rows([], []) == []
    silent = replace(trajectory("a", 0, 0), turns=(turn(2, 2, masked=2),))
    assert rows([silent], [1.0]) == []
    assert pack([], PolicyLoss(), 100) == []


def test_overlong_masking_leaves_the_loss_and_not_the_group():
    group = [trajectory("a", 0, 1), trajectory("a", 1, 2, StopReason.OVERLONG)]
    advantages = group_advantages([1.0, 0.0], ["a", "a"], normalise="mean")
    assert [r.trajectory for r in rows(group, advantages)] == ["a#0", "a#1", "a#1"]
    (kept,) = rows(group, advantages, overlong_masking=True)
    assert (kept.trajectory, kept.advantage) == ("a#0", 0.5)


def test_groups_of_different_sizes_stay_whole():
    group = [trajectory(q, i, 1) for q, n in (("a", 3), ("b", 1), ("c", 2)) for i in range(n)]
    assert by_questions(group, 3) == [[0, 1, 2], [3], [4, 5]]
    assert group_advantages([1, 0, 0, 1, 1, 0], list("aaabcc"), normalise="mean") == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3, 0, 0.5, -0.5]
    )


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    check_vocabulary(tmp_path, 100)
    with pytest.raises(BadInput, match="the tokenizer has 101 tokens, the model 100"):
        check_vocabulary(tmp_path, 101)


def test_react_is_one_turn_with_several_spans():
    """n_i = 1: one row, trained on both spans and not on the observation between them."""
    spans = replace(turn(3, 6), mask=[True, True, False, False, True, True])
    (made,) = rows(
        [Trajectory(Question("a", "nq", "?", ("x",)), 0, (spans,), StopReason.ANSWERED)], [0.5]
    )
    batch = collate([replace(made, weight=0.25)])
    assert batch.select.nonzero()[:, 1].tolist() == [2, 3, 6, 7]
    assert batch.targets.tolist() == [4, 5, 8, 9]
    assert batch.advantages.tolist() == [0.5] * 4


MEASURE = """
import torch
from pathlib import Path
from memsearcher.learner.model import chunked_logprobs
torch.set_num_threads(1)
head = torch.nn.Linear(32, 32768, bias=False)
hidden = torch.randn(2048, 32, requires_grad=True)
ids = torch.randint(32768, (2048,))
def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(status.split(name + ":")[1].split()[0]) / 2**10
def added(logits_bytes):
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak that importing torch was
    before = memory("VmRSS")
    said = chunked_logprobs(hidden, head, ids, vocabulary=32768, logits_bytes=logits_bytes)
    said[0].sum().backward()
    return memory("VmHWM") - before
added(2**20)
print(added(2**23), added(2**40))
"""


def test_full_float32_logits_never_stand_in_memory():
    """2,048 tokens × 32,768 ids are 256 MiB in float32. Chunks of 8 MiB add a fraction of that at
    the peak, forward and backward; one chunk for all adds several times that."""
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # freed is given back
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        cwd=ROOT,
        env=os.environ | at_once,
        capture_output=True,
        text=True,
        check=True,
    )
    chunked, whole = map(float, done.stdout.split())
    assert chunked < 64 < 256 < whole, (chunked, whole)


def test_c8_minibatches_are_sets_of_questions():
    """3 questions × 2 trajectories with turns [1,5], [2,2], [4,1], 2 ranks, 3 mini-batches."""
    counts = [("a", 1), ("a", 5), ("b", 2), ("b", 2), ("c", 4), ("c", 1)]
    group = [trajectory(q, i % 2, n) for i, (q, n) in enumerate(counts)]
    sets = by_questions(group, 3)
    assert sets == [[0, 1], [2, 3], [4, 5]]
    trained = 0
    for chosen in sets:
        made = rows([group[i] for i in chosen], [1.0, -1.0])
        ranks = [pack(made, PolicyLoss(), 12, rank=r, world=2) for r in (0, 1)]
        assert len(ranks[0]) == len(ranks[1])
        real = [b for batches in ranks for b in batches if b.real]
        trained += sum(len(b.input_ids) for b in real)
        assert sum(b.weights.sum().item() for b in real) == pytest.approx(1.0, abs=1e-6)
        for b in (b for batches in ranks for b in batches if not b.real):
            assert b.weights.abs().sum() == 0
            assert len(b.targets) > 0
    assert trained == 15
    with pytest.raises(BadInput, match="4 sets asked of 3"):
        by_questions(group, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [8, 100, 5000])
def test_every_row_once_within_the_budget(ranks, budget):
    rng = random.Random(budget)
    lengths = [rng.randrange(1, 60) for _ in range(50)]
    plan = microbatches(lengths, budget, ranks)
    assert len({len(micros) for micros in plan}) == 1
    real = [m for micros in plan for m in micros if not m.padding]
    assert sorted(i for m in real for i in m.indices) == list(range(50))
    for m in real:
        size = max(lengths[i] for i in m.indices) * len(m.indices)
        assert size <= budget or len(m.indices) == 1
    assert microbatches([], budget, ranks) == [[] for _ in range(ranks)]


def test_padding_stays_below_a_tenth():
    """The demo's turns: 128 trajectories of 1 to 5 turns, 60 to 320 tokens, skewed."""
    rng = random.Random(1)
    lengths = [int(60 + 260 * rng.random() ** 2) for _ in range(400)]
    (micros,) = microbatches(lengths, 8192)
    padded = sum(max(lengths[i] for i in m.indices) * len(m.indices) for m in micros)
    assert 1 - sum(lengths) / padded < 0.1


def test_c13_data_order_is_a_function_of_seed_and_step():
    """8 questions, 4 a step: steps 3 and 4 are the second epoch, resumed or not."""
    pool = list(range(8))
    steps = [draw(pool, 17, step, 4) for step in range(4)]
    assert sorted(steps[0] + steps[1]) == pool == sorted(steps[2] + steps[3])
    assert [draw(pool, 17, step, 4) for step in (2, 3)] == steps[2:]
    assert steps[:2] != steps[2:]
    with pytest.raises(BadInput, match="9 questions a step asked of 8"):
        draw(pool, 17, 0, 9)


def test_renaming_keeps_the_pattern_of_a_row_and_changes_its_names() -> None:
    from memsearcher.learner.collate import Row
    from memsearcher.learner.sft import renamed

    names, towns = [10, 11, 12, 13, 14, 15], [20, 21, 22]
    row = Row([1, 10, 2, 20, 10, 11, 3], 3, [True] * 4, [0.0] * 4)
    rows_of = renamed(lambda step: [row, row], [names, towns], seed=1)
    a, b = rows_of(1)
    for made in (a, b):
        assert [made.ids[i] for i in (0, 2, 6)] == [1, 2, 3]  # what is no name stays
        assert made.ids[1] == made.ids[4] != made.ids[5]  # equal stays equal, different different
        assert {made.ids[1], made.ids[5]} <= set(names)
        assert made.ids[3] in towns
    assert a.ids != b.ids  # each row its own
    assert rows_of(1) == [a, b]  # a function of (seed, step)
    assert rows_of(2) != [a, b]
