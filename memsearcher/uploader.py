"""Journals of work/tracking → MLflow runs. One process per repository, started by tracking.py.

    python -m memsearcher.uploader work/tracking    sends what is there, follows what is written

It ends LINGER_S after the last open journal. One that was stopped in between is sent again from its
first line: runs are found by tag and metrics carry their own time, so nothing doubles.
"""

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout

from memsearcher import files

if TYPE_CHECKING:
    from mlflow import MlflowClient

LINGER_S = 3.0
POLL_S = 0.5
STUCK_S = 12.0  # the longest that a server may keep this process from ending
OPENING_S = 60.0  # the same while a fresh database is made: stopped half way it would be broken


def main(folder: Path) -> None:
    """Whoever starts second ends at once. The first looks again after it has let go of the lock:
    a journal that began in between would else wait for the next stage."""
    while any(folder.glob("*.jsonl")):
        lock = FileLock(folder / "lock", timeout=0)
        try:
            with lock:
                _send_all(folder)
        except Timeout:
            return


def _send_all(folder: Path) -> None:
    try:
        _follow(folder)
    except BaseException as e:
        with files.atomic_write(folder / "error") as f:
            f.write(
                f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else e!r}"
            )
        raise
    (folder / "error").unlink(missing_ok=True)


def _follow(folder: Path) -> None:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    store = _Store()
    alive = _Watch(OPENING_S)
    try:
        _send_until_idle(folder, store, alive)
    finally:
        alive.limit_s = math.inf


def _send_until_idle(folder: Path, store: "_Store", alive: "_Watch") -> None:
    open_journals: dict[Path, _Journal] = {}
    while time.monotonic() - alive.seen < LINGER_S:
        for path in sorted(folder.glob("*.jsonl")):  # their names begin with the time
            if path not in open_journals:
                open_journals[path] = _Journal(path)
            journal = open_journals[path]
            if journal.send(store):
                del open_journals[path]
                files.remove(path.with_suffix(""))
                path.unlink()
                alive.seen = time.monotonic()
            elif journal.writer_lives():
                alive.seen = time.monotonic()
            alive.limit_s = STUCK_S
        time.sleep(POLL_S)


class _Watch:
    """Ends this process when for `limit_s` no stage has lived and no journal was done with; what
    is left stays. Only a server that hangs makes that happen."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.seen = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while time.monotonic() - self.seen < self.limit_s:
            time.sleep(1)
        os._exit(1)


class _Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._run: str | None = None
        self._start: dict = {}

    def writer_lives(self) -> bool:
        if not self._start:
            return False
        pid, born = self._start["writer"]
        try:
            return psutil.Process(pid).create_time() == born
        except psutil.NoSuchProcess:
            return False

    def send(self, store: "_Store") -> bool:
        """Sends the lines that are new. True when the run is over: closed, or its writer dead."""
        lives = self.writer_lives() or not self._start  # asked before reading: nothing comes after
        with open(self._path, "rb") as f:
            f.seek(self._offset)
            data = f.read()
        data = data[: data.rfind(b"\n") + 1]  # a line that is being written is for next time
        self._offset += len(data)
        events = [json.loads(line) for line in data.splitlines()]
        if not self._start and events:
            self._start = events[0]
            self._run = store.begin(self._path.stem, self._start)
        if self._run is None:
            return time.time() - self._path.stat().st_mtime > STUCK_S  # died before its first line
        over = next((e for e in events if "close" in e), None)
        if over is None and not lives:
            over = {"close": "KILLED", "ms": int(self._path.stat().st_mtime * 1000)}
        store.add(self._start, self._run, events, self._path.with_suffix(""))
        if over is not None:
            store.end(self._start, self._run, over["close"], over["ms"])
        return over is not None


class _Store:
    """MLflow through explicit clients: no active run, so a run id in the environment is nothing."""

    def __init__(self) -> None:
        self._clients: dict[str, MlflowClient] = {}
        self._experiments: dict[tuple[str, str], str] = {}
        self._parents: dict[tuple[str, str], str] = {}

    def _client(self, uri: str) -> "MlflowClient":
        from mlflow import MlflowClient

        if uri not in self._clients:
            self._clients[uri] = MlflowClient(tracking_uri=uri)
        return self._clients[uri]

    def _experiment(self, uri: str, name: str) -> str:
        if (uri, name) not in self._experiments:
            client = self._client(uri)
            found = client.get_experiment_by_name(name)
            place = None  # a server has its own place for artifacts
            if uri.startswith("sqlite:///"):
                place = (
                    Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts"
                ).as_uri()
            self._experiments[uri, name] = (
                found.experiment_id if found else client.create_experiment(name, place)
            )
        return self._experiments[uri, name]

    def _run(self, start: dict, tags: dict[str, str], name: str) -> str:
        """The run that carries the first of `tags`; made when there is none."""
        client, experiment = (
            self._client(start["uri"]),
            self._experiment(start["uri"], start["experiment"]),
        )
        key, value = next(iter(tags.items()))
        found = client.search_runs([experiment], f"tags.`{key}` = '{value}'", max_results=1)
        if found:
            return found[0].info.run_id
        return client.create_run(experiment, start["ms"], tags, name).info.run_id

    def begin(self, journal: str, start: dict) -> str:
        """Starts the child run of a stage below the run of its pipeline."""
        key = (start["uri"], start["pipeline"])
        if key not in self._parents:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(start["ms"] / 1000))
            self._parents[key] = self._run(
                start, {"pipeline": start["pipeline"]}, f"pipeline {when}"
            )
        tags = {
            "journal": journal,
            "mlflow.parentRunId": self._parents[key],
            "stage": start["start"],
        }
        run = self._run(start, tags, start["start"])
        self._client(start["uri"]).update_run(self._parents[key], status="RUNNING")
        return run

    def add(self, start: dict, run: str, events: list[dict], copies: Path) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics, params, tags, artifacts = [], [], [], []
        for e in events:
            metrics += [Metric(k, v, e["ms"], e["step"]) for k, v in e.get("metrics", {}).items()]
            params += [Param(k, v) for k, v in e.get("params", {}).items()]
            tags += [RunTag(k, v) for k, v in e.get("tags", {}).items()]
            artifacts += [e["artifact"]] if "artifact" in e else []
        client = self._client(start["uri"])
        for i in range(
            0, len(metrics), 900
        ):  # MLflow takes 1,000 metrics or 100 of the others at once
            client.log_batch(run, metrics=metrics[i : i + 900])
        for i in range(0, len(params), 100):
            client.log_batch(run, params=params[i : i + 100])
        if tags:
            client.log_batch(run, tags=tags)
        for name in artifacts:
            copy = copies / name
            if copy.is_dir():
                client.log_artifacts(run, str(copy), name)
            elif copy.is_file():
                client.log_artifact(run, str(copy))

    def end(self, start: dict, run: str, status: str, ms: int) -> None:
        """Ends a stage's run, and its pipeline's for as long as no other stage begins."""
        client, parent = self._client(start["uri"]), self._parents[start["uri"], start["pipeline"]]
        client.set_terminated(run, status, ms)
        experiment = self._experiment(start["uri"], start["experiment"])
        children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
        seen = {child.info.status for child in children}
        if "RUNNING" not in seen:
            worst = next(s for s in ("FAILED", "KILLED", "FINISHED") if s in seen)
            client.set_terminated(parent, worst, ms)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
