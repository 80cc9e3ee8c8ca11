"""Journals of work/tracking → MLflow runs. One process per repository, started by tracking.py.

    python -m memsearcher.uploader work/tracking    sends what is there, follows what is written

It ends LINGER_S after the last open journal. One that was stopped in between is sent again from its
first line: nothing doubles (store.py). While a stage lives it waits for a server that is down; what
it could not send stays, for the next stage or for `memsearcher tracking replay`. A journal that
MLflow refuses is set aside, so that it holds up no other.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from memsearcher import files, store
from memsearcher.files import BadInput
from memsearcher.store import Opened, Store

LINGER_S = 3.0
POLL_S = 0.5
STUCK_S = 600.0  # without any progress; a request gives up long before (store.quiet_environment)
DEAD_S = 12.0  # a journal without a first line for so long has lost its writer
PATIENCE_S = 30.0  # between two tries, at most, while a stage lives
SYSTEM_EVERY_S = 10.0
REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}


def main(folder: Path) -> None:
    """Whoever starts second ends at once. The first looks again after it has let go of the lock:
    a journal that began in between would else wait for the next stage."""
    while any(folder.glob("*.jsonl")):
        try:
            with FileLock(folder / "lock", timeout=0):
                _follow(folder)
        except Timeout:
            return


def replay(folder: Path, uri: str | None = None) -> tuple[int, int]:
    """Sends all closed journals now, to `uri` where it is given: (sent, left). Raises what the
    server says; what is left are journals of stages that still run."""
    store.quiet_environment()
    try:
        with FileLock(folder / "lock", timeout=DEAD_S):
            journals = {path: _Journal(path) for path in sorted(folder.glob("*.jsonl"))}
            sent = sum(_step(each, Store(folder, uri)) for each in journals.values())
    except Timeout:
        raise BadInput(f"{folder}: another process is sending these journals") from None
    return sent, len(journals) - sent


def _follow(folder: Path) -> None:
    store.quiet_environment()
    alive = _Watch()
    wait_s = 1.0
    try:
        while True:
            try:
                _send_until_idle(folder, Store(folder), alive)
                (folder / "error").unlink(missing_ok=True)
                return
            except Exception as e:  # whatever a server, a driver or a network may raise
                _say(folder, e)
                if not any(_Journal(path).writer_lives() for path in folder.glob("*.jsonl")):
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, PATIENCE_S)
            alive.seen = time.monotonic()
    finally:
        alive.seen = math.inf


def _say(folder: Path, error: BaseException) -> None:
    said = str(error).strip().splitlines()
    with files.atomic_write(folder / "error") as f:
        f.write(f"{type(error).__name__}: {said[0] if said else repr(error)}")


def _send_until_idle(folder: Path, to: Store, alive: "_Watch") -> None:
    psutil.cpu_percent()  # the first call measures nothing
    journals: dict[Path, _Journal] = {}
    while time.monotonic() - alive.seen < LINGER_S:
        for path in sorted(folder.glob("*.jsonl")):  # their names begin with the time
            journal = journals.setdefault(path, _Journal(path))
            if _step(journal, to):
                del journals[path]
                alive.seen = time.monotonic()
            elif journal.writer_lives():
                alive.seen = time.monotonic()
        time.sleep(POLL_S)


def _step(journal: "_Journal", to: Store) -> bool:
    """Sends what is new of a journal. True when it is done with: sent to its end, or set aside."""
    from mlflow.exceptions import MlflowException

    try:
        if not journal.send(to):
            return False
    except (json.JSONDecodeError, KeyError) as e:
        journal.set_aside(to, f"not a journal of ours: {e!r}")
    except MlflowException as e:
        if e.error_code not in REFUSED:
            raise
        journal.set_aside(to, str(e))
    else:
        journal.remove()
    return True


class _Watch:
    """Ends this process when for STUCK_S no stage was seen alive and no journal was done with; what
    is left stays. Only a driver that hangs makes that happen."""

    def __init__(self) -> None:
        self.seen = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while time.monotonic() - self.seen < STUCK_S:
            time.sleep(1)
        os._exit(1)


class _Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._run: Opened | None = None
        self._start: dict = {}
        self._sampled = 0.0

    def writer_lives(self) -> bool:
        if not self._start:
            with open(self._path, "rb") as f:
                line = f.readline()
            if not line.endswith(b"\n"):
                return False
            self._start = json.loads(line)
        pid, born = self._start["writer"]
        try:
            return psutil.Process(pid).create_time() == born
        except psutil.NoSuchProcess:
            return False

    def send(self, to: Store) -> bool:
        """Sends the lines that are new. True when the run is over: closed, or its writer dead."""
        lives = self.writer_lives()  # asked before reading: nothing comes after
        with open(self._path, "rb") as f:
            f.seek(self._offset)
            data = f.read()
        data = data[: data.rfind(b"\n") + 1]  # a line that is being written is for next time
        events = [json.loads(line) for line in data.splitlines()]
        if not self._start:
            return time.time() - self._path.stat().st_mtime > DEAD_S
        if self._run is None:
            self._run = to.begin(self._path.stem, self._start)
        if self._run.closed:
            return any("close" in e for e in events)
        over = next((e for e in events if "close" in e), None)
        if over is None and not lives:
            over = {"close": "KILLED", "ms": int(self._path.stat().st_mtime * 1000)}
        if over is None and time.monotonic() - self._sampled > SYSTEM_EVERY_S:
            self._sampled = time.monotonic()
            events.append(_machine(self._start["ms"]))
        self._run.add(events, self._path.with_suffix(""))
        self._offset += len(data)  # only now: what could not be sent is sent again
        if over is not None:
            to.end(self._start, self._run.id, over["close"], over["ms"])
        return over is not None

    def remove(self) -> None:
        files.remove(self._path.with_suffix(""))
        self._path.unlink()

    def set_aside(self, to: Store, why: str) -> None:
        if self._run is not None:
            to.end(self._start, self._run.id, "FAILED", time.time_ns() // 10**6)
        place = self._path.parent / "refused"
        place.mkdir(exist_ok=True)
        logging.getLogger(__name__).warning("%s is set aside in %s: %s", self._path, place, why)
        for path in (self._path, self._path.with_suffix("")):
            if path.exists():
                path.rename(place / path.name)


def _machine(since_ms: int) -> dict:
    """The machine while a stage runs, as MLflow samples it: system/… metrics by second."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    monitors = [CPUMonitor(), DiskMonitor()]
    with suppress(ImportError, RuntimeError):  # no GPU
        monitors.append(GPUMonitor())
    values: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        values |= {f"system/{k}": v for k, v in monitor.aggregate_metrics().items()}
    now = time.time_ns() // 10**6
    return {"ms": now, "metrics": values, "step": (now - since_ms) // 1000}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
