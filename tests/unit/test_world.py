"""The demo world: its size, the dump's quirks, two closed halves, questions that search answers."""

import json
import re
from itertools import pairwise

import pytest

from memsearcher import world, world_questions
from memsearcher.corpus_files import parse_contents
from memsearcher.files import BadInput
from memsearcher.questions import DATASETS


def passages(w: world.World) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for line in w.lines:
        title, text = parse_contents(line["contents"])
        out.setdefault(title, []).append(text)
    return out


@pytest.mark.parametrize("size", [100, 300, 2000])
def test_size_and_shape(size: int) -> None:
    w = world.build(1, size)
    assert len(w.lines) == size
    assert [line["id"] for line in w.lines] == [str(i) for i in range(size)]
    texts = [parse_contents(line["contents"])[1] for line in w.lines]
    assert max(len(text.split()) for text in texts) <= world.MAX_WORDS
    assert len({e.title for e in w.entities}) == len(w.entities)


def test_same_seed_same_world_other_seed_another() -> None:
    assert world.build(1, 300).lines == world.build(1, 300).lines
    assert world.build(1, 300).lines != world.build(2, 300).lines


def test_quirks_of_the_dump() -> None:
    w = world.build(1, 2000)
    titles = [line["contents"].split("\n")[0] for line in w.lines]
    assert any(re.fullmatch("[A-Za-z]+", t) for t in titles)  # one plain word: no quotes
    assert any('""' in t for t in titles)  # inner quotes doubled
    assert any(not t.isascii() for t in titles)
    assert all(t[0] == t[-1] == '"' for t in titles if " " in t)
    assert max(len(texts) for texts in passages(w).values()) == 2  # several chunks under one title


def test_relations_stay_in_their_half() -> None:
    w = world.build(1, 2000)
    assert {e.side for e in w.entities} == {"train", "test"}
    assert all(o.side == e.side for e in w.entities for o in e.links.values())


def test_every_fact_of_a_plan_stands_in_a_passage_of_its_title() -> None:
    w = world.build(1, 2000)
    texts = passages(w)
    for rows in world_questions.write(w, 1, 400, 40).values():
        for row in rows:
            for hop in row["metadata"]["plan"]:
                words = set(re.findall(r"\w+", hop["fact"]))
                assert any(words <= set(re.findall(r"\w+", t)) for t in texts[hop["title"]])
                assert hop["query"].split(" of ")[0] in world.VALUE_KIND


def test_questions_of_train_and_test_have_nothing_in_common() -> None:
    files = world_questions.write(world.build(1, 2000), 1, 400, 40)
    assert set(files) == {f"{d}_test.jsonl" for d in DATASETS} | {
        "nq_train.jsonl",
        "hotpotqa_train.jsonl",
    }
    asked: dict[str, set[str]] = {"train": set(), "test": set()}
    subjects: dict[str, set[str]] = {"train": set(), "test": set()}
    for name, rows in files.items():
        split = "train" if "train" in name else "test"
        assert len(rows) == (400 if split == "train" else 40)
        asked[split] |= {str(row["question"]).casefold() for row in rows}
        subjects[split] |= {h["title"] for row in rows for h in row["metadata"]["plan"]}
    assert not asked["train"] & asked["test"]
    assert not subjects["train"] & subjects["test"]
    assert len(asked["test"]) == 7 * 40


def test_hops_of_the_seven() -> None:
    files = world_questions.write(world.build(1, 2000), 1, 40, 40)
    hops = {d: {r["metadata"]["hops"] for r in files[f"{d}_test.jsonl"]} for d in DATASETS}
    assert [hops[d] for d in DATASETS] == [{1}, {1}, {1}, {2}, {2}, {2, 3, 4}, {2}]
    golds = {
        d: {g for r in files[f"{d}_test.jsonl"] for g in r["golden_answers"]} for d in DATASETS
    }
    assert {"yes", "no"} <= golds["hotpotqa"]
    assert {"yes", "no"} <= golds["2wikimultihopqa"]
    assert all(len(r["golden_answers"]) > 1 for r in files["triviaqa_test.jsonl"])


def test_last_value_is_the_answer_of_a_chain() -> None:
    for row in world_questions.write(world.build(3, 500), 3, 20, 20)["musique_test.jsonl"]:
        plan = row["metadata"]["plan"]
        assert plan[-1]["value"] == row["golden_answers"][0]
        for one, following in pairwise(plan):
            assert following["title"] == one["value"]


def test_words_cover_lines_and_questions() -> None:
    w = world.build(1, 2000)
    known = {*world.words(), *world_questions.WORDS.split()}
    questions = world_questions.write(w, 1, 400, 40)
    asked = [str(r["question"]) for rows in questions.values() for r in rows]
    texts = passages(w)
    for text in asked + [t for e in w.entities for t in texts[e.title]]:
        assert set(re.findall(r"\w+", text)) <= known, text
    json.dumps(questions)


def test_a_world_too_small_or_too_large_says_so() -> None:
    with pytest.raises(BadInput, match=r"raise world\.passages"):
        world_questions.write(world.build(1, 100), 1, 400, 40)
    with pytest.raises(BadInput, match=r"world\.passages: 9000"):
        world.build(1, 9000)
