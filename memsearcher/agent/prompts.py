"""Every word that we say to a policy, in two templates, and how a context is put together from it.

`compact` is for small policies: tags, one space between pieces, no instructions. `full` explains
the tool and the memory. The official release's words can stand in their place (release.py). Our
words go through `chat.trusted`, questions, memories and passages through `chat.plain`.
`max_observation_tokens` bounds all that stands between an action and what the policy writes next:
chat seams, tags, passages, instruction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from memsearcher.agent import release
from memsearcher.agent.chat import Chat
from memsearcher.files import BadInput
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Passage

PREFIX = "<think>"  # every action starts with it; it is prompt, not sampled
OBSERVATION = "<tool_response>"


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of one template. Pieces marked with a space or newline carry it in front."""

    system: str | None
    system_react: str | None
    turn: tuple[str, str, str]  # before the question, between it and the memory, behind that
    turn_react: tuple[str, str]  # before and behind the question
    gap: str  # in front of a question or memory
    call: str | None  # between the model's own call and the passages; None: it is not repeated
    passage_start: str
    passage: str  # {rank}, {title}; the text follows
    passage_end: str
    close: str  # behind the passages
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
        turn=("<question>", " </question> <memory>", " </memory>"),
        turn_react=("<question>", " </question>"),
        gap=" ",
        call=None,
        passage_start=" ",
        passage="[{rank}] {title} :",
        passage_end="",
        close=" </tool_response>",
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
        turn=("<question>", "\n</question>\n\n<memory>", "\n</memory>"),
        turn_react=("<question>", "\n</question>"),
        gap="\n",
        call=None,
        passage_start="\n",
        passage="[{rank}] {title}\n",
        passage_end="",
        close="\n</tool_response>",
        rewrite=(
            "\nRead the result and rewrite your memory: keep what earlier steps found, add what "
            "helps to answer the question, drop the rest. Write it between <memory> and </memory>."
        ),
        answer_now="\nThis is the last step: do not search, answer now.",
        no_query="\nThe query was empty or not a text. Nothing was searched.",
        no_hits="\nNothing was found.",
    ),
}


def words_of(params: AgentParams) -> Words:
    """The texts that the parameters name. Raises BadInput where the release's cannot be had."""
    words = WORDS[params.template]
    if params.release_template is not None:
        words = _released(release.texts(params.release_template))
    if params.release.escaped_newlines:
        start, end = (s.replace("\n", r"\n") for s in (words.passage_start, words.passage_end))
        words = replace(words, passage_start=start, passage_end=end)
    return words


def _released(texts: release.Texts) -> Words:
    """Ours where the release has no words: bad queries, nothing found, the last turn."""
    ours = WORDS["full"]
    opening, call, close = texts.observation
    if opening != OBSERVATION:
        raise BadInput(f"agent.release_template: an observation begins with {opening!r}")
    return replace(
        ours,
        system=texts.system,
        turn=texts.user,
        gap="",
        call=call,
        passage_start="",
        passage='"{title}"\n',  # as in the corpus
        passage_end="\n\n",
        close=close,
        rewrite="",
        no_query=ours.no_query.strip(),
        no_hits=ours.no_hits.strip(),
    )


