"""A published FAISS flat index, read as rows from the file or its parts, wherever they lie.

`e5_Flat.index` of the 2018 dump comes as part_aa and part_ab, 64.6 GB of float32. Joined, it would
be on the disk twice; here any range of rows is read across the parts, local or remote (fsspec:
`hf://datasets/PeterJinGo/wiki-18-e5-index/part_aa`), so that only our own shards are written.
"""

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memsearcher.files import BadInput

# "IxFI", dimension, vectors, two unused numbers, trained, metric, floats that follow
HEADER = struct.Struct("<4siqqq?iQ")
INNER_PRODUCT = 0


class FlatFile:
    """Raises BadInput where the parts, in this order, are not one whole inner-product index."""

    def __init__(self, parts: Sequence[str]) -> None:
        import fsspec

        self._parts = []
        for part in parts:
            system, path = fsspec.url_to_fs(part)
            try:
                self._parts.append((system, path, int(system.size(path))))
            except FileNotFoundError as e:
                raise BadInput(f"{part}: no such file") from e
        self.name = ", ".join(parts)
        size = sum(size for _, _, size in self._parts)
        head = self._read(0, min(size, HEADER.size))
        if len(head) < HEADER.size or head[:4] != b"IxFI":
            raise BadInput(f"{parts[0]}: not a FAISS flat inner-product index: {head[:4]!r}")
        _, self.dim, self.ntotal, _, _, _, metric, floats = HEADER.unpack(head)
        wanted = HEADER.size + 4 * self.dim * self.ntotal
        if metric != INNER_PRODUCT or floats != self.dim * self.ntotal:
            raise BadInput(f"{parts[0]}: the header contradicts itself: {HEADER.unpack(head)}")
        if size != wanted:
            raise BadInput(
                f"{self.name}: {size:,} bytes, {self.ntotal:,} × {self.dim} floats need {wanted:,} "
                f"(a part is missing or cut short)"
            )

    def rows(self, first: int, count: int) -> NDArray[np.float32]:
        """(count, dim). Raises BadInput where a row is no unit vector."""
        data = self._read(HEADER.size + 4 * self.dim * first, 4 * self.dim * count)
        rows = np.frombuffer(data, "<f4").reshape(count, self.dim)
        length = np.linalg.norm(rows, axis=1)
        wrong = np.flatnonzero(~(np.abs(length - 1) < 0.01))
        if len(wrong):
            row = int(wrong[0])
            raise BadInput(f"{self.name}: row {first + row} has length {length[row]:.4g}, not 1")
        return rows

    def _read(self, offset: int, count: int) -> bytes:
        found, start = b"", 0
        for system, path, size in self._parts:
            low, high = max(offset, start), min(offset + count, start + size)
            if low < high:
                found += system.cat_file(path, start=low - start, end=high - start)
            start += size
        return found
