"""What an experiment may say: one dataclass per section of params.yaml, checked at the door.

`conf/` composes to params.yaml (flows/compose.py); every stage reads it through `load`. Unknown,
missing and ill-typed keys raise BadInput that names the key. Imports nothing heavy.
"""

from pathlib import Path
from typing import Literal, TypeVar, dataclass_transform

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as _dataclass

from memsearcher.files import ROOT, BadInput

_checked = _dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
IndexKind = Literal["flat", "ivf_sq8", "fp16"]
AgentName = Literal["memsearcher", "react"]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def section(cls: type[T]) -> type[T]:
    return _checked(cls)  # type: ignore[return-value]


@section
class World:
    """The generated encyclopedia of the demo. Used where corpus.kind or questions.kind is demo."""

    seed: int
    passages: int = Field(ge=100)
    train_questions: int = Field(ge=1)  # per training set (NQ-like, HotpotQA-like)
    test_questions: int = Field(ge=1)  # per benchmark


@section
class Corpus:
    kind: Literal["demo", "jsonl", "wiki18"]
    path: str | None  # jsonl: lines as in the 2018 dump, a DPR .tsv, or a folder of JSON files
    revision: str | None


@section
class Encode:
    model: str  # "package:minilm", a folder, or a hub name
    revision: str | None
    pooling: Literal["mean", "cls"]
    query_prefix: str
    passage_prefix: str
    max_query_tokens: int = Field(ge=4)
    max_passage_tokens: int = Field(ge=8)
    batch_size: int = Field(ge=1)
    precision: Literal["float32", "bfloat16"]
    shards: list[int] = Field(min_length=1)  # 0..n-1; a list, since DVC's matrix wants one
    published_index: list[str] | None  # parts of a flat file to read instead of encoding


@section
class Index:
    kind: IndexKind
    nlist: int = Field(ge=1)
    nprobe: int = Field(ge=1)


@section
class Bm25:
    k1: float = Field(gt=0)
    b: float = Field(ge=0, le=1)


@section
class QuestionFile:
    """A line of the registry. `split` is the source's own name for it. Null: not checked."""

    split: str
    file: str  # below questions.path or questions.source; .jsonl or .parquet
    rows: int | None = Field(ge=1)
    sha256: str | None = Field(pattern="^[0-9a-f]{64}$")


@section
class Questions:
    kind: Literal["demo", "local", "flashrag"]
    source: str | None  # flashrag: the data set on the hub
    path: str | None  # local: the folder
    revision: str | None
    sets: dict[str, QuestionFile]  # "test_nq": …
    bad_rows: Literal["error", "drop"]
    strip: bool
    unquote: bool
    dev_size: int = Field(ge=1)
    dev_seed: int
    append_question_mark: bool  # training questions only, as the release does (D13)
    release_exact: bool  # training keeps every row: those of dev and of the test sets too


@section
class Search:
    """How the agent searches; also the settings of the retrieval report."""

    mode: Literal["dense", "bm25", "fusion"]
    k: int = Field(ge=1)
    in_flight: int = Field(ge=1)  # calls to the retriever at a time; what waits goes together
    patience_s: float = Field(ge=0)  # a failing call is repeated for so long
    rrf_k: int = Field(ge=1)
    report_k: list[int]


