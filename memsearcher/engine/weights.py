"""What the engine is given: a folder to serve and, later, a stream of tensors that replaces it.

The engine always serves an untied export: reloading a model with tied embeddings keeps the old head
on vLLM's CPU build (0.32), since the head was packed into a copy when the model was first loaded.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from memsearcher import files
from memsearcher.files import BadInput

HEAD = "lm_head.weight"


class ModelConfig(Protocol):
    tie_word_embeddings: bool


def untied_export(
    module_state: Iterable[tuple[str, Tensor]], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs of a Hugging Face module, with an explicit head for tied models.

    Streams: one tensor is held back, a copy of the embedding, and only for a tied model.
    """
    head: Tensor | None = None
    for name, tensor in module_state:
        if config.tie_word_embeddings and name == HEAD:
            continue
        if config.tie_word_embeddings and name.endswith("embed_tokens.weight"):
            head = tensor.detach().clone()  # now: a gathered parameter is gone after its turn
        yield name, tensor
    if config.tie_word_embeddings:
        if head is None:
            raise ValueError("tied model without an embed_tokens.weight to take the head from")
        yield HEAD, head


def complete(
    pairs: Iterable[tuple[str, Tensor]], shapes: Mapping[str, list[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Passes `pairs` on while they agree with `shapes`, what the served folder holds. Raises
    ValueError on a partial tensor (ZeRO-3 outside a gather), an unknown and a missing name."""
    missing = dict(shapes)
    for name, tensor in pairs:
        if name not in shapes:
            raise ValueError(f"weight update: the served policy has no {name}")
        if list(tensor.shape) != shapes[name]:
            raise ValueError(f"weight update: {name} is {list(tensor.shape)}, not {shapes[name]}")
        missing.pop(name, None)
        yield name, tensor
    if missing:
        raise ValueError(f"weight update without {', '.join(sorted(missing)[:3])}")


def untied_folder(folder: Path, parent: Path = files.ROOT / "work" / "engine") -> Path:
    """`folder` itself, or for a tied model a copy under `parent`: links to its files, a config.json
    that says untied, and one more weight file with the head. Copies of older weights go."""
    config = files.read_json(folder / "config.json")
    shapes = shapes_of(folder)
    if not config.get("tie_word_embeddings", HEAD not in shapes):
        return folder
    from safetensors.torch import save_file

    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir())]
    owner = files.digest(str(folder.resolve()))
    out = parent / f"{owner}-{files.digest(stats)}"
    if out.is_dir():
        return out
    made = parent / f".{out.name}.{os.getpid()}"
    files.remove(made)
    made.mkdir(parents=True)
    where: dict[str, str] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            where |= dict.fromkeys(_shapes_in(path), f"weights-{path.name}")
            (made / f"weights-{path.name}").symlink_to(path.resolve())
        elif path.name not in ("config.json", "model.safetensors.index.json"):
            (made / path.name).symlink_to(path.resolve())
    if HEAD not in where:
        where[HEAD] = "weights-lm_head.safetensors"
        save_file({HEAD: _embedding(folder)}, made / where[HEAD], metadata={"format": "pt"})
    files.write_json(made / "config.json", config | {"tie_word_embeddings": False})
    files.write_json(made / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    for old in parent.glob(f"{owner}-*"):
        files.remove(old)
    try:
        made.rename(out)
    except OSError:  # another process was faster, or the disk is at fault
        if not out.is_dir():
            raise
        files.remove(made)
    return out


def _embedding(folder: Path) -> Tensor:
    from safetensors import safe_open

    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("embed_tokens.weight"):
                    return f.get_tensor(name)
    raise BadInput(f"{folder}: tied model without an embed_tokens.weight")


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in a folder's .safetensors files; reads headers only."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise BadInput(f"{folder}: no .safetensors file")
    return {name: shape for shard in shards for name, shape in _shapes_in(shard).items()}


def _shapes_in(shard: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="pt") as f:
            return {name: f.get_slice(name).get_shape() for name in f.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise BadInput(f"{shard}: not a safetensors file: {e}") from e
