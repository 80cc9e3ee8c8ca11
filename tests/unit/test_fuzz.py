"""Outputs that no model should write: some thousand of what benchmarks/fuzz.py makes 100,000 of."""

from dataclasses import replace

import pytest

from benchmarks.fuzz import WRITTEN, parsed, played
from memsearcher.agent.chat import Chat
from memsearcher.params import Agent as AgentParams


@pytest.mark.slow
def test_no_output_breaks_a_loop_or_forges(any_chat: Chat, agent_params: AgentParams) -> None:
    roomy = replace(agent_params, max_observation_tokens=600, max_context_tokens=4000)
    ends = played(any_chat, roomy, WRITTEN, count=2_000, seed=1)
    assert ends.pop("outputs") >= 2_000
    assert len(ends) == 6, ends  # every stop but INFRA_FAILED


@pytest.mark.slow
def test_no_text_breaks_a_parser_or_forges(chat: Chat) -> None:
    parsed(chat, 500)