@section
class Serve:
    """The retrieval server and its clients. The hits are the same, so no stage depends on it."""

    url: str | None = Field(pattern=r"^https?://\S+$")  # null: each process opens the index itself
    timeout_s: float = Field(gt=0)  # of one request
    ready_s: float = Field(ge=0)  # how long a client waits for a server that is not ready
    retry_s: float = Field(ge=0)  # and how long it repeats a request that failed
    host: str
    port: int = Field(ge=0, le=65535)  # 0: a free one
    threads: int = Field(ge=1)  # OpenMP threads of the encoder and of the search
    window_ms: float = Field(ge=0)  # a request waits so long for others to share its pass
    max_batch: int = Field(ge=1)  # queries of a pass; 1 and window 0: no micro-batching
    max_waiting: int = Field(ge=1)  # queries; beyond it 503
    max_queries: int = Field(ge=1)  # of one request
    max_query_chars: int = Field(ge=2000)  # the agent's longest
    max_k: int = Field(ge=1)
    max_body_bytes: int = Field(ge=1)
    drain_s: int = Field(ge=0)  # after SIGTERM, for the requests that are there
    log_requests: bool

    def __post_init__(self) -> None:
        if self.max_queries > self.max_waiting:
            raise ValueError(
                f"max_queries: {self.max_queries} of one request would never fit in max_waiting "
                f"{self.max_waiting}"
            )


@section
class Policy:
    """The untrained policy. `tiny` is made from the seed, `smollm2` comes as a package."""

    source: Literal["tiny", "smollm2", "path", "hub"]
    name: str | None
    revision: str | None
    layers: int = Field(ge=1)  # layers, width, heads: tiny only
    width: int = Field(ge=8)
    heads: int = Field(ge=1)


