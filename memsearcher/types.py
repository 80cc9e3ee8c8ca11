"""The border types: what crosses from retrieval to agent, rollout to learner, run to report.

Plain frozen data, no tensors, no behaviour beyond JSON. Everything left of `Trajectory` is rollout,
everything right of it is gradient (`learner/collate.py` turns turns into tensors).
"""

from dataclasses import dataclass, field
from enum import StrEnum


class StopReason(StrEnum):
    """Why a trajectory ended. All but INFRA_FAILED are the model's doing: data, not errors."""

    ANSWERED = "answered"  # a boxed answer, outside <think>, in an action
    NO_ACTION = "no_action"  # neither a tool call nor a box
    BAD_TOOL_CALL = "bad_tool_call"  # a <tool_call> that is not the JSON that was asked for
    NO_MEMORY = "no_memory"  # a memory message without a <memory> tag
    OVERLONG = "overlong"  # an action that reached its token limit
    MAX_TURNS = "max_turns"  # the last turn searched instead of answering
    INFRA_FAILED = "infra_failed"  # broken machinery: out of the loss and of its group's statistics


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """`golds`: every accepted answer. `id` is unique across data sets (`nq/test_3`)."""

    id: str
    dataset: str
    text: str
    golds: tuple[str, ...]
    split: str = "test"
    metadata: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that a search returned. `score` compares within one query; `rank` starts at 1."""

    passage_id: str
    score: float
    rank: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One context: prompt (question and memory) → action → observation → memory rewrite.

    `response_ids`, `mask` and `sampler_logprobs` have one length, the tokens after the prompt;
    mask is True where the policy sampled the token, and the log-prob is 0.0 where it is False.
    Ids and log-probs are the engine's own: nothing here was ever re-encoded from text.
    `action_tokens`, `observation_tokens`, `memory_tokens` add up to len(response_ids).
    `hits`: the passages that the observation had room for, the last perhaps in part.
    `roundtrip_misses`: sampled messages that would have other ids if their text was encoded again.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[bool]
    sampler_logprobs: list[float]
    action: str
    memory_before: str
    query: str | None = None
    hits: tuple[Hit, ...] = ()
    memory_after: str | None = None
    memory_cut: bool = False
    bad_query: bool = False
    action_tokens: int = 0
    observation_tokens: int = 0
    memory_tokens: int = 0
    roundtrip_misses: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All turns of one attempt at a question. `member` counts attempts of the group (0..G-1)."""

    question: Question
    member: int
    turns: tuple[Turn, ...]
    stop: StopReason
    answer: str | None = None
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # the cause, for INFRA_FAILED

    @property
    def id(self) -> str:
        return f"{self.question.id}#{self.member}"

    @property
    def context_tokens(self) -> list[int]:
        """Tokens of the whole context, turn by turn: the figure that must not grow."""
        return [len(t.prompt_ids) + len(t.response_ids) for t in self.turns]
