"""BM25 over the same passages: Lucene as Pyserini sets it up (English analyzer, Porter stems)."""

import json
import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from memsearcher.files import BadInput, read_json
from memsearcher.params import Bm25
from memsearcher.retrieval.contract import clean
from memsearcher.retrieval.encoder import passage_text
from memsearcher.retrieval.java import open_indexer, open_searcher
from memsearcher.retrieval.passages import Passages
from memsearcher.types import Hit, Passage

BATCH = 1000  # passages that cross into Java at once


def build(passages: Iterable[Passage], folder: Path, threads: int) -> int:
    """Writes a Lucene index to `folder`, which must not exist; returns how many passages it holds.

    The JSON is pure ASCII: the bridge to Java garbles characters outside the BMP, Java's own JSON
    parser does not.
    """
    indexer = open_indexer(folder, threads)
    rows = iter(passages)
    try:
        while part := list(islice(rows, BATCH)):
            indexer.addRawDocuments(
                [json.dumps({"id": p.id, "contents": passage_text(p.title, p.text)}) for p in part]
            )
    finally:
        indexer.close()
    searcher = open_searcher(folder)
    try:
        return int(searcher.get_total_num_docs())
    finally:
        searcher.close()


class LexicalRetriever:
    """data/bm25, opened with the parameters' k1 and b. Equal scores are ordered by passage id."""

    def __init__(self, folder: Path, passages: Passages, bm25: Bm25) -> None:
        manifest = read_json(folder / "manifest.json")
        if manifest["corpus_sha256"] != passages.sha256:
            raise BadInput(
                f"{folder}: made from the corpus {manifest['corpus_sha256']}, "
                f"the passages here are {passages.sha256} (run `dvc repro bm25`)"
            )
        if not (folder / "lucene").is_dir():
            raise BadInput(f"{folder / 'lucene'}: no such folder")
        self.folder, self._passages = folder, passages
        self._searcher = open_searcher(folder / "lucene")
        self._searcher.set_bm25(bm25.k1, bm25.b)
        self._lock = threading.Lock()
        count = self._searcher.get_total_num_docs()
        if count != len(passages):
            raise BadInput(f"{folder}: holds {count} passages, the corpus has {len(passages)}")

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        depth = min(k, max(1, len(self._passages)))
        with self._lock:
            return [self._one(clean(query), depth) for query in queries]

    def _one(self, query: str, k: int) -> list[Hit]:
        found = self._searcher.search(query, k) if query else []
        return [Hit(doc.docid, float(doc.score), rank) for rank, doc in enumerate(found, 1)]

    def passage(self, passage_id: str) -> Passage:
        return self._passages.get(passage_id)
