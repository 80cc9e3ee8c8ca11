"""The learner through DeepSpeed: C12, resuming, skipping, exporting, and that it learns."""

import asyncio
import itertools
import json
import socket
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCABULARY, eight_turns, python, tiny_policy

from memsearcher.engine.inprocess import InProcessEngine
from memsearcher.files import BadInput
from memsearcher.grpo import group_advantages, one_update, token_logprobs, token_loss
from memsearcher.learner import checkpoint
from memsearcher.learner.collate import collate
from memsearcher.learner.deepspeed import Learner, LearnerFailed
from memsearcher.learner.losses import ImitationLoss, PolicyLoss
from memsearcher.learner.model import load_policy
from memsearcher.learner.packing import pack
from memsearcher.learner.ranks import Ranks
from memsearcher.learner.settings import Settings

pytestmark = pytest.mark.slow
LOSS = PolicyLoss(kl_coef=0.1)
BUDGETS = {1: 1000, 2: 60, 4: 26}  # accumulation at least: tokens a micro-batch
FEW_LOGITS = 4 * 3 * VOCABULARY  # the head takes three tokens at a time


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


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


def step(
    folder: Path,
    ranks: Ranks,
    budget: int,
    zero: int,
    loss: PolicyLoss = LOSS,
    logits_bytes: int | None = None,
) -> Learner:
    settings = Settings(folder, 1e-3, budget, reference=folder, zero_stage=zero, max_grad_norm=1e9)
    learner = Learner.open(settings, ranks)
    learner.engine.module.logits_bytes = logits_bytes
    learner.update([eight_turns()], loss)
    return learner


@pytest.mark.parametrize("rule", ["token", "turn", "trajectory"])
def test_c12_accumulation_on_one_rank(policy, rule):
    loss = replace(LOSS, aggregation=rule)
    expected = gradients(step(policy, Ranks(1), BUDGETS[1], 0, loss))
    assert max(g.abs().max() for g in expected.values()) > 1e-2
    for accumulation, budget in BUDGETS.items():
        for zero in (0, 1, 2, 3):
            learner = step(policy, Ranks(1), budget, zero, loss, FEW_LOGITS)
            assert len(learner._pack(eight_turns(), loss)) >= accumulation
            for name, gradient in gradients(learner).items():
                worst = (gradient - expected[name]).abs().max().item()
                assert worst < 1e-6, (accumulation, zero, name)


