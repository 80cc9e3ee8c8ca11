"""Trains anew and keeps the better policy: what the schedules of prefect.yaml run.

    python -m flows.retrain experiment=smoke

New questions where their source has changed, else a new seed. The challenger runs in a worktree
that shares DVC's cache (workspace.py); it and the champion answer the same dev questions, never the
test sets, and only what is better beyond noise becomes champion (champion.py). Artifacts go to
DVC's remote where one is set, dvc.lock to the branch `retrain` where it has changed, and to the
branch `champion` too where the challenger won: `git checkout champion && dvc checkout` is the best
policy so far.
"""

import sys
from pathlib import Path

from dvc.repo import Repo
from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact
from yaml import safe_dump, safe_load

from flows.champion import ALIAS, Champion, Registry, Verdict, judge
from flows.compose import composed
from flows.lock import only_one
from flows.pipeline import ends_in_a_line, pipeline
from flows.workspace import compose, dvc, git, open_worktree
from memsearcher import files, params, tracking
from memsearcher.files import ROOT
from memsearcher.params import Params

AGENT = "memsearcher"
POLICY = f"models/train/{AGENT}"
STATE = ROOT / "work" / "retrain"


@flow(name="retrain", persist_result=False)
def retrain(overrides: list[str] | None = None, seed: int | None = None, margin: float = 0) -> None:
    """One challenger against the champion.

    `overrides`: the experiment, as for `python -m flows.compose`. `seed`: one of your own in place
    of the next one. `margin`: by which share of EM the challenger has to be better at the least.
    """
    asked = overrides or []
    plain = params.validate(safe_load(composed(asked)))
    name = plain.tracking.experiment
    done_file = STATE / f"{name}.json"
    done = files.read_json(done_file) if done_file.is_file() else {}
    source = _source(plain)
    new = done.get("source") != source
    chosen = seed if seed is not None else plain.seed if new else done["seed"] + 1
    print(f"retrain: {name}: {'new questions, ' if new and done else ''}seed {chosen}", flush=True)

    with only_one():
        registry = Registry(name, AGENT)
        champion = registry.champion()
        folder = open_worktree(f"retrain-{name}", as_edited=False)
        duel = ["policies=retrain", "evaluate.split=dev", "evaluate.sample=null", f"seed={chosen}"]
        compose(folder, [*asked, *duel, *([] if champion else ["~policies.champion"])])
        if champion is not None:
            _fetch(folder, champion)
        unseen = new and plain.questions.kind != "demo"  # DVC sees their path, not what is in it
        pipeline.with_options(flow_run_name=f"challenger, seed {chosen}")(
            str(folder), ["evaluate"], ["questions"] if unseen else []
        )
        results = [folder / "results/evaluate" / each for each in ("challenger", "champion")]
        rows = [
            list(files.read_jsonl(each / "predictions.jsonl"))
            for each in results[: 1 + bool(champion)]
        ]
        verdict = judge(rows[0], rows[1] if champion else None, margin)
        _keep(folder, f"{name}: seed {chosen}", verdict)
        if verdict.promote:
            registry.promote(POLICY, _md5(folder), files.content_hash(folder / POLICY), verdict.why)
    files.write_json(done_file, {"source": source, "seed": chosen})
    _tell(plain, chosen, verdict)


def _source(p: Params) -> str:
    """What the questions are made from. Of a hub only the revision is asked."""
    if p.questions.kind == "local":
        return files.content_hash(ROOT / Path(str(p.questions.path)).expanduser())
    if p.questions.kind == "flashrag":
        return f"flashrag {p.questions.revision}"
    return files.digest(["demo", p.world.seed, p.world.train_questions, p.world.passages])


def _fetch(folder: Path, champion: Champion) -> None:
    """The champion's bytes into the worktree, by the hash that the registry knows."""
    pointer = {"outs": [{"md5": champion.md5, "hash": "md5", "path": ALIAS}]}
    (folder / f"{ALIAS}.dvc").write_text(safe_dump(pointer))
    dvc(folder, *(["pull"] if _has_remote(folder) else ["checkout", "--force"]), f"{ALIAS}.dvc")


def _has_remote(folder: Path) -> bool:
    with Repo(str(folder)) as repo:
        return bool(repo.config["core"].get("remote"))


def _md5(folder: Path) -> str:
    """Of the challenger, as DVC has it."""
    outs = safe_load((folder / "dvc.lock").read_text())["stages"][f"train@{AGENT}"]["outs"]
    return next(out["md5"] for out in outs if out["path"] == POLICY)


def _keep(folder: Path, title: str, verdict: Verdict) -> None:
    """Bytes first, then the commit that names them."""
    if _has_remote(folder):
        dvc(folder, "push")
    git("add", "--", "dvc.lock", at=folder)
    if git("diff", "--cached", "--name-only", at=folder):
        git("add", "--", "params.yaml", at=folder)
        git(
            "commit",
            "--quiet",
            "--no-verify",
            "-m",
            f"Retrained {title}\n\n{verdict.why}",
            at=folder,
        )
        git("branch", "--force", "retrain", git("rev-parse", "HEAD", at=folder))
    if verdict.promote:
        git("branch", "--force", ALIAS, git("rev-parse", "HEAD", at=folder))


def _tell(p: Params, seed: int, verdict: Verdict) -> None:
    print(f"retrain: {verdict.why}", flush=True)
    create_markdown_artifact(verdict.why, key="verdict", description="Champion or challenger")
    key = {"retrain": str(runtime.flow_run.id)}
    run = tracking.open_run(
        p, f"seed {seed}", experiment=f"{p.tracking.experiment} retraining", key=key
    )
    run.params({"seed": seed})
    run.tags({"verdict": "promoted" if verdict.promote else "kept", "why": verdict.why})
    if verdict.test is not None:
        d = verdict.test.difference
        figures = {"difference": d.mean, "low": d.low, "high": d.high, "p": verdict.test.p}
        run.metrics(figures | {"wins": verdict.test.wins, "losses": verdict.test.losses})
    run.close("FINISHED")


def main() -> None:
    with ends_in_a_line():
        retrain(sys.argv[1:])


if __name__ == "__main__":
    main()
