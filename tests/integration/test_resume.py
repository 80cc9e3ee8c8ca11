"""Killed outright in every phase, a run ends with the weights of one that was left alone.

The real loop of stages/train.py over the real in-process engine, learner and checkpoints; policy,
agent and task are as small as they get. One process imports everything once and forks the runs.
"""

import asyncio
import importlib
import json
import os
import random
import select
import signal
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import Digits, python, tiny_policy

from memsearcher import files
from memsearcher.params import load
from memsearcher.tracking import NullRun
from memsearcher.types import StopReason
from stages.frame import Job
from stages.train import STAGE

pytestmark = pytest.mark.slow
PHASES = ("rollout", "logprobs", "update", "checkpoint")
STEPS = 20
NAMES = ("reward", "em", "f1", "format", "turns", "searches", "response_tokens")
NAMES += ("context_tokens_turn_1", "context_tokens_turn_2", "memory_tokens", "memory_cut_rate")
NAMES += tuple(f"stop_{reason.value}" for reason in StopReason)
NAMES += ("advantage_mean", "advantage_std", "advantage_min", "advantage_max")
NAMES += ("zero_variance_share", "kl", "sampler_gap_mean", "sampler_gap_max", "clip_fraction")
NAMES += ("entropy", "grad_norm", "loss", "tokens_per_s", "padding_share", "weight_version")
NAMES += ("seconds", "seconds_rollout", "seconds_logprobs", "seconds_update", "seconds_weights")
SMALL = (
    f"steps={STEPS}",
    "checkpoint_every=1",
    "questions_per_step=2",
    "group_size=4",
    "minibatches=2",
)
SMALL += ("eval_every=0", "max_tokens_per_microbatch=64", "lr=1e-3")
SMALL += ("stop_loss.action=off", "kl_coef=0.01")


