"""The vectors' index over all shards, with a manifest that whoever opens it checks."""

from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.files import BadInput
from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STAGE = Stage("index", params=("encode", "index"), deps=("data/embeddings",))
EMBEDDINGS = Path("data/embeddings")


def open_vectors(path: Path, count: int, dim: int) -> "NDArray[np.float16]":
    """(count, dim), mapped."""
    import numpy as np

    if not count:
        return np.zeros((0, dim), np.float16)
    return np.memmap(path, np.float16, "r", shape=(count, dim))


def run(job: Job) -> None:
    """Builds one index per shard: FAISS, or the fp16 vectors themselves."""
    from tqdm import tqdm

    from memsearcher.retrieval import plan
    from memsearcher.retrieval.contract import Manifest
    from memsearcher.retrieval.dense import (
        METRIC,
        TRAIN_PER_LIST,
        build_shard,
        link_shard,
        lists_of,
        write_manifest,
    )

    shards = check_shards(len(job.params.encode.shards))
    first, counts = shards[0], [shard["count"] for shard in shards]
    index, out, dim, total = job.params.index, job.work / "index", first["dim"], sum(counts)
    files.remove(out)
    out.mkdir(parents=True)
    lists = lists_of(index, max(counts))
    needs = plan.to_build(out, index.kind, counts, dim, lists, TRAIN_PER_LIST * lists)
    job.say(str(needs))
    needs.check()
    names = []
    with tqdm(total=total, unit=" vectors", mininterval=2, desc="index") as bar:
        for number, count in enumerate(counts):
            path = EMBEDDINGS / f"shard-{number}" / "vectors.f16"
            if index.kind == "fp16":
                names.append(f"shard-{number}.f16")
                link_shard(path, out / names[-1])
                bar.update(count)
            else:
                names.append(f"shard-{number}.faiss")
                build_shard(open_vectors(path, count, dim), index, out / names[-1], bar.update)
    manifest = Manifest(
        encoder=first["encoder"],
        revision=first["revision"],
        pooling=first["pooling"],
        query_prefix=first["query_prefix"],
        passage_prefix=first["passage_prefix"],
        dim=dim,
        metric=METRIC,
        ntotal=total,
        corpus_sha256=first["corpus_sha256"],
        kind=index.kind,
        shards=names,
    )
    write_manifest(out, manifest, job.params.encode.max_query_tokens, index.nprobe)
    size = sum(p.stat().st_size for p in out.iterdir())
    files.publish(out, Path("data/index"))
    job.track.metrics({"vectors": float(total), "index_mib": size / 2**20})
    job.say(f"{total:,} vectors of {dim} in {len(names)} shards, {size / 2**20:,.0f} MiB")


def check_shards(count: int) -> list[dict]:
    """The shards' manifests in order. Raises BadInput where they are not slices of one corpus by
    one encoder, or a file is not as long as its manifest says."""
    shards: list[dict] = []
    for number in range(count):
        folder = EMBEDDINGS / f"shard-{number}"
        shard = files.read_json(folder / "manifest.json")
        first = shards[0] if shards else shard
        for key in (
            "dim",
            "encoder",
            "revision",
            "pooling",
            "passage_prefix",
            "corpus_sha256",
            "corpus_count",
        ):
            if shard[key] != first[key]:
                raise BadInput(
                    f"{folder}: {key} is {shard[key]!r}, in shard-0 it is {first[key]!r}"
                )
        start = sum(s["count"] for s in shards)
        if shard["start"] != start:
            raise BadInput(
                f"{folder}: starts at passage {shard['start']}, the shard before ends at {start}"
            )
        if not (folder / "vectors.f16").is_file():
            raise BadInput(f"{folder}/vectors.f16: no such file")
        size, wanted = (folder / "vectors.f16").stat().st_size, shard["count"] * shard["dim"] * 2
        if size != wanted:
            raise BadInput(f"{folder}/vectors.f16: {size} bytes, its manifest means {wanted}")
        shards.append(shard)
    total = sum(s["count"] for s in shards)
    if total != shards[0]["corpus_count"]:
        raise BadInput(
            f"{EMBEDDINGS}: {total} vectors, the corpus has {shards[0]['corpus_count']} passages"
        )
    return shards


if __name__ == "__main__":
    main(STAGE, run)
