"""When everyone else on the event loop waits: how requests are collected without a clock."""

import asyncio
from collections.abc import Callable


async def until_quiet(count: Callable[[], int], ticks: int) -> None:
    """Returns when `count` has stood still for `ticks` passes of the event loop: whoever could run
    has run. A number of passes, not of milliseconds, so that the outcome repeats."""
    seen, still = count(), 0
    while still < ticks:
        await asyncio.sleep(0)
        now = count()
        seen, still = now, still + 1 if now == seen else 0
