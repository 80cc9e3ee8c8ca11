"""DVC's graph as plain data, and how one of its stages is run and ended. No edge is said twice."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import networkx
import psutil
from dvc.repo import Repo

from memsearcher.files import ROOT

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
    fresh: bool


class StageFailed(Exception):
    """`code` is the stage's own exit code; DVC would make 255 of it."""

    def __init__(self, name: str, code: int, said: str) -> None:
        super().__init__(f"{name}: exit {code}{': ' + said if said else ''}")
        self.code = code


def nodes() -> list[Node]:
    """Stages in an order in which they can run. Fresh: nothing that it reads has or will change."""
    repo = Repo(str(ROOT))
    graph = repo.index.graph
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
            fresh=stage.addressing not in changed and all(found[name].fresh for name in after),
        )
    repo.close()
    return list(found.values())


class Processes:
    """What the flow has started and must end. A signal ends every group, then the flow."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._stopping = False

    def repro(self, name: str, on_line: Callable[[str], None]) -> None:
        """`dvc repro` of one stage in a process group of its own. Its output goes to the terminal
        as it comes, progress bars and all, and line by line to `on_line`. Raises StageFailed."""
        if self._stopping:
            raise StageFailed(name, 130, "interrupted")
        with subprocess.Popen(
            [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", name],
            cwd=ROOT,
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

    @staticmethod
    def _bring_back(name: str) -> None:
        """DVC removes a stage's outs before it runs. A failure costs nobody the earlier ones: they
        are in the cache, where there were any."""
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", "checkout", "--force", name]
        quiet = subprocess.DEVNULL
        subprocess.run(command, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=quiet, check=False)

    def end(self) -> None:
        """SIGINT to every group (DVC then still lets go of its locks), SIGKILL to what remains."""
        self._stopping = True
        groups = set(self._groups)
        members = [psutil.Process(pid) for pid in groups if psutil.pid_exists(pid)]
        members += [child for member in list(members) for child in member.children(recursive=True)]
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
        """Main thread only. Whatever Prefect is waiting for then, the flow is gone within 15 s."""

        def stop(number: int, _frame: object) -> None:
            if self._stopping:
                return
            self._stopping = True
            threading.Thread(target=self._leave, args=(128 + number,), daemon=True).start()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(128 + number)

        old = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _leave(self, code: int) -> None:
        self.end()
        time.sleep(2)  # Prefect may still write down how it ended
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(code)


def stage_environment() -> dict[str, str]:
    """`python` in dvc.yaml is this very Python, activated or not."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


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
