"""vLLM and the policy module give the same log-probs, before and after weight updates."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conftest import save_byte_tokenizer

from flows.compose import composed
from memsearcher.agent.chat import Chat
from memsearcher.agent.parsing import Search, parse_action
from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.engine.weights import untied_export
from memsearcher.learner.collate import Row
from memsearcher.params import Params, validate
from memsearcher.training import WeightsDiffer, probe
from memsearcher.types import StopReason

pytestmark = pytest.mark.slow
BOUND = 1e-4  # float32, |log-prob|; seen: 2e-5
VOCABULARY = 500
Run = Callable[[Coroutine], object]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """An engine belongs to the event loop it was opened on."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


def make_policy(folder: Path, *, tied: bool):
    """Head size 32: vLLM's attention on CPU has 32, 64, 80, 96, 112, 128, …"""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # log-probs far from uniform
    )
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request, run, tmp_path_factory):
    """(engine, policy module), the engine serving what the module was saved as."""
    from memsearcher.engine.vllm import VllmEngine

    folder = tmp_path_factory.mktemp(request.param)
    model = make_policy(folder, tied=request.param == "tied")
    engine = run(VllmEngine.open(parameters(), folder))
    yield engine, model
    run(engine.close())


def parameters(*changes: str) -> Params:
    small = ("agent.max_context_tokens=512", "engine.threads=1", "engine.memory_gib=0.25")
    return validate(yaml.safe_load(composed([*small, *changes])))


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt + 7 * i + i * i) % VOCABULARY for i in range(length)]


async def gap(engine, model, temperature: float = 1.0, count: int = 16) -> float:
    """Largest |Δ log-prob| of sampled tokens; prompts of 5 to 305 tokens, so of up to 9 blocks."""
    prompts = [prompt(5 + 20 * (n % 16), salt=n) for n in range(count)]
    wanted = [Sampling(16, temperature, seed=n) for n in range(count)]
    done = await asyncio.gather(*map(engine.generate, prompts, wanted))
    return max(
        (logprobs(model, ids, each.ids, temperature) - torch.tensor(each.logprobs)).abs().max()
        for ids, each in zip(prompts, done, strict=True)
    ).item()


