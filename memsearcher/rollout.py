"""Questions to trajectories: many at once against one asynchronous engine, no barrier at turns.

While one trajectory searches, others generate. Searches that wait at the same moment go to the
retriever together. A trajectory whose retriever or engine fails for good is INFRA_FAILED with the
cause; every other exception ends the whole roll-out.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from pydantic import TypeAdapter

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


def make_agent(name: AgentName, params: Params, chat: Chat) -> Agent:
    """Raises BadInput where the worst context would not fit agent.max_context_tokens."""
    from memsearcher.agent.memsearcher import MemSearcher
    from memsearcher.agent.react import ReAct

    if name == "react":
        return ReAct(params.agent, chat, params.search.k)
    return MemSearcher(params.agent, chat, params.search.k)


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
    on_done: Callable[[Trajectory], None] | None = None,
    deterministic: bool = False,
) -> list[Trajectory]:
    """A trajectory per (question, member), in the order of `jobs`; `on_done` sees each as it ends.

    `deterministic`: searches run in the event loop once nobody else can go on, so that with the
    in-process engine no timing decides what is computed together.
    """
    searches = _Searches(retriever, agent.k, deterministic)
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
    """Collects the queries that wait and sends them in one `Retriever.search`, call after call."""

    def __init__(self, retriever: Retriever, k: int, in_loop: bool) -> None:
        self._retriever, self._k, self._in_loop = retriever, k, in_loop
        self._waiting: list[tuple[str, asyncio.Future[Found]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def search(self, query: str) -> Found:
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send())
        sender = self._sender
        waits: set[asyncio.Future[Found] | asyncio.Task[None]] = {future, sender}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            sender.result()  # raises what broke it: who waits for a search must not wait for ever
        return future.result()

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    async def _send(self) -> None:
        while self._waiting:
            if self._in_loop:
                await until_quiet(lambda: len(self._waiting), SEARCH_TICKS)
            else:
                await asyncio.sleep(0)
            batch = sorted(self._waiting, key=lambda waiting: waiting[0])
            self._waiting = []
            queries = [query for query, _ in batch]
            try:
                if self._in_loop:
                    found = self._look_up(queries)
                else:
                    found = await asyncio.to_thread(self._look_up, queries)
            except RetrieverDown as e:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(RetrieverDown(str(e)))
                continue
            for (_, future), result in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(result)

    def _look_up(self, queries: list[str]) -> list[Found]:
        rows = self._retriever.search(queries, self._k)
        return [[(hit, self._retriever.passage(hit.passage_id)) for hit in row] for row in rows]


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
