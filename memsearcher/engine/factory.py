"""Which engine serves a policy."""

from pathlib import Path

from memsearcher.engine.contract import Engine
from memsearcher.params import Params


async def open_engine(params: Params, folder: Path) -> Engine:
    """`folder`: a Hugging Face folder with tokenizer. Close the engine when done."""
    if params.engine.kind == "vllm":
        from memsearcher.engine.vllm import VllmEngine

        return await VllmEngine.open(params, folder)
    from memsearcher.engine.inprocess import InProcessEngine

    return InProcessEngine(
        folder, dtype=params.engine.dtype, max_num_seqs=params.engine.max_num_seqs
    )
