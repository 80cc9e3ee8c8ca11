"""The whole DAG once, small (experiment=smoke), in a copy of the tree; then what does not run.

The copy's path has a space, LANG is C, and git knows nobody.
"""

import json
import time
from pathlib import Path

import pytest
import yaml
from drive_report import CHROMIUM, drive
from plumbing import clone, run

from memsearcher import params
from memsearcher.files import content_hash

pytestmark = pytest.mark.slow
OUTS = (
    "data/corpus/passages.jsonl",
    "data/index/manifest.json",
    "data/bm25/manifest.json",
    "data/questions/dev.jsonl",
    "results/retrieval/metrics.json",
    "models/warmup/memsearcher/model.safetensors",
    "models/train/memsearcher/model.safetensors",
    "results/train/memsearcher/metrics.jsonl",
    "results/evaluate/untrained/predictions.jsonl",
    "report/index.html",
    "report/results.md",
    "report/results.json",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which smoke has run to its end, by plain `dvc repro`: no server of any kind."""
    to = clone(tmp_path_factory.mktemp("pipeline") / "a copy")
    composed = run(to, "flows.compose", "experiment=smoke")
    assert composed.returncode == 0, composed.stdout
    done = run(to, "dvc", "repro", timeout_s=590)
    assert done.returncode == 0, done.stdout[-4000:]
    return to


def would_run(root: Path) -> set[str]:
    """Stages that DVC would run now, by name without item."""
    said = run(root, "dvc", "status", "--json")
    return {name.split("@")[0] for name in json.loads(said.stdout.strip().splitlines()[-1])}


def test_everything_is_there(root: Path) -> None:
    for out in OUTS:
        assert (root / out).is_file(), out
    rows = [json.loads(line) for line in (root / "work/stages.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows} == {"FINISHED"}
    stages = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    assert {row["stage"].split("@")[0] for row in rows} == set(stages)


def test_again_runs_nothing(root: Path) -> None:
    took = []
    for _ in range(3):
        started = time.monotonic()
        done = run(root, "dvc", "repro")
        took.append(time.monotonic() - started)
        assert done.returncode == 0
        assert "Running stage" not in done.stdout
    assert min(took) < 6, took  # 2 s on two idle cores; the tests share theirs


def test_the_memory_cap_concerns_only_some_and_back_is_cached(root: Path) -> None:
    text = (root / "params.yaml").read_text()
    cap = params.load(root / "params.yaml").agent.max_memory_tokens
    changed = text.replace(f"max_memory_tokens: {cap}", f"max_memory_tokens: {cap - 1}")
    (root / "params.yaml").write_text(changed)
    assert would_run(root) == {"warmup", "train", "evaluate", "report"}
    (root / "params.yaml").write_text(text)
    assert would_run(root) == set()


def test_a_docstring_concerns_nothing_and_a_number_one_stage(root: Path) -> None:
    with open(root / "memsearcher/grpo.py", "a") as f:
        f.write('\n"""Words."""\n')
    assert would_run(root) == set()
    before = len((root / "work/stages.jsonl").read_text().splitlines())
    with open(root / "stages/report.py", "a") as f:
        f.write("\nCHANGED = True\n")
    bumped = run(root, "flows.versions", "--bump", "report")
    assert bumped.returncode == 0, bumped.stdout
    assert would_run(root) == {"report"}
    assert run(root, "dvc", "repro").returncode == 0
    rows = (root / "work/stages.jsonl").read_text().splitlines()[before:]
    assert [json.loads(row)["stage"] for row in rows] == ["report"]


def test_mlflow_has_a_parent_and_a_child_per_stage(root: Path) -> None:
    from mlflow import MlflowClient

    end = time.monotonic() + 60
    while any((root / "work/tracking").glob("*.jsonl")) and time.monotonic() < end:
        time.sleep(0.5)
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("memsearcher-smoke")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    first = min(parents, key=lambda run: run.info.start_time)
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == first.info.run_id]
    assert first.info.status == "FINISHED"
    assert {"corpus", "train@memsearcher", "report"} <= {run.info.run_name for run in children}
    train = next(run for run in children if run.info.run_name == "train@memsearcher")
    assert train.data.params["train.steps"] == "2"
    assert train.data.tags["fingerprint"]
    assert train.data.metrics["stage_seconds"] > 0
    assert "system/cpu_utilization_percentage" in train.data.metrics
    datasets = {each.dataset.name for each in train.inputs.dataset_inputs}
    assert datasets == {"train", "dev"}
    (made,) = train.outputs.model_outputs
    model = client.get_logged_model(made.model_id)
    # by hash, since step 0 may have been the best on dev: then warm-up's model has these bytes
    assert model.params["sha256"] == content_hash(root / "models/train/memsearcher")
    measured = {metric.key for metric in model.metrics}
    assert {"dev_em", "em_average", "em_nq"} <= measured  # of training and of evaluation
    assert client.search_model_versions("name = 'memsearcher-smoke.memsearcher'")
    traces = client.search_traces(locations=[experiment.experiment_id], run_id=train.info.run_id)
    assert {trace.info.tags["step"] for trace in traces} == {"1", "2"}
    spans = {span.name for span in traces[0].data.spans}
    assert {"trajectory", "turn 1", "generate"} <= spans


def test_the_flow_finds_all_of_it_cached(root: Path) -> None:
    before = (root / "work/stages.jsonl").read_text()
    done = run(root, "flows.pipeline")
    assert done.returncode == 0, done.stdout
    assert (root / "work/stages.jsonl").read_text() == before


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_its_report_is_read_in_a_browser(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("playwright", reason="Playwright is not installed")
    drive(root / "report", tmp_path, tmp_path)
