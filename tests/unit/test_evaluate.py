"""Evaluation: nothing asked twice, nothing lost, an outage never scored, mistakes told apart."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from conftest import PASSAGES, FixtureRetriever, ScriptedEngine

from memsearcher import cost, evaluation, policy, transcripts
from memsearcher.agent.chat import Chat
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.cost import ModelSize
from memsearcher.engine.contract import Completion, Engine, Sampling
from memsearcher.engine.inprocess import InProcessEngine
from memsearcher.files import BadInput
from memsearcher.params import Agent as AgentParams
from memsearcher.params import Params
from memsearcher.retrieval.contract import RetrieverDown
from memsearcher.types import Hit, Question, StopReason, Trajectory, Turn
from stages.evaluate import STAGE, EvaluationFailed, Journal, ask

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
    planned = replace(MAYOR, metadata=PLAN)
    title = attempt(turn("Marel: Ida Quent", after="Ida Quent"), turn(""), question=planned)
    row = evaluation.evidence(title, BY_ID.__getitem__, keeps_history=False)
    assert (row["facts_written"], row["facts_lost"]) == (2, 1)


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
    got = evaluation.summarise(rows, [1.0, 3.0], 0, ModelSize(weights=100, layers=2, width=4))
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
    one = 2 * 100 * 9 + 2 * 2 * 4 * 9 * 10  # a context of nine tokens
    assert behaviour["cost_by_turns"] == [
        {"turns": 1, "n": 1, "tokens": 9.0, "flops": one, "seconds": 3.0},
        {"turns": 2, "n": 1, "tokens": 18.0, "flops": 2 * one, "seconds": 1.0},
    ]
    assert (behaviour["flops"], behaviour["flops_prefix_kept"]) == (1.5 * one, 1.5 * one)
    assert behaviour["seconds_per_question"] == 2.0
    for name, (low, high) in behaviour["intervals"].items():
        assert low <= behaviour[name] <= high


def test_a_history_is_counted_and_told_turn_by_turn() -> None:
    """Two searches and an answer in one context: 5 prompt tokens, then 2 said, 3 read, 2 said, 4
    read, 1 said."""
    said = [True] * 2 + [False] * 3 + [True] * 2 + [False] * 4 + [True]
    whole = Turn(
        *([0] * 5, list(range(12)), said, [0.0] * 12, "all of it", ""),
        query="first\nsecond",
        hits=(Hit("1", 0.9, 1), Hit("2", 0.8, 2), Hit("3", 0.7, 1)),
        seconds={"action": 1.0},
    )
    history = attempt(whole, answer="Ida Quent")
    row = evaluation.predict(history, BY_ID.__getitem__, keeps_history=True)
    assert (row["turns"], row["searches"], row["rewrites"]) == (3, 2, None)
    assert row["context_tokens"] == [7, 12, 17]
    told = transcripts.readable(history, str, keeps_history=True)
    turns = told["turns"]
    assert isinstance(turns, list)
    assert [t["action"] for t in turns] == ["[0, 1]", "[5, 6]", "[11]"]
    assert [t["query"] for t in turns] == ["first", "second", None]
    assert [[id for id, _ in t["hits"]] for t in turns] == [["1", "2"], ["3"], []]
    assert [t["tokens"]["prompt"] for t in turns] == [5, 10, 16]
    assert [t["tokens"]["observation"] for t in turns] == [3, 4, 0]
    bad = attempt(replace(whole, query="first", hits=whole.hits[:2], bad_query=True))
    shown = transcripts.readable(bad, str, keeps_history=True)["turns"]
    assert isinstance(shown, list)
    assert [t["bad_query"] for t in shown] == [False, True, False]
    size = ModelSize(weights=100, layers=2, width=4)
    kept = cost.prefix_kept([7, 12, 17], size, keeps_history=True)
    assert kept == cost.operations(17, size) < cost.afresh([7, 12, 17], size)


def test_the_size_of_a_policy(policy_folder: Path, untied_policy_folder: Path) -> None:
    """Tied or not, the head is counted and the look-up is not: both are the same model."""
    tied, untied = cost.size_of(policy_folder), cost.size_of(untied_policy_folder)
    assert tied == untied
    assert (tied.layers, tied.width) == (2, 64)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    assert tied.weights == sum(p.numel() for p in model.parameters())


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


def settings(agent_params: AgentParams) -> Params:
    made = synthetic.params(
        *("engine.kind=inprocess", "evaluate.concurrency=4", "search.patience_s=0"),
        *synthetic.REACT,
    )
    return replace(made, agent=agent_params)


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
    engine: Engine | None = None,
) -> None:
    engine = answering(chat) if engine is None else engine
    agent = MemSearcher(params.agent, chat, 2)
    try:
        asyncio.run(ask(todo, journal, params, "memsearcher", agent, engine, retriever, chat))
    finally:
        journal.close()


class Dying(ScriptedEngine):
    """Kills its own process at a given call: no handler, no flush, no farewell."""

    left = 10**9

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(prompt_ids, sampling)


def killed_after(calls: int, path: Path, asked: list[Question], params: Params, chat: Chat) -> None:
    """One life of the evaluation, in a process of its own, which ends at its `calls`-th message."""
    child = os.fork()
    if not child:
        try:
            journal = Journal(path)
            engine = Dying(chat, answering(chat)._script)
            engine.left = calls
            left = [q for q in asked if q.id not in journal.rows]
            go(journal, params, chat, FixtureRetriever(), left, engine)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_killed_five_times_the_predictions_are_those_of_one_run(
    tmp_path: Path, chat: Chat, agent_params: AgentParams
) -> None:
    asked, params, rng = questions(40), settings(agent_params), random.Random(4)
    whole = Journal(tmp_path / "whole.jsonl")
    go(whole, params, chat, FixtureRetriever(), asked)

    path, done = tmp_path / "journal.jsonl", [0]
    for _ in range(5):
        killed_after(rng.randint(13, 22), path, asked, params, chat)
        with open(path, "ab") as f:
            f.write(b'{"prediction"')  # as if it had died while it wrote
        done.append(len(Journal(path).rows))
    assert done == sorted(done)
    assert 0 < done[1] < done[-1] < len(asked)

    journal = Journal(path)
    left = [q for q in asked if q.id not in journal.rows]
    engine = answering(chat)
    go(journal, params, chat, FixtureRetriever(), left, engine)
    assert len(engine.prompts) == 3 * (len(asked) - done[-1])  # nobody is asked twice
    got = Journal(path).rows
    assert [got[q.id]["prediction"] for q in asked] == [
        whole.rows[q.id]["prediction"] for q in asked
    ]


def test_what_is_left_after_a_kill_is_said_as_in_one_run(
    tmp_path: Path, chat: Chat, agent_params: AgentParams, policy_folder: Path
) -> None:
    """The real in-process engine: other questions share a batch then, and no word changes."""
    asked = questions(12)
    params = settings(replace(agent_params, max_action_tokens=24))
    said = []
    for name, cuts in (("whole", [12]), ("killed", [5, 6, 12])):
        for cut in cuts:
            journal = Journal(tmp_path / name)
            left = [q for q in asked[:cut] if q.id not in journal.rows]
            engine = InProcessEngine(policy_folder, dtype="float32", max_num_seqs=8)
            go(journal, params, chat, FixtureRetriever(), left, engine)
        rows = [journal.rows[q.id] for q in asked]
        actions = [[turn["action"] for turn in row["trajectory"]["turns"]] for row in rows]
        said.append((actions, [row["prediction"] for row in rows]))
    assert said[0] == said[1]
    assert len({str(actions) for actions in said[0][0]}) > 1


def test_an_outage_that_passes_is_asked_again(
    tmp_path: Path, chat: Chat, agent_params: AgentParams
) -> None:
    path, asked = tmp_path / "journal.jsonl", questions(9)
    journal = Journal(path)
    go(journal, settings(agent_params), chat, DownFor("number 3", 1), asked)
    assert sorted(journal.rows) == [q.id for q in asked]
    assert all(row["prediction"]["em"] == 1.0 for row in journal.rows.values())


def test_an_outage_that_stays_fails_the_stage_and_the_next_run_goes_on(
    tmp_path: Path, chat: Chat, agent_params: AgentParams
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
    engine = answering(chat)
    go(again, params, chat, FixtureRetriever(), left, engine)
    assert sorted(again.rows) == [q.id for q in asked]
    assert len(engine.prompts) == 3 * len(left)  # search, memory, answer: nobody else was asked
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["prediction"]["em"] for line in lines] == [1.0] * 9


def test_a_checkpoint_by_path_or_name_is_a_policy(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of one's own is a policy like the pipeline's; a name goes to the hub."""
    given = synthetic.params(
        f"+policies.mine={{agent: react, model: {policy_folder}, after: data/questions}}",
        "+policies.theirs={agent: memsearcher, model: 'hub:owner/name@abc', after: data/questions}",
    )
    assert STAGE.items is not None
    assert STAGE.items(given)[-2:] == ["mine", "theirs"]
    assert callable(STAGE.deps)
    assert STAGE.deps(given, "mine")[-1] == "data/questions"
    assert policy.policy_folder(given, given.policies["mine"].model) == policy_folder
    with pytest.raises(BadInput, match="model: /nowhere is no policy"):
        policy.policy_folder(given, "/nowhere")

    asked = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in allow_patterns)
        return str(policy_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert policy.policy_folder(given, given.policies["theirs"].model) == policy_folder
    policy.policy_folder(given, "hub:owner/name")
    assert asked == [("owner/name", "abc"), ("owner/name", None)]
