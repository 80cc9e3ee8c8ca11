"""What flows and tracking cost, and what a kill −9 leaves behind.

    python benchmarks/orchestration.py overhead  seconds of a cached flow, MLflow's share of a step
    python benchmarks/orchestration.py interval  a deployment of every minute, twice by itself
    python benchmarks/orchestration.py faults    kill −9 of each party during the smoke experiment

JSON lines: name, value, low, high, bound, holds. Works in a copy of this tree, made in a temporary
folder, in which the smoke experiment runs first.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import yaml
from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import plumbing  # noqa: E402
from plumbing import clone, environment, living, run, until  # noqa: E402

REPEATS = 3
STEPS = 2000  # calls of `Run.metrics` that are timed together
SERVE = "from flows.pipeline import pipeline; pipeline.serve(name='each-minute', interval=60)"

VICTIMS = ("stage", "dvc", "flow", "worker", "prefect", "mlflow")
TIMELESS = (
    *("data/questions/*.jsonl", "models/*/*/*.safetensors"),
    "results/evaluate/*/predictions.jsonl",
)


def tell(name: str, values: list[float], bound: float | None) -> None:
    value = sorted(values)[len(values) // 2]
    row: dict[str, object] = {"name": name, "value": round(value, 4)}
    row |= {"low": round(min(values), 4), "high": round(max(values), 4), "bound": bound}
    row["holds"] = None if bound is None else value <= bound
    print(json.dumps(row), flush=True)


def smoke(folder: Path) -> Path:
    """A copy in which smoke has run."""
    root = clone(folder / "copy")
    for words in (["flows.compose", "experiment=smoke"], ["dvc", "repro"]):
        done = run(root, *words, timeout_s=3600)
        assert done.returncode == 0, done.stdout[-4000:]
    return root


@contextmanager
def server(root: Path, kind: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A Prefect or an MLflow server of its own: (process, what clients are told)."""
    if kind == "prefect":
        settings = {"PREFECT_HOME": str(root / ".prefect")}
        settings["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
        words, health = ("prefect", "server", "start"), "/api/health"
    else:
        store = ("--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}")
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight idle processes
        words, health = ("mlflow", "server", "--workers", "1", *store), "/health"
    with plumbing.server(root, *words, health=health, **settings) as (process, url):
        yield process, url + health.removesuffix("/health")


def overhead(root: Path) -> None:
    def flow(**more: str) -> float:
        began = time.monotonic()
        done = run(root, "flows.pipeline", timeout_s=600, **more)
        assert done.returncode == 0, done.stdout
        return time.monotonic() - began

    flow()  # Prefect's database is made once
    tell("all-cached flow, temporary server, s", [flow() for _ in range(REPEATS)], 25)
    with server(root, "prefect") as (_, api):
        flow(PREFECT_API_URL=api)
        known = [flow(PREFECT_API_URL=api) for _ in range(REPEATS)]
    tell("all-cached flow, running server, s", known, 8)

    code = (
        "import sys, time, pathlib; from memsearcher import params, tracking\n"
        "run = tracking.open_run(params.load(), 'a', pathlib.Path(sys.argv[1]))\n"
        "record = {f'metric_{i}': 0.1 * i for i in range(50)}\n"
        "row = {'question_id': 'q', 'turns': ['x' * 2000] * 5}\n"
        "began = time.perf_counter()\n"
        f"for step in range({STEPS}):\n"
        "    run.metrics(record, step)\n"
        "    run.trajectory(row, step); run.trajectory(row, step)\n"
        f"print((time.perf_counter() - began) / {STEPS}); run.close('FINISHED')"
    )
    rows = [json.loads(line) for line in (root / "results/train/memsearcher/metrics.jsonl").open()]
    steps = [row["seconds"] for row in rows if "seconds" in row]
    shares = []
    for number in range(REPEATS):
        journal = root / "work" / f"timed-{number}"
        command = [sys.executable, "-c", code, str(journal)]
        done = subprocess.run(
            command, cwd=root, env=environment(root), capture_output=True, text=True, check=True
        )
        shares.append(float(done.stdout) / min(steps))
    tell("MLflow's share of the quickest smoke training step", shares, 0.02)


def interval(root: Path) -> None:
    began = datetime.now(UTC)  # the database may know of earlier flows
    with server(root, "prefect") as (_, api):
        command = [sys.executable, "-c", SERVE]
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment(root, PREFECT_API_URL=api),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: len(_completed(api, began)) >= 2, 400)
            runs = sorted(_completed(api, began), key=lambda each: each["start_time"])
            due = [datetime.fromisoformat(each["expected_start_time"]) for each in runs]
            tell("seconds between two runs", [(due[1] - due[0]).total_seconds()], 60)
            tasks = _asked(api, "task_runs/filter", flow_runs={"id": {"any_": [runs[1]["id"]]}})
            other = [task for task in tasks if task["state"]["name"] != "Cached"]
            tell("tasks of the second that were not cached", [float(len(other))], 0)
        finally:
            process.terminate()  # a shell's & ignores SIGINT
            process.wait(timeout=60)


