"""Warm-up: a teacher plays, the policy imitates what is kept. Also the supervised baseline.

    python -m stages.warmup memsearcher

Phases, each of which a killed run keeps: the teacher's trajectories through the real agent loop and
the real retriever (journalled one by one), copying for tiny policies (its model), fine-tuning (a
checkpoint every CHECKPOINT_EVERY steps).
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.types import Trajectory
from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    from memsearcher.learner.collate import Row

STAGE = Stage(
    "warmup",
    params=(
        *("seed", "world", "bm25", "search", "policy", "agent", "engine", "warmup", "reward"),
        "train.max_tokens_per_microbatch",
    ),
    deps=("data/corpus", "data/index", "data/bm25", "data/questions"),
    items=lambda params: list(params.agents),
)
CHECKPOINT_EVERY = 100
LR_WARMUP = 20  # optimiser steps


def run(job: Job) -> None:
    from memsearcher import rejection
    from memsearcher.learner import sft
    from memsearcher.policy import base_policy

    assert job.item is not None
    w = job.params.warmup
    start = base_policy(job.params)
    teacher, trajectories = asyncio.run(_teach(job, start))
    found = rejection.verdicts(trajectories, w, job.item, job.params.seed)  # type: ignore[arg-type]
    kept = [t for t, v in zip(trajectories, found, strict=True) if v == rejection.KEPT]
    counts = dict(Counter(found))
    job.say(f"{len(kept)} of {len(trajectories)} trajectories of {teacher} kept: {counts}")
    job.track.metrics({f"teacher/{verdict}": n for verdict, n in counts.items()})
    rows = sft.examples(kept)
    if not rows:
        raise BadInput(f"warmup: no trajectory of the teacher is fit to imitate: {counts}")
    right = sum(each.reward_parts["em"] for each in trajectories) / len(trajectories)
    stops = Counter(each.stop.value for each in trajectories)
    summary = {"agent": job.item, "trajectories": len(trajectories), "verdicts": counts}
    summary |= {"turns": len(rows), "teacher_em": right, "steps": w.steps, "stops": dict(stops)}
    summary |= {"teacher": teacher, "cells": _cells(job, trajectories, found)}

    if job.params.policy.source == "tiny" and w.copying_steps:
        words = _words(start)
        start = _imitate(
            job,
            "copying",
            start,
            lambda step: sft.copying_rows(words, job.params.seed, step),
            w.copying_steps,
            w.copying_lr,
        )
    turns = sft.turns_of(rows, job.params.seed, w.turns_per_step)
    if job.params.policy.source == "tiny" and w.rename:
        turns = sft.renamed(turns, _name_pools(start), job.params.seed)
    _imitate(job, "imitation", start, turns, w.steps, w.lr)
    _publish(job, summary)


async def _teach(job: Job, pupil: Path) -> tuple[str, list[Trajectory]]:
    """The teacher's name and what it did, rewarded."""
    from tqdm import tqdm

    from memsearcher.agent.chat import Chat
    from memsearcher.agent.scoring import with_reward
    from memsearcher.questions import read_questions
    from memsearcher.retrieval.factory import open_retriever
    from memsearcher.teaching import Teacher, choose, teach

    params = job.params
    teacher = Teacher.of(params, pupil, os.environ)
    questions = choose(read_questions(Path("data/questions/train.jsonl")), params)
    with tqdm(desc=f"{job.label} teacher", mininterval=2) as bar:

        def done(count: int, total: int) -> None:
            bar.total = total
            bar.update(count - bar.n)

        made = await teach(
            teacher,
            job.item,  # type: ignore[arg-type]
            params,
            Chat(pupil),
            questions,
            lambda: open_retriever(params),
            job.work,
            on_done=done,
            say=job.say,
        )
    return teacher.name, [with_reward(each, params.reward.preset) for each in made]


def _cells(job: Job, trajectories: list[Trajectory], found: list[str]) -> dict[str, list[int]]:
    """Trajectories rolled out and kept, by data set and number of searches."""
    from memsearcher import rejection

    cells: dict[str, list[int]] = {}
    for each, verdict in zip(trajectories, found, strict=True):
        dataset, searches = rejection.cell(each, job.item)  # type: ignore[arg-type]
        counts = cells.setdefault(f"{dataset}, {searches} searches", [0, 0])
        counts[0] += 1
        counts[1] += verdict == rejection.KEPT
    return dict(sorted(cells.items()))


