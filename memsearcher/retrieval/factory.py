"""Opens what search.mode asks for: data/corpus always, data/index and data/bm25 as needed; or asks
the server at serve.url, which has opened the same."""

from pathlib import Path
from typing import Literal

from memsearcher import files
from memsearcher.params import Params
from memsearcher.retrieval.contract import Retriever
from memsearcher.retrieval.fusion import FusionRetriever
from memsearcher.retrieval.passages import Passages

Mode = Literal["dense", "bm25", "fusion"]
DATA = Path("data")


def open_retriever(params: Params, data: Path = DATA) -> Retriever:
    """The agent's retriever. Raises BadInput where index, encoder and passages do not belong
    together (both values in the message)."""
    if params.serve.url is not None:
        from memsearcher.retrieval.client import HttpRetriever

        return HttpRetriever(params.serve, manifest_hash(params, data))
    return open_modes(params, (params.search.mode,), data)[params.search.mode]


def manifest_hash(params: Params, data: Path = DATA) -> str:
    """Of all that decides the hits: a client compares its own with the server's."""
    mode = params.search.mode
    parts: dict[str, object] = {"mode": mode, "corpus": count_and_sha256(data)}
    if mode in ("dense", "fusion"):
        parts["index"] = files.content_hash(data / "index")
        parts["max_query_tokens"] = params.encode.max_query_tokens
    if mode in ("bm25", "fusion"):
        parts["bm25"] = [files.content_hash(data / "bm25"), params.bm25.k1, params.bm25.b]
    if mode == "fusion":
        parts["rrf_k"] = params.search.rrf_k
    return files.digest(parts)


def count_and_sha256(data: Path) -> tuple[int, str]:
    """Of the passages, as their manifest says."""
    manifest = files.read_json(data / "corpus" / "manifest.json")
    return manifest["count"], manifest["sha256"]


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
