"""Which of two policies stays: the paired test, and the alias `champion` in MLflow's registry.

The registry knows a policy by its hashes and DVC keeps its bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memsearcher import registry, store, tracking
from memsearcher.files import BadInput
from memsearcher.statistics import Paired, paired

ALIAS = "champion"
ALPHA = 0.05
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`test`: challenger minus champion; None where there was no champion."""

    promote: bool
    why: str
    test: Paired | None


def judge(challenger: Sequence[Row], champion: Sequence[Row] | None, margin: float) -> Verdict:
    """Promotes only what is better beyond noise: the 95% interval of the paired difference in EM
    lies above `margin` (a share), and McNemar's p is below ALPHA.

    Rows of predictions.jsonl, both of the same questions; raises BadInput where they are not.
    """
    if champion is None:
        return Verdict(True, "promoted: there was no champion", None)
    mine, theirs = _scores(challenger), _scores(champion)
    if mine.keys() != theirs.keys():
        raise BadInput(
            f"challenger and champion answered other questions: {len(mine.keys() - theirs.keys())} "
            f"of {len(mine)} and {len(theirs.keys() - mine.keys())} of {len(theirs)}"
        )
    datasets = sorted({dataset for dataset, _ in mine})
    strata = [
        [[each[key] for key in sorted(mine) if key[0] == dataset] for dataset in datasets]
        for each in (mine, theirs)
    ]
    test = paired(*strata)
    d = test.difference
    figures = (
        f"{100 * d.mean:+.1f} EM ({100 * d.low:+.1f} to {100 * d.high:+.1f}) on {d.n} dev "
        f"questions, McNemar p = {test.p:.2g}"
    )
    if d.low > margin and test.p < ALPHA:
        return Verdict(True, f"promoted: better by {figures}", test)
    if d.mean <= 0:
        reason = "worse" if d.mean < 0 else "as good"
    else:
        reason = f"not shown to be better by more than {100 * margin:g} EM"
    return Verdict(False, f"kept the champion: the challenger is {reason}: {figures}", test)


def _scores(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    return {(str(r["dataset"]), str(r["question_id"])): float(str(r["em"])) for r in rows}


@dataclass(frozen=True, slots=True)
class Champion:
    """`md5`: by which DVC finds the bytes; `sha256`: what the runs on MLflow know it by."""

    version: str
    md5: str
    sha256: str


class Registry:
    """Of one experiment's policies for one agent."""

    def __init__(self, experiment: str, agent: str) -> None:
        store.quiet_environment()
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=tracking.uri())
        self._experiment, self._agent = experiment, agent
        self.name = f"{experiment}.{agent}"

    def champion(self) -> Champion | None:
        for model in self._client.search_registered_models(f"name = '{self.name}'"):
            if ALIAS in model.aliases:
                found = self._client.get_model_version(self.name, model.aliases[ALIAS])
                return Champion(str(found.version), found.tags["md5"], found.tags["sha256"])
        return None

    def promote(self, path: str, md5: str, sha256: str, why: str) -> Champion:
        known = {"name": self._agent, "path": path, "sha256": sha256}
        version = registry.register(self._client, self._experiment, known, None, None)
        for key, value in {"md5": md5, "why": why}.items():
            self._client.set_model_version_tag(self.name, version, key, value)
        self._client.set_registered_model_alias(self.name, ALIAS, version)
        return Champion(version, md5, sha256)
