"""The scripted teacher in the real agent loop: right without errors, wrong where it should be."""

import asyncio
import random
from dataclasses import replace

import pytest

from memsearcher import params
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Found
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.agent.react import ReAct
from memsearcher.agent.teacher import ScriptedTeacher
from memsearcher.engine.contract import Sampling
from memsearcher.files import ROOT
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Hit, Passage, Question, StopReason, Trajectory

PASSAGES = {
    "director of Red Sea": [
        Passage("1", "Red Sun", "Red Sun is a film. Its director is Bo Lin."),
        Passage("2", "Red Sea", "Red Sea is a film. Its director is Al Kor and its year is 1950."),
    ],
    "birthplace of Al Kor": [
        Passage("3", "Al Kor", "Al Kor is a person. Their birthplace is Ulm."),
    ],
    "mayor of Ulm": [Passage("4", "Ulm", "Ulm is a town. Its mayor is Bo Lin.")],
    "Gary Groth": [
        Passage("5", "Gary Groth", "was dismissed. Groth wrote a critique in 2001."),
        Passage("6", "Gary Groth", "Gary Groth Gary Groth is a critic. He founded Fanta Books."),
    ],
}


def chain(hops: int = 3) -> Question:
    plan = [
        {"title": "Red Sea", "relation": "director", "value": "Al Kor"},
        {"title": "Al Kor", "relation": "birthplace", "value": "Ulm"},
        {"title": "Ulm", "relation": "mayor", "value": "Bo Lin"},
    ][:hops]
    steps = [
        {
            "query": f"{h['relation']} of {h['title']}",
            "title": h["title"],
            "fact": f"{h['title']} {h['relation']} {h['value']} ;",
            "value": h["value"],
        }
        for h in plan
    ]
    return Question(
        "m/1", "m", "Who?", (plan[-1]["value"],), metadata={"type": "bridge", "plan": steps}
    )


def play(
    question: Question,
    chat: Chat,
    agent: AgentParams,
    seed: int = 1,
    kind: type[MemSearcher] | type[ReAct] = MemSearcher,
    turns: int = 6,
    **errors: float | str,
) -> Trajectory:
    rates = {"early_answer": 0.0, "drop_fact": 0.0, "wrong_search": 0.0, **errors}
    warmup = replace(params.load(ROOT / "params.yaml").warmup, **rates)
    teacher = ScriptedTeacher(question, chat, warmup, random.Random(seed))

    async def search(query: str) -> Found:
        found = PASSAGES.get(query, PASSAGES["mayor of Ulm"])
        return [(Hit(p.id, 1.0, i + 1), p) for i, p in enumerate(found)]

    room = replace(agent, max_context_tokens=3000)
    return asyncio.run(
        kind(room, chat, 2).run(
            question, 0, teacher, search, sampling=Sampling(0), max_turns=turns, seed=1
        )
    )


def test_follows_a_chain_and_keeps_short_facts(chat: Chat, agent_params: AgentParams) -> None:
    t = play(chain(), chat, agent_params)
    assert (t.stop, t.answer) == (StopReason.ANSWERED, "Bo Lin")
    assert [turn.query for turn in t.turns] == [*list(PASSAGES)[:3], None]
    assert t.turns[1].memory_before == "Red Sea director Al Kor ;"
    # the cap of 60 bytes holds two facts: the oldest goes
    assert t.turns[3].memory_before == "Al Kor birthplace Ulm ; Ulm mayor Bo Lin ;"
    assert (
        t.turns[0].action
        == ' find the director</think><tool_call> {"query": "director of Red Sea"}</tool_call>'
    )
    assert t.turns[-1].action == " done</think>\\boxed{ Bo Lin }"
    assert not any(turn.memory_cut for turn in t.turns)
    assert set(t.turns[0].sampler_logprobs) == {0.0}


def test_notes_of_whole_passages(chat: Chat, agent_params: AgentParams) -> None:
    room = replace(agent_params, max_memory_tokens=100)
    t = play(chain(2), chat, room, notes="passage")
    assert (t.stop, t.answer) == (StopReason.ANSWERED, "Ulm")
    first = "Red Sea is a film. Its director is Al Kor and its year is 1950."
    assert t.turns[1].memory_before == first
    assert t.turns[2].memory_before == "Al Kor is a person. Their birthplace is Ulm."  # 111 bytes


