"""No output of a model breaks an agent: fuzzed outputs, real loops, one JSON object a line.

    python -m benchmarks.fuzz [--count 100000] [--trajectories FILE]

Half of the outputs are mutations of what real policies said (FILE: trajectories.jsonl of an
evaluation or rollouts.jsonl of a training run; without one a few written ones), played by both
agents over passages that try to forge; the other half is hypothesis's, for the parser. `value` is
what was found, `bound` what may be found.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.compose import composed
from memsearcher import files
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Agent, Found
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.agent.parsing import Answer, Memory, Search, parse_action, parse_memory
from memsearcher.agent.prompts import Prompts
from memsearcher.agent.react import ReAct
from memsearcher.engine.contract import Completion, Sampling
from memsearcher.params import Agent as AgentParams
from memsearcher.params import validate
from memsearcher.types import Hit, Passage, Question, StopReason, Trajectory, Turn

PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<memory>", "</memory>"),
    *("<question>", "</question>", "<tool_response>", "</tool_response>", "\\boxed{", "\\boxed"),
    *("{", "}", "[", "]", '"', "'", "\\", ":", ",", "<", ">", "/", "9", " ", "\n", "\x00"),
    *('{"query": "x"}', '{"query": [', '"arguments": ', '"top_n": -1', "\\ud800", "\\u0000"),
    *("\ud800", "é", "日本", "🙂", "\ufffd", "\u2028", "9" * 5000, "{" * 3000, "[" * 3000),
]
WRITTEN = [
    ' look it up</think><tool_call> {"query": "mayor of Marel"}</tool_call>',
    ' </think>\n<tool_call>{"name": "search", "arguments": {"query": "Marel"}}</tool_call>',
    "<memory> Marel mayor Ida Quent ; Ida Quent birthplace Brost ;</memory>",
    " done</think>\\boxed{ Ida Quent }",
]
MEGABYTE = 1_000_000
TEMPLATES = [("compact", None, False), ("full", None, True), ("full", 9, False)]


def said(path: Path) -> list[str]:
    """Every action and memory of the trajectories in a file."""
    turns = [turn for row in files.read_jsonl(path) for turn in row["turns"]]
    texts = [t["action"] for t in turns]
    return texts + [f"<memory> {t['memory_after']}</memory>" for t in turns if t["memory_after"]]


def mutated(rng: random.Random, texts: Sequence[str], controls: Sequence[str]) -> str:
    """One of `texts` after none to four edits."""
    text = rng.choice(texts)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        middle = text[start:end]
        match rng.randrange(6):
            case 0:  # something left out
                middle = middle[: len(middle) // 2] if rng.random() < 0.5 else ""
            case 1:  # said twice, or over and over
                middle *= rng.choice([2, 2, 50])
            case 2:  # a piece put in
                middle += rng.choice([*PIECES, *controls])
            case 3:  # two outputs crossed
                middle += rng.choice(texts)[start:]
            case 4:
                middle = "".join(rng.sample(middle, len(middle)))
            case _:  # broken off
                return text[:end]
        text = text[:start] + middle + text[end:]
    return text


class Fuzzer:
    """An engine that says mutations, now and then random ids, now and then without an end."""

    weight_version = 0

    def __init__(self, chat: Chat, rng: random.Random, texts: Sequence[str]) -> None:
        self._chat, self._rng, self._texts = chat, rng, texts
        self.controls = [chat.decode([i]) for i in sorted(chat.control_ids)]
        self.said: list[int] = []
        self.count = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        chat, rng = self._chat, self._rng
        if rng.random() < 0.05:
            length = rng.randrange(1, sampling.max_tokens + 1)
            ids = [rng.randrange(chat.vocabulary) for _ in range(length)]
        else:
            ids = chat.trusted(mutated(rng, self._texts, self.controls))
        ids = (ids or [0]) if rng.random() < 0.05 else [*ids, chat.end_id]
        if chat.end_id in ids:
            ids = ids[: ids.index(chat.end_id) + 1]
        ids = ids[: sampling.max_tokens]
        self.said += ids
        self.count += 1
        return Completion(ids, [-1.0] * len(ids), ids[-1] == chat.end_id, 0)

    async def search(self, query: str) -> Found:
        """What was searched for comes back, between tags and control tokens."""
        rng = self._rng
        found = []
        for rank in range(1, rng.randrange(4) + 1):
            words = [query, *rng.choices([*self.controls, *PIECES[:12], "town"], k=8)]
            passage = Passage(str(rank), rng.choice([*words, "Marel"]), " ".join(words))
            found.append((Hit(passage.id, 1.0 / rank, rank), passage))
        return found


def agents(chat: Chat, params: AgentParams) -> list[tuple[Agent, Prompts]]:
    """Both agents on both templates; one may choose k."""
    made: list[tuple[Agent, Prompts]] = []
    for template, max_k, switches in TEMPLATES:
        release = replace(
            params.release, max_k=max_k, broken_memory=switches, whole_prompt=switches
        )
        own = replace(params, template=template, release=release, release_template=None)
        made.append((MemSearcher(own, chat, 3, evaluating=True), Prompts(chat, own, "memsearcher")))
        made.append((ReAct(own, chat, 3), Prompts(chat, own, "react")))
    return made


def played(
    chat: Chat, params: AgentParams, texts: Sequence[str], count: int, seed: int
) -> Counter[str]:
    """Plays until `count` outputs were said. Raises what a loop raises; AssertionError names what
    is wrong with a trajectory. How the trajectories ended, and `outputs`."""
    rng = random.Random(f"fuzz {seed}")
    engine = Fuzzer(chat, rng, texts)
    pairs = agents(chat, params)
    stops: Counter[str] = Counter()
    while engine.count < count:
        agent, prompts = rng.choice(pairs)
        asked = Question("q", "q", mutated(rng, texts, engine.controls), ("x",))
        engine.said = []
        trajectory = asyncio.run(
            agent.run(asked, 0, engine, engine.search, sampling=Sampling(0), max_turns=4, seed=seed)
        )
        check(trajectory, engine.said, chat, prompts)
        stops[trajectory.stop] += 1
    return stops + Counter(outputs=engine.count)


def check(trajectory: Trajectory, said: list[int], chat: Chat, prompts: Prompts) -> None:
    """Nothing but what was said is trained on; no control token but ours was put in."""
    params = prompts.params

    def controls(ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in chat.control_ids]

    clean = [Passage("1", "a", "b")]
    allowed = [controls(prompts.observation(clean, last=last)[0]) for last in (False, True)]
    opening = controls(prompts.turn("q", "m", last=False))
    assert isinstance(trajectory.stop, StopReason)
    assert (trajectory.answer is not None) == (trajectory.stop is StopReason.ANSWERED)
    trained = [
        i for t in trajectory.turns for i, m in zip(t.response_ids, t.mask, strict=True) if m
    ]
    assert trained == said
    for turn in trajectory.turns:
        assert len(turn.response_ids) == len(turn.mask) == len(turn.sampler_logprobs)
        assert len(turn.prompt_ids) + len(turn.response_ids) <= params.max_context_tokens
        assert controls(turn.prompt_ids) == opening, chat.decode(turn.prompt_ids)
        for span in put_in(turn):
            assert controls(span) in allowed, chat.decode(span)
        if turn.memory_after is not None:
            assert len(prompts.memory(turn.memory_after)) <= params.max_memory_tokens


def put_in(turn: Turn) -> Iterator[list[int]]:
    """The spans of a context that were not sampled."""
    span: list[int] = []
    for token, sampled in zip(turn.response_ids, turn.mask, strict=True):
        if not sampled:
            span.append(token)
        elif span:
            yield span
            span = []
    if span:
        yield span


def parsed(chat: Chat, count: int) -> None:
    """hypothesis's texts through both parsers and, as somebody else's words, the tokenizer."""

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30), st.booleans())
    def one(pieces: list[str], stopped: bool) -> None:
        text = "".join(pieces)
        assert isinstance(parse_action(text, stopped), Search | Answer | StopReason)
        assert isinstance(parse_memory(text, stopped), Memory | StopReason)
        assert chat.control_ids.isdisjoint(chat.plain(text))

    one()


def parse_ms(size: int) -> tuple[float, str]:
    """CPU milliseconds of the slowest text of `size` characters (each the quickest of three)."""
    worst = (0.0, "")
    for piece in dict.fromkeys(p.replace("\ud800", "\ufffd") for p in PIECES):
        for front, back in (
            *(("</think>", ""), ("</think>\\boxed{", ""), ("<memory>", "")),
            ("</think><tool_call>", "</tool_call>"),
            ('</think><tool_call>{"query": "', '"}</tool_call>'),
        ):
            text = (front + piece * (size // len(piece)))[: size - len(back)] + back
            for parse in (parse_action, parse_memory):
                taken = []
                for _ in range(3):
                    started = time.process_time()
                    parse(text, True)
                    taken.append(1000 * (time.process_time() - started))
                worst = max(worst, (min(taken), front + piece[:20]))
    return worst


def line(name: str, value: float, bound: float | None, **more: object) -> None:
    row = {"name": name, "value": round(value, 3), "low": None, "high": None, "bound": bound}
    print(json.dumps(row | {"holds": None if bound is None else value <= bound} | more), flush=True)


def main() -> None:
    from memsearcher import tiny_policy  # and with it torch, which the tests do not need

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--trajectories", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    texts = said(chosen.trajectories) if chosen.trajectories else WRITTEN
    params = validate(yaml.safe_load(composed(["experiment=demo"])))
    with tempfile.TemporaryDirectory() as folder:
        tiny_policy.make(Path(folder), params.policy, params.seed)
        chat = Chat(folder)
    room = {"max_observation_tokens": 400, "max_context_tokens": 2000}
    started = time.monotonic()
    half = chosen.count // 2
    stops = played(chat, replace(params.agent, **room), texts, half, chosen.seed)
    parsed(chat, chosen.count - half)
    seconds = time.monotonic() - started
    line("outputs that raise or forge", 0, 0, outputs=stops.pop("outputs") + chosen.count - half)
    line("seconds for them", seconds, None, ends=dict(stops))
    quarter, _ = parse_ms(MEGABYTE // 4)
    whole, text = parse_ms(MEGABYTE)
    line("milliseconds to parse a megabyte, the slowest", whole, 50, text=text)
    line("against a quarter of it, linear is 4", whole / quarter, 8)


if __name__ == "__main__":
    main()
