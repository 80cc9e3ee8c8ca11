"""What warm-up trains on, token by token: 1 stands under every token that the teacher said.

The tokenizer has a token per byte: "a" is 64, a space 220, a newline 198, and then the control
tokens, 256 <|im_start|>, 257 <|im_end|>, and the tags, 259 <think> to 268 </tool_response>.
"""

import asyncio

import pytest
import torch
from conftest import ScriptedEngine

from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Found
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.agent.react import ReAct
from memsearcher.engine.contract import Sampling
from memsearcher.learner import sft
from memsearcher.learner.collate import collate
from memsearcher.params import Agent as AgentParams
from memsearcher.types import Hit, Passage, Question

CALL = '</think><tool_call>{"query":"a"}</tool_call>'
MEMORY = "<memory> m </memory>"
ANSWER = r"</think>\boxed{b}"
Said = list[tuple[str, list[int], int]]  # text, ids, loss

# MemSearcher, first turn: question and empty memory, search, passage, new memory
ACTS: Said = [
    ("<|im_start|>", [256], 0),
    ("user\n", [84, 82, 68, 81, 198], 0),
    ("<question>", [265], 0),
    (" Q ", [220, 48, 220], 0),
    ("</question>", [266], 0),
    (" ", [220], 0),
    ("<memory>", [263], 0),
    (" ", [220], 0),
    ("</memory>", [264], 0),
    ("<|im_end|>", [257], 0),
    ("\n", [198], 0),
    ("<|im_start|>", [256], 0),
    ("assistant\n", [64, 82, 82, 72, 82, 83, 64, 77, 83, 198], 0),
    ("<think>", [259], 0),
    ("</think>", [260], 1),
    ("<tool_call>", [261], 1),
    ('{"query":"a"}', [90, 1, 80, 84, 68, 81, 88, 1, 25, 1, 64, 1, 92], 1),
    ("</tool_call>", [262], 1),
    ("<|im_end|>", [257], 1),
    ("\n", [198], 0),
    ("<|im_start|>", [256], 0),
    ("user\n", [84, 82, 68, 81, 198], 0),
    ("<tool_response>", [267], 0),
    (" [1] T : x ", [220, 58, 16, 60, 220, 51, 220, 25, 220, 87, 220], 0),
    ("</tool_response>", [268], 0),
    ("<|im_end|>", [257], 0),
    ("\n", [198], 0),
    ("<|im_start|>", [256], 0),
    ("assistant\n", [64, 82, 82, 72, 82, 83, 64, 77, 83, 198], 0),
    ("<memory>", [263], 1),
    (" m ", [220, 76, 220], 1),
    ("</memory>", [264], 1),
    ("<|im_end|>", [257], 1),
]
# MemSearcher, second turn: a context of its own, the memory is prompt now
ANSWERS: Said = [
    ("<|im_start|>", [256], 0),
    ("user\n", [84, 82, 68, 81, 198], 0),
    ("<question>", [265], 0),
    (" Q ", [220, 48, 220], 0),
    ("</question>", [266], 0),
    (" ", [220], 0),
    ("<memory>", [263], 0),
    (" m ", [220, 76, 220], 0),
    ("</memory>", [264], 0),
    ("<|im_end|>", [257], 0),
    ("\n", [198], 0),
    ("<|im_start|>", [256], 0),
    ("assistant\n", [64, 82, 82, 72, 82, 83, 64, 77, 83, 198], 0),
    ("<think>", [259], 0),
    ("</think>", [260], 1),
    ("\\boxed{b}", [59, 65, 78, 87, 68, 67, 90, 65, 92], 1),
    ("<|im_end|>", [257], 1),
]
# ReAct: one context; the observation stands between two sampled spans
KEEPS_HISTORY: Said = [
    ("<|im_start|>", [256], 0),
    ("user\n", [84, 82, 68, 81, 198], 0),
    ("<question>", [265], 0),
    (" Q ", [220, 48, 220], 0),
    ("</question>", [266], 0),
    ("<|im_end|>", [257], 0),
    ("\n", [198], 0),
    ("<|im_start|>", [256], 0),
    ("assistant\n", [64, 82, 82, 72, 82, 83, 64, 77, 83, 198], 0),
    ("<think>", [259], 0),
    ("</think>", [260], 1),
    ("<tool_call>", [261], 1),
    ('{"query":"a"}', [90, 1, 80, 84, 68, 81, 88, 1, 25, 1, 64, 1, 92], 1),
    ("</tool_call>", [262], 1),
    ("<|im_end|>", [257], 1),
    ("\n", [198], 0),
    ("<|im_start|>", [256], 0),
    ("user\n", [84, 82, 68, 81, 198], 0),
    ("<tool_response>", [267], 0),
    (" [1] T : x ", [220, 58, 16, 60, 220, 51, 220, 25, 220, 87, 220], 0),
    ("</tool_response>", [268], 0),
    (" Answer now.", [220, 32, 77, 82, 86, 68, 81, 220, 77, 78, 86, 13], 0),
    ("<|im_end|>", [257], 0),
    ("\n", [198], 0),
    ("<|im_start|>", [256], 0),
    ("assistant\n", [64, 82, 82, 72, 82, 83, 64, 77, 83, 198], 0),
    ("<think>", [259], 0),
    ("</think>", [260], 1),
    ("\\boxed{b}", [59, 65, 78, 87, 68, 67, 90, 65, 92], 1),
    ("<|im_end|>", [257], 1),
]


@pytest.mark.parametrize(
    ("kind", "script", "turns"),
    [
        (MemSearcher, [CALL, MEMORY, ANSWER], [ACTS, ANSWERS]),
        (ReAct, [CALL, ANSWER], [KEEPS_HISTORY]),
    ],
)
def test_loss_is_on_what_the_teacher_said(
    chat: Chat,
    agent_params: AgentParams,
    kind: type[MemSearcher] | type[ReAct],
    script: list[str],
    turns: list[Said],
) -> None:
    async def search(query: str) -> Found:
        return [(Hit("1", 1.0, 1), Passage("1", "T", "x"))]

    played = kind(agent_params, chat, 1).run(
        Question("nq/1", "nq", "Q", ("b",)),
        0,
        ScriptedEngine(chat, script),
        search,
        sampling=Sampling(0),
        max_turns=3,
        seed=1,
    )
    rows = sft.examples([asyncio.run(played)])
    assert len(rows) == len(turns)
    for row, said in zip(rows, turns, strict=True):
        ids = [i for _, part, _ in said for i in part]
        loss = [bool(on) for _, part, on in said for _ in part]
        assert row.ids == ids
        assert [False] * row.start + row.mask == loss
        assert [chat.decode(part) for _, part, _ in said] == [text for text, _, _ in said]
        batch = collate([row])
        assert batch.select[0].tolist() == [*loss[1:], False]  # a token is predicted one before
        assert batch.targets.tolist() == [i for i, on in zip(ids, loss, strict=True) if on]
        assert torch.equal(batch.advantages, torch.ones(sum(loss)))
