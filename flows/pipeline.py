"""The DAG of dvc.yaml as a Prefect flow: one task per stage, DVC decides what is fresh.

    python -m flows.pipeline

Needs no server: Prefect starts a temporary one, or uses the one of `make ui`. The artifacts are
those of `dvc repro`; this adds states, retries, logs, parallel stages and one MLflow parent run.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from filelock import FileLock, Timeout
from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task

from flows.graph import Node, Processes, StageFailed, nodes
from memsearcher.files import ROOT, BadInput
from memsearcher.tracking import PIPELINE

LIMITS = {"gpu": 1, "cpu": 1, "network": 2}  # stages side by side, by `meta: needs`
FINAL = (2, 130, 137, 143)  # wrong input stays wrong, and who interrupts does not want a retry


@flow(name="memsearcher", persist_result=False, task_runner=ThreadPoolTaskRunner(max_workers=64))
def pipeline() -> None:
    """Every stage once, in the order of the graph, each as soon as its inputs are there."""
    processes = Processes()
    with _only_one(), processes.ended_by_signals():
        os.environ[PIPELINE] = f"flow-{runtime.flow_run.id}"
        room = {name: threading.Semaphore(count) for name, count in LIMITS.items()}
        futures: dict[str, PrefectFuture] = {}
        for node in nodes():
            run = _task(node, processes, room[node.needs])
            futures[node.name] = run.submit(wait_for=[futures[name] for name in node.after])
        failed = None
        for future in futures.values():
            future.wait()
            if future.state.is_failed() and failed is None and future.state.name != "NotReady":
                failed = future.state.result(raise_on_failure=False)
        if (ROOT / "report/results.md").is_file() and failed is None:
            text = (ROOT / "report/results.md").read_text(encoding="utf-8")
            create_markdown_artifact(text, key="results", description="The table of this run")
        if failed is not None:
            raise failed


def _task(node: Node, processes: Processes, room: threading.Semaphore) -> Task[[], State | None]:
    def run() -> State | None:
        if node.fresh:
            return Completed(
                name="Cached", message="DVC: nothing that this stage reads has changed"
            )
        with room:
            processes.repro(node.name, get_run_logger().info)
        return None

    return task(
        run,
        name=node.name,
        description=node.desc,
        tags=[node.needs],
        retries=node.retries,
        retry_delay_seconds=5,
        retry_condition_fn=_worth_a_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


def _worth_a_retry(_task: Task, _run: TaskRun, state: State) -> bool:
    error = state.result(raise_on_failure=False)
    return not (isinstance(error, StageFailed) and error.code in FINAL)


@contextmanager
def _only_one() -> Iterator[None]:
    """The pipeline's lock. It is the kernel's: a dead holder holds nothing."""
    folder = ROOT / "work"
    folder.mkdir(exist_ok=True)
    holder = folder / "pipeline.holder.json"
    try:
        with FileLock(folder / "pipeline.lock", timeout=0):
            holder.write_text(json.dumps({"pid": os.getpid(), "since": time.time()}))
            yield
            holder.unlink(missing_ok=True)
    except Timeout:
        raise BadInput(f"the pipeline is busy: {_describe(holder.read_text())}") from None


def _describe(holder: str) -> str:
    said = json.loads(holder)
    minutes = (time.time() - said["since"]) / 60
    try:
        command = " ".join(psutil.Process(said["pid"]).cmdline())
    except psutil.NoSuchProcess:
        command = "a process that is ending"
    return f"process {said['pid']} ({command}) holds it since {minutes:.0f} min"


def main() -> None:
    os.chdir(ROOT)
    try:
        pipeline()
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except StageFailed as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(e.code if e.code > 0 else 128 - e.code)
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
