"""How far engine and learner are apart on the same tokens: one JSON object a line.

    python -m benchmarks.gap [--prompts 16] [--tokens 128] [KEY=VALUE ...]

KEY=VALUE as for flows.compose; they choose the untrained policy and both precisions, for example
`engine.dtype=bfloat16 train.dtype=bfloat16 policy.source=smollm2 agent.template=full`. The engine
samples after prompts whose memory is passages of the demo's world, at temperature 1 and without a
stop. What train.probe_bound bounds after each update is the first line's `high`.
"""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import yaml

from flows.compose import composed
from memsearcher import world
from memsearcher.agent.chat import Chat
from memsearcher.agent.prompts import Prompts
from memsearcher.engine.contract import Sampling
from memsearcher.engine.factory import open_engine
from memsearcher.learner.collate import Row
from memsearcher.learner.deepspeed import Learner
from memsearcher.learner.ranks import Ranks
from memsearcher.learner.settings import Settings
from memsearcher.params import Params, validate
from memsearcher.policy import base_policy


def prompts(params: Params, chat: Chat, count: int) -> list[list[int]]:
    """A turn each, with as much of its memory filled as the cap allows."""
    lines = iter(world.build(params.world.seed, params.world.passages).lines)
    made, ours = [], Prompts(chat, params.agent, "memsearcher")
    for _ in range(count):
        read = " ".join(line["contents"] for line in itertools.islice(lines, 20))
        memory = chat.decode(chat.plain(read)[: params.agent.max_memory_tokens])
        made.append(ours.turn("Who is named here, and why?", memory, last=False))
    return made


async def measure(params: Params, count: int, tokens: int) -> list[np.ndarray]:
    """|Δ log-prob| of each sampled token, an array a prompt."""
    folder = base_policy(params)
    asked = prompts(params, Chat(folder), count)
    engine = await open_engine(params, folder)
    try:
        settings = Settings.of(params.train, folder, "gap", Path("work/gap"))
        learner = Learner.open(settings, Ranks(1))
        wanted = [Sampling(tokens, seed=n) for n in range(count)]
        said = await asyncio.gather(*map(engine.generate, asked, wanted))
        rows = [
            Row([*p, *s.ids], len(p), [True] * len(s.ids), s.logprobs)
            for p, s in zip(asked, said, strict=True)
        ]
        pairs = zip(learner.logprobs(rows), said, strict=True)
        return [np.abs(np.subtract(ours, s.logprobs)) for ours, s in pairs]
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    params = validate(yaml.safe_load(composed(chosen.overrides)))
    gaps = asyncio.run(measure(params, chosen.prompts, chosen.tokens))
    means, each = np.array([gap.mean() for gap in gaps]), np.concatenate(gaps)
    bound = params.train.probe_bound
    for name, value, low, high, limit in (
        ("mean after a prompt", means.mean(), means.min(), means.max(), bound),
        ("one token, 99th percentile and largest", np.quantile(each, 0.99), 0.0, each.max(), None),
    ):
        row = {"name": f"|Δ log-prob|, {name}", "value": value, "low": low, "high": high}
        row = {k: float(f"{v:.3g}") if k != "name" else v for k, v in row.items()}
        holds = None if limit is None else bool(high <= limit)
        print(json.dumps(row | {"bound": limit, "holds": holds}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
