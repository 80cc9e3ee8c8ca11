"""The frame around a stage, in a copy of the repository with toy stages: ends, signals, work."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from plumbing import environment, run, toy


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return toy(tmp_path / "a copy")


def last_row(root: Path) -> dict:
    return json.loads((root / "work/stages.jsonl").read_text().splitlines()[-1])


def sleeping(root: Path, process: subprocess.Popen) -> list[psutil.Process]:
    """The stage that sleeps in `root`, and its child, once both are there."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if (root / "sleeping").is_file() and (text := (root / "sleeping").read_text()):
            stage = psutil.Process(int(text))
            if children := stage.children():
                return [stage, *children]
        time.sleep(0.1)
    raise AssertionError("the toy stage did not start")


def test_a_stage_publishes_and_writes_down_what_it_took(root: Path) -> None:
    done = run(root, "stages.one")
    assert done.returncode == 0, done.stdout
    assert (root / "data/one").read_text() == next((root / "work/one").iterdir()).name
    row = last_row(root)
    assert (row["stage"], row["status"]) == ("one", "FINISHED")
    assert row["peak_mib"] > 10


@pytest.mark.parametrize(
    ("words", "how", "code", "said"),
    [
        (["stages.one"], {"TOY_ONE": "bad"}, 2, "one: error: data/x.jsonl:7: broken JSON\n"),
        (["stages.one"], {"TOY_ONE": "broken"}, 1, "RuntimeError: the machinery broke\n"),
        (["stages.one"], {"TOY_ONE": "full"}, 2, "one: error: no space left on the disk of "),
        (["stages.two", "nope"], {}, 2, "two: error: no 'nope' in params.yaml"),
        (["stages.three"], {}, 2, "three: error: data/one: no such file or folder"),
    ],
)
def test_ways_to_end(
    root: Path, words: list[str], how: dict[str, str], code: int, said: str
) -> None:
    done = run(root, *words, **how)
    assert done.returncode == code
    assert said in done.stdout
    assert ("Traceback" in done.stdout) == (code == 1)


def test_a_wrong_parameter_file_is_one_line(root: Path) -> None:
    with open(root / "params.yaml", "a") as f:
        f.write("nope: 1\n")
    done = run(root, "stages.one")
    assert (done.returncode, done.stdout) == (2, "one: error: parameters: nope: unknown key\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_stage_and_its_children(root: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "stages.one"]
    with subprocess.Popen(command, cwd=root, env=environment(root, TOY_ONE="sleep")) as process:
        members = sleeping(root, process)
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=20) == code
    assert time.monotonic() - started < 15
    assert not psutil.wait_procs(members, timeout=5)[1]
    assert last_row(root)["status"] == "KILLED"


@pytest.mark.slow
def test_a_stage_that_is_busy_in_c_ends_too(root: Path) -> None:
    command = [sys.executable, "-m", "stages.one"]
    with subprocess.Popen(command, cwd=root, env=environment(root, TOY_ONE="stuck")) as process:
        while not (root / "sleeping").is_file() and process.poll() is None:
            time.sleep(0.1)
        time.sleep(1)
        process.terminate()
        assert process.wait(timeout=15) == 143


def test_a_stage_dies_with_dvc(root: Path) -> None:
    """DVC killed outright: nobody is left to pass a signal on."""
    starter = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'stages.one'])"
    command = [sys.executable, "-c", starter, "as dvc"]
    started = environment(root, TOY_ONE="sleep", DVC_STAGE="one")
    with subprocess.Popen(command, cwd=root, env=started) as process:
        members = sleeping(root, process)
        process.kill()
    assert not psutil.wait_procs(members, timeout=15)[1]


def test_old_journals_go_but_the_own_and_three_more_stay(root: Path) -> None:
    for i in range(6):
        (root / f"work/one/old-{i}").mkdir(parents=True)
        os.utime(root / f"work/one/old-{i}", (i, i))
    assert run(root, "stages.one").returncode == 0
    kept = sorted(p.name for p in (root / "work/one").iterdir() if p.name.startswith("old"))
    assert kept == ["old-3", "old-4", "old-5"]


def test_the_fingerprint_is_of_parameters_inputs_and_version(root: Path) -> None:
    def fingerprint() -> str:
        assert run(root, "stages.one").returncode == 0
        assert run(root, "stages.three").returncode == 0
        return (root / "data/three").read_text()

    first = fingerprint()
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("max_turns_eval: 6", "max_turns_eval: 5"))
    assert fingerprint() == first  # it does not depend on that
    (root / "params.yaml").write_text(
        text.replace("max_memory_tokens: 64", "max_memory_tokens: 32")
    )
    second = fingerprint()
    versions = (root / "code_versions.yaml").read_text()
    (root / "code_versions.yaml").write_text(
        versions.replace("three: {version: 1", "three: {version: 2")
    )
    third = fingerprint()
    assert len({first, second, third}) == 3
