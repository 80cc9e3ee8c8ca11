"""The policy as a module: log-probs out, weights in and out of safetensors. Knows no DeepSpeed."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.grpo import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LOGITS_BYTES = {"cpu": 2**26, "cuda": 2**28}  # float32 logits that stand at once


class LogProbs(torch.nn.Module):
    """The policy with a head that returns what the loss needs. One module, so that DeepSpeed sees
    one forward pass; the Hugging Face model is `policy`."""

    def __init__(self, policy: "PreTrainedModel", temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.temperature = temperature
        self.logits_bytes: int | None = None  # None: LOGITS_BYTES
        self.vocabulary = int(policy.config.vocab_size)
        self.tied = policy.get_input_embeddings().weight is policy.get_output_embeddings().weight

    def forward(
        self, input_ids: Tensor, select: Tensor, targets: Tensor, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """(M, L), (M, L), (N,) -> (N,) log-probs, (N,) entropies; the head sees N tokens only."""
        out = self.policy.model(input_ids=input_ids, use_cache=False)
        hidden = out.last_hidden_state  # (M, L, D)
        return chunked_logprobs(
            hidden[select],
            self.policy.lm_head,
            targets,
            vocabulary=self.vocabulary,
            temperature=self.temperature,
            entropy_grad=entropy_grad,
            logits_bytes=self.logits_bytes or LOGITS_BYTES[hidden.device.type],
        )


def chunked_logprobs(
    hidden: Tensor,
    head: torch.nn.Linear,
    ids: Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    logits_bytes: int,
) -> tuple[Tensor, Tensor]:
    """`grpo.token_logprobs` of (N, D) hidden states, in chunks of tokens whose float32 logits take
    `logits_bytes` at most and which are recomputed in the backward pass: (N, V) float32 logits
    never stand in memory. Their gradients of the head are added in float32 at least: in bfloat16
    the number of chunks would show in the sum."""
    size = max(1, logits_bytes // (4 * vocabulary))
    again = torch.is_grad_enabled() and len(ids) > size
    weight, narrow = head.weight, head.weight.dtype
    if again:
        weight = weight.to(torch.promote_types(narrow, torch.float32))

    def chunk(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional.linear(h, weight.to(narrow), head.bias)
        logprobs, entropy = token_logprobs(logits, target, temperature)
        return logprobs, entropy if entropy_grad else entropy.detach()

    parts = []
    for h, target in zip(hidden.split(size), ids.split(size), strict=True):
        if again:
            parts.append(checkpoint(chunk, h, target, use_reentrant=False))
        else:
            parts.append(chunk(h, target))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


class SkippableAdamW(torch.optim.AdamW):
    """`skip` turns one step into nothing while DeepSpeed still clears what it has accumulated."""

    skip = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.skip:
            super().step(closure)


def load_policy(folder: Path, dtype: torch.dtype) -> "PreTrainedModel":
    """A Hugging Face folder -> model in training mode. Safetensors only, no code of the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True
    )
    return model.train()


def check_vocabulary(folder: Path, tokens: int) -> None:
    """A policy may know more ids than its tokenizer (padded embeddings), never fewer."""
    rows = files.read_json(folder / "config.json").get("vocab_size")
    if not isinstance(rows, int) or rows < tokens:
        raise BadInput(f"{folder}: the tokenizer has {tokens} tokens, the model {rows}")


class UnreadableExport(RuntimeError):
    """A saved policy does not read back as it was; the message names the tensors."""


def save_policy(state: dict[str, Tensor], like: Path, folder: Path, dtype: torch.dtype) -> None:
    """A Hugging Face folder: `state` as safetensors and everything else that lies in `like`.
    Reloaded once: a model that cannot be read back is not a result."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for path in like.iterdir():
        weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if path.is_file() and not weights:
            shutil.copyfile(path, folder / path.name)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors keeps it from everybody else
    again = dict(load_policy(folder, dtype).named_parameters())
    wrong = [n for n, p in state.items() if n not in again or not torch.equal(p, again[n].data)]
    if wrong or len(again) != len(state):
        raise UnreadableExport(f"{folder}: reads back differently: {wrong or sorted(again)}")
