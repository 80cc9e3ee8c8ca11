"""Both ends of the weight transfer through shared memory: `send` here, vLLM's worker there.

Anonymous memory (memfd) that the worker opens through /proc: nothing stays behind when either side
is killed, and a container's small /dev/shm is no limit. One host only. The worker maps each chunk
and hands views to vLLM's layerwise reload; a chunk lives until its last layer is complete.
"""

import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CHUNK_BYTES = 256 * 2**20
CHECKED = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


async def send(llm: "AsyncLLM", pairs: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Replaces every parameter of the served model; what is missing in `pairs` keeps its value."""
    chunks = _chunks(pairs)
    first = next(chunks)  # what a short export has wrong comes to light before anything is touched
    await llm.start_weight_update()
    for chunk in chain([first], chunks):
        with os.fdopen(os.memfd_create("weights"), "wb") as memory:
            memory.write(save(chunk))
            memory.flush()
            path = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
            sums = {name: checksum(chunk[name]) for name in CHECKED if name in chunk}
            await llm.update_weights(WeightTransferUpdateRequest({"path": path, "checksums": sums}))
    await llm.finish_weight_update(str(version))


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the values, widened to float32 (numpy has no bfloat16)."""
    return zlib.crc32(tensor.detach().to("cpu", torch.float32).contiguous().numpy().data)


def _chunks(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in pairs:
        if chunk and size + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
        # A copy: it may be gone when the next one is asked for (ZeRO-3), or come again as the head.
        chunk[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if chunk:
        yield chunk


@dataclass
class NoInit(WeightTransferInitInfo):
    """Shared memory needs no rendezvous."""


@dataclass
class Chunk(WeightTransferUpdateInfo):
    path: str
    checksums: dict[str, int]


class LoadsWeights(Protocol):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]: ...


class SharedMemoryTransfer(WeightTransferEngine[NoInit, Chunk]):
    """Lives in each vLLM worker, and raises there when a checksum differs. vLLM carries the message
    back to `send`, as a bare Exception."""

    init_info_cls = NoInit
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._sent: dict[str, tuple[int, torch.dtype, int]] = {}  # rows, dtype, checksum
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """vLLM's own also waits for the accelerator, which raises where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Chunk) -> None:
        with safe_open(update_info.path, framework="pt") as f:
            chunk = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        for name, sum_ in update_info.checksums.items():
            _agree(name, "received", checksum(chunk[name]), sum_)
            self._sent[name] = len(chunk[name]), chunk[name].dtype, sum_
        cast(LoadsWeights, self.model).load_weights(chunk.items())

    def finish_weight_update(self) -> None:
        """Checks what the model now serves, where a tensor is still whole and as it was sent: one
        that was sharded, cast or packed into a kernel's own copy is left to the probe. An embedding
        may have padding rows at its end."""
        finalize_layerwise_reload(self.model, self.model_config)
        for name, parameter in self.model.named_parameters():
            if name in self._sent:
                rows, dtype, sum_ = self._sent[name]
                if parameter.dtype == dtype and len(parameter) >= rows:
                    _agree(name, "served", checksum(parameter[:rows]), sum_)

    def shutdown(self) -> None:
        pass


def _agree(name: str, where: str, got: int, sent: int) -> None:
    if got != sent:
        raise RuntimeError(f"checksum of {name} {where} is {got:08x}, sent {sent:08x}")
