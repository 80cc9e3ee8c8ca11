"""A context as the messages of a chat API, and back: for teachers with another tokenizer."""

import re
from itertools import takewhile

from memsearcher.agent.chat import Chat
from memsearcher.agent.prompts import PREFIX

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<memory>", "</memory>")


def messages(chat: Chat, ids: list[int]) -> tuple[list[dict[str, str]], bool]:
    """A context as messages, and whether the next one was begun (`<think>`): that is left out,
    since few servers go on with such a message.

    Exact, since no question, memory or passage holds the control tokens that the seams begin with.
    """
    made = []
    before, after = _system_seams(chat)
    close = _find(ids, after)
    if ids[: len(before)] == before and close >= len(before) and after:
        made.append({"role": "system", "content": chat.decode(ids[len(before) : close])})
        ids = ids[close + len(after) :]
    else:
        ids = ids[len(chat.opening(None)) :]
    seams = {"user": chat.to_assistant, "assistant": [chat.end_id, *chat.to_user]}
    role = "user"
    while (end := _find(ids, seams[role])) >= 0:
        made.append({"role": role, "content": chat.decode(ids[:end])})
        ids, role = ids[end + len(seams[role]) :], "assistant" if role == "user" else "user"
    return made, bool(ids)


def encode(chat: Chat, text: str) -> list[int]:
    """The policy's ids of what another model wrote: the protocol's tags are tags, everything else
    is plain, so no other control token can be written."""
    parts = re.split(f"({'|'.join(TAGS)})", text)
    return chat.whole((part, part in TAGS) for part in parts if part)


def said(message: dict, begun: bool) -> str:
    """What continues the context. Some servers move the thoughts to a field of their own."""
    text = str(message.get("content") or "")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if begun and thought:
        return f"{thought}</think>{text}"
    if begun and text.lstrip().startswith(PREFIX):
        return text.lstrip().removeprefix(PREFIX)
    return text


def _system_seams(chat: Chat) -> tuple[list[int], list[int]]:
    """What stands before and behind a system text."""
    one, two = chat.opening("x"), chat.opening("y")
    return _common(one, two), _common(one[::-1], two[::-1])[::-1]


def _common(one: list[int], two: list[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))]


def _find(ids: list[int], part: list[int]) -> int:
    starts = range(len(ids) - len(part) + 1)
    return next((i for i in starts if ids[i : i + len(part)] == part), -1)
