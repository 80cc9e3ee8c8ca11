"""What becomes of a journal's lines on MLflow: runs, metrics, data sets, models, traces.

Explicit clients and ids everywhere: no active run, so a run id in the environment is nothing. Sent
twice is there once: runs are found by tag, models by hash, traces by their trajectory, and metrics
carry the time at which they were written.
"""

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from memsearcher import files, registry, traces
from memsearcher.tracking import LINKS_KEPT, WHOLE, links_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

T = TypeVar("T")


class Store:
    def __init__(self, folder: Path, uri: str | None = None) -> None:
        """`folder`: the journals'. `uri`: a server in place of the one that each journal names."""
        self._folder, self._uri = folder, uri
        self._clients: dict[str, MlflowClient] = {}
        self._experiments: dict[tuple[str, str], str] = {}
        self._parents: dict[tuple[str, str], str] = {}

    def client(self, start: dict) -> "MlflowClient":
        from mlflow import MlflowClient

        uri = self._uri or start["uri"]
        if uri not in self._clients:
            self._clients[uri] = MlflowClient(tracking_uri=uri)
        return self._clients[uri]

    def _experiment(self, start: dict) -> str:
        client, uri, name = self.client(start), self._uri or start["uri"], start["experiment"]
        if (uri, name) not in self._experiments:
            found = client.get_experiment_by_name(name)
            place = None  # a server has its own place for artifacts
            if uri.startswith("sqlite:///"):
                place = (
                    Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts"
                ).as_uri()
            self._experiments[uri, name] = (
                found.experiment_id if found else client.create_experiment(name, place)
            )
        return self._experiments[uri, name]

    def run(self, start: dict, key: Mapping[str, str], tags: dict[str, str], name: str) -> "Run":
        """The run that carries the tags of `key`; made when there is none."""
        client, experiment = self.client(start), self._experiment(start)
        wanted = " and ".join(f"tags.`{k}` = '{v}'" for k, v in key.items())
        found = client.search_runs([experiment], wanted, max_results=1)
        return (
            found[0] if found else client.create_run(experiment, start["ms"], {**tags, **key}, name)
        )

    def begin(self, journal: str, start: dict) -> "Opened":
        """The run of a journal: a stage's below its pipeline's, a pipeline's, or one by itself."""
        if start["key"]:
            run = self.run(start, start["key"], {}, start["start"])
            return Opened(self, start, run, closed=start["once"] and run.info.status == "FINISHED")
        parent = self._parent(start)
        if start["start"] == WHOLE:
            return Opened(self, start, self.client(start).get_run(parent))
        tags = {"mlflow.parentRunId": parent, "stage": start["start"]}
        run = self.run(start, {"journal": journal}, tags, start["start"])
        self.client(start).update_run(parent, status="RUNNING")
        self._link(start, {start["start"]: run.info.run_id})
        return Opened(self, start, run)

    def _parent(self, start: dict) -> str:
        key = (self._uri or start["uri"], start["pipeline"])
        if key not in self._parents:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(start["ms"] / 1000))
            run = self.run(start, {"pipeline": start["pipeline"]}, {}, f"{WHOLE} {when}")
            self._parents[key] = run.info.run_id
        return self._parents[key]

    def end(self, start: dict, run: str, status: str, ms: int) -> None:
        """Ends a run. A stage's takes its pipeline's with it for as long as no other one begins."""
        client = self.client(start)
        client.set_terminated(run, status, ms)
        if start["key"] or start["start"] == WHOLE:
            return
        parent = self._parent(start)
        children = client.search_runs(
            [self._experiment(start)], f"tags.`mlflow.parentRunId` = '{parent}'"
        )
        seen = {child.info.status for child in children}
        if "RUNNING" not in seen:
            worst = next(s for s in ("FAILED", "KILLED", "FINISHED") if s in seen)
            client.set_terminated(parent, worst, ms)

    def makers(self, start: dict, made_from: Mapping[str, str]) -> None:
        """Links a pipeline's run to the runs that made what it found cached."""
        client, parent = self.client(start), self._parent(start)
        everywhere = [e.experiment_id for e in client.search_experiments()]
        found = {}
        for stage, fingerprint in made_from.items():
            wanted = f"tags.stage = '{stage}' and tags.fingerprint = '{fingerprint}'"
            wanted += " and attributes.status = 'FINISHED'"
            if runs := client.search_runs(everywhere, wanted, max_results=1):
                found[stage] = runs[0]
                client.set_tag(parent, f"cached.{stage.replace('@', '.')}", runs[0].info.run_id)
        lines = [
            f"- {stage}: [{run.info.run_name}]"
            f"(#/experiments/{run.info.experiment_id}/runs/{run.info.run_id})"
            for stage, run in found.items()
        ]
        if lines:
            client.set_tag(
                parent, "mlflow.note.content", "\n".join(["Cached; made by", "", *lines])
            )
        self._link(start, {stage: run.info.run_id for stage, run in found.items()}, whole=True)

    def _link(self, start: dict, stages: Mapping[str, str], *, whole: bool = False) -> None:
        """Writes down what `tracking.links` reads. `whole`: all that was cached is in it now."""
        path = links_file(start["pipeline"], self._folder)
        known: dict = files.read_json(path) if path.is_file() else {"stages": {}, "whole": False}
        files.write_json(
            path,
            {
                "experiment": self._experiment(start),
                "run": self._parent(start),
                "stages": {**known["stages"], **stages},
                "whole": known["whole"] or whole,
            },
        )
        old = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)[:-LINKS_KEPT]
        for each in old:
            files.remove(each)


