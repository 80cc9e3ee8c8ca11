"""The passages: writes them normalised, one {"id", "title", "text"} a line, and reads them back.

Nothing is held in memory but eight bytes a passage.
"""

import array
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memsearcher import files
from memsearcher.corpus_files import Ignore, read_raw
from memsearcher.files import BadInput
from memsearcher.types import Passage

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


def write(
    raw: Path,
    out: Path,
    kind: str,
    source: str,
    on_read: Ignore,
    unpacked_sha256: str | None = None,
) -> dict:
    """Normalises `raw` (see corpus_files) into the folder `out`; returns the manifest.

    Raises BadInput before the manifest stands where `raw`, unpacked, has another hash than
    `unpacked_sha256`.
    """
    hasher, unpacked, hashes = hashlib.sha256(), hashlib.sha256(), array.array("Q")
    on_data: Ignore = unpacked.update if unpacked_sha256 else lambda block: None  # type: ignore[assignment]
    empty = 0
    with files.atomic_write(out / "passages.jsonl", "wb") as f:
        for where, p in read_raw(raw, on_read, on_data):
            row = {"id": p.id, "title": p.title, "text": p.text}
            try:
                line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            except UnicodeEncodeError as e:
                raise BadInput(f"{where}: half a character (a lone surrogate): {e}") from e
            f.write(line)
            hasher.update(line)
            hashes.append(_hash(p.id))
            empty += not p.text.strip()
    if not hashes:
        raise BadInput(f"{raw}: no passage in it")
    if unpacked_sha256 not in (None, unpacked.hexdigest()):
        raise BadInput(f"{raw}: SHA-256 is {unpacked.hexdigest()}, published is {unpacked_sha256}")
    _refuse_duplicates(raw, hashes)
    manifest = {"count": len(hashes), "sha256": hasher.hexdigest(), "kind": kind, "source": source}
    manifest |= {"empty_texts": empty}
    files.write_json(out / "manifest.json", manifest)
    return manifest


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _refuse_duplicates(raw: Path, hashes: "array.array[int]") -> None:
    """Two of 21 million different ids share 64 bits once in 100,000 corpora; so ids are looked at
    again, but only where hashes agree."""
    values = np.sort(np.frombuffer(hashes, dtype=np.uint64))
    twice = {int(v) for v in values[1:][values[1:] == values[:-1]]}
    first: dict[str, str] = {}
    if twice:
        for where, p in read_raw(raw):
            if _hash(p.id) not in twice:
                continue
            if p.id in first:
                raise BadInput(f"{where}: id {p.id!r} is also at {first[p.id]}")
            first[p.id] = where
