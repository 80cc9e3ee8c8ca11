"""Micro-batching: the queries of all clients in one encoder pass and one search, pass after pass.

While a pass runs, requests collect; a pass also waits `window_s` from the arrival of its oldest
request, unless `max_batch` queries are there. The queue is bounded; who gives up leaves it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from memsearcher.retrieval.fusion import DEPTH
from memsearcher.types import Hit, Passage

Found = list[tuple[Hit, Passage]]
LookUp = Callable[[Sequence[str], int], list[Found]]
log = logging.getLogger(__name__)


class QueueFull(Exception):
    """More queries wait than may; the message says how many."""


class SearchFailed(RuntimeError):
    """The pass broke; the message carries the cause."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    queries: Sequence[str]
    k: int
    since: float
    answer: asyncio.Future[list[Found]]


class Batcher:
    """`look_up` runs in one thread, one call at a time. `max_batch` counts queries: a request that
    holds more has a pass of its own. `on_pass` hears the number of queries before each pass."""

    def __init__(
        self,
        look_up: LookUp,
        *,
        window_s: float,
        max_batch: int,
        max_waiting: int,
        on_pass: Callable[[int], object] = lambda queries: None,
    ) -> None:
        self._look_up, self._on_pass = look_up, on_pass
        self._window_s, self._max_batch, self._max_waiting = window_s, max_batch, max_waiting
        self._queue: deque[_Request] = deque()
        self._some, self._many = asyncio.Event(), asyncio.Event()
        self.waiting = 0  # queries in the queue

    async def search(self, queries: Sequence[str], k: int, gone: asyncio.Future) -> list[Found]:
        """Hits with their passages, a list per query. `gone` ends when nobody wants them any more:
        then the request leaves the queue and CancelledError is raised.

        Raises QueueFull and SearchFailed.
        """
        if self.waiting + len(queries) > self._max_waiting:
            raise QueueFull(f"{self.waiting} queries wait, at most {self._max_waiting} may")
        loop = asyncio.get_running_loop()
        request = _Request(queries, k, loop.time(), loop.create_future())
        self._queue.append(request)
        self._count(len(queries))
        gone.add_done_callback(lambda _: request.answer.cancel())
        try:
            return await request.answer
        finally:
            if request in self._queue:
                self._queue.remove(request)
                self._count(-len(queries))

    async def run(self, thread: Executor) -> None:
        """Works until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._some.wait()
            await self._collect(loop)
            requests = self._take()
            if not requests:
                continue
            queries = [query for request in requests for query in request.queries]
            self._on_pass(len(queries))
            k = max(request.k for request in requests)
            running = loop.run_in_executor(thread, self._look_up, queries, k)
            await asyncio.wait({running})
            _hand_out(requests, running)

    async def _collect(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self._queue[0].since + self._window_s - loop.time()
        if left > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._many.wait(), left)

    def _take(self) -> list[_Request]:
        """The oldest request, and in their order those that go with it."""
        taken: list[_Request] = []
        kept: deque[_Request] = deque()
        room = self._max_batch
        for request in self._queue:
            size = len(request.queries)
            if not taken or (size <= room and _together(taken[0].k, request.k)):
                taken.append(request)
                room -= size
            else:
                kept.append(request)
        self._queue = kept
        self._count(-sum(len(request.queries) for request in taken))
        return [request for request in taken if not request.answer.done()]

    def _count(self, change: int) -> None:
        self.waiting += change
        for event, least in ((self._some, 1), (self._many, self._max_batch)):
            if self.waiting >= least:
                event.set()
            else:
                event.clear()


def _together(a: int, b: int) -> bool:
    """Whether the first hits of the deeper search are the hits of the other: a fused ranking looks
    deeper for more than DEPTH hits, and its order changes."""
    return a == b or max(a, b) <= DEPTH


def _hand_out(requests: Sequence[_Request], ran: asyncio.Future[list[Found]]) -> None:
    failure = ran.exception()
    if failure is not None:
        log.error("a search failed", exc_info=failure)
    start = 0
    for request in requests:
        end = start + len(request.queries)
        if request.answer.done():
            pass
        elif failure is not None:
            error = SearchFailed(f"{type(failure).__name__}: {failure}")
            error.__cause__ = failure
            request.answer.set_exception(error)
        else:
            request.answer.set_result([found[: request.k] for found in ran.result()[start:end]])
        start = end
