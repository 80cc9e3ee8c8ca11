"""Training, dev and seven test sets in one row shape, with a card of what was changed."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    from memsearcher.params import Questions
    from memsearcher.question_rows import Loaded
    from memsearcher.types import Question

STAGE = Stage("questions", params=("world", "questions"))
OUT = Path("data/questions")


def run(job: Job) -> None:
    from memsearcher import files
    from memsearcher import questions as q
    from memsearcher.question_rows import load

    p = job.params.questions
    names = [f"test_{d}" for d in q.DATASETS] + [f"train_{d}" for d in q.TRAINED]
    if set(p.sets) != set(names):
        raise files.BadInput(f"questions.sets: must be {', '.join(names)}; got {', '.join(p.sets)}")
    paths, source, revision = _sources(job)
    seen: dict[str, str] = {}
    loaded = {name: load(name, paths[name], p, seen) for name in names}
    test = {d: loaded[f"test_{d}"].questions for d in q.DATASETS}
    train, dev, notes = _training(p, loaded, [row for rows in test.values() for row in rows])
    never = [row.id for rows in test.values() for row in rows if q.hopeless(row)]
    notes.append(f"Test questions that no answer can match: {', '.join(never) or 'none'}.")

    made = job.work / "questions"
    files.remove(made)
    outs = {"train": train, "dev": dev} | {f"test/{d}": rows for d, rows in test.items()}
    for name, rows in outs.items():
        files.write_jsonl(made / f"{name}.jsonl", map(q.to_row, rows))
    with files.atomic_write(made / "card.md") as f:
        f.write(card(source, p, loaded, notes))
    with files.atomic_write(made / "registry.yaml") as f:
        f.write(_registry(p, revision, loaded))
    files.publish(made, OUT)
    for name, each in loaded.items():
        use = "test" if name.startswith("test_") else "training"
        job.track.dataset(f"{source} {each.entry.file}", paths[name], use)
        changed = {f"{name}/{what}": n for what, n in each.counts.items() if n}
        job.track.metrics(changed)
    asked = sum(map(len, test.values()))
    job.track.metrics({"train": len(train), "dev": len(dev), "test": asked})
    job.track.artifact(OUT / "card.md")
    dropped = sum(len(each.dropped) for each in loaded.values())
    job.say(
        f"{len(train):,} training, {len(dev):,} dev, {asked:,} test questions"
        + (f"; {dropped:,} bad rows left out, see card.md" if dropped else "")
    )


def _training(
    p: "Questions", loaded: dict[str, "Loaded"], test: "list[Question]"
) -> "tuple[list[Question], list[Question], list[str]]":
    """(train, dev, what was done)"""
    from memsearcher import questions as q

    every = [row for d in q.TRAINED for row in loaded[f"train_{d}"].questions]
    fair = q.without_test(every, test)
    train, dev = q.hold_out(fair, p.dev_size, p.dev_seed)
    matches = len(every) - len(fair)
    if p.release_exact:
        train = every
        notes = [
            f"questions.release_exact: training keeps all {len(every)} rows, {matches} test "
            f"questions and the {len(dev)} dev questions (seed {p.dev_seed}) among them."
        ]
    else:
        notes = [
            f"{matches} training questions removed because they are test questions.",
            f"{len(dev)} held out as dev (questions.dev_seed {p.dev_seed}), "
            f"{len(train)} are left of {len(every)}.",
        ]
    if p.append_question_mark:
        marked = q.with_question_mark(train)
        changed = sum(a != b for a, b in zip(train, marked, strict=True))
        notes.append(f'"?" appended to {changed} training questions.')
        train = marked
    return train, dev, notes


def _sources(job: Job) -> tuple[dict[str, Path], str, str | None]:
    """({"test_nq": file, ...} in FlashRAG's shape, where they are from in words, commit)"""
    from memsearcher import files, question_files, world, world_questions

    p, w = job.params.questions, job.params.world
    if p.kind == "flashrag":
        from huggingface_hub import HfApi

        paths, commit = question_files.fetched(p, job.work / "download", HfApi(token=False))
        return paths, f"{p.source} {commit}", commit
    if p.kind == "local":
        folder = Path(str(p.path)).expanduser()
        return question_files.found(p, folder), folder.name, p.revision
    folder = job.work / "raw"
    made = world.build(w.seed, w.passages)
    for name, rows in world_questions.write(
        made, w.seed, w.train_questions, w.test_questions
    ).items():
        files.write_jsonl(folder / name, rows)
    return question_files.found(p, folder), f"world seed {w.seed}", None


def card(source: str, p: "Questions", loaded: "dict[str, Loaded]", notes: Sequence[str]) -> str:
    """Markdown: what came in, what was changed, what is odd and stays."""
    chosen = ("strip", "unquote", "append_question_mark", "release_exact", "bad_rows")
    said = ", ".join(f"{name} {str(getattr(p, name)).lower()}" for name in chosen)
    lines = ["# Questions", "", f"Source: {source}. Parameters: {said}.", ""]
    lines += ["| | file | split | rows | SHA-256 |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {each.entry.file} | {each.entry.split} | {each.rows} | {each.sha256} |"
        for name, each in loaded.items()
    ]
    lines += ["", "| | " + " | ".join(loaded) + " |", "|---|" + "---|" * len(loaded)]
    every = [each.counts for each in loaded.values()]
    for reason in dict.fromkeys(r for counts in every for r, n in counts.items() if n):
        lines.append(f"| {reason} | " + " | ".join(str(c[reason]) for c in every) + " |")
    lines += ["", *(f"- {note}" for note in notes)]
    dropped = [why for each in loaded.values() for why in each.dropped]
    if dropped:
        lines += ["", "## Bad rows, left out", "", *(f"- {why}" for why in dropped)]
    return "\n".join([*lines, ""])


def _registry(p: "Questions", revision: str | None, loaded: "dict[str, Loaded]") -> str:
    """What conf/questions/ would say had it known: revision and hashes filled in."""
    import yaml

    entries = {
        name: asdict(replace(each.entry, sha256=each.sha256)) for name, each in loaded.items()
    }
    row = {"kind": p.kind, "source": p.source, "revision": revision, "sets": entries}
    return yaml.safe_dump(row, sort_keys=False, allow_unicode=True)


if __name__ == "__main__":
    main(STAGE, run)
