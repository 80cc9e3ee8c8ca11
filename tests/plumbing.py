"""Copies of this repository for tests of the pipeline around it: whole, or with four toy stages."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
TOY_DVC = """
stages:
  one:
    desc: the first
    cmd: python -m stages.one
    params: [seed]
    outs: [data/one]
    meta: {needs: network, retries: 1}
  two:
    foreach: ${agents}
    do:
      desc: one for each agent
      cmd: python -m stages.two ${key}
      deps: [data/one]
      params: [seed]
      outs: ["data/two-${key}"]
  three:
    cmd: python -m stages.three
    deps: [data/one]
    params: [seed, "agent.max_memory_tokens"]
    outs: [data/three]
    meta: {needs: gpu}
  four:
    cmd: python -m stages.four
    deps: [data/two-memsearcher, data/three]
    params: [seed]
    outs: [data/four]
"""
TOY_STAGE = """
import hashlib, os, subprocess, sys, time
from pathlib import Path
from memsearcher.files import BadInput, publish
from stages.frame import Job, Stage, main

STAGE = Stage({name!r}, ({params}), ({deps}), items={items})

def run(job: Job) -> None:
    how = os.environ.get("TOY_" + job.stage.name.upper(), "")
    with open("ran", "a") as f:
        f.write(job.label + "\\n")
    if how == "sleep":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("sleeping").write_text(str(os.getpid()))
        time.sleep(600)
    if how == "stuck":
        Path("sleeping").write_text(str(os.getpid()))
        hashlib.pbkdf2_hmac("sha256", b"in C", b"for minutes", 10**9)
    if how == "bad":
        raise BadInput("data/x.jsonl:7: broken JSON")
    if how == "full":
        Path("/dev/full").write_text("a byte")
    if how == "broken":
        raise RuntimeError("the machinery broke")
    (job.work / "made").write_text(job.fingerprint)
    job.track.metrics({{"made": 1}})
    publish(job.work / "made", Path({out!r}.format(item=job.item)))

if __name__ == "__main__":
    main(STAGE, run)
"""
TOY_STAGES = (
    ("one", "'seed',", "", "None"),
    ("two", "'seed',", "'data/one',", "lambda params: list(params.agents)"),
    ("three", "'seed', 'agent.max_memory_tokens',", "'data/one',", "None"),
    ("four", "'seed',", "'data/two-memsearcher', 'data/three',", "None"),
)

MEASURED_DVC = """
stages:
  questions:
    cmd: python -m stages.questions
    params: [questions]
    outs: [data/questions]
    meta: {needs: network}
  train:
    foreach: ${agents}
    do:
      cmd: python -m stages.train ${key}
      deps: [data/questions]
      params: [seed, agent.max_memory_tokens, train.lr]
      outs: ["models/train/${key}", "results/train/${key}"]
  evaluate:
    foreach: ${policies}
    do:
      cmd: python -m stages.evaluate ${key}
      deps: [data/questions, "${item.after}"]
      params: [seed, agent.max_memory_tokens, evaluate, "policies.${key}"]
      outs: ["results/evaluate/${key}"]
"""
MEASURED_STAGES = {
    "questions": """
from pathlib import Path
from memsearcher import files
from stages.frame import Job, Stage, main
STAGE = Stage("questions", ("questions",))

def run(job: Job) -> None:
    path = job.params.questions.path
    said = Path(path).read_text() if path else "made up"
    files.write_json(job.work / "questions" / "dev.json", {"of": said})
    files.publish(job.work / "questions", Path("data/questions"))
    with open("ran", "a") as f:
        f.write(job.label + "\\n")
""",
    "train": """
from pathlib import Path
from memsearcher import files
from stages.frame import Job, Stage, main
PARAMS = ("seed", "agent.max_memory_tokens", "train.lr")
STAGE = Stage("train", PARAMS, ("data/questions",), items=lambda p: list(p.agents))

def run(job: Job) -> None:
    p, made = job.params, job.work / "model"
    files.write_json(made / "config.json", {"right": round(1000 * p.train.lr), "seed": p.seed})
    rows = [{"step": i, "reward": i / 10} for i in range(3)]
    files.write_jsonl(job.work / "results" / "metrics.jsonl", rows)
    for row in rows:
        job.track.metrics({"reward": row["reward"]}, step=row["step"])
    files.publish(made, Path(f"models/train/{job.item}"))
    files.publish(job.work / "results", Path(f"results/train/{job.item}"))
    job.track.policy(str(job.item), Path(f"models/train/{job.item}"), 2, {"reward": 0.2})
    job.track.record(Path(f"results/train/{job.item}/metrics.jsonl"))
    with open("ran", "a") as f:
        f.write(f"{job.label} {p.seed} {p.agent.max_memory_tokens}\\n")
""",
    "evaluate": """
import random
from pathlib import Path
from memsearcher import files
from memsearcher.statistics import em_interval
from stages.frame import Job, Stage, main
PARAMS = ("seed", "agent.max_memory_tokens", "evaluate", "policies.{item}")
STAGE = Stage(
    "evaluate",
    PARAMS,
    lambda p, item: ("data/questions", p.policies[item].after),
    items=lambda p: list(p.policies),
)