@section
class ReleaseTemplate:
    """A source file of the official release that holds its prompts: read, never run, and fetched
    once where it is an address. The hash is part of what a stage depends on."""

    source: str  # a path, or https://… with {revision} in it
    revision: str | None = Field(pattern="^[0-9a-f]{40}$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    def __post_init__(self) -> None:
        address = self.source.startswith(("http://", "https://"))
        if address and ("{revision}" not in self.source or self.revision is None):
            raise ValueError(f"{self.source}: an address needs {{revision}} in it, and a revision")


@section
class Release:
    """What the official release does differently (D-numbers in the README), so that its checkpoints
    can be run in their own protocol. All off: ours."""

    max_k: int | None = Field(ge=1)  # D4: a call may ask for so many passages; null: search.k it is
    escaped_newlines: bool  # D5: backslash and n between passages in place of each newline
    broken_memory: bool  # D7: ends a training trajectory, counts as empty in evaluation
    search_on_last_turn: bool  # D8: instead of being asked to answer
    whole_prompt: bool  # D12: in evaluation question, memory and our words are one text


@section
class Agent:
    template: Literal["full", "compact"]
    release_template: ReleaseTemplate | None  # in place of `template`
    release: Release
    max_question_tokens: int = Field(ge=1)
    max_action_tokens: int = Field(ge=1)
    max_observation_tokens: int = Field(ge=1)
    max_memory_tokens: int = Field(ge=1)
    max_context_tokens: int = Field(ge=1)
    max_turns_train: int = Field(ge=1)
    max_turns_eval: int = Field(ge=1)


@section
class Engine:
    kind: Literal["vllm", "inprocess"]
    dtype: Literal["float32", "bfloat16"]
    tensor_parallel: int = Field(ge=1)
    data_parallel: int = Field(ge=1)
    memory_gib: float = Field(gt=0)  # KV cache on CPU
    gpu_memory_share: float = Field(gt=0, le=1)
    max_num_seqs: int = Field(ge=1)
    threads: int = Field(ge=1)  # OpenMP threads of one busy process; the others idle meanwhile
    constrained_calls: bool  # vLLM keeps what follows <tool_call> to the tool's JSON


@section
class Warmup:
    """Supervised fine-tuning on kept teacher trajectories; `copying_steps` is for tiny policies."""

    teacher: Literal["scripted", "endpoint", "policy"]
    teacher_path: str | None  # policy: a folder with the policy's own tokenizer
    endpoint_api: Literal["chat", "tokens"]
    temperature: float = Field(ge=0)  # of an endpoint or policy
    concurrency: int = Field(ge=1)
    sets: list[str] | None  # training sets that the teacher plays; null: all
    questions: int = Field(ge=1)
    samples: int = Field(ge=1)  # trajectories of a question
    keep_per_question: int = Field(ge=1)
    balance: float | None = Field(ge=1)  # most of a (data set, searches) cell, in medians of cells
    early_answer: float = Field(ge=0, le=1)  # the scripted teacher errs on purpose
    drop_fact: float = Field(ge=0, le=1)
    wrong_search: float = Field(ge=0, le=1)
    notes: Literal["fact", "passage"]  # what it writes of a passage of the demo's world
    keep_wrong: bool  # keep the teacher's wrong trajectories too: something to unlearn
    rename: bool  # fresh names in every example; for the demo's world only
    copying_steps: int = Field(ge=0)
    copying_lr: float = Field(gt=0)
    steps: int = Field(ge=1)
    turns_per_step: int = Field(ge=1)
    lr: float = Field(gt=0)


@section
class Reward:
    preset: Literal["paper", "sound", "release"]


@section
class StopLoss:
    """Ends a collapse: a figure past its limit `patience` steps in a row (dev EM: once). Null: not
    watched. A share is of the mean of the run's first `baseline_steps` steps."""

    action: Literal["off", "stop", "restore"]
    patience: int = Field(ge=1)
    baseline_steps: int = Field(ge=1)
    dev_em_drop: float | None = Field(ge=0)  # below the best so far
    max_kl: float | None = Field(gt=0)  # per token; needs train.kl_coef, without it no KL is known
    min_entropy_share: float | None = Field(ge=0)
    min_format_share: float | None = Field(ge=0)
    min_response_share: float | None = Field(ge=0)  # sampled tokens of a trajectory
    max_response_share: float | None = Field(ge=1)
    min_search_share: float | None = Field(ge=0)


@section
class Train:
    steps: int = Field(ge=1)
    async_steps: Literal[0, 1]  # 1: the next step is rolled out while this one trains
    questions_per_step: int = Field(ge=1)
    group_size: int = Field(ge=2)
    minibatches: int = Field(ge=1)  # optimiser steps per rollout step; each is a set of questions
    lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    clip_low: float = Field(gt=0)
    clip_high: float = Field(gt=0)
    dual_clip: float | None
    kl_coef: float = Field(ge=0)
    entropy_coef: float = Field(ge=0)
    tis_cap: float | None  # truncated importance sampling between sampler and learner
    overlong_masking: bool  # no loss on trajectories that hit the action limit
    aggregation: Literal["token", "turn", "trajectory", "release"]
    normalise: Literal["std", "mean"]
    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0)
    dtype: Literal["bfloat16", "float32"] | None  # null: bfloat16 on a GPU, float32 without one
    ranks: int = Field(ge=1)
    zero_stage: Literal[0, 1, 2, 3]
    offload: bool
    gradient_checkpointing: bool
    max_tokens_per_microbatch: int = Field(ge=1)
    checkpoint_every: int = Field(ge=1)
    keep_checkpoints: int = Field(ge=1)
    eval_every: int = Field(ge=0)  # 0: no dev evaluation during training
    dev_questions: int = Field(ge=1)
    max_failed_share: float = Field(ge=0, le=1)
    probe_bound: float = Field(gt=0)  # mean |Δ log-prob| of engine and learner after an update
    stop_loss: StopLoss


@section
class Evaluate:
    split: Literal[
        "test", "dev"
    ]  # dev: for selection (flows/retrain.py), never beside test figures
    max_memory_tokens: int | None = Field(ge=1)  # null: agent.max_memory_tokens, as in training
    temperature: float = Field(ge=0)
    sample: int | None  # questions per benchmark, seeded; null: all
    concurrency: int = Field(ge=1)


@section
class Report:
    trajectories_per_benchmark: int = Field(ge=0)  # shown in the viewer, per policy
    published: bool  # the paper's rows beside ours
    memory_caps: list[int] | None  # of ablations/ to show; null: all that are there


@section
class AgentEntry:
    """`after`: what training waits for, the warm-up's model or (init base) the questions."""

    init: Literal["base", "warmup"]
    after: str