def _completed(api: str, since: datetime) -> list[dict]:
    wanted = {"state": {"type": {"any_": ["COMPLETED"]}}, "start_time": {"after_": str(since)}}
    return _asked(api, "flow_runs/filter", flow_runs=wanted)


def _asked(api: str, what: str, **body: object) -> list[dict]:
    return httpx.post(f"{api}/{what}", json=body, timeout=30).raise_for_status().json()


def faults(root: Path, victims: Sequence[str] = VICTIMS) -> None:
    """Each party is killed while `train` works; then the next flow run has to finish with the
    artifacts of an undisturbed run (those that hold no time)."""
    undisturbed = _artifacts(root)
    for victim in victims:
        began = time.monotonic()
        with server(root, "prefect") as (prefect, api), server(root, "mlflow") as (mlflow, uri):
            known = {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": uri}
            _forget(root)
            started = _flow(root, victim == "worker", known)
            until(lambda: _stage("stages.train", root), 600)
            time.sleep(2)
            found = {
                "stage": _stage("stages.train", root),
                "dvc": _stage("dvc", root),
                "flow": started.pid,
                "worker": started.pid,
                "prefect": prefect.pid,
                "mlflow": mlflow.pid,
            }[victim]
            assert found is not None, victim
            end = os.killpg if victim in ("prefect", "mlflow") else os.kill
            end(found, signal.SIGKILL)
            started.wait(timeout=900)
            if victim == "worker":  # the flow that it started goes on
                until(lambda: _nobody_holds(root / "work" / "pipeline.lock"), 900)
        until(lambda: not [each for each in living(root) if "stages." in each], 60)
        done = run(root, "flows.pipeline", timeout_s=1800)
        assert done.returncode == 0, done.stdout[-3000:]
        same = _artifacts(root) == undisturbed
        tell(f"kill -9 of {victim}: artifacts that differ afterwards", [float(not same)], 0)
        print(json.dumps({"name": f"kill -9 of {victim}, s", "value": time.monotonic() - began}))


def _flow(root: Path, served: bool, known: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, *(["-c", SERVE] if served else ["-m", "flows.pipeline"])]
    return subprocess.Popen(
        command,
        cwd=root,
        env=environment(root, **known),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _nobody_holds(lock: Path) -> bool:
    try:
        with FileLock(lock, timeout=0):
            return True
    except Timeout:
        return False


def _stage(word: str, root: Path) -> int | None:
    for each in living(root):
        pid, _, command = each.partition(" ")
        if f"-m {word}" in command and "sh -c" not in command:
            return int(pid)
    return None


def _forget(root: Path) -> None:
    """Makes training and what follows it run again: its outs, its journal, what DVC knows of it."""
    places = ("models/train", "results/train", "results/evaluate", "report", ".dvc/cache/runs")
    for name in (*places, "work/train@memsearcher"):
        shutil.rmtree(root / name, ignore_errors=True)
    path = root / "dvc.lock"
    lock = yaml.safe_load(path.read_text())
    for name in [n for n in lock["stages"] if n.startswith(("train", "evaluate", "report"))]:
        del lock["stages"][name]
    path.write_text(yaml.safe_dump(lock))


def _artifacts(root: Path) -> dict[str, str]:
    """Hashes from dvc.lock of what holds no time: data, models, predictions."""
    found = {}
    for pattern in TIMELESS:
        for path in sorted(root.glob(pattern)):
            found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("overhead", "interval", "faults"), nargs="+")
    parser.add_argument("--victims", choices=VICTIMS, default=VICTIMS, nargs="+")
    arguments = parser.parse_args()
    # the uploader of the last run may still write
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = smoke(Path(folder).resolve())
        for what in arguments.what:
            if what == "faults":
                faults(root, arguments.victims)
            else:
                {"overhead": overhead, "interval": interval}[what](root)


if __name__ == "__main__":
    main()