def test_the_same_seed_plays_the_same(chat: Chat, agent_params: AgentParams) -> None:
    errors = {"early_answer": 0.5, "drop_fact": 0.3, "wrong_search": 0.3}

    def text(seed: int) -> list[str]:
        return [turn.action for turn in play(chain(), chat, agent_params, seed, **errors).turns]

    assert text(3) == text(3)
    assert len({tuple(text(seed)) for seed in range(12)}) > 2


def test_early_answers_come_from_the_way_there(chat: Chat, agent_params: AgentParams) -> None:
    answers = {play(chain(), chat, agent_params, s, early_answer=1.0).answer for s in range(8)}
    assert answers == {"Al Kor", "Ulm"}
    assert play(chain(1), chat, agent_params, early_answer=1.0).answer == "Al Kor"  # one hop: right


def test_wrong_searches_and_dropped_facts(chat: Chat, agent_params: AgentParams) -> None:
    t = play(chain(1), chat, agent_params, wrong_search=1.0)
    assert [turn.query for turn in t.turns] == ["director of Red", "director of Red", None]
    assert t.answer == "unknown"
    t = play(chain(1), chat, agent_params, drop_fact=1.0)
    assert [turn.memory_after for turn in t.turns] == ["", "", None]


def test_last_turn_answers(chat: Chat, agent_params: AgentParams) -> None:
    assert play(chain(), chat, agent_params, turns=2).answer == "unknown"
    for turns in (1, 2):
        assert play(chain(), chat, agent_params, turns=turns).stop is StopReason.ANSWERED


def test_react_reads_its_own_history(chat: Chat, agent_params: AgentParams) -> None:
    t = play(chain(), chat, agent_params, kind=ReAct)
    assert (t.stop, t.answer) == (StopReason.ANSWERED, "Bo Lin")
    assert t.turns[0].query == "\n".join(list(PASSAGES)[:3])


def test_comparison_needs_every_fact(chat: Chat, agent_params: AgentParams) -> None:
    q = chain(2)
    q = replace(q, golds=("no",), metadata={**q.metadata, "type": "comparison"})
    t = play(q, chat, agent_params)
    assert (len(t.turns), t.answer) == (3, "no")
    assert play(q, chat, agent_params, early_answer=1.0).answer == "Al Kor"


@pytest.mark.parametrize("template", ["compact", "full"])
def test_real_data_keeps_a_sentence(chat: Chat, agent_params: AgentParams, template: str) -> None:
    plan = [{"query": "Gary Groth", "title": "Gary Groth", "fact": None}]
    q = Question("h/1", "h", "What?", ("Fanta Books",), metadata={"plan": plan})
    agent = replace(agent_params, template=template, max_observation_tokens=800)
    t = play(q, chat, replace(agent, max_context_tokens=9000))
    assert t.turns[0].memory_after == "Gary Groth: He founded Fanta Books."
    assert t.answer == "Fanta Books"
    t = play(replace(q, golds=("Acme",)), chat, replace(agent, max_memory_tokens=24))
    assert t.turns[0].memory_after == "Gary Groth: Gary Groth"  # trimmed to the cap, not cut
    assert not t.turns[0].memory_cut
    plan = [{"query": "Gary Groth", "title": "", "fact": None}]
    t = play(replace(q, metadata={"plan": plan}), chat, agent)
    assert (t.turns[0].memory_after, t.answer) == ("He founded Fanta Books.", "Fanta Books")
    t = play(replace(q, golds=("Acme",), metadata={"plan": plan}), chat, agent)
    assert t.answer == "unknown"  # it never shows how to guess


def test_no_plan_no_teacher(chat: Chat, agent_params: AgentParams) -> None:
    with pytest.raises(ValueError, match=r"m/1: the scripted teacher needs metadata\['plan'\]"):
        play(replace(chain(), metadata={}), chat, agent_params)
