"""A retriever behind a real server, in a thread of the test's own process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import uvicorn

from memsearcher.files import ROOT
from memsearcher.params import Serve, read_yaml
from memsearcher.retrieval.contract import Retriever
from memsearcher.retrieval.server import Opened, Service

SETTINGS = replace(
    Serve(**read_yaml(ROOT / "conf" / "config.yaml")["serve"]),
    port=0,
    window_ms=0,
    ready_s=20,
    retry_s=5,
    drain_s=20,
)
HTTP = httpx.Client(trust_env=False, timeout=30)


@contextmanager
def serving(
    retriever: Retriever, count: int, manifest_hash: str = "abc", **changes: object
) -> Iterator[str]:
    """Its address, once it is ready. `changes`: to SETTINGS."""
    opened = Opened(retriever, count, manifest_hash)
    service = Service(lambda: opened, replace(SETTINGS, **changes), 3)
    server = uvicorn.Server(uvicorn.Config(service.app, port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        until(lambda: HTTP.get(f"{url}/health").status_code == 200)
        yield url
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "not within 60 s"
        time.sleep(0.01)
