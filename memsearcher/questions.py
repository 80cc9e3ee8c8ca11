"""Questions: one row shape on disk, what may be trained on, what is held out.

{"id", "dataset", "question", "golds", "split", "metadata"}, ids unique over all sets
("nq/test_3"). `split` is what the row is for here: train, dev, test.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from memsearcher import files
from memsearcher.agent.scoring import normalise
from memsearcher.files import BadInput
from memsearcher.types import Question

DATASETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
TRAINED = ("nq", "hotpotqa")


def read_questions(path: Path) -> list[Question]:
    """Rows that `to_row` wrote."""
    return [
        Question(r["id"], r["dataset"], r["question"], tuple(r["golds"]), r["split"], r["metadata"])
        for r in files.read_jsonl(path)
    ]


def to_row(q: Question) -> dict:
    return {
        "id": q.id,
        "dataset": q.dataset,
        "question": q.text,
        "golds": list(q.golds),
        "split": q.split,
        "metadata": q.metadata,
    }


def key(text: str) -> str:
    """By this two questions are the same: words only, case folded.

    >>> key("Who  wrote 'It'?") == key("who wrote it")
    True
    """
    return " ".join(re.findall(r"\w+", text.casefold()))


def hopeless(q: Question) -> bool:
    """Every gold normalises to nothing (")", "---", "the"): no answer can ever match."""
    return not any(normalise(gold) for gold in q.golds)


def without_test(train: Sequence[Question], test: Iterable[Question]) -> list[Question]:
    asked = {key(q.text) for q in test}
    return [q for q in train if key(q.text) not in asked]


def hold_out(
    train: Sequence[Question], size: int, seed: int
) -> tuple[list[Question], list[Question]]:
    """(rest, dev): `size` questions, each data set by its share (largest remainders), by seed."""
    if size >= len(train):
        raise BadInput(f"questions.dev_size: {size} of only {len(train)} training questions")
    by_set: dict[str, list[Question]] = {}
    for q in train:
        by_set.setdefault(q.dataset, []).append(q)
    exact = {name: size * len(rows) / len(train) for name, rows in by_set.items()}
    take = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda n: take[n] - exact[n])[: size - sum(take.values())]:
        take[name] += 1
    rng = random.Random(f"dev {seed}")
    chosen = {q.id for name, rows in by_set.items() for q in rng.sample(rows, take[name])}
    rest = [q for q in train if q.id not in chosen]
    return rest, [replace(q, split="dev") for q in train if q.id in chosen]


def with_question_mark(questions: Sequence[Question]) -> list[Question]:
    """As the release does to its training questions (D13)."""
    return [q if q.text.endswith("?") else replace(q, text=f"{q.text}?") for q in questions]
