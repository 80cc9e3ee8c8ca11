"""Question rows with every quirk of the real ones: handled, counted, nothing dropped unsaid."""

import json
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from memsearcher import files, questions
from memsearcher.agent import scoring
from memsearcher.files import BadInput
from memsearcher.question_rows import Loaded, load
from memsearcher.retrieval import measures
from memsearcher.types import Question

REAL = Path(__file__).parents[3] / "shared/data"
needs_real = pytest.mark.skipif(not REAL.exists(), reason="../shared/data is absent")
RULES = synthetic.params("questions=local", "questions.path=x").questions
TEXT = {"id": "test_0", "question": "who", "golden_answers": ["Rome"]}


def read(tmp_path: Path, *rows: object, name: str = "test_nq", **changes: object) -> Loaded:
    path = tmp_path / "nq_test.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return load(name, path, replace(RULES, **changes))


def file(name: str) -> str:
    """Of a local folder: nq_test.jsonl for test_nq."""
    return RULES.sets[name].file


def row(**changes: object) -> dict[str, object]:
    return {**TEXT, **changes}


def changed(loaded: Loaded) -> dict[str, int]:
    """Counts of what was changed, without what was only looked at."""
    ours = ("stripped", "joined", "unquoted", "parsed", "one kept", "left out)", "now text")
    return {r: n for r, n in loaded.counts.items() if n and any(word in r for word in ours)}


@pytest.mark.parametrize(
    ("raw", "text", "counted"),
    [
        (" Which one?\n", "Which one?", "blanks around"),
        ("two  blanks", "two blanks", "runs of blanks"),
        ("a\u00a0hard\u2028one", "a hard one", "runs of blanks"),
        ('"Who said ""no""?"', 'Who said "no"?', "CSV quotes"),
        ('"Yes" or "no"', '"Yes" or "no"', None),
        ('"all quoted"', '"all quoted"', None),
        ('an empty "" in it', 'an empty "" in it', None),
    ],
)
def test_questions_are_cleaned(tmp_path: Path, raw: str, text: str, counted: str | None) -> None:
    loaded = read(tmp_path, row(question=raw))
    assert loaded.questions[0].text == text
    assert [counted in reason for reason in changed(loaded)] == [True] * (counted is not None)
    as_it_came = read(tmp_path, row(question=raw), strip=False, unquote=False)
    assert as_it_came.questions[0].text == raw
    assert not changed(as_it_came)


@pytest.mark.parametrize(
    ("raw", "golds", "counted"),
    [
        (["George VI\n"], ("George VI",), "blanks around"),
        ('["politician", "polit."]', ("politician", "polit."), "JSON in a string"),
        ("Paris", ("Paris",), "JSON in a string"),
        (["6", 6, "l"], ("6", "l"), "given twice"),
        ([1918, "N"], ("1918", "N"), "were numbers"),
        ([")", ""], (")",), "were empty"),
        (["Yale University,"], ("Yale University,",), None),
    ],
)
def test_golds_are_cleaned(
    tmp_path: Path, raw: object, golds: tuple[str, ...], counted: str | None
) -> None:
    loaded = read(tmp_path, row(golden_answers=raw))
    assert loaded.questions[0].golds == golds
    assert counted is None or any(counted in reason for reason in changed(loaded))
    assert bool(changed(loaded)) == (counted is not None)


def test_letters_are_kept_bit_by_bit(tmp_path: Path) -> None:
    """And the answer normalisation folds none of them (C20)."""
    decomposed = unicodedata.normalize("NFD", "Où est né Æthelburh")
    golds = ["Кёльн", "１９１８", "1918–1945", "zero\u200bwidth", "😀", decomposed]
    (q,) = read(tmp_path, row(question=decomposed, golden_answers=golds)).questions
    assert (q.text, list(q.golds)) == (decomposed, golds)
    assert scoring.em("кёльн", q.golds) == 1.0
    assert [scoring.em(said, q.golds) for said in ("1918", "1918-1945", "")] == [0.0] * 3


