import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher.agent.parsing import (
    Answer,
    Memory,
    Search,
    last_box,
    outside_think,
    parse_action,
    parse_memory,
)
from memsearcher.types import StopReason

CALL = '<tool_call> {"query": "x"} </tool_call>'
NO, BAD = StopReason.NO_ACTION, StopReason.BAD_TOOL_CALL


def _call(body: str) -> str:
    return f"</think><tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (r"</think> \boxed{Paris}", Answer("Paris")),
        (r"done </think> \boxed{ Marel Tovin }", Answer("Marel Tovin")),
        (r"</think> \boxed{A} \boxed{B}", Answer("B")),
        (r"</think> \boxed{A} \boxed{B", Answer("A")),
        (r"</think> \boxed{\text{x}}", Answer(r"\text{x}")),
        (r"</think> \boxed{}", Answer("")),
        (r"</think> } \boxed{a}", Answer("a")),
        (r"</think> \boxed{Paris", NO),
        (r"</think> \boxed Paris", NO),
        (r"</think> \box{Paris}", NO),
        (r"\boxed{Paris} </think>", NO),
        (r"\boxed{Paris}", NO),
        (f"{CALL} </think>", NO),
        (CALL, NO),
        ("</think>", NO),
        ("", NO),
        ("</think> I do not know", NO),
        (f"</think> \\boxed{{a}} {CALL}", Answer("a")),
        (f"</think> {CALL} \\boxed{{a}}", Search("x")),
        (f"\\boxed{{no}} </think> {CALL}", Search("x")),
        (f"{CALL} </think> \\boxed{{a}}", Answer("a")),
        (f"</think> <think> {CALL} </think> \\boxed{{a}}", Answer("a")),
        ('</think> <tool_<think></think>call> {"query": "x"} </tool_call>', NO),
        (f'</think> {CALL} <tool_call>{{"query": "y"}}</tool_call>', Search("x")),
        (_call('{"query": "x"}'), Search("x")),
        (_call('\n{"query": " x "}\n'), Search("x")),
        (_call('{"name": "search", "arguments": {"query": "x"}}'), Search("x")),
        (_call('{"name": "search", "arguments": {"query": "x", "top_n": -1}}'), Search("x", -1)),
        (_call('{"query": "x", "top_n": 1000000}'), Search("x", 1_000_000)),
        (_call('{"query": "x", "top_n": "3"}'), Search("x")),
        (_call('{"query": "x", "top_n": 2.5}'), Search("x")),
        (_call('{"query": "x", "top_n": true}'), Search("x")),
        (_call('{"query": "x", "top_n": null}'), Search("x")),
        (_call('{"query": "x", "top_n": []}'), Search("x")),
        (_call('{"name": "weather", "arguments": {"query": "x"}}'), BAD),
        (_call('{"name": ["search"], "arguments": {"query": "x"}}'), BAD),
        (_call("{'query': 'x'}"), BAD),
        (_call('{"query": "x",}'), BAD),
        (_call('{"query": "x\x00"}'), BAD),
        (_call("{" * 1_000_000), BAD),
        (_call("[" * 1_000_000), BAD),
        (_call("9" * 1_000_000), BAD),
        (_call('"x"'), BAD),
        (_call('["x"]'), BAD),
        (_call("{}"), BAD),
        (_call(""), BAD),
        (_call('{"arguments": "Paris"}'), BAD),
        (_call('{"arguments": {}}'), BAD),
        ('</think><tool_call>{"query": "x"}', BAD),
        (_call('{"query": ""}'), Search(None)),
        (_call('{"query": "   "}'), Search(None)),
        (_call('{"query": null}'), Search(None)),
        (_call('{"query": 3}'), Search(None)),
        (_call('{"query": {}}'), Search(None)),
        (_call('{"query": []}'), Search(None)),
        (_call('{"arguments": {"query": ["a", "b"]}}'), Search(None)),
        (_call('{"query": "\\ud800"}'), Search(None)),
        (_call('{"query": "' + "x" * 10_000 + '"}'), Search(None)),
    ],
)
def test_the_table_of_actions(text: str, outcome: object) -> None:  # C19
    assert parse_action(text, True) == outcome
    assert parse_action(text, False) is StopReason.OVERLONG


