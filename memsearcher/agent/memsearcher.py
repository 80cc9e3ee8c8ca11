"""The MemSearcher loop for one question: each turn is a context of its own.

(question, memory) → action → search → memory → the next turn, until an answer or a stop by rule
(StopReason). What was sampled goes into the trajectory as it was sampled; only the memory is
encoded anew, where the next context begins. Where the official release does otherwise, a switch of
agent.release does so too.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from memsearcher.agent.chat import Chat
from memsearcher.agent.context import Context, request
from memsearcher.agent.contract import Search
from memsearcher.agent.parsing import Answer, Memory, parse_action, parse_memory
from memsearcher.agent.prompts import Prompts
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.files import BadInput
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Question, StopReason, Trajectory, Turn


class MemSearcher:
    def __init__(
        self, params: AgentParams, chat: Chat, k: int, *, evaluating: bool = False
    ) -> None:
        self.k = max(k, params.release.max_k or 0)
        self._params, self._chat, self._k, self._evaluating = params, chat, k, evaluating
        self._prompts = Prompts(chat, params, "memsearcher", evaluating=evaluating)
        self._memory_limit = params.max_memory_tokens + self._prompts.memory_room
        worst = self._prompts.longest_turn() + params.max_action_tokens
        worst += params.max_observation_tokens + self._memory_limit
        if worst > params.max_context_tokens:
            raise BadInput(
                f"agent.max_context_tokens: {params.max_context_tokens}, but question, memory, "
                f"action, observation and new memory may need {worst} ({params.template} template)"
            )

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
        turns: list[Turn] = []
        memory = ""
        while True:
            number = len(turns) + 1
            last = number == max_turns

            def ask(phase: str, limit: int, number: int = number) -> Sampling:
                return request(sampling, self._chat, limit, seed, question, member, number, phase)

            must_answer = last and not self._params.release.search_on_last_turn
            turn, stop, answer = await self._turn(
                question, memory, engine, search, ask, must_answer
            )
            turns.append(turn)
            if on_turn is not None:
                on_turn(turn)
            if last and stop is None:
                stop = StopReason.MAX_TURNS
            if stop is not None:
                return Trajectory(question, member, tuple(turns), stop, answer)
            memory = turn.memory_after or ""

    async def _turn(
        self,
        question: Question,
        memory: str,
        engine: Engine,
        search: Search,
        ask: Callable[[str, int], Sampling],
        must_answer: bool,
    ) -> tuple[Turn, StopReason | None, str | None]:
        """The turn, why the trajectory ends with it (None: it goes on), and the answer."""
        context = Context(self._chat, self._prompts.turn(question.text, memory, last=must_answer))
        action, stopped = await context.sample(
            "action", engine, ask("action", self._params.max_action_tokens)
        )
        parsed = parse_action(action, stopped)
        if isinstance(parsed, StopReason):
            return context.turn(action, memory), parsed, None
        if isinstance(parsed, Answer):
            return context.turn(action, memory), StopReason.ANSWERED, parsed.text
        if must_answer:
            turn = replace(context.turn(action, memory), query=parsed.query)
            return turn, StopReason.MAX_TURNS, None

        found = None
        if parsed.query is not None:
            started = time.monotonic()
            k = parsed.passages(self._k, self._params.release.max_k)
            found = (await search(parsed.query))[:k]
            context.clock("search", started)
        passages = None if found is None else [passage for _, passage in found]
        observation, read = self._prompts.observation(passages, parsed.call)
        context.put(observation)

        text, stopped = await context.sample("memory", engine, ask("memory", self._memory_limit))
        after = self._kept(parse_memory(text, stopped))
        turn = replace(
            context.turn(action, memory),
            query=parsed.query,
            hits=tuple(hit for hit, _ in (found or ())[:read]),
            bad_query=parsed.query is None,
        )
        if isinstance(after, StopReason):
            return turn, after, None
        return replace(turn, memory_after=after.text, memory_cut=after.cut), None, None

    def _kept(self, written: Memory | StopReason) -> Memory | StopReason:
        """What the next turn starts from, or why there is no next turn."""
        broken = isinstance(written, StopReason) or written.cut
        if broken and self._params.release.broken_memory:
            return Memory("", cut=True) if self._evaluating else StopReason.NO_MEMORY
        return written if isinstance(written, StopReason) else self._within_cap(written)

    def _within_cap(self, memory: Memory) -> Memory:
        """The memory, cut until its ids as they enter the next prompt number at most the cap."""
        cap = self._params.max_memory_tokens
        text, cut = memory.text.rstrip("\ufffd"), memory.cut  # half a letter at the limit
        if not cut:
            text = memory.text
        ids = self._prompts.memory(text)
        keep = cap
        while len(ids) > cap:
            text = (
                self._chat.decode(self._prompts.memory(memory.text)[:keep]).rstrip("\ufffd").strip()
            )
            ids, cut, keep = self._prompts.memory(text), True, keep - 1
        return Memory(text, cut)