def test_what_is_odd_stays_and_is_counted(tmp_path: Path) -> None:
    rows = [
        row(id="0", question="Who?", golden_answers=["---"]),
        row(id="1", question="who", golden_answers=["A", ")", "x"]),
        row(id="2", question="WHO ", golden_answers=["Yes", "no"]),
    ]
    loaded = read(tmp_path, *rows)
    assert [q.golds for q in loaded.questions] == [("---",), ("A", ")", "x"), ("Yes", "no")]
    found = {k: n for k, n in loaded.counts.items() if n and k not in changed(loaded)}
    assert found == {
        "rows": 3,
        "rows without metadata": 3,
        "questions asked before in the same file (kept)": 2,
        "questions asked again with other answers (kept)": 1,
        "questions without a question mark": 2,
        "questions answered by yes or no": 1,
        "questions with an answer that normalises to nothing (kept)": 2,
        "questions whose every gold normalises to nothing (kept, never matched)": 1,
    }


def test_metadata_of_every_shape(tmp_path: Path) -> None:
    facts = {"supporting_facts": {"title": ["A", "B", "A"], "sent_id": [0, 99, 1]}}
    hotpot = facts | {"context": {"title": ["A"], "sentences": [["x"]]}}
    wiki = facts | {"context": {"title": ["A"], "content": [["x"]]}}
    steps = {"question_decomposition": [{"support_paragraph": {"title": "C"}}, {}]}
    pop = {"s_aliases": '["x"]', "o_aliases": "[]", "s_pop": 3, "subj": "S"}
    shapes = [hotpot, wiki, steps, pop, None, {}]
    rows = [row(id=i, metadata=m) for i, m in enumerate(shapes)]
    loaded = read(tmp_path, *rows, row(id="none"), name="test_popqa")
    got = [q.metadata for q in loaded.questions]
    plan = [{"query": t, "title": t, "fact": None} for t in "AB"]
    assert got[0] == got[1] == {"supporting_titles": ["A", "B"], "plan": plan}
    assert got[2]["supporting_titles"] == ["C"]
    assert got[3] == {"s_aliases": ["x"], "o_aliases": [], "s_pop": 3, "subj": "S"}
    assert got[4:] == [{}, {}, {}]
    assert loaded.counts["rows without metadata"] == 3
    assert loaded.counts["questions with supporting titles"] == 3


