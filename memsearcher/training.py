"""Around the algorithm: which questions a step takes, what a step is measured by, its journal.

No engine is opened and no model is loaded here; `stages/train.py` is the loop.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TypeVar

import numpy as np

from memsearcher import files, stop_loss, transcripts
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.files import BadInput
from memsearcher.learner.collate import Row, by_questions, rows
from memsearcher.learner.deepspeed import Learner
from memsearcher.params import StopLoss, Train
from memsearcher.types import StopReason, Trajectory

T = TypeVar("T")
Record = dict[str, float | int | str]


class TooManyFailures(RuntimeError):
    """Broken machinery in more trajectories than train.max_failed_share; tells the first cause."""


class WeightsDiffer(RuntimeError):
    """Engine and learner disagree about log-probs after an update by more than the bound."""


def draw(pool: Sequence[T], seed: int, step: int, count: int) -> list[T]:
    """The `count` members of step `step` (0, 1, …): a pure function of (seed, step), so that a
    resumed run sees what an uninterrupted one sees. Each epoch is a new order; the remainder that
    does not fill a step is left out of its epoch, so no step holds a member twice."""
    per_epoch = len(pool) // count
    if not per_epoch:
        raise BadInput(f"{count} questions a step asked of {len(pool)}")
    epoch, place = divmod(step, per_epoch)
    order = list(range(len(pool)))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return [pool[i] for i in order[place * count : (place + 1) * count]]


def check_failures(trajectories: Sequence[Trajectory], allowed: float) -> None:
    failed = [t for t in trajectories if t.stop is StopReason.INFRA_FAILED]
    if failed and len(failed) > allowed * len(trajectories):
        raise TooManyFailures(
            f"{len(failed)} of {len(trajectories)} trajectories failed, allowed share {allowed}; "
            f"{failed[0].id}: {failed[0].failure}"
        )


def describe(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], *, keeps_history: bool = False
) -> Record:
    """What people look at, over valid trajectories (not turns: a long one is one vote, D17).
    `keeps_history`: one training sequence holds all turns, which are then read from its mask."""
    valid = [t for t in trajectories if t.stop is not StopReason.INFRA_FAILED]
    record: Record = {"trajectories": len(trajectories), "failed": len(trajectories) - len(valid)}
    if not valid:
        return record
    record["reward"] = fmean(t.reward for t in valid)
    for part in valid[0].reward_parts:
        record[part] = fmean(t.reward_parts[part] for t in valid)
    contexts = [transcripts.contexts(t, keeps_history=keeps_history) for t in valid]
    record["turns"] = fmean(map(len, contexts))
    record["searches"] = fmean(transcripts.searches(t, keeps_history=keeps_history) for t in valid)
    for k in range(max(len(c) for c in contexts)):
        record[f"context_tokens_turn_{k + 1}"] = fmean(c[k] for c in contexts if len(c) > k)
    record["context_tokens_max"] = max((max(c) for c in contexts if c), default=0)
    memories = [turn for t in valid for turn in t.turns if turn.memory_after is not None]
    record["memory_tokens"] = fmean(m.memory_tokens for m in memories) if memories else 0.0
    record["memory_cut_rate"] = fmean(m.memory_cut for m in memories) if memories else 0.0
    record["response_tokens"] = fmean(sum(sum(turn.mask) for turn in t.turns) for t in valid)
    record["roundtrip_misses"] = fmean(sum(u.roundtrip_misses for u in t.turns) for t in valid)
    stops = Counter(t.stop for t in trajectories)
    record |= {f"stop_{stop.value}": stops[stop] / len(trajectories) for stop in StopReason}
    groups: dict[str, list[float]] = {}
    for t in valid:
        groups.setdefault(t.question.id, []).append(t.reward)
    record["zero_variance_share"] = fmean(max(g) == min(g) for g in groups.values())
    record |= {"advantage_mean": fmean(advantages), "advantage_std": pstdev(advantages)}
    record |= {"advantage_min": min(advantages), "advantage_max": max(advantages)}
    return record


def staleness(trajectories: Sequence[Trajectory], version: int) -> Record:
    """By how many updates the weights that sampled a token were behind `version`, the engine's
    latest: mean and maximum over the sampled tokens of valid trajectories."""
    behind = [
        (version - turn.weight_version, sum(turn.mask))
        for t in trajectories
        if t.stop is not StopReason.INFRA_FAILED
        for turn in t.turns
    ]
    tokens = sum(count for _, count in behind)
    if not tokens:
        return {}
    mean = sum(steps * count for steps, count in behind) / tokens
    return {"staleness_mean": mean, "staleness_max": max(steps for steps, _ in behind)}


def minibatches(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], train: Train
) -> list[list[Row]]:
    """The rows of each optimiser step of one rollout step."""
    masked = train.overlong_masking
    return [
        rows([trajectories[i] for i in s], [advantages[i] for i in s], overlong_masking=masked)
        for s in by_questions(trajectories, train.minibatches)
    ]


async def probe(
    engine: Engine,
    learner: Learner,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    bound: float,
) -> float:
    """|Δ log-prob| of engine and learner, mean over what the engine samples now after a prompt,
    largest of the prompts: the weights arrived and no stale prefix is cached, or WeightsDiffer is
    raised. A mean, since in bfloat16 single tokens differ by 0.7 where all is well. From the full
    distribution: after top-p, top-k or constraints an engine's log-probs are other ones."""
    free = replace(sampling, top_p=1.0, top_k=0, constrained=False)
    full = [replace(free, seed=k) for k in range(len(prompts))]
    said = await asyncio.gather(*map(engine.generate, prompts, full))
    asked = [
        Row([*prompt, *each.ids], len(prompt), [True] * len(each.ids), each.logprobs)
        for prompt, each in zip(prompts, said, strict=True)
        if each.ids
    ]
    gaps = [
        fmean(abs(a - b) for a, b in zip(each.sampler_logprobs, ours, strict=True))
        for each, ours in zip(asked, learner.logprobs(asked) if asked else [], strict=True)
    ]
    gap = float(np.max(gaps, initial=0.0))  # NaN where one is
    if not gap <= bound:
        raise WeightsDiffer(
            f"engine and learner differ by {gap:.3g} in log-prob after the update, "
            f"train.probe_bound is {bound:.3g}"
        )
    return gap


