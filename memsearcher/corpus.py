"""The passages: reads lines of the 2018 dump's format, writes them normalised, reads them back.

A raw line is {"id", "contents"}: a title line, a newline, the text. A normalised line is
{"id", "title", "text"}. Nothing is held in memory but eight bytes a passage. A line that cannot be
read is an error with its number: never a silently shorter corpus.
"""

import array
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.types import Passage

TITLE = re.compile(r'"((?:[^"]|"")*)"\n')
LFS = b"version https://git-lfs"
WIKI18 = ("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz")
# of the unpacked file, as published beside it
WIKI18_SHA256 = "43d7d3f58d01d711d95b00b70584211eea639fa46802905a4b7e11cf0617752d"


def read_passages(folder: Path) -> Iterator[Passage]:
    """Passages of a normalised corpus in order; the position is the index everybody else uses."""
    for row in files.read_jsonl(folder / "passages.jsonl"):
        yield Passage(row["id"], row["title"], row["text"])


def read_manifest(folder: Path) -> dict:
    """{"count", "sha256" of passages.jsonl, "kind", "source", "empty_texts"}"""
    return files.read_json(folder / "manifest.json")


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


def read_raw(
    path: Path, seen: Callable[[int], object] = lambda n: None
) -> Iterator[tuple[int, Passage]]:
    """(line number, passage) of a raw file, plain, .gz or .zst. `seen` hears of bytes read."""
    with open(path, "rb") as f:
        if f.read(len(LFS)) == LFS:
            raise BadInput(f"{path}:1: a Git-LFS pointer, not the file (run: git lfs pull)")
    number = 0
    try:
        for number, row in files.numbered_jsonl(path, _lines(path, seen)):
            yield number, _passage(row, f"{path}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as e:
        raise BadInput(f"{path}: packed data broken after line {number}: {e}") from e


def write(raw: Path, out: Path, kind: str, source: str, seen: Callable[[int], object]) -> dict:
    """Normalises `raw` into the folder `out`; returns the manifest."""
    hasher, hashes = hashlib.sha256(), array.array("Q")
    empty = 0
    with files.atomic_write(out / "passages.jsonl", "wb") as f:
        for number, p in read_raw(raw, seen):
            row = {"id": p.id, "title": p.title, "text": p.text}
            try:
                line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            except UnicodeEncodeError as e:
                raise BadInput(f"{raw}:{number}: half a character (a lone surrogate): {e}") from e
            f.write(line)
            hasher.update(line)
            hashes.append(_hash(p.id))
            empty += not p.text.strip()
    if not hashes:
        raise BadInput(f"{raw}: no passage in it")
    _refuse_duplicates(raw, hashes)
    manifest = {"count": len(hashes), "sha256": hasher.hexdigest(), "kind": kind, "source": source}
    manifest |= {"empty_texts": empty}
    files.write_json(out / "manifest.json", manifest)
    return manifest


def download_wiki18(revision: str | None, folder: Path) -> Path:
    """The dump from the hub (4.8 GB; a broken download goes on where it stopped)."""
    from huggingface_hub import hf_hub_download

    repo, name = WIKI18
    got = hf_hub_download(repo, name, repo_type="dataset", revision=revision, local_dir=folder)
    return Path(got)


def check_wiki18(path: Path) -> None:
    """Compares the unpacked bytes with the published hash before anything is built on them."""
    hasher = hashlib.sha256()
    with gzip.open(path, "rb") as f:
        while block := f.read(1 << 20):
            hasher.update(block)
    if hasher.hexdigest() != WIKI18_SHA256:
        raise BadInput(f"{path}: SHA-256 is {hasher.hexdigest()}, published is {WIKI18_SHA256}")


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


def _lines(path: Path, seen: Callable[[int], object]) -> Iterator[bytes]:
    with open(path, "rb") as raw:
        stream: io.BufferedIOBase | Iterator[bytes] = raw
        if path.suffix == ".gz":
            stream = gzip.GzipFile(fileobj=raw)
        elif path.suffix == ".zst":
            stream = _unpack_zst(raw)
        for line in stream:
            seen(raw.tell())
            yield line


def _unpack_zst(raw: BinaryIO) -> Iterator[bytes]:
    """Lines. Frame by frame, since zstandard's own reader ends a truncated file without a word."""
    frame, rest, whole = zstandard.ZstdDecompressor().decompressobj(), b"", True
    while block := raw.read(1 << 18):
        while block:
            *lines, rest = (rest + frame.decompress(block)).split(b"\n")
            yield from (line + b"\n" for line in lines)
            block, whole = frame.unused_data, frame.eof
            if whole:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if not whole:
        raise EOFError("the file ends inside a frame")
    if rest:
        yield rest


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _refuse_duplicates(raw: Path, hashes: "array.array[int]") -> None:
    """Two of 21 million different ids share 64 bits once in 100,000 corpora; so ids are looked at
    again, but only where hashes agree."""
    values = np.sort(np.frombuffer(hashes, dtype=np.uint64))
    twice = {int(v) for v in values[1:][values[1:] == values[:-1]]}
    first: dict[str, int] = {}
    if twice:
        for number, p in read_raw(raw):
            if _hash(p.id) not in twice:
                continue
            if p.id in first:
                raise BadInput(f"{raw}:{number}: id {p.id!r} is also on line {first[p.id]}")
            first[p.id] = number
