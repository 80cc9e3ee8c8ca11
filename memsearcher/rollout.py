"""Questions to trajectories: many at once against one asynchronous engine, no barrier at turns.

While one trajectory searches, others generate. Searches that wait at the same moment go to the
retriever together; a call that fails is repeated for a while. A trajectory whose retriever or
engine fails for good is INFRA_FAILED with the cause; every other exception ends the whole roll-out.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from pydantic import TypeAdapter
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, wait_random_exponential

from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Agent, Found
from memsearcher.engine.contract import Engine, EngineFailed, Sampling
from memsearcher.loop import until_quiet
from memsearcher.params import AgentName, Params
from memsearcher.retrieval.contract import Retriever, RetrieverDown
from memsearcher.types import Question, StopReason, Trajectory

_TOKEN_FIELDS = ("prompt_ids", "response_ids", "mask", "sampler_logprobs")
_TRAJECTORY = TypeAdapter(Trajectory)
SEARCH_TICKS = 8  # fewer than the in-process engine waits: searches go first
UNKNOWN_ID = -1  # stands for each token of a row that was stored without ids


def make_agent(name: AgentName, params: Params, chat: Chat, *, evaluating: bool = False) -> Agent:
    """Raises BadInput where the worst context would not fit agent.max_context_tokens. `evaluating`
    counts for what the release does otherwise in evaluation (agent.release)."""
    from memsearcher.agent.memsearcher import MemSearcher
    from memsearcher.agent.react import ReAct

    if name == "react":
        return ReAct(params.agent, chat, params.search.k)
    return MemSearcher(params.agent, chat, params.search.k, evaluating=evaluating)


async def roll_out(
    agent: Agent,
    jobs: Sequence[tuple[Question, int]],
    engine: Engine,
    retriever: Retriever,
    *,
    sampling: Sampling,
    max_turns: int,
    seed: int,
    concurrency: int,
    in_flight: int = 1,
    patience_s: float = 60.0,
    on_done: Callable[[Trajectory], None] | None = None,
    deterministic: bool = False,
) -> list[Trajectory]:
    """A trajectory per (question, member), in the order of `jobs`; `on_done` sees each as it ends.
    `in_flight`, `patience_s`: see params.Search.

    `deterministic`: searches run in the event loop once nobody else can go on, so that with the
    in-process engine no timing decides what is computed together.
    """
    searches = _Searches(
        retriever, agent.k, in_loop=deterministic, in_flight=in_flight, patience_s=patience_s
    )
    done: list[Trajectory | None] = [None] * len(jobs)

    async def work(numbers: Iterator[int]) -> None:
        for i in numbers:
            question, member = jobs[i]
            try:
                trajectory = await agent.run(
                    question,
                    member,
                    engine,
                    searches.search,
                    sampling=sampling,
                    max_turns=max_turns,
                    seed=seed,
                )
            except (RetrieverDown, EngineFailed) as e:
                cause = f"{type(e).__name__}: {e}"
                trajectory = Trajectory(
                    question, member, (), StopReason.INFRA_FAILED, failure=cause
                )
            done[i] = trajectory
            if on_done is not None:
                on_done(trajectory)

    numbers = iter(range(len(jobs)))
    workers = [asyncio.ensure_future(work(numbers)) for _ in range(min(concurrency, len(jobs)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await searches.close()
    return [trajectory for trajectory in done if trajectory is not None]


class _Searches:
    """Collects the queries that wait while `in_flight` calls are out: they go with the next one."""

    def __init__(
        self, retriever: Retriever, k: int, *, in_loop: bool, in_flight: int, patience_s: float
    ) -> None:
        self._retriever, self._k, self._in_loop = retriever, k, in_loop
        self._patience_s = patience_s
        self._slots = asyncio.Semaphore(1 if in_loop else in_flight)
        self._threads = ThreadPoolExecutor(in_flight, "search")
        self._calls: set[asyncio.Task[dict[str, Found]]] = set()
        self._queries: list[str] = []  # of the call that still collects
        self._call: asyncio.Task[dict[str, Found]] | None = None

    async def search(self, query: str) -> Found:
        if self._call is None:
            self._queries = []
            self._call = asyncio.ensure_future(self._send(self._queries))
            self._calls.add(self._call)
            self._call.add_done_callback(self._calls.discard)
        self._queries.append(query)
        return (await asyncio.shield(self._call))[query]  # who gives up must not take others along

    async def close(self) -> None:
        for call in (calls := list(self._calls)):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _send(self, queries: list[str]) -> dict[str, Found]:
        async with self._slots:
            if self._in_loop:
                await until_quiet(lambda: len(queries), SEARCH_TICKS)
            else:
                await asyncio.sleep(0)
            self._call = None  # who comes now goes with the next
            return await self._persist(sorted(set(queries)))

    async def _persist(self, queries: list[str]) -> dict[str, Found]:
        """The call, repeated with growing pauses while the retriever does not answer. The pauses
        are drawn: callers that failed together must not come back together."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        calls = AsyncRetrying(
            retry=retry_if_exception_type((RetrieverDown, ConnectionError, TimeoutError)),
            wait=wait_random_exponential(multiplier=1, max=10),
            stop=lambda _: loop.time() - began >= self._patience_s,
        )
        try:
            return await calls(self._answer, queries)
        except RetryError as e:
            tries, cause = e.last_attempt.attempt_number, e.last_attempt.exception()
            raise RetrieverDown(
                f"no answer in {tries} calls over {loop.time() - began:.0f} s: "
                f"{type(cause).__name__}: {cause}"
            ) from cause

    async def _answer(self, queries: list[str]) -> dict[str, Found]:
        if self._in_loop:
            return self._look_up(queries)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._look_up, queries)

    def _look_up(self, queries: list[str]) -> dict[str, Found]:
        rows = self._retriever.search(queries, self._k)
        return {
            query: [(hit, self._retriever.passage(hit.passage_id)) for hit in row]
            for query, row in zip(queries, rows, strict=True)
        }


def to_json(trajectory: Trajectory, *, tokens: bool = False) -> dict:
    """One JSON-lines row that a person can read; `tokens` adds ids, masks and log-probs."""
    turns = []
    for turn in trajectory.turns:
        row = asdict(turn)
        ids = {name: row.pop(name) for name in _TOKEN_FIELDS}
        row["prompt_tokens"] = len(turn.prompt_ids)
        turns.append(row | (ids if tokens else {}))
    row = asdict(trajectory) | {"turns": turns, "context_tokens": trajectory.context_tokens}
    return {"id": trajectory.id} | row


def from_json(row: dict) -> Trajectory:
    """The trajectory of a row. Without stored tokens its lists have the right length and hold
    UNKNOWN_ID, so that lengths can be counted and nothing can be trained on by mistake."""
    turns = []
    for turn in row["turns"]:
        length = turn["action_tokens"] + turn["observation_tokens"] + turn["memory_tokens"]
        prompt = [UNKNOWN_ID] * turn["prompt_tokens"]
        blank = (prompt, [UNKNOWN_ID] * length, [False] * length, [0.0] * length)
        turns.append(dict(zip(_TOKEN_FIELDS, blank, strict=True)) | turn)
    return _TRAJECTORY.validate_python(row | {"turns": turns})
