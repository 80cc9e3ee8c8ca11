"""One shard of the passages to fp16 vectors: python -m stages.encode 0

A shard is a contiguous slice of the corpus, so a row's position is its line. Work goes chunk by
chunk in a fixed order and each finished chunk is synced before it is counted: a killed run goes on
behind its last chunk and ends with the same bytes.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import Encode, Params
from memsearcher.types import Passage
from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from memsearcher.retrieval.encoder import Encoder, PooledEncoder


def _items(params: Params) -> list[str]:
    return [str(shard) for shard in params.encode.shards]


STAGE = Stage("encode", params=("encode",), deps=("data/corpus",), items=_items)
WIKI18 = 21_015_324  # passages of the 2018 dump


def bounds(count: int, shards: int, shard: int) -> tuple[int, int]:
    """First line of the shard and of the next one; sizes differ by at most one.

    >>> [bounds(10, 3, i) for i in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return count * shard // shards, count * (shard + 1) // shards


def run(job: Job) -> None:
    """Encodes one shard, or reads it from a published index; resumes inside it."""
    from memsearcher.corpus import read_manifest, read_passages
    from memsearcher.retrieval.encoder import Encoder

    corpus, encode = Path("data/corpus"), job.params.encode
    manifest, shard = read_manifest(corpus), int(job.item or 0)
    start, stop = bounds(manifest["count"], len(encode.shards), shard)
    count, made = stop - start, job.work / f"shard-{shard}"
    slice_ = islice(read_passages(corpus), start, stop)
    source: Encoded | Published
    with ExitStack() as closing:
        if encode.published_index is None:
            source = Encoded(_encoder(encode, closing))
        else:
            source = Published(encode.published_index, start, manifest["count"], Encoder(encode))
        files.require_room(made, count * source.dim * 2, f"encode shard {shard}")
        began = time.monotonic()
        fresh = write_vectors(source, slice_, count, made)
        seconds = time.monotonic() - began
    row = {
        "count": count,
        "start": start,
        "dim": source.dim,
        "encoder": source.encoder.source.name,
        "revision": source.encoder.source.revision,
        "pooling": encode.pooling,
        "query_prefix": encode.query_prefix,
        "passage_prefix": encode.passage_prefix,
        "max_passage_tokens": encode.max_passage_tokens,
        "corpus_sha256": manifest["sha256"],
        "corpus_count": manifest["count"],
        "sha256": files.sha256(made / "vectors.f16"),
    }
    if encode.published_index is not None:
        row["published_index"] = encode.published_index
    files.write_json(made / "manifest.json", row)
    (made / "done").unlink(missing_ok=True)
    files.publish(made, Path(f"data/embeddings/shard-{shard}"))
    if fresh:
        rate = fresh / seconds
        job.track.metrics({"passages_per_second": rate})
        job.say(
            f"{fresh} passages at {rate:,.1f}/s; the {WIKI18:,} of the 2018 dump would take "
            f"{WIKI18 / rate / 3600:,.1f} h at this rate on one such machine"
        )


def _encoder(encode: Encode, closing: ExitStack) -> "Encoder | PooledEncoder":
    """All GPUs of the host where it has several."""
    import torch

    from memsearcher.retrieval.encoder import Encoder, PooledEncoder

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if len(gpus) < 2:
        return Encoder(encode)
    pooled = PooledEncoder(encode, gpus)
    closing.callback(pooled.close)
    return pooled


class Encoded:
    """Vectors of the passages' texts."""

    def __init__(self, encoder: "Encoder | PooledEncoder") -> None:
        self.encoder, self.dim, self.chunk = encoder, encoder.dim, encoder.chunk

    def vectors(self, _first: int, passages: list[Passage]) -> "NDArray[np.float32]":
        from memsearcher.retrieval.encoder import passage_text

        return self.encoder.passages([passage_text(p.title, p.text) for p in passages])


class Published:
    """Vectors that somebody else made of the same passages in the same order. The first passage of
    each chunk is encoded here and compared: another encoder, prefix, corpus or order shows."""

    chunk = 16_384
    ALIKE = (
        0.95  # cosine; theirs may be from fp16 or cut elsewhere, other passages of E5 reach 0.85
    )

    def __init__(self, parts: list[str], start: int, count: int, encoder: "Encoder") -> None:
        from memsearcher.retrieval.flat_file import FlatFile

        self._file, self._start = FlatFile(parts), start
        self.encoder, self.dim = encoder, encoder.dim
        theirs, ours = (self._file.ntotal, self._file.dim), (count, encoder.dim)
        if theirs != ours:
            raise BadInput(
                f"{self._file.name}: {theirs[0]} vectors of {theirs[1]}, "
                f"the corpus has {ours[0]} passages and the encoder {ours[1]} dimensions"
            )

    def vectors(self, first: int, passages: list[Passage]) -> "NDArray[np.float32]":
        from memsearcher.retrieval.encoder import passage_text

        rows = self._file.rows(self._start + first, len(passages))
        (ours,) = self.encoder.passages([passage_text(passages[0].title, passages[0].text)])
        cosine = float(ours @ rows[0])
        if cosine < self.ALIKE:
            raise BadInput(
                f"{self._file.name}: row {self._start + first} is not passage {passages[0].id!r} "
                f"as {self.encoder.source.name} encodes it (cosine {cosine:.3f})"
            )
        return rows


def write_vectors(
    source: Encoded | Published, passages: Iterator[Passage], count: int, folder: Path
) -> int:
    """Appends (count, dim) fp16 rows to folder/vectors.f16 from where the last run stopped; returns
    how many passages this run encoded. `done` is the number of rows that are safely on the disk."""
    import numpy as np
    from tqdm import tqdm

    progress = folder / "done"
    done = int(progress.read_text()) if progress.is_file() else 0
    with (
        open(folder / "vectors.f16", "r+b" if done else "wb") as f,
        tqdm(total=count, initial=done, unit=" passages", mininterval=2, desc=folder.name) as bar,
    ):
        f.seek(done * source.dim * 2)
        f.truncate()  # rows of a chunk that was not finished
        rows = islice(passages, done, None)
        first = done
        while chunk := list(islice(rows, source.chunk)):
            f.write(source.vectors(done, chunk).astype(np.float16).tobytes())
            f.flush()
            os.fsync(f.fileno())
            done += len(chunk)
            with files.atomic_write(progress) as journal:
                journal.write(str(done))
            bar.update(len(chunk))
    if done != count:
        raise BadInput(
            f"data/corpus: {done} passages for {folder.name}, its manifest promises {count}"
        )
    return done - first


if __name__ == "__main__":
    main(STAGE, run)
