"""Every word that we say to a policy, in two templates, and how a context is put together from it.

`compact` is for small policies: tags, one space between pieces, no instructions. `full` explains
the tool and the memory. Our words go through `chat.trusted`, questions, memories and passages
through `chat.plain`. `max_observation_tokens` bounds all that stands between an action and what
the policy writes next: chat seams, tags, passages, instruction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memsearcher.agent.chat import Chat
from memsearcher.files import BadInput
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Passage

PREFIX = "<think>"  # every action starts with it; it is prompt, not sampled


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of one template. Pieces marked with a space or newline carry it in front."""

    system: str | None
    system_react: str | None
    gap: str  # before a piece inside a tag, and before its closing tag
    between: str  # between </question> and <memory>
    passage: str  # {rank}, {title}
    rewrite: str  # asks for the memory
    answer_now: str  # asks for the answer on the last turn
    no_query: str  # stands for passages where the query could not be used
    no_hits: str


_TOOL = (
    '{"name": "search", "description": "Find encyclopedia passages about something.", '
    '"parameters": {"type": "object", "properties": {"query": {"type": "string"}}, '
    '"required": ["query"]}}'
)
_CALL = (
    "To search, write one JSON object between <tool_call> and </tool_call>, for example\n"
    '<tool_call>{"name": "search", "arguments": {"query": "mayor of the town"}}</tool_call>\n'
    "To answer, write the shortest possible answer as \\boxed{answer}. "
    "Reason first, between <think> and </think>, then do exactly one of the two."
)

WORDS: dict[str, Words] = {
    "compact": Words(
        system=None,
        system_react=None,
        gap=" ",
        between=" ",
        passage=" [{rank}] {title} :",
        rewrite="",
        answer_now=" Answer now.",
        no_query=" no query",
        no_hits=" no passages",
    ),
    "full": Words(
        system=(
            "You answer a question step by step. At each step you see the question and your own "
            "memory of the earlier steps, nothing else. You have one tool:\n"
            f"{_TOOL}\n{_CALL} Answer as soon as the memory holds enough."
        ),
        system_react=(
            "You answer a question step by step. You have one tool:\n"
            f"{_TOOL}\n{_CALL} Answer as soon as you know enough."
        ),
        gap="\n",
        between="\n\n",
        passage="\n[{rank}] {title}\n",
        rewrite=(
            "\nRead the result and rewrite your memory: keep what earlier steps found, add what "
            "helps to answer the question, drop the rest. Write it between <memory> and </memory>."
        ),
        answer_now="\nThis is the last step: do not search, answer now.",
        no_query="\nThe query was empty or not a text. Nothing was searched.",
        no_hits="\nNothing was found.",
    ),
}


class Prompts:
    """One template in one policy's token ids."""

    def __init__(
        self, chat: Chat, params: AgentParams, kind: Literal["memsearcher", "react"]
    ) -> None:
        self.chat, self.params = chat, params
        self.words = words = WORDS[params.template]
        self._react = kind == "react"
        self._opening = chat.opening(words.system_react if self._react else words.system)
        self._ask = chat.to_assistant + chat.trusted(PREFIX)
        self.memory_room = (  # what a memory message needs beyond the memory itself
            len(chat.trusted(f"<memory>{words.gap}"))
            + len(chat.trusted(f"{words.gap}</memory>"))
            + 1
        )
        least = len(self.observation([], last=True))
        if least > params.max_observation_tokens:
            raise BadInput(
                f"agent.max_observation_tokens: {params.max_observation_tokens} is less than the "
                f"{least} tokens of an observation without passages"
            )

    def turn(self, question: str, memory: str, *, last: bool) -> list[int]:
        """The context up to where the policy acts: question, memory (not for ReAct), `<think>`."""
        chat, gap = self.chat, self.words.gap
        ids = self._opening + chat.trusted("<question>")
        ids += chat.plain(self._inside(question))[: self.params.max_question_tokens]
        if self._react:
            ids += chat.trusted(f"{gap}</question>")
        else:
            ids += chat.trusted(f"{gap}</question>{self.words.between}<memory>")
            ids += self.memory(memory) + chat.trusted(f"{gap}</memory>")
        return ids + (chat.trusted(self.words.answer_now) if last else []) + self._ask

    def memory(self, text: str) -> list[int]:
        """The ids of a memory as it stands in a prompt; their number is what the cap counts."""
        return self.chat.plain(self._inside(text)) if text else []

    def longest_turn(self) -> int:
        """Tokens of `turn` at its worst."""
        p = self.params
        frame = len(self.turn("", "", last=True)) - len(self.chat.plain(self._inside("")))
        return frame + p.max_question_tokens + (0 if self._react else p.max_memory_tokens)

    def observation(self, passages: Sequence[Passage] | None, *, last: bool = False) -> list[int]:
        """What follows the action's end token, up to where the policy writes. None: a bad query.

        `last` (ReAct only) asks for the answer. Passages that do not fit are left out from the
        back; the one at the border keeps its title and loses words at its end.
        """
        chat, words = self.chat, self.words
        head = chat.to_user + chat.trusted("<tool_response>")
        tail = chat.trusted(f"{words.gap}</tool_response>")
        if self._react:
            tail += (chat.trusted(words.answer_now) if last else []) + self._ask
        else:
            tail += chat.trusted(words.rewrite) + chat.to_assistant
        if not passages:
            return head + chat.trusted(words.no_query if passages is None else words.no_hits) + tail
        budget = self.params.max_observation_tokens - len(head) - len(tail)
        return head + self._passages(passages, budget) + tail

    def _passages(self, passages: Sequence[Passage], budget: int) -> list[int]:
        ids: list[int] = []
        for rank, passage in enumerate(passages, 1):
            front, _, back = self.words.passage.partition("{title}")
            title = self.chat.plain(front.format(rank=rank) + passage.title + back)
            space = "" if back.endswith("\n") else " "
            text = self.chat.plain(space + " ".join(passage.text.split()))
            left = budget - len(ids)
            if len(title) + len(text) <= left:
                ids += title + text
                continue
            if left > len(title):
                ids += title + text[: left - len(title)]
            break
        return ids

    def _inside(self, text: str) -> str:
        return self.words.gap + text.strip()
