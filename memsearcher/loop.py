"""When everyone else on the event loop waits, and two things at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


async def both(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    """Both results. Where one raises, the other is cancelled and has ended before it is raised."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        one, two = await asyncio.gather(*tasks)
        return one, two
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_quiet(count: Callable[[], int], ticks: int) -> None:
    """Returns when `count` has stood still for `ticks` passes of the event loop: whoever could run
    has run. A number of passes, not of milliseconds, so that the outcome repeats."""
    seen, still = count(), 0
    while still < ticks:
        await asyncio.sleep(0)
        now = count()
        seen, still = now, still + 1 if now == seen else 0
