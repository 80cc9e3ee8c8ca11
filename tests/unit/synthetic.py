"""Results that look like an evaluation's, made from a seed: for tests, and to look at the report.

PYTHONPATH=. python tests/unit/synthetic.py FOLDER [QUESTIONS]
"""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from flows.compose import composed
from memsearcher import evaluation, files, transcripts
from memsearcher.cost import ModelSize
from memsearcher.params import Params, validate
from memsearcher.published import COLUMNS
from memsearcher.report import page
from memsearcher.report.collect import collect
from memsearcher.types import Hit, Passage, Question, StopReason, Trajectory, Turn

NASTY = (
    "<script>window.hacked = 1</script><img src=x onerror=window.hacked=1> </tool_response>"
    "\u2028 ' \" \\ &lt;"
)
NAMES = (
    *("Marel", "Tovin", "Osk", "Brenner", "Lia", "Caldrow", "Istvan", "Pelt", "Noor", "Vasska"),
    *("Edda", "Quill", "Tam", "Orriel"),
)


ENTRY = "model: null, after: data/questions"
REACT = (f"+policies.react={{agent: react, {ENTRY}}}",)
SEED = (f"+policies.memsearcher-seed2={{agent: memsearcher, {ENTRY}}}",)


def params(*overrides: str) -> Params:
    return validate(yaml.safe_load(composed(list(overrides))))


def passages(count: int) -> list[Passage]:
    rng = random.Random(1)
    out = []
    for i in range(count):
        title = f"{rng.choice(NAMES)} {rng.choice(NAMES)} ({i})"
        text = f"{title} was born in {1800 + i % 200} and directed {rng.choice(NAMES)}'s last film."
        out.append(Passage(str(i), title, text if i % 50 else f"{text} {NASTY}"))
    return out


def trajectory(
    rng: random.Random, dataset: str, i: int, corpus: list[Passage], skill: float
) -> Trajectory:
    """One attempt. `skill`: how likely each step goes right."""
    target = rng.choice(corpus)
    year = target.text.split(" born in ")[1][:4]
    plan = [{"query": target.title, "title": target.title, "fact": year}]
    text = f"When was {target.title} born?" if i % 40 else f"Who is {NASTY}?"
    question = Question(f"{dataset}/test_{i}", dataset, text, (year,), "test", {"plan": plan})
    count = rng.randint(1, 4)
    memory, turns = "", []
    for _ in range(count):
        hits = rng.sample(corpus, 3)
        if rng.random() < skill:
            hits[0] = target
        knows = target in hits and rng.random() < skill
        news = f"{target.title} was born in {year} ." if knows else "nothing yet"
        after = f"{memory} {news}".strip()
        turns.append(
            Turn(
                prompt_ids=[0] * (40 + len(memory.split())),
                response_ids=[0] * 60,
                mask=[True] * 20 + [False] * 30 + [True] * 10,
                sampler_logprobs=[0.0] * 60,
                action=f' find it </think> <tool_call> {{"query": "{target.title}"}} </tool_call>',
                memory_before=memory,
                query=target.title,
                hits=tuple(Hit(p.id, 0.9 - 0.1 * r, r + 1) for r, p in enumerate(hits)),
                memory_after=after,
                memory_cut=rng.random() < 0.05,
                action_tokens=20,
                observation_tokens=30,
                memory_tokens=10,
                seconds={"action": 0.2, "search": 0.05, "memory": 0.1},
            )
        )
        memory = after
    if rng.random() < 0.12:
        return Trajectory(question, 0, tuple(turns), StopReason.MAX_TURNS)
    answer = year if rng.random() < skill else str(rng.randint(1800, 2000))
    last = replace(turns[0], memory_before=memory, query=None, hits=(), memory_after=None)
    last = replace(last, action=f" done </think> \\boxed{{ {answer} }}", action_tokens=60)
    last = replace(last, observation_tokens=0, memory_tokens=0)
    return Trajectory(question, 0, (*turns, last), StopReason.ANSWERED, answer)


def as_history(attempt: Trajectory) -> Trajectory:
    """The same attempt in one context that grows, as ReAct makes it: one Turn of all."""
    first, size = attempt.turns[0], len(attempt.turns)
    tokens = 20 * size + 90 * (size - 1)
    mask = [place % 110 < 20 for place in range(tokens)]
    queries = [turn.query for turn in attempt.turns if turn.query is not None]
    whole = replace(
        first,
        response_ids=[0] * tokens,
        mask=mask,
        sampler_logprobs=[0.0] * tokens,
        action="".join(turn.action for turn in attempt.turns),
        memory_before="",
        query="\n".join(queries) or None,
        hits=tuple(hit for turn in attempt.turns for hit in turn.hits),
        memory_after=None,
        memory_cut=False,
        action_tokens=20 * size,
        observation_tokens=90 * (size - 1),
        memory_tokens=0,
    )
    return replace(attempt, turns=(whole,))


def said(ids: list[int]) -> str:
    return f" find it </think> ({len(ids)} tokens)"