class Prompts:
    """One template in one policy's token ids. `evaluating`: as the release evaluates, where
    agent.release says that it does so differently."""

    def __init__(
        self,
        chat: Chat,
        params: AgentParams,
        kind: Literal["memsearcher", "react"],
        *,
        evaluating: bool = False,
    ) -> None:
        self.chat, self.params = chat, params
        self.words = words = words_of(params)
        self._react = kind == "react"
        if self._react and params.release_template is not None:
            raise BadInput("agent.release_template: the release has no words for the react agent")
        self._whole = evaluating and params.release.whole_prompt
        self._opening = chat.opening(words.system_react if self._react else words.system)
        self._ask = chat.to_assistant + chat.trusted(PREFIX)
        space = words.gap or " "
        self.memory_room = (  # what a memory message needs beyond the memory itself
            len(chat.trusted(f"<memory>{space}")) + len(chat.trusted(f"{space}</memory>")) + 1
        )
        least = len(self.observation([], last=True)[0])
        if least > params.max_observation_tokens:
            raise BadInput(
                f"agent.max_observation_tokens: {params.max_observation_tokens} is less than the "
                f"{least} tokens of an observation without passages"
            )

    def turn(self, question: str, memory: str, *, last: bool) -> list[int]:
        """The context up to where the policy acts: question, memory (not for ReAct), `<think>`."""
        chat, limit = self.chat, self.params.max_question_tokens
        answer_now = self.words.answer_now if last else ""
        asked = chat.plain(self._inside(question))[:limit]
        if self._react:
            before, behind = self.words.turn_react
            ids = chat.trusted(before) + asked + chat.trusted(behind)
            return self._opening + ids + chat.trusted(answer_now) + self._ask
        before, between, behind = self.words.turn
        if self._whole:
            return chat.whole(
                [
                    (chat.decode(self._opening) + before, True),
                    (chat.decode(asked), False),
                    (between, True),
                    (self._inside(memory) if memory else "", False),
                    (behind + answer_now + chat.decode(self._ask), True),
                ]
            )
        ids = chat.trusted(before) + asked + chat.trusted(between) + self.memory(memory)
        ids += chat.trusted(behind) + chat.trusted(answer_now)
        return self._opening + ids + self._ask

    def memory(self, text: str) -> list[int]:
        """The ids of a memory as it stands in a prompt; their number is what the cap counts."""
        return self.chat.plain(self._inside(text)) if text else []

    def longest_turn(self) -> int:
        """Tokens of `turn` at its worst."""
        p = self.params
        frame = len(self.turn("", "", last=True)) - len(self.chat.plain(self._inside("")))
        return frame + p.max_question_tokens + (0 if self._react else p.max_memory_tokens)

    def observation(
        self, passages: Sequence[Passage] | None, call: str = "", *, last: bool = False
    ) -> tuple[list[int], int]:
        """What follows the action's end token, up to where the policy writes, and how many of the
        passages stand in it. None: a bad query.

        `call` is the model's own, which the release repeats; `last` (ReAct only) asks for the
        answer. Passages that do not fit are left out from the back; the one at the border keeps
        its title and loses words at its end.
        """
        chat, words = self.chat, self.words
        head = chat.to_user + chat.trusted(OBSERVATION)
        tail = chat.trusted(words.close)
        if self._react:
            tail += (chat.trusted(words.answer_now) if last else []) + self._ask
        else:
            tail += chat.trusted(words.rewrite) + chat.to_assistant
        instead: list[int] = []
        if not passages:
            instead = chat.trusted(words.no_query if passages is None else words.no_hits)
        budget = self.params.max_observation_tokens - len(head) - len(tail) - len(instead)
        if words.call is not None:
            behind = chat.trusted(words.call)
            repeated = chat.plain(call)[: max(0, budget - len(behind))] + behind
            head, budget = head + repeated, budget - len(repeated)
        inside, read = self._passages(passages, budget) if passages else (instead, 0)
        return head + inside + tail, read

    def _passages(self, passages: Sequence[Passage], budget: int) -> tuple[list[int], int]:
        ids: list[int] = []
        words, plain = self.words, self.chat.plain
        front, _, back = (words.passage_start + words.passage).partition("{title}")
        space, quoted = "" if back.endswith("\n") else " ", front.endswith('"')
        end = plain(words.passage_end)
        for rank, passage in enumerate(passages, 1):
            name = passage.title.replace('"', '""') if quoted else passage.title
            title = plain(front.format(rank=rank) + name + back)
            text = plain(space + " ".join(passage.text.split()))
            left = budget - len(ids) - len(end)
            whole = len(title) + len(text) <= left
            if not whole and left <= len(title):
                return ids, rank - 1
            ids += title + text[: left - len(title)] + end
            if not whole:
                return ids, rank
        return ids, len(passages)

    def _inside(self, text: str) -> str:
        return self.words.gap + text.strip()
