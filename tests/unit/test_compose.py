"""conf/ → params.yaml: the committed file, every experiment, and what is wrong by name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dvc.utils.hydra import compose_and_dump

from flows.compose import composed
from memsearcher import params
from memsearcher.files import ROOT, BadInput
from memsearcher.learner.losses import PolicyLoss

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
NEEDED = {"laptop": ["corpus.path=a.jsonl", "questions.path=b"]}


def test_demo_is_the_committed_file() -> None:
    assert composed([]) == (ROOT / "params.yaml").read_text()
    assert composed(["experiment=demo"]) == composed([])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    made = params.validate(yaml.safe_load(composed([f"experiment={name}", *NEEDED.get(name, [])])))
    assert made.tracking.experiment.startswith("memsearcher")


def test_the_paper_and_the_release_differ_in_what_each_states() -> None:
    paper, release = (
        params.validate(yaml.safe_load(composed([f"experiment={name}"])))
        for name in ("paper-3b", "release-3b")
    )
    for made in (paper, release):
        t = made.train
        assert (t.questions_per_step, t.group_size, t.lr, t.temperature) == (256, 5, 1e-6, 1.0)
        assert (t.kl_coef, t.clip_low, t.clip_high) == (0.001, 0.2, 0.2)
        assert made.policy.name == "Qwen/Qwen2.5-3B-Instruct"
        assert made.agents["memsearcher"].init == "base"
    t = paper.train
    assert (t.aggregation, t.dual_clip, t.entropy_coef, t.top_p, t.top_k) == (
        "token",
        None,
        0,
        1,
        0,
    )
    assert paper.reward.preset == "paper"
    assert paper.agent.max_memory_tokens == 1024
    t = release.train
    assert (t.aggregation, t.dual_clip, t.entropy_coef) == ("release", 3.0, 0.001)
    assert (t.top_p, t.top_k, t.weight_decay, t.max_grad_norm) == (0.99, 10000, 0.01, 1.0)
    assert t.questions_per_step // t.minibatches == 128
    assert PolicyLoss.of(t).release_rows == 80
    assert release.reward.preset == "release"
    assert (release.agent.max_turns_train, release.agent.max_turns_eval) == (5, 20)


def test_keys_keep_the_order_of_config() -> None:
    written = list(yaml.safe_load((ROOT / "conf/config.yaml").read_text()))
    made = list(yaml.safe_load(composed([])))
    assert [key for key in made if key in written] == written[1:]  # the first is `defaults`


def test_dvc_composes_the_same_bytes(tmp_path: Path) -> None:
    out = tmp_path / "params.yaml"
    compose_and_dump(out, str(ROOT / "conf"), None, "config", str(ROOT), ["experiment=smoke"])
    assert out.read_text() == composed(["experiment=smoke"])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["experiment=nope"], "experiment/nope"),
        (["agents=nope"], "agents/nope"),
        (["agent.nope=1"], "agent.nope"),
        (["+agent.nope=1"], "agent.nope: unknown key"),
        (["~agent.max_memory_tokens"], "agent.max_memory_tokens: missing"),
        (["agent.max_memory_tokens=many"], "agent.max_memory_tokens"),
        (["experiment=laptop"], "corpus.path"),
        (["experiment=laptop", "corpus.path=a"], "questions.path"),
        (["seed"], "'seed': not KEY=VALUE"),
        (["corpus.path=a(b"], "corpus.path=a(b"),
        (["seed=${nope}"], "nope"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(overrides: list[str], named: str) -> None:
    with pytest.raises(BadInput) as e:
        composed(overrides)
    assert named in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("fault", ["seed: '???'\n", "seed: [\n", "new: 1\nseed: 1\n", ""])
def test_faults_in_conf_are_named(tmp_path: Path, fault: str) -> None:
    conf = shutil.copytree(ROOT / "conf", tmp_path / "conf")
    text = (conf / "config.yaml").read_text()
    (conf / "config.yaml").write_text(text.replace("seed: 17\n", fault, 1))
    with pytest.raises(BadInput, match=r"seed|config\.yaml|new"):
        composed([], conf)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["experiment=nope"], "experiment/nope"),
        (
            ["experiment=laptop", "corpus.path=nowhere.jsonl", "questions.path=tests"],
            "corpus.path: nowhere.jsonl: no such file",
        ),
    ],
)
def test_what_is_wrong_ends_with_2_and_writes_nothing(words: list[str], named: str) -> None:
    before = (ROOT / "params.yaml").read_bytes()
    command = [sys.executable, "-m", "flows.compose", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert (ROOT / "params.yaml").read_bytes() == before
