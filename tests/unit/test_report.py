"""The report shows what the parameters name, escapes what models and passages say, and says what is
missing. Looks are checked by eye (tests/unit/synthetic.py writes one to look at)."""

import json
import re
import shutil
from pathlib import Path

import pytest
import synthetic
import yaml

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import Params
from memsearcher.report.collect import collect, deviations
from memsearcher.types import Passage

SETTINGS = synthetic.params("report.trajectories_per_benchmark=30")


@pytest.fixture(scope="module")
def corpus() -> list[Passage]:
    return synthetic.passages(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, corpus: list[Passage]) -> Path:
    """Three policies on 40 questions of each benchmark, and the training runs behind them."""
    root = tmp_path_factory.mktemp("results")
    synthetic.write_results(root, SETTINGS, 40, corpus)
    synthetic.write_curves(root, SETTINGS)
    synthetic.write_retrieval(root, SETTINGS)
    return root


@pytest.fixture
def root(tmp_path: Path, results: Path) -> Path:
    shutil.copytree(results / "results", tmp_path / "results")
    return tmp_path


def html(root: Path) -> str:
    return (root / "report" / "index.html").read_text(encoding="utf-8")


def scripts(root: Path) -> dict[str, object]:
    """What the data scripts hand over, read as a browser would: one call with one JSON text."""
    out = {}
    for path in (root / "report" / "data").glob("*.js"):
        call = re.fullmatch(
            r"window\.report\.(\w+)\((\d+), JSON\.parse\((\".*\")\)\);\n", path.read_text("ascii")
        )
        assert call is not None, path
        out[path.stem] = json.loads(json.loads(call[3]))
    return out


def test_everything_is_there(root: Path, corpus: list[Passage]) -> None:
    data = synthetic.write_report(root, SETTINGS, corpus)
    assert list(data["policies"]) == ["untrained", "warmup", "memsearcher"]
    assert data["missing"] == data["leftovers"] == []
    assert data == files.read_json(root / "report" / "results.json")
    assert data["retrieval_fingerprint"] == {"index": "abc"}
    for metrics in data["policies"].values():
        assert len(metrics["datasets"]) == 7
        for scores in [*metrics["datasets"].values(), metrics["average"]]:
            low, high = scores["em_interval"]
            assert low <= scores["em"] <= high
            assert scores["n"] in (40, 280)
        assert metrics["fingerprint"]
    pairs = {(t["policy"], t["baseline"]) for t in data["paired"]}
    assert ("memsearcher", "untrained") in pairs
    assert len(pairs) == 3
    page = html(root)
    assert "invented" in page
    assert "do NOT compare" in page
    assert "http" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.S)
    markdown = (root / "report" / "results.md").read_text(encoding="utf-8")
    assert "do NOT compare" in markdown
    assert "MemSearcher 7B †" in markdown
    for name in ("plotly.min.js", "report.js", "reader.js", "viewer.js", "report.css"):
        assert (root / "report" / name).stat().st_size > 0


def test_hostile_text_is_only_ever_data(root: Path, corpus: list[Passage]) -> None:
    synthetic.write_report(root, SETTINGS, corpus)
    assert "window.hacked" not in html(root)
    found = scripts(root)
    passages = [p for name, rows in found.items() if name[0] == "p" for p in rows]  # type: ignore[attr-defined]
    assert any(synthetic.NASTY in text for _, _, text in passages)
    index = found["index"]
    assert isinstance(index, dict)
    assert any(synthetic.NASTY in row[3] for row in index["rows"])
    for name in ("report.js", "reader.js", "viewer.js"):
        code = (root / "report" / name).read_text(encoding="utf-8")
        assert not re.search(r"\.(innerHTML|outerHTML)\b|insertAdjacentHTML|document\.write", code)