def test_c12_two_ranks_and_every_zero_stage(policy, tmp_path):
    """All cells in one pair of processes, those of ZeRO 1 to 3 in bfloat16 too; one rank, one
    micro-batch, ZeRO 0 and float32 is the yardstick."""
    torch.save(gradients(step(policy, Ranks(1), BUDGETS[1], 0)), tmp_path / "alone.pt")
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        python("test_learner", "pair", policy, tmp_path, RANK=k, LOCAL_RANK=k, **place)
        for k in ("0", "1")
    ]
    for process in started:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-3000:]
    cells = json.loads((tmp_path / "cells.json").read_text())
    half = {name: cells.pop(name) for name in list(cells) if "bfloat16" in name}
    assert (len(cells), len(half)) == (12, 9)
    assert max(cells.values()) < 1e-6, cells
    assert max(half.values()) < 2e-3, half  # of up to 0.086: a wrong factor would show


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bfloat16_moves_as_far_as_float32(policy, tmp_path, zero):
    """What a GPU runs, on the CPU. Adam's first step is lr for every weight that has a gradient;
    DeepSpeed's own stage 0 moved them by 0.73 of it."""
    far = {}
    for bf16 in (False, True):
        settings = Settings(policy, 1e-3, 60, policy, zero_stage=zero, bf16=bf16)
        learner = Learner.open(replace(settings, gradient_checkpointing=True), Ranks(1))
        before = {name: tensor.float().clone() for name, tensor in learner.weights()}
        figures = learner.update([eight_turns()], LOSS)
        moved = [(t.float() - before[name]).abs().flatten() for name, t in learner.weights()]
        far[bf16] = (figures["grad_norm"], torch.cat(moved).mean().item())
    assert far[True] == pytest.approx(far[False], rel=0.05)

    learner.save(tmp_path, 1, 1)
    saved = learner.logprobs(eight_turns())
    learner.update([eight_turns()], LOSS)
    assert learner.logprobs(eight_turns()) != saved
    assert learner.resume(tmp_path) == 1
    assert learner.logprobs(eight_turns()) == saved
    learner.export(tmp_path / "export")  # reads it back itself
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert (tmp_path / "export" / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bfloat16_gradients_do_not_depend_on_the_number_of_microbatches(policy, zero):
    """A row each, against torch in float32 on the CPU without DeepSpeed. Summed in bfloat16, as
    DeepSpeed would by itself, 512 micro-batches were 0.083 off; what one pass rounds is 0.006."""
    turns = [replace(r, trajectory=f"{k} {r.trajectory}") for k in range(64) for r in eight_turns()]
    settings = Settings(policy, 1e-3, 1, zero_stage=zero, bf16=True, max_grad_norm=1e9)
    learner = Learner.open(settings, Ranks(1))
    learner.update([turns], PolicyLoss())
    plain = load_policy(policy, torch.float32)
    for batch in pack(turns, PolicyLoss(), 10**6):
        logits = plain(batch.input_ids).logits[batch.select]
        logprobs, _ = token_logprobs(logits, batch.targets)
        losses = token_loss(logprobs, logprobs.detach(), batch.advantages).loss
        (losses * batch.weights).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    found = torch.cat([g.cpu().float().flatten() for g in gradients(learner).values()])
    assert (found - expected).norm() / expected.norm() < 0.01


def test_followers_do_what_rank_0_says(policy, tmp_path):
    """ZeRO-3 over two ranks from one process: update, full-shaped untied weights, export; checksums
    of three tensors agree between what an engine was sent and what was exported (C24)."""
    process = python("test_learner", "lead", policy, tmp_path)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    shapes = json.loads((tmp_path / "shapes.json").read_text())
    before, after = (load_file(f / "model.safetensors") for f in (policy, tmp_path / "export"))
    assert shapes.pop("lm_head.weight") == [VOCABULARY, 32]
    assert shapes == {name: list(tensor.shape) for name, tensor in before.items()}
    moved = [(before[name] - after[name]).abs().max().item() for name in before]
    assert 0 < max(moved) < 2e-3
    sums = json.loads((tmp_path / "checksums.json").read_text())
    assert sums == {name: checksum(after[name]) for name in CHECKED}
    assert sums != {name: checksum(before[name]) for name in CHECKED}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def pair(folder: str, out: str) -> None:
    """One rank of two that both run the whole test, so that DeepSpeed's state can be gathered."""
    alone = torch.load(Path(out) / "alone.pt", weights_only=True)
    ranks, place, cells = Ranks(2), Path(folder), {}
    for zero, (accumulation, budget) in itertools.product((0, 1, 2, 3), BUDGETS.items()):
        for dtype in ("float32", "bfloat16") if zero else ("float32",):
            half, wide = dtype == "bfloat16", {"zero_stage": zero, "max_grad_norm": 1e9}
            learner = Learner(Settings(place, 1e-3, budget, place, bf16=half, **wide), ranks)
            learner.engine.module.logits_bytes = FEW_LOGITS
            Learner.update.__wrapped__(learner, [eight_turns()], LOSS)
            gaps = [
                (g.float() - alone[n]).abs().max().item() for n, g in gradients(learner).items()
            ]
            cells[f"{dtype}, zero {zero}, accumulation {accumulation}"] = max(gaps)
    if ranks.rank == 0:
        (Path(out) / "cells.json").write_text(json.dumps(cells))


CHECKED = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
)


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().numpy().tobytes())


def lead(folder: str, out: str) -> None:
    ranks, place = Ranks(2), Path(folder)
    settings = Settings(place, 1e-3, BUDGETS[2], place, zero_stage=3)
    learner = Learner.open(settings, ranks)
    learner.update([eight_turns()], LOSS)
    shapes = {name: list(tensor.shape) for name, tensor in learner.weights()}
    engine = InProcessEngine(place, dtype="float32", max_num_seqs=1)
    asyncio.run(engine.update_weights(learner.weights()))
    received = dict(engine.model.named_parameters())
    sums = {name: checksum(received[name]) for name in CHECKED}
    (Path(out) / "checksums.json").write_text(json.dumps(sums))
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


def test_the_last_and_the_best_checkpoint_stay_and_the_best_comes_back(policy, tmp_path):
    learner = Learner.open(Settings(policy, 1e-3, 1000, zero_stage=1), Ranks(1))
    for number in range(1, 6):
        learner.update([eight_turns()], LOSS)
        learner.save(tmp_path, number, 2, min(number, 2))
        if number == 2:
            best = weights(learner)
    names = [f.name for f in checkpoint.folders(tmp_path)]
    assert names == ["step-000002", "step-000004", "step-000005"]
    learner.restore(tmp_path, 2, 0.5)
    assert all(torch.equal(tensor, best[name]) for name, tensor in weights(learner).items())
    assert learner.weight_version == 6
    assert learner.update([eight_turns()], LOSS)["lr"] == pytest.approx(5e-4)
    learner.save(tmp_path, 6, 2, 2)
    again = Learner.open(Settings(policy, 1e-3, 1000, zero_stage=1), Ranks(1))
    assert again.resume(tmp_path) == 6
    assert (again.lr_scale, again.weight_version, again.updates) == (0.5, 7, 3)


