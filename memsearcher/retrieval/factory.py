"""Opens what search.mode asks for: data/corpus always, data/index and data/bm25 as needed."""

from pathlib import Path
from typing import Literal

from memsearcher.params import Params
from memsearcher.retrieval.contract import Retriever
from memsearcher.retrieval.fusion import FusionRetriever
from memsearcher.retrieval.passages import Passages

Mode = Literal["dense", "bm25", "fusion"]
DATA = Path("data")


def open_retriever(params: Params, data: Path = DATA) -> Retriever:
    """The agent's retriever. Raises BadInput where index, encoder and passages do not belong
    together (both values in the message)."""
    return open_modes(params, (params.search.mode,), data)[params.search.mode]


def open_modes(params: Params, modes: tuple[Mode, ...], data: Path = DATA) -> dict[Mode, Retriever]:
    """Several modes over one copy of the passages, the encoder and each index."""
    passages = Passages(data / "corpus")
    opened: dict[Mode, Retriever] = {}
    if {"dense", "fusion"} & set(modes):
        from memsearcher.retrieval.dense import DenseIndex, DenseRetriever, check
        from memsearcher.retrieval.encoder import Encoder

        index = DenseIndex(data / "index")
        encoder = Encoder(params.encode)
        check(index.manifest, encoder, passages)
        opened["dense"] = DenseRetriever(encoder, index, passages)
    if {"bm25", "fusion"} & set(modes):
        from memsearcher.retrieval.lexical import LexicalRetriever

        opened["bm25"] = LexicalRetriever(data / "bm25", passages, params.bm25)
    if "fusion" in modes:
        opened["fusion"] = FusionRetriever(list(opened.values()), params.search.rrf_k)
    return {mode: opened[mode] for mode in modes}
