"""Passages as others publish them: the 2018 dump's JSON lines, DPR's table, Anserini's folders.

One file (`.jsonl`, `.json`, `.tsv`; plain, `.gz` or `.zst`) or a folder of JSON files, read in
blocks: memory does not grow with the file. Whatever cannot be read is an error that names file and
line (entry, where a JSON array or object spreads over lines): never a silently shorter corpus.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import ijson
import zstandard

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.types import Passage

TITLE = re.compile(r'"((?:[^"]|"")*)"\n')
LFS = b"version https://git-lfs"
BLOCK = 1 << 18
LONGEST_LINE = 1 << 26
TABLE = ("id", "text", "title")  # DPR's psgs_w100.tsv, with or without this line at its head
PACKED = (".gz", ".zst")
Ignore = Callable[[object], object]


def read_raw(
    path: Path, on_read: Ignore = lambda n: None, on_data: Ignore = lambda block: None
) -> Iterator[tuple[str, Passage]]:
    """(file:line, passage). `on_read` hears how many bytes of the files have been read so far,
    `on_data` gets every unpacked block."""
    done = 0
    for part in source_files(path):

        def heard(n: int, before: int = done) -> None:
            on_read(before + n)

        yield from _read_file(part, heard, on_data)
        done += part.stat().st_size


def source_files(path: Path) -> list[Path]:
    """The file itself, or what a JsonCollection folder holds, by name. Raises BadInput for a file
    of another kind in it (hidden files and .md apart)."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path}: no such file or folder")
    found = [
        p
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.suffix != ".md" and not p.name.startswith(".")
    ]
    for p in found:
        if _kind(p) not in (".json", ".jsonl"):
            raise BadInput(f"{p}: not a JSON file, and the others of {path} are")
    if not found:
        raise BadInput(f"{path}: no JSON file in it")
    return found


def parse_contents(contents: str) -> tuple[str, str]:
    """(title, text). The title is in quotes unless it is one plain word; inner quotes are doubled.

    A title may hold a newline where it is quoted, and the text always may. The text is left as it
    is (the dump doubles quotes there too): published indexes embed it like that.

    >>> parse_contents('"Tim ""Ripper"" Owens"\\nTimothy is')
    ('Tim "Ripper" Owens', 'Timothy is')
    >>> parse_contents('Citibank\\nCitibank is')
    ('Citibank', 'Citibank is')
    """
    quoted = TITLE.match(contents)
    if quoted is not None:
        return quoted.group(1).replace('""', '"'), contents[quoted.end() :]
    title, newline, text = contents.partition("\n")
    if not newline or not title.strip():
        raise ValueError("contents has no title line")
    return title, text


def _read_file(
    path: Path, on_read: Callable[[int], object], on_data: Ignore
) -> Iterator[tuple[str, Passage]]:
    with open(path, "rb") as f:
        if f.read(len(LFS)) == LFS:
            raise BadInput(f"{path}:1: a Git-LFS pointer, not the file (run: git lfs pull)")
    where = f"{path}:0"
    try:
        for where, passage in _passages(path, _blocks(path, on_read, on_data)):
            yield where, passage
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as e:
        line = where.removeprefix(f"{path}:").strip()
        raise BadInput(f"{path}: packed data broken after line {line}: {e}") from e


def _passages(path: Path, blocks: Iterator[bytes]) -> Iterator[tuple[str, Passage]]:
    if _kind(path) == ".tsv":
        yield from _table(path, _lines(path, blocks))
    elif _kind(path) == ".json" and not _is_lines(path):
        for number, row in _entries(path, blocks):
            where = f"{path}: entry {number}"
            if not isinstance(row, dict):
                raise BadInput(f"{where}: not a JSON object")
            yield where, _passage(row, where)
    else:
        for number, row in files.numbered_jsonl(path, _lines(path, blocks)):
            yield f"{path}:{number}", _passage(row, f"{path}:{number}")


