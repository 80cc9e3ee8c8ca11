"""What vLLM's spawned processes must know: our weight transfer, and whose death is theirs.

vLLM calls `register` through the entry point group vllm.general_plugins, in the process that opens
the engine and in every process that it spawns.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

OWNER = "MEMSEARCHER_ENGINE_OWNER"  # process id of whoever opened the engine; set while it starts
BACKEND = "memsearcher_shm"


def register() -> None:
    """Idempotent within a process only through vLLM's own guard: a second registration raises."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "memsearcher.engine.transfer", "SharedMemoryTransfer"
    )
    owner = os.environ.get(OWNER)
    if owner is not None and int(owner) != os.getpid():
        die_with_parent()


def die_with_parent() -> None:
    """SIGKILL when the parent dies, however it dies. The kernel watches the parent's thread that
    spawned this process, so an engine must be opened from a thread that outlives it."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent.pid:  # it died before the call
        os._exit(1)
