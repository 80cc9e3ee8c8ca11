"""Reads results/ as far as the parameters name it, and says what is missing and what is left over.

Nothing is inferred from folder names: a policy that the parameters no longer name is not shown, and
one whose results are not there is reported as missing rather than skipped.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from memsearcher import files
from memsearcher.evaluation import comparable
from memsearcher.params import Params
from memsearcher.published import COLUMNS, SETTINGS
from memsearcher.report.ablation import Ablation, read


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One policy's results. `metrics` is metrics.json as `evaluation.summarise` writes it."""

    name: str
    agent: str
    metrics: dict
    predictions: list[dict]
    trajectories: Path

    @property
    def setting(self) -> str:
        """Hash of everything that must agree before two policies are compared."""
        return files.digest(comparable(self.metrics["fingerprint"]))

    def by_dataset(self) -> dict[str, dict[str, float]]:
        """EM by benchmark and question."""
        out: dict[str, dict[str, float]] = {}
        for row in self.predictions:
            out.setdefault(row["dataset"], {})[row["question_id"]] = float(row["em"])
        return out


@dataclass(frozen=True, slots=True)
class Curve:
    """A journal of steps, of `stage` warmup or train; a warm-up's phases are journals of their own.
    `summary` is {} where there is none."""

    stage: str
    agent: str
    phase: str
    rows: list[dict]
    summary: dict

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.stage, self.agent, self.phase)))


@dataclass(frozen=True, slots=True)
class Collected:
    params: Params
    policies: list[Evaluated]
    curves: list[Curve]
    retrieval: dict
    retrieval_fingerprint: dict  # of every figure in `retrieval`
    stages: list[dict]
    ablation: Ablation = field(default_factory=Ablation)
    missing: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    @property
    def invented(self) -> bool:
        return self.params.questions.kind == "demo"


def collect(params: Params, root: Path = Path(".")) -> Collected:
    results = root / "results"
    missing: list[str] = []
    policies = list(_policies(params, results / "evaluate", missing))
    curves = list(_curves(params, results, missing))
    retrieval = results / "retrieval"
    searched = (retrieval / "metrics.json").is_file()
    if not searched:
        missing.append("retrieval quality: results/retrieval/metrics.json is not there")
    ablation = read(root / "ablations", params.report.memory_caps)
    return Collected(
        params,
        policies,
        curves,
        files.read_json(retrieval / "metrics.json") if searched else {},
        files.read_json(retrieval / "fingerprint.json") if searched else {},
        _stages(root / "work"),
        ablation,
        [*missing, *ablation.missing],
        [*_leftovers(params, results), *ablation.leftovers],
        [*_conflicts(policies), *ablation.conflicts],
    )


def deviations(params: Params) -> list[tuple[str, object, object]]:
    """(parameter, the paper's value, ours) where they differ."""
    tree = asdict(params)
    out = []
    for key, theirs in SETTINGS.items():
        node: object = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node != theirs and not (node is None and key.startswith("agents.")):
            out.append((key, theirs, node))
    return out


def _policies(params: Params, folder: Path, missing: list[str]) -> Iterator[Evaluated]:
    for name, entry in params.policies.items():
        at = folder / name
        if not (at / "metrics.json").is_file():
            missing.append(f"policy {name}: results/evaluate/{name} is not there")
            continue
        found = Evaluated(
            name,
            entry.agent,
            files.read_json(at / "metrics.json"),
            list(files.read_jsonl(at / "predictions.jsonl")),
            at / "trajectories.jsonl",
        )
        for dataset in COLUMNS:
            if dataset not in found.metrics["datasets"]:
                missing.append(f"policy {name}: no questions of {dataset} were evaluated")
        yield found


def _curves(params: Params, results: Path, missing: list[str]) -> Iterator[Curve]:
    """Warm-up and training runs that the named agents and policies call for."""
    used = [entry.model for entry in params.policies.values()]
    for agent, entry in params.agents.items():
        stages = ["train"]
        if entry.init == "warmup" or f"models/warmup/{agent}" in used:
            stages.insert(0, "warmup")
        for stage in stages:
            at = results / stage / agent
            if not (at / "metrics.jsonl").is_file():
                missing.append(f"{stage} of {agent}: results/{stage}/{agent} is not there")
                continue
            summary = at / "summary.json"
            told = files.read_json(summary) if summary.is_file() else {}
            phases: dict[str, list[dict]] = {}
            for row in files.read_jsonl(at / "metrics.jsonl"):
                phases.setdefault(str(row.get("phase", "")), []).append(row)
            for number, (phase, rows) in enumerate(phases.items(), 1):
                yield Curve(stage, agent, phase, rows, told if number == len(phases) else {})


def _leftovers(params: Params, results: Path) -> Iterator[str]:
    """Result folders that the parameters do not name: left on disk, out of the report."""
    named: dict[str, set[str]] = {
        "evaluate": set(params.policies),
        "train": set(params.agents),
        "warmup": set(params.agents),
    }
    for kind, names in named.items():
        parent = results / kind
        for path in sorted(parent.iterdir()) if parent.is_dir() else []:
            if path.is_dir() and path.name not in names:
                yield f"results/{kind}/{path.name}"


def _conflicts(policies: list[Evaluated]) -> list[str]:
    """Which parts of the fingerprint differ between the first policy and each other one."""
    out = []
    for other in policies[1:]:
        first = comparable(policies[0].metrics["fingerprint"])
        theirs = comparable(other.metrics["fingerprint"])
        keys = sorted(k for k in {*first, *theirs} if first.get(k) != theirs.get(k))
        if keys:
            out.append(f"{other.name} and {policies[0].name} differ in {', '.join(keys)}")
    return out


def _stages(work: Path) -> list[dict]:
    """The last finished run of each stage, in the order they ended, with its run on MLflow as far
    as the uploader has written it down. Empty where no journal is."""
    path = work / "stages.jsonl"
    if not path.is_file():
        return []
    runs: dict[str, dict] = {}
    for link in sorted((work / "tracking" / "links").glob("*.json"), key=_age):
        known = files.read_json(link)
        for label, run in known["stages"].items():
            runs[label] = {"experiment": known["experiment"], "run": run}
    last = {row["stage"]: row for row in files.read_jsonl(path) if row["status"] == "FINISHED"}
    ended = sorted(last.values(), key=lambda row: str(row["ended"]))
    return [row | {"mlflow": runs.get(row["stage"])} for row in ended]


def _age(path: Path) -> float:
    return path.stat().st_mtime
