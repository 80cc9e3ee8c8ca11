"""The engine on vLLM's AsyncLLM: an asyncio client here, the engine core in a spawned process.

Serves an untied copy of the policy (see `weights.untied_folder`). Log-probs are those of the
distribution that was sampled from, after temperature; of temperature 1 where it is 0 (greedy).
On CPU the model runs eagerly inside the engine core: no compilation, no warm-up, no second process.
"""

import itertools
import multiprocessing
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memsearcher import files
from memsearcher.engine import plugin
from memsearcher.engine.constrained import STRUCTURAL_TAG
from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.engine.weights import complete, shapes_of, untied_folder
from memsearcher.params import Params

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

UNCHANGED = "default"  # vLLM's name for the weights that it started with


class VllmEngine:
    def __init__(self, llm: "AsyncLLM", sockets: Path, shapes: dict[str, list[int]]) -> None:
        self._llm = llm
        self._sockets = sockets
        self._shapes = shapes
        self._version = 0
        self._running = 0
        self._numbers = itertools.count()

    @classmethod
    async def open(cls, params: Params, folder: Path) -> "VllmEngine":
        """Blocks for the seconds that the engine core needs to start."""
        served = untied_folder(folder)
        sockets = Path(tempfile.mkdtemp(prefix="memsearcher-"))
        with environment(params, sockets):
            from vllm.v1.engine.async_llm import AsyncLLM

            try:
                llm = AsyncLLM.from_engine_args(arguments(params, served))
            except BaseException as e:
                files.remove(sockets)
                if isinstance(e, RuntimeError):
                    raise EngineFailed(f"vLLM does not start on {served}: {e}") from e
                raise
        return cls(llm, sockets, shapes_of(served))

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.logprobs import FlatLogprobs
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        stops = sampling.stop_token_ids
        wanted = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop_token_ids=list(stops),
            ignore_eos=True,  # what ends a message is said by stop_token_ids alone
            skip_clone=True,  # made for one request; deep copies were half of this loop's work
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=(
                StructuredOutputsParams(structural_tag=STRUCTURAL_TAG)
                if sampling.constrained
                else None
            ),
        )
        self._running += 1
        try:
            async with self._cause("generation"):
                number = str(next(self._numbers))
                async for answer in self._llm.generate(tokens_input(prompt_ids), wanted, number):
                    done = answer.outputs[0]
        finally:
            self._running -= 1
        assert isinstance(done.logprobs, FlatLogprobs)
        ids = list(done.token_ids)
        versions = [span.version for span in done.weight_versions or []]
        if len(versions) != 1:
            raise EngineFailed(f"the tokens of one request were sampled under weights {versions}")
        version = 0 if versions[0] == UNCHANGED else int(versions[0])
        return Completion(
            ids, list(done.logprobs.logprobs), bool(ids) and ids[-1] in stops, version
        )

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from memsearcher.engine import transfer

        if self._running:
            raise RuntimeError(f"update_weights while {self._running} requests are generated")
        async with self._cause("the weight update"):
            await transfer.send(self._llm, complete(weights, self._shapes), self._version + 1)
            if not await self._llm.reset_prefix_cache():
                raise EngineFailed("vLLM would not drop its prefix cache: blocks are in use")
        self._version += 1

    async def sleep(self) -> None:
        """Frees the engine's GPU memory for the learner; on CPU there is no such mode."""
        if self._can_sleep:
            await self._llm.sleep(level=1)

    async def wake(self) -> None:
        if self._can_sleep:
            await self._llm.wake_up()

    @property
    def _can_sleep(self) -> bool:
        return self._llm.vllm_config.model_config.enable_sleep_mode

    async def close(self) -> None:
        """The engine core gets a second, then it is killed: it holds nothing worth keeping."""
        self._llm.shutdown(timeout=1)
        # vLLM calls this again when the interpreter tears down, and fails in it.
        self._llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]
        multiprocessing.active_children()  # collects what was killed
        files.remove(self._sockets)

    @asynccontextmanager
    async def _cause(self, what: str) -> AsyncIterator[None]:
        """vLLM's own errors say little; a dead engine core is named with how it ended."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield
        except (EngineDeadError, EngineGenerateError) as e:
            manager = self._llm.engine_core.resources.engine_manager
            codes = [p.exitcode for p in manager.processes] if manager else []
            raise EngineFailed(
                f"vLLM's engine core failed during {what} (exit codes {codes}): {e}"
            ) from e


def arguments(params: Params, folder: Path) -> "AsyncEngineArgs":
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    e = params.engine
    cpu = current_platform.is_cpu()
    alone = cpu and e.tensor_parallel == 1
    return AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=not e.constrained_calls,  # tokens in, tokens out
        dtype=e.dtype,
        seed=params.seed,
        max_model_len=params.agent.max_context_tokens,
        max_num_seqs=e.max_num_seqs,
        tensor_parallel_size=e.tensor_parallel,
        data_parallel_size=e.data_parallel,
        enable_prefix_caching=True,
        block_size=32 if cpu else None,  # CPU's default of 128 would share no short prompt
        # A prompt is prefilled in one piece: taking back the draw of a seeded request after a
        # partial prefill ends vLLM's engine core on CPU ("CPU Generator does not use offset").
        enable_chunked_prefill=not cpu,
        max_num_batched_tokens=max(8192, params.agent.max_context_tokens) if cpu else None,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=plugin.BACKEND),
        generation_config="vllm",  # the folder's own sampling defaults do not count
        disable_log_stats=True,
        use_tqdm_on_load=False,
        enforce_eager=cpu,
        # A class, since the name "uni" is turned into one more process on CPU.
        distributed_executor_backend=UniProcExecutor if alone else None,
        kv_cache_memory_bytes=int(e.memory_gib * 2**30) if cpu else None,
        gpu_memory_utilization=e.gpu_memory_share,
        enable_sleep_mode=not cpu,
    )


@contextmanager
def environment(params: Params, sockets: Path) -> Iterator[None]:
    """What vLLM reads from the environment, here and in the processes that it spawns; afterwards
    everything is as before (vLLM itself leaves LD_PRELOAD behind, which a JVM would inherit)."""
    before = dict(os.environ)
    os.environ |= {
        plugin.OWNER: str(os.getpid()),
        # Its warnings (a dozen) are about choices made here on purpose.
        "VLLM_LOGGING_LEVEL": before.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": before.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONWARNINGS": before.get("PYTHONWARNINGS", "ignore"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(params.engine.threads),
        # Threads that spin at a barrier take the core that their peer needs: 5 times slower on two.
        "OMP_WAIT_POLICY": before.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": before.get("GOMP_SPINCOUNT", "30000"),  # see stages/frame.py
    }
    if not torch.accelerator.is_available():
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # one helper of vLLM's would cost seconds
        openmp = next((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"), None)
        if openmp is not None and " " in str(openmp):  # vLLM preloads it; a blank ends that name
            (sockets / openmp.name).symlink_to(openmp)
            os.environ["LD_PRELOAD"] = str(sockets / openmp.name)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before
