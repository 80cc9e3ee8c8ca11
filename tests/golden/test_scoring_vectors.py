"""Scores of vectors/scoring.json: written by hand, each with its source, and checked against the
SQuAD script that transformers carries, which differs on strings that normalise to nothing."""

import json
import random
from pathlib import Path

import pytest

from memsearcher.agent.scoring import cover_em, em, f1, normalise, reward
from memsearcher.types import Question, StopReason, Trajectory, Turn

VECTORS = json.loads((Path(__file__).parent / "vectors" / "scoring.json").read_text("utf-8"))
REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="../shared/data is absent")
NEVER_MATCHED = {  # golds of the real data that normalise to nothing
    ("musique_train", "train_13851", "$"),
    ("nq_test", "test_664", ")"),
    ("nq_test", "test_1420", "---"),
    ("nq_test", "test_1986", "*"),
    ("nq_train", "nqdev_127", "("),
    ("nq_train", "nqdev_1182", "(+"),
}


def test_there_are_sixty_and_each_has_a_source() -> None:
    assert len(VECTORS["answers"]) >= 60
    assert all(case["source"] for case in VECTORS["answers"] + VECTORS["rewards"])
    asked = [(case["answer"], *case["golds"]) for case in VECTORS["answers"]]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("case", VECTORS["answers"], ids=lambda c: f"{c['answer']}|{c['golds']}")
def test_answers(case: dict) -> None:
    answer, golds = case["answer"], case["golds"]
    assert em(answer, golds) == case["em"]
    assert f1(answer, golds) == pytest.approx(case["f1"], abs=1e-12)
    assert cover_em(answer, golds) == case["cover_em"]


@pytest.mark.parametrize("case", VECTORS["rewards"], ids=lambda c: c["text"][:24])
def test_rewards_of_the_release(case: dict) -> None:
    turn = Turn([1], [2], [True], [0.0], case["text"], "")
    stop = StopReason.NO_ACTION if case["stopped"] else StopReason.OVERLONG
    question = Question("q", "nq", "?", ("Paris",))
    got, _ = reward(Trajectory(question, 0, (turn,), stop), "release")
    assert got == pytest.approx(case["release"], abs=1e-12)


def test_the_vectors_are_those_of_squads_own_script() -> None:
    squad = pytest.importorskip("transformers.data.metrics.squad_metrics")
    empty = []
    for case in VECTORS["answers"]:
        answer, golds = case["answer"], case["golds"]
        if answer is None or not golds:
            continue
        theirs = (
            max(squad.compute_exact(gold, answer) for gold in golds),
            max(squad.compute_f1(gold, answer) for gold in golds),
        )
        if not normalise(answer) and not any(map(normalise, golds)):
            assert theirs == (1, 1)
            assert (case["em"], case["f1"]) == (0, 0)
            empty.append(case)
        else:
            assert theirs == pytest.approx((case["em"], case["f1"]), abs=1e-12)
    assert len(empty) == 7


def _real() -> dict[str, list[tuple[str, list[str]]]]:
    """(id, golds) by file."""
    out: dict[str, list[tuple[str, list[str]]]] = {}
    for path in sorted(p for kind in ("test", "train") for p in REAL.glob(f"*_{kind}.jsonl")):
        if not path.name.startswith(("qrels", "weak")):
            lines = path.read_bytes().split(b"\n")
            rows = [json.loads(line) for line in lines if line.strip()]
            out[path.stem] = [(row["id"], row["golden_answers"]) for row in rows]
    return out


@needs_real
def test_every_real_gold_matches_its_own_row() -> None:
    wrong = {
        (name, id, gold)
        for name, rows in _real().items()
        for id, golds in rows
        for gold in golds
        if em(gold, golds) != 1.0 or f1(gold, [gold]) != 1.0
    }
    assert wrong == NEVER_MATCHED


@needs_real
def test_shuffled_answers_hardly_match() -> None:
    rows = [golds for name, rows in _real().items() if name.endswith("test") for _, golds in rows]
    others = random.Random(1).sample(rows, len(rows))
    assert sum(em(a[0], b) for a, b in zip(rows, others, strict=True)) / len(rows) < 0.02
