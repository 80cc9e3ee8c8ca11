"""Writes the page: index.html, its styles and scripts, and the data beside it in script files.

A page opened from disk cannot fetch, but it can load scripts: `data/*.js` each call one function
with one JSON text. Trajectories and passages lie in chunks that load when somebody opens them, each
passage once. Text of models and passages is only ever JSON here and `textContent` in the
browser; what stands in index.html itself went through Jinja's autoescape.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from memsearcher import files
from memsearcher.published import COLUMNS, LABELS, ROWS
from memsearcher.report import exports, plots, tables
from memsearcher.report.collect import Collected, deviations
from memsearcher.types import Passage

HERE = Path(__file__).parent
CHUNK = 100  # trajectories in one script file
PASSAGES = 250  # passages in one script file
THINK_END = "</think>"


def write(
    found: Collected,
    folder: Path,
    look_up: Callable[[set[str]], Iterable[Passage]],
    run: dict[str, object],
) -> dict:
    """Fills `folder`; returns what results.json holds. `run`: versions, machine and the like."""
    from plotly.offline import get_plotlyjs

    folder.mkdir(parents=True, exist_ok=True)
    data = tables.results(found) | {"run": run}
    files.write_json(folder / "results.json", data)
    with files.atomic_write(folder / "results.md") as f:
        f.write(tables.markdown(data))
    exports.write(found, folder)
    shown = _trajectories(found, folder / "data", look_up)
    figures = plots.figures(found)
    flat = [asdict(figure) for group in figures.values() for figure in group]
    _script(folder / "data" / "figures.js", "figures", flat)
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "percent": tables.percent,
        "spread": tables.spread,
        "signed": tables.signed,
        "si": tables.si,
        "pretty": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    }
    html = environment.get_template("report.html.j2").render(
        data=data,
        found=found,
        figures=figures,
        columns=COLUMNS,
        labels=LABELS,
        retrieval_tables=list(
            tables.retrieval(
                found.retrieval, tables.shown_k(found.retrieval, found.params.search.k)
            )
        ),
        published=ROWS if found.params.report.published else (),
        mistakes=plots.MISTAKES,
        stops=plots.STOPS,
        deviations=deviations(found.params),
        parameters=asdict(found.params),
        run=run,
        shown=shown,
    )
    with files.atomic_write(folder / "index.html") as f:
        f.write(html)
    with files.atomic_write(folder / "plotly.min.js") as f:
        f.write(get_plotlyjs())
    for name in ("report.css", "report.js", "reader.js", "viewer.js"):
        shutil.copyfile(HERE / name, folder / name)
    return data


def _trajectories(
    found: Collected, folder: Path, look_up: Callable[[set[str]], Iterable[Passage]]
) -> int:
    """Chunks of trajectories and passages, and the list that the page filters. Returns how many."""
    index: list[list] = []
    chunk: list[dict] = []
    order: dict[str, int] = {}  # passage id → its number, by first appearance
    for number, policy in enumerate(found.policies):
        chosen = _chosen(policy.predictions, found.params.report.trajectories_per_benchmark)
        for row in files.read_jsonl(policy.trajectories):
            scores = chosen.get(row["question_id"])
            if scores is None:
                continue
            chunk.append(_detail(row, order))
            entry = [number, row["dataset"], row["question_id"], row["question"], row["answer"]]
            entry += [scores["em"], len(row["turns"]), row["stop"], scores["mistake"]]
            index.append(entry)
            if len(chunk) == CHUNK:
                _script(folder / f"t{(len(index) - 1) // CHUNK}.js", "chunk", chunk)
                chunk = []
    if chunk:
        _script(folder / f"t{(len(index) - 1) // CHUNK}.js", "chunk", chunk)
    texts = {p.id: [p.title, p.text] for p in (look_up(set(order)) if order else ())}
    passages = [[id, *texts.get(id, ["", "(this passage is not in data/corpus)"])] for id in order]
    for i in range(0, len(passages), PASSAGES):
        _script(folder / f"p{i // PASSAGES}.js", "passages", passages[i : i + PASSAGES])
    policies = [policy.name for policy in found.policies]
    head = {"policies": policies, "rows": index, "chunk": CHUNK, "passages": PASSAGES}
    _script(folder / "index.js", "index", head | {"stops": plots.STOPS, "mistakes": plots.MISTAKES})
    return len(index)


def _chosen(predictions: list[dict], per_benchmark: int) -> dict[str, dict]:
    """By the hash of the question id, so that every policy shows the same questions."""
    by_dataset: dict[str, list[dict]] = {}
    for row in predictions:
        by_dataset.setdefault(row["dataset"], []).append(row)
    out = {}
    for rows in by_dataset.values():
        key = {r["question_id"]: hashlib.sha256(r["question_id"].encode()).digest() for r in rows}
        for row in sorted(rows, key=lambda r: key[r["question_id"]])[:per_benchmark]:
            out[row["question_id"]] = row
    return out


def _detail(row: dict, order: dict[str, int]) -> dict:
    """One trajectory for the viewer: thinking apart from the action, passages by number."""
    turns = []
    for turn in row["turns"]:
        thinking, closed, action = turn["action"].partition(THINK_END)
        if not closed:
            thinking, action = "", turn["action"]
        hits = [[order.setdefault(id, len(order)), score] for id, score in turn["hits"]]
        shown = {"thinking": thinking.removeprefix("<think>").strip(), "action": action.strip()}
        turns.append(turn | shown | {"hits": hits})
    tokens = sum(row["context_tokens"])
    return {"golds": row["golds"], "seconds": row["seconds"], "tokens": tokens, "turns": turns}


def _script(path: Path, function: str, value: object) -> None:
    """`window.report.<function>(number, JSON.parse(text))`: JSON.parse, so that a key such as
    __proto__ is a key; ASCII, so that no guess of the encoding and no U+2028 can matter."""
    text = json.dumps(json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False))
    number = "".join(c for c in path.stem if c.isdigit()) or "0"
    with files.atomic_write(path) as f:
        f.write(f"window.report.{function}({number}, JSON.parse({text}));\n")