def summarise(records: Sequence[dict]) -> Record:
    """What is left of metrics.jsonl in one line of numbers."""
    steps = [r for r in records if "reward" in r]
    summary: Record = {f"dev_em_{r['step']}": r["dev_em"] for r in records if "dev_em" in r}
    if steps:
        summary |= {"first_reward": steps[0]["reward"], "last_reward": steps[-1]["reward"]}
        summary["skipped_steps"] = sum(r.get("skipped_steps", 0) for r in steps)
        summary["failed_trajectories"] = sum(r["failed"] for r in steps)
        summary["seconds"] = sum(r["seconds"] for r in steps)
    if back := stop_loss.restores(records):
        summary["restored_at"] = ", ".join(str(r["step"]) for r in back)
    return summary


class Log:
    """JSON lines with a `step` each. Opened after a resume it forgets the steps not kept."""

    def __init__(self, path: Path, done: int) -> None:
        kept = [r for r in files.read_jsonl(path) if r["step"] <= done] if path.is_file() else []
        files.write_jsonl(path, kept)
        self.path = path

    def add(self, *records: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)

    def rows(self) -> list[dict]:
        return list(files.read_jsonl(self.path))


async def rescue(
    learner: Learner,
    engine: Engine,
    log: Log,
    step: int,
    limits: StopLoss,
    checkpoints: Path,
    keep: int,
) -> str | None:
    """Asked before step `step` + 1: None to go on, or why the run has to end. Restores the best
    checkpoint where that is wanted and helps; its weights are then those of step `step`."""
    records = log.rows()
    cause = stop_loss.tripped(records, limits)
    top, so_far = stop_loss.best(records), len(stop_loss.restores(records))
    if cause is None or limits.action == "stop" or so_far == stop_loss.RESTORES or top is None:
        return cause
    learner.restore(checkpoints, top["step"], stop_loss.RESTORED_LR ** (so_far + 1))
    learner.save(checkpoints, step, keep, top["step"])
    log.add({"step": step, "restored_step": top["step"], "stop_loss": cause})
    await engine.update_weights(learner.weights())
    return None


def brief(record: Record, names: Iterable[str]) -> str:
    """`name value` pairs of one step for a terminal."""
    return "  ".join(
        f"{n} {record[n]:.4g}" for n in names if isinstance(record.get(n), int | float)
    )
