"""What a stage tells MLflow: a journal on disk that one uploader sends on, and nobody waits for.

MLflow takes seconds to import and to open its store, a server may hang, and two processes that
open a fresh SQLite store at once break it. So a stage only appends to work/tracking/<run>.jsonl,
and one process (memsearcher/uploader.py, started on demand, outside every process group) turns
journals into runs. A store that is down costs a stage nothing: its journal is sent another time.

One parent run per pipeline (the flow, or the `dvc` process above), one child per stage. Policies go
by path and hash, never by their bytes; memsearcher/store.py says what becomes of each line.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from memsearcher import files
from memsearcher.files import ROOT
from memsearcher.params import Params

PLACE = "MEMSEARCHER_TRACKING"  # where a worktree's stages write their journals
FOLDER = Path(os.environ.get(PLACE) or ROOT / "work" / "tracking")
PIPELINE = "MEMSEARCHER_PIPELINE"  # whoever starts several stages names them as one run with it
WHOLE = "pipeline"  # the label of the run above the stages
LINKS_KEPT = 20
KINDS, RECORDS = ("warmup", "train"), "*/metrics.jsonl"  # below results/


def uri() -> str:
    """The server of MLFLOW_TRACKING_URI, or one SQLite file whatever the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{ROOT / 'mlflow.db'}"


