"""The retriever behind a server: same contract, same hits as in the process itself.

Connection errors and 5xx are repeated for a while, nothing else is. Every answer names the index it
comes from; another one than expected is an error, also when the server was exchanged meanwhile.
"""

import threading
from collections.abc import Sequence

import httpx
from cachetools import LRUCache
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from memsearcher.files import BadInput
from memsearcher.params import Serve
from memsearcher.retrieval import wire
from memsearcher.retrieval.contract import RetrieverDown, clean
from memsearcher.types import Hit, Passage

KEPT = 20_000  # passages of earlier hits
CONNECT_S = 5.0
PASSING = (
    httpx.HTTPStatusError,  # raised for 5xx only
    httpx.NetworkError,
    httpx.ConnectTimeout,
    httpx.RemoteProtocolError,
)
_draw = wait_random_exponential(multiplier=0.1, max=5)


class HttpRetriever:
    """Waits until the server is ready, at most `serve.ready_s`. Several threads may call it.

    Raises RetrieverDown where no server answers, BadInput where it is another index than
    `manifest_hash` or refuses a request.
    """

    def __init__(self, settings: Serve, manifest_hash: str) -> None:
        if settings.url is None:
            raise ValueError("serve.url is null: there is no server to ask")
        self._url, self._hash = settings.url.rstrip("/"), manifest_hash
        self._retry_s = settings.retry_s
        self._http = httpx.Client(
            timeout=httpx.Timeout(settings.timeout_s, connect=CONNECT_S, pool=None),
            trust_env=False,  # a proxy of the environment is no way to a server beside us
        )
        self._kept: LRUCache[str, Passage] = LRUCache(KEPT)
        self._lock = threading.Lock()
        health = self._call("GET", "/health", None, settings.ready_s)
        self._passages, self._limits = health["ntotal"], health["limits"]

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        k = min(k, max(1, self._passages))
        if k > self._limits["k"]:
            raise BadInput(f"{self._url}: serve.max_k is {self._limits['k']}, asked for {k}")
        texts = [clean(query) for query in queries]
        asked = [row for row, text in enumerate(texts) if text]
        hits: list[list[Hit]] = [[] for _ in queries]
        size = self._limits["queries"]
        for rows in (asked[start : start + size] for start in range(0, len(asked), size)):
            body = {"queries": [texts[row] for row in rows], "topk": k, "return_scores": True}
            found = self._call("POST", "/retrieve", body, self._retry_s)["result"]
            for row, its in zip(rows, found, strict=True):
                hits[row] = [
                    Hit(self._keep(one["document"]).id, one["score"], rank)
                    for rank, one in enumerate(its, 1)
                ]
        return hits

    def passage(self, passage_id: str) -> Passage:
        with self._lock:
            passage = self._kept.get(passage_id)
        if passage is not None:
            return passage
        answer = self._call("POST", "/passages", {"ids": [passage_id]}, self._retry_s)
        (found,) = answer["documents"]
        if found is None:
            raise KeyError(f"{self._url}: no passage has the id {passage_id!r}")
        return self._keep(found)

    def close(self) -> None:
        self._http.close()

    def _keep(self, document: dict[str, str]) -> Passage:
        passage = wire.passage(document)
        with self._lock:
            self._kept[passage.id] = passage
        return passage

    def _call(self, method: str, path: str, body: object, patience_s: float) -> dict:
        calls = Retrying(
            retry=retry_if_exception(_may_pass),
            wait=_pause,
            stop=stop_after_delay(patience_s),
            reraise=True,
        )
        try:
            return calls(self._once, method, path, body)
        except httpx.HTTPStatusError as e:
            cause = f"answered {e.response.status_code}: {e.response.text[:200]}"
            raise RetrieverDown(f"{self._url}{path}: {cause}") from e
        except httpx.TransportError as e:
            raise RetrieverDown(f"{self._url}{path}: {type(e).__name__}: {e}") from e

    def _once(self, method: str, path: str, body: object) -> dict:
        response = self._http.request(method, self._url + path, json=body)
        if response.is_server_error:
            response.raise_for_status()
        if not response.is_success:
            cause = f"answered {response.status_code}: {response.text[:200]}"
            raise BadInput(f"{self._url}{path}: {cause}")
        served = response.headers.get(wire.MANIFEST)
        if served is None:
            raise BadInput(f"{self._url}{path}: no {wire.MANIFEST}: not a `memsearcher serve`")
        if served != self._hash:
            raise BadInput(f"{self._url}: serves the index {served}, the one here is {self._hash}")
        return response.json()


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, PASSING)


def _pause(state: RetryCallState) -> float:
    """Growing and drawn, so that clients do not come back together; never before Retry-After."""
    error = state.outcome and state.outcome.exception()
    asked = ""
    if isinstance(error, httpx.HTTPStatusError):
        asked = error.response.headers.get("Retry-After", "")
    return _draw(state) + (int(asked) if asked.isdecimal() else 0)
