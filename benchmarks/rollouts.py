"""What the rollouts must show, measured on this machine: one JSON object a line.

    python benchmarks/rollouts.py [--quick] [--only NAME ...] [--demo FOLDER]

    loop      trajectories per second against a lockstep loop: on vLLM, and on an engine model whose
              step costs 20 ms; 128 trajectories of 1-5 turns, searches lognormal (150 ms, p99 2 s)
    tokens    generated tokens per second against LLM.generate on the same requests (plain), and on
              the same prompts without the seeds and log-probs that training needs (bare)
    agree     log-probs of vLLM and the policy module on 200 trajectories, tied and untied policy,
              before and after 20 weight updates
    overlap   seconds per step and dev EM with train.async_steps 1 against 0, three seeds. Long, and
              left out by --quick. FOLDER is a checkout with the demo's data and warm-up

`low` and `high` are the least and the largest of the repetitions, `value` their median. `holds`
null: reported, nothing promised. The policy is made on the spot (`talker.py`) and kept in work/.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

import torch
import yaml
from lockstep import roll_out_in_lockstep
from overlap import overlap
from talker import SlowRetriever, Talker, imitated, questions

from flows.compose import composed
from memsearcher import files
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Agent
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.engine.vllm import VllmEngine, arguments, environment
from memsearcher.engine.weights import untied_export, untied_folder
from memsearcher.learner.collate import collate, rows
from memsearcher.learner.model import LogProbs, load_policy
from memsearcher.params import Params, validate
from memsearcher.policy import base_policy
from memsearcher.rollout import make_agent, roll_out
from memsearcher.types import Trajectory

AT_ONCE, MAX_TURNS, STEP_S = 128, 5, 0.02
COMPARED = 200  # trajectories
SAMPLING = Sampling(0, temperature=1.0)


@dataclass(frozen=True)
class Bench:
    params: Params
    policy: Path
    agent: Agent
    quick: bool

    @property
    def repetitions(self) -> int:
        return 3 if self.quick else 7

    async def open(self, folder: Path | None = None) -> VllmEngine:
        return await VllmEngine.open(self.params, folder or self.policy)


def say(
    name: str, values: Sequence[float], at_least: float | None = None, at_most: float | None = None
) -> None:
    row: dict[str, object] = {"name": name, "value": median(values)}
    row |= {"low": min(values), "high": max(values), "bound": None, "holds": None}
    if at_least is not None:
        row |= {"bound": f">= {at_least}", "holds": median(values) >= at_least}
    if at_most is not None:
        row |= {"bound": f"<= {at_most}", "holds": max(values) <= at_most}
    shown = {k: round(v, 8) if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(shown), flush=True)


async def freely(bench: Bench, engine: Engine, retriever: SlowRetriever, seed: int, count: int):
    return await roll_out(
        *(bench.agent, [(q, 0) for q in questions(count)], engine, retriever),
        sampling=SAMPLING,
        max_turns=MAX_TURNS,
        seed=seed,
        concurrency=AT_ONCE,
        in_flight=AT_ONCE,
    )


async def in_lockstep(bench: Bench, engine: Engine, retriever: SlowRetriever, seed: int):
    return await roll_out_in_lockstep(
        *(bench.agent, [(q, 0) for q in questions(AT_ONCE)], engine, retriever),
        sampling=SAMPLING,
        max_turns=MAX_TURNS,
        seed=seed,
    )


async def loop(bench: Bench, engine: VllmEngine) -> None:
    talker = Talker(Chat(bench.policy), STEP_S)
    few = 2 if bench.quick else bench.repetitions
    for name, served, bound, times in (
        ("cpu", engine, 1.5, bench.repetitions),
        ("20ms", talker, 2.0, few),
    ):
        took: dict[str, list[float]] = {"free": [], "lockstep": []}
        done: dict[str, list[Trajectory]] = {"free": [], "lockstep": []}
        for seed in range(times):
            for way in sorted(took, reverse=bool(seed % 2)):
                began = time.monotonic()
                if way == "free":
                    made = await freely(bench, served, SlowRetriever(), seed, AT_ONCE)
                else:
                    made = await in_lockstep(bench, served, SlowRetriever(), seed)
                took[way].append(time.monotonic() - began)
                done[way] += made
        say(f"loop_{name}_trajectories_per_s", [AT_ONCE / s for s in took["free"]])
        say(f"loop_{name}_lockstep_trajectories_per_s", [AT_ONCE / s for s in took["lockstep"]])
        pairs = zip(took["free"], took["lockstep"], strict=True)
        say(f"loop_{name}_speedup", [lock / free for free, lock in pairs], at_least=bound)
        compare(f"loop_{name}", done["free"], done["lockstep"])


def compare(name: str, free: list[Trajectory], lockstep: list[Trajectory]) -> None:
    """The same seeds in both: how many trajectories are the same to the token, and whether ends and
    lengths have one distribution (p of a chi-squared and of a Kolmogorov-Smirnov test)."""
    from scipy.stats import chi2_contingency, ks_2samp

    same = [
        [t.response_ids for t in a.turns] == [t.response_ids for t in b.turns]
        for a, b in zip(free, lockstep, strict=True)
    ]
    say(f"{name}_same_trajectories", [sum(same) / len(same)])
    ends = [Counter((len(t.turns), t.stop) for t in each) for each in (free, lockstep)]
    keys = sorted(set().union(*ends))
    table = [[end[key] for key in keys] for end in ends]
    say(f"{name}_same_ends_p", [float(chi2_contingency(table).pvalue)], at_least=0.01)
    lengths = [[sum(sum(t.mask) for t in each.turns) for each in ts] for ts in (free, lockstep)]
    say(f"{name}_same_lengths_p", [float(ks_2samp(*lengths).pvalue)], at_least=0.01)


async def tokens(bench: Bench, engine: VllmEngine) -> None:
    """Every message of real trajectories again, with its length, all given to the engine at once,
    which runs 128 of them at a time."""
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.inputs.engine import tokens_input

    done = await freely(bench, engine, SlowRetriever(0.0), 100, AT_ONCE)
    asked = [
        (turn.prompt_ids + turn.response_ids[:start], length)
        for t in done
        for turn in t.turns
        for start, length in (
            (0, turn.action_tokens),
            (turn.action_tokens + turn.observation_tokens, turn.memory_tokens),
        )
        if length
    ]
    served = untied_folder(bench.policy)
    sockets = files.ROOT / "work" / "benchmarks" / "sockets"
    sockets.mkdir(exist_ok=True)
    with environment(bench.params, sockets):
        ours_too = arguments(bench.params, served)
        plain_ones = [field.name for field in fields(EngineArgs)]
        llm = LLM(**{name: getattr(ours_too, name) for name in plain_ones})
    bare = [
        SamplingParams(max_tokens=n, temperature=1.0, ignore_eos=True, detokenize=False)
        for _, n in asked
    ]
    same = [each.clone() for each in bare]
    for i, each in enumerate(same):
        each.seed, each.logprobs, each.flat_logprobs = i, 0, True
    wanted = {"plain": same, "bare": bare}
    count = sum(n for _, n in asked)
    took: dict[str, list[float]] = {"ours": [], "plain": [], "bare": []}
    for _ in range(bench.repetitions + 1):
        began = time.monotonic()
        said = await asyncio.gather(
            *(
                engine.generate(ids, Sampling(n, temperature=1.0, seed=i))  # as roll-outs do
                for i, (ids, n) in enumerate(asked)
            )
        )
        took["ours"].append(time.monotonic() - began)
        assert sum(len(each.ids) for each in said) == count
        for name, params in wanted.items():
            began = time.monotonic()
            prompts = [tokens_input(ids) for ids, _ in asked]
            said = await asyncio.to_thread(llm.generate, prompts, params, use_tqdm=False)
            took[name].append(time.monotonic() - began)
            assert sum(len(each.outputs[0].token_ids) for each in said) == count
    llm.llm_engine.engine_core.shutdown()
    took = {name: seconds[1:] for name, seconds in took.items()}  # the first fills prefix caches
    for name, seconds in took.items():
        say(f"tokens_per_s_{name}", [count / s for s in seconds])
    for name, bound in (("plain", 0.85), ("bare", None)):
        ratios = [p / o for p, o in zip(took[name], took["ours"], strict=True)]
        say(f"tokens_per_s_of_{name}", ratios, at_least=bound)


async def agree(bench: Bench, engine: VllmEngine | None, tied: bool) -> None:
    """The policy learns from what it sampled, 20 times, each time handed over to the engine."""
    folder = bench.policy if tied else untied_folder(bench.policy)
    name = "tied" if tied else "untied"
    policy = LogProbs(load_policy(folder, torch.float32), 1.0)
    assert policy.tied == tied
    mine = engine or await bench.open(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    gaps: list[float] = []
    for update in range(21):
        count = COMPARED if update in (0, 20) else (4 if bench.quick else 24)
        done = await freely(bench, mine, SlowRetriever(0.0), 200 + update, count)
        made = rows(done, [1.0] * len(done))
        assert {turn.weight_version for t in done for turn in t.turns} == {mine.weight_version}
        gap = 0.0
        optimizer.zero_grad()
        for start in range(0, len(made), 16):
            batch = collate(made[start : start + 16])
            with torch.set_grad_enabled(update < 20):
                logprobs, _ = policy(batch.input_ids, batch.select, batch.targets, False)
                if update < 20:
                    (-logprobs.sum() / batch.targets.numel()).backward()
            gap = max(gap, (logprobs - batch.sampler_logprobs).abs().max().item())
        gaps.append(gap)
        if update < 20:
            optimizer.step()
            weights = untied_export(policy.policy.named_parameters(), policy.policy.config)
            await mine.update_weights(weights)
    say(f"agree_{name}_before_updates", [gaps[0]], at_most=1e-4)
    say(f"agree_{name}_after_20_updates", [gaps[-1]], at_most=1e-4)
    if engine is None:
        await mine.close()


async def prepare(quick: bool) -> Bench:
    # two cores: one for the engine core, one for this process
    params = validate(yaml.safe_load(composed(["engine.threads=1"])))
    start = base_policy(params)
    agent = make_agent("memsearcher", params, Chat(start))
    bench = Bench(params, start, agent, quick)
    made_from = [
        files.content_hash(start),
        files.content_hash(Path(__file__).with_name("talker.py")),
    ]
    out = files.ROOT / "work" / "benchmarks" / f"talker-{files.digest(made_from)}"
    if not out.is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        shown = await freely(bench, Talker(Chat(start)), SlowRetriever(0.0), 99, 400)
        imitated(start, rows(shown, [1.0] * len(shown)), out)
    return replace(bench, policy=out)


async def measure(only: set[str], quick: bool) -> None:
    bench = await prepare(quick)
    engine = await bench.open()
    try:
        if "loop" in only:
            await loop(bench, engine)
        if "tokens" in only:
            await tokens(bench, engine)
        if "agree" in only:
            await agree(bench, engine, tied=True)
    finally:
        await engine.close()
    if "agree" in only:
        await agree(bench, None, tied=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ("loop", "tokens", "agree", "overlap")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=names)
    parser.add_argument("--demo", type=Path, default=files.ROOT)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    only = set(chosen.only or names[: 3 if chosen.quick else 4])
    os.chdir(files.ROOT)
    if only - {"overlap"}:
        asyncio.run(measure(only, chosen.quick))
    if "overlap" in only:
        overlap(chosen.demo.resolve(), chosen.seeds, chosen.steps, say)


if __name__ == "__main__":
    sys.exit(main())
