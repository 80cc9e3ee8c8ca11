"""Passages by position and by id, read from the memory-mapped passages.jsonl when asked for.

Holds 24 bytes a passage (offset, id hash, position), not the text: 21 million passages take 0.5 GB
of memory instead of 14.
"""

import hashlib
import json
import mmap
from array import array
from pathlib import Path

import numpy as np

from memsearcher.files import BadInput, read_json
from memsearcher.types import Passage


class Passages:
    """data/corpus, opened. Raises BadInput where the file is not the one its manifest describes."""

    def __init__(self, folder: Path) -> None:
        manifest = read_json(folder / "manifest.json")
        self.sha256: str = manifest["sha256"]
        self._path = folder / "passages.jsonl"
        offsets, hashes = array("q"), array("Q")
        digest, offset = hashlib.sha256(), 0
        if not self._path.is_file():
            raise BadInput(f"{self._path}: no such file")
        with open(self._path, "rb") as f:
            for line in f:
                digest.update(line)
                offsets.append(offset)
                hashes.append(_hash(json.loads(line)["id"]))
                offset += len(line)
        if len(offsets) != manifest["count"]:
            raise BadInput(
                f"{self._path}: {len(offsets)} passages, its manifest says {manifest['count']}"
            )
        if digest.hexdigest() != self.sha256:
            raise BadInput(
                f"{self._path}: sha256 is {digest.hexdigest()}, its manifest says {self.sha256}"
            )
        self._file = open(self._path, "rb")  # noqa: SIM115 (mapped for as long as this object lives)
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if offset else None
        self._offsets = np.append(np.frombuffer(offsets, np.int64), offset)  # (count + 1,)
        by_position = np.frombuffer(hashes, np.uint64)
        self._positions = np.argsort(by_position, kind="stable")
        self._hashes = by_position[self._positions]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def at(self, position: int) -> Passage:
        """The passage on line `position`, counted from 0, which is its row in the index."""
        if self._map is None or not 0 <= position < len(self):
            raise IndexError(f"{self._path}: no passage {position}, there are {len(self)}")
        line = self._map[int(self._offsets[position]) : int(self._offsets[position + 1])]
        row = json.loads(line)
        return Passage(row["id"], row["title"], row["text"])

    def get(self, passage_id: str) -> Passage:
        """Raises KeyError where no passage has this id."""
        wanted = np.uint64(_hash(passage_id))
        first = int(np.searchsorted(self._hashes, wanted))
        while first < len(self._hashes) and self._hashes[first] == wanted:
            passage = self.at(int(self._positions[first]))
            if passage.id == passage_id:
                return passage
            first += 1
        raise KeyError(f"{self._path}: no passage has the id {passage_id!r}")


def _hash(passage_id: str) -> int:
    digest = hashlib.blake2b(passage_id.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
