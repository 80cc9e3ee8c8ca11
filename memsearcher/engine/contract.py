"""The engine contract: tokens in, tokens and log-probs out. The engine never sees text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 is greedy. `seed` fixes this request's draws whatever batch it lands in.
    `constrained`: what follows <tool_call> can be parsed; log-probs are then those of what a call
    may hold. For an engine opened with engine.constrained_calls."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """`logprobs[i]` belongs to `ids[i]`, after temperature, natural log. `ids` ends with the stop
    token when `stopped` is True; otherwise the limit was reached. Every token was sampled under
    `weight_version`: weights change only while nothing is being generated."""

    ids: list[int]
    logprobs: list[float]
    stopped: bool
    weight_version: int


class Engine(Protocol):
    """Serves one policy. Raises EngineFailed when its machinery breaks, never on odd output."""

    @property
    def weight_version(self) -> int: ...

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion: ...

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces every parameter (full shapes, Hugging Face names, untied export), drops the
        prefix cache and bumps the version. Call only while nothing is being generated."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class EngineFailed(RuntimeError):
    """Broken machinery; the message carries the cause."""
