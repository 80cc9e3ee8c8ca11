"""Exact search by matrix products over fp16 rows: on a GPU where there is one, else on the CPU.

Half the memory of a flat FAISS index and the same ids, but for scores that differ by less than
fp16's rounding of the passages. Products are in float32.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memsearcher.files import BadInput

BLOCK = 65_536  # rows that are float32 at once


class ExactShard:
    """(n, dim) fp16 rows. In a GPU's memory, or memory-mapped for the CPU."""

    def __init__(self, path: Path, dim: int, device: str) -> None:
        import torch

        size = path.stat().st_size
        if size % (2 * dim):
            raise BadInput(f"{path}: {size} bytes are no whole number of {dim} fp16 values")
        self.d, self.ntotal = dim, size // (2 * dim)
        rows = (
            np.memmap(path, np.float16, "c", shape=(self.ntotal, dim))  # "c": torch wants writable
            if self.ntotal
            else np.zeros((0, dim), np.float16)
        )
        self._rows = torch.from_numpy(rows).to(device)
        self._device = device

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(n, dim) -> scores (n, k) and rows (n, k), best first; k is at most ntotal."""
        import torch

        queries = torch.from_numpy(vectors).to(self._device)
        scores = torch.empty((len(vectors), 0), device=self._device)
        rows = torch.empty((len(vectors), 0), dtype=torch.int64, device=self._device)
        for start in range(0, self.ntotal, BLOCK):
            product = queries @ self._rows[start : start + BLOCK].to(torch.float32).T
            best, where = product.topk(min(k, product.shape[1]), dim=1)
            scores = torch.cat([scores, best], dim=1)
            rows = torch.cat([rows, where + start], dim=1)
            scores, kept = scores.topk(min(k, scores.shape[1]), dim=1)
            rows = rows.gather(1, kept)
        return scores.cpu().numpy(), rows.cpu().numpy()


def devices() -> list[str]:
    """The GPUs, which take the shards in turn; or the CPU."""
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