@section
class PolicyEntry:
    """`model`: a folder, hub:owner/name@revision, or null for the untrained policy; `after`: the
    artifact that its evaluation waits for."""

    agent: AgentName
    model: str | None
    after: str


@section
class Tracking:
    experiment: str
    enabled: bool


@section
class Params:
    seed: int
    world: World
    corpus: Corpus
    encode: Encode
    index: Index
    bm25: Bm25
    questions: Questions
    search: Search
    serve: Serve
    policy: Policy
    agent: Agent
    engine: Engine
    warmup: Warmup
    reward: Reward
    train: Train
    evaluate: Evaluate
    report: Report
    agents: dict[AgentName, AgentEntry]
    policies: dict[str, PolicyEntry]
    tracking: Tracking

    def __post_init__(self) -> None:
        if self.encode.shards != list(range(len(self.encode.shards))):
            raise ValueError(f"encode.shards: must count 0, 1, 2, … got {self.encode.shards}")
        for part, kind, path in (
            ("corpus", "jsonl", self.corpus.path if self.corpus.kind == "jsonl" else ""),
            ("questions", "local", self.questions.path if self.questions.kind == "local" else ""),
        ):
            if path is None:
                raise ValueError(f"{part}.path: {part}.kind is {kind}, so it must name a path")
        if self.warmup.teacher == "policy" and self.warmup.teacher_path is None:
            raise ValueError("warmup.teacher_path: warmup.teacher is policy, so it must be given")
        if self.questions.kind == "flashrag" and self.questions.source is None:
            raise ValueError("questions.source: questions.kind is flashrag, so it must name one")
        for name, entry in self.agents.items():
            warm = f"models/warmup/{name}"
            if (entry.init == "warmup") != (entry.after == warm):
                raise ValueError(
                    f"agents.{name}: init is {entry.init} but after is {entry.after} "
                    f"(init warmup means after {warm})"
                )
        t = self.train
        if t.questions_per_step % t.minibatches:
            raise ValueError(
                f"train.minibatches: {t.minibatches} does not divide "
                f"train.questions_per_step {t.questions_per_step}"
            )
        if t.stop_loss.action == "restore" and not t.eval_every:
            raise ValueError(
                "train.stop_loss.action: restore needs a best, but train.eval_every is 0"
            )
        if t.async_steps and t.tis_cap is None:
            raise ValueError(
                "train.tis_cap: must be set where train.async_steps is 1, since the policy that is "
                "trained is no longer the one that sampled"
            )
        if self.engine.constrained_calls and self.engine.kind != "vllm":
            raise ValueError("engine.constrained_calls: engine.kind inprocess has no such mode")
        if self.engine.constrained_calls and t.tis_cap is not None:
            raise ValueError(
                "train.tis_cap: importance sampling needs the full distribution, but under "
                "engine.constrained_calls the sampler's log-probs are those of what a call may hold"
            )
        if t.tis_cap is not None and (t.top_p < 1 or t.top_k > 0):
            raise ValueError(
                f"train.tis_cap: importance sampling needs the full distribution, "
                f"got top_p {t.top_p} and top_k {t.top_k}"
            )


_adapter = TypeAdapter(Params)


def validate(raw: object) -> Params:
    """Raises BadInput, one line per wrong key."""
    try:
        return _adapter.validate_python(raw)
    except ValidationError as e:
        problems = []
        for error in e.errors():
            key = ".".join(str(part) for part in error["loc"])
            message = {"missing": "missing", "unexpected_keyword_argument": "unknown key"}.get(
                error["type"], error["msg"].removeprefix("Value error, ")
            )
            problems.append(f"{key}: {message}" if key else message)
        raise BadInput("parameters: " + "; ".join(problems)) from e


def read_yaml(path: Path) -> dict:
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise BadInput(f"{path}: not YAML: {str(e).splitlines()[0]}") from e


def load(path: Path = ROOT / "params.yaml") -> Params:
    return validate(read_yaml(path))
