"""The agent contract: one question in, one trajectory out. Nobody downstream asks which it was."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from memsearcher.engine.contract import Engine, Sampling
from memsearcher.types import Hit, Passage, Question, Trajectory, Turn

Found = list[tuple[Hit, Passage]]
Search = Callable[[str], Awaitable[Found]]


class Agent(Protocol):
    @property
    def k(self) -> int:
        """Passages to ask for with each search; fewer may be shown."""

    async def run(
        self,
        question: Question,
        member: int,
        engine: Engine,
        search: Search,
        *,
        sampling: Sampling,
        max_turns: int,
        seed: int,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> Trajectory:
        """`sampling` gives temperature, top_p and top_k; limits, stops and seeds are its own.
        Raises RetrieverDown and EngineFailed; nothing that a model writes raises."""
