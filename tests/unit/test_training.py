"""Around the algorithm, and the loop of stages/train.py where a step is rolled out ahead."""

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tiny import Digits, tiny_policy
from torch import Tensor

from flows.compose import composed
from memsearcher import files
from memsearcher.engine.contract import Completion, Sampling
from memsearcher.engine.inprocess import InProcessEngine
from memsearcher.learner.collate import Row
from memsearcher.learner.deepspeed import Learner
from memsearcher.learner.losses import Loss
from memsearcher.learner.ranks import Ranks
from memsearcher.learner.settings import Settings
from memsearcher.loop import both
from memsearcher.params import Params, validate
from memsearcher.steps import Parts
from memsearcher.tracking import NullRun
from memsearcher.training import WeightsDiffer, probe, staleness
from memsearcher.types import Hit, Passage, Question, StopReason, Trajectory, Turn
from stages.frame import Job
from stages.train import STAGE, _steps

QUESTION = Question("nq/1", "nq", "?", ("even",))


def test_staleness_counts_sampled_tokens_of_valid_trajectories() -> None:
    def turn(version: int, sampled: int) -> Turn:
        mask = [True] * sampled + [False] * 5
        return Turn([1], [2] * len(mask), mask, [0.0] * len(mask), "", "", weight_version=version)

    whole = Trajectory(QUESTION, 0, (turn(3, 1), turn(2, 3)), StopReason.ANSWERED)
    failed = Trajectory(QUESTION, 1, (), StopReason.INFRA_FAILED)
    assert staleness([whole, failed], 3) == {"staleness_mean": 0.75, "staleness_max": 1}
    assert staleness([failed], 3) == {}


def test_both_end_together() -> None:
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def breaks() -> None:
        await asyncio.sleep(0)
        raise KeyError("no such column")

    async def number(n: int) -> int:
        return n

    assert asyncio.run(both(number(1), number(2))) == (1, 2)
    with pytest.raises(KeyError, match="no such column"):
        asyncio.run(both(waits(), breaks()))
    assert cancelled.is_set()


