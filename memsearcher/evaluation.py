"""Scoring evaluated trajectories: one prediction per question, and what they add up to.

Plain functions over rows. Asking the questions is `stages/evaluate.py`; intervals are `statistics`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from memsearcher import cost, transcripts
from memsearcher.agent import scoring
from memsearcher.cost import ModelSize
from memsearcher.evidence import evidence, mistake
from memsearcher.statistics import Interval, em_interval, growth, ratio, score_interval
from memsearcher.types import Passage, Question, StopReason, Trajectory

Row = dict[str, object]
WRONG_FORMAT = {
    StopReason.NO_ACTION,
    StopReason.BAD_TOOL_CALL,
    StopReason.NO_MEMORY,
    StopReason.OVERLONG,
}
SCORES = ("em", "f1", "cover_em", "em_release")
COSTS = ("tokens", "flops", "seconds")


def select(questions: Sequence[Question], size: int | None, seed: int) -> list[Question]:
    """`size` questions by the hash of (seed, question id), in file order: the same ones for every
    policy, and a smaller sample is part of a larger one."""
    if size is None or size >= len(questions):
        return list(questions)
    keys = {q.id: hashlib.sha256(f"{seed} {q.id}".encode()).hexdigest() for q in questions}
    chosen = set(sorted(keys, key=keys.__getitem__)[:size])
    return [q for q in questions if q.id in chosen]


def predict(
    trajectory: Trajectory, passage: Callable[[str], Passage], *, keeps_history: bool
) -> Row:
    """One row of predictions.jsonl. Holds no time, so that equal runs give equal files."""
    question, answer = trajectory.question, trajectory.answer or ""
    em = scoring.em(answer, question.golds)
    found = evidence(trajectory, passage, keeps_history=keeps_history)
    contexts = transcripts.contexts(trajectory, keeps_history=keeps_history)
    return {
        "question_id": question.id,
        "dataset": question.dataset,
        "answer": trajectory.answer,
        "em": em,
        "f1": scoring.f1(answer, question.golds),
        "cover_em": scoring.cover_em(answer, question.golds),
        "em_release": em if keeps_history else scoring.release_em(trajectory),
        "turns": len(contexts),
        "stop": str(trajectory.stop),
        "searches": transcripts.searches(trajectory, keeps_history=keeps_history),
        "bad_queries": sum(turn.bad_query for turn in trajectory.turns),
        "rewrites": None
        if keeps_history
        else sum(turn.memory_after is not None for turn in trajectory.turns),
        "memory_cuts": sum(turn.memory_cut for turn in trajectory.turns),
        "context_tokens": contexts,
        "sampled_tokens": sum(sum(turn.mask) for turn in trajectory.turns),
        "mistake": mistake(em, found["gold_retrieved"], found["gold_kept"]),
        **found,
    }


def summarise(
    predictions: Sequence[Row], seconds: Sequence[float], seed: int, size: ModelSize
) -> dict[str, Any]:
    """metrics.json without its fingerprint. Shares in [0, 1]; intervals are [low, high] at 95%."""
    by_dataset: dict[str, list[Row]] = {}
    for row in predictions:
        by_dataset.setdefault(str(row["dataset"]), []).append(row)
    groups = list(by_dataset.values())
    return {
        "count": len(predictions),
        "datasets": {name: _scores([rows], seed) for name, rows in by_dataset.items()},
        "average": _scores(groups, seed) | {"datasets": len(groups)},
        "behaviour": behaviour(predictions, seconds, size),
        "model": asdict(size),
    }


def _scores(groups: Sequence[Sequence[Row]], seed: int) -> Row:
    """One group is a benchmark (Wilson for EM), several are averaged (stratified bootstrap)."""
    out: Row = {"n": sum(map(len, groups))}
    for name in SCORES:
        strata = [[_number(row[name]) for row in rows] for rows in groups]
        alone = len(strata) == 1 and name != "f1"
        interval = em_interval(strata[0]) if alone else score_interval(strata, seed=seed)
        out |= {name: interval.mean, f"{name}_interval": _pair(interval)}
    return out


def behaviour(predictions: Sequence[Row], seconds: Sequence[float], size: ModelSize) -> Row:
    """How the policy acts and what it costs, over all questions. Tokens are whole contexts, prompts
    included; `intervals` holds [low, high] of each mean and share."""
    stops = Counter(str(row["stop"]) for row in predictions)
    mistakes = Counter(str(row["mistake"]) for row in predictions if row["mistake"])

    def column(name: str) -> list[float]:
        return [_number(row[name]) for row in predictions]

    searched = [float(n > 0) for n in column("searches")]
    formed = [float(row["stop"] not in WRONG_FORMAT) for row in predictions]
    contexts = [_contexts(row) for row in predictions]
    kept = [row["rewrites"] is None for row in predictions]
    costs = [cost.afresh(c, size) for c in contexts]
    spared = [
        cost.prefix_kept(c, size, keeps_history=history)
        for c, history in zip(contexts, kept, strict=True)
    ]
    ones = [1.0] * len(predictions)
    cuts, rewrites = column("memory_cuts"), [_number(row["rewrites"] or 0) for row in predictions]
    measured = {
        "turns": ratio(column("turns"), ones, share=False),
        "searches": ratio(column("searches"), ones, share=False),
        "search_rate": ratio(searched, ones, share=True),
        "format_rate": ratio(formed, ones, share=True),
        "memory_cut_rate": ratio(cuts, rewrites, share=True),
        "memory_loss_rate": ratio(column("facts_lost"), column("facts_written"), share=True),
        "sampled_tokens": ratio(column("sampled_tokens"), ones, share=False),
        "tokens": ratio([float(sum(c)) for c in contexts], ones, share=False),
        "flops": ratio(costs, ones, share=False),
        "flops_prefix_kept": ratio(spared, ones, share=False),
        "seconds_per_question": ratio(seconds, ones, share=False),
    }
    return {
        **{name: interval.mean for name, interval in measured.items()},
        "intervals": {name: _pair(interval) for name, interval in measured.items()},
        "bad_queries": int(sum(column("bad_queries"))),
        "stops": {str(stop): stops[str(stop)] for stop in StopReason if stops[str(stop)]},
        "mistakes": dict(sorted(mistakes.items())),
        "context_tokens_by_turn": _by_turn(contexts),
        "cost_by_turns": _by_length(contexts, costs, seconds),
        "growth": _growth(contexts, costs),
    }


def _by_turn(contexts: Sequence[list[int]]) -> list[Row]:
    """Of each turn over the trajectories that reached it."""
    longest = max(map(len, contexts), default=0)
    turns = [[c[i] for c in contexts if len(c) > i] for i in range(longest)]
    return [
        {"turn": i, "mean": fmean(counts), "max": max(counts), "n": len(counts)}
        for i, counts in enumerate(turns, 1)
    ]


def _by_length(
    contexts: Sequence[list[int]], costs: Sequence[float], seconds: Sequence[float]
) -> list[Row]:
    """By the number of turns, of trajectories with so many: what grows with n or with n²."""
    rows: dict[int, list[tuple[float, float, float]]] = {}
    for context, operations, took in zip(contexts, costs, seconds, strict=True):
        rows.setdefault(len(context), []).append((sum(context), operations, took))
    return [
        {"turns": turns, "n": len(found)}
        | {k: fmean(v) for k, v in zip(COSTS, zip(*found, strict=True), strict=True)}
        for turns, found in sorted(rows.items())
    ]


def _growth(contexts: Sequence[list[int]], costs: Sequence[float]) -> Row:
    """Exponents of turns, with [low, high], over trajectories of one turn and more."""
    turns = [float(len(c)) for c in contexts if c]
    tokens, operations = (
        [sum(c) for c in contexts if c],
        [x for x, c in zip(costs, contexts, strict=True) if c],
    )
    fits = {"tokens": growth(turns, tokens), "flops": growth(turns, operations)}
    return {
        name: None if fit is None else {"exponent": fit.mean, "interval": _pair(fit), "n": fit.n}
        for name, fit in fits.items()
    }


def _contexts(row: Row) -> list[int]:
    tokens = row["context_tokens"]
    assert isinstance(tokens, list)
    return tokens


def _number(value: object) -> float:
    assert isinstance(value, int | float), value
    return float(value)


def _pair(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def comparable(fingerprint: Mapping[str, object]) -> Row:
    """What must agree before two policies' numbers stand beside each other: all but the policy."""
    return {k: v for k, v in fingerprint.items() if k not in ("policy", "agent", "prompt")}