BAD = [
    (row(id="b", question=" "), "a question without text"),
    (row(id="b", question=None), "a question without text"),
    (row(id="b", golden_answers=[]), "golden_answers must be"),
    (row(id="b", golden_answers=["", " "]), "golden_answers hold no"),
    (row(id="b", golden_answers=[None]), "an answer must be text"),
    (row(id="b", golden_answers=None), "golden_answers must be"),
    (row(), r"id 'test_0' is also in .*nq_test\.jsonl:1"),
    ({"id": "b", "question": "q"}, "no key 'golden_answers'"),
    ([], "not a JSON object"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_bad_rows_are_named_or_listed(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(BadInput, match=rf"nq_test\.jsonl:2: {message}"):
        read(tmp_path, row(), bad, row(id="c"))
    loaded = read(tmp_path, row(), bad, row(id="c"), bad_rows="drop")
    assert [q.id for q in loaded.questions] == ["nq/test_0", "nq/c"]
    assert loaded.rows == 3
    assert loaded.counts["bad rows (left out, listed below)"] == 1
    (why,) = loaded.dropped
    assert "nq_test.jsonl:2: " in why


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "Größe"}'.encode("latin-1"), "not UTF-8"),
        ('{"id": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'{"id": "a", ', "broken JSON"),
        (b"version https://git-lfs.github.com/spec/v1", "broken JSON"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "nq_test.jsonl"
    path.write_bytes(json.dumps(row()).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(BadInput, match=rf"nq_test\.jsonl:3: {message}"):
        load("test_nq", path, RULES)
    loaded = load("test_nq", path, replace(RULES, bad_rows="drop"))
    assert len(loaded.questions) == 1
    assert message in loaded.dropped[0]
    path.write_bytes(line)
    with pytest.raises(BadInput, match=rf"no question in it; .*:1: {message}"):
        load("test_nq", path, replace(RULES, bad_rows="drop"))


def test_ids_are_unique_over_files_of_one_data_set(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    for name in ("test_nq", "test_hotpotqa", "train_nq"):
        (tmp_path / file(name)).write_text(json.dumps(row()) + "\n")
    for name in ("test_nq", "test_hotpotqa"):
        load(name, tmp_path / file(name), RULES, seen)
    with pytest.raises(BadInput, match=r"nq_train\.jsonl:1: id 'test_0' is also in .*nq_test"):
        load("train_nq", tmp_path / "nq_train.jsonl", RULES, seen)


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
    kept = questions.without_test(train, [Question("x/1", "x", "Who is it?", ("b",))])
    assert [q.id for q in kept] == ["nq/0", "nq/1"]


def test_rows_round_trip(tmp_path: Path) -> None:
    qs = [Question("nq/1", "nq", "q\u2028", ("a", "б"), "dev", {"plan": []})]
    files.write_jsonl(tmp_path / "q.jsonl", map(questions.to_row, qs))
    assert list(json.loads((tmp_path / "q.jsonl").read_text())) == [
        *("id", "dataset", "question", "golds", "split", "metadata")
    ]
    assert questions.read_questions(tmp_path / "q.jsonl") == qs


def test_question_marks_are_appended() -> None:
    got = questions.with_question_mark([Question("a", "nq", "who", ("a",)), *asked("nq", 1)])
    assert [q.text for q in got] == ["who?", "nq 0?"]


@needs_real
def test_real_files_keep_every_row() -> None:
    """The counts of their README, and of each quirk that its section 5 names."""
    rows = {"nq": 745, "triviaqa": 739, "popqa": 757, "hotpotqa": 523, "2wikimultihopqa": 737}
    rows |= {"musique": 501, "bamboogle": 100}
    wanted = {f"test_{d}": n for d, n in rows.items()} | {"train_nq": 2000, "train_hotpotqa": 599}
    seen: dict[str, str] = {}
    got = {name: load(name, REAL / file(name), RULES, seen) for name in wanted}
    assert {name: len(each.questions) for name, each in got.items()} == wanted
    assert len(seen) == sum(wanted.values())
    assert tuple(rows) == questions.DATASETS
    assert not any(each.dropped for each in got.values())

    def counted(reason: str) -> dict[str, int]:
        (name,) = {r for each in got.values() for r in each.counts if r.startswith(reason)}
        return {n: each.counts[name] for n, each in got.items() if each.counts[name]}

    assert counted("questions in CSV quotes") == {"test_triviaqa": 45}
    assert counted("answers with blanks") == {"test_bamboogle": 1}
    assert counted("alias lists that were JSON") == {"test_popqa": 2 * 757}
    assert counted("questions with blanks around") == {
        "test_hotpotqa": 28,
        "test_2wikimultihopqa": 13,
        "train_hotpotqa": 40,
    }
    assert counted("questions asked again with other answers") == {"test_popqa": 5}
    assert counted("questions whose every gold") == {"test_nq": 2, "train_nq": 1}
    assert counted("questions answered by yes or no")["test_2wikimultihopqa"] == 100
    assert counted("questions without a question mark")["test_nq"] == 745
    never = [q for q in got["test_nq"].questions if questions.hopeless(q)]
    assert not any(scoring.em("", q.golds) for q in never)


@needs_real
@pytest.mark.parametrize("dataset", ["hotpotqa", "2wikimultihopqa", "musique"])
def test_supporting_facts_of_the_nested_layout_become_qrels(dataset: str) -> None:
    """By title: `sentences`, `content` and `support_paragraph` are read by nobody."""
    shape = REAL / f"shape_{dataset}_dev.jsonl"
    qs = load(f"test_{dataset}", shape, RULES).questions
    assert len(qs) == 20
    assert all(q.metadata["plan"] for q in qs)
    titles = dict.fromkeys(t for q in qs for t in measures.gold_titles(q))
    ids = {measures.title_key(t.upper()): [f"p{i}"] for i, t in enumerate(titles)}
    qrels = {q.id: measures.gold_groups(q, ids) for q in qs}
    assert all(
        len(groups) == len(measures.gold_titles(q))
        for q, groups in zip(qs, qrels.values(), strict=True)
    )
    first = measures.qrels_lines(qrels)[0].split()
    assert first == [qs[0].id, "0", "p0", "1"]