def test_disk_use_is_stated_from_above(policy, tmp_path):
    learner = Learner.open(Settings(policy, 1e-3, 1000, zero_stage=1), Ranks(1))
    for number in range(1, 4):
        learner.update([eight_turns()], LOSS)
        learner.save(tmp_path, number, 1, 1)
    learner.export(tmp_path / "a")
    learner.export(tmp_path / "b")
    used = sum(p.stat().st_size for p in tmp_path.rglob("*.*") if p.is_file())
    stated = checkpoint.most_bytes((policy / "model.safetensors").stat().st_size, 1, False)
    assert 0.5 * stated < used < stated, (used, stated)


def test_a_checkpoint_of_another_run_is_refused(policy, tmp_path):
    Learner.open(Settings(policy, 1e-3, 1000, run="abc"), Ranks(1)).save(tmp_path, 1, 1)
    other = Learner.open(Settings(policy, 1e-3, 1000, run="def"), Ranks(1))
    with pytest.raises(BadInput, match="of run 'abc', this is run 'def'"):
        other.resume(tmp_path)


def test_the_learner_does_the_pages_one_update(policy):
    """Two optimiser steps of AdamW, DeepSpeed and micro-batches against torch and the page."""
    turns, rewards, groups = eight_turns(), [1.0, 0.0, 0.25, 0.75], list("aabb")
    advantages = group_advantages(rewards, groups)
    turn_of = [int(r.trajectory) for r in turns]
    trained = [replace(r, advantage=advantages[i]) for r, i in zip(turns, turn_of, strict=True)]
    learner = Learner.open(Settings(policy, 1e-3, 26, zero_stage=1, max_grad_norm=1e9), Ranks(1))
    plain = load_policy(policy, torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    batch, least = collate(turns), {}  # the least share of the largest gradient in either step
    for _ in range(2):
        logits = plain(batch.input_ids).logits[batch.select]
        flat, _ = token_logprobs(logits, batch.targets)
        logprobs = flat.new_zeros(batch.select.shape).masked_scatter(batch.select, flat)
        loss = one_update(
            logprobs, logprobs.detach(), batch.select, turn_of, rewards, groups, optimizer, "turn"
        )
        ours = learner.update([trained], PolicyLoss(aggregation="turn"))
        assert ours["loss"] == pytest.approx(loss, abs=1e-6)
        for name, parameter in plain.named_parameters():
            size = parameter.grad.abs() / parameter.grad.abs().max()
            least[name] = torch.minimum(least.get(name, size), size)
    expected = dict(plain.named_parameters())
    for name, tensor in weights(learner).items():
        if name in expected:
            gap = (tensor - expected[name]).abs()
            assert gap[least[name] > 1e-3].max() < 1e-6, name
            assert gap.max() < 1e-5, name  # Adam divides by gradients that are rounding alone


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


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("option", ["offload", "gradient_checkpointing"])
def test_where_things_live_and_what_is_recomputed_change_no_update(policy, option, zero, bf16):
    """Offload of the optimiser, in ZeRO 3 of the weights too; activations recomputed."""
    made = []
    for on in (False, True):
        settings = Settings(policy, 1e-3, 60, policy, zero_stage=zero, bf16=bf16, **{option: on})
        learner = Learner.open(settings, Ranks(1))
        learner.update([eight_turns()], LOSS)
        made.append(weights(learner))
    plain, other = made
    assert all((plain[name] - other[name]).abs().max() < 1e-6 for name in plain)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_is_left_out_and_three_stop_the_run(policy, zero, bf16, tmp_path):
    settings = Settings(policy, 1e-2, 60, zero_stage=zero, dumps=tmp_path, bf16=bf16)
    learner = Learner.open(settings, Ranks(1))
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
    dumps = sorted(tmp_path.iterdir())
    assert [d.name for d in dumps] == [f"update-00000{n}.json" for n in (1, 2, 4, 5, 6)]
    dumped = json.loads(dumps[0].read_text())
    assert [row["ids"] for row in dumped["rows"]] == [r.ids for r in eight_turns()]
    assert dumped["figures"]["skipped"] == 1


def test_nothing_to_learn_from_is_no_step(policy):
    learner = Learner.open(Settings(policy, 1e-2, 60), Ranks(1))
    nothing = learner.update([[], []], PolicyLoss())
    assert (nothing["loss"], nothing["optimiser_steps"], nothing["empty_minibatches"]) == (0, 0, 2)
    foreign = replace(eight_turns()[0], ids=[VOCABULARY] * 6)
    with pytest.raises(BadInput, match="token id 97 but the policy's vocabulary has 97"):
        learner.update([[foreign]], PolicyLoss())


def test_it_imitates(policy):
    learner = Learner.open(Settings(policy, 3e-3, 60), Ranks(1))
    losses = [learner.update([eight_turns()], ImitationLoss())["loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(4.57, abs=0.1)
    assert losses[-1] < 2.0
