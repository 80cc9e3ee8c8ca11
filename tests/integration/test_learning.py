"""It learns where it should, and a run that collapses is seen and brought back."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_policy

from memsearcher import params, stop_loss
from memsearcher.agent.scoring import with_reward
from memsearcher.engine.inprocess import InProcessEngine
from memsearcher.grpo import group_advantages
from memsearcher.learner.collate import Row, rows
from memsearcher.learner.deepspeed import Learner
from memsearcher.learner.losses import ImitationLoss, PolicyLoss
from memsearcher.learner.ranks import Ranks
from memsearcher.learner.settings import Settings
from memsearcher.training import Log, describe, rescue
from memsearcher.types import Question, StopReason, Trajectory, Turn

pytestmark = pytest.mark.slow
LIMITS = params.load().train.stop_loss


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def test_two_answers_are_learned_in_thirty_steps(policy, tmp_path):
    """Right is 1 after prompt [10], 2 after [11]. A short imitation of both makes a policy that
    tosses a coin; 8 questions × 8 then tell it which."""
    prompts, right = [[10], [11]] * 4, [1, 2] * 4
    learner = Learner.open(Settings(policy, 5e-3, 4096, zero_stage=1), Ranks(1))
    coin = [Row([prompt, said], 1, [True], [0.0]) for prompt in (10, 11) for said in (1, 2)]
    for _ in range(60):
        learner.update([coin], ImitationLoss())
    learner.export(tmp_path / "coin")
    learner = Learner.open(Settings(tmp_path / "coin", 2e-3, 4096, zero_stage=1), Ranks(1))
    generator = torch.Generator().manual_seed(1)
    history = []
    for _ in range(30):
        done, rewards = [], []
        with torch.no_grad():
            logits = learner.engine.module.policy(torch.tensor([[10], [11]])).logits[:, -1]
        tables = logits.log_softmax(-1)
        for number, (prompt, answer) in enumerate(zip(prompts, right, strict=True)):
            table = tables[prompt[0] - 10]
            for member in range(8):
                said = int(torch.multinomial(table.exp(), 1, generator=generator))
                turn = Turn(prompt, [said], [True], [table[said].item()], "", "")
                question = Question(str(number), "two", "", (str(answer),))
                reward = 1.0 if said == answer else 0.1 * (said in right)
                done.append(Trajectory(question, member, (turn,), StopReason.ANSWERED))
                rewards.append(reward)
        advantages = group_advantages(rewards, [t.question.id for t in done])
        learner.update([rows(done, advantages)], PolicyLoss())
        history.append(sum(r == 1.0 for r in rewards) / len(rewards))
    assert 0.2 < history[0] < 0.8
    assert max(history[20:]) > 0.9, history


SEARCH, BABBLE = 3, 4
ANSWERS = range(20, 28)  # after a search, ANSWERS[q] is right for question q
Tables = list[torch.Tensor]


def tables(learner: Learner) -> Tables:
    """Two times (8, V): log-probs of what is said first, and of what is said after a search."""
    first = torch.tensor([[10 + q] for q in range(8)])
    second = torch.tensor([[10 + q, 40 + q] for q in range(8)])
    policy = learner.engine.module.policy
    with torch.no_grad():
        return [policy(prompts).logits[:, -1].log_softmax(-1) for prompts in (first, second)]


def play(at: Tables, step: int, group_size: int = 8) -> list[Trajectory]:
    """A search task of two tokens: search, then say what the passage says, for 1. An answer without
    a search is a guess, wrong and well formed, as is another passage's: 0.1. Babble is worth 0."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for q in range(8):
        question = Question(str(q), "two", "", ("right",))
        for member in range(group_size):
            turns: list[Turn] = []
            said = SEARCH
            for prompt, table in (([10 + q], at[0][q]), ([10 + q, 40 + q], at[1][q])):
                if said == SEARCH:
                    said = int(torch.multinomial(table.exp(), 1, generator=generator))
                    query = "q" if said == SEARCH else None
                    logprobs = [table[said].item()]
                    turns.append(Turn(prompt, [said], [True], logprobs, "", "", query=query))
            answer = "right" if said == ANSWERS[q] and len(turns) == 2 else "wrong"
            stop = StopReason.ANSWERED if said in ANSWERS else StopReason.NO_ACTION
            trajectory = Trajectory(question, member, tuple(turns), stop, answer)
            made.append(with_reward(trajectory, "sound"))
    return made


