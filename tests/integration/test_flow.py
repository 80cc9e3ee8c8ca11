"""The flow around toy stages: same graph as DVC's, states, exit codes, signals, one at a time.

It talks to a server of the tests; with one that it starts itself it runs in test_pipeline.py.
"""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from plumbing import environment, living, run, toy, until

pytestmark = pytest.mark.slow
FLOW = [sys.executable, "-m", "flows.pipeline"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return toy(tmp_path / "a copy")


def states(api: str) -> dict[str, str]:
    """Last state of each of the four tasks of the latest flow run, which has completed. The server
    hears of tasks by events: it may know their last states some time after the flow's."""
    found: dict[str, str] = {}

    def known() -> bool:
        ended = [each for each in tasks(api) if (each["state"] or {}).get("type") == "COMPLETED"]
        found.update({each["name"].rsplit("-", 1)[0]: each["state"]["name"] for each in ended})
        return len(ended) == 4

    until(known, 60)
    return found


def tasks(api: str) -> list[dict]:
    """Those of the latest flow run."""
    (latest,) = asked(api, "flow_runs", sort="START_TIME_DESC", limit=1)
    return asked(api, "task_runs", flow_runs={"id": {"any_": [latest["id"]]}})


def asked(api: str, what: str, **body: object) -> list[dict]:
    return httpx.post(f"{api}/{what}/filter", json=body, timeout=30).raise_for_status().json()


def ran(root: Path) -> list[str]:
    """Stages that have run since the last call."""
    path = root / "ran"
    names = path.read_text().split() if path.is_file() else []
    path.unlink(missing_ok=True)
    return names


def wait_for(path: Path, process: subprocess.Popen, timeout_s: float = 400) -> None:
    end = time.monotonic() + timeout_s
    while not path.is_file():
        assert process.poll() is None, "the flow ended before its stage started"
        assert time.monotonic() < end
        time.sleep(0.2)


def test_the_flow_runs_the_graph_and_then_nothing(root: Path, api: str) -> None:
    first = run(root, "flows.pipeline", PREFECT_API_URL=api)
    assert first.returncode == 0, first.stdout
    order = ran(root)
    assert sorted(order) == ["four", "one", "three", "two@memsearcher"]
    assert (order[0], order[-1]) == ("one", "four")
    assert set(states(api).values()) == {"Completed"}
    assert "two@memsearcher: finished" in first.stdout

    again = run(root, "flows.pipeline", PREFECT_API_URL=api)
    assert again.returncode == 0, again.stdout
    assert ran(root) == []
    assert states(api) == dict.fromkeys(("one", "two@memsearcher", "three", "four"), "Cached")
    assert [each["tags"] for each in tasks(api)] == [[]] * 4  # a tag costs a wait of up to 2 s

    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(
        text.replace("max_memory_tokens: 64", "max_memory_tokens: 32")
    )
    assert run(root, "flows.pipeline", PREFECT_API_URL=api).returncode == 0
    assert ran(root) == ["three", "four"]
    assert states(api)["two@memsearcher"] == "Cached"
    assert "up to date" in run(root, "dvc", "status").stdout

    made = (root / "data/three").read_text()  # DVC removes it before a stage that then fails
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(
        text.replace("max_memory_tokens: 32", "max_memory_tokens: 48")
    )
    assert run(root, "flows.pipeline", PREFECT_API_URL=api, TOY_THREE="bad").returncode == 2
    assert (root / "data/three").read_text() == made


@pytest.mark.parametrize(
    ("how", "code", "said", "tries"),
    [
        ({"TOY_ONE": "bad"}, 2, "error: one: exit 2: data/x.jsonl:7: broken JSON\n", 1),
        ({"TOY_ONE": "broken"}, 1, "error: one: exit 1: RuntimeError: the machinery broke\n", 2),
    ],
)
def test_the_stages_own_error_reaches_the_user(
    root: Path, api: str, how: dict[str, str], code: int, said: str, tries: int
) -> None:
    done = run(root, "flows.pipeline", PREFECT_API_URL=api, **how)
    assert done.returncode == code
    assert done.stdout.endswith(said)
    assert ran(root) == ["one"] * tries  # broken machinery is tried again, wrong input is not


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_everything_within_15_s(
    root: Path, api: str, number: int, code: int
) -> None:  # C17
    started = environment(root, PREFECT_API_URL=api, TOY_ONE="sleep")
    with subprocess.Popen(FLOW, cwd=root, env=started, start_new_session=True) as process:
        wait_for(root / "sleeping", process)
        asked = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert time.monotonic() - asked < 15
    assert living(root) == []
    done = run(root, "dvc", "repro")  # no lock is left, the next run goes on
    assert done.returncode == 0, done.stdout


def test_the_server_schedules_runs(api: str) -> None:
    """Prefect and SQLAlchemy have to fit: with 2.1 all else works and no run is ever scheduled."""
    flow = httpx.post(f"{api}/flows/", json={"name": "scheduled"}).raise_for_status().json()["id"]
    schedule = {"schedule": {"interval": 60}, "active": True}
    body = {"name": "each-minute", "flow_id": flow, "schedules": [schedule]}
    made = httpx.post(f"{api}/deployments/", json=body).raise_for_status().json()["id"]
    scheduled = {"deployments": {"id": {"any_": [made]}}}
    until(lambda: len(asked(api, "flow_runs", **scheduled)) >= 2, 120)  # by a service of its own
    place = f"{api}/deployments/{made}"  # the server may answer 503 while that service writes
    until(lambda: httpx.delete(place).status_code in (204, 404), 60)


def test_the_second_says_who_holds_the_pipeline(root: Path, api: str) -> None:  # C15
    with subprocess.Popen(
        FLOW, cwd=root, env=environment(root, PREFECT_API_URL=api, TOY_ONE="sleep")
    ) as process:
        wait_for(root / "sleeping", process)
        second = run(root, "flows.pipeline", PREFECT_API_URL=api)
        assert second.returncode == 2
        assert f"the pipeline is busy: process {process.pid} " in second.stdout
        process.terminate()
        process.wait(timeout=30)


def test_a_port_in_use_is_one_line(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(root, "flows.ui", MEMSEARCHER_PREFECT_PORT=str(port))
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)
    assert done.stdout.startswith(f"error: port {port} on 127.0.0.1, which Prefect needs")


@pytest.mark.parametrize("shell", ["replaced by the stage", "stays between"])
def test_a_killed_flow_leaves_no_stage_and_no_lock(root: Path, api: str, shell: str) -> None:
    if shell == "stays between":
        text = (root / "dvc.yaml").read_text()
        (root / "dvc.yaml").write_text(text.replace("stages.one", "stages.one && true"))
    with subprocess.Popen(
        FLOW, cwd=root, env=environment(root, PREFECT_API_URL=api, TOY_ONE="sleep")
    ) as process:
        wait_for(root / "sleeping", process)
        process.kill()
    end = time.monotonic() + 20
    while any("stages." in each or " dvc " in each for each in living(root)):
        assert time.monotonic() < end, living(root)
        time.sleep(0.5)
    close = f"from flows.ui import close_dead_runs; close_dead_runs({api!r})"  # as `make ui` does
    subprocess.run([sys.executable, "-c", close], cwd=root, env=environment(root), check=True)
    (latest,) = asked(api, "flow_runs", sort="START_TIME_DESC", limit=1)
    assert latest["state_type"] == "CRASHED"  # or its deployment never ran again
    done = run(root, "flows.pipeline", PREFECT_API_URL=api)
    assert done.returncode == 0, done.stdout
