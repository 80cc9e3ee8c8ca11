"""Questions in one row shape, from files in FlashRAG's layout with all their quirks.

{"id", "dataset", "question", "golds", "split", "metadata"}, ids unique over all sets
("nq/test_3"). Whatever is changed on the way in is counted (`Counts`) and told in card.md; a row is
only ever dropped from training, where its question is also a test question.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from memsearcher import files
from memsearcher.agent.scoring import normalise
from memsearcher.files import BadInput
from memsearcher.types import Question

DATASETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
TRAINED = ("nq", "hotpotqa")
FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
# the split that the field reports on; the others have no test split with answers
TEST_SPLITS = dict.fromkeys(DATASETS, "test") | dict.fromkeys(DATASETS[3:6], "dev")
REMOVED = "training questions that are test questions (removed)"
Counts = Counter[str]


def read_questions(path: Path) -> list[Question]:
    """Rows that `to_row` wrote."""
    return [
        Question(r["id"], r["dataset"], r["question"], tuple(r["golds"]), r["split"], r["metadata"])
        for r in files.read_jsonl(path)
    ]


def to_row(q: Question) -> dict:
    return {
        "id": q.id,
        "dataset": q.dataset,
        "question": q.text,
        "golds": list(q.golds),
        "split": q.split,
        "metadata": q.metadata,
    }


def load(path: Path, dataset: str, split: str, counts: Counts) -> list[Question]:
    """One file in FlashRAG's shape. Raises BadInput that names file and line."""
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.jsonl")) if path.parent.is_dir() else []
        raise BadInput(f"{path}: no such file (there are: {', '.join(there) or 'none'})")
    out: list[Question] = []
    first: dict[str, int] = {}
    for number, row in files.numbered_jsonl(path):
        where = f"{path}:{number}"
        for wanted in ("id", "question", "golden_answers"):
            if wanted not in row:
                raise BadInput(f"{where}: no key {wanted!r}, only {sorted(row)}")
        name = f"{dataset}/{row['id']}"
        if name in first:
            raise BadInput(f"{where}: id {row['id']!r} is also on line {first[name]}")
        first[name] = number
        text = clean_question(row["question"], where, counts)
        golds = clean_golds(row["golden_answers"], where, counts)
        metadata = clean_metadata(row.get("metadata"), counts)
        if dataset == "nq":
            metadata.setdefault("plan", [{"query": text, "title": "", "fact": None}])
        out.append(Question(name, dataset, text, golds, split, metadata))
    if not out:
        raise BadInput(f"{path}: no question in it")
    counts["rows"] += len(out)
    repeated = Counter(key(q.text) for q in out)
    counts["questions asked before in the same file (kept)"] += sum(
        n - 1 for n in repeated.values()
    )
    counts["questions whose every gold normalises to nothing (kept, never matched)"] += sum(
        hopeless(q) for q in out
    )
    return out


def clean_question(raw: object, where: str, counts: Counts) -> str:
    """Strips, joins runs of blanks, takes off CSV's quotes.

    >>> clean_question('"Who said ""God is dead""?" ', "", Counter())
    'Who said "God is dead"?'
    """
    if not isinstance(raw, str) or not raw.strip():
        raise BadInput(f"{where}: a question without text: {raw!r}")
    text = raw.strip()
    counts["questions with blanks around them (stripped)"] += text != raw
    inner = text[1:-1].replace('""', "")
    if len(text) > 2 and text[0] == text[-1] == '"' and '""' in text[1:-1] and '"' not in inner:
        text = text[1:-1].replace('""', '"').strip()
        counts["questions in CSV quotes (unquoted)"] += 1
    joined = " ".join(text.split())
    counts["questions with runs of blanks (joined)"] += joined != text
    return joined


def clean_golds(raw: object, where: str, counts: Counts) -> tuple[str, ...]:
    """Every accepted answer, stripped, one of equal ones. May come as JSON in a string.
    One-character answers are real; those that normalise to nothing stay too, never matched."""
    if isinstance(raw, str):
        raw = _json_list(raw)
        counts["answers that were JSON in a string (parsed)"] += 1
    if not isinstance(raw, list) or not raw:
        raise BadInput(f"{where}: golden_answers must be a list with an answer in it, got {raw!r}")
    golds: dict[str, None] = {}
    for value in raw:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadInput(f"{where}: an answer must be text, got {value!r}")
        text = str(value).strip()
        counts["answers with blanks around them (stripped)"] += text != str(value)
        counts["answers given twice (one kept)"] += text in golds
        counts["answers that were empty (left out)"] += not text
        if text:
            golds[text] = None
    if not golds:
        raise BadInput(f"{where}: golden_answers hold no text: {raw!r}")
    return tuple(golds)


