"""What a flow leaves on its page: stages with their MLflow runs, the results table, the report."""

import os
from collections.abc import Mapping
from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.schemas.objects import State

from flows import MLFLOW_URL
from memsearcher import tracking

PATIENCE_S = 2.0  # for MLflow's ids; without them the table says that they are not known yet


def write(root: Path, states: Mapping[str, State], pipeline: str | None) -> None:
    """`pipeline`: the name under which MLflow knows this flow run, None where it is not told."""
    ran = {name for name, state in states.items() if state.name in ("Completed", "Failed")}
    links = tracking.links(pipeline, ran, PATIENCE_S) if pipeline is not None else {}
    base = f"{_mlflow()}/#/experiments/{links.get('experiment')}/runs/"
    rows = ["| stage | state | MLflow run |", "|---|---|---|"]
    for name, state in states.items():
        run = links.get("stages", {}).get(name)
        rows.append(f"| {name} | {state.name} | {f'[{run[:8]}]({base}{run})' if run else '–'} |")
    create_markdown_artifact("\n".join(rows), key="stages", description="What ran, what was cached")
    if links:
        create_link_artifact(f"{base}{links['run']}", "MLflow run", key="mlflow")
    results, page = root / "report/results.md", root / "report/index.html"
    if all(state.is_completed() for state in states.values()) and results.is_file():
        text = results.read_text(encoding="utf-8")
        create_markdown_artifact(text, key="results", description="The table of this run")
        create_link_artifact(page.as_uri(), "report", key="report")


def _mlflow() -> str:
    """Where a browser finds MLflow: the tracking server, or the pages of `make ui`."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith("http"):
        return uri.rstrip("/")
    return MLFLOW_URL.read_text() if MLFLOW_URL.is_file() else "http://127.0.0.1:5000"
