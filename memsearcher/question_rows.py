"""Rows in FlashRAG's layout, with all their quirks, to questions.

Whatever is changed on the way in is counted and told in card.md; so is what looks odd and stays:

    metadata missing or null; lists as JSON in strings      empty metadata; parsed
    supporting facts, decompositions                        their titles, in order, each once
    context paragraphs (`sentences`, `content`)             left out: evidence is the corpus's
    questions in CSV quotes; blanks around or doubled       `unquote`; `strip` (any white space)
    blanks around answers; equal ones; empty ones           `strip`; one kept; left out
    golds that normalise to nothing (")", "---")            kept, never matched, listed
    one question twice with different golds; yes and no     kept, counted
    one-character answers, numbers, trailing punctuation    kept
    letters of any script, composed or not, full-width      kept bit by bit
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memsearcher import question_files
from memsearcher.agent.scoring import normalise
from memsearcher.files import BadInput
from memsearcher.params import QuestionFile
from memsearcher.params import Questions as Rules
from memsearcher.questions import hopeless, key
from memsearcher.types import Question

Counts = Counter[str]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One file. `rows`: lines in it; `dropped`: why each bad one is not among the questions."""

    questions: list[Question]
    entry: QuestionFile
    rows: int
    sha256: str
    counts: Counts
    dropped: list[str]


def load(name: str, path: Path, rules: Rules, seen: dict[str, str] | None = None) -> Loaded:
    """The file of the registry's entry `name` ("test_nq"). `seen`: id -> file and line, over files.

    Raises BadInput that names file and line; with rules.bad_rows drop a bad row is listed instead.
    """
    entry, (role, _, dataset) = rules.sets[name], name.partition("_")
    seen = {} if seen is None else seen
    sha256 = question_files.check(name, entry, path)
    counts, dropped, out, rows = Counts(), [], [], 0
    for number, raw in question_files.raw_rows(path):
        rows += 1
        where, changes = f"{path}:{number}", Counts()
        try:
            if isinstance(raw, BadInput):
                raise raw
            q = _question(raw, dataset, role, where, rules, changes)
            if q.id in seen:
                raise BadInput(f"{where}: id {raw['id']!r} is also in {seen[q.id]}")
        except BadInput as e:
            if rules.bad_rows == "error":
                raise
            dropped.append(str(e))
            continue
        seen[q.id] = where
        counts += changes
        out.append(q)
    if entry.rows not in (None, rows):
        raise BadInput(f"{path}: {rows} rows, but questions.sets.{name}.rows is {entry.rows}")
    if not out:
        raise BadInput(f"{path}: no question in it" + "".join(f"; {each}" for each in dropped[:1]))
    head = Counts({"rows": rows, "bad rows (left out, listed below)": len(dropped)})
    return Loaded(out, entry, rows, sha256, head + counts + _oddities(out), dropped)


def _question(
    row: dict[str, object], dataset: str, role: str, where: str, rules: Rules, counts: Counts
) -> Question:
    for wanted in ("id", "question", "golden_answers"):
        if wanted not in row:
            raise BadInput(f"{where}: no key {wanted!r}, only {sorted(row)}")
    text = clean_question(row["question"], where, rules, counts)
    golds = clean_golds(row["golden_answers"], where, rules, counts)
    metadata = clean_metadata(row.get("metadata"), counts)
    if dataset == "nq":
        metadata.setdefault("plan", [{"query": text, "title": "", "fact": None}])
    return Question(f"{dataset}/{row['id']}", dataset, text, golds, role, metadata)


def clean_question(raw: object, where: str, rules: Rules, counts: Counts) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise BadInput(f"{where}: a question without text: {raw!r}")
    text = raw.strip() if rules.strip else raw
    counts["questions with blanks around them (stripped)"] += text != raw
    if rules.unquote and (inner := _from_csv(text.strip())) is not None:
        text = inner
        counts["questions in CSV quotes (unquoted)"] += 1
    if rules.strip:
        joined = " ".join(text.split())
        counts["questions with runs of blanks (joined)"] += joined != text.strip()
        text = joined
    return text


def _from_csv(text: str) -> str | None:
    """What a quoted CSV field with quotes in it says; None where the text is no such field.

    >>> _from_csv('"Who said ""God is dead""?"')
    'Who said "God is dead"?'
    """
    inner = text[1:-1]
    quoted = len(text) > 2 and text[0] == text[-1] == '"'
    if not quoted or '""' not in inner or '"' in inner.replace('""', ""):
        return None
    return inner.replace('""', '"')


def clean_golds(raw: object, where: str, rules: Rules, counts: Counts) -> tuple[str, ...]:
    """Every accepted answer, each once. May come as JSON in a string."""
    if isinstance(raw, str):
        raw = _json_list(raw)
        counts["answers that were JSON in a string (parsed)"] += 1
    if not isinstance(raw, list) or not raw:
        raise BadInput(f"{where}: golden_answers must be a list with an answer in it, got {raw!r}")
    golds: dict[str, None] = {}
    for value in raw:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadInput(f"{where}: an answer must be text, got {value!r}")
        counts["answers that were numbers (now text)"] += not isinstance(value, str)
        text = str(value).strip() if rules.strip else str(value)
        counts["answers with blanks around them (stripped)"] += text != str(value)
        counts["answers given twice (one kept)"] += text in golds
        counts["answers that were empty (left out)"] += not text.strip()
        if text.strip():
            golds[text] = None
    if not golds:
        raise BadInput(f"{where}: golden_answers hold no text: {raw!r}")
    return tuple(golds)


def clean_metadata(raw: object, counts: Counts) -> dict[str, object]:
    """What is kept of it: scalars, lists that were JSON, the supporting titles, the plan."""
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


def _oddities(questions: Sequence[Question]) -> Counts:
    """What stays as it came and should be known."""
    golds = [{normalise(gold) for gold in q.golds} for q in questions]
    by_key: dict[str, list[Question]] = {}
    for q in questions:
        by_key.setdefault(key(q.text), []).append(q)
    repeated = [group for group in by_key.values() if len(group) > 1]
    return Counts(
        {
            "questions asked before in the same file (kept)": sum(len(g) - 1 for g in repeated),
            "questions asked again with other answers (kept)": sum(
                len({q.golds for q in g}) > 1 for g in repeated
            ),
            "questions without a question mark": sum("?" not in q.text[-1:] for q in questions),
            "questions answered by yes or no": sum(bool(g) and g <= {"yes", "no"} for g in golds),
            "questions with supporting titles": sum(
                "supporting_titles" in q.metadata for q in questions
            ),
            "questions with an answer that normalises to nothing (kept)": sum(
                "" in g for g in golds
            ),
            "questions whose every gold normalises to nothing (kept, never matched)": sum(
                map(hopeless, questions)
            ),
        }
    )


def _json_list(text: str) -> object:
    """The list that the string holds; the string itself as the only member where it holds none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return [text]
    return value if isinstance(value, list) else [text]
