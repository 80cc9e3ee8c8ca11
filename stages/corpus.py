"""Passages, downloaded or read or generated, one normalised line each: data/corpus."""

from pathlib import Path

from stages.frame import Job, Stage, main

STAGE = Stage("corpus", params=("world", "corpus"))
OUT = Path("data/corpus")


def run(job: Job) -> None:
    from tqdm import tqdm

    from memsearcher import corpus, files

    raw, source = _raw(job)
    size = raw.stat().st_size
    files.require_room(job.work, size * (4 if raw.suffix in (".gz", ".zst") else 2), "the corpus")
    with tqdm(total=size, unit="B", unit_scale=True, desc="corpus", mininterval=2) as bar:
        made = job.work / "corpus"
        manifest = corpus.write(
            raw, made, job.params.corpus.kind, source, lambda n: bar.update(n - bar.n)
        )
    files.publish(made, OUT)
    job.track.metrics({"passages": manifest["count"], "empty_texts": manifest["empty_texts"]})
    job.say(f"{manifest['count']:,} passages, {manifest['empty_texts']} without text")


def _raw(job: Job) -> tuple[Path, str]:
    """(file in the dump's format, where it is from as the manifest says it)"""
    from memsearcher import corpus, files, world

    p = job.params.corpus
    if p.kind == "demo":
        w = job.params.world
        raw = job.work / "raw.jsonl"
        files.write_jsonl(raw, world.build(w.seed, w.passages).lines)
        return raw, f"world seed {w.seed}"
    if p.kind == "wiki18":
        files.require_room(job.work, 40 * 2**30, "the 2018 dump, packed and unpacked,")
        raw = corpus.download_wiki18(p.revision, job.work / "download")
        if not (job.work / "checked").exists():
            corpus.check_wiki18(raw)
            (job.work / "checked").touch()
        return raw, f"{corpus.WIKI18[0]} {p.revision}"
    path = Path(str(p.path)).expanduser()
    if not path.is_file():
        raise files.BadInput(f"corpus.path: {path}: no such file")
    return path, path.name


if __name__ == "__main__":
    main(STAGE, run)
