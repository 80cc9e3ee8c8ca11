"""What every stage has around its work: parameters, a place to journal, signals, one MLflow run.

A stage file declares a `Stage` (the same parameters and dependencies as its entry in dvc.yaml; a
test compares them) and a `run(job)`; `main` does the rest. Ends: 0 done, 2 the input is wrong (one
line says what), 130 or 143 interrupted, 1 broken machinery with its traceback.
"""

import argparse
import errno
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

from memsearcher import files, tracking
from memsearcher.files import ROOT, BadInput
from memsearcher.params import Params, load, read_yaml

SHELLS = ("sh", "dash", "bash", "zsh", "fish")
GRACE_S = 10  # after SIGTERM or Ctrl-C; whatever still runs then is killed


@dataclass(frozen=True)
class Stage:
    """`params`: dotted keys of params.yaml; `deps`: paths. Both may hold {item}."""

    name: str
    params: tuple[str, ...]
    deps: Callable[[Params, str | None], tuple[str, ...]] | tuple[str, ...] = ()
    items: Callable[[Params], list[str]] | None = None


@dataclass
class Job:
    """One run of one stage. Paths are relative to the repository, the working directory."""

    stage: Stage
    params: Params
    item: str | None
    track: tracking.Run
    started: float = field(default_factory=time.monotonic)

    @property
    def label(self) -> str:
        return self.stage.name if self.item is None else f"{self.stage.name}@{self.item}"

    @property
    def deps(self) -> tuple[str, ...]:
        deps = self.stage.deps
        return deps(self.params, self.item) if callable(deps) else deps

    @cached_property
    def chosen(self) -> dict[str, object]:
        """The parameters that this stage depends on, by their dotted keys."""
        chosen: dict[str, object] = {}
        for key in (key.format(item=self.item) for key in self.stage.params):
            node = asdict(self.params)
            for part in key.split("."):
                node = node[part]
            chosen[key] = node
        return chosen

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the stage's parameters, inputs and code version: a retry finds its own work,
        another ablation cell never does."""
        version = read_yaml(ROOT / "code_versions.yaml")[self.stage.name]["version"]
        inputs = {dep: files.content_hash(Path(dep)) for dep in self.deps}
        fingerprint = files.digest([self.label, version, self.chosen, inputs])
        self.track.tags({"fingerprint": fingerprint})
        return fingerprint

    @cached_property
    def work(self) -> Path:
        """work/<stage>/<fingerprint>/: the journal of this very job, kept until it is published.
        Of other fingerprints of the stage the three youngest stay, older ones are removed."""
        parent = Path("work") / self.label
        mine = parent / self.fingerprint
        mine.mkdir(parents=True, exist_ok=True)
        os.utime(mine)
        others = [p for p in parent.iterdir() if p != mine and p.is_dir()]
        for old in sorted(others, key=lambda p: p.stat().st_mtime, reverse=True)[3:]:
            files.remove(old)
        return mine

    def say(self, text: str) -> None:
        print(f"{self.label}: {text}", flush=True)


def main(stage: Stage, run: Callable[[Job], None]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m stages.{stage.name}", description=run.__doc__)
    if stage.items is not None:
        parser.add_argument("item")
    item = getattr(parser.parse_args(), "item", None)
    os.chdir(ROOT)
    _handle_signals()
    _die_with_dvc()
    try:
        params = load()
        if stage.items is not None and item not in stage.items(params):
            raise BadInput(f"no {item!r} in params.yaml, only {stage.items(params)}")
        _environment(params)
        sys.exit(_work(stage, run, params, item))
    except BadInput as e:
        print(f"{stage.name}: error: {e}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        print(
            f"{stage.name}: error: no space left on the disk of {e.filename or ROOT}",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{stage.name}: interrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)


def _work(stage: Stage, run: Callable[[Job], None], params: Params, item: str | None) -> int:
    job = Job(stage, params, item, tracking.NullRun())
    memory = _PeakMemory()
    status = "FAILED"
    try:
        job.track = tracking.open_run(params, job.label)
        job.track.params(job.chosen)
        run(job)
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        _end_children()
        seconds, peak_mib = time.monotonic() - job.started, memory.stop()
        row = {"stage": job.label, "status": status, "seconds": round(seconds, 1)}
        row |= {
            "peak_mib": round(peak_mib),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        Path("work").mkdir(exist_ok=True)
        with open("work/stages.jsonl", "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
        job.track.metrics({"stage_seconds": seconds, "peak_memory_mib": peak_mib})
        job.track.close(status)
        print(
            f"{job.label}: {status.lower()} in {seconds:.0f} s, peak memory {peak_mib:,.0f} MiB",
            flush=True,
        )
    return 0


def _environment(params: Params) -> None:
    """Set before anything heavy is imported. Two OpenMP pools on two cores stall each other, so one
    number holds for every library of the process."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(params.engine.threads))
    # A thread that spins for long takes another's core; one that sleeps at once is woken for every
    # small matrix: a training step of the demo then takes 1.7 times as long (LOG.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    online = {
        params.corpus.kind == "wiki18",
        params.questions.kind == "flashrag",
        params.policy.source == "hub",
        any(str(entry.model).startswith("hub:") for entry in params.policies.values()),
    }
    if True not in online:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _die_with_dvc() -> None:
    """SIGTERM when DVC dies, however it dies: it does not pass signals on to its commands, and the
    shell that it starts them in may stay between. Run by hand, a stage depends on nobody."""
    if "DVC_STAGE" not in os.environ:
        return
    parents = (p for p in psutil.Process().parents() if p.name() not in SHELLS)
    dvc = next(parents, None)
    if dvc is None or not any("dvc" in word for word in dvc.cmdline()):
        sys.exit(128 + signal.SIGTERM)  # it died while Python was starting
    threading.Thread(target=_follow, args=(os.pidfd_open(dvc.pid),), daemon=True).start()


def _follow(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def _handle_signals() -> None:
    """The handlers unwind the stage. Python runs them when the main thread is back from C, which
    may be minutes; so the deadline starts in a thread that the signal itself wakes."""
    ends = socket.socketpair()
    ends[1].setblocking(False)
    signal.set_wakeup_fd(ends[1].fileno())
    threading.Thread(target=_deadline, args=ends, daemon=True).start()

    def stop(number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _deadline(woken: socket.socket, _wake: socket.socket) -> None:
    number = woken.recv(1)[0]
    time.sleep(GRACE_S)
    _end_children(grace_s=1)
    os._exit(128 + number)


def _end_children(grace_s: float = 5) -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    _, alive = psutil.wait_procs(children, timeout=grace_s)
    for child in alive:
        with suppress(psutil.NoSuchProcess):
            child.kill()


class _PeakMemory:
    """Largest sum of resident memory over this process and its children, looked at every second."""

    def __init__(self) -> None:
        self._peak = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done.wait(1.0):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self._peak = max(self._peak, total / 2**20)

    def stop(self) -> float:
        """MiB. A stage shorter than a second is known by its own high-water mark."""
        self._done.set()
        self._thread.join()
        return max(self._peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
