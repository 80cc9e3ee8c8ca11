"""FAISS over all shards, with a manifest that whoever opens the index checks."""

from pathlib import Path

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import Params
from stages.frame import Job, Stage, main

STAGE = Stage("index", params=("encode", "index"), deps=("data/embeddings",))
EMBEDDINGS = Path("data/embeddings")


def run(job: Job) -> None:
    """Builds one FAISS index per shard."""
    import numpy as np
    from tqdm import tqdm

    from memsearcher.retrieval.contract import Manifest
    from memsearcher.retrieval.dense import METRIC, build_shard, write_manifest

    shards = check_shards(job.params)
    first, total = shards[0], sum(shard["count"] for shard in shards)
    out, dim = job.work / "index", first["dim"]
    files.remove(out)
    files.require_room(out, total * dim * 4, "index")
    names = []
    with tqdm(total=total, unit=" vectors", mininterval=2, desc="index") as bar:
        for number, shard in enumerate(shards):
            path = EMBEDDINGS / f"shard-{number}" / "vectors.f16"
            shape = (shard["count"], dim)
            vectors = (
                np.memmap(path, np.float16, "r", shape=shape)
                if shape[0]
                else np.zeros(shape, np.float16)
            )
            names.append(f"shard-{number}.faiss")
            build_shard(vectors, job.params.index, out / names[-1], bar.update)
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
        kind=job.params.index.kind,
        shards=names,
    )
    write_manifest(out, manifest, job.params.encode.max_query_tokens, job.params.index.nprobe)
    size = sum(p.stat().st_size for p in out.iterdir())
    files.publish(out, Path("data/index"))
    job.track.metrics({"vectors": float(total), "index_mib": size / 2**20})
    job.say(f"{total:,} vectors of {dim} in {len(names)} shards, {size / 2**20:,.0f} MiB")


def check_shards(params: Params) -> list[dict]:
    """The shards' manifests in order. Raises BadInput where they are not slices of one corpus by
    one encoder, or a file is not as long as its manifest says."""
    shards: list[dict] = []
    for number in params.encode.shards:
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
