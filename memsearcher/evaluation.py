"""Scoring evaluated trajectories: one prediction per question, and what they add up to.

Plain functions over rows. Asking the questions is `stages/evaluate.py`; intervals are `statistics`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from memsearcher.agent import scoring
from memsearcher.retrieval.measures import gold_titles, title_key
from memsearcher.statistics import Interval, em_interval, score_interval
from memsearcher.types import Passage, Question, StopReason, Trajectory

Row = dict[str, object]
WRONG_FORMAT = {
    StopReason.NO_ACTION,
    StopReason.BAD_TOOL_CALL,
    StopReason.NO_MEMORY,
    StopReason.OVERLONG,
}
YES_NO = {" yes ", " no "}  # as `_flat` pads them: no evidence by themselves


def select(questions: Sequence[Question], size: int | None, seed: int) -> list[Question]:
    """`size` questions by the hash of (seed, question id), in file order: the same ones for every
    policy, and a smaller sample is part of a larger one."""
    if size is None or size >= len(questions):
        return list(questions)
    keys = {q.id: hashlib.sha256(f"{seed} {q.id}".encode()).hexdigest() for q in questions}
    chosen = set(sorted(keys, key=keys.__getitem__)[:size])
    return [q for q in questions if q.id in chosen]


def evidence(
    trajectory: Trajectory, passage: Callable[[str], Passage], *, keeps_history: bool
) -> dict[str, bool | int | None]:
    """Was the answer found, and did it stay? None where the question gives nothing to look for.

    gold_retrieved: every supporting title was returned by some search; where titles are not known,
    some returned passage holds a gold answer. gold_kept: the memory that the last turn read holds a
    gold answer (for yes/no questions every supporting fact); a policy that keeps its whole history
    keeps what it retrieved. facts_written, facts_lost: gold answers and supporting facts that were
    in a memory at the start of a rewrite, and those of them that the rewrite lost.
    """
    question = trajectory.question
    plan = question.metadata.get("plan")
    hops = [hop for hop in plan if isinstance(hop, dict)] if isinstance(plan, list) else []
    titles = {title_key(title) for title in gold_titles(question)}
    facts = [_flat(str(hop.get("value") or hop["fact"])) for hop in hops if hop.get("fact")]
    golds = [g for gold in question.golds if (g := _flat(gold)) and g not in YES_NO]
    pieces = {*golds, *facts}

    found = [passage(hit.passage_id) for turn in trajectory.turns for hit in turn.hits]
    retrieved: bool | None = None
    if titles:
        retrieved = titles <= {title_key(p.title) for p in found}
    elif golds:
        retrieved = any(_holds(_flat(f"{p.title} {p.text}"), golds) for p in found)

    kept: bool | None = None
    last = _flat(trajectory.turns[-1].memory_before) if trajectory.turns else ""
    if keeps_history:
        kept = retrieved
    elif golds:
        kept = _holds(last, golds)
    elif facts:
        kept = all(_holds(last, [fact]) for fact in facts)

    written = lost = 0
    for turn in trajectory.turns:
        if turn.memory_after is not None:
            before, after = _flat(turn.memory_before), _flat(turn.memory_after)
            there = [piece for piece in pieces if _holds(before, [piece])]
            written += len(there)
            lost += sum(not _holds(after, [piece]) for piece in there)
    return {
        "gold_retrieved": retrieved,
        "gold_kept": kept,
        "facts_written": written,
        "facts_lost": lost,
    }


def predict(
    trajectory: Trajectory, passage: Callable[[str], Passage], *, keeps_history: bool
) -> Row:
    """One row of predictions.jsonl. Holds no time, so that equal runs give equal files."""
    question, answer = trajectory.question, trajectory.answer or ""
    em = scoring.em(answer, question.golds)
    found = evidence(trajectory, passage, keeps_history=keeps_history)
    return {
        "question_id": question.id,
        "dataset": question.dataset,
        "answer": trajectory.answer,
        "em": em,
        "f1": scoring.f1(answer, question.golds),
        "cover_em": scoring.cover_em(answer, question.golds),
        "turns": len(trajectory.turns),
        "stop": str(trajectory.stop),
        "searches": sum(turn.query is not None for turn in trajectory.turns),
        "bad_queries": sum(turn.bad_query for turn in trajectory.turns),
        "rewrites": sum(turn.memory_after is not None for turn in trajectory.turns),
        "memory_cuts": sum(turn.memory_cut for turn in trajectory.turns),
        "context_tokens": trajectory.context_tokens,
        "sampled_tokens": sum(sum(turn.mask) for turn in trajectory.turns),
        "mistake": _mistake(em, found["gold_retrieved"], found["gold_kept"]),
        **found,
    }


def readable(trajectory: Trajectory) -> Row:
    """One row of trajectories.jsonl, for people. Passages by id: the corpus has the text."""
    question = trajectory.question
    turns = [
        {
            "memory_before": turn.memory_before,
            "action": turn.action,
            "query": turn.query,
            "bad_query": turn.bad_query,
            "hits": [[hit.passage_id, round(hit.score, 4)] for hit in turn.hits],
            "memory_after": turn.memory_after,
            "memory_cut": turn.memory_cut,
            "tokens": {
                "prompt": len(turn.prompt_ids),
                "action": turn.action_tokens,
                "observation": turn.observation_tokens,
                "memory": turn.memory_tokens,
            },
            "seconds": {name: round(value, 3) for name, value in turn.seconds.items()},
        }
        for turn in trajectory.turns
    ]
    return {
        "question_id": question.id,
        "dataset": question.dataset,
        "question": question.text,
        "golds": list(question.golds),
        "answer": trajectory.answer,
        "stop": str(trajectory.stop),
        "seconds": round(sum(sum(turn.seconds.values()) for turn in trajectory.turns), 3),
        "turns": turns,
    }


def summarise(predictions: Sequence[Row], seconds: Sequence[float], seed: int) -> Row:
    """metrics.json without its fingerprint. Shares in [0, 1]; intervals are [low, high] at 95%."""
    by_dataset: dict[str, list[Row]] = {}
    for row in predictions:
        by_dataset.setdefault(str(row["dataset"]), []).append(row)
    groups = list(by_dataset.values())
    return {
        "count": len(predictions),
        "datasets": {name: _scores([rows], seed) for name, rows in by_dataset.items()},
        "average": _scores(groups, seed) | {"datasets": len(groups)},
        "behaviour": behaviour(predictions) | {"seconds_per_question": _mean(seconds)},
    }


def _scores(groups: Sequence[Sequence[Row]], seed: int) -> Row:
    """One group is a benchmark (Wilson for EM), several are averaged (stratified bootstrap)."""
    out: Row = {"n": sum(map(len, groups))}
    for name in ("em", "f1", "cover_em"):
        strata = [[_number(row[name]) for row in rows] for rows in groups]
        alone = len(strata) == 1 and name == "em"
        interval = em_interval(strata[0]) if alone else score_interval(strata, seed=seed)
        out |= {name: interval.mean, f"{name}_interval": _pair(interval)}
    return out


def behaviour(predictions: Sequence[Row]) -> Row:
    """How the policy acts, over all questions. Tokens are whole contexts, prompts included."""
    by_turn: list[list[float]] = []
    totals: dict[int, list[float]] = {}  # by number of turns: what grows with n or with n²
    for row in predictions:
        tokens = row["context_tokens"]
        assert isinstance(tokens, list)
        totals.setdefault(len(tokens), []).append(float(sum(tokens)))
        for turn, count in enumerate(tokens):
            if turn == len(by_turn):
                by_turn.append([])
            by_turn[turn].append(float(count))
    stops = Counter(str(row["stop"]) for row in predictions)
    rewrites = sum(_number(row["rewrites"]) for row in predictions)
    written = sum(_number(row["facts_written"]) for row in predictions)
    mistakes = Counter(str(row["mistake"]) for row in predictions if row["mistake"])
    return {
        "turns": _mean([_number(row["turns"]) for row in predictions]),
        "searches": _mean([_number(row["searches"]) for row in predictions]),
        "search_rate": _mean([float(_number(row["searches"]) > 0) for row in predictions]),
        "format_rate": _mean([float(row["stop"] not in WRONG_FORMAT) for row in predictions]),
        "bad_queries": int(sum(_number(row["bad_queries"]) for row in predictions)),
        "memory_cut_rate": _share(sum(_number(r["memory_cuts"]) for r in predictions), rewrites),
        "memory_loss_rate": _share(sum(_number(r["facts_lost"]) for r in predictions), written),
        "sampled_tokens": _mean([_number(row["sampled_tokens"]) for row in predictions]),
        "stops": {str(stop): stops[str(stop)] for stop in StopReason if stops[str(stop)]},
        "mistakes": dict(sorted(mistakes.items())),
        "total_tokens_by_turns": [
            {"turns": n, "mean": _mean(counts), "n": len(counts)}
            for n, counts in sorted(totals.items())
        ],
        "context_tokens_by_turn": [
            {"turn": i, "mean": _mean(counts), "max": max(counts), "n": len(counts)}
            for i, counts in enumerate(by_turn, 1)
        ],
    }


def _mistake(em: float, retrieved: object, kept: object) -> str | None:
    """Where a wrong answer went wrong first."""
    if em:
        return None
    if retrieved is None or kept is None:
        return "unknown"
    if not retrieved and not kept:
        return "not_retrieved"
    return "not_answered" if kept else "not_kept"


def _flat(text: str) -> str:
    return f" {scoring.normalise(text)} " if scoring.normalise(text) else ""


def _holds(text: str, pieces: Sequence[str]) -> bool:
    """Both sides are normalised and padded with spaces, so that only whole words match."""
    return any(piece in text for piece in pieces)


def _number(value: object) -> float:
    assert isinstance(value, int | float), value
    return float(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _pair(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def comparable(fingerprint: Mapping[str, object]) -> Row:
    """What must agree before two policies' numbers stand beside each other: all but the policy."""
    return {k: v for k, v in fingerprint.items() if k not in ("policy", "agent", "prompt")}
