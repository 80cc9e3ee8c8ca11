"""Reciprocal-rank fusion: a passage's score is the sum over rankings of 1 / (rrf_k + its rank)."""

from collections.abc import Sequence

from memsearcher.retrieval.contract import Retriever
from memsearcher.types import Hit, Passage

DEPTH = 100  # how far down each ranking counts


def fuse(rankings: Sequence[Sequence[Hit]], k: int, rrf_k: int) -> list[Hit]:
    """Equal sums go to the passage with the better best rank, then to the smaller id.

    >>> first = [Hit("a", 9.0, 1), Hit("b", 8.0, 2)]
    >>> [hit.passage_id for hit in fuse([first, [Hit("b", 0.7, 1)]], k=2, rrf_k=60)]
    ['b', 'a']
    """
    scores: dict[str, float] = {}
    best: dict[str, int] = {}
    for ranking in rankings:
        for hit in ranking:
            scores[hit.passage_id] = scores.get(hit.passage_id, 0.0) + 1 / (rrf_k + hit.rank)
            best[hit.passage_id] = min(hit.rank, best.get(hit.passage_id, hit.rank))
    order = sorted(scores, key=lambda p: (-scores[p], best[p], p))[:k]
    return [Hit(p, scores[p], rank) for rank, p in enumerate(order, 1)]


class FusionRetriever:
    """Several retrievers over the same passages, asked one after the other and fused."""

    def __init__(self, parts: Sequence[Retriever], rrf_k: int) -> None:
        self._parts = tuple(parts)
        self._rrf_k = rrf_k

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        found = [part.search(queries, max(k, DEPTH)) for part in self._parts]
        return [fuse([hits[row] for hits in found], k, self._rrf_k) for row in range(len(queries))]

    def passage(self, passage_id: str) -> Passage:
        return self._parts[0].passage(passage_id)
