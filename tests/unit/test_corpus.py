"""Corpus lines: every quirk kept whole, every fault named by file and line (C21)."""

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import zstandard

from memsearcher import corpus, files, hub
from memsearcher.corpus_files import parse_contents
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
    assert parse_contents(contents) == (title, text)


@pytest.mark.parametrize("contents", ["", "one line", "\ntext", "  \ntext"])
def test_contents_without_a_title(contents: str) -> None:
    with pytest.raises(ValueError, match="no title line"):
        parse_contents(contents)


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
        (line("a", "A\nx"), r"c\.jsonl:3: id 'a' is also at .*c\.jsonl:1"),
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


def test_a_table_of_dpr(tmp_path: Path) -> None:
    rows = '1\t"Aaron ( or ; ""Ahärôn"")\nis\u2028a"\tAaron\n2\tplain\t"Tim ""Ripper"" Owens"\n'
    for name, head in (("a.tsv", "id\ttext\ttitle\n"), ("b.tsv", "")):
        build(write(tmp_path / name, head, rows), tmp_path / "out")
        got = [(p.id, p.title, p.text) for p in corpus.read_passages(tmp_path / "out")]
        assert got == [
            ("1", "Aaron", 'Aaron ( or ; "Ahärôn")\nis\u2028a'),
            ("2", 'Tim "Ripper" Owens', "plain"),
        ]
    packed = tmp_path / "c.tsv.gz"
    packed.write_bytes(gzip.compress(rows.encode()))
    assert build(packed, tmp_path / "out")["count"] == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("2\ttext\n", r"c\.tsv:3: 2 columns, expected id, text, title"),
        ('2\t"open\tB\nC\n', r"c\.tsv:3: not a row of a quoted table"),
        ("2\ttext\t \n", r"c\.tsv:3: the title is empty"),
        ("1\ttext\tB\n", r"c\.tsv:3: id '1' is also at .*c\.tsv:2"),
    ],
)
def test_bad_tables(tmp_path: Path, bad: str, message: str) -> None:
    raw = write(tmp_path / "c.tsv", "id\ttext\ttitle\n", "1\tx\tA\n", bad)
    with pytest.raises(BadInput, match=message):
        build(raw, tmp_path / "out")


def test_a_json_collection(tmp_path: Path) -> None:
    """As Anserini reads it: files of lines, of one array, of one object; by name, packed or not."""
    folder = tmp_path / "docs"
    folder.mkdir()
    objects = [{"id": f"d{i}", "contents": f"Title {i}\ntext {i}"} for i in range(6)]
    (folder / "1.json").write_text(json.dumps(objects[:2], indent=2))
    (folder / "2.json").write_text(json.dumps(objects[2], indent=2))
    (folder / "3.json").write_text("".join(json.dumps(o) + "\n" for o in objects[3:5]))
    (folder / "4.jsonl.gz").write_bytes(gzip.compress(json.dumps(objects[5]).encode()))
    (folder / "README.md").write_text("not a passage")
    seen: list[int] = []
    corpus.write(folder, tmp_path / "out", "jsonl", "docs", seen.append)
    assert [p.id for p in corpus.read_passages(tmp_path / "out")] == [f"d{i}" for i in range(6)]
    assert seen == sorted(seen)
    assert seen[-1] == sum(p.stat().st_size for p in folder.iterdir() if p.suffix != ".md")

    (folder / "5.json").write_text(json.dumps([objects[0]]))
    with pytest.raises(BadInput, match=r"5\.json: entry 1: id 'd0' is also at .*1\.json: entry 1"):
        build(folder, tmp_path / "out")
    (folder / "5.json").write_text(json.dumps([{"id": "x", "contents": "A\nb"}, 7]))
    with pytest.raises(BadInput, match=r"5\.json: entry 2: not a JSON object"):
        build(folder, tmp_path / "out")
    (folder / "5.json").write_text(json.dumps(objects, indent=1)[:-20])
    with pytest.raises(BadInput, match=r"5\.json: broken JSON after entry \d"):
        build(folder, tmp_path / "out")
    (folder / "5.json").rename(folder / "5.bz2")
    with pytest.raises(BadInput, match=r"5\.bz2: not a JSON file"):
        build(folder, tmp_path / "out")
    with pytest.raises(BadInput, match="nothing: no such file or folder"):
        build(tmp_path / "nothing", tmp_path / "out")


class Hub(BaseHTTPRequestHandler):
    """One file as the hub serves it; a transfer breaks off at `break_at`, once."""

    body = bytes(range(256)) * 4000
    commit = "c" * 40
    ranges: list[str | None]
    asked: list[str]
    break_at: int | None

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self._headers(200, len(self.body))

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        self._headers(206 if wanted else 200, len(self.body) - start)
        self.wfile.write(self.body[start : self.break_at])
        type(self).break_at = None
        self.close_connection = True

    def _headers(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{hashlib.sha256(self.body).hexdigest()}"')
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[tuple[type[Hub], str]]:
    handler = type("OneHub", (Hub,), {"ranges": [], "asked": [], "break_at": None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield handler, f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_a_download_is_pinned_goes_on_and_is_checked(
    tmp_path: Path, server: tuple[type[Hub], str]
) -> None:
    handler, endpoint = server

    def download() -> tuple[Path, str]:
        return hub.download_dataset("a/b", "w.gz", None, tmp_path, endpoint)

    half, handler.break_at = len(Hub.body) // 2, len(Hub.body) * 3 // 4
    (tmp_path / "w.gz.part").write_bytes(Hub.body[:half])  # left by a killed process
    path, commit = download()
    assert (path.read_bytes(), commit) == (Hub.body, Hub.commit)
    assert handler.ranges == [f"bytes={half}-"] * 2  # the library writes in blocks of 10 MB
    assert download() == (path, commit)
    assert handler.asked == ["/datasets/a/b/resolve/main/w.gz"]  # and the rest by commit

    path.unlink()
    (tmp_path / "w.gz.part").write_bytes(b"\0" * half)
    with pytest.raises(OSError, match="SHA-256 is"):
        download()
    assert not (tmp_path / "w.gz.part").exists()
    (tmp_path / "w.gz.part").write_bytes(Hub.body * 2)
    assert download()[0].read_bytes() == Hub.body


def test_the_published_hash_is_checked_while_the_passages_are_written(tmp_path: Path) -> None:
    raw = tmp_path / "w.jsonl.gz"
    lines = (line("1", "A\nx") + line("2", "B\ny")).encode()
    raw.write_bytes(gzip.compress(lines))
    right = hashlib.sha256(lines).hexdigest()
    corpus.write(raw, tmp_path / "out", "wiki18", "w", lambda n: None, right)
    with pytest.raises(BadInput, match=f"SHA-256 is {right}, published is 0000"):
        corpus.write(raw, tmp_path / "out", "wiki18", "w", lambda n: None, "0000")


@pytest.mark.skipif(not REAL.exists(), reason="../shared/data is absent")
def test_real_passages(tmp_path: Path) -> None:
    assert build(REAL, tmp_path / "out")["count"] == 53_428
    got = list(corpus.read_passages(tmp_path / "out"))
    assert sum("\n" in p.text for p in got) == 35
    assert sum(p.title.endswith('"') for p in got) == 4
    assert "Citibank" in {p.title for p in got}
    assert not any(p.title.startswith('"') and '""' in p.title for p in got)
