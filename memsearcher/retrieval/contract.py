"""The retriever contract and what every index says about itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from memsearcher.params import IndexKind
from memsearcher.types import Hit, Passage


class Retriever(Protocol):
    """Top-k passages per query, best first; fewer where the index holds fewer than k."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """One list of hits per query. Raises RetrieverDown when retries are used up: an outage
        never becomes an observation that the policy learns from."""

    def passage(self, passage_id: str) -> Passage: ...


class RetrieverDown(RuntimeError):
    """The retriever did not answer; the message carries the cause."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """data/index/manifest.json. Whoever opens the index compares it and names both values."""

    encoder: str
    revision: str | None
    pooling: str
    query_prefix: str
    passage_prefix: str
    dim: int
    metric: str
    ntotal: int
    corpus_sha256: str
    kind: IndexKind
    shards: list[str]


_CONTROLS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def clean(query: str) -> str:
    """A query that every encoder and Lucene can take: control characters and lone surrogates (JSON
    lets both through) become blanks. Empty afterwards: nothing to search for, so no hits."""
    return _CONTROLS.sub(" ", query).strip()
