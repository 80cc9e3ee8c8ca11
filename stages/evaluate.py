"""One policy on the seven benchmarks.

    python -m stages.evaluate memsearcher

Greedy unless evaluate.temperature says otherwise. Every scored question is journalled at once, so
a killed run goes on without asking it again. A question that the machinery could not answer is
asked again, at most twice; if one is left then, the stage fails with the cause: an outage is never
scored.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.journal import Journal
from memsearcher.params import Params
from memsearcher.types import Question, StopReason, Trajectory
from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    from memsearcher.agent.chat import Chat
    from memsearcher.agent.contract import Agent
    from memsearcher.engine.contract import Engine
    from memsearcher.retrieval.contract import Retriever


def _deps(params: Params, item: str | None) -> tuple[str, ...]:
    assert item is not None
    data = ("data/corpus", "data/index", "data/bm25", "data/questions")
    return (*data, params.policies[item].after)


STAGE = Stage(
    "evaluate",
    params=(
        *("seed", "world", "bm25", "search", "policy", "agent", "engine", "evaluate"),
        "policies.{item}",
    ),
    deps=_deps,
    items=lambda params: list(params.policies),
)
TRIES = 3
TRACED = 2  # trajectories of each benchmark that become traces on MLflow
BLOCK = 2048  # questions rolled out at a time: their token ids are dropped before the next block


class EvaluationFailed(RuntimeError):
    """Questions that broken machinery left unanswered; the message carries the first cause."""


def run(job: Job) -> None:
    from memsearcher import evaluation
    from memsearcher.cost import size_of
    from memsearcher.policy import policy_folder
    from memsearcher.questions import read_questions

    assert job.item is not None
    params, entry = with_cap(job.params), job.params.policies[job.item]
    questions: list[Question] = []
    for path in _sources(params):
        everything = read_questions(path)
        questions += evaluation.select(everything, params.evaluate.sample, params.seed)
    folder = policy_folder(params, entry.model)

    journal = Journal(job.work / "journal.jsonl")
    todo = [question for question in questions if question.id not in journal.rows]
    job.say(f"{len(questions)} questions, {len(questions) - len(todo)} of them done before")
    if todo:
        asyncio.run(_open_and_ask(job, folder, todo, journal))
    rows = [journal.rows[question.id] for question in questions]

    made = job.work / "out"
    files.remove(made)
    predictions = [row["prediction"] for row in rows]
    files.write_jsonl(made / "predictions.jsonl", predictions)
    files.write_jsonl(made / "trajectories.jsonl", (row["trajectory"] for row in rows))
    seconds = [float(row["trajectory"]["seconds"]) for row in rows]
    metrics = evaluation.summarise(predictions, seconds, params.seed, size_of(folder))
    metrics |= {"policy": job.item, "agent": entry.agent, "fingerprint": _fingerprint(job, folder)}
    files.write_json(made / "metrics.json", metrics)
    files.publish(made, Path(f"results/evaluate/{job.item}"))

    flat = {f"em_{name}": scores["em"] for name, scores in metrics["datasets"].items()}
    average = metrics["average"]
    flat |= {f"{name}_average": average[name] for name in ("em", "f1", "cover_em")}
    flat |= {k: v for k, v in metrics["behaviour"].items() if isinstance(v, float)}
    for path in _sources(params):
        job.track.dataset(path.stem, path, params.evaluate.split)
    job.track.metrics(flat, model=folder)
    for row in _sample(rows):
        job.track.trajectory(row["trajectory"], 0)
    job.track.artifact(Path(f"results/evaluate/{job.item}/metrics.json"))
    low, high = average["em_interval"]
    job.say(f"average EM {100 * average['em']:.1f} ({100 * low:.1f}–{100 * high:.1f})")


def with_cap(params: Params) -> Params:
    """The cap that this evaluation is asked for, where it is not the one of training."""
    cap = params.evaluate.max_memory_tokens or params.agent.max_memory_tokens
    return replace(params, agent=replace(params.agent, max_memory_tokens=cap))


def _sample(rows: list[dict]) -> list[dict]:
    """The first TRACED of each benchmark."""
    seen: Counter[str] = Counter()
    chosen = []
    for row in rows:
        seen[row["prediction"]["dataset"]] += 1
        if seen[row["prediction"]["dataset"]] <= TRACED:
            chosen.append(row)
    return chosen


def _sources(params: Params) -> list[Path]:
    from memsearcher.questions import DATASETS

    if params.evaluate.split == "dev":
        return [Path("data/questions/dev.jsonl")]
    return [Path(f"data/questions/test/{name}.jsonl") for name in DATASETS]


async def _open_and_ask(job: Job, folder: Path, todo: list[Question], journal: Journal) -> None:
    from memsearcher.agent.chat import Chat
    from memsearcher.engine.factory import open_engine
    from memsearcher.retrieval.factory import open_retriever
    from memsearcher.rollout import make_agent

    params = with_cap(job.params)
    retriever = open_retriever(params)
    chat = Chat(folder)
    agent = make_agent(params.policies[str(job.item)].agent, params, chat, evaluating=True)
    engine = await open_engine(params, folder)
    try:
        await ask(todo, journal, params, str(job.item), agent, engine, retriever, chat)
    finally:
        journal.close()
        await engine.close()


async def ask(
    todo: list[Question],
    journal: Journal,
    params: Params,
    policy: str,
    agent: "Agent",
    engine: "Engine",
    retriever: "Retriever",
    chat: "Chat",
) -> None:
    """Rolls out and journals every question of `todo`, or raises EvaluationFailed."""
    from tqdm import tqdm

    from memsearcher.engine.contract import Sampling
    from memsearcher.rollout import roll_out

    sampling = Sampling(
        params.agent.max_action_tokens,
        temperature=params.evaluate.temperature,
        constrained=params.engine.constrained_calls,
    )
    keeps_history = params.policies[policy].agent == "react"
    failed: dict[str, str] = {}

    def done(trajectory: Trajectory) -> None:
        if trajectory.stop is StopReason.INFRA_FAILED:
            failed[trajectory.question.id] = trajectory.failure or "no cause given"
            return
        failed.pop(trajectory.question.id, None)
        journal.add(_row(trajectory, retriever, chat, keeps_history))
        bar.update()

    with tqdm(total=len(todo), desc=f"evaluate@{policy}", unit="q", mininterval=2) as bar:
        for block in _blocks(todo, BLOCK):
            for _ in range(TRIES):
                left = [(q, 0) for q in block if q.id not in journal.rows]
                if left:
                    await roll_out(
                        agent,
                        left,
                        engine,
                        retriever,
                        sampling=sampling,
                        max_turns=params.agent.max_turns_eval,
                        seed=params.seed,
                        concurrency=params.evaluate.concurrency,
                        in_flight=params.search.in_flight,
                        patience_s=params.search.patience_s,
                        on_done=done,
                        deterministic=params.engine.kind == "inprocess",
                    )
            if failed:
                name, cause = next(iter(failed.items()))
                raise EvaluationFailed(
                    f"{len(failed)} of {len(block)} questions unanswered after {TRIES} tries; "
                    f"{name}: {cause} (run the stage again to go on)"
                )


def _row(trajectory: Trajectory, retriever: "Retriever", chat: "Chat", keeps_history: bool) -> dict:
    from memsearcher import evaluation, transcripts

    def said(ids: list[int]) -> str:
        return chat.decode([i for i in ids if i != chat.end_id])

    return {
        "prediction": evaluation.predict(
            trajectory, retriever.passage, keeps_history=keeps_history
        ),
        "trajectory": transcripts.readable(trajectory, said, keeps_history=keeps_history),
    }


def _fingerprint(job: Job, folder: Path) -> dict:
    """What the numbers depend on. `evaluation.comparable` says which part must agree."""
    from memsearcher.agent.prompts import words_of

    params, entry = with_cap(job.params), job.params.policies[str(job.item)]
    split = params.evaluate.split
    return {
        "policy": files.content_hash(folder),
        "agent": entry.agent,
        "prompt": files.digest(asdict(words_of(params.agent))),
        "retriever": {"mode": params.search.mode, "k": params.search.k}
        | {part: files.content_hash(Path("data") / part) for part in ("corpus", "index", "bm25")},
        "questions": files.content_hash(
            Path("data/questions") / {"dev": "dev.jsonl"}.get(split, split)
        ),
        "split": split,
        "sample": params.evaluate.sample,
        "seed": params.seed,
        "temperature": params.evaluate.temperature,
        "budgets": asdict(params.agent),
        "engine": {"kind": params.engine.kind, "dtype": params.engine.dtype},
    }


def _blocks(questions: list[Question], size: int) -> Iterable[list[Question]]:
    return (questions[i : i + size] for i in range(0, len(questions), size))


if __name__ == "__main__":
    main(STAGE, run)
