"""One growing context: what the policy sampled, what was put in, and which is which."""

import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Literal

from memsearcher.agent.chat import Chat
from memsearcher.engine.contract import Completion, Engine, Sampling
from memsearcher.types import Question

Kind = Literal["action", "observation", "memory"]


@dataclass(slots=True)
class Context:
    """Grows at its end only; `ids`, `mask` and `logprobs` are those of Turn. Log-probs are the
    sampler's, 0.0 on what was put in."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: dict[Kind, int] = field(
        default_factory=lambda: {"action": 0, "observation": 0, "memory": 0}
    )
    seconds: dict[str, float] = field(default_factory=dict)
    weight_version: int = 0  # of the latest sampled token

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def put(self, ids: list[int]) -> None:
        """An observation: read by the policy, never trained on."""
        self._add("observation", ids, [0.0] * len(ids), sampled=False)

    async def sample(self, kind: Kind, engine: Engine, sampling: Sampling) -> Completion:
        started = time.monotonic()
        completion = await engine.generate(self.prompt_ids + self.ids, sampling)
        self.clock(kind, started)
        self._add(kind, completion.ids, completion.logprobs, sampled=True)
        self.weight_version = completion.weight_version
        return completion

    def clock(self, phase: str, started: float) -> None:
        """Adds the seconds since `started` to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started

    def _add(self, kind: Kind, ids: list[int], logprobs: list[float], *, sampled: bool) -> None:
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs from the engine")
        self.ids += ids
        self.mask += [sampled] * len(ids)
        self.logprobs += logprobs
        self.tokens[kind] += len(ids)


def text_of(chat: Chat, completion: Completion) -> str:
    """What was said, without the end token."""
    return chat.decode(completion.ids[:-1] if completion.stopped else completion.ids)


def request(
    base: Sampling, chat: Chat, max_tokens: int, seed: int, question: Question, *key: int | str
) -> Sampling:
    """`base` for one message: its limit, the end token, and a seed of its own, so that the draws of
    one message do not depend on which others are under way."""
    name = repr((seed, question.id, *key)).encode()
    own = int.from_bytes(hashlib.sha256(name).digest()[:6], "big")
    return replace(base, max_tokens=max_tokens, seed=own, stop_token_ids=(chat.end_id,))
