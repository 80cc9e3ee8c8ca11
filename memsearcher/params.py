"""What an experiment may say: one dataclass per section of params.yaml, checked at the door.

`conf/` composes to params.yaml (flows/compose.py); every stage reads it through `load`. Unknown,
missing and ill-typed keys raise BadInput that names the key. Imports nothing heavy.
"""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as _dataclass

from memsearcher.files import ROOT, BadInput

section = _dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
AgentName = Literal["memsearcher", "react"]


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
    path: str | None  # jsonl: the file, in the line format of the 2018 dump, plain or .gz
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
    shards: list[int] = Field(min_length=1)  # 0..n-1; a list, since DVC's matrix wants one


@section
class Index:
    kind: Literal["flat", "ivf_sq8"]
    nlist: int = Field(ge=1)
    nprobe: int = Field(ge=1)


@section
class Bm25:
    k1: float = Field(gt=0)
    b: float = Field(ge=0, le=1)


@section
class Questions:
    kind: Literal["demo", "local", "flashrag"]
    path: str | None  # local: a folder of <dataset>_{train,test}.jsonl
    revision: str | None
    dev_size: int = Field(ge=1)
    dev_seed: int
    append_question_mark: bool  # training questions only, as the release does (D13)


@section
class Search:
    """How the agent searches; also the settings of the retrieval report."""

    mode: Literal["dense", "bm25", "fusion"]
    k: int = Field(ge=1)
    rrf_k: int = Field(ge=1)
    report_k: list[int]


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
class Agent:
    template: Literal["full", "compact"]
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


@section
class Warmup:
    """Supervised fine-tuning on kept teacher trajectories; `copying_steps` is for tiny policies."""

    questions: int = Field(ge=1)
    early_answer: float = Field(ge=0, le=1)  # the scripted teacher errs on purpose
    drop_fact: float = Field(ge=0, le=1)
    wrong_search: float = Field(ge=0, le=1)
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
    probe_bound: float = Field(gt=0)  # max |Δ log-prob| between engine and learner after an update
    stop_loss: StopLoss


@section
class Evaluate:
    temperature: float = Field(ge=0)
    sample: int | None  # questions per benchmark, seeded; null: all
    concurrency: int = Field(ge=1)


@section
class Report:
    trajectories_per_benchmark: int = Field(ge=0)  # shown in the viewer, per policy
    published: bool  # the paper's rows beside ours


@section
class AgentEntry:
    """`after`: what training waits for, the warm-up's model or (init base) the questions."""

    init: Literal["base", "warmup"]
    after: str


@section
class PolicyEntry:
    """`model` null is the untrained policy; `after`: the artifact its evaluation waits for."""

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
