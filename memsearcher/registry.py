"""Policies on MLflow: logged models and versions, known by path and hash. DVC keeps the bytes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

SOURCE = "dvc://"


def model(client: "MlflowClient", sha256: str) -> str | None:
    """The logged model of these very bytes, where one is known."""
    places = [each.experiment_id for each in client.search_experiments()]
    found = client.search_logged_models(places, f"tags.sha256 = '{sha256}'", max_results=1)
    return found[0].model_id if found else None


def policy(client: "MlflowClient", start: dict, run: str, event: dict) -> None:
    """A logged model at its step, with its metrics there, and a version in the registry."""
    from mlflow.entities import LoggedModelOutput, Metric

    known, step = event["policy"], event["step"]
    made = model(client, known["sha256"])
    if made is None:
        made = client.create_logged_model(
            client.get_run(run).info.experiment_id,
            known["name"],
            source_run_id=run,
            tags=known | {"stage": start["start"]},
            params={"path": known["path"], "sha256": known["sha256"]},
            model_type="policy",
        ).model_id
        client.finalize_logged_model(made, "READY")
    there = client.get_run(run).outputs  # MLflow refuses an output that is there
    if there is None or made not in {output.model_id for output in there.model_outputs}:
        client.log_outputs(run, [LoggedModelOutput(made, step)])
    values = [
        Metric(k, v, event["ms"], step, model_id=made, run_id=run)
        for k, v in event["values"].items()
    ]
    client.log_batch(run, metrics=values)
    register(client, start["experiment"], known, run, made)


def register(
    client: "MlflowClient",
    experiment: str,
    known: Mapping[str, str],
    run: str | None,
    model_id: str | None,
) -> str:
    """The version of this policy; made when there is none. `known`: name, path and sha256."""
    name = f"{experiment}.{known['name']}"
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    same = f"name = '{name}' and tags.sha256 = '{known['sha256']}'"
    if found := client.search_model_versions(same, max_results=1):
        return str(found[0].version)
    source = f"{SOURCE}{known['path']}?sha256={known['sha256']}"
    made = client.create_model_version(name, source, run, dict(known), model_id=model_id)
    return str(made.version)