def test_passages_are_stored_once_and_found(root: Path, corpus: list[Passage]) -> None:
    synthetic.write_report(root, SETTINGS, corpus)
    found = scripts(root)
    index = found["index"]
    assert isinstance(index, dict)
    assert len(index["rows"]) == 3 * 7 * 30
    chunks = [found[f"t{i}"] for i in range(len(index["rows"]) // index["chunk"] + 1)]
    passages = [p for i in range(2) for p in found[f"p{i}"]]  # type: ignore[attr-defined]
    ids = [id for id, _, _ in passages]
    assert len(ids) == len(set(ids))
    texts = {p.id: [p.id, p.title, p.text] for p in corpus}
    assert all(p == texts[p[0]] for p in passages)
    row = index["rows"][130]
    detail = chunks[1][30]  # type: ignore[index]
    assert row[6] == len(detail["turns"])
    stored = files.read_jsonl(
        root / "results" / "evaluate" / index["policies"][row[0]] / "trajectories.jsonl"
    )
    original = next(t for t in stored if t["question_id"] == row[2])
    assert [[passages[n][0] for n, _ in t["hits"]] for t in detail["turns"]] == [
        [id for id, _ in t["hits"]] for t in original["turns"]
    ]


def test_the_same_questions_of_every_policy_are_shown(root: Path, corpus: list[Passage]) -> None:
    synthetic.write_report(root, SETTINGS, corpus)
    index = scripts(root)["index"]
    assert isinstance(index, dict)
    shown = [{row[2] for row in index["rows"] if row[0] == number} for number in range(3)]
    assert shown[0] == shown[1] == shown[2]


def test_what_the_parameters_no_longer_name_is_left_over(root: Path, corpus: list[Passage]) -> None:
    """C25."""
    fewer = synthetic.params("~policies.warmup")
    data = synthetic.write_report(root, fewer, corpus)
    assert list(data["policies"]) == ["untrained", "memsearcher"]
    assert data["leftovers"] == ["results/evaluate/warmup"]
    assert {(t["policy"], t["baseline"]) for t in data["paired"]} == {("memsearcher", "untrained")}
    assert "results/evaluate/warmup" in html(root)


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("evaluate/memsearcher", "policy memsearcher: results/evaluate/memsearcher is not there"),
        ("train", "train of memsearcher: results/train/memsearcher is not there"),
        ("retrieval", "retrieval quality: results/retrieval/metrics.json is not there"),
    ],
)
def test_what_is_missing_is_said(root: Path, corpus: list[Passage], gone: str, told: str) -> None:
    shutil.rmtree(root / "results" / gone)
    data = synthetic.write_report(root, SETTINGS, corpus)
    assert data["missing"] == [told]
    assert told in html(root)


def test_one_policy_and_nothing_else(root: Path, corpus: list[Passage]) -> None:
    for gone in ("train", "warmup", "retrieval", "evaluate/untrained", "evaluate/warmup"):
        shutil.rmtree(root / "results" / gone)
    data = synthetic.write_report(root, SETTINGS, corpus)
    assert list(data["policies"]) == ["memsearcher"]
    assert data["paired"] == []
    assert "only one policy has results" in html(root)


def test_nothing_at_all(tmp_path: Path) -> None:
    data = synthetic.write_report(tmp_path, SETTINGS, [])
    assert data["policies"] == {}
    assert len(data["missing"]) == 6
    assert "No policy has been evaluated" in html(tmp_path)


def test_a_benchmark_that_is_missing_is_said(root: Path, corpus: list[Passage]) -> None:
    at = root / "results" / "evaluate" / "memsearcher"
    metrics = files.read_json(at / "metrics.json")
    del metrics["datasets"]["musique"]
    files.write_json(at / "metrics.json", metrics)
    kept = [r for r in files.read_jsonl(at / "predictions.jsonl") if r["dataset"] != "musique"]
    files.write_jsonl(at / "predictions.jsonl", kept)
    data = synthetic.write_report(root, SETTINGS, corpus)
    assert "policy memsearcher: no questions of musique were evaluated" in data["missing"]
    assert "The average of memsearcher is not over all seven benchmarks." in data["notices"]
    assert {t["n"] for t in data["paired"]} == {280, 240}


def test_other_settings_are_never_compared_silently(root: Path, corpus: list[Passage]) -> None:
    at = root / "results" / "evaluate" / "memsearcher" / "metrics.json"
    metrics = files.read_json(at)
    metrics["fingerprint"]["sample"] = 10
    files.write_json(at, metrics)
    data = synthetic.write_report(root, SETTINGS, corpus)
    assert "Not comparable: memsearcher and untrained differ in sample." in data["notices"]
    assert {(t["policy"], t["baseline"]) for t in data["paired"]} == {("warmup", "untrained")}


def test_memory_caps_are_shown_as_far_as_the_parameters_name_them(
    root: Path, corpus: list[Passage]
) -> None:
    """C25."""
    synthetic.write_ablation(root, caps=(256, 512, 1024))
    data = synthetic.write_report(root, SETTINGS, corpus)
    assert [row["cap"] for row in data["ablation"]] == [256, 512, 1024]
    cell = data["ablation"][0]["cells"]["musique"]
    assert cell["seeds"] == [0, 1]
    assert cell["em"]["low"] < cell["em"]["mean"] < cell["em"]["high"]
    assert len(cell["fingerprints"]) == 2
    assert data["notices"] == [data["notices"][0]]  # nothing but that the questions are invented
    assert "fig-caps-0" in html(root)

    fewer = synthetic.params("report.memory_caps=[128,256,512]")
    data = synthetic.write_report(root, fewer, corpus)
    assert [row["cap"] for row in data["ablation"]] == [256, 512]
    assert "1,024" not in html(root)
    assert data["leftovers"] == ["ablations: memory cap 1024"]
    assert data["missing"] == ["memory cap 128: no row of it in ablations"]


