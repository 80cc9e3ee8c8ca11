"""DVC's graph as plain data, and how one of its stages is run and ended. No edge is said twice.

`root` is the working tree of the pipeline: this repository, or a worktree of it (workspace.py).
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import networkx
import psutil
from dvc.repo import Repo
from dvc.stage import Stage
from prefect.exceptions import TerminationSignal

from memsearcher import tracking
from memsearcher.files import ROOT, BadInput
from memsearcher.params import load
from memsearcher.tracking import NullRun
from stages.frame import Job

GRACE_S = 11  # a stage ends within 10 s of a signal (stages/frame.py); then it is killed
ADVICE = r"\s*$|\s+(git add|dvc config) |To (track|enable) |Use `dvc push|\w+ing lock file "
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Node:
    """One stage of dvc.yaml, with `after`: the stages whose outs it reads."""

    name: str
    desc: str
    needs: str
    retries: int
    after: tuple[str, ...]
    force: bool
    fresh: bool


class StageFailed(Exception):
    """`code` is the stage's own exit code; DVC would make 255 of it."""

    def __init__(self, name: str, code: int, said: str) -> None:
        super().__init__(f"{name}: exit {code}{': ' + said if said else ''}")
        self.code = code


def nodes(
    root: Path = ROOT, targets: Collection[str] = (), force: Collection[str] = ()
) -> list[Node]:
    """Stages in an order in which they can run. Fresh: nothing that it reads has or will change.

    `targets`: only these and what they need; a name without its @item means all of its items.
    `force`: these are never fresh.
    """
    with chdir(root):  # DVC names stages as they are seen from here
        return _nodes(targets, force)


def _nodes(targets: Collection[str], force: Collection[str]) -> list[Node]:
    repo = Repo()
    graph = repo.index.graph
    known = {name for stage in graph for name in _names(stage)}
    if unknown := sorted({*targets, *force} - known):
        raise BadInput(
            f"dvc.yaml has no stage {', '.join(unknown)}, only {', '.join(sorted(known))}"
        )
    if targets:
        asked = [stage for stage in graph if _names(stage) & set(targets)]
        graph = graph.subgraph(
            {*asked, *(s for a in asked for s in networkx.descendants(graph, a))}
        )
    changed = set(repo.status())
    found: dict[str, Node] = {}
    for stage in reversed(list(networkx.topological_sort(graph))):
        after = tuple(dep.addressing for dep in graph.successors(stage))
        meta = stage.meta or {}
        found[stage.addressing] = Node(
            name=stage.addressing,
            desc=stage.desc or "",
            needs=str(meta.get("needs", "cpu")),
            retries=int(meta.get("retries", 0)),
            after=after,
            force=bool(_names(stage) & set(force)),
            fresh=not _names(stage) & {*changed, *force} and all(found[n].fresh for n in after),
        )
    repo.close()
    return list(found.values())


def _names(stage: Stage) -> set[str]:
    return {stage.addressing, stage.addressing.split("@")[0]}


def fingerprints(names: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """What each of these stages is known by on MLflow. Left out: stages that are not ours, and
    those whose inputs are not there."""
    found = {}
    with chdir(root):
        params = load(root / "params.yaml")
        for label in names:
            name, _, item = label.partition("@")
            with suppress(BadInput, ModuleNotFoundError):
                stage = import_module(f"stages.{name}").STAGE
                found[label] = Job(stage, params, item or None, NullRun()).fingerprint
    return found


class Processes:
    """What the flow has started and must end. A signal ends every group, then the flow."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._groups: set[int] = set()
        self._stopping = False
        self._ended = threading.Event()

    def repro(self, name: str, on_line: Callable[[str], None], *, force: bool = False) -> None:
        """`dvc repro` of one stage in a process group of its own. Its output goes to the terminal
        as it comes, progress bars and all, and line by line to `on_line`. Raises StageFailed."""
        if self._stopping:
            raise StageFailed(name, 130, "interrupted")
        words = ["repro", "--single-item", *(["--force"] if force else []), name]
        with subprocess.Popen(
            [sys.executable, "-m", "dvc", "--wait-for-lock", *words],
            cwd=self._root,
            env=stage_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_die_with_flow,
        ) as process:
            self._groups.add(process.pid)
            said, code = "", None
            for line in _lines(process):
                on_line(line)
                if found := re.search(r"failed to run: .*, exited with (-?\d+)", line):
                    code = int(found[1])
                elif line.strip() and code is None:
                    said = line.split(": error: ", 1)[-1]  # the last word of the stage, not of DVC
            process.wait()
            self._groups.discard(process.pid)
        if self._stopping:
            raise StageFailed(name, 130, "interrupted")
        if process.returncode:
            self._bring_back(name)
            raise StageFailed(name, code if code is not None else process.returncode, said)

    def _bring_back(self, name: str) -> None:
        """DVC removes a stage's outs before it runs. A failure costs nobody the earlier ones: they
        are in the cache, where there were any."""
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", "checkout", "--force", name]
        quiet = subprocess.DEVNULL
        subprocess.run(
            command, cwd=self._root, stdin=quiet, stdout=quiet, stderr=quiet, check=False
        )

    def end(self) -> None:
        """SIGINT to every group (DVC then still lets go of its locks), SIGKILL to what remains."""
        self._stopping = True
        groups = set(self._groups)
        members: list[psutil.Process] = []
        for group in groups:
            with suppress(psutil.NoSuchProcess):
                leader = psutil.Process(group)
                members += [leader, *leader.children(recursive=True)]
        for group in groups:
            _signal_group(group, signal.SIGINT)
        _, alive = psutil.wait_procs(members, timeout=GRACE_S)
        for group in groups:
            _signal_group(group, signal.SIGKILL)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """Main thread only. Ctrl-C and SIGTERM come as exceptions, the latter through Prefect's own
        handler: replaced, it could not tell a cancellation from a crash. All groups end before the
        flow does, and whatever Prefect is waiting for then, the flow is gone within 15 s."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, TerminationSignal) as e:
            number = signal.SIGINT if isinstance(e, KeyboardInterrupt) else signal.SIGTERM
            threading.Thread(target=self._leave, args=(128 + number,), daemon=True).start()
            self._ended.wait()
            raise
        finally:
            if self._groups and not self._stopping:  # the flow fails for reasons of its own
                self.end()

    def _leave(self, code: int) -> None:
        self.end()
        self._ended.set()
        time.sleep(3)  # Prefect may still write down how it ended
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(code)


def stage_environment() -> dict[str, str]:
    """`python` in dvc.yaml is this very Python, activated or not; worktrees track in one place."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    place = {"MLFLOW_TRACKING_URI": tracking.uri(), tracking.PLACE: str(tracking.FOLDER)}
    return {**os.environ, **place, "PATH": path, "PYTHONUNBUFFERED": "1"}


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yields whole lines, each as its last redrawing left it, without DVC's advice. The terminal
    gets the same, and redrawings (progress bars) as they come."""
    assert process.stdout is not None
    pending, shown = b"", 0
    while chunk := os.read(process.stdout.fileno(), 65536):
        *whole, rest = (pending + chunk).split(b"\n")
        for line in whole:
            text = line.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]
            if not re.match(ADVICE, text):
                _show(line[shown:] + b"\n")
                yield text
            shown = 0
        if b"\r" in rest:
            _show(rest[shown:])
            shown = len(rest)
        pending = rest
    if pending:
        _show(pending[shown:] + b"\n")
        yield pending.decode("utf-8", "replace")


def _show(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.flush()


def _die_with_flow() -> None:
    _libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also when the flow is killed outright


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
