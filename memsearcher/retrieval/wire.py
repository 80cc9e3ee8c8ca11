"""The wire formats of the field: requests as they are checked, answers as they are sent.

    POST /search        {"query", "top_n", "return_score"}    [document, …]
                                                              or [[document, …], [score, …]]
    POST /batch_search  the same, "query" being a list        a list of lists in each place
    POST /retrieve      {"queries", "topk", "return_scores"}  {"result": [[document, …], …]}
                                                              or {"document", "score"} for each
    POST /passages      {"ids"}                               {"documents": [document or null, …]}

The first two are those of MemSearcher and ReCall, the third is Search-R1's, the last is our own. A
document is {"id", "contents"}.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from memsearcher.corpus_files import parse_contents
from memsearcher.retrieval.batching import Found
from memsearcher.retrieval.contract import clean
from memsearcher.types import Passage

MANIFEST = "X-Manifest-Hash"  # of every answer: which index gave it
Json = dict[str, object]


def _searchable(query: str) -> str:
    if not clean(query):
        raise ValueError("holds nothing to search for")
    return query


Query = Annotated[str, AfterValidator(_searchable)]
Depth = Annotated[int, Field(strict=True, ge=1)]


class Search(BaseModel):
    query: Query
    top_n: Depth | None = None
    return_score: bool = False


class BatchSearch(BaseModel):
    query: Annotated[list[Query], Field(min_length=1)]
    top_n: Depth | None = None
    return_score: bool = False


class Retrieve(BaseModel):
    queries: Annotated[list[Query], Field(min_length=1)]
    topk: Depth | None = None
    return_scores: bool = False


class Ids(BaseModel):
    ids: Annotated[list[str], Field(min_length=1)]


def contents(title: str, text: str) -> str:
    """What `parse_contents` takes apart again, whatever the title holds.

    >>> contents('Tim "Ripper" Owens', "Timothy is")
    '"Tim ""Ripper"" Owens"\\nTimothy is'
    """
    doubled = title.replace('"', '""')
    return f'"{doubled}"\n{text}'


def document(passage: Passage) -> Json:
    return {"id": passage.id, "contents": contents(passage.title, passage.text)}


def passage(found: dict[str, str]) -> Passage:
    return Passage(found["id"], *parse_contents(found["contents"]))


def documents(found: Found) -> list[Json]:
    return [document(passage) for _, passage in found]


def scores(found: Found) -> list[float]:
    return [hit.score for hit, _ in found]


def result(rows: Sequence[Found], *, with_scores: bool) -> Json:
    """The answer of POST /retrieve."""
    if not with_scores:
        return {"result": [documents(found) for found in rows]}
    return {
        "result": [
            [{"document": document(passage), "score": hit.score} for hit, passage in found]
            for found in rows
        ]
    }
