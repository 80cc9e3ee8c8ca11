"""The ReAct control: same tool, same words, same total context, but the history is kept.

One trajectory is one context that grows: action, observation, action, … It is one Turn (n_i = 1)
with several sampled spans: `action` is the whole talk after the prompt, `query` has a line per
search, `hits` are those of all searches. The policy is asked to answer on the last round, which
comes when the rounds are used up or when another would not fit agent.max_context_tokens. Of
agent.release it knows max_k and escaped_newlines; the rest is about memories.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from memsearcher.agent.chat import Chat
from memsearcher.agent.context import Context, request
from memsearcher.agent.contract import Found, Search
from memsearcher.agent.parsing import Answer, parse_action
from memsearcher.agent.prompts import Prompts
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.files import BadInput
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Hit, Question, StopReason, Trajectory, Turn


class ReAct:
    def __init__(self, params: AgentParams, chat: Chat, k: int) -> None:
        self.k = max(k, params.release.max_k or 0)
        self._params, self._chat, self._k = params, chat, k
        self._prompts = Prompts(chat, params, "react")
        self._round = params.max_observation_tokens + params.max_action_tokens
        worst = self._prompts.longest_turn() + params.max_action_tokens + self._round
        if worst > params.max_context_tokens:
            raise BadInput(
                f"agent.max_context_tokens: {params.max_context_tokens}, but question, two actions "
                f"and one observation may need {worst} ({params.template} template)"
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
        context = Context(self._chat, self._prompts.turn(question.text, "", last=max_turns == 1))
        queries: list[str] = []
        hits: list[Hit] = []
        bad_query = False
        answer: str | None = None
        number, last = 1, max_turns == 1
        while True:
            limit = self._params.max_action_tokens
            asked = request(sampling, self._chat, limit, seed, question, member, number, "action")
            text, stopped = await context.sample("action", engine, asked)
            parsed = parse_action(text, stopped)
            if isinstance(parsed, StopReason):
                stop = parsed
                break
            if isinstance(parsed, Answer):
                stop, answer = StopReason.ANSWERED, parsed.text
                break
            if last:
                stop = StopReason.MAX_TURNS
                break
            number += 1
            found: Found = []
            passages = None
            if parsed.query is None:
                bad_query = True
            else:
                queries.append(" ".join(parsed.query.split()))
                started = time.monotonic()
                k = parsed.passages(self._k, self._params.release.max_k)
                found = (await search(parsed.query))[:k]
                context.clock("search", started)
                passages = [passage for _, passage in found]
            room = self._params.max_context_tokens - len(context) - 2 * self._round
            last = number == max_turns or room < 0
            observation, read = self._prompts.observation(passages, last=last)
            context.put(observation)
            hits += [hit for hit, _ in found[:read]]
        talk = self._chat.decode(context.ids[: -1 if stopped else None])
        turn = replace(
            context.turn(talk, memory_before=""),
            query="\n".join(queries) if queries else None,
            hits=tuple(hits),
            bad_query=bad_query,
        )
        if on_turn is not None:
            on_turn(turn)
        return Trajectory(question, member, (turn,), stop, answer)
