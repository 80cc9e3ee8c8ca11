"""The learner through DeepSpeed: C12, resuming, skipping, exporting, and that it learns."""

import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memsearcher.files import ROOT, BadInput
from memsearcher.grpo import group_advantages
from memsearcher.learner import checkpoint
from memsearcher.learner.collate import Row, rows
from memsearcher.learner.deepspeed import Learner, LearnerFailed
from memsearcher.learner.losses import ImitationLoss, PolicyLoss
from memsearcher.learner.ranks import Ranks
from memsearcher.learner.settings import Settings
from memsearcher.types import Question, StopReason, Trajectory, Turn

pytestmark = pytest.mark.slow
VOCABULARY = 97
LOSS = PolicyLoss(kl_coef=0.1)
BUDGETS = {1: 1000, 2: 60, 4: 26}  # accumulation at least: tokens a micro-batch


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


def tiny_policy(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def eight_turns() -> list[Row]:
    """1 … 8 sampled tokens, two tokens of observation behind them."""
    rng, made = random.Random(0), []
    for i in range(8):
        prompt, count = rng.randrange(2, 6), i + 1
        ids = [rng.randrange(VOCABULARY) for _ in range(prompt + count + 2)]
        mask, logprobs = [True] * count + [False] * 2, [-4.5] * count + [0.0] * 2
        made.append(Row(ids, prompt, mask, logprobs, rng.uniform(-1, 1), trajectory=str(i // 2)))
    return made


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Of the first optimiser step, read off Adam's first moment (0.1 × gradient). Full shapes."""
    from deepspeed.utils import safe_get_full_optimizer_state

    state = {}
    for name, parameter in learner.engine.module.policy.named_parameters():
        if learner.settings.zero_stage:
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        else:
            moment = learner.optimizer.state[parameter]["exp_avg"]
        state[name] = moment.clone() / 0.1
    return state


def step(folder: Path, ranks: Ranks, budget: int, zero: int, loss: PolicyLoss = LOSS) -> Learner:
    settings = Settings(folder, 1e-3, budget, reference=folder, zero_stage=zero, max_grad_norm=1e9)
    learner = Learner.open(settings, ranks)
    learner.update([eight_turns()], loss)
    return learner


@pytest.mark.parametrize("rule", ["token", "turn", "trajectory"])
def test_c12_accumulation_on_one_rank(policy, rule):
    loss = replace(LOSS, aggregation=rule)
    expected = gradients(step(policy, Ranks(1), BUDGETS[1], 0, loss))
    assert max(g.abs().max() for g in expected.values()) > 1e-2
    for accumulation, budget in BUDGETS.items():
        for zero in (0, 1, 2):
            learner = step(policy, Ranks(1), budget, zero, loss)
            assert len(learner._pack(eight_turns(), loss)) >= accumulation
            for name, gradient in gradients(learner).items():
                worst = (gradient - expected[name]).abs().max().item()
                assert worst < 1e-6, (accumulation, zero, name)


def test_c12_two_ranks_and_every_zero_stage(policy, tmp_path):
    """All cells in one pair of processes; one rank, one micro-batch, ZeRO 0 is the yardstick."""
    torch.save(gradients(step(policy, Ranks(1), BUDGETS[1], 0)), tmp_path / "alone.pt")
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [python("pair", policy, tmp_path, RANK=k, LOCAL_RANK=k, **place) for k in ("0", "1")]
    for process in started:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-3000:]
    cells = json.loads((tmp_path / "cells.json").read_text())
    assert len(cells) == 12
    assert max(cells.values()) < 1e-6, cells


def test_followers_do_what_rank_0_says(policy, tmp_path):
    """ZeRO-3 over two ranks from one process: update, full-shaped untied weights, export (C24)."""
    process = python("lead", policy, tmp_path)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    shapes = json.loads((tmp_path / "shapes.json").read_text())
    before, after = (load_file(f / "model.safetensors") for f in (policy, tmp_path / "export"))
    assert shapes.pop("lm_head.weight") == [VOCABULARY, 32]
    assert shapes == {name: list(tensor.shape) for name, tensor in before.items()}
    moved = [(before[name] - after[name]).abs().max().item() for name in before]
    assert 0 < max(moved) < 2e-3


def python(function: str, *arguments: Path, **environment: str) -> subprocess.Popen[str]:
    """This file's `function` in a process of its own that belongs to no ranks yet."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {k: v for k, v in os.environ.items() if k not in own}
    code = f"import sys; from tests.integration.test_learner import *; {function}(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def pair(folder: str, out: str) -> None:
    """One rank of two that both run the whole test, so that DeepSpeed's state can be gathered."""
    alone = torch.load(Path(out) / "alone.pt", weights_only=True)
    ranks, cells = Ranks(2), {}
    for zero in (0, 1, 2, 3):
        for accumulation, budget in BUDGETS.items():
            place = Path(folder)
            settings = Settings(place, 1e-3, budget, place, zero_stage=zero, max_grad_norm=1e9)
            learner = Learner(settings, ranks)
            Learner.update.__wrapped__(learner, [eight_turns()], LOSS)
            gaps = [(g - alone[n]).abs().max().item() for n, g in gradients(learner).items()]
            cells[f"zero {zero}, accumulation {accumulation}"] = max(gaps)
    if ranks.rank == 0:
        (Path(out) / "cells.json").write_text(json.dumps(cells))


def lead(folder: str, out: str) -> None:
    ranks, place = Ranks(2), Path(folder)
    settings = Settings(place, 1e-3, BUDGETS[2], place, zero_stage=3)
    learner = Learner.open(settings, ranks)
    learner.update([eight_turns()], LOSS)
    shapes = {name: list(tensor.shape) for name, tensor in learner.weights()}
    learner.export(Path(out) / "export")
    (Path(out) / "shapes.json").write_text(json.dumps(shapes))
    learner.close()


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


@pytest.mark.parametrize("zero", [0, 1])
def test_a_resumed_learner_goes_on_bit_by_bit(policy, tmp_path, zero):
    settings = Settings(policy, 1e-3, 60, reference=policy, zero_stage=zero, lr_warmup_steps=3)
    straight = Learner.open(settings, Ranks(1))
    for number in range(1, 5):
        straight.update([eight_turns()[:4], eight_turns()[4:]], LOSS)
        if number <= 2:
            straight.save(tmp_path, number, 1)
    again = Learner.open(settings, Ranks(1))
    assert [f.name for f in checkpoint.folders(tmp_path)] == ["step-000002"]
    assert again.resume(tmp_path) == 2
    for _ in range(2):
        again.update([eight_turns()[:4], eight_turns()[4:]], LOSS)
    expected = weights(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(again).items())


def test_only_files_of_the_manifest_are_read(policy, tmp_path):
    settings = Settings(policy, 1e-3, 1000, zero_stage=1)
    learner = Learner.open(settings, Ranks(1))
    assert learner.resume(tmp_path) == 0
    learner.save(tmp_path, 1, 2)
    (tmp_path / "step-000002").mkdir()  # a checkpoint that was not finished
    assert learner.resume(tmp_path) == 1
    victim = next(p for p in (tmp_path / "step-000001").iterdir() if p.suffix == ".pt")
    victim.write_bytes(victim.read_bytes() + b"x")
    with pytest.raises(BadInput, match="this run wrote"):
        learner.resume(tmp_path)
    (tmp_path / "step-000001" / "more.pt").write_bytes(b"x")
    with pytest.raises(BadInput, match=r"differ in \['more.pt'\]"):
        learner.resume(tmp_path)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_is_left_out_and_three_stop_the_run(policy, zero):
    learner = Learner.open(Settings(policy, 1e-2, 60, zero_stage=zero), Ranks(1))
    before = weights(learner)
    broken = [replace(r, advantage=float("nan")) for r in eight_turns()]
    for _ in range(2):
        assert learner.update([broken], PolicyLoss())["skipped_steps"] == 1
        assert all(torch.equal(t, before[name]) for name, t in weights(learner).items())
    assert learner.update([eight_turns()], PolicyLoss())["skipped_steps"] == 0
    assert not all(torch.equal(t, before[name]) for name, t in weights(learner).items())
    assert all(t.isfinite().all() for t in weights(learner).values())
    with pytest.raises(LearnerFailed, match="3 optimiser steps in a row"):
        learner.update([broken] * 3, PolicyLoss())


def test_nothing_to_learn_from_is_no_step(policy):
    learner = Learner.open(Settings(policy, 1e-2, 60), Ranks(1))
    assert learner.update([[], []], PolicyLoss())["optimiser_steps"] == 0
    foreign = replace(eight_turns()[0], ids=[VOCABULARY] * 6)
    with pytest.raises(BadInput, match="token id 97 but the policy's vocabulary has 97"):
        learner.update([[foreign]], PolicyLoss())


def test_it_imitates(policy):
    learner = Learner.open(Settings(policy, 3e-3, 60), Ranks(1))
    losses = [learner.update([eight_turns()], ImitationLoss())["loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(4.57, abs=0.1)
    assert losses[-1] < 2.0


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
