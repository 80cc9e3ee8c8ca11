"""Training, dev and seven test sets in one row shape, with a card of what was changed."""

from pathlib import Path

from stages.frame import Job, Stage, main

STAGE = Stage("questions", params=("world", "questions"))
OUT = Path("data/questions")


def run(job: Job) -> None:
    from memsearcher import files
    from memsearcher import questions as q

    p = job.params.questions
    paths, source = _sources(job)
    counts = {name: q.Counts() for name in paths}
    test = {d: q.load(paths[f"{d}_test"], d, "test", counts[f"{d}_test"]) for d in q.DATASETS}
    every_test = [row for rows in test.values() for row in rows]
    train = []
    for d in q.TRAINED:
        rows = q.load(paths[f"{d}_train"], d, "train", counts[f"{d}_train"])
        train += q.without_test(rows, every_test, counts[f"{d}_train"])
    train, dev = q.hold_out(train, p.dev_size, p.dev_seed)
    notes = [f"{len(train)} training questions, {len(dev)} held out as dev (seed {p.dev_seed})"]
    if p.append_question_mark:
        marked = q.Counts()
        train = q.with_question_mark(train, marked)
        notes += [f"{n} training {what}" for what, n in marked.items()]
    gone = sum(c[q.REMOVED] for c in counts.values())
    notes.append(f"{gone} training questions removed because they are test questions")
    never = [row.id for row in every_test if q.hopeless(row)]
    notes.append(f"test questions whose golds normalise to nothing: {', '.join(never) or 'none'}")

    made = job.work / "questions"
    outs = {"train": train, "dev": dev} | {f"test/{d}": rows for d, rows in test.items()}
    for name, rows in outs.items():
        files.write_jsonl(made / f"{name}.jsonl", map(q.to_row, rows))
    with files.atomic_write(made / "card.md") as f:
        f.write(q.card(source, counts, notes))
    files.publish(made, OUT)
    job.track.metrics({"train": len(train), "dev": len(dev), "test": len(every_test)})
    job.track.artifact(OUT / "card.md")
    job.say(f"{len(train):,} training, {len(dev):,} dev, {len(every_test):,} test questions")


def _sources(job: Job) -> tuple[dict[str, Path], str]:
    """({"nq_test": file, ...} in FlashRAG's shape, where they are from as the card says it)"""
    from memsearcher import files, world, world_questions
    from memsearcher import questions as q

    p, w = job.params.questions, job.params.world
    names = [f"{d}_test" for d in q.DATASETS] + [f"{d}_train" for d in q.TRAINED]
    if p.kind == "flashrag":
        return q.download_flashrag(p.revision, job.work / "download"), f"{q.FLASHRAG} {p.revision}"
    if p.kind == "demo":
        folder, source = job.work / "raw", f"world seed {w.seed}"
        made = world.build(w.seed, w.passages)
        for name, rows in world_questions.write(
            made, w.seed, w.train_questions, w.test_questions
        ).items():
            files.write_jsonl(folder / name, rows)
    else:
        folder = Path(str(p.path)).expanduser()
        source = folder.name
        if not folder.is_dir():
            raise files.BadInput(f"questions.path: {folder}: no such folder")
    return {name: folder / f"{name}.jsonl" for name in names}, source


if __name__ == "__main__":
    main(STAGE, run)
