"""The door: types, ranges and the rules between sections."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from memsearcher import params
from memsearcher.files import ROOT, BadInput


def changed(**dotted: object) -> dict:
    raw = deepcopy(params.read_yaml(ROOT / "params.yaml"))
    for key, value in dotted.items():
        *path, last = key.split("__")
        node = raw
        for part in path:
            node = node[part]
        node[last] = value
    return raw


def test_the_committed_file_is_valid() -> None:
    assert params.load().agent.max_memory_tokens > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train__group_size": 1}, "train.group_size"),
        ({"train__top_p": 0}, "train.top_p"),
        ({"train__aggregation": "sum"}, "train.aggregation"),
        ({"engine__kind": None}, "engine.kind"),
        ({"encode__shards": [1, 2]}, "encode.shards"),
        ({"corpus__kind": "jsonl"}, "corpus.path"),
        ({"questions__kind": "local"}, "questions.path"),
        ({"train__minibatches": 3}, "train.minibatches: 3 does not divide"),
        ({"train__tis_cap": 2.0, "train__top_k": 5}, "top_k 5"),
        ({"train__tis_cap": 2.0, "train__top_p": 0.99}, "top_p 0.99"),
        ({"train__stop_loss__action": "restore", "train__eval_every": 0}, "eval_every is 0"),
        ({"train__async_steps": 1}, "train.tis_cap: must be set"),
        ({"train__async_steps": 2, "train__tis_cap": 2.0}, "train.async_steps"),
        ({"engine__constrained_calls": True, "engine__kind": "inprocess"}, "constrained_calls"),
        ({"engine__constrained_calls": True, "train__tis_cap": 2.0}, "train.tis_cap"),
        ({"train__stop_loss__patience": 0}, "train.stop_loss.patience"),
        ({"serve__max_queries": 2000}, "max_queries: 2000 of one request"),
        ({"agents__memsearcher__init": "base"}, "agents.memsearcher"),
        ({"agents__other": {"init": "base", "after": "data/questions"}}, "agents"),
        ({"extra": 1}, "extra: unknown key"),
    ],
)
def test_what_is_wrong_is_named(change: dict, named: str) -> None:
    with pytest.raises(BadInput) as e:
        params.validate(changed(**change))
    assert named in str(e.value)


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(BadInput, match=r"seed.*train\.lr"):
        params.validate(changed(seed="x", train__lr=-1))


def test_a_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    for text in ("a: [", "\x00"):
        path.write_text(text)
        with pytest.raises(BadInput, match=r"params\.yaml: not YAML"):
            params.load(path)
    with pytest.raises(BadInput, match="no such file"):
        params.load(tmp_path / "nope.yaml")


def test_parameters_and_tracking_import_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'vllm', 'mlflow', 'prefect', 'dvc', 'faiss', 'deepspeed')"
    code = f"import sys, stages.frame; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
