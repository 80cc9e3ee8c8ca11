"""The registry and the stage: every split found, counted, hashed; what is changed is told."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import synthetic
import yaml

from memsearcher import files, question_files
from memsearcher.files import BadInput
from memsearcher.params import Params, QuestionFile
from memsearcher.question_rows import load
from memsearcher.questions import DATASETS, read_questions
from memsearcher.tracking import NullRun
from stages.frame import Job
from stages.questions import STAGE, run

OUT = Path("data/questions")
ROWS = 6
COPY = synthetic.params(
    "questions=flashrag", "questions.kind=local", "questions.path=x", "questions.dev_size=2"
)


def flashrag(folder: Path, rows: int = ROWS) -> Params:
    """A copy of the hub's folder, `rows` a file; one training question is also a test question."""
    small = {name: replace(entry, rows=rows) for name, entry in COPY.questions.sets.items()}
    for name, entry in small.items():
        files.write_jsonl(
            folder / entry.file,
            (
                {
                    "id": f"{entry.split}_{i}",
                    "question": f"who is {'x' if i == 0 else f'{name} {i}'}",
                    "golden_answers": [f"a{i}"],
                }
                for i in range(rows)
            ),
        )
    return replace(COPY, questions=replace(COPY.questions, path=str(folder), sets=small))