def expected_em(at: Tables) -> float:
    """Exact: the dev EM of this task."""
    right = at[0][:, SEARCH] + at[1][range(8), list(ANSWERS)]
    return float(right.exp().mean())


@pytest.fixture(scope="module")
def searcher(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Early in training: searches nine times of ten, then babbles forty-nine times of fifty."""
    learner = Learner.open(Settings(policy, 5e-3, 4096, zero_stage=1), Ranks(1))
    coin = []
    for q in range(8):
        first = [SEARCH] * 9 + [ANSWERS[(q + 3) % 8]]
        second = [BABBLE] * 49 + [ANSWERS[q]]
        coin += [Row([10 + q, said], 1, [True], [0.0]) for said in first]
        coin += [Row([10 + q, 40 + q, said], 2, [True], [0.0]) for said in second]
    for _ in range(120):
        learner.update([coin], ImitationLoss())
    folder = tmp_path_factory.mktemp("searcher")
    learner.export(folder)
    return folder


def one_step(learner: Learner, log: Log, checkpoints: Path, step: int) -> None:
    """GRPO, measured and kept as stages/train.py does it."""
    done = play(tables(learner), step)
    advantages = group_advantages([t.reward for t in done], [t.question.id for t in done])
    record = {"step": step, **describe(done, advantages)}
    record |= learner.update([rows(done, advantages)], PolicyLoss())
    log.add(record | {"dev_em": expected_em(tables(learner))})
    best = stop_loss.best(log.rows())
    assert best is not None
    if best["step"] == step:
        learner.save(checkpoints, step, 1, step)


def test_a_learning_rate_of_1e_3_collapses_and_the_stop_loss_sees_it(searcher, tmp_path):
    """Within 20 steps it answers at once for the 0.1; at a tenth of the rate it still searches."""
    limits, end = replace(LIMITS, action="stop"), {}
    for lr in (1e-3, 1e-4):
        learner = Learner.open(Settings(searcher, lr, 4096, zero_stage=1), Ranks(1))
        log = Log(tmp_path / f"{lr}.jsonl", 0)
        for step in range(1, 21):
            one_step(learner, log, tmp_path / str(lr), step)
        end[lr] = log.rows()
    fast, slow = end[1e-3], end[1e-4]
    assert fast[0]["searches"] > 0.8
    assert fast[0]["reward"] < 0.05
    for row in fast[-3:]:
        assert row["searches"] < 0.1
        assert row["em"] < 0.1
        assert 0.07 < row["reward"] < 0.2
        assert row["format"] > 0.7
    seen = next(k for k in range(21) if stop_loss.tripped(fast[:k], limits))
    assert seen <= 12
    assert "searches" in stop_loss.tripped(fast[:seen], limits)
    assert all(stop_loss.tripped(slow[:k], limits) is None for k in range(21))


def test_a_collapse_is_brought_back_twice_and_then_ends_the_run(searcher, tmp_path):
    """By action `restore`: the best checkpoint's weights, to the engine too, at half the rate."""
    limits, checkpoints = replace(LIMITS, action="restore"), tmp_path / "checkpoints"
    learner = Learner.open(Settings(searcher, 1e-3, 4096, zero_stage=1), Ranks(1))
    engine = InProcessEngine(searcher, dtype="float32", max_num_seqs=64)
    log, step, cause = Log(tmp_path / "metrics.jsonl", 0), 0, None
    while cause is None and step < 60:
        step += 1
        one_step(learner, log, checkpoints, step)
        before = len(stop_loss.restores(log.rows()))
        cause = asyncio.run(rescue(learner, engine, log, step, limits, checkpoints, 1))
        back = stop_loss.restores(log.rows())
        if len(back) > before:
            assert (back[-1]["step"], engine.weight_version) == (step, len(back))
            top = stop_loss.best(log.rows())
            assert expected_em(tables(learner)) == pytest.approx(top["dev_em"], abs=1e-7)
            assert learner.lr_scale == 0.5 ** len(back)
            assert learner.resume(checkpoints) == step  # a killed run would go on from here
            assert learner.lr_scale == 0.5 ** len(back)
    assert cause is not None
    assert "searches" in cause
    assert len(stop_loss.restores(log.rows())) == stop_loss.RESTORES
