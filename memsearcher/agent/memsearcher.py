"""The MemSearcher loop for one question: each turn is a context of its own.

(question, memory) → action → search → memory → the next turn, until an answer or a stop by rule
(StopReason). What was sampled goes into the trajectory as it was sampled; only the memory is
encoded anew, where the next context begins.
"""

import time
from collections.abc import Callable

from memsearcher.agent.chat import Chat
from memsearcher.agent.context import Context, request, text_of
from memsearcher.agent.contract import Search
from memsearcher.agent.parsing import Answer, Memory, parse_action, parse_memory
from memsearcher.agent.prompts import Prompts
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.files import BadInput
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Hit, Question, StopReason, Trajectory, Turn


class MemSearcher:
    def __init__(self, params: AgentParams, chat: Chat, k: int) -> None:
        self.k = k
        self._params, self._chat = params, chat
        self._prompts = Prompts(chat, params, "memsearcher")
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

            turn, stop, answer = await self._turn(question, memory, engine, search, ask, last)
            turns.append(turn)
            if on_turn is not None:
                on_turn(turn)
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
        last: bool,
    ) -> tuple[Turn, StopReason | None, str | None]:
        """The turn, why the trajectory ends with it (None: it goes on), and the answer."""
        context = Context(self._prompts.turn(question.text, memory, last=last))
        said = await context.sample("action", engine, ask("action", self._params.max_action_tokens))
        action = text_of(self._chat, said)
        parsed = parse_action(action, said.stopped)
        query: str | None = None
        hits: tuple[Hit, ...] = ()
        bad_query = False
        after: Memory | None = None
        stop: StopReason | None = None
        answer: str | None = None
        if isinstance(parsed, StopReason):
            stop = parsed
        elif isinstance(parsed, Answer):
            stop, answer = StopReason.ANSWERED, parsed.text
        elif last:
            stop, query = StopReason.MAX_TURNS, parsed.query
        else:
            query, bad_query = parsed.query, parsed.query is None
            found = None
            if query is not None:
                started = time.monotonic()
                found = await search(query)
                context.clock("search", started)
                hits = tuple(hit for hit, _ in found)
            passages = None if found is None else [passage for _, passage in found]
            context.put(self._prompts.observation(passages))
            said = await context.sample("memory", engine, ask("memory", self._memory_limit))
            written = parse_memory(text_of(self._chat, said), said.stopped)
            if isinstance(written, StopReason):
                stop = written
            else:
                after = self._within_cap(written)
        turn = Turn(
            prompt_ids=context.prompt_ids,
            response_ids=context.ids,
            mask=context.mask,
            sampler_logprobs=context.logprobs,
            action=action,
            memory_before=memory,
            query=query,
            hits=hits,
            memory_after=None if after is None else after.text,
            memory_cut=after is not None and after.cut,
            bad_query=bad_query,
            action_tokens=context.tokens["action"],
            observation_tokens=context.tokens["observation"],
            memory_tokens=context.tokens["memory"],
            seconds=context.seconds,
            weight_version=context.weight_version,
        )
        return turn, stop, answer

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
