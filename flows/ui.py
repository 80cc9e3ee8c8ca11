"""Prefect's and MLflow's pages, on loopback, until Ctrl-C.

    python -m flows.ui        (make ui)

Flows that start meanwhile use this server and not a temporary one (flows/__init__.py finds it).
MEMSEARCHER_PREFECT_PORT and MEMSEARCHER_MLFLOW_PORT choose other ports than 4200 and 5000.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from flows import API_URL
from memsearcher import files
from memsearcher.files import ROOT, BadInput

HOST = "127.0.0.1"
PREFECT_PORT = int(os.environ.get("MEMSEARCHER_PREFECT_PORT", "4200"))
MLFLOW_PORT = int(os.environ.get("MEMSEARCHER_MLFLOW_PORT", "5000"))
COMMANDS = {
    "Prefect": ["prefect", "server", "start", "--host", HOST, "--port", str(PREFECT_PORT)],
    "MLflow": [
        *["mlflow", "server", "--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1"],
        *["--backend-store-uri", f"sqlite:///{ROOT / 'mlflow.db'}"],
        *["--default-artifact-root", (ROOT / "mlartifacts").as_uri()],
    ],
}


def serve() -> int:
    """Runs both; when one ends or a signal comes, ends the other."""
    for name, port in (("Prefect", PREFECT_PORT), ("MLflow", MLFLOW_PORT)):
        _require_free(name, port)
    (ROOT / ".prefect").mkdir(exist_ok=True)
    logs = {name: ROOT / ".prefect" / f"{name.lower()}.log" for name in COMMANDS}
    started = {}
    try:
        for name, command in COMMANDS.items():
            with open(logs[name], "wb") as log:
                started[name] = subprocess.Popen(
                    [sys.executable, "-m", *command],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C comes through us, once, to whole groups
                )
        for name, port in (("Prefect", PREFECT_PORT), ("MLflow", MLFLOW_PORT)):
            if not _answers(port, started[name]):
                raise BadInput(f"{name} did not start; see {logs[name]}")
            print(f"{name:8} http://{HOST}:{port}", flush=True)
        with files.atomic_write(API_URL) as f:
            f.write(f"http://{HOST}:{PREFECT_PORT}/api")
        while all(process.poll() is None for process in started.values()):
            time.sleep(0.5)
        dead = next(name for name, process in started.items() if process.poll() is not None)
        raise BadInput(f"{dead} has ended; see {logs[dead]}")
    except KeyboardInterrupt:
        return 0
    finally:
        API_URL.unlink(missing_ok=True)
        _end(list(started.values()))


def _require_free(name: str, port: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError as e:
            raise BadInput(f"port {port} on {HOST}, which {name} needs: {e.strerror}") from e


def _answers(port: int, process: subprocess.Popen[bytes], timeout_s: float = 120) -> bool:
    end = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            time.sleep(0.3)
        else:
            return True
    return False


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None or number == signal.SIGKILL:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
        end = time.monotonic() + 8
        for process in processes:
            try:
                process.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(serve())
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