@pytest.mark.parametrize(
    ("top_n", "max_k", "k"),
    [
        (7, None, 3),
        (None, 10, 3),
        (7, 10, 7),
        (0, 10, 1),
        (-1, 10, 1),
        (1_000_000, 10, 10),
    ],
)
def test_k_is_ours_or_clamped(top_n: int | None, max_k: int | None, k: int) -> None:
    assert Search("x", top_n).passages(3, max_k) == k


@pytest.mark.parametrize(
    ("text", "stopped", "outcome"),
    [
        ("<memory> m </memory>", True, Memory("m", False)),
        ("so: <memory>\nm\n</memory> ok", True, Memory("m", False)),
        ("<memory></memory>", True, Memory("", False)),
        ("<memory> a </memory> <memory> b </memory>", True, Memory("a", False)),
        ("<memory> a </memory> and on", False, Memory("a", False)),
        ("<memory> m", False, Memory("m", True)),
        ("<memory>", False, Memory("", True)),
        ("<memory> m", True, StopReason.NO_MEMORY),
        ("m", True, StopReason.NO_MEMORY),
        ("m", False, StopReason.NO_MEMORY),
        ("", True, StopReason.NO_MEMORY),
        ("<think> <memory> m </memory> </think>", True, StopReason.NO_MEMORY),
        ("<think> hm </think> <memory> m </memory>", True, Memory("m", False)),
    ],
)
def test_the_table_of_memories(text: str, stopped: bool, outcome: object) -> None:
    assert parse_memory(text, stopped) == outcome


def test_think_blocks_leave_a_space() -> None:
    assert outside_think("a</think>b<think>c<think>d</think>e", thinking=True) == "b e"


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<memory>", "</memory>", "\\boxed{"),
    *("{", "}", "[", '"', "\\", '{"query": "x"}', "\x00", "\ud800", "é", "9", ":", "<", " "),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30), st.booleans())
def test_no_text_raises(pieces: list[str], stopped: bool) -> None:
    text = "".join(pieces)
    assert isinstance(parse_action(text, stopped), Search | Answer | StopReason)
    assert isinstance(parse_memory(text, stopped), Memory | StopReason)


def _stack_box(text: str) -> str | None:
    """The complete box that starts last, by a stack of open braces."""
    best, stack = (-1, -1), []
    for i, letter in enumerate(text):
        if letter == "{":
            stack.append((i + 1, text.endswith("\\boxed{", 0, i + 1)))
        elif letter == "}" and stack:
            start, boxed = stack.pop()
            best = max(best, (start, i)) if boxed else best
    return None if best[0] < 0 else text[slice(*best)].strip()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "x", " ", "\\boxed", "🙂"]), max_size=25))
def test_boxes_against_a_stack(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert last_box(text) == _stack_box(text)


@pytest.mark.parametrize("piece", [*PIECES, "</think><think>", "\\boxed{}", "}{"])
def test_a_megabyte_takes_milliseconds(piece: str) -> None:
    """CPU time of the quickest of three; on a quiet machine all stay below 50 ms."""
    text = piece.replace("\ud800", "\ufffd") * (1_000_000 // len(piece))  # as decoded
    for whole in (
        "</think>" + text,
        f"</think>\\boxed{{{text}",
        f"</think><tool_call>{text}</tool_call>",
        "<memory>" + text,
    ):
        seconds = []
        for _ in range(3):
            started = time.process_time()
            parse_action(whole, True)
            parse_memory(whole, True)
            seconds.append(time.process_time() - started)
        assert min(seconds) < 0.25, seconds  # quadratic would be minutes