def play(made: Params, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The card of the stage's run in `folder`."""
    monkeypatch.chdir(folder)
    run(Job(STAGE, made, None, NullRun()))
    return (folder / OUT / "card.md").read_text()


def test_the_registry_is_what_the_field_reports_on() -> None:
    p = synthetic.params("experiment=paper-3b").questions
    assert (p.kind, p.source, p.revision) == ("flashrag", "RUC-NLPIR/FlashRAG_datasets", None)
    assert {name: (e.split, e.rows) for name, e in p.sets.items()} == {
        "test_nq": ("test", 3610),
        "test_triviaqa": ("test", 11313),
        "test_popqa": ("test", 14267),
        "test_hotpotqa": ("dev", 7405),
        "test_2wikimultihopqa": ("dev", 12576),
        "test_musique": ("dev", 2417),
        "test_bamboogle": ("test", 125),
        "train_nq": ("train", 79168),
        "train_hotpotqa": ("train", 90447),
    }
    assert sum(e.rows or 0 for n, e in p.sets.items() if n.startswith("test")) == 51713
    exact = synthetic.params("experiment=release-3b")
    assert exact.questions.release_exact
    assert exact.train.steps == (79168 + 90447) // exact.train.questions_per_step
    assert not p.release_exact


def test_every_split_of_flashrags_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = flashrag(tmp_path / "copy")
    card = play(made, monkeypatch, tmp_path)
    for dataset in DATASETS:
        rows = read_questions(tmp_path / OUT / f"test/{dataset}.jsonl")
        assert len(rows) == ROWS
        assert {(q.dataset, q.split) for q in rows} == {(dataset, "test")}
    train, dev = (read_questions(tmp_path / OUT / f"{n}.jsonl") for n in ("train", "dev"))
    assert (len(train), len(dev)) == (2 * (ROWS - 1) - 2, 2)
    assert {q.dataset for q in dev} == {"nq", "hotpotqa"}
    assert not {q.text for q in train + dev} & {"who is x"}
    assert "- 2 training questions removed because they are test questions." in card
    assert "- 2 held out as dev (questions.dev_seed 1), 8 are left of 12." in card
    assert f"| test_hotpotqa | hotpotqa/dev.jsonl | dev | {ROWS} | " in card
    assert "\n## Bad rows" not in card

    registry = yaml.safe_load((tmp_path / OUT / "registry.yaml").read_text())
    assert f" {registry['sets']['test_popqa']['sha256']} |" in card
    sets = {name: QuestionFile(**entry) for name, entry in registry["sets"].items()}
    recorded = replace(made, questions=replace(made.questions, sets=sets))
    assert play(recorded, monkeypatch, tmp_path) == card  # the hashes are checked now
    with open(tmp_path / "copy/popqa/test.jsonl", "a") as f:
        f.write("\n")
    with pytest.raises(BadInput, match=r"popqa/test\.jsonl: SHA-256 .*sets\.test_popqa\.sha256"):
        play(recorded, monkeypatch, tmp_path)


def test_release_exact_trains_on_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = flashrag(tmp_path / "copy")
    rules = replace(made.questions, release_exact=True, append_question_mark=True)
    card = play(replace(made, questions=rules), monkeypatch, tmp_path)
    train = read_questions(tmp_path / OUT / "train.jsonl")
    assert len(train) == 2 * ROWS
    assert all(q.text.endswith("?") and q.split == "train" for q in train)
    dev = read_questions(tmp_path / OUT / "dev.jsonl")
    assert {q.id for q in dev} <= {q.id for q in train}
    assert not any(q.text.endswith("?") for q in dev)
    assert "release_exact: training keeps all 12 rows, 2 test questions and the 2 dev" in card
    assert '- "?" appended to 12 training questions.' in card


def test_bad_rows_are_in_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = flashrag(tmp_path / "copy")
    path = tmp_path / "copy/nq/train.jsonl"
    lines = path.read_text().splitlines()
    bad = json.loads(lines[3]) | {"golden_answers": []}
    path.write_text("\n".join([*lines[:3], json.dumps(bad), *lines[4:]]))
    with pytest.raises(BadInput, match=r"nq/train\.jsonl:4: golden_answers must be"):
        play(made, monkeypatch, tmp_path)
    dropping = replace(made, questions=replace(made.questions, bad_rows="drop"))
    card = play(dropping, monkeypatch, tmp_path)
    assert f"## Bad rows, left out\n\n- {path}:4: golden_answers must be" in card
    assert "| bad rows (left out, listed below) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |" in card


def test_a_split_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:  # C11
    made = flashrag(tmp_path).questions
    entry = replace(made.sets["test_popqa"], split="dev", file="popqa/dev.jsonl")
    asked = replace(made, sets=made.sets | {"test_popqa": entry})
    message = r"test_popqa: no popqa/dev\.jsonl in .*, so no split 'dev' \(there are: test\)"
    with pytest.raises(BadInput, match=message):
        question_files.found(asked, tmp_path)
    with pytest.raises(BadInput, match=r"questions\.path: .*nowhere: no such folder"):
        question_files.found(asked, tmp_path / "nowhere")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """The address of a hub whose data set is `folder`, as far as the client asks for it."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            data = (folder / self.path.partition(f"/resolve/{COMMIT}/")[2]).read_bytes()
            self.answer(data, b"")

        def do_GET(self) -> None:
            if self.path.startswith("/api/"):
                names = [str(p.relative_to(folder)) for p in folder.rglob("*.jsonl")]
                said = {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
                data = json.dumps(said).encode()
            else:
                data = (folder / self.path.partition(f"/resolve/{COMMIT}/")[2]).read_bytes()
            self.answer(data, data)

        def answer(self, data: bytes, body: bytes) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_hubs_files_are_of_one_commit(tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    made = replace(flashrag(tmp_path / "hub").questions, source="a/b")
    with hub(tmp_path / "hub") as address:
        api = HfApi(address, token=False)
        paths, commit = question_files.fetched(made, tmp_path / "here", api)
        assert commit == COMMIT
        assert {name: path.read_text() for name, path in paths.items()} == {
            name: (tmp_path / "hub" / entry.file).read_text() for name, entry in made.sets.items()
        }
        entry = replace(made.sets["test_popqa"], split="dev", file="popqa/dev.jsonl")
        asked = replace(made, sets={"test_popqa": entry})
        with pytest.raises(BadInput, match=r"no popqa/dev\.jsonl in a/b, .* \(there are: test\)"):
            question_files.fetched(asked, tmp_path / "here", api)


def test_a_wrong_count_is_an_error(tmp_path: Path) -> None:
    made = flashrag(tmp_path).questions
    entry = replace(made.sets["test_nq"], rows=3610)
    rules = replace(made, sets=made.sets | {"test_nq": entry})
    with pytest.raises(
        BadInput, match=rf"nq/test\.jsonl: {ROWS} rows, but .*test_nq\.rows is 3610"
    ):
        load("test_nq", tmp_path / "nq/test.jsonl", rules)


def test_a_set_too_few_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = flashrag(tmp_path)
    sets = {n: e for n, e in made.questions.sets.items() if n != "test_musique"}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"questions\.sets: must be .*test_musique.*; got test_nq"):
        run(
            Job(STAGE, replace(made, questions=replace(made.questions, sets=sets)), None, NullRun())
        )


def test_parquet_with_null_beside_nested_metadata(tmp_path: Path) -> None:
    """As the training set of Search-R1 has it."""
    import pyarrow
    from pyarrow import parquet

    facts = {"supporting_facts": {"title": ["A", "B"], "sent_id": [0, 1]}}
    table = {
        "id": ["train_0", "train_1"],
        "question": ["who?", "what?"],
        "golden_answers": [["a"], ["b", "c"]],
        "metadata": [None, facts],
    }
    path = tmp_path / "hotpotqa_train.parquet"
    parquet.write_table(pyarrow.table(table), path)
    entry = replace(COPY.questions.sets["train_hotpotqa"], rows=2)
    rules = replace(COPY.questions, sets={"train_hotpotqa": entry})
    first, second = load("train_hotpotqa", path, rules).questions
    assert (first.golds, first.metadata) == (("a",), {})
    assert (second.golds, second.metadata["supporting_titles"]) == (("b", "c"), ["A", "B"])
    path.write_bytes(b"not at all")
    with pytest.raises(BadInput, match=r"hotpotqa_train\.parquet: not Parquet"):
        load("train_hotpotqa", path, rules)
