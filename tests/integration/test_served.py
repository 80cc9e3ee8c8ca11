"""Prefect for real: its test harness, a server, a deployment that runs alone and is cancelled."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from plumbing import environment, living, measured, run, server, toy, until

from memsearcher import files

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HARNESS = """
from prefect.testing.utilities import prefect_test_harness
with prefect_test_harness(server_startup_timeout=400):
    from flows.pipeline import pipeline
    states = pipeline(return_state=True)
    print("state:", states.name)
"""
SERVE = "from flows.pipeline import pipeline; pipeline.serve(name='by-itself', interval=60)"


def asked(api: str, what: str, **body: object) -> list[dict]:
    return httpx.post(f"{api}/{what}", json=body, timeout=30).raise_for_status().json()


@contextmanager
def served(root: Path, api: str, **more: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", SERVE]
    env = environment(root, PREFECT_API_URL=api, **more)
    with open(root / "served.log", "wb") as log:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def test_a_deployment_runs_twice_by_itself_and_is_cancelled(
    tmp_path: Path, api: str
) -> None:  # C17
    root = toy(tmp_path / "a copy", tracking=True)
    first = subprocess.run(
        [sys.executable, "-c", HARNESS],
        cwd=root,
        env=environment(root),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "state: Completed" in first.stdout, first.stdout + first.stderr
    assert len((root / "ran").read_text().split()) == 4
    (root / "ran").unlink()

    with served(root, api, TOY_TWO="sleep", TOY_THREE="sleep") as process:
        until(lambda: len(_runs(api, "COMPLETED")) >= 2, 600)
        for each in _runs(api, "COMPLETED"):
            tasks = asked(api, "task_runs/filter", flow_runs={"id": {"any_": [each["id"]]}})
            assert {task["state"]["name"] for task in tasks} == {"Cached"}
            assert len(tasks) == 4
        assert not (root / "ran").exists()

        text = (root / "params.yaml").read_text()
        (root / "params.yaml").write_text(text.replace("seed: 17\n", "seed: 18\n", 1))
        until((root / "sleeping").is_file, 600)
        until(
            lambda: len((root / "ran").read_text().split()) >= 3, 60
        )  # two and three side by side
        deployment = asked(api, "deployments/filter")[0]["id"]  # or the next run comes in between
        httpx.patch(f"{api}/deployments/{deployment}", json={"paused": True}).raise_for_status()
        (working,) = _runs(api, "RUNNING")
        state = {"type": "CANCELLING", "name": "Cancelling"}
        asked(api, f"flow_runs/{working['id']}/set_state", state=state)
        began = time.monotonic()
        until(lambda: not _others(root, process.pid), 30)
        until(lambda: working["id"] in {each["id"] for each in _runs(api, "CANCELLED")}, 60)
        assert time.monotonic() - began < 90
    again = run(root, "dvc", "repro")  # no lock is left
    assert again.returncode == 0, again.stdout


def _runs(api: str, kind: str) -> list[dict]:
    return asked(api, "flow_runs/filter", flow_runs={"state": {"type": {"any_": [kind]}}})


def _others(root: Path, served_by: int) -> list[str]:
    """Without the serving process and the resource tracker that multiprocessing keeps beside it."""
    beside = psutil.Process(served_by).children()
    own = {served_by, *(p.pid for p in beside if "resource_tracker" in " ".join(p.cmdline()))}
    return [each for each in living(root) if int(each.partition(" ")[0]) not in own]


BASE = ("policies=memsearcher-base", "~policies.untrained")
GRID = (*BASE, "train.lr=0.02", "agent.max_memory_tokens=16,24", "seed=17,18")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, api: str) -> Path:
    """A copy in which a grid of 2 × 2 has run."""
    root = measured(tmp_path_factory.mktemp("grid") / "a copy")
    done = run(root, "flows.ablate", "memory", *GRID, PREFECT_API_URL=api, timeout_s=580)
    assert done.returncode == 0, done.stdout
    until(lambda: not any((root / "work/tracking").glob("*.jsonl")), 600)
    return root


def test_each_cell_runs_once_and_is_a_run_to_compare(grid: Path) -> None:
    rows = list(files.read_jsonl(grid / "ablations" / "memory.jsonl"))
    found = {
        (row["overrides"]["agent.max_memory_tokens"], row["seed"], row["benchmark"]): row["em"]
        for row in rows
    }
    assert found == {
        (cap, seed, benchmark): em
        for cap, em in ((16, 0.36), (24, 0.44))
        for seed in (17, 18)
        for benchmark in ("nq", "hotpotqa", "average")
    }
    assert set(rows[0]) >= {"name", "policy", "low", "high", "n", "cut_rate", "fingerprint"}
    ran = (grid / "work/worktrees/ablate-memory/ran").read_text().splitlines()
    assert ran == [
        "questions",
        *(
            line
            for cap in (16, 24)
            for seed in (17, 18)
            for line in (
                f"train@memsearcher {seed} {cap}",
                f"evaluate@memsearcher {seed} {cap} test",
            )
        ),
    ]
    assert not (grid / "ran").exists()  # this tree was left alone

    client = _client(grid)
    experiment = client.get_experiment_by_name("ablation memory")
    runs = client.search_runs([experiment.experiment_id])
    assert {
        (each.data.params["memory_cap"], each.data.params["seed"], each.data.metrics["em"])
        for each in runs
    } == {(cap, seed, em) for cap, em in (("16", 0.36), ("24", 0.44)) for seed in ("17", "18")}


def test_another_cap_in_evaluation_only_trains_nothing(grid: Path, api: str) -> None:
    ran = grid / "work/worktrees/ablate-memory/ran"
    ran.unlink()
    only = ("train.lr=0.02", "agent.max_memory_tokens=16", "evaluate.max_memory_tokens=choice(24)")
    done = run(grid, "flows.ablate", "memory", *BASE, *only, PREFECT_API_URL=api, timeout_s=580)
    assert done.returncode == 0, done.stdout
    assert ran.read_text().splitlines() == ["evaluate@memsearcher 17 24 test"]
    rows = list(files.read_jsonl(grid / "ablations" / "memory.jsonl"))  # the cells of now (C25)
    assert [(row["overrides"], row["em"]) for row in rows if row["benchmark"] == "average"] == [
        ({"evaluate.max_memory_tokens": 24}, 0.44)
    ]


def test_a_retraining_keeps_the_better_policy(grid: Path, api: str) -> None:
    store, verdicts = grid.parent / "remote", []
    remote = f"[core]\n    remote = store\n['remote \"store\"']\n    url = {store}\n"
    (grid / ".dvc" / "config.local").write_text(remote)
    for lr in ("0.02", "0.01"):
        words = ("agent.max_memory_tokens=16", f"train.lr={lr}")
        done = run(grid, "flows.retrain", *words, PREFECT_API_URL=api, timeout_s=580)
        assert done.returncode == 0, done.stdout
        verdicts += [x for x in done.stdout.splitlines() if x.startswith("retrain: ")][-1:]
    assert "promoted: there was no champion" in verdicts[0]
    assert "kept the champion: the challenger is worse: -10.0 EM" in verdicts[1]
    ran = (grid / "work/worktrees/retrain-memsearcher/ran").read_text().splitlines()
    assert sorted(ran) == [
        "evaluate@challenger 17 16 dev",  # its training was the grid's: DVC's cache is one
        *("evaluate@challenger 18 16 dev", "evaluate@champion 18 16 dev"),
        "train@memsearcher 18 16",
    ]
    for words, expected in (
        (("status", "--porcelain"), set()),
        (("branch",), {"retrain", "champion"}),
    ):
        command = ["git", "-C", str(grid), *words]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert set(said.replace("*", "").split()) - {"main", "master"} == expected
    until(lambda: not any((grid / "work/tracking").glob("*.jsonl")), 600)
    client = _client(grid)
    (model,) = client.search_registered_models()
    champion = client.get_model_version(model.name, model.aliases["champion"])
    assert list(store.rglob(f"{champion.tags['md5'][2:]}*"))  # pushed, and pulled to be compared
    assert champion.tags["why"] == "promoted: there was no champion"
    maker = next(
        each.data.tags["cached.questions"]
        for each in client.search_runs([client.get_experiment_by_name("memsearcher").experiment_id])
        if "cached.questions" in each.data.tags
    )
    assert client.get_run(maker).info.run_name == "questions"


def _client(root: Path) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{root / 'mlflow.db'}")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_pages_show_what_one_looks_for(
    grid: Path, api: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Screenshots lie in pytest's temporary folder (--basetemp)."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    shots = tmp_path_factory.mktemp("screenshots")
    client = _client(grid)
    cells = client.get_experiment_by_name("ablation memory").experiment_id
    stages = client.get_experiment_by_name("memsearcher").experiment_id
    ids = [each.info.run_id for each in client.search_runs([cells])]
    (trace, *_) = client.search_traces(locations=[stages], max_results=1)
    flow = _runs(api, "COMPLETED")
    cell = next(each for each in flow if each["name"].startswith("max_memory_tokens 24"))
    store = ["--backend-store-uri", f"sqlite:///{grid / 'mlflow.db'}", "--workers", "1"]
    with server(grid, "mlflow", "server", *store) as (_, pages), sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1100})
        page.set_default_timeout(120_000)

        page.goto(f"{api.removesuffix('/api')}/runs/flow-run/{cell['id']}")
        for text in ("train@memsearcher", "evaluate@memsearcher", "Completed", "Cached"):
            page.get_by_text(text).first.wait_for()
        page.screenshot(path=shots / "flow-run.png")

        compared = f"runs={json.dumps(ids)}&experiments={json.dumps([cells])}"
        page.goto(f"{pages}/#/compare-runs?{compared}")
        for text in ("memory_cap", "em_hotpotqa", "0.44", "0.36"):
            page.get_by_text(text).first.wait_for()
        page.locator(".js-plotly-plot").first.wait_for()
        page.screenshot(path=shots / "comparison.png")

        page.goto(
            f"{pages}/#/experiments/{stages}/traces?selectedEvaluationId={trace.info.trace_id}"
        )
        for text in ("turn 1", "generate", "search", "remember"):
            page.get_by_text(text).first.wait_for()
        page.screenshot(path=shots / "trace.png")
        browser.close()
