"""One shard of the passages to fp16 vectors: python -m stages.encode 0

A shard is a contiguous slice of the corpus, so a row's position is its line. Work goes chunk by
chunk in a fixed order and each finished chunk is synced before it is counted: a killed run goes on
behind its last chunk and ends with the same bytes.
"""

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import Params
from memsearcher.types import Passage
from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    from memsearcher.retrieval.encoder import Encoder


def _items(params: Params) -> list[str]:
    return [str(shard) for shard in params.encode.shards]


STAGE = Stage("encode", params=("encode",), deps=("data/corpus",), items=_items)
CHUNK = 8  # batches that are sorted by length together; also what a kill can cost
WIKI18 = 21_015_324  # passages of the 2018 dump


def bounds(count: int, shards: int, shard: int) -> tuple[int, int]:
    """First line of the shard and of the next one; sizes differ by at most one.

    >>> [bounds(10, 3, i) for i in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return count * shard // shards, count * (shard + 1) // shards


def run(job: Job) -> None:
    """Encodes one shard; resumes inside it."""
    from memsearcher.corpus import read_manifest, read_passages
    from memsearcher.retrieval.encoder import Encoder

    corpus = Path("data/corpus")
    manifest, shard = read_manifest(corpus), int(job.item or 0)
    start, stop = bounds(manifest["count"], len(job.params.encode.shards), shard)
    encoder = Encoder(job.params.encode)
    made = job.work / f"shard-{shard}"
    files.require_room(made, (stop - start) * encoder.dim * 2, f"encode shard {shard}")
    began = time.monotonic()
    fresh = write_vectors(encoder, islice(read_passages(corpus), start, stop), stop - start, made)
    seconds = time.monotonic() - began
    files.write_json(
        made / "manifest.json",
        {
            "count": stop - start,
            "start": start,
            "dim": encoder.dim,
            "encoder": encoder.source.name,
            "revision": encoder.source.revision,
            "pooling": job.params.encode.pooling,
            "query_prefix": job.params.encode.query_prefix,
            "passage_prefix": job.params.encode.passage_prefix,
            "max_passage_tokens": job.params.encode.max_passage_tokens,
            "corpus_sha256": manifest["sha256"],
            "corpus_count": manifest["count"],
            "sha256": files.sha256(made / "vectors.f16"),
        },
    )
    (made / "done").unlink(missing_ok=True)
    files.publish(made, Path(f"data/embeddings/shard-{shard}"))
    if fresh:
        rate = fresh / seconds
        job.track.metrics({"passages_per_second": rate})
        job.say(
            f"{fresh} passages at {rate:,.1f}/s; the {WIKI18:,} of the 2018 dump would take "
            f"{WIKI18 / rate / 3600:,.1f} h at this rate on one such machine"
        )


def write_vectors(encoder: "Encoder", passages: Iterator[Passage], count: int, folder: Path) -> int:
    """Appends (count, dim) fp16 rows to folder/vectors.f16 from where the last run stopped; returns
    how many passages this run encoded. `done` is the number of rows that are safely on the disk."""
    import numpy as np
    from tqdm import tqdm

    from memsearcher.retrieval.encoder import passage_text

    progress = folder / "done"
    done = int(progress.read_text()) if progress.is_file() else 0
    with (
        open(folder / "vectors.f16", "r+b" if done else "wb") as f,
        tqdm(total=count, initial=done, unit=" passages", mininterval=2, desc=folder.name) as bar,
    ):
        f.seek(done * encoder.dim * 2)
        f.truncate()  # rows of a chunk that was not finished
        rows = islice(passages, done, None)
        first = done
        while chunk := list(islice(rows, CHUNK * encoder.settings.batch_size)):
            vectors = encoder.passages([passage_text(p.title, p.text) for p in chunk])
            f.write(vectors.astype(np.float16).tobytes())
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
