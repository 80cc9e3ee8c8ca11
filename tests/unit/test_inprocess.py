import asyncio
import random
from pathlib import Path

import pytest
import torch
from conftest import FixtureRetriever
from transformers import AutoModelForCausalLM

from memsearcher.agent.chat import Chat
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.engine.inprocess import InProcessEngine
from memsearcher.params import Agent as AgentParams
from memsearcher.rollout import roll_out
from memsearcher.types import Question

PROMPTS = [[random.Random(i).randrange(256) for _ in range(3 + 7 * i)] for i in range(8)]


@pytest.fixture
def engine(policy_folder: Path) -> InProcessEngine:
    return InProcessEngine(policy_folder, dtype="float32", max_num_seqs=16)


def _all(engine: InProcessEngine, samplings: list[Sampling]) -> list[Completion]:
    async def run() -> list[Completion]:
        jobs = zip(PROMPTS, samplings, strict=False)
        return await asyncio.gather(*(engine.generate(p, s) for p, s in jobs))

    return asyncio.run(run())


def _warm(i: int, **more: float) -> Sampling:
    options = {"max_tokens": 5 + i, "temperature": 0.7} | more
    return Sampling(seed=i, **options)  # type: ignore[arg-type]


@torch.inference_mode()
def _scored(folder: Path, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    """Log-probs from one plain forward pass of the stored policy."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    scored = torch.log_softmax(logits / temperature, dim=-1)
    return scored.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def test_logprobs_are_the_policy_s_after_temperature(
    engine: InProcessEngine, policy_folder: Path
) -> None:
    """C22; rows of different lengths in one batch, so padding and cache are right too."""
    done = _all(engine, [_warm(i) for i in range(8)])
    for i, (prompt, completion) in enumerate(zip(PROMPTS, done, strict=True)):
        assert len(completion.ids) == 5 + i
        expected = _scored(policy_folder, prompt, completion.ids, 0.7)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_draws_do_not_depend_on_the_batch(engine: InProcessEngine) -> None:
    together = _all(engine, [_warm(i) for i in range(8)])
    alone = [asyncio.run(engine.generate(PROMPTS[i], _warm(i))) for i in range(8)]
    assert [c.ids for c in together] == [c.ids for c in alone]
    again = _all(engine, [_warm(i) for i in range(8)])
    assert together == again  # to the last bit


def test_greedy_takes_the_best_token(engine: InProcessEngine, policy_folder: Path) -> None:
    done = _all(engine, [Sampling(6, temperature=0.0) for _ in PROMPTS])
    model = AutoModelForCausalLM.from_pretrained(policy_folder).eval()
    for prompt, completion in zip(PROMPTS, done, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + completion.ids])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.ids


def test_a_stop_token_ends_a_row(engine: InProcessEngine) -> None:
    free = _all(engine, [Sampling(6, temperature=0.0) for _ in PROMPTS])
    stop = free[3].ids[2]
    held = _all(engine, [Sampling(6, temperature=0.0, stop_token_ids=(stop,)) for _ in PROMPTS])
    where = free[3].ids.index(stop)
    assert (held[3].ids, held[3].stopped) == (free[3].ids[: where + 1], True)
    assert all(c.stopped == (c.ids[-1] == stop) for c in held)


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}])
def test_truncation_down_to_the_best_token_is_greedy(
    engine: InProcessEngine, cut: dict[str, float]
) -> None:
    greedy = _all(engine, [Sampling(4, temperature=0.0) for _ in PROMPTS])
    cold = _all(engine, [_warm(i, max_tokens=4, **cut) for i in range(8)])
    assert [c.ids for c in cold] == [c.ids for c in greedy]


def test_draws_follow_the_distribution(engine: InProcessEngine, policy_folder: Path) -> None:
    """2,000 first tokens against the policy's own chances: total variation of a correct sampler
    over these few likely tokens is about 0.04."""

    async def run() -> list[Completion]:
        requests = (Sampling(1, temperature=0.5, seed=i) for i in range(2000))
        return await asyncio.gather(*(engine.generate(PROMPTS[2], s) for s in requests))

    counts = torch.zeros(engine.model.config.vocab_size)
    for completion in asyncio.run(run()):
        counts[completion.ids[0]] += 1
    model = AutoModelForCausalLM.from_pretrained(policy_folder).eval()
    with torch.inference_mode():
        chances = torch.softmax(model(torch.tensor([PROMPTS[2]])).logits[0, -1] / 0.5, dim=-1)
    likely = chances > 0.01
    assert (counts / 2000 - chances)[likely].abs().max() < 0.04


def test_new_weights_are_served(
    engine: InProcessEngine, policy_folder: Path, untied_policy_folder: Path
) -> None:
    """C23. The tied policy takes an untied export, head and embeddings each their own."""
    other = AutoModelForCausalLM.from_pretrained(untied_policy_folder)
    before = asyncio.run(engine.generate(PROMPTS[4], _warm(1)))
    asyncio.run(engine.update_weights(other.named_parameters()))
    after = asyncio.run(engine.generate(PROMPTS[4], _warm(1)))
    assert (before.weight_version, after.weight_version) == (0, 1)
    assert after.logprobs == pytest.approx(
        _scored(untied_policy_folder, PROMPTS[4], after.ids, 0.7), abs=2e-5
    )
    tied = AutoModelForCausalLM.from_pretrained(policy_folder)
    export = {**dict(tied.named_parameters()), "lm_head.weight": tied.lm_head.weight}
    asyncio.run(engine.update_weights(export.items()))
    assert asyncio.run(engine.generate(PROMPTS[4], _warm(1))).logprobs == before.logprobs


def test_incomplete_or_misshapen_weights_are_refused(
    engine: InProcessEngine, untied_policy_folder: Path
) -> None:
    """C24: a parameter that was sent empty."""
    weights = dict(AutoModelForCausalLM.from_pretrained(untied_policy_folder).named_parameters())
    head = weights.pop("lm_head.weight")
    with pytest.raises(EngineFailed, match=r"not given for \['lm_head.weight'\]"):
        asyncio.run(engine.update_weights(weights.items()))
    with pytest.raises(EngineFailed, match=r"lm_head.weight: is \[269, 64\], given \[0, 64\]"):
        asyncio.run(engine.update_weights([("lm_head.weight", head[:0])]))
    with pytest.raises(EngineFailed, match="x: the policy has no such parameter"):
        asyncio.run(engine.update_weights([("x", head)]))


def test_a_request_without_room_fails(engine: InProcessEngine) -> None:
    with pytest.raises(EngineFailed, match="a prompt of 8 tokens and 9999 more"):
        asyncio.run(engine.generate([1] * 8, Sampling(9999)))


def test_roll_outs_repeat_bit_by_bit(
    engine: InProcessEngine, chat: Chat, agent_params: AgentParams
) -> None:
    questions = [Question(f"nq/{i}", "nq", f"question {i}", ("x",)) for i in range(3)]
    jobs = [(question, member) for question in questions for member in range(2)]
    agent = MemSearcher(agent_params, chat, 2)

    def once() -> list[tuple[list[int], list[float]]]:
        done = asyncio.run(
            roll_out(
                agent,
                jobs,
                engine,
                FixtureRetriever(),
                sampling=Sampling(0),
                max_turns=2,
                seed=3,
                concurrency=4,
                deterministic=True,
            )
        )
        return [(turn.response_ids, turn.sampler_logprobs) for t in done for turn in t.turns]

    assert once() == once()