class Off:
    """An engine and a learner that differ by gaps[k] in each log-prob after prompt [k]."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = gaps
        self.asked: list[Sampling] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        return Completion([5, 6], [-1.0, -2.0], False, 0)

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        return [[value + self.gaps[r.ids[0]] for value in r.sampler_logprobs] for r in rows]


def test_the_probe_asks_for_the_whole_distribution_and_stops_past_its_bound() -> None:
    cut = Sampling(8, temperature=0.6, top_p=0.9, top_k=5, constrained=True)
    near = Off(1e-5, -2e-5, 0.0)
    gap = asyncio.run(probe(near, near, [[0], [1], [2]], cut, 1e-4))  # type: ignore[arg-type]
    assert gap == pytest.approx(2e-5)  # of the worst prompt: one stale prefix is enough
    assert near.asked == [Sampling(8, temperature=0.6, seed=n) for n in range(3)]
    for gaps, said in (((0.0, 0.3), "0.3"), ((0.0, float("nan")), "nan")):
        far = Off(*gaps)
        with pytest.raises(WeightsDiffer, match=rf"differ by {said} .*probe_bound is 0\.0001"):
            asyncio.run(probe(far, far, [[0], [1]], cut, 1e-4))  # type: ignore[arg-type]


class Watched(InProcessEngine):
    """Refuses new weights while anything is generated; counts requests."""

    running = requests = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.running, self.requests = self.running + 1, self.requests + 1
        try:
            return await super().generate(prompt_ids, sampling)
        finally:
            self.running -= 1

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert self.running == 0
        await super().update_weights(weights)


class Overlapped(Learner):
    """An update that somebody generates behind ends only after that was seen."""

    watched: Watched
    seen: list[bool]

    def update(self, minibatches: Sequence[Sequence[Row]], loss: Loss) -> dict[str, float]:
        ahead = threading.current_thread() is not threading.main_thread()
        before, end = self.watched.requests, time.monotonic() + 60
        while ahead and self.watched.requests == before:
            assert time.monotonic() < end, "nothing is generated while the learner updates"
            time.sleep(0.001)
        self.seen.append(ahead)
        return super().update(minibatches, loss)


class Coin:
    """Two turns: two tokens each at first, three from step 2 on. Right where their sum is even."""

    k = 1

    async def run(self, question, member, engine, search, *, sampling, max_turns, seed):
        turns, said = [], []
        step = seed % 1_000_003
        for _ in range(2):
            prompt = [int(question.id), *said]
            await search("anything")
            own = replace(sampling, max_tokens=2 + (step > 1), seed=seed * 100 + 10 * member)
            done = await engine.generate(prompt, own)
            made = Turn(prompt, done.ids, [True] * len(done.ids), done.logprobs, "", "")
            turns.append(replace(made, weight_version=done.weight_version))
            said += done.ids
        answer = "odd" if sum(said) % 2 else "even"
        return Trajectory(question, member, tuple(turns), StopReason.ANSWERED, answer)


class One:
    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[Hit("0", 1.0, 1)] for _ in queries]

    def passage(self, passage_id: str) -> Passage:
        return Passage(passage_id, "", "")


SMALL = ("steps=4", "async_steps=1", "tis_cap=2.0", "checkpoint_every=1", "questions_per_step=2")
SMALL += ("group_size=4", "eval_every=0", "stop_loss.action=off", "lr=1e-3", "kl_coef=0.0")


def train(root: Path, policy: Path, *changes: str) -> tuple[list[dict], list[bool], dict]:
    """(records, whether each update had a roll-out behind it, final weights) of one run."""
    from safetensors.torch import load_file

    overrides = ["experiment=smoke", *(f"train.{change}" for change in (*SMALL, *changes))]
    params: Params = validate(yaml.safe_load(composed(overrides)))
    job = Job(STAGE, params, "memsearcher", NullRun())
    job.fingerprint, job.work = "same", root / "work"
    settings = Settings.of(params.train, policy, "same", root / "skipped")
    learner = Overlapped.open(settings, Ranks(1))
    learner.watched = Watched(policy, dtype="float32", max_num_seqs=64)
    learner.seen = []
    questions = [Question(str(i), "nq", "?", ("even",)) for i in range(10, 20)]
    parts = Parts(Coin(), learner.watched, One(), learner, questions, questions[:2], Digits())
    asyncio.run(_steps(job, parts))
    records = list(files.read_jsonl(job.work / "metrics.jsonl"))
    weights = load_file("models/train/memsearcher/model.safetensors")
    return [r for r in records if "reward" in r], learner.seen, weights


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tiny_policy(tmp_path / "policy")


@pytest.mark.slow
def test_a_step_rolled_out_ahead_is_one_update_old_and_the_run_repeats(
    tmp_path: Path, policy: Path
) -> None:
    """The last step has nothing ahead of it; a resumed run begins with a step of its own."""
    records, seen, weights = train(tmp_path / "a", policy)
    assert [r["staleness_max"] for r in records] == [0, 1, 1, 1]
    assert [r["staleness_mean"] for r in records] == [0.0, 1.0, 1.0, 1.0]
    assert seen == [True, True, True, False]
    assert records[0]["sampler_gap_max"] < 1e-5
    assert max(r["sampler_gap_max"] for r in records[1:]) > 1e-3

    _, _, again = train(tmp_path / "b", policy)
    assert all(torch.equal(weights[name], again[name]) for name in weights)

    train(tmp_path / "c", policy, "steps=2")
    records, seen, _ = train(tmp_path / "c", policy)
    assert [r["staleness_max"] for r in records] == [0, 1, 0, 1]
    assert seen == [True, False]


@pytest.mark.slow
def test_a_step_rolled_out_by_a_policy_that_was_given_up_is_rolled_out_again(
    tmp_path: Path, policy: Path
) -> None:
    """Trajectories grow past the limit at step 2 and stay there: restored twice, then stopped."""
    limits = ("action=restore", "patience=1", "baseline_steps=1", "max_response_share=1.2")
    changes = (*(f"stop_loss.{each}" for each in limits), "eval_every=1", "steps=8")
    records, _, _ = train(tmp_path, policy, *changes)
    assert [r["staleness_max"] for r in records] == [0, 1, 0, 0]
