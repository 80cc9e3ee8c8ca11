"""What a stage tells MLflow: a journal on disk that one uploader sends on, and nobody waits for.

MLflow takes seconds to import and to open its store, a server may hang, and two processes that
open a fresh SQLite store at once break it. So a stage only appends to work/tracking/<run>.jsonl,
and one process (memsearcher/uploader.py, started on demand, outside every process group) turns
journals into runs. A store that is down costs a stage nothing: its journal is sent another time.

One parent run per pipeline (the flow, or the `dvc` process above), one child per stage.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from memsearcher import files
from memsearcher.files import ROOT
from memsearcher.params import Params

FOLDER = ROOT / "work" / "tracking"
PIPELINE = "MEMSEARCHER_PIPELINE"  # whoever starts several stages names them as one run with it


@dataclass
class Run:
    """A journal that is being written. It is None after close and after the first failure: then
    every call is a no-op."""

    path: Path
    started: float = field(default_factory=time.time)
    _journal: IO[str] | None = None

    def metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        named = {clean(name): float(value) for name, value in values.items()}
        self._write({"metrics": named, "step": step or 0})

    def params(self, values: Mapping[str, object]) -> None:
        """Nested values become dotted names."""
        self._write({"params": {clean(k): _text(v) for k, v in _dotted(values).items()}})

    def tags(self, values: Mapping[str, str]) -> None:
        self._write({"tags": dict(values)})

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


def open_run(params: Params, label: str, folder: Path = FOLDER) -> Run:
    """The run of one stage, e.g. "train@memsearcher". Never raises."""
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
                "uri": os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{ROOT / 'mlflow.db'}",
                "experiment": params.tracking.experiment,
                "pipeline": os.environ.get(PIPELINE) or _above(me),
                "writer": [me.pid, me.create_time()],
            }
        )
        run.tags(_provenance())
        start_uploader(folder)
    except OSError as e:
        run._give_up(e)
    return run


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
    """A name as MLflow takes it.

    >>> clean("em/2wiki (dev)")
    'em/2wiki _dev_'
    """
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII).strip("/.")[:250] or "_"


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
