"""The learner: a policy under DeepSpeed, updated by optimiser steps over rows of turns.

ZeRO 0 to 3, float32 on CPU, bfloat16 on GPU. The loss of an optimiser step is one sum over all its
tokens on all ranks (`grpo.turn_weights`); DeepSpeed would divide it by the number of accumulation
steps and average it over ranks, both are undone here on purpose.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from memsearcher.engine.weights import untied_export
from memsearcher.files import BadInput
from memsearcher.learner import checkpoint
from memsearcher.learner.collate import Row, TurnBatch, collate
from memsearcher.learner.losses import Loss, Tally
from memsearcher.learner.model import LogProbs, SkippableAdamW, load_policy, save_policy
from memsearcher.learner.packing import pack
from memsearcher.learner.ranks import Ranks
from memsearcher.learner.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")
MAX_SKIPPED = 3  # non-finite steps in a row before the run stops


class LearnerFailed(RuntimeError):
    """Loss or gradients stayed non-finite; the message carries the count."""


def _together(
    method: Callable[Concatenate["Learner", P], T],
) -> Callable[Concatenate["Learner", P], T]:
    """Runs the method on every rank: rank 0 says so first. Never call one from inside another."""

    @functools.wraps(method)
    def call(self: "Learner", *args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs:
            raise TypeError(f"{method.__name__}: collective methods take positional arguments")
        self.ranks.tell((method.__name__, args))
        return method(self, *args, **kwargs)

    return call


class Learner:
    @classmethod
    def open(cls, settings: Settings, ranks: Ranks) -> "Learner":
        """On rank 0; followers build theirs from the same settings."""
        ranks.tell(("open", (settings,)))
        return cls(settings, ranks)

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        import deepspeed

        self.settings, self.ranks = settings, ranks
        self.updates = self.weight_version = self._skipped_in_row = 0
        self.lr_scale = 1.0
        policy = load_policy(settings.folder, settings.dtype)
        if settings.gradient_checkpointing:
            policy.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        model = LogProbs(policy, settings.temperature)
        for parameter in policy.get_output_embeddings().parameters():  # ZeRO 3 gathers it once
            deepspeed.zero.register_external_parameter(model, parameter)
        self._finite = torch.ones((), device=ranks.device)
        for parameter in model.parameters():
            parameter.register_hook(self._watch)
        self.optimizer = SkippableAdamW(
            model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config=settings.for_deepspeed(),
            dist_init_required=False,
        )
        self.reference: LogProbs | None = None
        if settings.reference is not None:
            frozen = load_policy(settings.reference, settings.dtype).requires_grad_(False)
            self.reference = LogProbs(frozen, settings.temperature).to(ranks.device)

    def _watch(self, grad: Tensor) -> None:
        """Every parameter's gradient of every micro-batch passes here before DeepSpeed takes it."""
        self._finite *= torch.isfinite(grad).all()

    @_together
    def update(self, minibatches: Sequence[Sequence[Row]], loss: Loss) -> dict[str, float]:
        """One optimiser step per mini-batch. Log-probs of π_old are those before the first of them:
        with one mini-batch the update's own, else a pass over all of them with the same packing."""
        began = time.monotonic()
        full = [rows for rows in minibatches if rows]
        packed = [self._pack(rows, loss) for rows in full]
        seen = sum(len(r.ids) for rows in full for r in rows)
        padded = sum(b.input_ids.numel() for batches in packed for b in batches)
        old: list[list[Tensor] | None] = [None] * len(packed)
        if len(packed) > 1:
            old = [self._run_all(batches, self.engine) for batches in packed]
        ref: list[list[Tensor] | None] = [None] * len(packed)
        if loss.kl_coef and self.reference is not None:
            ref = [self._run_all(batches, self.reference) for batches in packed]
        prepared = time.monotonic()
        figures = []
        for rows, batches, o, r in zip(full, packed, old, ref, strict=True):
            figures.append(self._optimise(batches, loss, o, r))
            if figures[-1]["skipped"]:
                self._skipped(rows, figures[-1])
        self.weight_version += 1
        torch.cuda.empty_cache()  # an engine that shares the GPU wakes next; nothing on a CPU
        ended = time.monotonic()
        result: dict[str, float] = {"loss": 0.0}  # what an empty batch has
        for name in dict.fromkeys(name for f in figures for name in f if name != "skipped"):
            values = [f[name] for f in figures if name in f]
            result[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        return result | {
            "optimiser_steps": len(packed),
            "empty_minibatches": len(minibatches) - len(packed),
            "skipped_steps": sum(f["skipped"] for f in figures),
            "padding_share": 1 - seen / (padded * self.ranks.world) if padded else 0.0,
            "seconds_logprobs": prepared - began,
            "seconds_update": ended - prepared,
            "tokens_per_s": seen / (ended - began),
        }

    def _pack(self, rows: Sequence[Row], loss: Loss) -> list[TurnBatch]:
        top = max(max(r.ids) for r in rows)
        if top >= (known := self.engine.module.vocabulary):
            raise BadInput(f"token id {top} but the policy's vocabulary has {known}")
        budget, ranks = self.settings.max_tokens_per_microbatch, self.ranks
        packed = pack(rows, loss, budget, rank=ranks.rank, world=ranks.world)
        return [batch.to(ranks.device) for batch in packed]

    @torch.no_grad()
    def _run_all(self, batches: Sequence[TurnBatch], model: torch.nn.Module) -> list[Tensor]:
        return [model(b.input_ids, b.select, b.targets, False)[0] for b in batches]

    def _optimise(
        self,
        batches: list[TurnBatch],
        loss: Loss,
        old: list[Tensor] | None,
        ref: list[Tensor] | None,
    ) -> dict[str, float]:
        tally = Tally()
        self._finite.fill_(1)
        for i, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(i + 1 == len(batches))
            logprobs, entropy = self.engine(
                batch.input_ids, batch.select, batch.targets, bool(loss.entropy_coef)
            )  # (N,), (N,)
            before = logprobs.detach() if old is None else old[i]
            frozen = None if ref is None else ref[i]
            losses, figures = loss.tokens(logprobs, entropy, batch, before, frozen)
            total = (losses * batch.weights).sum()
            self._finite *= torch.isfinite(total.detach())
            self.engine.backward(total * self.ranks.world, scale_wrt_gas=False)
            tally.add(batch, total.detach(), figures)
        step = self._step()
        return {n: v for n, v in {**tally.result(self.ranks), **step}.items() if isfinite(v)}

    def _step(self) -> dict[str, float]:
        """The optimiser's step, left out on all ranks where a loss or gradient was not finite."""
        finite = bool(self.ranks.reduce(self._finite.clone(), ReduceOp.MIN))
        s = self.settings
        lr = s.lr * self.lr_scale * min(1.0, (self.updates + 1) / max(1, s.lr_warmup_steps))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.skip = not finite
        norm: Tensor | float | None = None
        if self.engine.optimizer is self.optimizer:  # ZeRO 0 in float32: DeepSpeed keeps no norm
            grads = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        self.engine.step()
        self.updates += 1
        self._skipped_in_row = 0 if finite else self._skipped_in_row + 1
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return {"grad_norm": float(norm or 0.0), "lr": lr, "skipped": float(not finite)}

    def _skipped(self, rows: Sequence[Row], figures: dict[str, float]) -> None:
        if self.settings.dumps is not None and self.ranks.rank == 0:
            checkpoint.dump(self.settings.dumps, self.updates, rows, figures)
        if self._skipped_in_row >= MAX_SKIPPED:
            what = f"loss or gradient not finite in {MAX_SKIPPED} optimiser steps in a row"
            raise LearnerFailed(f"{what}; batches: {self.settings.dumps}")

    @_together
    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probs of each row's sampled tokens, row by row: for probes, not for bulk."""
        batches = [collate([r]).to(self.ranks.device) for r in rows]
        return [t.tolist() for t in self._run_all(batches, self.engine)]

    @_together
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter, one at a time, untied: a tied head
        is sent once more under its own name. Use each tensor before asking for the next."""
        yield from untied_export(self._weights(), self.engine.module.policy.config)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        for name, parameter in self.engine.module.policy.named_parameters():
            gather = [parameter] if self.settings.zero_stage == 3 else []
            with deepspeed.zero.GatheredParameters(gather, enabled=bool(gather)):
                yield name, parameter.data

    @_together
    def save(self, root: Path, step: int, keep: int, best: int = 0) -> None:
        """`best`: the step whose checkpoint stays beside the last `keep`."""
        counts = (self.updates, self.weight_version, self.lr_scale)
        state = checkpoint.State(self.settings.run, step, *counts, best)
        checkpoint.save(self.engine, self.ranks, root, state, keep)

    @_together
    def resume(self, root: Path) -> int:
        """Continues from the newest checkpoint; the number of steps done, 0 where there is none."""
        if (state := checkpoint.load(self.engine, root, self.settings.run)) is None:
            return 0
        self.updates, self.lr_scale = state.updates, state.lr_scale
        self.weight_version = state.weight_version
        return state.step

    @_together
    def restore(self, root: Path, step: int, lr_scale: float) -> None:
        """Back to the weights and moments of `step`; weight versions go on counting."""
        state = checkpoint.load(self.engine, root, self.settings.run, step)
        assert state is not None
        self.updates, self.lr_scale = state.updates, lr_scale
        self.weight_version += 1

    @_together
    def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder, on rank 0; reloaded once to see that it can be."""
        state = {}
        for name, parameter in self._weights():  # the gathering is collective, the copy is not
            if self.ranks.rank == 0:
                state[name] = parameter.detach().to("cpu", copy=True).contiguous()
        if self.ranks.rank == 0:
            save_policy(state, self.settings.folder, folder, self.settings.dtype)

    def close(self) -> None:
        self.ranks.tell(("close", ()))
        self.ranks.close()
