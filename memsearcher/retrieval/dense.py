"""Vectors in contiguous shards of the corpus, searched as one by FAISS or torch; a hit's position
is its corpus line.

Whoever opens the index compares its manifest with the encoder and the passages at hand.
"""

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import Index
from memsearcher.retrieval.contract import Manifest, clean
from memsearcher.retrieval.encoder import Encoder
from memsearcher.retrieval.exact import ExactShard, devices
from memsearcher.retrieval.passages import Passages
from memsearcher.retrieval.plan import Plan, to_open
from memsearcher.types import Hit, Passage

if TYPE_CHECKING:
    import faiss

METRIC = "inner_product"
BLOCK = 65_536  # vectors that are float32 at once while an index is built
TRAIN_PER_LIST = 64  # vectors per IVF list that its training sees; FAISS asks for 39 to 256
MIN_PER_LIST = 39  # FAISS warns below this
RESCORED = (
    4  # candidates per hit that IVF-SQ8 scores again by their fp16 vectors, which stay on disk
)
BLAS_FROM = 4  # queries; FAISS's own 128,000 makes a flat search of 64 eleven times as slow


def build_shard(
    vectors: NDArray[np.float16], index: Index, path: Path, on_added: Callable[[int], object]
) -> None:
    """Writes a FAISS index (kinds flat and ivf_sq8) of (n, dim) unit vectors; `on_added` hears how
    many went in."""
    import faiss

    count, dim = vectors.shape
    built: faiss.Index
    if index.kind == "ivf_sq8":
        lists = lists_of(index, count)
        coarse = faiss.IndexIVFScalarQuantizer(
            faiss.IndexFlatIP(dim),
            dim,
            lists,
            faiss.ScalarQuantizer.QT_8bit,
            faiss.METRIC_INNER_PRODUCT,
        )
        rows = np.random.default_rng(0).permutation(count)[: TRAIN_PER_LIST * lists]
        if count:
            coarse.train(vectors[np.sort(rows)].astype(np.float32))
        coarse.nprobe = min(index.nprobe, lists)
        exact = faiss.IndexScalarQuantizer(
            dim, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        )
        built = faiss.IndexRefine(coarse, exact)
        built.k_factor = RESCORED
    else:
        built = faiss.IndexFlatIP(dim)
    for start in range(0, count, BLOCK):
        block = vectors[start : start + BLOCK].astype(np.float32)
        built.add(block)
        on_added(len(block))
    faiss.write_index(built, str(path))


