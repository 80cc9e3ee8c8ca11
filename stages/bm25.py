"""A Lucene index of the same passages, for BM25; k1 and b are chosen when it is opened."""

from pathlib import Path

from memsearcher import files
from memsearcher.files import BadInput
from stages.frame import Job, Stage, main

STAGE = Stage("bm25", params=(), deps=("data/corpus",))


def run(job: Job) -> None:
    """Indexes the passages with Lucene."""
    from tqdm import tqdm

    from memsearcher.corpus import read_manifest, read_passages
    from memsearcher.retrieval.lexical import build

    corpus = Path("data/corpus")
    manifest = read_manifest(corpus)
    out = job.work / "bm25"
    files.remove(out)  # Lucene would append
    files.require_room(out, (corpus / "passages.jsonl").stat().st_size // 2, "bm25")
    bar = tqdm(
        read_passages(corpus), total=manifest["count"], unit=" passages", mininterval=2, desc="bm25"
    )
    indexed = build(bar, out / "lucene", job.params.engine.threads)
    if indexed != manifest["count"]:
        raise BadInput(
            f"data/bm25: Lucene holds {indexed} passages, the corpus has {manifest['count']}"
        )
    files.write_json(out / "manifest.json", {"count": indexed, "corpus_sha256": manifest["sha256"]})
    files.publish(out, Path("data/bm25"))
    job.say(f"{indexed:,} passages")


if __name__ == "__main__":
    main(STAGE, run)