class Opened:
    """The run that a journal is written to."""

    def __init__(self, store: Store, start: dict, run: "Run", *, closed: bool = False) -> None:
        """`closed`: it is there already and takes nothing more."""
        self._store, self._start, self.closed = store, start, closed
        self._client = store.client(start)
        self.id, self._experiment = run.info.run_id, run.info.experiment_id
        self._params = dict(run.data.params)
        self._above = {k: v for k, v in run.data.tags.items() if k == "mlflow.parentRunId"}
        self._traced: set[str] | None = None if run.data.tags.get("traces") else set()

    def add(self, events: list[dict], copies: Path) -> None:
        """In the order of the lines, metrics in batches."""
        from mlflow.entities import Metric, RunTag

        metrics: list[Metric] = []
        for e in events:
            if "metrics" in e:
                of = registry.model(self._client, e["model"]) if e.get("model") else None
                metrics += [
                    Metric(k, v, e["ms"], e["step"], model_id=of, run_id=self.id)
                    for k, v in e["metrics"].items()
                ]
            elif "params" in e:
                self._add_metrics(metrics)
                metrics = []
                self._add_params(e["params"])
            elif "tags" in e:
                for some in _batches([RunTag(k, v) for k, v in e["tags"].items()], 100):
                    self._client.log_batch(self.id, tags=some)
            elif "artifact" in e:
                self._artifact(copies / e["artifact"])
            elif "dataset" in e:
                self._dataset(e["dataset"])
            elif "policy" in e:
                registry.policy(self._client, self._start, self.id, e)
            elif "trace" in e:
                self._trace(e)
            elif "cached" in e:
                self._store.makers(self._start, e["cached"])
        self._add_metrics(metrics)

    def _add_metrics(self, metrics: "list[Metric]") -> None:
        for some in _batches(metrics, 900):  # MLflow takes 1,000 metrics or 100 others at once
            self._client.log_batch(self.id, metrics=some)

    def _add_params(self, new: dict[str, str]) -> None:
        """A parameter keeps its value for a whole run: another value is another run's."""
        from mlflow.entities import Param

        if changed := {k for k, v in new.items() if self._params.get(k, v) != v}:
            told = "; ".join(f"{k} was {self._params[k]}, is {new[k]}" for k in sorted(changed))
            tags = {"mlflow.note.content": f"continues {self.id}: {told}", **self._above}
            name = f"{self._start['start']} (other parameters)"
            run = self._store.run(self._start, {"continues": self.id}, tags, name)
            self._client.set_terminated(self.id, "KILLED")
            logging.getLogger(__name__).warning(
                "run %s: %s; goes on as run %s", self.id, told, run.info.run_id
            )
            new = self._params | new
            self.id, self._params = run.info.run_id, {}
        params = [Param(k, v) for k, v in new.items() if k not in self._params]
        for some in _batches(params, 100):
            self._client.log_batch(self.id, params=some)
        self._params |= new

    def _artifact(self, copy: Path) -> None:
        if copy.is_dir():
            self._client.log_artifacts(self.id, str(copy), copy.name)
        elif copy.is_file():
            self._client.log_artifact(self.id, str(copy))

    def _dataset(self, known: dict[str, str]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"uri": known["source"]})
        dataset = Dataset(known["name"], known["digest"], "local", source)
        context = InputTag("mlflow.data.context", known["context"])
        self._client.log_inputs(self.id, [DatasetInput(dataset, [context])])

    def _trace(self, event: dict) -> None:
        row, step = event["trace"], event["step"]
        name = f"{row['question_id']} step {step}"
        if self._traced is None:
            old = self._client.search_traces(
                locations=[self._experiment], run_id=self.id, include_spans=False
            )
            self._traced = {trace.info.tags.get("trajectory", "") for trace in old}
        if name in self._traced:
            return
        if not self._traced:
            self._client.set_tag(self.id, "traces", "true")
        tags = {"trajectory": name, "step": str(step), "stage": self._start["start"]}
        traces.log(self._client, row, tags, self._experiment, self.id, event["ms"])
        self._traced.add(name)


def quiet_environment() -> None:
    """Set before MLflow is imported: no telemetry, short waits, traces as part of our own order."""
    os.environ.pop("MLFLOW_RUN_ID", None)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")


def _batches(items: list[T], size: int) -> Iterable[list[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))
