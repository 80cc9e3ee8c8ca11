"""memsearcher ask: a trajectory on a terminal, one object for machines, errors in one line."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import FixtureRetriever, ScriptedEngine
from rich.console import Console
from typer.testing import CliRunner

from flows.compose import composed
from memsearcher import cli, live, params
from memsearcher.agent.chat import Chat
from memsearcher.engine.contract import EngineFailed
from memsearcher.params import AgentName, Params
from memsearcher.types import Question

CALL = ' look[/] </think> <tool_call> {"query": "mayor of Marel"} </tool_call>'
MEMORY = "<memory> Ida Quent [is it] </memory>"
ANSWER = r" done </think> \boxed{ Ida Quent }"


@pytest.fixture
def settings() -> Params:
    return params.validate(yaml.safe_load(composed(["experiment=smoke"])))


@pytest.fixture
def opened(
    monkeypatch: pytest.MonkeyPatch, chat: Chat, settings: Params, tmp_path: Path
) -> ScriptedEngine:
    """`ask` over twelve passages and an engine that says CALL, MEMORY, ANSWER."""
    room = {"max_action_tokens": 90, "max_memory_tokens": 40, "max_observation_tokens": 400}
    agent = replace(settings.agent, max_context_tokens=4000, max_turns_eval=4, **room)
    loaded = replace(settings, agent=agent)
    engine = ScriptedEngine(chat, [CALL, MEMORY, ANSWER])

    async def open_engine(*_: object) -> ScriptedEngine:
        return engine

    monkeypatch.setattr(cli, "load", lambda: loaded)
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)  # back again afterwards
    monkeypatch.setattr(live, "require", lambda *_: None)
    monkeypatch.setattr(live, "policy_folder", lambda *_: chat.folder)
    monkeypatch.setattr(live, "open_retriever", lambda _: FixtureRetriever())
    monkeypatch.setattr(live, "open_engine", open_engine)
    return engine


def test_a_trajectory_on_a_terminal(opened: ScriptedEngine) -> None:
    done = CliRunner().invoke(cli.app, ["ask", "Who is the mayor of Marel?"])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    for words in ("turn 1", "<think> look[/]", "1. Marel: Marel is a town", "turn 2"):
        assert words in shown
    assert "memory Ida Quent [is it]" in shown
    assert "answer: Ida Quent (answered, longest context" in shown


def test_one_object_for_machines(opened: ScriptedEngine) -> None:
    done = CliRunner().invoke(cli.app, ["ask", "Who is the mayor of Marel?", "--json"])
    row = json.loads(done.stdout)
    assert (row["answer"], row["stop"], len(row["turns"])) == ("Ida Quent", "answered", 2)
    assert row["turns"][0]["query"] == "mayor of Marel"


@pytest.mark.parametrize(("name", "script"), [("react", [CALL, ANSWER]), ("memsearcher", None)])
def test_each_turn_has_a_panel(
    opened: ScriptedEngine, settings: Params, name: AgentName, script: list[str] | None
) -> None:
    if script:
        opened._script = script
    loaded = cli.load()
    entry = replace(next(iter(loaded.policies.values())), agent=name)
    screen = io.StringIO()
    trajectory = asyncio.run(
        live.ask(
            replace(loaded, policies={"p": entry}),
            "p",
            Question("cli/0", "cli", "Who?", ()),
            0.0,
            0,
            Console(file=screen, width=100),
        )
    )
    assert trajectory.answer == "Ida Quent"
    text = screen.getvalue()
    assert text.count("─ turn") == 2
    assert text.count("1. Marel:") == 1
    assert "<|im_start|>" not in text


@pytest.mark.parametrize(
    ("words", "fault", "code"),
    [
        ([" "], "the question is empty", 2),
        (["Who?", "--policy", "nobody"], "no policy 'nobody' in params.yaml, only", 2),
    ],
)
def test_bad_input_is_one_line(
    opened: ScriptedEngine, words: list[str], fault: str, code: int
) -> None:
    done = CliRunner().invoke(cli.app, ["ask", *words])
    assert done.exit_code == code
    assert done.stderr.startswith(f"memsearcher: error: {fault}")
    assert done.stderr.count("\n") == 1


def test_broken_machinery_is_one_line(
    opened: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise EngineFailed("vLLM does not start: [no] memory")

    monkeypatch.setattr(live, "open_engine", broken)
    done = CliRunner().invoke(cli.app, ["ask", "Who?"])
    assert (done.exit_code, done.stderr) == (
        1,
        "memsearcher: error: vLLM does not start: [no] memory\n",
    )


def test_what_is_missing_is_named(
    settings: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "load", lambda: settings)
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)  # back again afterwards
    (tmp_path / "data/corpus").mkdir(parents=True)
    done = CliRunner().invoke(cli.app, ["ask", "Who?"])
    model = list(settings.policies.values())[-1].model
    assert done.exit_code == 2
    assert f"not there yet: data/index, {model} (`make demo`" in done.stderr
