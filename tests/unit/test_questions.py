"""Question files with every quirk of the real ones: handled, counted, nothing dropped unsaid."""

import json
from collections import Counter
from pathlib import Path

import pytest

from memsearcher import files, questions
from memsearcher.files import BadInput
from memsearcher.types import Question

REAL = Path(__file__).parents[3] / "shared/data"
needs_real = pytest.mark.skipif(not REAL.exists(), reason="../shared/data is absent")


def load(tmp_path: Path, *rows: object, dataset: str = "nq") -> tuple[list[Question], Counter[str]]:
    path = tmp_path / f"{dataset}_test.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    counts = questions.Counts()
    return questions.load(path, dataset, "test", counts), counts


def row(**changes: object) -> dict[str, object]:
    return {"id": "test_0", "question": "who", "golden_answers": ["Rome"], **changes}


@pytest.mark.parametrize(
    ("raw", "text", "counted"),
    [
        (" Which one?\n", "Which one?", "blanks around"),
        ("two  blanks", "two blanks", "runs of blanks"),
        ('"Who said ""no""?"', 'Who said "no"?', "CSV quotes"),
        ('"Yes" or "no"', '"Yes" or "no"', None),
        ('"all quoted"', '"all quoted"', None),
        ('an empty "" in it', 'an empty "" in it', None),
    ],
)
def test_questions_are_cleaned(tmp_path: Path, raw: str, text: str, counted: str | None) -> None:
    (q,), counts = load(tmp_path, row(question=raw))
    assert q.text == text
    changed = [reason for reason, n in counts.items() if n and reason.startswith("questions")]
    assert [counted in reason for reason in changed] == [True] * (counted is not None)


@pytest.mark.parametrize(
    ("raw", "golds"),
    [
        (["George VI\n"], ("George VI",)),
        ('["politician", "polit."]', ("politician", "polit.")),
        ("Paris", ("Paris",)),
        (["6", 6, "l"], ("6", "l")),
        ([")", ""], (")",)),
    ],
)
def test_golds_are_cleaned(tmp_path: Path, raw: object, golds: tuple[str, ...]) -> None:
    (q,), _ = load(tmp_path, row(golden_answers=raw))
    assert q.golds == golds


def test_golds_that_can_never_match_are_counted(tmp_path: Path) -> None:
    _, counts = load(tmp_path, row(golden_answers=["---"]))
    assert [n for r, n in counts.items() if "normalises to nothing" in r] == [1]


