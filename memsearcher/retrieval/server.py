"""One copy of the index for all processes of a host (or several): HTTP around a retriever.

    memsearcher serve

The formats are in wire.py. GET /health says whether the index is loaded (503: not yet), how many
passages it holds, its hash and the limits; GET /metrics is for Prometheus. 422 names the field
that is wrong, 503 says when to come back. There is no authentication, so it listens on loopback.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_fastapi_instrumentator import Instrumentator, metrics
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from memsearcher.files import BadInput
from memsearcher.params import Serve
from memsearcher.retrieval import wire
from memsearcher.retrieval.batching import Batcher, Found, QueueFull, SearchFailed
from memsearcher.retrieval.contract import Retriever
from memsearcher.types import Passage

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # buckets: queries of a pass
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
LOADING_S, FULL_S = 5, 1  # Retry-After
GONE = 499  # nobody reads it; for the metrics
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Opened:
    """What is served, and the hash by which clients know it."""

    retriever: Retriever
    passages: int
    manifest_hash: str


class Service:
    """The application. `open_index` runs once, in the thread that then searches; whatever it or the
    machinery raises afterwards is kept in `failure`, and `stop` is called."""

    def __init__(self, open_index: Callable[[], Opened], settings: Serve, k: int) -> None:
        self.stop: Callable[[], object] = lambda: None
        self.on_ready: Callable[[Opened], object] = lambda opened: None
        self.failure: BaseException | None = None
        self._open, self._settings, self._k = open_index, settings, k
        self._opened: Opened | None = None
        registry = CollectorRegistry()
        self._pass_sizes = Histogram(
            "search_pass_queries", "Queries of one encoder pass", buckets=SIZES, registry=registry
        )
        Gauge("search_waiting_queries", "Queries in the queue", registry=registry).set_function(
            lambda: 0 if self._batcher is None else self._batcher.waiting
        )
        self._batcher: Batcher | None = None
        self.app = FastAPI(lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_exception_handler(RequestValidationError, _unprocessable)
        self.app.add_middleware(RequestBodyLimitMiddleware, max_body_size=settings.max_body_bytes)
        instrumentator = Instrumentator(should_group_status_codes=False, registry=registry)
        instrumentator.add(metrics.requests(registry=registry))
        instrumentator.add(metrics.latency(registry=registry, buckets=SECONDS))
        instrumentator.instrument(self.app).expose(self.app)
        self.app.get("/health")(self.health)
        self.app.post("/search")(self.search)
        self.app.post("/batch_search")(self.batch_search)
        self.app.post("/retrieve")(self.retrieve)
        self.app.post("/passages")(self.passages)

    async def health(self) -> Response:
        opened, s = self._opened, self._settings
        if opened is None:
            return _json({"ready": False}, 503, {"Retry-After": str(LOADING_S)})
        limits = {"k": s.max_k, "queries": s.max_queries, "query_chars": s.max_query_chars}
        known = {"ntotal": opened.passages, "manifest_hash": opened.manifest_hash}
        return self._answer({"ready": True, **known, "limits": limits})

    async def search(self, body: wire.Search, request: Request) -> Response:
        self._check("query", [body.query], listed=False)
        (found,) = await self._find(request, [body.query], "top_n", body.top_n)
        documents = wire.documents(found)
        return self._answer([documents, wire.scores(found)] if body.return_score else documents)

    async def batch_search(self, body: wire.BatchSearch, request: Request) -> Response:
        self._check("query", body.query)
        rows = await self._find(request, body.query, "top_n", body.top_n)
        documents = [wire.documents(found) for found in rows]
        scores = [wire.scores(found) for found in rows]
        return self._answer([documents, scores] if body.return_score else documents)

    async def retrieve(self, body: wire.Retrieve, request: Request) -> Response:
        self._check("queries", body.queries)
        rows = await self._find(request, body.queries, "topk", body.topk)
        return self._answer(wire.result(rows, with_scores=body.return_scores))

    async def passages(self, body: wire.Ids) -> Response:
        self._check_count("ids", len(body.ids))
        found = await asyncio.to_thread(_look_up, self._ready().retriever, body.ids)
        return self._answer({"documents": [p and wire.document(p) for p in found]})

    async def _find(
        self, request: Request, queries: Sequence[str], field: str, k: int | None
    ) -> list[Found]:
        self._ready()
        if k is not None and k > self._settings.max_k:
            raise _wrong((field,), f"at most {self._settings.max_k}, got {k}")
        assert self._batcher is not None
        gone = asyncio.ensure_future(request.receive())  # the body is here: only its end can come
        try:
            return await self._batcher.search(queries, self._k if k is None else k, gone)
        except QueueFull as e:
            raise HTTPException(503, str(e), {"Retry-After": str(FULL_S)}) from e
        except SearchFailed as e:
            raise HTTPException(500, str(e)) from e
        except asyncio.CancelledError as e:
            if not gone.done():
                raise
            raise HTTPException(GONE) from e
        finally:
            gone.cancel()

    def _check(self, field: str, queries: Sequence[str], *, listed: bool = True) -> None:
        self._check_count(field, len(queries))
        limit = self._settings.max_query_chars
        for row, query in enumerate(queries):
            if len(query) > limit:
                place = (field, row) if listed else (field,)
                raise _wrong(place, f"at most {limit} characters, got {len(query)}")

    def _check_count(self, field: str, count: int) -> None:
        if count > self._settings.max_queries:
            raise _wrong((field,), f"at most {self._settings.max_queries} of them, got {count}")

    def _ready(self) -> Opened:
        if self._opened is None:
            raise HTTPException(503, "still loading", {"Retry-After": str(LOADING_S)})
        return self._opened

    def _answer(self, value: object) -> Response:
        return _json(value, 200, {wire.MANIFEST: self._ready().manifest_hash})

    @asynccontextmanager
    async def _life(self, _app: FastAPI) -> AsyncIterator[None]:
        thread = ThreadPoolExecutor(1, "search")
        work = asyncio.ensure_future(self._work(thread))
        work.add_done_callback(self._ended)
        yield
        work.cancel()
        await asyncio.wait({work})
        thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self, thread: ThreadPoolExecutor) -> None:
        opened = await asyncio.get_running_loop().run_in_executor(thread, self._open)
        s = self._settings
        self._batcher = Batcher(
            lambda queries, k: _search(opened.retriever, queries, k),
            window_s=s.window_ms / 1000,
            max_batch=s.max_batch,
            max_waiting=s.max_waiting,
            on_pass=self._pass_sizes.observe,
        )
        self._opened = opened
        self.on_ready(opened)
        await self._batcher.run(thread)

    def _ended(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled():
            self.failure = work.exception()
            self.stop()


def serve(
    open_index: Callable[[], Opened],
    settings: Serve,
    k: int,
    *,
    on_listening: Callable[[str], object],
    on_ready: Callable[[Opened], object],
) -> None:
    """Until SIGTERM or Ctrl-C; requests that are here by then are answered. `k`: the default.

    Raises BadInput where the port is taken, before anything is loaded; and what `open_index` does.
    """
    listener = _listen(settings.host, settings.port)
    service = Service(open_index, settings, k)
    server = uvicorn.Server(
        uvicorn.Config(
            service.app,
            log_level="info" if settings.log_requests else "warning",
            access_log=settings.log_requests,
            backlog=BACKLOG,
            timeout_keep_alive=75,  # longer than clients keep idle connections
            timeout_graceful_shutdown=settings.drain_s,
            ws="none",
            server_header=False,
        )
    )
    service.on_ready = on_ready
    service.stop = lambda: setattr(server, "should_exit", True)
    on_listening(f"http://{settings.host}:{listener.getsockname()[1]}")
    server.run(sockets=[listener])
    if service.failure is not None:
        raise service.failure


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as e:
        cause = str(e.strerror).partition(" (")[0]  # Python repeats the address
        raise BadInput(f"serve: cannot listen on {host}:{port}: {cause}") from e


def _search(retriever: Retriever, queries: Sequence[str], k: int) -> list[Found]:
    rows = retriever.search(queries, k)
    return [[(hit, retriever.passage(hit.passage_id)) for hit in row] for row in rows]


def _look_up(retriever: Retriever, ids: Sequence[str]) -> list[Passage | None]:
    found: list[Passage | None] = []
    for passage_id in ids:
        try:
            found.append(retriever.passage(passage_id))
        except KeyError:
            found.append(None)
    return found


def _wrong(place: tuple[str | int, ...], message: str) -> RequestValidationError:
    return RequestValidationError([{"loc": ("body", *place), "msg": message, "type": "limit"}])


async def _unprocessable(_request: Request, error: Exception) -> Response:
    """Without the input, which may hold what no answer can (a lone surrogate), or a megabyte."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: e[key] for key in ("loc", "msg", "type")} for e in error.errors()]
    return _json({"detail": detail}, 422)


def _json(value: object, status: int, headers: dict[str, str] | None = None) -> Response:
    """ASCII, so that any text that JSON let in can go out again."""
    return Response(json.dumps(value), status, headers, "application/json")
