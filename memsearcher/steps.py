"""What the loop of `stages/train.py` asks for: a step's trajectories, and the dev EM."""

import time
from dataclasses import dataclass

from memsearcher import training
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Agent
from memsearcher.agent.scoring import em
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.learner.deepspeed import Learner
from memsearcher.params import Params
from memsearcher.retrieval.contract import Retriever
from memsearcher.rollout import roll_out
from memsearcher.types import Question, Trajectory


@dataclass(frozen=True)
class Parts:
    """What a step works with."""

    agent: Agent
    engine: Engine
    retriever: Retriever
    learner: Learner
    train: list[Question]
    dev: list[Question]
    chat: Chat


@dataclass(frozen=True)
class Rolled:
    """A step's trajectories and the engine's weights that they were sampled under."""

    trajectories: list[Trajectory]
    weight_version: int
    seconds: float


async def roll(params: Params, parts: Parts, sampling: Sampling, step: int) -> Rolled:
    t, began, version = params.train, time.monotonic(), parts.engine.weight_version
    questions = training.draw(parts.train, params.seed, step - 1, t.questions_per_step)
    jobs = [(question, member) for question in questions for member in range(t.group_size)]
    turns = params.agent.max_turns_train
    trajectories = await _roll_out(params, parts, jobs, sampling, turns, step)
    return Rolled(trajectories, version, time.monotonic() - began)


async def dev_em(params: Params, parts: Parts) -> float:
    """Greedy, on the dev questions. Raises TooManyFailures where one has no trajectory."""
    greedy = Sampling(
        params.agent.max_action_tokens,
        temperature=0.0,
        constrained=params.engine.constrained_calls,
    )
    jobs = [(question, 0) for question in parts.dev]
    trajectories = await _roll_out(params, parts, jobs, greedy, params.agent.max_turns_eval, 0)
    training.check_failures(trajectories, 0.0)
    return sum(em(t.answer, t.question.golds) for t in trajectories) / len(trajectories)


async def _roll_out(
    params: Params,
    parts: Parts,
    jobs: list[tuple[Question, int]],
    sampling: Sampling,
    max_turns: int,
    step: int,
) -> list[Trajectory]:
    return await roll_out(
        *(parts.agent, jobs, parts.engine, parts.retriever),
        sampling=sampling,
        max_turns=max_turns,
        seed=params.seed * 1_000_003 + step,
        concurrency=params.engine.max_num_seqs,
        in_flight=params.search.in_flight,
        patience_s=params.search.patience_s,
        deterministic=params.engine.kind == "inprocess",
    )
