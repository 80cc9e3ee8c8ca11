"""Atomic writes, JSON lines, hashes."""

from pathlib import Path

import pytest

from memsearcher import files
from memsearcher.files import BadInput


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.txt"
    with files.atomic_write(path) as f:
        f.write("old")
    with pytest.raises(TypeError), files.atomic_write(path) as f:
        f.write(7)
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    with files.atomic_write(tmp_path / "b", "wb") as f:
        f.write(b"\r\n\xff")
    assert (tmp_path / "b").read_bytes() == b"\r\n\xff"


def test_publish_replaces_a_folder(tmp_path: Path) -> None:
    for name in ("made", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    files.publish(tmp_path / "made", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["made"]


def test_json_lines_survive_line_separators(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u0085c\rd\n"}, {"text": "Ω"}]
    assert files.write_jsonl(tmp_path / "x.jsonl", iter(rows)) == 2
    assert list(files.read_jsonl(tmp_path / "x.jsonl")) == rows


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"{", "x.jsonl:3: broken JSON"), (b"[1]", "x.jsonl:3"), (b'"\xff"', "x.jsonl:3: not UTF-8")],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(BadInput, match=said):
        list(files.read_jsonl(tmp_path / "x.jsonl"))


def test_content_hash_of_a_folder_is_its_names_and_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a").write_text("1")
    first = files.content_hash(folder)
    (folder / "a").rename(folder / "b")
    second = files.content_hash(folder)
    (folder / "manifest.json").write_text("{}")
    (folder / "b").write_text("2")
    third = files.content_hash(folder)
    assert len({first, second, third}) == 3
    assert third == files.sha256(folder / "manifest.json")
    with pytest.raises(BadInput, match="no such file or folder"):
        files.content_hash(tmp_path / "nope")


def test_digest_ignores_the_order_of_keys() -> None:
    assert files.digest({"a": 1, "b": [2]}) == files.digest({"b": [2], "a": 1})
    assert files.digest({"a": 1}) != files.digest({"a": 2})


def test_no_room_is_said_before_the_work(tmp_path: Path) -> None:
    files.require_room(tmp_path, 1, "a byte")
    with pytest.raises(BadInput, match=r"the index needs .* MiB are free"):
        files.require_room(tmp_path, 2**60, "the index")