def write_results(root: Path, settings: Params, questions: int, corpus: list[Passage]) -> None:
    by_id = {p.id: p for p in corpus}
    for number, (name, entry) in enumerate(settings.policies.items()):
        made = []
        for dataset in COLUMNS:
            for i in range(questions):
                rng = random.Random(f"{dataset} {i}")
                made.append(trajectory(rng, dataset, i, corpus, min(0.9, 0.25 + 0.3 * number)))
        react = entry.agent == "react"
        made = [as_history(each) for each in made] if react else made
        rows = [evaluation.predict(t, by_id.__getitem__, keeps_history=react) for t in made]
        at = root / "results" / "evaluate" / name
        files.write_jsonl(at / "predictions.jsonl", rows)
        told = [transcripts.readable(t, said, keeps_history=react) for t in made]
        files.write_jsonl(at / "trajectories.jsonl", told)
        fingerprint = {"policy": f"hash of {name}", "agent": entry.agent, "sample": None}
        seconds = [sum(sum(turn.seconds.values()) for turn in t.turns) for t in made]
        metrics = evaluation.summarise(rows, seconds, 1, ModelSize(800_000, 3, 128))
        metrics["fingerprint"] = fingerprint
        files.write_json(at / "metrics.json", metrics | {"policy": name, "agent": entry.agent})


def write_curves(root: Path, settings: Params) -> None:
    for agent in settings.agents:
        rng = random.Random(3)
        warm = [
            {"phase": phase, "step": i, "loss": 3 / (1 + i / 9)}
            for phase in ("copying", "imitation")
            for i in range(60)
        ]
        files.write_jsonl(root / "results" / "warmup" / agent / "metrics.jsonl", warm)
        rows = []
        for i in range(30):
            row = {"step": i + 1, "reward": 0.3 + 0.4 * (1 - 0.9**i) + 0.03 * rng.random()}
            row |= {"kl": 0.002 * i, "entropy": 1 / (1 + i), "turns": 2.2, "em": 0.2}
            row |= {"zero_variance_share": rng.random() / 3, "probe_gap": 1e-4 * rng.random()}
            row |= {f"context_tokens_turn_{n}": 100 + i + 9 * n for n in (1, 2, 3)}
            row |= {"grad_norm": float("nan") if i == 3 else 1.0, "stop_answered": i / 30}
            rows.append(row | ({"dev_em": 0.3 + i / 90} if i % 10 == 9 else {}))
        files.write_jsonl(root / "results" / "train" / agent / "metrics.jsonl", rows)
        files.write_json(root / "results" / "train" / agent / "summary.json", {"best_step": 20})


def write_retrieval(root: Path, settings: Params) -> None:
    row = {"low": 0.5, "high": 0.8, "n": 40}
    found = {
        mode: {
            name: {f"recall@{k}": row | {"value": 0.5 + k / 50} for k in settings.search.report_k}
            | {f"answer@{k}": row | {"value": 0.4 + k / 50} for k in settings.search.report_k}
            | {"mrr@10": row | {"value": 0.61}}
            for name in (*COLUMNS, "dev")
        }
        for mode in ("dense", "bm25", "fusion")
    }
    files.write_json(root / "results" / "retrieval" / "metrics.json", found)
    files.write_json(root / "results" / "retrieval" / "fingerprint.json", {"index": "abc"})


def write_ablation(root: Path, caps: tuple[int, ...] = (64, 128, 256), seeds: int = 2) -> None:
    rng = random.Random(5)
    rows = []
    for cap in caps:
        for seed in range(seeds):
            for name in (*COLUMNS, "average"):
                em = 0.3 + 0.1 * math.log2(cap / 32) * (name != "bamboogle") + 0.04 * rng.random()
                row = {"name": "memory", "overrides": {"agent.max_memory_tokens": cap}}
                row |= {"seed": seed, "policy": "memsearcher", "benchmark": name, "em": em}
                row |= {"low": em - 0.07, "high": em + 0.07, "n": 40, "cut_rate": 4 / cap}
                print_ = {"budgets": {"max_memory_tokens": cap}, "policy": str(cap), "sample": None}
                rows.append(row | {"fingerprint": print_})
    files.write_jsonl(root / "ablations" / "memory.jsonl", rows)


def write_stages(root: Path) -> None:
    row = {"status": "FINISHED", "seconds": 3.2, "peak_mib": 210}
    rows = [row | {"stage": name} for name in ("corpus", "train@memsearcher")]
    rows = [each | {"ended": f"2026-11-29T19:00:0{i}Z"} for i, each in enumerate(rows)]
    files.write_jsonl(root / "work" / "stages.jsonl", rows)
    link = {"experiment": "1", "run": "p", "stages": {"train@memsearcher": "abcdef0123456789"}}
    files.write_json(root / "work" / "tracking" / "links" / "1.json", link | {"whole": True})


def write_report(root: Path, settings: Params, corpus: list[Passage]) -> dict:
    run = {"commit": "abc", "machine": "2 cores", "packages": {"torch": "2.13.0"}}
    run |= {"hashes": {"params.yaml": "f00"}, "mlflow": "http://127.0.0.1:5000"}
    found = collect(settings, root)
    return page.write(found, root / "report", lambda ids: (p for p in corpus if p.id in ids), run)


if __name__ == "__main__":
    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    chosen = params(f"report.trajectories_per_benchmark={count}", *REACT, *SEED)
    encyclopedia = passages(2000)
    write_results(folder, chosen, count, encyclopedia)
    write_curves(folder, chosen)
    write_retrieval(folder, chosen)
    write_ablation(folder)
    write_stages(folder)
    write_report(folder, chosen, encyclopedia)
