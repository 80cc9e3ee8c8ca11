"""One growing context: what the policy sampled, what was put in, and which is which."""

import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Literal

from memsearcher.agent.chat import Chat
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.types import Question, Turn

Kind = Literal["action", "observation", "memory"]


@dataclass(slots=True)
class Context:
    """Grows at its end only; `ids`, `mask` and `logprobs` are those of Turn. Log-probs are the
    sampler's, 0.0 on what was put in."""

    chat: Chat
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: dict[Kind, int] = field(
        default_factory=lambda: {"action": 0, "observation": 0, "memory": 0}
    )
    seconds: dict[str, float] = field(default_factory=dict)
    weight_version: int = 0  # of the latest sampled token
    roundtrip_misses: int = 0

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def put(self, ids: list[int]) -> None:
        """An observation: read by the policy, never trained on."""
        self._add("observation", ids, [0.0] * len(ids), sampled=False)

    async def sample(self, kind: Kind, engine: Engine, sampling: Sampling) -> tuple[str, bool]:
        """What was said, without the end token, and whether there was one before the limit."""
        started = time.monotonic()
        said = await engine.generate(self.prompt_ids + self.ids, sampling)
        self.clock(kind, started)
        self._add(kind, said.ids, said.logprobs, sampled=True)
        self.weight_version = said.weight_version
        text = self.chat.decode(said.ids)
        self.roundtrip_misses += self.chat.trusted(text) != said.ids
        return self.chat.decode(said.ids[:-1]) if said.stopped else text, said.stopped

    def clock(self, phase: str, started: float) -> None:
        """Adds the seconds since `started` to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started

    def turn(self, action: str, memory_before: str) -> Turn:
        """What is known of every turn; the agent adds what it searched for and kept."""
        return Turn(
            prompt_ids=self.prompt_ids,
            response_ids=self.ids,
            mask=self.mask,
            sampler_logprobs=self.logprobs,
            action=action,
            memory_before=memory_before,
            action_tokens=self.tokens["action"],
            observation_tokens=self.tokens["observation"],
            memory_tokens=self.tokens["memory"],
            roundtrip_misses=self.roundtrip_misses,
            seconds=self.seconds,
            weight_version=self.weight_version,
        )

    def _add(self, kind: Kind, ids: list[int], logprobs: list[float], *, sampled: bool) -> None:
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs from the engine")
        self.ids += ids
        self.mask += [sampled] * len(ids)
        self.logprobs += logprobs
        self.tokens[kind] += len(ids)


def request(
    base: Sampling, chat: Chat, max_tokens: int, seed: int, question: Question, *key: int | str
) -> Sampling:
    """`base` for one message: its limit, the end token, and a seed of its own, so that the draws of
    one message do not depend on which others are under way."""
    name = repr((seed, question.id, *key)).encode()
    own = int.from_bytes(hashlib.sha256(name).digest()[:6], "big")
    return replace(base, max_tokens=max_tokens, seed=own, stop_token_ids=(chat.end_id,))
