"""One pipeline at a time on a machine."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from memsearcher.files import ROOT, BadInput

_holding = threading.local()


@contextmanager
def only_one() -> Iterator[None]:
    """The pipeline's lock, for a flow and the flows that it calls, whatever worktree they are in:
    the machine is one. It is the kernel's: a dead holder holds nothing."""
    if getattr(_holding, "it", False):
        yield
        return
    folder = ROOT / "work"
    folder.mkdir(exist_ok=True)
    holder = folder / "pipeline.holder.json"
    try:
        with FileLock(folder / "pipeline.lock", timeout=0):
            holder.write_text(json.dumps({"pid": os.getpid(), "since": time.time()}))
            _holding.it = True
            try:
                yield
            finally:
                _holding.it = False
                holder.unlink(missing_ok=True)
    except Timeout:
        raise BadInput(f"the pipeline is busy: {_describe(holder)}") from None


def _describe(holder: Path) -> str:
    if not holder.is_file():
        return "a process that is starting or ending holds it"
    said = json.loads(holder.read_text())
    minutes = (time.time() - said["since"]) / 60
    try:
        command = " ".join(psutil.Process(said["pid"]).cmdline())
    except psutil.NoSuchProcess:
        command = "a process that is ending"
    return f"process {said['pid']} ({command}) holds it since {minutes:.0f} min"
