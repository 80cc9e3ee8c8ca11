"""Stages write journals; one uploader makes MLflow runs of them, whatever happens to either."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
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
        "key": {},
        "once": False,
        "writer": [pid or me.pid, me.create_time()],
    }
    run._write(start)
    return run


def send(folder: Path) -> None:
    """With somebody else's run in the environment: it must not be touched."""
    command = [sys.executable, "-m", "memsearcher.uploader", str(folder)]
    other = {"MLFLOW_RUN_ID": "0" * 32, "MLFLOW_EXPERIMENT_ID": "77"}
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **other})


TURN = {
    "memory_before": "",
    "action": "I search.",
    "query": "mayor of Marel",
    "hits": [["1", 0.9]],
    "memory_after": "Ida Quent",
    "memory_cut": False,
    "tokens": {"prompt": 40, "action": 9, "observation": 30, "memory": 5},
    "seconds": {"action": 0.2, "search": 0.1, "memory": 0.3},
}
ROW = {
    "question_id": "nq/1",
    "question": "Who is the mayor of Marel?",
    "golds": ["Ida Quent"],
    "answer": "Ida Quent",
    "stop": "answered",
    "seconds": 0.8,
    "turns": [TURN, TURN | {"query": None, "memory_after": None, "seconds": {"action": 0.2}}],
}


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
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}")
    done.dataset("train", tmp_path / "train.jsonl", "training")
    done.policy("x", policy, 2, {"dev_em": 0.5})
    done.metrics({"em": 0.4}, model=policy)
    done.trajectory(ROW, step=2)
    done.record(tmp_path / "train.jsonl")
    torn = tracked(folder, "torn")
    torn._write({"metrics": {"x": "no number"}, "step": 0})
    torn.close("FINISHED")
    asked, again = tracked(folder, "asked"), {"cap": 1024.0}
    asked.params(again)
    asked.params({"cap": 1024})
    asked.params({"cap": 512})
    asked.close("FINISHED")
    done.artifact(tmp_path / "table.md")
    done.artifact(tmp_path / "plots")
    (tmp_path / "table.md").unlink()  # its copy is what counts
    done.close("FINISHED")
    journal = done.path.read_text()
    copies = {p.name: p.read_text() for p in done.path.with_suffix("").glob("*.md")}

    send(folder)
    assert not list(folder.glob("*.jsonl"))
    assert [path.name for path in (folder / "refused").glob("*.jsonl")] == ["torn.jsonl"]
    done.path.write_text(journal)  # as after an uploader that died before it removed the file
    done.path.with_suffix("").mkdir()
    for name, text in copies.items():
        (done.path.with_suffix("") / name).write_text(text)
    send(folder)

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("test")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) - {next(n for n in runs if n.startswith("pipeline"))} == {
        *("train@x", "two", "torn", "asked", "asked (other parameters)")
    }
    parent = next(run for name, run in runs.items() if name.startswith("pipeline"))
    train, two = runs["train@x"], runs["two"]
    assert [train.info.status, two.info.status] == ["FINISHED", "KILLED"]
    assert parent.info.status == runs["torn"].info.status == "FAILED"
    for child in (train, two):
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert train.data.params == {"train.lr": "0.1"}
    assert train.data.tags["fingerprint"] == "f"
    history = client.get_metric_history(train.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 1.0), (1, 0.0), (2, -1.0)]
    assert {f.path for f in client.list_artifacts(train.info.run_id)} == {"plots", "table.md"}

    other = runs["asked (other parameters)"]  # C14: 1024 and 1024.0 are one value, 512 is not
    assert runs["asked"].data.params == {"cap": "1024"}
    assert other.data.params == {"cap": "512"}
    assert "cap was 1024, is 512" in other.data.tags["mlflow.note.content"]

    dataset = train.inputs.dataset_inputs[0]
    assert (dataset.dataset.name, dataset.tags[0].value) == ("train", "training")
    (output,) = train.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert (output.step, model.params["path"]) == (2, str(policy))
    assert {m.key: (m.step, m.value) for m in model.metrics} == {"dev_em": (2, 0.5), "em": (0, 0.4)}
    (version,) = client.search_model_versions("name = 'test.x'")
    assert version.tags["sha256"] == model.params["sha256"]

    (trace,) = client.search_traces(locations=[experiment.experiment_id], run_id=train.info.run_id)
    assert trace.info.tags["step"] == "2"
    spans = {span.span_id: span for span in trace.data.spans}
    named = [(s.name, s.parent_id and spans[s.parent_id].name) for s in trace.data.spans]
    assert sorted(named, key=str) == sorted(
        [
            ("trajectory", None),
            ("turn 1", "trajectory"),
            *((name, "turn 1") for name in ("generate", "search", "remember")),
            ("turn 2", "trajectory"),
            ("generate", "turn 2"),
        ],
        key=str,
    )
    search = next(span for span in trace.data.spans if span.name == "search")
    assert search.inputs == {"query": "mayor of Marel"}
    assert search.end_time_ns - search.start_time_ns == pytest.approx(1e8, rel=0.01)

    _replayed(folder, tmp_path, client)


