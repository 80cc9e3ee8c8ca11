"""The policy module itself as an engine: batched, repeatable, slow. For tests and small machines.

Requests are collected until nobody on the event loop can go on, sorted, and generated in the loop,
so no timing decides which rows share a batch (on CPU a row's last bits depend on its batch). Each
row draws from a generator of its own, so its draws do not. Log-probs are those of the full softmax
after temperature.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.loop import until_quiet

ENGINE_TICKS = 24


@dataclass(eq=False, slots=True)
class _Row:
    prompt: list[int]
    sampling: Sampling
    future: "asyncio.Future[Completion]"
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.sampling.seed)

    @property
    def stopped(self) -> bool:
        return self.ids[-1] in self.sampling.stop_token_ids

    @property
    def key(self) -> tuple[int, list[int], int]:
        return len(self.prompt), self.prompt, self.sampling.seed or 0


class InProcessEngine:
    """Serves an untied copy of the policy: `lm_head.weight` is a parameter of its own."""

    def __init__(self, folder: Path, *, dtype: str, max_num_seqs: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
        head = cast(torch.nn.Linear, model.get_output_embeddings())
        if head.weight is model.get_input_embeddings().weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = False
        self.model = model.eval()
        self.model.to(torch.device(device))
        self._max_num_seqs = max_num_seqs
        self._version = 0
        self._waiting: list[_Row] = []
        self._runner: asyncio.Task[None] | None = None

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        if sampling.constrained:
            raise EngineFailed("the in-process engine cannot constrain what is sampled")
        room = self.model.config.max_position_embeddings
        if not prompt_ids or len(prompt_ids) + sampling.max_tokens > room:
            raise EngineFailed(
                f"a prompt of {len(prompt_ids)} tokens and {sampling.max_tokens} more, "
                f"the policy has {room} positions"
            )
        row = _Row(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.ensure_future(self._run())
        runner = self._runner
        waits: set[asyncio.Future[Completion] | asyncio.Task[None]] = {row.future, runner}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not row.future.done():
            runner.result()  # raises what broke it
        return row.future.result()

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._waiting:
            raise EngineFailed(f"weights may not change while {len(self._waiting)} requests wait")
        missing = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameter = missing.pop(name, None)
            if parameter is None:
                raise EngineFailed(
                    f"{name}: the policy has no such parameter, or was given it twice"
                )
            if parameter.shape != tensor.shape:
                raise EngineFailed(
                    f"{name}: is {list(parameter.shape)}, given {list(tensor.shape)}"
                )
            with torch.no_grad():
                parameter.copy_(tensor)
        if missing:
            raise EngineFailed(f"weights were not given for {sorted(missing)}")
        self._version += 1

    async def sleep(self) -> None:
        """Nothing to give back: the next step needs the same memory."""

    async def wake(self) -> None:
        """See sleep."""

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            await until_quiet(lambda: len(self._waiting), ENGINE_TICKS)
            rows = sorted(self._waiting, key=lambda row: row.key)
            self._waiting = []
            for start in range(0, len(rows), self._max_num_seqs):
                batch = [r for r in rows[start : start + self._max_num_seqs] if not r.future.done()]
                if batch:
                    self._serve(batch)
                    await asyncio.sleep(0)

    def _serve(self, rows: list[_Row]) -> None:
        try:
            self._generate(rows)
        except RuntimeError as e:  # what torch raises, out of memory included
            for row in rows:
                row.future.set_exception(EngineFailed(f"{type(e).__name__}: {e}"))
            return
        for row in rows:
            done = Completion(row.ids, row.logprobs, row.stopped, self._version)
            row.future.set_result(done)

    @torch.inference_mode()
    def _generate(self, rows: list[_Row]) -> None:
        device = self.model.device
        width = max(len(row.prompt) for row in rows)
        pads = [width - len(row.prompt) for row in rows]
        ids = torch.tensor([[0] * pad + row.prompt for pad, row in zip(pads, rows, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        ids, mask = ids.to(device), mask.to(device)  # (B, P) both
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        live = list(rows)
        while True:
            logits = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]  # (B, V)
            tokens, logprobs = sample(logits, live)
            for row, token, logprob in zip(live, tokens, logprobs, strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)
            keep = [
                i
                for i, row in enumerate(live)
                if not row.stopped and len(row.ids) < row.sampling.max_tokens
            ]
            if not keep:
                return
            positions = positions[:, -1:] + 1
            if len(keep) < len(live):
                live = [live[i] for i in keep]
                chosen = torch.tensor(keep, device=device)
                cache.batch_select_indices(chosen)
                mask, positions = mask[chosen], positions[chosen]
            ids = torch.tensor([[row.ids[-1]] for row in live], device=device)
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)


def sample(logits: Tensor, rows: Sequence[_Row]) -> tuple[list[int], list[float]]:
    """(B, V) logits -> a token and its log-prob per row.

    One uniform number per row and token, through the inverse of the row's distribution in float64.
    top_k first, then top_p of what is left; the log-prob is that of the distribution before both.
    """
    heat = torch.tensor([row.sampling.temperature or 1.0 for row in rows], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / heat[:, None], dim=-1)  # (B, V)
    tokens = logprobs.argmax(dim=-1)
    warm = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if warm:
        chances = logprobs[warm].double().exp()
        order = None
        if any(rows[i].sampling.top_k or rows[i].sampling.top_p < 1 for i in warm):
            chances, order = chances.sort(dim=-1, descending=True, stable=True)
            chances = _truncate(chances, [rows[i].sampling for i in warm])
        below = chances.cumsum(dim=-1)
        draws = torch.tensor([rows[i].draws.random() for i in warm], dtype=torch.float64)
        aims = draws.to(logits.device)[:, None] * below[:, -1:]
        drawn = torch.searchsorted(below, aims, right=True).clamp(max=below.shape[1] - 1)
        tokens[warm] = (drawn if order is None else order.gather(1, drawn))[:, 0]
    picked = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), picked.tolist()


def _truncate(chances: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """(W, V) chances in falling order -> the same with the tail of each row at zero."""
    size = chances.shape[1]
    top_k = torch.tensor([s.top_k or size for s in samplings], device=chances.device)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=chances.dtype, device=chances.device)
    kept = chances * (torch.arange(size, device=chances.device) < top_k[:, None])
    share = kept / kept.sum(dim=-1, keepdim=True)
    return kept * (share.cumsum(dim=-1) - share < top_p[:, None])
