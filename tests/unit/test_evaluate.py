"""Evaluation: nothing asked twice, nothing lost, an outage never scored, mistakes told apart."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from conftest import PASSAGES, FixtureRetriever, ScriptedEngine

from memsearcher import evaluation
from memsearcher.agent.chat import Chat
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.engine.contract import Completion, Sampling
from memsearcher.params import Params
from memsearcher.retrieval.contract import RetrieverDown
from memsearcher.types import Hit, Question, StopReason, Trajectory, Turn
from stages.evaluate import EvaluationFailed, Journal, ask

BY_ID = {p.id: p for p in PASSAGES}
MAYOR = Question("nq/test_1", "nq", "Who is the mayor of Marel?", ("Ida Quent",))
PLAN = {"plan": [{"query": "mayor of Marel", "title": "Marel", "fact": "Ida Quent"}]}


def turn(memory: str, hits: Sequence[str] = (), after: str | None = None, **more: object) -> Turn:
    found = tuple(Hit(id, 1.0, rank) for rank, id in enumerate(hits, 1))
    return Turn([0] * 5, [1] * 4, [True] * 4, [0.0] * 4, "", memory, "q", found, after, **more)


def attempt(*turns: Turn, answer: str | None = None, question: Question = MAYOR) -> Trajectory:
    stop = StopReason.ANSWERED if answer else StopReason.MAX_TURNS
    return Trajectory(question, 0, turns, stop, answer)


def mistake(trajectory: Trajectory, *, keeps_history: bool = False) -> object:
    return evaluation.predict(trajectory, BY_ID.__getitem__, keeps_history=keeps_history)["mistake"]


def test_mistakes_are_told_apart() -> None:
    searched, missed = turn("", ["1"], "Ida Quent leads it"), turn("", ["9"], "nothing")
    assert mistake(attempt(searched, turn("Ida Quent leads it"), answer="ida quent")) is None
    assert mistake(attempt(missed, turn("nothing"), answer="Brost")) == "not_retrieved"
    assert mistake(attempt(searched, turn("the town"), answer="Brost")) == "not_kept"
    assert mistake(attempt(searched, turn("Ida Quent leads it"), answer="Brost")) == "not_answered"
    assert (
        mistake(attempt(searched, turn(""), answer="Brost"), keeps_history=True) == "not_answered"
    )
    whole_words = attempt(turn("", ["1"], "x"), turn("Ida Quentin"), answer="Brost")
    assert mistake(whole_words) == "not_kept"


def test_titles_decide_where_they_are_known() -> None:
    planned = replace(MAYOR, metadata=PLAN)
    other = attempt(turn("", ["2"], "-"), turn("-"), answer="x", question=planned)
    assert mistake(other) == "not_retrieved"  # passage 2 holds the name, but is not the one
    yes = replace(MAYOR, golds=("yes",), metadata=PLAN)
    kept = attempt(turn("", ["1"], "-"), turn("by Ida Quent"), answer="no", question=yes)
    assert mistake(kept) == "not_answered"
    bare = attempt(turn("", ["1"], "-"), answer="no", question=replace(yes, metadata={}))
    assert mistake(bare) == "unknown"


def test_a_fact_that_a_rewrite_loses_is_counted() -> None:
    lost = attempt(turn("Ida Quent", after="nobody"), turn("nobody", after="Ida Quent"), turn(""))
    row = evaluation.evidence(lost, BY_ID.__getitem__, keeps_history=False)
    assert (row["facts_written"], row["facts_lost"]) == (1, 1)


def test_sample_is_the_same_for_everybody_and_grows_from_itself() -> None:
    asked = [replace(MAYOR, id=f"nq/test_{i}") for i in range(50)]
    small, large = (evaluation.select(asked, size, 7) for size in (10, 20))
    assert len(small) == 10
    assert {q.id for q in small} < {q.id for q in large}
    assert small == [q for q in asked if q in small]
    assert evaluation.select(asked, 10, 7) == small != evaluation.select(asked, 10, 8)
    assert evaluation.select(asked, None, 7) == evaluation.select(asked, 99, 7) == asked


def test_summary_counts_every_question_once() -> None:
    made = [
        attempt(turn("", ["1"], "-"), turn(""), answer="Ida Quent"),
        attempt(turn("", after="-", memory_cut=True), question=replace(MAYOR, dataset="bamboogle")),
    ]
    rows = [evaluation.predict(t, BY_ID.__getitem__, keeps_history=False) for t in made]
    got = evaluation.summarise(rows, [1.0, 3.0], seed=0)
    datasets, average, behaviour = got["datasets"], got["average"], got["behaviour"]
    assert isinstance(datasets, dict)
    assert isinstance(average, dict)
    assert isinstance(behaviour, dict)
    assert (got["count"], datasets["nq"]["em"], datasets["bamboogle"]["em"]) == (2, 1.0, 0.0)
    assert (average["em"], average["n"], average["datasets"]) == (0.5, 2, 2)
    assert datasets["nq"]["em_interval"][0] < 1.0  # Wilson: one of one is not certainty
    assert behaviour["stops"] == {"answered": 1, "max_turns": 1}
    assert behaviour["memory_cut_rate"] == 0.5
    assert behaviour["context_tokens_by_turn"][1] == {"turn": 2, "mean": 9.0, "max": 9.0, "n": 1}
    assert behaviour["total_tokens_by_turns"] == [
        {"turns": 1, "mean": 9.0, "n": 1},
        {"turns": 2, "mean": 18.0, "n": 1},
    ]
    assert behaviour["seconds_per_question"] == 2.0


class DownFor(FixtureRetriever):
    """Refuses the first `times` batches that hold `word`."""

    def __init__(self, word: str, times: int) -> None:
        super().__init__()
        self.word, self.times = word, times

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if self.times and any(self.word in query for query in queries):
            self.times -= 1
            raise RetrieverDown("connection refused by index:8000")
        return super().search(queries, k)


def questions(count: int) -> list[Question]:
    return [Question(f"nq/test_{i}", "nq", f"number {i} ?", (f"n{i}",)) for i in range(count)]


def settings(agent_params: object) -> Params:
    made = synthetic.params("engine.kind=inprocess", "evaluate.concurrency=4")
    return replace(made, agent=agent_params)  # type: ignore[type-var]


def answering(chat: Chat) -> ScriptedEngine:
    """Searches for the question's number once, remembers it, answers with it."""

    def say(prompt: list[int]) -> str:
        text = chat.decode(prompt)
        number = text.split("number ")[1].split()[0]
        if "<tool_response>" in text:
            return f"<memory> n{number} </memory>"
        if f"<memory> n{number}" in text:
            return f" known </think> \\boxed{{n{number}}}"
        return f' look </think> <tool_call> {{"query": "number {number}"}} </tool_call>'

    return ScriptedEngine(chat, say)


