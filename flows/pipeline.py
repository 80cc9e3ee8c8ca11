"""The DAG of dvc.yaml as a Prefect flow: one task per stage, DVC decides what is fresh.

    python -m flows.pipeline

Needs no server: Prefect starts a temporary one, or uses the one of `make ui`. The artifacts are
those of `dvc repro`; this adds states, retries, logs, parallel stages and one MLflow parent run.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task

from flows import artifacts
from flows.graph import Node, Processes, StageFailed, fingerprints, nodes
from flows.lock import only_one
from memsearcher import tracking
from memsearcher.files import ROOT, BadInput
from memsearcher.params import load

LIMITS = {"gpu": 1, "cpu": 1, "network": 2}  # stages side by side, by `meta: needs`
FINAL = (2, 130, 137, 143)  # wrong input stays wrong, and who interrupts does not want a retry


RUNNER: Any = ThreadPoolTaskRunner(max_workers=64)  # Prefect's own types do not fit each other


@flow(name="memsearcher", persist_result=False, task_runner=RUNNER)
def pipeline(
    root: str = str(ROOT), targets: list[str] | None = None, force: list[str] | None = None
) -> None:
    """Every stage once, in the order of the graph, each as soon as its inputs are there.

    `root`: this repository or a worktree of it. `targets`: only these stages and what they need.
    `force`: stages that run although nothing has changed that DVC could see.
    """
    tree = Path(root)
    processes = Processes(tree)
    with only_one(), processes.ended_by_signals(), _tracked(tree) as track:
        room = {name: threading.Semaphore(count) for name, count in LIMITS.items()}
        futures: dict[str, PrefectFuture] = {}
        found = nodes(tree, targets or (), force or ())
        track.cached(fingerprints([node.name for node in found if node.fresh], tree))
        for node in found:
            run = _task(node, processes, room[node.needs])
            after = [futures[name] for name in node.after]
            futures[node.name] = run.submit(wait_for=after)  # type: ignore[call-overload]
        failed = None
        for future in futures.values():
            future.wait()
            if future.state.is_failed() and failed is None and future.state.name != "NotReady":
                failed = future.state.result(raise_on_failure=False)
        states = {name: future.state for name, future in futures.items()}
        told = not isinstance(track, tracking.NullRun)
        artifacts.write(tree, states, os.environ[tracking.PIPELINE] if told else None)
        if failed is not None:
            raise failed


def _task(node: Node, processes: Processes, room: threading.Semaphore) -> Task[[], State | None]:
    def run() -> State | None:
        if node.fresh:
            return Completed(
                name="Cached", message="DVC: nothing that this stage reads has changed"
            )
        with room:
            processes.repro(node.name, get_run_logger().info, force=node.force)
        return None

    return task(  # type: ignore[call-overload]  # its overloads know only sync or only async
        run,
        name=node.name,
        description=node.desc,
        tags=[] if node.fresh else [node.needs],  # a server asks for room by tag, one by one
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
def _tracked(root: Path) -> Iterator[tracking.Run]:
    """The MLflow run above those of the stages."""
    before = os.environ.get(tracking.PIPELINE)
    os.environ[tracking.PIPELINE] = f"flow-{runtime.flow_run.id}"
    track = tracking.open_run(load(root / "params.yaml"), tracking.WHOLE)
    status = "FAILED"
    try:
        yield track
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        track.close(status)
        if before is None:
            del os.environ[tracking.PIPELINE]
        else:
            os.environ[tracking.PIPELINE] = before


@contextmanager
def ends_in_a_line() -> Iterator[None]:
    """For `main` of a flow: what went wrong as one line, and the stage's own exit code."""
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & leaves it ignored
    try:
        yield
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except StageFailed as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(e.code if e.code > 0 else 128 - e.code)
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)


def main() -> None:
    with ends_in_a_line():
        pipeline()


if __name__ == "__main__":
    main()
