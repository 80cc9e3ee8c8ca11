"""The loop that others have, for comparison: all trajectories generate, then all search.

A phase starts when every live trajectory waits for it and ends for all when its last part has
ended, as in a batched rollout that calls `LLM.generate` and one search request in turn.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from memsearcher.agent.contract import Agent, Found
from memsearcher.engine.contract import Completion, Engine, Sampling
from memsearcher.retrieval.contract import Retriever
from memsearcher.types import Question, Trajectory


async def roll_out_in_lockstep(
    agent: Agent,
    jobs: Sequence[tuple[Question, int]],
    engine: Engine,
    retriever: Retriever,
    *,
    sampling: Sampling,
    max_turns: int,
    seed: int,
) -> list[Trajectory]:
    steps = Lockstep(engine, retriever, agent.k, len(jobs))

    async def one(question: Question, member: int) -> Trajectory:
        try:
            return await agent.run(
                *(question, member, steps, steps.search),
                sampling=sampling,
                max_turns=max_turns,
                seed=seed,
            )
        finally:
            steps.leave()

    return await asyncio.gather(*(one(*job) for job in jobs))


class Lockstep:
    """Stands before engine and retriever. Where some wait to search and some to generate, the
    searches go first and their trajectories join the others."""

    def __init__(self, engine: Engine, retriever: Retriever, k: int, live: int) -> None:
        self._engine, self._retriever, self._k, self._live = engine, retriever, k, live
        self._prompts: list[tuple[list[int], Sampling, asyncio.Future[Completion]]] = []
        self._queries: list[tuple[str, asyncio.Future[Found]]] = []
        self._phase: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        future = asyncio.get_running_loop().create_future()
        self._prompts.append((prompt_ids, sampling, future))
        self._go()
        return await future

    async def search(self, query: str) -> Found:
        future = asyncio.get_running_loop().create_future()
        self._queries.append((query, future))
        self._go()
        return await future

    def leave(self) -> None:
        self._live -= 1
        self._go()

    def _go(self) -> None:
        if self._live and len(self._prompts) + len(self._queries) == self._live:
            self._phase = asyncio.ensure_future(self._search() if self._queries else self._say())

    async def _search(self) -> None:
        batch, self._queries = self._queries, []
        queries = [query for query, _ in batch]
        with _or_fail([future for _, future in batch]):
            rows = await asyncio.to_thread(self._retriever.search, queries, self._k)
            for (_, future), row in zip(batch, rows, strict=True):
                future.set_result([(hit, self._retriever.passage(hit.passage_id)) for hit in row])

    async def _say(self) -> None:
        batch, self._prompts = self._prompts, []
        with _or_fail([future for _, _, future in batch]):
            said = await asyncio.gather(*(self._engine.generate(p, s) for p, s, _ in batch))
            for (_, _, future), completion in zip(batch, said, strict=True):
                future.set_result(completion)


@contextmanager
def _or_fail(futures: Sequence[asyncio.Future]) -> Iterator[None]:
    """What breaks a phase reaches everybody who waits for it."""
    try:
        yield
    except BaseException as e:
        for future in futures:
            if not future.done():
                future.set_exception(e)