def run(job: Job) -> None:
    p, entry = job.params, job.params.policies[job.item]
    cap = p.evaluate.max_memory_tokens or p.agent.max_memory_tokens
    right = files.read_json(Path(entry.model) / "config.json")["right"] if entry.model else 0
    rows = []
    for name in ("nq", "hotpotqa"):
        for i in range(100):
            em = float(i < right + cap)
            rows.append({"question_id": f"{name}/{i}", "dataset": name, "em": em})
    made = job.work / "out"
    files.write_jsonl(made / "predictions.jsonl", rows)

    def scores(some):
        interval = em_interval([row["em"] for row in some])
        return {"em": interval.mean, "em_interval": [interval.low, interval.high], "n": len(some)}

    names = ("nq", "hotpotqa")
    metrics = {"datasets": {n: scores([r for r in rows if r["dataset"] == n]) for n in names}}
    metrics |= {"average": scores(rows), "behaviour": {"memory_cut_rate": 1 / cap}}
    metrics["fingerprint"] = {"cap": cap, "seed": p.seed, "right": right}
    files.write_json(made / "metrics.json", metrics)
    files.publish(made, Path(f"results/evaluate/{job.item}"))
    tokens = {"prompt": 9, "action": 5, "observation": 7, "memory": 3}
    turn = {"memory_before": "", "action": "I search.", "query": "who", "hits": [["1", 0.9]]}
    turn |= {"memory_after": "they", "memory_cut": False, "tokens": tokens}
    turn["seconds"] = {"action": 0.2, "search": 0.1, "memory": 0.3}
    row = {"question_id": "nq/0", "question": "who?", "golds": ["they"], "answer": "they"}
    job.track.trajectory(row | {"stop": "answered", "seconds": 0.6, "turns": [turn]}, 0)
    with open("ran", "a") as f:
        f.write(f"{job.label} {p.seed} {cap} {p.evaluate.split}\\n")
""",
}


def clone(to: Path) -> Path:
    """The working tree as git would commit it now, in a fresh repository without an identity."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    subprocess.run(["git", "init", "-q", "."], cwd=to, check=True)
    return to


def toy(to: Path, *, tracking: bool = False) -> Path:
    """Four stages of no time around the real frame and flows, and the real MLflow if wanted: each
    store costs seconds."""
    clone(to)
    if not tracking:
        text = (to / "params.yaml").read_text().replace("  enabled: true", "  enabled: false")
        (to / "params.yaml").write_text(text)
    (to / "dvc.lock").unlink(missing_ok=True)
    (to / "dvc.yaml").write_text(TOY_DVC)
    for path in (to / "stages").glob("*.py"):
        if path.name not in ("__init__.py", "frame.py"):
            path.unlink()
    for name, params, deps, items in TOY_STAGES:
        out = "data/two-{item}" if name == "two" else f"data/{name}"
        text = TOY_STAGE.format(name=name, params=params, deps=deps, items=items, out=out)
        (to / "stages" / f"{name}.py").write_text(text)
    versions = [f'{name}: {{version: 1, code: ""}}\n' for name, *_ in TOY_STAGES]
    (to / "code_versions.yaml").write_text("".join(versions))
    return to


def measured(to: Path) -> Path:
    """Three committed stages around the real frame, flows and tracking. Their policy is as good as
    `train.lr` says (in thousandths, of 100 questions a benchmark), plus its memory cap."""
    toy(to)
    for path in (to / "stages").glob("*.py"):
        if path.name not in ("__init__.py", "frame.py"):
            path.unlink()
    (to / "dvc.yaml").write_text(MEASURED_DVC)
    for name, text in MEASURED_STAGES.items():
        (to / "stages" / f"{name}.py").write_text(
            f"{text}\nif __name__ == '__main__':\n    main(STAGE, run)\n"
        )
    versions = [f'{name}: {{version: 1, code: ""}}\n' for name in MEASURED_STAGES]
    (to / "code_versions.yaml").write_text("".join(versions))
    (to / ".gitignore").write_text((ROOT / ".gitignore").read_text() + "/ran\n")
    composed = run(to, "flows.compose", "policies=memsearcher-base", "train.lr=0.02")
    assert composed.returncode == 0, composed.stdout
    for words in (["add", "--all"], ["commit", "--quiet", "-m", "toy"]):
        who = ["-c", "user.name=n", "-c", "user.email=n@localhost"]
        subprocess.run(["git", *who, *words], cwd=to, check=True)
    return to


def environment(root: Path, **more: str) -> dict[str, str]:
    """As a user has it, except that tracking stays in `root` and our Python is `python`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MEMSEARCHER_"))}
    place = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of other tests
    for name in ("MLFLOW_TRACKING_URI", *place):
        kept.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "LANG": "C", "OMP_NUM_THREADS": "1", **more}


def run(
    root: Path, *words: str, timeout_s: float = 300, **more: str
) -> subprocess.CompletedProcess:
    """`python -m WORDS` in `root`; output and errors together in stdout."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=root,
        env=environment(root, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def living(root: Path) -> list[str]:
    """Command lines of the processes that work in `root`, the uploader aside: it ends by itself."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == root and "memsearcher.uploader" not in process.cmdline():
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except (psutil.Error, OSError):
            continue
    return found


def until(done: Callable[[], object], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.5)


@contextmanager
def server(
    home: Path, *words: str, health: str = "/health", **more: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """`python -m WORDS --port …` on loopback while the block runs: (process, address)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with open(home / f"{words[0]}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, "--port", str(port)],
            cwd=home,
            env=environment(home, PREFECT_UI_API_URL=f"{url}/api", **more),  # what its pages ask
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until(lambda: _answers(url + health), 600)
        yield process, url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.TransportError:
        return False
