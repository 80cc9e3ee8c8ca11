"""The smallest policy that DeepSpeed trains, rows for it, processes of their own; how to encode."""

import os
import random
import subprocess
import sys
from pathlib import Path

from memsearcher.files import ROOT
from memsearcher.learner.collate import Row
from memsearcher.params import Encode

VOCABULARY = 97
ENCODE = Encode(
    model="package:minilm",
    revision=None,
    pooling="mean",
    query_prefix="query: ",
    passage_prefix="passage: ",
    max_query_tokens=16,
    max_passage_tokens=32,
    batch_size=2,
    precision="float32",
    shards=[0],
    published_index=None,
)


def tiny_policy(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Digits:
    """What a loop asks of a chat, for a policy without a tokenizer."""

    end_id = 0

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def eight_turns() -> list[Row]:
    """1 … 8 sampled tokens, two tokens of observation behind them."""
    rng, made = random.Random(0), []
    for i in range(8):
        prompt, count = rng.randrange(2, 6), i + 1
        ids = [rng.randrange(VOCABULARY) for _ in range(prompt + count + 2)]
        mask, logprobs = [True] * count + [False] * 2, [-4.5] * count + [0.0] * 2
        made.append(Row(ids, prompt, mask, logprobs, rng.uniform(-1, 1), trajectory=str(i // 2)))
    return made


def python(
    module: str, function: str, *arguments: Path, **environment: str
) -> subprocess.Popen[str]:
    """`function` of a test file in a process that belongs to no ranks yet."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {k: v for k, v in os.environ.items() if k not in own}
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (ROOT, here, here / "integration")))
    code = f"import sys, {module}; {module}.{function}(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
