"""dvc.yaml beside the stage files: each fact is written once and checked here."""

import importlib
from collections.abc import Iterator

import pytest
import yaml
from dvc.dependency import ParamsDependency
from dvc.repo import Repo
from dvc.stage import PipelineStage

from flows import graph, versions
from memsearcher import params
from memsearcher.files import ROOT
from stages.frame import Stage

PARAMS = params.load()


@pytest.fixture(scope="module")
def stages() -> Iterator[list[PipelineStage]]:
    repo = Repo(str(ROOT))
    yield list(repo.index.stages)
    repo.close()


def parts(stage: PipelineStage) -> tuple[str, str | None]:
    name, _, item = stage.addressing.partition("@")
    return name, item or None


def declared(stage: PipelineStage) -> Stage:
    return importlib.import_module(f"stages.{parts(stage)[0]}").STAGE


def test_every_stage_has_its_file_its_words_and_its_number(stages: list[PipelineStage]) -> None:
    raw = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert sorted(raw) == sorted(versions.recorded())
    for stage in stages:
        name, item = parts(stage)
        assert declared(stage).name == name
        assert stage.desc, f"{stage.addressing} has no desc"
        assert stage.meta["needs"] in ("gpu", "cpu", "network")
        assert stage.cmd == f"python -m stages.{name}" + (f" {item}" if item else "")


def test_items_are_those_of_the_stage_file(stages: list[PipelineStage]) -> None:
    for name in {parts(stage)[0] for stage in stages}:
        of_dvc = [item for n, item in map(parts, stages) if n == name]
        ours = importlib.import_module(f"stages.{name}").STAGE.items
        assert of_dvc == ([None] if ours is None else ours(PARAMS))


def test_dependencies_are_those_of_the_stage_file(stages: list[PipelineStage]) -> None:
    for stage in stages:
        ours, item = declared(stage).deps, parts(stage)[1]
        expected = ours(PARAMS, item) if callable(ours) else ours
        files = [d.def_path for d in stage.deps if not isinstance(d, ParamsDependency)]
        assert set(files) == {dep.format(item=item) for dep in expected}, stage.addressing


def test_parameters_are_those_of_the_stage_file(stages: list[PipelineStage]) -> None:
    for stage in stages:
        name, item = parts(stage)
        by_file = {d.def_path: d for d in stage.deps if isinstance(d, ParamsDependency)}
        assert by_file["code_versions.yaml"].params == [f"{name}.version"]
        ours = {key.format(item=item) for key in declared(stage).params}
        if name == "report":  # it shows everything, so it depends on the whole file
            assert by_file["params.yaml"].params == []
            assert ours == set(yaml.safe_load((ROOT / "params.yaml").read_text()))
        else:
            found = set(by_file["params.yaml"].params) if "params.yaml" in by_file else set()
            assert found == ours, stage.addressing


def test_no_artifact_is_gits_and_dvcs(stages: list[PipelineStage]) -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    for stage in stages:
        for out in stage.outs:
            assert out.def_path.split("/")[0] in ignored


def test_the_flow_sees_dvcs_graph() -> None:
    nodes = graph.nodes()
    names = [node.name for node in nodes]
    for node in nodes:
        assert all(names.index(name) < names.index(node.name) for name in node.after)
    after = {node.name: set(node.after) for node in nodes}
    assert after["corpus"] == set()
    assert after["index"] == {f"encode@{shard}" for shard in PARAMS.encode.shards}
    assert {f"evaluate@{policy}" for policy in PARAMS.policies} <= after["report"]
