"""The context of MemSearcher stays, that of ReAct grows: real loops over ten turns."""

from dataclasses import replace

import pytest
from conftest import FixtureRetriever

from benchmarks.growth import TURNS, bounded, linear, prompt_tokens
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Found
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.agent.react import ReAct
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Question


async def search(query: str) -> Found:
    retriever = FixtureRetriever()
    return [(hit, retriever.passage(hit.passage_id)) for hit in retriever.search([query], 3)[0]]


@pytest.mark.parametrize("cap", [20, 200])
def test_memsearcher_s_prompt_is_bounded(chat: Chat, agent_params: AgentParams, cap: int) -> None:
    params = replace(agent_params, max_memory_tokens=cap, max_context_tokens=2000)
    asked = Question("q/1", "q", "Who is the mayor of Marel?", ())
    tokens = prompt_tokens(MemSearcher(params, chat, 3), chat, asked, search)
    assert len(tokens) == TURNS
    assert max(tokens) > tokens[0] + 0.9 * cap  # the memory was full
    assert bounded(tokens, cap) <= 1


def test_react_s_prompt_grows_linearly(chat: Chat, agent_params: AgentParams) -> None:
    params = replace(agent_params, max_context_tokens=20_000)
    asked = Question("q/1", "q", "Who is the mayor of Marel?", ())
    tokens = prompt_tokens(ReAct(params, chat, 3), chat, asked, search)
    assert len(tokens) == TURNS
    assert 0.8 < linear(tokens) < 1.25
    assert tokens[9] > 5 * tokens[1]
