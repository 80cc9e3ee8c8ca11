"""Passages, downloaded or read or generated, one normalised line each: data/corpus."""

from pathlib import Path

from stages.frame import Job, Stage, main

STAGE = Stage("corpus", params=("world", "corpus"))
OUT = Path("data/corpus")


def run(job: Job) -> None:
    from tqdm import tqdm

    from memsearcher import corpus, files
    from memsearcher.corpus_files import PACKED, source_files

    raw, source = _raw(job)
    kind, made = job.params.corpus.kind, job.work / "corpus"
    sizes = [(p.stat().st_size, p.suffix in PACKED) for p in source_files(raw)]
    needed = sum(size * (4 if packed else 1) for size, packed in sizes)
    files.require_room(job.work, needed, "the corpus")
    total = sum(size for size, _ in sizes)
    with tqdm(total=total, unit="B", unit_scale=True, desc="corpus", mininterval=2) as bar:
        published = corpus.WIKI18_SHA256 if kind == "wiki18" else None
        manifest = corpus.write(raw, made, kind, source, lambda n: bar.update(n - bar.n), published)
    files.publish(made, OUT)
    job.track.metrics({"passages": manifest["count"], "empty_texts": manifest["empty_texts"]})
    job.say(f"{manifest['count']:,} passages, {manifest['empty_texts']} without text")


def _raw(job: Job) -> tuple[Path, str]:
    """(file or folder that corpus_files reads, where it is from as the manifest says it)"""
    from memsearcher import corpus, files, hub, world

    p = job.params.corpus
    if p.kind == "demo":
        w = job.params.world
        raw = job.work / "raw.jsonl"
        files.write_jsonl(raw, world.build(w.seed, w.passages).lines)
        return raw, f"world seed {w.seed}"
    if p.kind == "wiki18":
        files.require_room(job.work, 20 * 2**30, "the 2018 dump, packed and normalised,")
        raw, commit = hub.download_dataset(*corpus.WIKI18, p.revision, job.work / "download")
        return raw, f"{corpus.WIKI18[0]} {commit}"
    path = Path(str(p.path)).expanduser()
    if not path.exists():
        raise files.BadInput(f"corpus.path: {path}: no such file or folder")
    return path, path.name


if __name__ == "__main__":
    main(STAGE, run)
