"""Checkpoints of a run: model, optimiser, RNG, step. Atomic, hashed, the last k kept.

DeepSpeed reads its own files with pickle, so nothing is ever loaded whose SHA-256 is not in the
manifest that this run wrote beside it. What leaves the run is safetensors (`Learner.export`).
"""

import os
from pathlib import Path
from typing import Protocol

import torch

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.learner.ranks import Ranks


class Saveable(Protocol):
    """The two methods of a DeepSpeed engine that matter here."""

    def save_checkpoint(
        self, save_dir: str, tag: str, client_state: dict[str, object]
    ) -> object: ...

    def load_checkpoint(self, load_dir: str, tag: str) -> tuple[str | None, dict[str, object]]: ...


def folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p.parent for p in root.glob("step-*/manifest.json"))


def save(engine: Saveable, ranks: Ranks, root: Path, state: dict[str, int], keep: int) -> None:
    """Collective. `state` holds "step". A reader sees the whole checkpoint or none of it."""
    tag = f"step-{state['step']:06d}"
    part = root / "part"
    if ranks.rank == 0:
        files.remove(part)
        part.mkdir(parents=True)
    ranks.barrier()
    engine.save_checkpoint(str(part), tag=tag, client_state={**state, "rng": torch.get_rng_state()})
    ranks.barrier()
    if ranks.rank == 0:
        names = sorted(p for p in (part / tag).rglob("*") if p.is_file())
        hashes = {str(p.relative_to(part / tag)): files.sha256(p) for p in names}
        files.write_json(part / tag / "manifest.json", {"state": state, "sha256": hashes})
        files.remove(root / tag)
        os.replace(part / tag, root / tag)
        files.remove(part)
        for old in folders(root)[:-keep]:
            files.remove(old)
    ranks.barrier()


def load(engine: Saveable, root: Path) -> dict[str, int] | None:
    """The newest checkpoint into the engine; its state, or None where there is no checkpoint.

    Collective. Raises BadInput where a file is not the one that the run wrote.
    """
    found = folders(root)
    if not found:
        return None
    newest = found[-1]
    manifest = files.read_json(newest / "manifest.json")
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
    return dict(manifest["state"])
