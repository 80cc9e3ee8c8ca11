"""Was the answer found, did it stay in memory, and where did a wrong answer first go wrong?"""

from collections.abc import Callable, Iterable, Sequence

from memsearcher.agent import scoring
from memsearcher.retrieval.measures import gold_titles, title_key
from memsearcher.types import Passage, Trajectory

YES_NO = {" yes ", " no "}  # as `_flat` pads them: no evidence by themselves


def evidence(
    trajectory: Trajectory, passage: Callable[[str], Passage], *, keeps_history: bool
) -> dict[str, bool | int | None]:
    """None where the question gives nothing to look for.

    gold_retrieved: every supporting title was found and read (`Turn.hits`); where titles are not
    known, some passage that was read holds a gold answer. gold_kept: the memory that the last turn
    read holds a gold answer (for yes/no questions every supporting fact); a policy that keeps its
    whole history keeps what it retrieved. facts_written, facts_lost: gold answers, supporting facts
    and titles that were in a memory at the start of a rewrite, and those that the rewrite lost.
    """
    question = trajectory.question
    plan = question.metadata.get("plan")
    hops = [hop for hop in plan if isinstance(hop, dict)] if isinstance(plan, list) else []
    named = gold_titles(question)
    titles = {title_key(title) for title in named}
    facts = [_flat(str(hop.get("value") or hop["fact"])) for hop in hops if hop.get("fact")]
    golds = [g for gold in question.golds if (g := _flat(gold)) and g not in YES_NO]
    pieces = {*golds, *facts, *(flat for title in named if (flat := _flat(title)))}

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

    written, lost = _survival(pieces, trajectory)
    return {
        "gold_retrieved": retrieved,
        "gold_kept": kept,
        "facts_written": written,
        "facts_lost": lost,
    }


def mistake(em: float, retrieved: object, kept: object) -> str | None:
    """Where a wrong answer went wrong first; None for a right one."""
    if em:
        return None
    if retrieved is None or kept is None:
        return "unknown"
    if not retrieved and not kept:
        return "not_retrieved"
    return "not_answered" if kept else "not_kept"


def _survival(pieces: Iterable[str], trajectory: Trajectory) -> tuple[int, int]:
    written = lost = 0
    for turn in trajectory.turns:
        if turn.memory_after is not None:
            before, after = _flat(turn.memory_before), _flat(turn.memory_after)
            there = [piece for piece in pieces if piece in before]
            written += len(there)
            lost += sum(piece not in after for piece in there)
    return written, lost


def _flat(text: str) -> str:
    """Normalised and padded with spaces, so that only whole words match."""
    return f" {scoring.normalise(text)} " if scoring.normalise(text) else ""


def _holds(text: str, pieces: Sequence[str]) -> bool:
    return any(piece in text for piece in pieces)
