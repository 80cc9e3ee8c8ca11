"""Warm-up: a teacher plays, the policy imitates what is kept. Also the supervised baseline.

    python -m stages.warmup memsearcher

Phases, each of which a killed run keeps: the teacher's trajectories through the real agent loop and
the real retriever (journalled one by one), copying for tiny policies (its model), fine-tuning (a
checkpoint every CHECKPOINT_EVERY steps).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.types import Question, Trajectory
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
TAUGHT_AT_ONCE = 64  # trajectories whose searches go to the retriever together


def run(job: Job) -> None:
    from memsearcher.learner import sft
    from memsearcher.policy import base_policy

    assert job.item is not None
    w = job.params.warmup
    start = base_policy(job.params)
    trajectories = asyncio.run(_teach(job, start))
    verdicts = [sft.verdict(each, w.keep_wrong) for each in trajectories]
    kept = [t for t, v in zip(trajectories, verdicts, strict=True) if v == "kept"]
    counts = Counter(verdicts)
    job.say(f"{len(kept)} of {len(trajectories)} trajectories kept: {dict(counts)}")
    rows = sft.examples(kept)
    if not rows:
        raise BadInput(f"warmup: no trajectory of the teacher is fit to imitate: {dict(counts)}")
    right = sum(each.reward_parts["em"] for each in trajectories) / len(trajectories)
    summary = {"agent": job.item, "trajectories": len(trajectories), "verdicts": dict(counts)}
    summary |= {"turns": len(rows), "teacher_em": right, "steps": w.steps}
    stops = Counter(each.stop.value for each in trajectories)
    summary["stops"] = dict(stops)

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


async def _teach(job: Job, folder: Path) -> list[Trajectory]:
    """One trajectory for each of warmup.questions training questions that have a plan."""
    from tqdm import tqdm

    from memsearcher.agent.chat import Chat
    from memsearcher.agent.scoring import with_reward
    from memsearcher.agent.taught import Taught
    from memsearcher.agent.teacher import ScriptedTeacher
    from memsearcher.engine.contract import Sampling
    from memsearcher.questions import read_questions
    from memsearcher.retrieval.factory import open_retriever
    from memsearcher.rollout import from_json, make_agent, roll_out, to_json
    from memsearcher.training import Log, check_failures, draw

    params, w = job.params, job.params.warmup
    everything = read_questions(Path("data/questions/train.jsonl"))
    planned = [q for q in everything if q.metadata.get("plan")]
    if not planned:
        raise BadInput(
            "data/questions/train.jsonl: no question has a plan that a teacher can follow"
        )
    chosen = draw(planned, params.seed, 0, min(w.questions, len(planned)))
    journal = Log(job.work / "teacher.jsonl", 0)
    made = {row["id"]: from_json(row) for row in journal.rows()}
    missing = [q for q in chosen if f"{q.id}#0" not in made]
    if missing:
        chat = Chat(folder)
        bar = tqdm(total=len(missing), desc=f"{job.label} teacher", unit="q", mininterval=2)

        def done(trajectory: Trajectory) -> None:
            check_failures([trajectory], 0.0)
            made[trajectory.id] = trajectory
            journal.add({"step": 0} | to_json(trajectory, tokens=True))
            bar.update()

        def teacher(question: Question) -> ScriptedTeacher:
            rng = random.Random(f"teacher {params.seed} {question.id}")
            return ScriptedTeacher(question, chat, w, rng)

        agent = make_agent(job.item, params, chat)  # type: ignore[arg-type]
        await roll_out(
            Taught(agent, teacher),
            [(q, 0) for q in missing],
            teacher(missing[0]),  # never asked: every question has its own
            open_retriever(params),
            sampling=Sampling(params.agent.max_action_tokens),
            max_turns=params.agent.max_turns_train,
            seed=params.seed,
            concurrency=TAUGHT_AT_ONCE,
            on_done=done,
            deterministic=True,
        )
        bar.close()
    return [with_reward(made[f"{q.id}#0"], params.reward.preset) for q in chosen]


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
    job.track.artifact(Path(f"results/warmup/{job.item}/summary.json"))


if __name__ == "__main__":
    main(STAGE, run)