def _words(folder: Path) -> list[int]:
    """Ids of whole words (a blank in front, at least two letters)."""
    from memsearcher.agent.chat import Chat

    chat = Chat(folder)
    texts = {i: chat.decode([i]) for i in range(chat.vocabulary) if i not in chat.control_ids}
    words = [
        i for i, text in texts.items() if text[0] == " " and text[1:].isalpha() and len(text) > 2
    ]
    if len(words) < 2:
        raise BadInput(f"{folder}: the tokenizer has {len(words)} whole words to copy")
    return words


def _name_pools(folder: Path) -> list[list[int]]:
    """Token ids of the world's interchangeable words; each is one token with its blank."""
    from memsearcher import world
    from memsearcher.agent.chat import Chat

    chat = Chat(folder)
    pools = [[chat.plain(f" {word}") for word in pool] for pool in world.pools()]
    return [[ids[0] for ids in pool if len(ids) == 1] for pool in pools]


def _imitate(
    job: Job, phase: str, start: Path, rows_of: "Callable[[int], list[Row]]", steps: int, lr: float
) -> Path:
    """Fine-tunes `start` and returns the result's folder; at once where it is there already."""
    from tqdm import tqdm

    from memsearcher.learner import sft
    from memsearcher.learner.deepspeed import Learner, Settings
    from memsearcher.learner.ranks import Ranks
    from memsearcher.training import Log

    out = job.work / phase
    if out.is_dir():
        return out
    settings = Settings(
        folder=start,
        lr=lr,
        max_tokens_per_microbatch=job.params.train.max_tokens_per_microbatch,
        lr_warmup_steps=min(LR_WARMUP, steps),
    )
    learner = Learner.open(settings, Ranks(1))
    checkpoints = job.work / f"{phase}-checkpoints"
    done = learner.resume(checkpoints)
    log = Log(job.work / f"{phase}.jsonl", done)
    records = sft.imitate(learner, rows_of, done, steps)
    bar = tqdm(records, total=steps, initial=done, desc=f"{job.label} {phase}", mininterval=2)
    for record in bar:
        log.add({"phase": phase} | record)
        step = int(record["step"])
        if step % 10 == 0 or step == steps:
            shown = {n: record[n] for n in ("loss", "grad_norm", "tokens_per_s")}
            job.track.metrics({f"{phase}_{n}": float(v) for n, v in shown.items()}, step=step)
            bar.set_postfix(loss=f"{record['loss']:.3f}", refresh=False)
        if step % CHECKPOINT_EVERY == 0 and step < steps:
            learner.save(checkpoints, step, 1)
    part = job.work / "part"
    files.remove(part)
    learner.export(part)
    files.publish(part, out)
    files.remove(checkpoints)
    job.say(f"{phase}: loss {record['loss']:.4f} after {steps} steps")
    return out


def _publish(job: Job, summary: dict[str, object]) -> None:
    made = job.work / "results"
    files.remove(made)
    records: list[dict] = []
    for phase in ("copying", "imitation"):
        if (path := job.work / f"{phase}.jsonl").is_file():
            records += files.read_jsonl(path)
            summary[f"{phase}_loss"] = records[-1]["loss"]
    summary["seconds_learner"] = sum(r["seconds_update"] + r["seconds_logprobs"] for r in records)
    files.write_jsonl(made / "metrics.jsonl", records)
    files.write_json(made / "summary.json", summary)
    files.publish(job.work / "imitation", Path(f"models/warmup/{job.item}"))
    files.publish(made, Path(f"results/warmup/{job.item}"))
    job.track.dataset("train", Path("data/questions/train.jsonl"), "training")
    model, of = Path(f"models/warmup/{job.item}"), records[-1]
    job.track.policy(f"warmup-{job.item}", model, of["step"], {"imitation_loss": of["loss"]})
    job.track.record(Path(f"results/warmup/{job.item}/metrics.jsonl"))
    job.track.artifact(Path(f"results/warmup/{job.item}/summary.json"))


if __name__ == "__main__":
    main(STAGE, run)
