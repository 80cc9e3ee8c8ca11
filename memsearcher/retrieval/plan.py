"""What an index takes, said before it is built or loaded, and a refusal that names the ways out."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from memsearcher.files import BadInput
from memsearcher.params import IndexKind

GIB = 2**30
ID = 8  # FAISS keeps the row number beside every vector of an inverted list


@dataclass(frozen=True, slots=True)
class Plan:
    """`str(plan)` is one line for the terminal; `check` raises BadInput where it does not fit."""

    what: str
    kind: IndexKind
    ntotal: int
    dim: int
    index_bytes: int
    memory_needed: int
    memory_free: int
    memory_where: str
    disk_needed: int
    disk_free: int

    def __str__(self) -> str:
        each = self.index_bytes / max(1, self.ntotal)
        disk = f"; disk {_gib(self.disk_needed)} of {_gib(self.disk_free)} free"
        return (
            f"{self.ntotal:,} vectors × {each:,.0f} bytes ({self.kind}, {self.dim} dimensions) = "
            f"{_gib(self.index_bytes)}; {self.memory_where} {_gib(self.memory_needed)} of "
            f"{_gib(self.memory_free)} available{disk if self.disk_needed else ''}"
        )

    def check(self) -> None:
        if self.disk_needed > self.disk_free:
            raise BadInput(f"{self.what} does not fit on the disk: {self}{self._ways_out()}")
        if self.memory_needed > self.memory_free:
            raise BadInput(f"{self.what} does not fit in memory: {self}{self._ways_out()}")

    def _ways_out(self) -> str:
        ways = [
            f"index.kind={kind} ({_gib(size)})"
            for kind in ("fp16", "ivf_sq8")
            if (size := index_bytes(kind, self.ntotal, self.dim, 0)) < 0.9 * self.index_bytes
        ]
        if self.disk_needed:
            ways.append("more encode.shards (one is in memory at a time)")
        ways += ["a GPU for index.kind=fp16"] if self.memory_where == "memory" else []
        return f". Ways out: {', '.join([*ways, 'a larger machine'])}"


def index_bytes(kind: IndexKind, ntotal: int, dim: int, nlist: int) -> int:
    """What every search reads of an index, hence what has to fit in memory.

    >>> [round(index_bytes(k, 21_015_324, 768, 4096) / 1e9, 1) for k in ("flat", "fp16", "ivf_sq8")]
    [64.6, 32.3, 16.3]
    """
    each = {"flat": 4 * dim, "fp16": 2 * dim, "ivf_sq8": dim + ID}[kind]
    return ntotal * each + (4 * dim * nlist if kind == "ivf_sq8" else 0)


def rescoring_bytes(kind: IndexKind, ntotal: int, dim: int) -> int:
    """The fp16 vectors in an ivf_sq8 file; a search reads a few of them."""
    return 2 * dim * ntotal if kind == "ivf_sq8" else 0


def to_build(
    folder: Path, kind: IndexKind, counts: list[int], dim: int, nlist: int, sample: int
) -> Plan:
    """Shards are built one after the other in memory; `sample`: vectors that training sees."""
    total = sum(index_bytes(kind, count, dim, nlist) for count in counts)
    largest = index_bytes(kind, max(counts), dim, nlist) + rescoring_bytes(kind, max(counts), dim)
    memory = 0 if kind == "fp16" else largest + (4 * dim * sample if kind == "ivf_sq8" else 0)
    size = total + rescoring_bytes(kind, sum(counts), dim)
    free = psutil.virtual_memory().available
    disk = shutil.disk_usage(folder).free
    return Plan(
        "the index", kind, sum(counts), dim, total, memory, free, "memory to build it", size, disk
    )


def to_open(folder: Path, kind: IndexKind, ntotal: int, dim: int, files: list[Path]) -> Plan:
    """A mapped file needs no memory of its own, but one that does not fit is read from the disk
    again for every query."""
    total = sum(path.stat().st_size for path in files) - rescoring_bytes(kind, ntotal, dim)
    free, where = psutil.virtual_memory().available, "memory"
    if kind == "fp16":
        import torch

        gpus = range(torch.cuda.device_count())
        if gpus:
            free, where = sum(torch.cuda.mem_get_info(i)[0] for i in gpus), "GPU memory"
    return Plan(str(folder), kind, ntotal, dim, total, total, free, where, 0, 0)


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
