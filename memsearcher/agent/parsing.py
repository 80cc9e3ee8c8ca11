"""What a policy's text means. Total (no input raises) and linear in the length of the text.

An action is the text after the forced `<think>`; what stands inside <think> … </think> is not
looked at, an unclosed <think> reaches to the end. Each row is a test (tests/unit/test_parsing.py):

    text after the forced <think>                              outcome
    ---------------------------------------------------------  ----------------------------------
    limit reached before the end token, whatever it says       OVERLONG
    </think> \\boxed{Paris}                                     answer "Paris"
    </think> \\boxed{A} \\boxed{B}                               answer "B": the last complete box
    </think> \\boxed{\\text{x}}                                  answer "\\text{x}": braces balance
    </think> \\boxed{}                                          answer ""
    </think> \\boxed{Paris  /  \\boxed Paris  /  \\box{Paris}     NO_ACTION
    \\boxed{Paris} </think>  /  \\boxed{Paris}                   NO_ACTION: the box is a thought
    <tool_call> {...} </tool_call> </think> (nothing else)     NO_ACTION: the call is a thought
    </think> and then nothing of either kind                   NO_ACTION
    a box before a call, both outside                          the box: the answer
    a call before a box, both outside                          the call
    two calls                                                  the first
    {"query": "x"}                                             search "x"
    {"name": "search", "arguments": {"query": "x"}}            search "x"; other keys do not count
    {"name": "weather", "arguments": {...}}                    BAD_TOOL_CALL: there is no such tool
    'x' in single quotes, trailing comma, NUL byte, 1 MB of {  BAD_TOOL_CALL: not JSON
    "x", ["x"], {}, {"arguments": "Paris"}                     BAD_TOOL_CALL: JSON of another shape
    no </tool_call>                                            BAD_TOOL_CALL
    query "", "  ", null, 3, ["a", "b"], {}, a lone surrogate, search without a query: one fixed
      more than 2,000 characters                                 observation, counted, goes on
    "top_n" beside the query                                   k is ours all the same
    where agent.release.max_k lets the model choose k:
      "top_n": 7  /  0, −1  /  1000000                           7  /  1  /  max_k
      "top_n": "3", 2.5, true, null, []; none at all             ours, search.k

    text of a memory message                                   outcome
    ---------------------------------------------------------  ----------------------------------
    <memory> m </memory>                                       "m"; text around it does not count
    <memory></memory>                                          ""
    <memory> a </memory> <memory> b </memory>                  "a": the first
    <memory> m, limit reached                                  "m", cut
    <memory> m, end token                                      NO_MEMORY: a finished half
    no <memory>, or only inside <think>                        NO_MEMORY
"""

import json
from dataclasses import dataclass, field

import numpy as np

from memsearcher.types import StopReason

MAX_QUERY_CHARS = 2_000
TOOLS = ("search", "wikipedia_search")  # the second is the release's name for it
_BOX = "\\boxed{"


@dataclass(frozen=True, slots=True)
class Search:
    """`query` None: a call in the right shape whose query is of no use. `top_n` is the number of
    passages that it asks for, `call` the text between the tags."""

    query: str | None
    top_n: int | None = None
    call: str = field(default="", compare=False)

    def passages(self, k: int, max_k: int | None) -> int:
        """How many to show: `k`, unless the model may choose (`max_k`) and does."""
        if max_k is None or self.top_n is None:
            return k
        return min(max(self.top_n, 1), max_k)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str


@dataclass(frozen=True, slots=True)
class Memory:
    text: str
    cut: bool


def parse_action(text: str, stopped: bool) -> Search | Answer | StopReason:
    """`stopped`: the message ended with its end token, not at the limit."""
    if not stopped:
        return StopReason.OVERLONG
    said = outside_think(text, thinking=True)
    call, box = said.find("<tool_call>"), said.find(_BOX)
    if call >= 0 and (box < 0 or call < box):
        body, closed, _ = said[call + len("<tool_call>") :].partition("</tool_call>")
        return _parse_call(body) if closed else StopReason.BAD_TOOL_CALL
    answer = last_box(said)
    return StopReason.NO_ACTION if answer is None else Answer(answer)


def parse_memory(text: str, stopped: bool) -> Memory | StopReason:
    said = outside_think(text, thinking=False)
    _, opened, rest = said.partition("<memory>")
    inner, closed, _ = rest.partition("</memory>")
    if not opened or (stopped and not closed):
        return StopReason.NO_MEMORY
    return Memory(inner.strip(), cut=not closed)


def outside_think(text: str, *, thinking: bool) -> str:
    """The text without its <think> blocks; `thinking` tells whether it starts inside one."""
    pieces: list[str] = []
    place = 0
    while True:
        tag = "</think>" if thinking else "<think>"
        found = text.find(tag, place)
        if not thinking:
            pieces.append(text[place : found if found >= 0 else None])
        if found < 0:
            return " ".join(pieces)  # a space, so that no tag is made of two halves
        thinking, place = not thinking, found + len(tag)


def last_box(text: str) -> str | None:
    r"""Inside of the complete \boxed{} that starts last, stripped.

    >>> last_box(r"\boxed{A} or \boxed{ \text{B} }")
    '\\text{B}'
    """
    if _BOX not in text:
        return None
    code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")  # (N,) characters
    width = len(_BOX)
    windows = [code[i : len(code) - width + 1 + i] == ord(sign) for i, sign in enumerate(_BOX)]
    opens = np.flatnonzero(np.logical_and.reduce(windows)) + width - 1  # each box's brace
    depth = np.cumsum((code == ord("{")).astype(np.int64) - (code == ord("}")))
    least_after = np.minimum.accumulate(depth[::-1])[::-1]
    complete = opens[least_after[opens] < depth[opens]]  # somewhere behind, its level is left
    if not len(complete):
        return None
    start = int(complete[-1])
    end = start + int(np.argmax(depth[start:] < depth[start]))
    return text[start + 1 : end].strip()


def _parse_call(body: str) -> Search | StopReason:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):  # RecursionError: a thousand open brackets
        return StopReason.BAD_TOOL_CALL
    if not isinstance(call, dict) or call.get("name", "search") not in TOOLS:
        return StopReason.BAD_TOOL_CALL
    arguments = call if "query" in call else call.get("arguments")
    if not isinstance(arguments, dict) or "query" not in arguments:
        return StopReason.BAD_TOOL_CALL
    query, top_n = arguments["query"], arguments.get("top_n")
    usable = (
        isinstance(query, str)
        and query.strip()
        and len(query) <= MAX_QUERY_CHARS
        and not any("\ud800" <= letter <= "\udfff" for letter in query)
    )
    return Search(
        query.strip() if usable else None,
        top_n if isinstance(top_n, int) and not isinstance(top_n, bool) else None,
        body.strip(),
    )