def test_five_kills_leave_no_trace(tmp_path):
    """max |Δ| of the final weights is 0, and so are those of every figure that is no time."""
    process = python("test_resume", "harness", tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    kills = json.loads((tmp_path / "kills.json").read_text())
    assert set(PHASES) <= {kill["phase"] for kill in kills if kill["inside"]}, kills
    assert sum(kill["inside"] for kill in kills) >= 5, kills

    from safetensors.torch import load_file

    straight, killed = (
        load_file(tmp_path / name / "models/train/memsearcher/model.safetensors")
        for name in ("straight", "killed")
    )
    start = load_file(tmp_path / "policy/model.safetensors")
    assert straight.keys() == killed.keys()
    assert max((straight[n] - start[n]).abs().max().item() for n in start) > 1e-3
    assert max((straight[n] - killed[n]).abs().max().item() for n in straight) == 0.0
    rows = [
        [
            {
                n: v
                for n, v in json.loads(line).items()
                if "seconds" not in n and n != "tokens_per_s"
            }
            for line in (tmp_path / name / "results/train/memsearcher/metrics.jsonl").open()
        ]
        for name in ("straight", "killed")
    ]
    assert [row["step"] for row in rows[0]] == list(range(1, STEPS + 1))
    assert rows[0] == rows[1]
    everything = json.loads(
        (tmp_path / "killed/results/train/memsearcher/metrics.jsonl").read_text().splitlines()[-1]
    )
    assert set(NAMES) <= everything.keys(), set(NAMES) - everything.keys()


def test_c16_another_memory_cap_is_another_journal_and_back_is_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = load()
    for dep in ("corpus", "index", "bm25", "questions"):
        files.write_json(Path(f"data/{dep}/manifest.json"), {})
    files.write_json(Path("models/warmup/memsearcher/config.json"), {})
    places = []
    for cap in (1024, 512, 1024):
        agent = replace(params.agent, max_memory_tokens=cap)
        job = Job(STAGE, replace(params, agent=agent), "memsearcher", NullRun())
        places.append(job.work)
        (job.work / str(cap)).touch()
    assert places[0] == places[2] != places[1]
    assert [p.name for p in places[1].iterdir()] == ["512"]


def harness(out: str) -> None:
    """Its own process: a run to the end, then one that is killed and started again."""
    root, rng = Path(out), random.Random(3)
    tiny_policy(root / "policy")
    _import()
    marks, _ = _run(root, "straight", None)
    took: dict[str, list[float]] = {}
    for (phase, began), (_, ended) in zip(marks[::2], marks[1::2], strict=True):
        took.setdefault(phase, []).append(ended - began)
    kills: list[dict] = []
    for phase in (*PHASES, rng.choice(PHASES)):
        for _ in range(8):  # on a busy machine a kill may come after its phase
            number = rng.randrange(1, len(took[phase]) // STEPS + 2)
            plan = (phase, number, rng.uniform(0, 0.8) * min(took[phase]))
            seen, status = _run(root, "killed", plan)
            assert os.WIFSIGNALED(status), f"ended before {plan}: {seen[-3:]}"
            inside = len(seen) % 2 == 1 and seen[-1][0] == phase
            kills.append({"phase": phase, "number": number, "delay_s": plan[2], "inside": inside})
            if inside:
                break
    _, status = _run(root, "killed", None)
    assert status == 0
    (root / "kills.json").write_text(json.dumps(kills))


Marks = list[tuple[str, float]]


def _run(root: Path, name: str, plan: tuple[str, int, float] | None) -> tuple[Marks, int]:
    """Forks a run in root/name and reads its marks, two for each phase: entered and left. SIGKILL
    `plan[2]` seconds after it has entered phase `plan[0]` for the `plan[1]`-th time."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        try:
            _train(root, name, theirs)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(theirs)
    text, entered = b"", 0
    while piece := os.read(ours, 4096):
        text += piece
        if plan is not None:
            entered = text.count(f"{plan[0]} 1 ".encode())
            if entered >= plan[1]:
                select.select([], [], [], plan[2])
                os.kill(child, signal.SIGKILL)
                plan = None
    _, status = os.waitpid(child, 0)
    os.close(ours)
    lines = [line.split() for line in text.decode().splitlines()]
    return [(phase, float(at)) for phase, _, at in lines], status


def _import() -> None:
    """What every run needs, once, before the forks."""
    names = ("torch", "transformers", "deepspeed", "stages.train", "memsearcher.engine.inprocess")
    for name in (*names, "memsearcher.learner.deepspeed", "memsearcher.training"):
        importlib.import_module(name)


def _train(root: Path, name: str, marks: int) -> None:
    """One run: what stages.train does after it has opened its parts."""
    import yaml

    from flows.compose import composed
    from memsearcher import params
    from memsearcher.engine.inprocess import InProcessEngine
    from memsearcher.learner.deepspeed import Learner
    from memsearcher.learner.ranks import Ranks
    from memsearcher.learner.settings import Settings
    from memsearcher.steps import Parts
    from memsearcher.types import Hit, Question, Trajectory, Turn
    from stages.train import _steps

    def mark(phase: str, entered: bool) -> None:
        os.write(marks, f"{phase} {int(entered)} {time.monotonic()}\n".encode())

    class Marked(Learner):
        def _run_all(self, *args):
            mark("logprobs", True)
            result = super()._run_all(*args)
            mark("logprobs", False)
            return result

        def _optimise(self, *args):
            mark("update", True)
            result = super()._optimise(*args)
            mark("update", False)
            return result

        def save(self, *args):
            mark("checkpoint", True)
            super().save(*args)
            mark("checkpoint", False)

    class Coin:
        """Two turns of up to three tokens; the answer is whether their sum is even."""

        k = 1
        marked = False

        async def run(self, question, member, engine, search, *, sampling, max_turns, seed):
            turns, said = [], []
            for number in range(2):
                draw = zlib.crc32(f"{seed} {question.id} {member} {number}".encode())
                prompt = [int(question.id), *said]
                marked = (number, member) == (0, 0) and not self.marked  # one at a time
                if marked:
                    self.marked = True
                    mark("rollout", True)
                    time.sleep(0.03)  # long enough to be killed in; blocking keeps the order
                await search("anything")
                limits = replace(sampling, max_tokens=3, seed=draw)
                done = await engine.generate(prompt, limits)
                if marked:
                    mark("rollout", False)
                    self.marked = False
                mask = [True] * len(done.ids)
                version = done.weight_version
                said_now = (done.ids, mask, done.logprobs, "", "")
                turns.append(Turn(prompt, *said_now, weight_version=version))
                said += done.ids
            answer = "odd" if sum(said) % 2 else "even"
            return Trajectory(question, member, tuple(turns), StopReason.ANSWERED, answer)

    class One:
        def search(self, queries, k):
            return [[Hit("0", 1.0, 1)] for _ in queries]

        def passage(self, _):
            return None

    place = root / name
    place.mkdir(exist_ok=True)
    os.chdir(place)
    overrides = ["experiment=smoke", *(f"train.{change}" for change in SMALL)]
    job = Job(STAGE, params.validate(yaml.safe_load(composed(overrides))), "memsearcher", NullRun())
    job.fingerprint, job.work = "same", Path("work")
    settings = Settings.of(job.params.train, root / "policy", job.fingerprint, Path("work/skipped"))
    engine = InProcessEngine(root / "policy", dtype="float32", max_num_seqs=64)
    questions = [Question(str(i), "nq", "?", ("even",)) for i in range(10, 20)]
    learner = Marked.open(settings, Ranks(1))
    parts = Parts(Coin(), engine, One(), learner, questions, questions[:2], Digits())
    asyncio.run(_steps(job, parts))
