"""A policy for benchmarks that is made in a minute: it keeps to the format and means nothing.

`Talker` writes searches, answers and memories of random words and length; it also stands for an
engine whose step costs a fixed time. `imitated` trains a tiny transformer on what it writes, so
that a real engine has real trajectories of one to five turns to sample.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from memsearcher import files, world
from memsearcher.agent.chat import Chat
from memsearcher.agent.prompts import PREFIX
from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.learner.collate import Row, collate
from memsearcher.learner.model import LogProbs, load_policy, save_policy
from memsearcher.types import Hit, Passage, Question

SEARCHES = 0.85  # of the actions; the others answer
STEPS = 300
MEDIAN_S, P99_S = 0.15, 2.0  # of a search
SPREAD = 1.114  # sigma of the lognormal with these two: log(P99_S / MEDIAN_S) / 2.326
WORDS = [word for pool in world.pools() for word in pool]


def questions(count: int) -> list[Question]:
    rng = random.Random(1)
    names = [f"{rng.choice(WORDS)} {rng.choice(WORDS)}" for _ in range(count)]
    return [
        Question(f"nq/{i}", "nq", f"what is the company of {name} ?", ("nobody",))
        for i, name in enumerate(names)
    ]


class Talker:
    """An Engine. Every message takes a step of `step_s` per token and one for its prompt, whatever
    else is under way; its words depend on the request's seed alone."""

    def __init__(self, chat: Chat, step_s: float = 0.0) -> None:
        self._chat, self._step_s = chat, step_s
        self.weight_version = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        rng = random.Random(sampling.seed)
        if self._chat.decode(prompt_ids[-8:]).endswith(PREFIX):
            ids = self._action(rng)
        else:
            ids = self._say(("", "<memory>"), (self._words(rng, 56), "</memory>"))
        ids = [*ids, self._chat.end_id][: sampling.max_tokens]
        if self._step_s:
            now = asyncio.get_running_loop().time()
            first = self._step_s - now % self._step_s  # steps are common to all requests
            await asyncio.sleep(first + self._step_s * len(ids))
        stopped = ids[-1] == self._chat.end_id
        return Completion(ids, [-1.0] * len(ids), stopped, weight_version=0)

    def _action(self, rng: random.Random) -> list[int]:
        thought = self._words(rng, 28)
        if rng.random() < SEARCHES:
            call = json.dumps({"query": f"{rng.choice(WORDS)} {rng.choice(WORDS)}"})
            return self._say((thought, "</think><tool_call>"), (f" {call}", "</tool_call>"))
        return self._say((thought, "</think>\\boxed{"), (f" {rng.choice(WORDS)}", " }"))

    def _words(self, rng: random.Random, most: int) -> str:
        count = min(most, round(rng.lognormvariate(2.2, 0.7)))  # median 9, one in six past 18
        return "".join(f" {rng.choice(WORDS)}" for _ in range(count))

    def _say(self, *pieces: tuple[str, str]) -> list[int]:
        return [
            token
            for plain, trusted in pieces
            for token in self._chat.plain(plain) + self._chat.trusted(trusted)
        ]

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise EngineFailed("a talker has no weights")

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class SlowRetriever:
    """Any passages. A query takes a lognormal time that its text decides, a call as long as its
    slowest query. `scale` 0 does not wait."""

    def __init__(self, scale: float = 1.0) -> None:
        rng = random.Random(2)
        self._scale = scale
        self._passages = {}
        for i in range(500):
            words = [rng.choice(WORDS) for _ in range(rng.randint(20, 45))]
            self._passages[str(i)] = Passage(str(i), " ".join(words[:2]), " ".join(words[2:]))

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        draws = [random.Random(query) for query in queries]
        time.sleep(self._scale * max(MEDIAN_S * d.lognormvariate(0, SPREAD) for d in draws))
        return [
            [Hit(str(i), 1.0, rank) for rank, i in enumerate(d.sample(range(500), k), 1)]
            for d in draws
        ]

    def passage(self, passage_id: str) -> Passage:
        return self._passages[passage_id]


def imitated(start: Path, rows: Sequence[Row], out: Path) -> None:
    """`start` after supervised steps on `rows`; many small ones, since only the format matters."""
    policy = load_policy(start, torch.float32)
    module, rng = LogProbs(policy, 1.0), random.Random(3)
    optimizer = torch.optim.AdamW(module.parameters())
    for step in range(STEPS):
        batch = collate(rng.sample(rows, 12))
        logprobs, _ = module(batch.input_ids, batch.select, batch.targets, False)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, 3 * (1 - step / STEPS))
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    part = out.with_suffix(".part")
    files.remove(part)
    state = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    save_policy(state, start, part, torch.float32)
    part.rename(out)