def logprobs(model, prompt_ids: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """(T,) of the T tokens `ids` after the prompt."""
    context = torch.tensor([prompt_ids + ids])  # (1, P + T)
    with torch.no_grad():
        logits = model(context).logits[0, len(prompt_ids) - 1 : -1]  # (T, V)
    scaled = (logits / (temperature or 1.0)).log_softmax(-1)
    return scaled.gather(-1, torch.tensor(ids)[:, None])[:, 0]


def train(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def export(model):
    return untied_export(model.named_parameters(), model.config)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_after_temperature(run, pair, temperature):  # C22
    assert run(gap(*pair, temperature)) < BOUND


def test_after_every_update_the_engine_is_the_new_policy(run, pair):  # C23
    """The same prompts before and after: a prefix cache that was kept would show (seen: 7)."""
    engine, model = pair
    assert run(gap(engine, model)) < BOUND
    for version in (1, 2, 3):
        train(model)
        assert run(gap(engine, model)) > 0.1  # the probe sees old weights
        run(engine.update_weights(export(model)))
        assert engine.weight_version == version
        assert run(gap(engine, model)) < BOUND
    assert run(gap(engine, model, 0.6)) < BOUND
    assert run(engine.generate(prompt(5), Sampling(1))).weight_version == 3


def test_two_hundred_contexts_agree_after_twenty_updates(run, pair):
    engine, model = pair
    assert run(gap(engine, model, count=200)) < BOUND
    for _ in range(20):
        train(model)
        run(engine.update_weights(export(model)))
    assert run(gap(engine, model, count=200)) < BOUND
    assert run(probed(engine, model)) < BOUND


class Scorer:
    """What the probe asks of a learner."""

    def __init__(self, model) -> None:
        self.model = model

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        each = (logprobs(self.model, r.ids[: r.start], r.ids[r.start :], 1.0) for r in rows)
        return [values.tolist() for values in each]


async def probed(engine, model) -> float:
    prompts = [prompt(40, salt=n) for n in range(4)]
    return await probe(engine, Scorer(model), prompts, Sampling(16), BOUND)


def test_the_naive_reload_of_a_tied_policy_fails_the_probe(run, tmp_path):
    """A folder served tied as it is, and its own parameters sent as they are."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from memsearcher.engine import transfer
    from memsearcher.engine.vllm import VllmEngine, arguments, environment

    model, params = make_policy(tmp_path, tied=True), parameters()
    sockets = Path(tempfile.mkdtemp())  # not in tmp_path: a socket's path has at most 107 letters
    with environment(params, sockets):
        llm = AsyncLLM.from_engine_args(arguments(params, tmp_path))
    naive = VllmEngine(llm, sockets, {})
    try:
        assert run(probed(naive, model)) < BOUND
        train(model)
        run(transfer.send(llm, model.named_parameters(), 1))
        assert run(llm.reset_prefix_cache())
        with pytest.raises(WeightsDiffer, match="after the update"):
            run(probed(naive, model))
    finally:
        run(naive.close())


def babbler(folder: Path) -> torch.nn.Module:
    """Draws each token alone, whatever stands before it: letters, and often what a call is made of.
    The hidden state is (8, 0, 0, …) everywhere, so a token's logit is 8 × its row's first value."""
    save_byte_tokenizer(folder)
    model, chat = make_policy(folder, tied=False), Chat(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[:, 0] = 1.0
        model.lm_head.weight.zero_()
        for piece in ("<tool_call>", "</tool_call>", '"', "}", "</think>"):
            (token,) = chat.trusted(piece)
            model.lm_head.weight[token, 0] = 4.0 / 8
    model.save_pretrained(folder)
    return model


def test_two_data_parallel_engines_and_calls_that_can_be_parsed(run, tmp_path):
    """Both options at once, since an engine takes seconds to start. Prompts are spread over the two
    engine cores, so both must have got the weights."""
    from memsearcher.engine.vllm import VllmEngine

    model, chat = babbler(tmp_path), Chat(tmp_path)
    options = ("engine.data_parallel=2", "engine.constrained_calls=true", "engine.memory_gib=0.1")
    engine = run(VllmEngine.open(parameters(*options), tmp_path))
    try:
        cores = [p for p in psutil.Process().children() if "EngineCore" in _title(p)]
        assert len(cores) == 2

        async def calls(constrained: bool) -> list[str]:
            free = Sampling(64, stop_token_ids=(chat.end_id,), constrained=constrained)
            wanted = [replace(free, seed=n) for n in range(16)]
            said = await asyncio.gather(*(engine.generate([1, 2, 3], each) for each in wanted))
            texts = [chat.decode(each.ids) for each in said]
            begun = [t[t.find("<tool_call>") :] for t in texts if "<tool_call>" in t]
            return [t for t in begun if "</tool_call>" in t]

        kept = [parse_action(f"</think>{text}", True) for text in run(calls(True))]
        assert len(kept) > 5
        assert all(isinstance(each, Search) for each in kept), kept
        free = [parse_action(f"</think>{text}", True) for text in run(calls(False))]
        assert StopReason.BAD_TOOL_CALL in free

        assert run(gap(engine, model)) < BOUND
        train(model)
        assert run(gap(engine, model)) > 0.1
        run(engine.update_weights(export(model)))
        assert run(gap(engine, model)) < BOUND
        assert run(engine.generate([1], Sampling(1))).weight_version == 1
    finally:
        run(engine.close())


def test_an_export_that_is_not_whole_changes_nothing(run, pair):  # C24
    engine, model = pair
    version = engine.weight_version
    halved = [(n, t[:0] if n.endswith("1.mlp.up_proj.weight") else t) for n, t in export(model)]
    with pytest.raises(ValueError, match=r"up_proj.weight is \[0, 64\], not \[128, 64\]"):
        run(engine.update_weights(halved))
    with pytest.raises(ValueError, match="without lm_head"):
        run(engine.update_weights((n, t) for n, t in export(model) if n != "lm_head.weight"))
    assert engine.weight_version == version
    assert run(gap(engine, model)) < BOUND


def test_a_reload_that_leaves_out_the_head_is_seen(run, pair):
    """What reloading a tied model does on vLLM's CPU build: everything is new but the head."""
    from memsearcher.engine import transfer

    engine, model = pair
    train(model)
    body = [(n, t) for n, t in export(model) if n != "lm_head.weight"]
    run(transfer.send(engine._llm, body, 99))
    assert run(engine._llm.reset_prefix_cache())
    assert run(gap(engine, model)) > 0.1
    run(engine.update_weights(export(model)))
    assert run(gap(engine, model)) < BOUND


def test_a_stop_token_ends_a_completion_and_belongs_to_it(run, pair):
    engine, _ = pair
    free: Completion = run(engine.generate(prompt(20), Sampling(8, temperature=0.0)))
    assert (len(free.ids), free.stopped) == (8, False)
    stop = free.ids[3]
    done = run(engine.generate(prompt(20), Sampling(8, 0.0, stop_token_ids=(stop,))))
    assert done.stopped
    assert done.ids == free.ids[: free.ids.index(stop) + 1]
    assert len(done.logprobs) == len(done.ids)


def test_a_seed_fixes_a_request_in_any_batch(run, pair):
    """96 prompts are more than one prefill batch; a seeded prompt that was prefilled in two parts
    ended vLLM's engine core on CPU."""
    engine, _ = pair
    alone = run(engine.generate(prompt(200), Sampling(8, seed=0)))

    async def together() -> list[Completion]:
        requests = (engine.generate(prompt(200, n), Sampling(8, seed=n)) for n in range(96))
        return await asyncio.gather(*requests)

    assert run(together())[0].ids == alone.ids


def test_a_dead_engine_core_is_an_error_with_its_end(run, pair):
    engine, _ = pair
    (core,) = (p for p in psutil.Process().children() if "EngineCore" in _title(p))

    async def die() -> None:
        request = asyncio.create_task(engine.generate(prompt(20), Sampling(200)))
        await asyncio.sleep(0.05)
        os.kill(core.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="exit codes"):
            await asyncio.wait_for(request, 20)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(engine.generate(prompt(20), Sampling(2)), 20)

    run(die())


def _title(process: psutil.Process) -> str:
    return " ".join([process.name(), *process.cmdline()])