def lists_of(index: Index, count: int) -> int:
    """Inverted lists of a shard: fewer than asked for where it is too small to train them."""
    return max(1, min(index.nlist, count // MIN_PER_LIST))


def link_shard(vectors: Path, path: Path) -> None:
    """Kind fp16: the embeddings are the index; one copy on the disk where it takes hard links."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(vectors, path)
    except OSError:
        shutil.copyfile(vectors, path)


def write_manifest(folder: Path, manifest: Manifest, max_query_tokens: int, nprobe: int) -> None:
    """The manifest, and beside its fields what else changes the hits, so that DVC sees a change."""
    hashes = {name: files.sha256(folder / name) for name in manifest.shards}
    extra = {"sha256": hashes, "max_query_tokens": max_query_tokens, "nprobe": nprobe}
    files.write_json(folder / "manifest.json", asdict(manifest) | extra)


def read_manifest(folder: Path) -> Manifest:
    row = files.read_json(folder / "manifest.json")
    missing = [f.name for f in fields(Manifest) if f.name not in row]
    if missing:
        raise BadInput(f"{folder / 'manifest.json'}: lacks {', '.join(missing)}")
    return Manifest(**{f.name: row[f.name] for f in fields(Manifest)})


def opening_plan(folder: Path) -> Plan:
    """What opening the index takes. Raises BadInput where a shard is missing or cut short."""
    manifest = read_manifest(folder)
    paths = [folder / name for name in manifest.shards]
    for path in paths:
        if not path.is_file():
            raise BadInput(f"{path}: no such file, the manifest names it")
    return to_open(folder, manifest.kind, manifest.ntotal, manifest.dim, paths)


class DenseIndex:
    """The shards of data/index, memory-mapped (on GPUs for kind fp16, where there are any). Refuses
    what does not fit in memory, a shard that is missing, cut short, of another dimension, or a sum
    that is not the manifest's."""

    def __init__(self, folder: Path) -> None:
        self.manifest = manifest = read_manifest(folder)
        self.plan = opening_plan(folder)
        self.plan.check()
        self._shards, self._starts, total = [], [], 0
        for number, name in enumerate(manifest.shards):
            path = folder / name
            shard = _open_shard(path, manifest, number)
            if shard.d != manifest.dim:
                raise BadInput(f"{path}: dimension {shard.d}, manifest: {manifest.dim}")
            self._shards.append(shard)
            self._starts.append(total)
            total += shard.ntotal
        if total != self.manifest.ntotal:
            raise BadInput(f"{folder}: {total} vectors, its manifest says {self.manifest.ntotal}")

    def search(self, vectors: NDArray[np.float32], k: int) -> list[list[tuple[int, float]]]:
        """(n, dim) -> per row (position in the corpus, inner product), best first, equal scores by
        position. Fewer than k where fewer are found: FAISS pads with −1, which is no passage."""
        found: list[list[tuple[int, float]]] = [[] for _ in vectors]
        for shard, start in zip(self._shards, self._starts, strict=True):
            depth = min(k, shard.ntotal)
            if depth == 0 or len(vectors) == 0:
                continue
            scores, rows = shard.search(vectors, depth)
            for row, (its_scores, its_rows) in enumerate(zip(scores, rows, strict=True)):
                found[row] += [
                    (start + int(r), float(s))
                    for r, s in zip(its_rows, its_scores, strict=True)
                    if r >= 0
                ]
        return [sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:k] for hits in found]


def _open_shard(path: Path, manifest: Manifest, number: int) -> "ExactShard | faiss.Index":
    if manifest.kind == "fp16":
        places = devices()
        return ExactShard(path, manifest.dim, places[number % len(places)])
    import faiss

    faiss.cvar.distance_compute_blas_threshold = BLAS_FROM
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as e:
        raise BadInput(f"{path}: not a whole FAISS index: {_last_line(e)}") from e


def check(manifest: Manifest, encoder: Encoder, passages: Passages) -> None:
    """Raises BadInput naming everything in which index, encoder and passages differ."""
    pairs = (
        ("encoder", manifest.encoder, encoder.source.name),
        ("revision", manifest.revision, encoder.source.revision),
        ("dimension", manifest.dim, encoder.dim),
        ("pooling", manifest.pooling, encoder.settings.pooling),
        ("query_prefix", manifest.query_prefix, encoder.settings.query_prefix),
        ("passage_prefix", manifest.passage_prefix, encoder.settings.passage_prefix),
        ("metric", manifest.metric, METRIC),
        ("passages", manifest.ntotal, len(passages)),
        ("corpus sha256", manifest.corpus_sha256, passages.sha256),
    )
    wrong = [f"{what} is {a!r} in the index and {b!r} here" for what, a, b in pairs if a != b]
    if wrong:
        raise BadInput(f"data/index: {'; '.join(wrong)}")


class DenseRetriever:
    """Encoder, index and passages as one. Several threads may call it; they take turns."""

    def __init__(self, encoder: Encoder, index: DenseIndex, passages: Passages) -> None:
        self._encoder, self._index, self._passages = encoder, index, passages
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        texts = [clean(query) for query in queries]
        asked = [row for row, text in enumerate(texts) if text]
        with self._lock:
            found = self._index.search(self._encoder.queries([texts[row] for row in asked]), k)
        hits: list[list[Hit]] = [[] for _ in queries]
        for row, rows in zip(asked, found, strict=True):
            hits[row] = [
                Hit(self._passages.at(position).id, score, rank)
                for rank, (position, score) in enumerate(rows, 1)
            ]
        return hits

    def passage(self, passage_id: str) -> Passage:
        return self._passages.get(passage_id)


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]