def test_an_ablation_over_other_settings_or_a_broken_line_is_said(root: Path) -> None:
    synthetic.write_ablation(root)
    path = root / "ablations" / "memory.jsonl"
    rows = list(files.read_jsonl(path))
    rows[0]["fingerprint"]["sample"] = 10
    evaluated = rows[1] | {"overrides": {"evaluate.max_memory_tokens": 64}}
    files.write_jsonl(path, [*rows, evaluated, rows[2] | {"overrides": {"seed": 3}}])
    found = collect(SETTINGS, root)
    assert found.conflicts == ["rows of the memory ablation differ in sample"]
    assert {cell.policy for cell in found.ablation.cells} == {
        "memsearcher",
        "memsearcher, in evaluation only",
    }
    del rows[4]["em"]
    files.write_jsonl(path, rows)
    with pytest.raises(BadInput, match=r"memory\.jsonl:5: no em"):
        collect(SETTINGS, root)


def test_training_seeds_are_also_shown_together(tmp_path: Path, corpus: list[Passage]) -> None:
    seeds = synthetic.params(*synthetic.SEED)
    synthetic.write_results(tmp_path, seeds, 10, corpus)
    data = synthetic.write_report(tmp_path, seeds, corpus)
    (row,) = data["over_seeds"]["averages"]
    assert row["seeds"] == ["memsearcher", "memsearcher-seed2"]
    ems = [data["policies"][name]["average"]["em"] for name in row["seeds"]]
    assert row["em"] == pytest.approx(sum(ems) / 2)
    tests = {(t["policy"], t["baseline"]): t for t in data["over_seeds"]["tests"]}
    assert set(tests) == {("memsearcher", "untrained"), ("memsearcher", "warmup")}
    assert tests["memsearcher", "warmup"]["seeds"] == [2, 1]
    assert "Over training seeds" in html(tmp_path)
    assert "## Over training seeds" in (tmp_path / "report" / "results.md").read_text("utf-8")


def test_cost_growth_and_links_are_there(root: Path, corpus: list[Passage]) -> None:
    both = synthetic.params(*synthetic.REACT)
    synthetic.write_results(root, both, 40, corpus)
    synthetic.write_stages(root)
    data = synthetic.write_report(root, both, corpus)
    ours, history = (data["policies"][n]["behaviour"] for n in ("memsearcher", "react"))
    assert (
        ours["growth"]["tokens"]["exponent"] < 1.2 < 1.8 < history["growth"]["tokens"]["exponent"]
    )
    assert history["flops"] > history["flops_prefix_kept"]
    assert (
        history["context_tokens_by_turn"][3]["mean"] > 3 * ours["context_tokens_by_turn"][3]["mean"]
    )
    links = {row["stage"]: row["mlflow"] for row in data["stages"]}
    assert links["train@memsearcher"] == {"experiment": "1", "run": "abcdef0123456789"}
    assert links["corpus"] is None
    assert "http://127.0.0.1:5000/#/experiments/1/runs/abcdef0123456789" in html(root)


def test_dvc_finds_its_metrics_and_plots(root: Path, corpus: list[Passage]) -> None:
    synthetic.write_report(root, SETTINGS, corpus)
    declared = yaml.safe_load((files.ROOT / "dvc.yaml").read_text())
    for path in declared["metrics"]:
        assert files.read_json(root / path)["memsearcher"]["em_average"] > 0
    for plot in declared["plots"]:
        ((folder, axes),) = plot.items()
        tables = sorted((root / folder).glob("*.csv"))
        assert tables, folder
        for table in tables:
            head, *rows = table.read_text().splitlines()
            assert {axes["x"], axes["y"]} == set(head.split(","))
            assert rows


def test_deviations_from_the_paper_come_from_the_parameters() -> None:
    ours: Params = synthetic.params("train.group_size=5")
    named = {key for key, _, _ in deviations(ours)}
    assert "train.group_size" not in named
    assert {"corpus.kind", "train.questions_per_step", "agent.max_memory_tokens"} <= named


def test_real_questions_are_not_called_invented(root: Path, corpus: list[Passage]) -> None:
    real = synthetic.params("questions.kind=local", "questions.path=somewhere")
    assert not collect(real, root).invented
    data = synthetic.write_report(root, real, corpus)
    assert data["notices"] == []
    assert "invented" not in html(root)