def _replayed(folder: Path, tmp_path: Path, client: object) -> None:
    """A metrics.jsonl that no server knows becomes a run; one that is known stays as it is."""
    results = tmp_path / "results" / "train" / "memsearcher"
    results.mkdir(parents=True)
    (results / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "why": "words"}\n')
    code = (
        "import sys; from pathlib import Path; from memsearcher import params, tracking, uploader\n"
        "root, folder = map(Path, sys.argv[1:])\n"
        "for _ in range(2):\n"
        "    tracking.journal_results(params.load(), root, folder)\n"
        "    print(uploader.replay(folder))"
    )
    uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
    command = [sys.executable, "-c", code, str(tmp_path), str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **uri}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n") == ["(1, 0)", "(1, 0)", ""], done.stderr
    experiment = client.get_experiment_by_name(params.load().tracking.experiment)  # type: ignore[attr-defined]
    (run,) = client.search_runs([experiment.experiment_id])  # type: ignore[attr-defined]
    assert run.data.metrics == {"reward": 0.5}
    assert run.data.tags["replayed"] == "true"


@pytest.mark.slow
@pytest.mark.parametrize("server", ["down", "hanging", "full"])
def test_no_server_holds_up_a_stage(tmp_path: Path, server: str) -> None:
    """Nothing is lost either: the journal waits for the next stage or for `replay`."""
    code = (
        "import pathlib, sys, time; from memsearcher import params, tracking\n"
        "run = tracking.open_run(params.load(), 'a', pathlib.Path(sys.argv[1]))\n"
        "t = time.monotonic(); run.metrics({'x': 1.0}); time.sleep(1); run.close('FINISHED')\n"
        "print(time.monotonic() - t)"
    )
    with _broken(server) as uri:
        env = {**os.environ, "MLFLOW_TRACKING_URI": uri}
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert float(done.stdout) < 3
        end = time.monotonic() + 240
        while _uploaders(tmp_path):
            assert time.monotonic() < end
            time.sleep(0.5)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    if server != "hanging":  # then the uploader ends itself
        assert {"down": "127.0.0.1", "full": "500 error"}[server] in (
            tmp_path / "error"
        ).read_text()


@contextmanager
def _broken(how: str) -> Iterator[str]:
    class Full(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b'{"error_code": "INTERNAL_ERROR", "message": "disk is full"}')

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with socket.socket() if how != "full" else HTTPServer(("127.0.0.1", 0), Full) as server:
        if isinstance(server, HTTPServer):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
        else:
            server.bind(("127.0.0.1", 0))
            if how == "hanging":
                server.listen()  # and never accepts
            yield f"http://127.0.0.1:{server.getsockname()[1]}"


def _uploaders(folder: Path) -> list[int]:
    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])
    ]


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
