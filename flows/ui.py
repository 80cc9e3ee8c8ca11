"""Prefect's and MLflow's pages on loopback, and a worker for the deployments, until Ctrl-C.

    python -m flows.ui        (make ui)

Registers the deployments of prefect.yaml and runs them when they are due or started on the page.
Flows that start meanwhile use this server and not a temporary one (flows/__init__.py finds it).
MEMSEARCHER_PREFECT_PORT and MEMSEARCHER_MLFLOW_PORT choose other ports than 4200 and 5000.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from flows import API_URL, MLFLOW_URL
from flows.lock import only_one
from memsearcher import files
from memsearcher.files import ROOT, BadInput

HOST = "127.0.0.1"
POOL = "memsearcher"  # as in prefect.yaml
PREFECT_PORT = int(os.environ.get("MEMSEARCHER_PREFECT_PORT", "4200"))
MLFLOW_PORT = int(os.environ.get("MEMSEARCHER_MLFLOW_PORT", "5000"))
SERVERS = {
    "Prefect": ["prefect", "server", "start", "--host", HOST, "--port", str(PREFECT_PORT)],
    "MLflow": [
        *["mlflow", "server", "--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1"],
        *["--backend-store-uri", f"sqlite:///{ROOT / 'mlflow.db'}"],
        *["--default-artifact-root", (ROOT / "mlartifacts").as_uri()],
    ],
}
PORTS = {"Prefect": PREFECT_PORT, "MLflow": MLFLOW_PORT}
REGISTER = (
    ["work-pool", "create", POOL, "--type", "process", "--overwrite"],
    ["--no-prompt", "deploy", "--all"],
)
WORKER = ["prefect", "worker", "start", "--pool", POOL, "--type", "process"]
Processes = dict[str, subprocess.Popen[bytes]]


def serve() -> int:
    """Runs all of it; when one ends or a signal comes, ends the others."""
    for name, port in PORTS.items():
        _require_free(name, port)
    logs = ROOT / ".prefect"
    logs.mkdir(exist_ok=True)
    started: Processes = {}
    try:
        for name, command in SERVERS.items():
            started[name] = _start(command, logs / f"{name.lower()}.log")
        for name, port in PORTS.items():
            if not _answers(port, started[name]):
                raise BadInput(f"{name} did not start; see {logs / f'{name.lower()}.log'}")
            print(f"{name:8} http://{HOST}:{port}", flush=True)
        for path, url in (
            (API_URL, f"http://{HOST}:{PREFECT_PORT}/api"),
            (MLFLOW_URL, f"http://{HOST}:{MLFLOW_PORT}"),
        ):
            with files.atomic_write(path) as f:
                f.write(url)
        close_dead_runs(f"http://{HOST}:{PREFECT_PORT}/api")
        _register(logs / "deploy.log")
        started["worker"] = _start(WORKER, logs / "worker.log")
        print(f"worker   runs the deployments of {ROOT / 'prefect.yaml'}", flush=True)
        while all(process.poll() is None for process in started.values()):
            time.sleep(0.5)
        dead = next(name for name, process in started.items() if process.poll() is not None)
        raise BadInput(f"{dead} has ended; see {logs / f'{dead.lower()}.log'}")
    except KeyboardInterrupt:
        return 0
    finally:
        API_URL.unlink(missing_ok=True)
        MLFLOW_URL.unlink(missing_ok=True)
        _end(started)


def _environment() -> dict[str, str]:
    """What the worker runs is this tree's code, with this Python, whatever it starts it from."""
    here = {"MEMSEARCHER_ROOT": str(ROOT), "PYTHONPATH": str(ROOT)}
    here["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes of 240 MB, unused here
    return {**os.environ, **here, "PREFECT_API_URL": f"http://{HOST}:{PREFECT_PORT}/api"}


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as f:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=f,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes through us, once, to whole groups
        )


def _register(log: Path) -> None:
    with open(log, "wb") as f:
        for words in REGISTER:
            command = [sys.executable, "-m", "prefect", *words]
            done = subprocess.run(
                command, cwd=ROOT, env=_environment(), stdout=f, stderr=f, check=False
            )
            if done.returncode:
                raise BadInput(f"prefect {words[0]} failed; see {log}")


def close_dead_runs(api: str) -> None:
    """What still counts as running although no flow holds the pipeline's lock died with an earlier
    server, and would keep its deployment's only place for ever."""
    from prefect.client import orchestration
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import State, StateType
    from prefect.states import Crashed

    alive = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    wanted = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=alive))
    try:
        with only_one(), orchestration.SyncPrefectClient(api) as client:  # repeats what gets a 503
            for run in client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(state=wanted)):
                why: State = Crashed(message="its process ended with an earlier server")
                client.set_flow_run_state(run.id, why, force=True)
                print(f"crashed  {run.name}, which an earlier server left behind", flush=True)
    except BadInput:  # a flow in another terminal works
        return


def _require_free(name: str, port: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError as e:
            raise BadInput(f"port {port} on {HOST}, which {name} needs: {e.strerror}") from e


def _answers(port: int, process: subprocess.Popen[bytes], timeout_s: float = 300) -> bool:
    end = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            time.sleep(0.3)
        else:
            return True
    return False


def _end(started: Processes) -> None:
    """The worker first, with the flow run in its group, which ends its stages (its last state may
    not reach Prefect: see `close_dead_runs`). An idle one would take up to 15 s, and gets 5."""
    for name in ("worker", *SERVERS):
        if name not in started or started[name].poll() is not None:
            continue
        leader = psutil.Process(started[name].pid)
        members = [leader, *leader.children()]
        patience_s = 20 if name == "worker" and len(members) > 1 else 5
        for number, grace_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError):
                os.killpg(leader.pid, number)
            psutil.wait_procs(members, timeout=grace_s)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's & ignores it
        signal.signal(number, _interrupt)
    try:
        sys.exit(serve())
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