def test_metadata_of_four_shapes(tmp_path: Path) -> None:
    facts = {"supporting_facts": {"title": ["A", "B", "A"], "sent_id": [0, 9, 1]}, "context": {}}
    steps = {"question_decomposition": [{"support_paragraph": {"title": "C"}}, {}]}
    pop = {"s_aliases": '["x"]', "s_pop": 3, "subj": "S"}
    rows = [row(id=i, metadata=m) for i, m in enumerate([facts, steps, pop, None])]
    qs, _ = load(tmp_path, *rows, dataset="popqa")
    assert qs[0].metadata["supporting_titles"] == ["A", "B"]
    assert qs[0].metadata["plan"] == [
        {"query": "A", "title": "A", "fact": None},
        {"query": "B", "title": "B", "fact": None},
    ]
    assert "context" not in qs[0].metadata
    assert qs[1].metadata["supporting_titles"] == ["C"]
    assert qs[2].metadata == {"s_aliases": ["x"], "s_pop": 3, "subj": "S"}
    assert qs[3].metadata == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(id="b", question=" "), r"nq_test\.jsonl:2: a question without text"),
        (row(id="b", golden_answers=[]), r"nq_test\.jsonl:2: golden_answers must be"),
        (row(id="b", golden_answers=["", " "]), r"nq_test\.jsonl:2: golden_answers hold no"),
        (row(id="b", golden_answers=[None]), r"nq_test\.jsonl:2: an answer must be text"),
        (row(), r"nq_test\.jsonl:2: id 'test_0' is also on line 1"),
        ({"id": "b", "question": "q"}, r"nq_test\.jsonl:2: no key 'golden_answers'"),
        ([], r"nq_test\.jsonl:2: not a JSON object"),
    ],
)
def test_bad_rows(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(tmp_path, row(), bad)


def test_missing_file_names_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "nq_test.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match=r"popqa_dev\.jsonl: no such file \(there are: nq_test"):
        questions.load(tmp_path / "popqa_dev.jsonl", "popqa", "dev", questions.Counts())


def asked(dataset: str, count: int) -> list[Question]:
    return [Question(f"{dataset}/{i}", dataset, f"{dataset} {i}?", ("a",)) for i in range(count)]


def test_dev_is_held_out_by_share_and_seed() -> None:
    train = asked("nq", 300) + asked("hotpotqa", 100)
    rest, dev = questions.hold_out(train, 42, 1)
    assert Counter(q.dataset for q in dev) == {"nq": 32, "hotpotqa": 10}
    assert {q.split for q in dev} == {"dev"}
    assert not {q.id for q in rest} & {q.id for q in dev}
    assert len(rest) + len(dev) == 400
    assert questions.hold_out(train, 42, 1) == (rest, dev)
    assert questions.hold_out(train, 42, 2)[1] != dev
    with pytest.raises(BadInput, match=r"questions\.dev_size: 400 of only 400"):
        questions.hold_out(train, 400, 1)


def test_test_questions_leave_training() -> None:
    train = [Question("nq/1", "nq", "who is  it", ("a",)), *asked("nq", 2)]
    counts = questions.Counts()
    kept = questions.without_test(train, [Question("x/1", "x", "Who is it?", ("b",))], counts)
    assert [q.id for q in kept] == ["nq/0", "nq/1"]
    assert sum(counts.values()) == 1


def test_rows_round_trip(tmp_path: Path) -> None:
    qs = [Question("nq/1", "nq", "q\u2028", ("a", "б"), "dev", {"plan": []})]
    files.write_jsonl(tmp_path / "q.jsonl", map(questions.to_row, qs))
    assert questions.read_questions(tmp_path / "q.jsonl") == qs


def test_question_marks_are_appended_and_counted() -> None:
    counts = questions.Counts()
    got = questions.with_question_mark(
        [Question("a", "nq", "who", ("a",)), *asked("nq", 1)], counts
    )
    assert [q.text for q in got] == ["who?", "nq 0?"]
    assert sum(counts.values()) == 1


@needs_real
def test_real_files_keep_every_row() -> None:
    rows = {"nq": 745, "triviaqa": 739, "popqa": 757, "hotpotqa": 523, "2wikimultihopqa": 737}
    rows |= {"musique": 501, "bamboogle": 100}
    counts = {d: questions.Counts() for d in rows}
    got = {d: questions.load(REAL / f"{d}_test.jsonl", d, "test", counts[d]) for d in rows}
    assert {d: len(qs) for d, qs in got.items()} == rows
    assert tuple(rows) == questions.DATASETS
    ids = [q.id for qs in got.values() for q in qs]
    assert len(set(ids)) == len(ids)
    assert counts["triviaqa"]["questions in CSV quotes (unquoted)"] == 45
    assert counts["bamboogle"]["answers with blanks around them (stripped)"] == 1
    assert "questions with blanks around them (stripped)" in questions.card("x", counts, [])


@needs_real
@pytest.mark.parametrize("dataset", ["hotpotqa", "2wikimultihopqa", "musique"])
def test_real_nested_layout(dataset: str) -> None:
    qs = questions.load(REAL / f"shape_{dataset}_dev.jsonl", dataset, "test", questions.Counts())
    assert len(qs) == 20
    assert all(q.metadata["plan"] for q in qs)