@dataclass
class Run:
    """A journal that is being written. It is None after close and after the first failure: then
    every call is a no-op."""

    path: Path
    started: float = field(default_factory=time.time)
    _journal: IO[str] | None = None

    def metrics(
        self, values: Mapping[str, float], step: int | None = None, model: Path | None = None
    ) -> None:
        """`model`: the folder of the policy that the values are of."""
        named = {clean(name): float(value) for name, value in values.items()}
        of = {} if model is None else {"model": self._hash(model)}
        self._write({"metrics": named, "step": step or 0, **of})

    def params(self, values: Mapping[str, object]) -> None:
        """Nested values become dotted names."""
        self._write({"params": {clean(k): _text(v) for k, v in _dotted(values).items()}})

    def tags(self, values: Mapping[str, str]) -> None:
        self._write({"tags": {clean(k): v[:8000] for k, v in values.items()}})

    def dataset(self, name: str, path: Path, context: str) -> None:
        """What was read, by path and hash. `context`: training, validation or test."""
        known = {"name": name, "source": str(path), "digest": self._hash(path)[:36]}
        self._write({"dataset": known | {"context": context}})

    def policy(self, name: str, folder: Path, step: int, values: Mapping[str, float]) -> None:
        """A policy that this run made, with the step it is of and its metrics there."""
        sizes = (
            [p.stat().st_size for p in folder.rglob("*") if p.is_file()] if self._journal else []
        )
        known = {"name": clean(name), "path": str(folder), "sha256": self._hash(folder)}
        known["bytes"] = str(sum(sizes))
        numbers = {clean(k): float(v) for k, v in values.items()}
        self._write({"policy": known, "step": step, "values": numbers})

    def record(self, path: Path) -> None:
        """The file that this run is a copy of: replay finds it by its hash."""
        self.tags({path.name: self._hash(path)})

    def trajectory(self, row: Mapping[str, object], step: int) -> None:
        """A row of trajectories.jsonl as a trace."""
        self._write({"trace": dict(row), "step": step})

    def cached(self, made_from: Mapping[str, str]) -> None:
        """Stages that did not run, each with the fingerprint of the run that made its output."""
        self._write({"cached": dict(made_from)})

    def artifact(self, path: Path | str) -> None:
        """Copies a (small) file or folder now: its place may be gone when it is uploaded."""
        if self._journal is None:
            return
        source, copy = Path(path), self.path.with_suffix("") / Path(path).name
        try:
            copy.parent.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, dirs_exist_ok=True)
            else:
                shutil.copy2(source, copy)
        except OSError as e:
            self._give_up(e)
            return
        self._write({"artifact": copy.name})

    def close(self, status: str) -> None:
        self._write({"close": status})
        if self._journal is None:
            return
        self._journal.close()
        self._journal = None
        error = self.path.parent / "error"
        if error.is_file() and error.stat().st_mtime >= self.started:
            logging.getLogger(__name__).warning(
                "tracking: %s; the journals in %s are kept and sent again",
                error.read_text(),
                error.parent,
            )

    def _hash(self, path: Path) -> str:
        if self._journal is None:
            return ""
        try:
            return files.content_hash(path)
        except (files.BadInput, OSError) as e:
            logging.getLogger(__name__).warning("tracking: no hash of %s: %s", path, e)
            return "unknown"

    def _write(self, event: dict[str, object]) -> None:
        if self._journal is None:
            return
        try:
            self._journal.write(json.dumps({"ms": time.time_ns() // 10**6, **event}) + "\n")
            self._journal.flush()
        except OSError as e:
            self._give_up(e)

    def _give_up(self, error: OSError) -> None:
        logging.getLogger(__name__).warning("tracking: %s; this stage goes on untracked", error)
        self._journal = None


class NullRun(Run):
    """Takes everything, keeps nothing."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))


def open_run(
    params: Params,
    label: str,
    folder: Path = FOLDER,
    *,
    experiment: str | None = None,
    key: Mapping[str, str] | None = None,
    once: bool = False,
) -> Run:
    """The run of one stage, e.g. "train@memsearcher", below the run of its pipeline. Never raises.

    With a `key` it stands alone, and a run of its experiment that carries these tags is taken up
    and not made again; with `once` nothing is added to it. No uploader is started for that: it is
    for `replay`, which sends by itself.
    """
    if not params.tracking.enabled:
        return NullRun()
    run = Run(folder / f"{time.time_ns():x}-{os.getpid()}.jsonl")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run._journal = open(run.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        me = psutil.Process()
        run._write(
            {
                "start": label,
                "uri": uri(),
                "experiment": experiment or params.tracking.experiment,
                "pipeline": None if key else os.environ.get(PIPELINE) or _above(me),
                "key": dict(key or {}),
                "once": once,
                "writer": [me.pid, me.create_time()],
            }
        )
        run.tags(_provenance())
        if not once:
            start_uploader(folder)
    except OSError as e:
        run._give_up(e)
    return run


def journal_results(params: Params, root: Path = ROOT, folder: Path = FOLDER) -> int:
    """Journals of the training runs whose metrics.jsonl lies in results/, for servers that have no
    run of it. Returns how many."""
    found = sorted(path for kind in KINDS for path in (root / "results" / kind).glob(RECORDS))
    for path in found:
        label = f"{path.parent.parent.name}@{path.parent.name}"
        run = open_run(params, label, folder, key={path.name: files.sha256(path)}, once=True)
        run.tags({"stage": label, "replayed": "true"})
        for row in files.read_jsonl(path):
            phase = f"{row['phase']}_" if "phase" in row else ""
            numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
            run.metrics({phase + k: v for k, v in numbers.items()}, step=row["step"])
        run.close("FINISHED")
    return len(found)


def links(pipeline: str, ran: Collection[str], wait_s: float, folder: Path = FOLDER) -> dict:
    """{"experiment", "run", "stages": {label: run}} on MLflow, as far as the uploader knows within
    `wait_s`: the runs of the stages that ran, and of those that made what was cached."""
    path, end = links_file(pipeline, folder), time.monotonic() + wait_s
    while True:
        known = files.read_json(path) if path.is_file() else {}
        whole = known.get("whole", False) and set(ran) <= set(known["stages"])
        if whole or time.monotonic() > end:
            return known
        time.sleep(0.1)


def links_file(pipeline: str, folder: Path) -> Path:
    return folder / "links" / f"{pipeline}.json"


def start_uploader(folder: Path = FOLDER) -> None:
    """A no-op where one is running: the second finds the first one's lock and ends at once. The
    shell detaches it, so that it is nobody's child and no stage, flow or DVC waits for it."""
    script = 'exec "$0" -m memsearcher.uploader "$1" >/dev/null 2>>"$1/uploader.log" &'
    subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


def clean(name: str) -> str:
    """A name as MLflow takes it: plain characters, and a path that is its own normal form.

    >>> clean("em/2wiki (dev)"), clean("../a//b/./c")
    ('em/2wiki _dev_', 'a/b/c')
    """
    plain = re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)
    parts = [part for part in plain.split("/") if part.strip(". ")]
    return "/".join(parts)[:250].rstrip("/") or "_"


def _dotted(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _text(value: object) -> str:
    """1024 and 1024.0 are one value: MLflow refuses a parameter that changes its spelling."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:6000]


def _above(me: psutil.Process) -> str:
    """Names the nearest `dvc` above this process, or the process itself."""
    try:
        for process in me.parents():
            if any(Path(word).name == "dvc" for word in process.cmdline()[:3]):
                return f"{process.pid}-{process.create_time():.0f}"
    except psutil.Error:  # an ancestor ended meanwhile
        pass
    return f"{me.pid}-{me.create_time():.0f}"


def _provenance() -> dict[str, str]:
    """Which code and which inputs: git commit, uncommitted changes, hash of dvc.lock."""
    tags = {}
    if (commit := _git("rev-parse", "HEAD")) is not None:
        tags["mlflow.source.git.commit"] = commit
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!dvc.lock")
        tags["git.dirty"] = str(bool(changed)).lower()
    lock = ROOT / "dvc.lock"
    tags["dvc.lock"] = files.sha256(lock) if lock.is_file() else "none"
    return tags


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
