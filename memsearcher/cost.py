r"""What answering costs: tokens, and an estimate of floating-point operations.

A decoder of N weights (the input embedding, a look-up, not counted; a tied one is counted once, as
the head), L layers and attention width d reads a context of n tokens with

    2·N·n  +  2·L·d·n·(n + 1)     operations:

two for each weight and token; and in each layer, for each of the n(n+1)/2 pairs of a token with
itself or an earlier one, 2·d for the score and 2·d for the weighted sum. Softmax, norms and
sampling are left out.

Afresh, a trajectory costs the sum over its turns' contexts: with a bounded memory it grows like the
number of turns, with a history like its square and more. An engine that keeps the prefix of a
growing history reads every token of it once: it then costs what its last context costs. A rewritten
memory shares only the question with the turn before, which is not counted as saved.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memsearcher.files import BadInput


@dataclass(frozen=True, slots=True)
class ModelSize:
    """`weights`: N above; `layers`: L; `width`: d, heads × the width of one."""

    weights: int
    layers: int
    width: int


def size_of(folder: Path) -> ModelSize:
    """Of a Hugging Face folder, from its config and the headers of its safetensors."""
    from math import prod

    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as tensors:
            sizes |= {name: prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 — not a mapping
    if not sizes:
        raise BadInput(f"{folder}: no safetensors in it")
    embedding = "model.embed_tokens.weight"
    untied = "lm_head.weight" in sizes
    weights = sum(n for name, n in sizes.items() if not (untied and name == embedding))
    heads = config["num_attention_heads"]
    head_width = config.get("head_dim") or config["hidden_size"] // heads
    return ModelSize(weights, config["num_hidden_layers"], heads * head_width)


def operations(context: int, size: ModelSize) -> float:
    """Of one forward pass over `context` tokens.

    >>> operations(10, ModelSize(weights=1000, layers=2, width=8))
    23520.0
    """
    attention = 2 * size.layers * size.width * context * (context + 1)
    return float(2 * size.weights * context + attention)


def afresh(contexts: Sequence[int], size: ModelSize) -> float:
    """Every turn's context read from its first token."""
    return sum(operations(context, size) for context in contexts)


def prefix_kept(contexts: Sequence[int], size: ModelSize, *, keeps_history: bool) -> float:
    """As `afresh`, but of a history that only grows every token is read once."""
    return afresh(contexts[-1:] if keeps_history else contexts, size)
