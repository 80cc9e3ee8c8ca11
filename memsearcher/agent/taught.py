"""An agent played by a teacher, a new one for each trajectory: `roll_out` knows of one engine."""

from collections.abc import Callable

from memsearcher.agent.contract import Agent, Search
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.types import Question, Trajectory, Turn


class Taught:
    """`agent` with `teacher(question, member)` in place of whatever engine `run` is given."""

    def __init__(self, agent: Agent, teacher: Callable[[Question, int], Engine]) -> None:
        self.k = agent.k
        self._agent, self._teacher = agent, teacher

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
        return await self._agent.run(
            question,
            member,
            self._teacher(question, member),
            search,
            sampling=sampling,
            max_turns=max_turns,
            seed=seed,
            on_turn=on_turn,
        )
