"""Stages write journals; one uploader makes MLflow runs of them, whatever happens to either."""

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from memsearcher import params, tracking
from memsearcher.files import ROOT
from memsearcher.tracking import NullRun, Run, open_run


def tracked(folder: Path, label: str, pid: int | None = None) -> Run:
    """A run whose journal nobody sends yet."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder / f"{label}.jsonl")
    run._journal = open(run.path, "a", encoding="utf-8")  # noqa: SIM115
    me = psutil.Process()
    start = {
        "start": label,
        "uri": f"sqlite:///{folder / 'mlflow.db'}",
        "experiment": "test",
        "pipeline": "p-1",
        "writer": [pid or me.pid, me.create_time()],
    }
    run._write(start)
    return run


def send(folder: Path) -> None:
    command = [sys.executable, "-m", "memsearcher.uploader", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)


def events(run: Run) -> list[dict]:
    return [json.loads(line) for line in run.path.read_text().splitlines()]


def test_names_and_values_are_what_mlflow_takes(tmp_path: Path) -> None:
    run = tracked(tmp_path, "a")
    run.params({"train": {"lr": 1e-3, "steps": 1024.0, "list": [1, 2]}, "name": "x" * 7000})
    run.metrics({"em (2wiki)%": 1}, step=3)
    run.close("FINISHED")
    _, written, measured, closed = events(run)
    assert written["params"]["train.lr"] == "0.001"
    assert written["params"]["train.steps"] == "1024"
    assert written["params"]["train.list"] == "[1, 2]"
    assert len(written["params"]["name"]) == 6000
    assert measured["metrics"] == {"em _2wiki__": 1.0}
    assert measured["step"] == 3
    assert closed["close"] == "FINISHED"


def test_after_the_end_and_without_tracking_every_call_is_nothing(tmp_path: Path) -> None:
    run = tracked(tmp_path, "a")
    run.close("FINISHED")
    for each in (run, NullRun()):
        each.metrics({"x": 1.0})
        each.params({"x": 1})
        each.artifact(tmp_path / "nope")
        each.close("FAILED")
    assert len(events(run)) == 2
    off = replace(params.load(), tracking=params.Tracking(experiment="x", enabled=False))
    assert isinstance(open_run(off, "a", tmp_path / "off"), NullRun)
    assert not (tmp_path / "off").exists()


def test_a_disk_that_fails_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        run = open_run(params.load(), "a", tmp_path / "file" / "below")
        run.metrics({"x": 1.0})
        run.close("FINISHED")
    assert len(caplog.records) == 1
    assert "goes on untracked" in caplog.text


@pytest.mark.slow
def test_journals_become_runs(tmp_path: Path) -> None:
    """A parent, a child per stage, what they said; one that died is KILLED; twice sent is once
    there."""
    from mlflow import MlflowClient

    (tmp_path / "table.md").write_text("| em |")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.svg").write_text("<svg/>")
    folder = tmp_path / "a folder"
    done, dead = tracked(folder, "train@x"), tracked(folder, "two", pid=2**22 + 1)
    done.params({"train": {"lr": 0.1}})
    for step in range(3):
        done.metrics({"loss": 1.0 - step}, step)
        dead.metrics({"loss": 1.0}, step)
    done.tags({"fingerprint": "f"})
    done.artifact(tmp_path / "table.md")
    done.artifact(tmp_path / "plots")
    (tmp_path / "table.md").unlink()  # its copy is what counts
    done.close("FINISHED")
    journal = done.path.read_text()
    copies = {p.name: p.read_text() for p in done.path.with_suffix("").glob("*.md")}

    send(folder)
    assert not list(folder.glob("*.jsonl"))
    done.path.write_text(journal)  # as after an uploader that died before it removed the file
    done.path.with_suffix("").mkdir()
    for name, text in copies.items():
        (done.path.with_suffix("") / name).write_text(text)
    send(folder)

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("test")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert len(runs) == 3
    parent = next(run for name, run in runs.items() if name.startswith("pipeline"))
    train, two = runs["train@x"], runs["two"]
    assert [train.info.status, two.info.status] == ["FINISHED", "KILLED"]
    assert parent.info.status == "KILLED"
    for child in (train, two):
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert train.data.params == {"train.lr": "0.1"}
    assert train.data.tags["fingerprint"] == "f"
    history = client.get_metric_history(train.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 1.0), (1, 0.0), (2, -1.0)]
    assert {f.path for f in client.list_artifacts(train.info.run_id)} == {"plots", "table.md"}


@pytest.mark.slow
def test_a_server_that_is_down_costs_nothing_and_keeps_the_journal(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from memsearcher import params, tracking\n"
        "run = tracking.open_run(params.load(), 'a', pathlib.Path(sys.argv[1]))\n"
        "t = time.monotonic(); run.metrics({'x': 1.0}); time.sleep(1); run.close('FINISHED')\n"
        "print(time.monotonic() - t)"
    )
    down = {**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=down, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.5
    end = time.monotonic() + 90
    while not (tmp_path / "error").is_file() and time.monotonic() < end:
        time.sleep(0.5)
    assert "127.0.0.1" in (tmp_path / "error").read_text()
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_the_pipeline_is_the_dvc_above() -> None:
    code = (
        "import psutil; from memsearcher import tracking; print(tracking._above(psutil.Process()))"
    )
    inner = [sys.executable, "-c", code]
    outer = (
        "import subprocess, sys, os; print(os.getpid()); subprocess.run(sys.argv[2:], check=True)"
    )
    command = [sys.executable, "-c", outer, "dvc", *inner]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.split()
    assert tracking._above(psutil.Process()).startswith(f"{os.getpid()}-")
    assert lines[-1].split("-")[0] not in (str(os.getpid()), "")