def go(
    journal: Journal,
    params: Params,
    chat: Chat,
    retriever: FixtureRetriever,
    todo: list[Question],
    engine: ScriptedEngine | None = None,
) -> ScriptedEngine:
    engine = engine or answering(chat)
    agent = MemSearcher(params.agent, chat, 2)
    try:
        asyncio.run(ask(todo, journal, params, "memsearcher", agent, engine, retriever))
    finally:
        journal.close()
    return engine


class Dying(ScriptedEngine):
    """Breaks the whole run at a random call, as a kill would."""

    left = 10**9

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.left -= 1
        if self.left < 0:
            raise ConnectionAbortedError("killed")
        return await super().generate(prompt_ids, sampling)


def test_killed_five_times_the_predictions_are_those_of_one_run(
    tmp_path: Path, chat: Chat, agent_params: object
) -> None:
    asked, params, rng = questions(40), settings(agent_params), random.Random(4)
    whole = Journal(tmp_path / "whole.jsonl")
    go(whole, params, chat, FixtureRetriever(), asked)

    path, calls = tmp_path / "journal.jsonl", 0
    for life in range(6):
        journal = Journal(path)
        left = [q for q in asked if q.id not in journal.rows]
        engine = Dying(chat, answering(chat)._script)
        engine.left = rng.randint(5, 22) if life < 5 else 10**9
        if life < 5:
            with pytest.raises(ConnectionAbortedError):
                go(journal, params, chat, FixtureRetriever(), left, engine)
            with open(path, "ab") as f:
                f.write(b'{"prediction"')
        else:
            go(journal, params, chat, FixtureRetriever(), left, engine)
        calls += len(engine.prompts)
    got = Journal(path).rows
    assert [got[q.id]["prediction"] for q in asked] == [
        whole.rows[q.id]["prediction"] for q in asked
    ]
    assert calls <= 3 * len(asked) + 5 * 3 * params.evaluate.concurrency


def test_an_outage_that_passes_is_asked_again(
    tmp_path: Path, chat: Chat, agent_params: object
) -> None:
    path, asked = tmp_path / "journal.jsonl", questions(9)
    journal = Journal(path)
    go(journal, settings(agent_params), chat, DownFor("number 3", 1), asked)
    assert sorted(journal.rows) == [q.id for q in asked]
    assert all(row["prediction"]["em"] == 1.0 for row in journal.rows.values())


def test_an_outage_that_stays_fails_the_stage_and_the_next_run_goes_on(
    tmp_path: Path, chat: Chat, agent_params: object
) -> None:
    path, asked, params = tmp_path / "journal.jsonl", questions(9), settings(agent_params)
    journal = Journal(path)
    with pytest.raises(EvaluationFailed, match="RetrieverDown: connection refused by index:8000"):
        go(journal, params, chat, DownFor("number 3", 99), asked)
    assert "nq/test_3" not in journal.rows
    before = len(journal.rows)

    with open(path, "ab") as f:  # killed while it wrote
        f.write(b'{"prediction": {"question_id": "nq/test_3", "em"')
    again = Journal(path)
    assert len(again.rows) == before
    left = [q for q in asked if q.id not in again.rows]
    engine = go(again, params, chat, FixtureRetriever(), left)
    assert sorted(again.rows) == [q.id for q in asked]
    assert len(engine.prompts) == 3 * len(left)  # search, memory, answer: nobody else was asked
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["prediction"]["em"] for line in lines] == [1.0] * 9
