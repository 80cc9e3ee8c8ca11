"""Checkpoints of a run: model, optimiser, RNG, `State`. Atomic, hashed; last k and best stay.

DeepSpeed reads its own files with pickle, so nothing is ever loaded whose SHA-256 is not in the
manifest that this run wrote beside it. What leaves the run is safetensors (`Learner.export`).
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.learner.collate import Row
from memsearcher.learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class State:
    """Beside model, optimiser and RNG. The data order is a function of (seed, step), the learning
    rate one of (updates, lr_scale): these are the data cursor and the scheduler."""

    run: str  # fingerprint of the job
    step: int
    updates: int  # optimiser steps
    weight_version: int
    lr_scale: float
    best: int  # step of the best dev EM so far; its checkpoint stays


class Saveable(Protocol):
    """The two methods of a DeepSpeed engine that matter here."""

    def save_checkpoint(
        self, save_dir: str, tag: str, client_state: dict[str, object]
    ) -> object: ...

    def load_checkpoint(self, load_dir: str, tag: str) -> tuple[str | None, dict[str, object]]: ...


def folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p.parent for p in root.glob("step-*/manifest.json"))


def save(engine: Saveable, ranks: Ranks, root: Path, state: State, keep: int) -> None:
    """Collective. A reader sees the whole checkpoint or none of it."""
    tag = _tag(state.step)
    part = root / "part"
    if ranks.rank == 0:
        files.remove(part)
        part.mkdir(parents=True)
    ranks.barrier()
    engine.save_checkpoint(str(part), tag=tag, client_state={"rng": torch.get_rng_state()})
    ranks.barrier()
    if ranks.rank == 0:
        names = sorted(p for p in (part / tag).rglob("*") if p.is_file())
        hashes = {str(p.relative_to(part / tag)): files.sha256(p) for p in names}
        files.write_json(part / tag / "manifest.json", {"state": asdict(state), "sha256": hashes})
        files.remove(root / tag)
        os.replace(part / tag, root / tag)
        files.remove(part)
        for old in folders(root)[:-keep]:
            if old.name != _tag(state.best):
                files.remove(old)
    ranks.barrier()


def load(engine: Saveable, root: Path, run: str, step: int | None = None) -> State | None:
    """The checkpoint of `step`, or the newest, into the engine; None where there is no checkpoint.

    Collective. Raises BadInput where a file is not the one that the run wrote.
    """
    found = folders(root) if step is None else [root / _tag(step)]
    if not found:
        return None
    newest = found[-1]
    manifest = files.read_json(newest / "manifest.json")
    state = State(**manifest["state"])
    if state.run != run:
        raise BadInput(f"{newest}: a checkpoint of run {state.run!r}, this is run {run!r}")
    there = {str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file()} - {
        "manifest.json"
    }
    if there != set(manifest["sha256"]):
        odd = sorted(there ^ set(manifest["sha256"]))
        raise BadInput(f"{newest}: the manifest and the folder differ in {odd}")
    for name, expected in manifest["sha256"].items():
        actual = files.sha256(newest / name)
        if actual != expected:
            raise BadInput(f"{newest / name}: SHA-256 is {actual}, this run wrote {expected}")
    _, client = engine.load_checkpoint(str(root), tag=newest.name)
    rng = client["rng"]
    if isinstance(rng, torch.Tensor):
        torch.set_rng_state(rng.cpu())
    return state


def _tag(step: int) -> str:
    return f"step-{step:06d}"


def most_bytes(weights: int, keep: int, bf16: bool) -> int:
    """Upper bound of what a run of a policy of `weights` bytes writes: `keep` checkpoints, the best
    and one in the making, and two exports. A checkpoint holds weights, float32 master copy and two
    moments, each twice the size of bfloat16 weights."""
    return weights * ((keep + 2) * (7 if bf16 else 4) + 2)


def dump(folder: Path, updates: int, rows: Sequence[Row], figures: dict[str, float]) -> None:
    """The rows of an optimiser step that was left out, for a person to look at."""
    path = folder / f"update-{updates:06d}.json"
    files.write_json(path, {"figures": figures, "rows": [asdict(row) for row in rows]})
