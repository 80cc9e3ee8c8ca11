"""What only a CUDA device can show: `make gpu`. Everything else here runs without one."""

import asyncio

import pytest
import torch
from test_engines_agree import make_policy, parameters, prompt
from test_learner import (  # noqa: F401
    policy,
    test_a_step_that_is_not_finite_is_left_out_and_three_stop_the_run,
    test_bfloat16_gradients_do_not_depend_on_the_number_of_microbatches,
    test_bfloat16_moves_as_far_as_float32,
)

from memsearcher.engine.contract import Sampling
from memsearcher.engine.vllm import VllmEngine
from memsearcher.learner.collate import Row
from memsearcher.learner.deepspeed import Learner
from memsearcher.learner.losses import PolicyLoss
from memsearcher.learner.ranks import Ranks
from memsearcher.learner.settings import Settings
from memsearcher.training import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BOUND = 0.2  # mean |Δ log-prob| after a prompt in bfloat16, as in experiment=paper-3b


def test_a_gpu_is_used_in_bfloat16_unless_somebody_says_otherwise(policy):  # noqa: F811
    learner = Learner.open(Settings(policy, 1e-3, 60, policy), Ranks(1))
    for module in (learner.engine.module, learner.reference):
        assert {(p.device.type, p.dtype) for p in module.parameters()} == {("cuda", torch.bfloat16)}


def test_engine_and_learner_share_a_gpu_and_agree(tmp_path):
    """The loop of stages/train.py: sleep, update, wake, weights, probe; three times."""
    asyncio.run(_three_steps(tmp_path))


async def _three_steps(folder):
    make_policy(folder, tied=True)
    engine = await VllmEngine.open(
        parameters("engine.dtype=bfloat16", "engine.gpu_memory_share=0.3"), folder
    )
    try:
        learner = Learner.open(Settings(folder, 1e-4, 4096, folder, zero_stage=1), Ranks(1))
        prompts = [prompt(40, salt=n) for n in range(8)]
        for _ in range(3):
            wanted = [Sampling(16, seed=n) for n in range(8)]
            said = await asyncio.gather(*map(engine.generate, prompts, wanted))
            rows = [
                Row([*p, *s.ids], len(p), [True] * len(s.ids), s.logprobs, (-1.0) ** n, str(n))
                for n, (p, s) in enumerate(zip(prompts, said, strict=True))
            ]
            before = free_bytes()
            await engine.sleep()
            assert free_bytes() - before > 2**30  # its cache and weights
            figures = learner.update([rows], PolicyLoss(kl_coef=0.01))
            assert figures["sampler_gap_mean"] < BOUND
            await engine.wake()
            await engine.update_weights(learner.weights())
            await probe(engine, learner, prompts[:4], Sampling(16), BOUND)
        assert engine.weight_version == 3
    finally:
        await engine.close()


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]