def clean_metadata(raw: object, counts: Counts) -> dict[str, object]:
    """What is kept of it: scalars and lists of text, the supporting titles, the plan.

    Context paragraphs are left out: evidence comes from the corpus. HotpotQA calls their texts
    `sentences`, 2Wiki `content`; neither is needed.
    """
    counts["rows without metadata"] += not raw
    if not isinstance(raw, dict):
        return {}
    titles = raw.get("supporting_titles")
    facts, steps = raw.get("supporting_facts"), raw.get("question_decomposition")
    if titles is None and isinstance(facts, dict):
        titles = facts.get("title")
    if titles is None and isinstance(steps, list):
        titles = [s["support_paragraph"]["title"] for s in steps if s.get("support_paragraph")]
    out: dict[str, object] = {}
    for name, value in raw.items():
        if isinstance(value, str) and name.endswith("_aliases"):
            counts["alias lists that were JSON in a string (parsed)"] += 1
            out[name] = _json_list(value)
        elif name == "plan" or isinstance(value, str | int | float):
            out[name] = value
    if titles:
        out["supporting_titles"] = unique = list(dict.fromkeys(str(t) for t in titles))
        out.setdefault("plan", [{"query": t, "title": t, "fact": None} for t in unique])
    return out


def key(text: str) -> str:
    """By this two questions are the same: words only, case folded.

    >>> key("Who  wrote 'It'?") == key("who wrote it")
    True
    """
    return " ".join(re.findall(r"\w+", text.casefold()))


def hopeless(q: Question) -> bool:
    """Every gold normalises to nothing (")", "---", "the"): no answer can ever match."""
    return not any(normalise(gold) for gold in q.golds)


def without_test(
    train: Sequence[Question], test: Iterable[Question], counts: Counts
) -> list[Question]:
    asked = {key(q.text) for q in test}
    kept = [q for q in train if key(q.text) not in asked]
    counts[REMOVED] += len(train) - len(kept)
    return kept


def hold_out(
    train: Sequence[Question], size: int, seed: int
) -> tuple[list[Question], list[Question]]:
    """(rest, dev): `size` questions, each data set by its share (largest remainders), by seed."""
    if size >= len(train):
        raise BadInput(f"questions.dev_size: {size} of only {len(train)} training questions")
    by_set: dict[str, list[Question]] = {}
    for q in train:
        by_set.setdefault(q.dataset, []).append(q)
    exact = {name: size * len(rows) / len(train) for name, rows in by_set.items()}
    take = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda n: take[n] - exact[n])[: size - sum(take.values())]:
        take[name] += 1
    rng = random.Random(f"dev {seed}")
    chosen = {q.id for name, rows in by_set.items() for q in rng.sample(rows, take[name])}
    rest = [q for q in train if q.id not in chosen]
    return rest, [replace(q, split="dev") for q in train if q.id in chosen]


def with_question_mark(questions: Sequence[Question], counts: Counts) -> list[Question]:
    """As the release does to its training questions (D13)."""
    bare = sum(not q.text.endswith("?") for q in questions)
    counts['questions without "?" (appended)'] += bare
    return [q if q.text.endswith("?") else replace(q, text=f"{q.text}?") for q in questions]


def card(source: str, parts: dict[str, Counts], notes: Sequence[str]) -> str:
    """Markdown: what came in and what was changed, one table over all files."""
    reasons = list(dict.fromkeys(r for c in parts.values() for r, n in c.items() if n))
    lines = ["# Questions", "", f"Source: {source}", "", "| | " + " | ".join(parts) + " |"]
    lines.append("|---|" + "---|" * len(parts))
    for reason in reasons:
        lines.append(f"| {reason} | " + " | ".join(str(c[reason]) for c in parts.values()) + " |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def download_flashrag(revision: str | None, folder: Path) -> dict[str, Path]:
    """The nine files from the hub, under our names ("nq_test": path)."""
    from huggingface_hub import hf_hub_download

    wanted = {f"{d}_test": f"{d}/{TEST_SPLITS[d]}.jsonl" for d in DATASETS}
    wanted |= {f"{d}_train": f"{d}/train.jsonl" for d in TRAINED}
    return {
        name: Path(
            hf_hub_download(
                FLASHRAG, file, repo_type="dataset", revision=revision, local_dir=folder
            )
        )
        for name, file in wanted.items()
    }


def _json_list(text: str) -> object:
    """The list that the string holds; the string itself as the only member where it holds none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return [text]
    return value if isinstance(value, list) else [text]
