"""A git worktree in which another experiment runs: same code, same environment, same DVC cache.

What has been made anywhere is found by DVC's run cache, whatever dvc.lock says, so an ablation cell
or a retraining computes only what nobody has computed before, and this tree is never touched. Work
in progress stays in the worktree, under each job's fingerprint.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from dvc.config import Config
from dvc.repo import Repo
from yaml import safe_load

from flows.compose import check_paths, composed
from flows.graph import stage_environment
from memsearcher import files
from memsearcher.files import ROOT, BadInput

HOME = ROOT / "work" / "worktrees"
NOBODY = ("-c", "user.name=memsearcher", "-c", "user.email=memsearcher@localhost")


def open_worktree(name: str, *, as_edited: bool) -> Path:
    """work/worktrees/<name> at the last commit; with `as_edited` the tracked files as they stand
    now. Made once, then reused: what was left to go on from is still there."""
    commit = git("rev-parse", "--verify", "--quiet", "HEAD", fails="this repository has no commit")
    if as_edited:  # a commit that no branch knows; nothing when nothing is edited
        commit = git("stash", "create") or commit
    folder = HOME / name
    git("worktree", "prune")
    if (folder / ".git").is_file():
        git("checkout", "--quiet", "--force", "--detach", commit, at=folder)
    else:
        files.remove(folder)
        git("worktree", "add", "--quiet", "--force", "--detach", str(folder), commit)
    _share_cache(folder)
    dvc(folder, "checkout", "--force", "--quiet", check=False)  # what the cache lacks will be made
    return folder


def dvc(folder: Path, *words: str, check: bool = True) -> None:
    """A DVC command in a worktree. Raises BadInput with what it says."""
    command = [sys.executable, "-m", "dvc", *words]
    done = subprocess.run(
        command, cwd=folder, env=stage_environment(), capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        said = done.stderr.strip().removeprefix("ERROR: ")
        raise BadInput(f"dvc {words[0]}: {said.splitlines()[0] if said else done.returncode}")


def compose(folder: Path, overrides: list[str]) -> None:
    """params.yaml of the worktree. Files that it names by relative path are this tree's."""
    text = composed(overrides, folder / "conf")
    check_paths(text)
    chosen = safe_load(text)
    for path in (chosen["corpus"]["path"], chosen["questions"]["path"]):
        if path and not Path(path).expanduser().is_absolute() and not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to(ROOT / path)
    with files.atomic_write(folder / "params.yaml") as f:
        f.write(text)


def _share_cache(folder: Path) -> None:
    """Local settings and remotes are this tree's, with paths that hold elsewhere too."""
    local = ROOT / ".dvc" / "config.local"
    if local.is_file():
        shutil.copyfile(local, folder / ".dvc" / "config.local")
    with Repo(str(ROOT)) as repo:
        cache, remotes = repo.cache.local.path, dict(repo.config["remote"])
    config = Config(str(folder / ".dvc"))
    with config.edit("local") as edited:
        edited["cache"]["dir"] = str(Path(cache).parent.parent)
        for name, remote in remotes.items():
            edited["remote"].setdefault(name, {})["url"] = str(remote["url"])


def git(*words: str, at: Path = ROOT, fails: str | None = None) -> str:
    """What git says. Raises BadInput with `fails`, or with git's own last word."""
    done = subprocess.run(
        ["git", *NOBODY, *words], cwd=at, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BadInput(
            fails or f"git {words[0]}: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    return done.stdout.strip()
