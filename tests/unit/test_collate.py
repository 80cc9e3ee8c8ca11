"""Turns to tensors, and which turns stand together."""

import random
from dataclasses import replace

import pytest

from memsearcher.files import BadInput
from memsearcher.learner.collate import Row, by_questions, collate, row, rows
from memsearcher.learner.losses import PolicyLoss
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
