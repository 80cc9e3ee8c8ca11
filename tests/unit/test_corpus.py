"""Corpus lines: every quirk kept whole, every fault named by file and line (C21)."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from memsearcher import corpus, files
from memsearcher.files import BadInput

REAL = Path(__file__).parents[3] / "shared/data/corpus.jsonl"


def line(name: object, contents: str) -> str:
    return json.dumps({"id": name, "contents": contents}, ensure_ascii=False) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def build(raw: Path, out: Path) -> dict:
    return corpus.write(raw, out, "jsonl", raw.name, lambda n: None)


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ("Citibank\nCitibank is", "Citibank", "Citibank is"),
        ('"Gary Groth"\nGary', "Gary Groth", "Gary"),
        ('"Tim ""Ripper"" Owens"\nTim', 'Tim "Ripper" Owens', "Tim"),
        ('"Say ""Farewell"""\nx', 'Say "Farewell"', "x"),
        ('"""Heroes"" (album)"\nx', '"Heroes" (album)', "x"),
        ('"A"\none\ntwo', "A", "one\ntwo"),
        ('"A\nB"\ntext', "A\nB", "text"),
        ('"A"\n', "A", ""),
        ('"A"\nhe said ""no""', "A", 'he said ""no""'),
        ('"A"\nx\u2028y', "A", "x\u2028y"),
        ('"open\ntext', '"open', "text"),
    ],
)
def test_parse_contents(contents: str, title: str, text: str) -> None:
    assert corpus.parse_contents(contents) == (title, text)


@pytest.mark.parametrize("contents", ["", "one line", "\ntext", "  \ntext"])
def test_contents_without_a_title(contents: str) -> None:
    with pytest.raises(ValueError, match="no title line"):
        corpus.parse_contents(contents)


def test_round_trip(tmp_path: Path) -> None:
    raw = write(tmp_path / "c.jsonl", line("7", '"A ""b"""\nx\u2028y'), "\n", line(3, "C\n"))
    manifest = build(raw, tmp_path / "out")
    assert manifest["count"] == 2
    assert manifest["empty_texts"] == 1
    assert manifest["sha256"] == files.sha256(tmp_path / "out/passages.jsonl")
    assert corpus.read_manifest(tmp_path / "out") == manifest
    rows = [(p.id, p.title, p.text) for p in corpus.read_passages(tmp_path / "out")]
    assert rows == [("7", 'A "b"', "x\u2028y"), ("3", "C", "")]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_packed_files(tmp_path: Path, pack) -> None:
    suffix = ".gz" if pack is gzip.compress else ".zst"
    half = [line(i, f"A\n{'x' * 50}{i * i}").encode() for i in range(500)]
    path = tmp_path / f"c.jsonl{suffix}"
    path.write_bytes(pack(b"".join(half[:250])) + pack(b"".join(half[250:])))  # two frames
    assert build(path, tmp_path / "out")["count"] == 500
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadInput, match=rf"c\.jsonl\{suffix}: packed data broken after line \d+"):
        build(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"id": "1", "contents": \n', r"c\.jsonl:3: broken JSON"),
        ("[1]\n", r"c\.jsonl:3: not a JSON object"),
        ('{"id": "1"}\n', r"c\.jsonl:3: no key 'contents'"),
        ('{"id": null, "contents": "A\\nb"}\n', r"c\.jsonl:3: id must be"),
        ('{"id": "1", "contents": 5}\n', r"c\.jsonl:3: contents must be text, got 5"),
        ('{"id": "1", "contents": "no title"}\n', r"c\.jsonl:3: contents has no title line"),
        (line("a", "A\nx"), r"c\.jsonl:3: id 'a' is also on line 1"),
        ('{"id": "1", "contents": "A\\n\\ud800"}\n', r"c\.jsonl:3: half a character"),
    ],
)
def test_bad_lines(tmp_path: Path, bad: str, message: str) -> None:
    raw = write(tmp_path / "c.jsonl", line("a", "A\nx"), line("b", "A\nx"), bad)
    with pytest.raises(BadInput, match=message):
        build(raw, tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_other_bad_files(tmp_path: Path) -> None:
    lfs = write(tmp_path / "l.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(BadInput, match=r"l\.jsonl:1: a Git-LFS pointer"):
        build(lfs, tmp_path / "out")
    latin = tmp_path / "i.jsonl"
    latin.write_bytes(line("a", "A\né").encode("latin-1"))
    with pytest.raises(BadInput, match=r"i\.jsonl:1: not UTF-8"):
        build(latin, tmp_path / "out")
    with pytest.raises(BadInput, match="no passage in it"):
        build(write(tmp_path / "e.jsonl"), tmp_path / "out")


@pytest.mark.skipif(not REAL.exists(), reason="../shared/data is absent")
def test_real_passages(tmp_path: Path) -> None:
    assert build(REAL, tmp_path / "out")["count"] == 53_428
    got = list(corpus.read_passages(tmp_path / "out"))
    assert sum("\n" in p.text for p in got) == 35
    assert sum(p.title.endswith('"') for p in got) == 4
    assert "Citibank" in {p.title for p in got}
    assert not any(p.title.startswith('"') and '""' in p.title for p in got)
