"""A trajectory as people read it, turn by turn, also where one context holds all its turns.

An agent that keeps its history makes one `Turn` of the whole trajectory, since it is one sequence
to be trained on. What its policy sampled in one go is a turn here: from the mask, never from text.
"""

from collections.abc import Callable, Iterator

from memsearcher.types import Hit, Trajectory, Turn

Row = dict[str, object]


def contexts(trajectory: Trajectory, *, keeps_history: bool) -> list[int]:
    """Tokens in the context when the policy had written its last token of each turn."""
    if not keeps_history:
        return trajectory.context_tokens
    return [len(turn.prompt_ids) + end for turn in trajectory.turns for _, end in _sampled(turn)]


def searches(trajectory: Trajectory, *, keeps_history: bool) -> int:
    """Queries that were sent; a query that could not be used is none."""
    if not keeps_history:
        return sum(turn.query is not None for turn in trajectory.turns)
    return sum(len(_rounds(turn)) for turn in trajectory.turns)


def readable(
    trajectory: Trajectory, decode: Callable[[list[int]], str], *, keeps_history: bool
) -> Row:
    """One row of trajectories.jsonl. Passages by id: the corpus has the text. `decode`: the text of
    sampled ids without their end token."""
    question = trajectory.question
    split = _split if keeps_history else _whole
    return {
        "question_id": question.id,
        "dataset": question.dataset,
        "question": question.text,
        "golds": list(question.golds),
        "answer": trajectory.answer,
        "stop": str(trajectory.stop),
        "seconds": round(sum(sum(turn.seconds.values()) for turn in trajectory.turns), 3),
        "context_tokens": contexts(trajectory, keeps_history=keeps_history),
        "turns": [row for turn in trajectory.turns for row in split(turn, decode)],
    }


def _whole(turn: Turn, _decode: Callable[[list[int]], str]) -> Iterator[Row]:
    yield {
        "memory_before": turn.memory_before,
        "action": turn.action,
        "query": turn.query,
        "bad_query": turn.bad_query,
        "hits": _hits(turn.hits),
        "memory_after": turn.memory_after,
        "memory_cut": turn.memory_cut,
        "tokens": {
            "prompt": len(turn.prompt_ids),
            "action": turn.action_tokens,
            "observation": turn.observation_tokens,
            "memory": turn.memory_tokens,
        },
        "seconds": _seconds(turn),
    }


def _split(turn: Turn, decode: Callable[[list[int]], str]) -> Iterator[Row]:
    """One row per sampled stretch. Which query was a bad one is not known where one was: then the
    good ones come first. Seconds are those of the whole context and stand with its last row."""
    stretches = list(_sampled(turn))
    rounds = _rounds(turn)
    for number, (start, end) in enumerate(stretches):
        last = number == len(stretches) - 1
        query, hits = rounds[number] if number < len(rounds) else (None, ())
        upto = len(turn.mask) if last else stretches[number + 1][0]
        yield {
            "memory_before": "",
            "action": decode(turn.response_ids[start:end]),
            "query": "" if query is None and not last else query,
            "bad_query": query is None and not last,
            "hits": _hits(hits),
            "memory_after": None,
            "memory_cut": False,
            "tokens": {
                "prompt": len(turn.prompt_ids) + start,
                "action": end - start,
                "observation": upto - end,
                "memory": 0,
            },
            "seconds": _seconds(turn) if last else {},
        }


def _sampled(turn: Turn) -> Iterator[tuple[int, int]]:
    """[start, end) of each stretch of response_ids that the policy sampled."""
    start = None
    for place, sampled in enumerate([*turn.mask, False]):
        if sampled and start is None:
            start = place
        elif not sampled and start is not None:
            yield start, place
            start = None


def _rounds(turn: Turn) -> list[tuple[str, tuple[Hit, ...]]]:
    """Queries of a whole history with their hits: ranks begin at 1 with each search. A search
    that found nothing has no rank; then hits cannot be told apart and stand with the last query."""
    queries = turn.query.split("\n") if turn.query is not None else []
    found: list[list[Hit]] = []
    for hit in turn.hits:
        if hit.rank == 1 or not found:
            found.append([])
        found[-1].append(hit)
    if len(found) == len(queries):
        return [(query, tuple(hits)) for query, hits in zip(queries, found, strict=True)]
    return [*((query, ()) for query in queries[:-1]), *((q, turn.hits) for q in queries[-1:])]


def _hits(hits: tuple[Hit, ...]) -> list[list[object]]:
    return [[hit.passage_id, round(hit.score, 4)] for hit in hits]


def _seconds(turn: Turn) -> dict[str, float]:
    return {name: round(value, 3) for name, value in turn.seconds.items()}