def _passage(row: dict, where: str) -> Passage:
    missing = [key for key in ("id", "contents") if key not in row]
    if missing:
        raise BadInput(f"{where}: no key {missing[0]!r}, only {sorted(row)}")
    name, contents = row["id"], row["contents"]
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise BadInput(f"{where}: id must be text or a number, got {name!r}")
    if not isinstance(contents, str):
        raise BadInput(f"{where}: contents must be text, got {contents!r}")
    try:
        return Passage(str(name), *parse_contents(contents))
    except ValueError as e:
        raise BadInput(f"{where}: {e}") from e


def _table(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, Passage]]:
    """Tab-separated and quoted as CSV. Quotes come out single here, unlike in the dump's text."""
    text = (_decoded(path, n, line) for n, line in enumerate(lines, 1))
    rows = csv.reader(text, delimiter="\t", strict=True)
    columns: tuple[str, ...] = TABLE
    while True:
        where = f"{path}:{rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as e:
            raise BadInput(f"{where}: not a row of a quoted table: {e}") from e
        if row is None:
            return
        if rows.line_num == 1 and sorted(row) == sorted(TABLE):
            columns = tuple(row)
            continue
        if not row:
            continue
        if len(row) != len(columns):
            raise BadInput(f"{where}: {len(row)} columns, expected {', '.join(columns)}")
        cells = dict(zip(columns, row, strict=True))
        for key in ("id", "title"):
            if not cells[key].strip():
                raise BadInput(f"{where}: the {key} is empty")
        yield where, Passage(cells["id"], cells["title"], cells["text"])


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}:{number}: not UTF-8: {e.reason}") from e


def _is_lines(path: Path) -> bool:
    """Whether a .json file holds one object a line and not one array or object over many lines."""
    first = next(_lines(path, _blocks(path, lambda n: None, lambda b: None)), b"")
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _entries(path: Path, blocks: Iterator[bytes]) -> Iterator[tuple[int, object]]:
    """(number from 1, object) of a JSON array, or of objects one after the other. The parser (yajl)
    reads a lone surrogate as a question mark."""
    found, coroutine, number = ijson.sendable_list(), None, 0
    try:
        for block in blocks:
            if coroutine is None:
                array = block.lstrip().startswith(b"[")
                coroutine = ijson.items_coro(
                    found, "item" if array else "", multiple_values=not array, use_float=True
                )
            coroutine.send(block)
            for row in found:
                number += 1
                yield number, row
            found.clear()
        if coroutine is not None:
            coroutine.close()
    except (ijson.JSONError, UnicodeDecodeError) as e:
        reason = str(e).strip("b'").split("\\n")[0].splitlines()[0]
        raise BadInput(f"{path}: broken JSON after entry {number}: {reason}") from e
    for row in found:
        number += 1
        yield number, row


def _lines(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest, number = b"", 0
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in whole)
        number += len(whole)
        if len(rest) > LONGEST_LINE:
            raise BadInput(f"{path}:{number + 1}: a line of more than {LONGEST_LINE:,} bytes")
    if rest:
        yield rest


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def _blocks(path: Path, on_read: Callable[[int], object], on_data: Ignore) -> Iterator[bytes]:
    with open(path, "rb") as raw:
        if path.suffix == ".gz":
            packed = gzip.GzipFile(fileobj=raw)
            unpacked: Iterator[bytes] = iter(lambda: packed.read(BLOCK), b"")
        elif path.suffix == ".zst":
            unpacked = _unpack_zst(iter(lambda: raw.read(BLOCK), b""))
        else:
            unpacked = iter(lambda: raw.read(BLOCK), b"")
        for block in unpacked:
            on_read(raw.tell())
            on_data(block)
            yield block


def _unpack_zst(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Frame by frame, since zstandard's own reader ends a truncated file without a word."""
    frame, whole = zstandard.ZstdDecompressor().decompressobj(), True
    for packed in blocks:
        block = packed
        while block:
            yield frame.decompress(block)
            block, whole = frame.unused_data, frame.eof
            if whole:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if not whole:
        raise EOFError("the file ends inside a frame")
