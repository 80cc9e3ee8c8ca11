"""How contexts grow with the turns, from real trajectories: one JSON object a line.

    python -m benchmarks.growth [--data FOLDER] [--questions 20]

A scripted policy never answers before the tenth turn: it searches for what it read last and keeps
all that it read in its memory, which is full from early on. Loop, prompts, tokenizer, budgets and
retriever are the demo's; FOLDER is its data/. `value` is the median over the questions, `low` and
`high` the least and the largest.
"""

import argparse
import asyncio
import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import yaml

from flows.compose import composed
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Agent, Search
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.agent.prompts import PREFIX
from memsearcher.agent.react import ReAct
from memsearcher.engine.contract import Completion, Sampling
from memsearcher.params import validate
from memsearcher.types import Question

TURNS = 10


class Wanderer:
    """An engine that searches for words of what it sees and forgets nothing of its own accord."""

    weight_version = 0

    def __init__(self, chat: Chat, seed: str) -> None:
        self._chat, self._rng = chat, random.Random(seed)
        self.prompt_tokens: list[int] = []  # of each action

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        chat = self._chat
        text = chat.decode(prompt_ids)
        seen = re.findall(r"[^\W\d_]{3,}", text.rpartition("<question>")[2]) or ["nothing"]
        if text.endswith(PREFIX):
            self.prompt_tokens.append(len(prompt_ids))
            query = " ".join(self._rng.sample(seen, min(3, len(seen))))
            say = f' on</think><tool_call> {{"query": "{query}"}}</tool_call>'
        else:
            old = text.rpartition("<memory> ")[2].partition("</memory>")[0]
            say = f"<memory> {' '.join((old.split() + seen)[-sampling.max_tokens :])}</memory>"
        ids = [*chat.trusted(say), chat.end_id][: sampling.max_tokens]
        return Completion(ids, [-1.0] * len(ids), ids[-1] == chat.end_id, 0)


def prompt_tokens(agent: Agent, chat: Chat, question: Question, search: Search) -> list[int]:
    """Tokens before each of the TURNS actions of one trajectory."""
    engine = Wanderer(chat, question.id)
    played = agent.run(question, 0, engine, search, sampling=Sampling(0), max_turns=TURNS, seed=1)
    asyncio.run(played)
    return engine.prompt_tokens


def bounded(tokens: Sequence[int], cap: int) -> float:
    """Prompt tokens at turn 10 as a share of what they may be."""
    return tokens[9] / (1.1 * tokens[1] + cap)


def linear(tokens: Sequence[int]) -> float:
    """What turns 6 to 10 add, as a multiple of what turns 2 to 6 add; 1 is linear growth."""
    return (tokens[9] - tokens[5]) / (tokens[5] - tokens[1])


def main() -> None:
    from memsearcher.policy import base_policy
    from memsearcher.questions import read_questions
    from memsearcher.retrieval.factory import open_retriever

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--questions", type=int, default=20)
    chosen = parser.parse_args()
    params = validate(yaml.safe_load(composed(["experiment=demo"])))
    os.environ.setdefault("OMP_NUM_THREADS", str(params.engine.threads))
    chat = Chat(base_policy(params))
    retriever = open_retriever(params, chosen.data)
    asked = read_questions(chosen.data / "questions/test/musique.jsonl")[: chosen.questions]

    async def search(query: str) -> list:
        hits = retriever.search([query], params.search.k)[0]
        return [(hit, retriever.passage(hit.passage_id)) for hit in hits]

    wide = replace(params.agent, max_context_tokens=4096)
    memory = MemSearcher(params.agent, chat, params.search.k)
    history = ReAct(wide, chat, params.search.k)
    kept, whole = (
        [prompt_tokens(agent, chat, q, search) for q in asked] for agent in (memory, history)
    )
    cap = params.agent.max_memory_tokens
    shares, bends = [bounded(t, cap) for t in kept], [linear(t) for t in whole]
    rows = [
        ("memsearcher: tokens at turn 10 / (1.1 × turn 2 + cap)", shares, 1.0, max(shares) <= 1),
        ("react: turns 6-10 add / turns 2-6 add", bends, None, 0.8 <= median(bends) <= 1.25),
        *(
            (f"memsearcher: prompt tokens at turn {n}", [t[n - 1] for t in kept], None, None)
            for n in (2, TURNS)
        ),
        *(
            (f"react: prompt tokens at turn {n}", [t[n - 1] for t in whole], None, None)
            for n in (2, TURNS)
        ),
    ]
    for name, values, bound, holds in rows:
        row = {"name": name, "value": round(median(values), 3), "low": round(min(values), 3)}
        row |= {"high": round(max(values), 3), "bound": bound, "holds": holds}
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
