"""The server's formats, limits, queue and end; the client beside the retriever in the process."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from conftest import PASSAGES, FixtureRetriever
from served import HTTP, SETTINGS, serving, until

from memsearcher.files import ROOT, BadInput
from memsearcher.retrieval import wire
from memsearcher.retrieval.batching import Batcher, Found
from memsearcher.retrieval.client import HttpRetriever
from memsearcher.retrieval.contract import RetrieverDown
from memsearcher.retrieval.server import Opened, serve
from memsearcher.types import Hit, Passage

QUERY = "Who is the mayor of Marel?"


class Gate(FixtureRetriever):
    """Searches once `open` is set; `entered` tells that a search has begun."""

    def __init__(self, passages: Sequence[Passage] = PASSAGES) -> None:
        super().__init__(passages)
        self.open, self.entered = threading.Event(), threading.Event()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.entered.set()
        assert self.open.wait(30)
        return super().search(queries, k)


def client(url: str, manifest_hash: str = "abc", **changes: object) -> HttpRetriever:
    return HttpRetriever(replace(SETTINGS, url=url, **changes), manifest_hash)


def waiting(url: str) -> int:
    """Queries in the queue, as /metrics says."""
    (line,) = [
        line
        for line in HTTP.get(f"{url}/metrics").text.splitlines()
        if line.startswith("search_waiting_queries ")
    ]
    return int(float(line.split()[1]))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FixtureRetriever(), 12) as url:
        yield url


def test_the_wire_formats(url: str) -> None:
    def post(path: str, **body: object) -> object:
        return HTTP.post(url + path, json=body).raise_for_status().json()

    hits = FixtureRetriever().search([QUERY], 2)[0]
    documents = [wire.document(PASSAGES[int(hit.passage_id)]) for hit in hits]
    assert documents[0] == {
        "id": "1",
        "contents": '"Marel"\nMarel is a town on the river Ansel. Its mayor is Ida Quent.',
    }
    scores = [hit.score for hit in hits]
    assert post("/search", query=QUERY, top_n=2) == documents
    assert post("/search", query=QUERY, top_n=2, return_score=True) == [documents, scores]
    assert post("/batch_search", query=[QUERY] * 2, top_n=2) == [documents] * 2
    both = post("/batch_search", query=[QUERY] * 2, top_n=2, return_score=True)
    assert both == [[documents] * 2, [scores] * 2]
    assert post("/retrieve", queries=[QUERY], topk=2) == {"result": [documents]}
    with_scores = post("/retrieve", queries=[QUERY], topk=2, return_scores=True)
    rows = [{"document": d, "score": s} for d, s in zip(documents, scores, strict=True)]
    assert with_scores == {"result": [rows]}
    assert len(post("/retrieve", queries=[QUERY])["result"][0]) == 3  # the served k
    found = post("/passages", ids=["2", "none"])["documents"]
    assert found == [wire.document(PASSAGES[2]), None]
    health = HTTP.get(f"{url}/health").json()
    assert (health["ready"], health["ntotal"], health["manifest_hash"]) == (True, 12, "abc")


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        *(
            ("/search", {"query": query}, ["query"])
            for query in ("", "   ", None, [], 3, "x" * 10_000, "\ud800", "\x00")
        ),
        *(
            ("/search", {"query": QUERY, "top_n": k}, ["top_n"])
            for k in (0, -1, 1_000_000, "3", 2.5, True, 10**400)
        ),
        ("/search", {}, ["query"]),
        ("/batch_search", {"query": []}, ["query"]),
        ("/batch_search", {"query": [QUERY, " "]}, ["query", 1]),
        ("/batch_search", {"query": [QUERY] * 300}, ["query"]),
        ("/batch_search", {"query": QUERY}, ["query"]),
        ("/retrieve", {"queries": ["x" * 10_000]}, ["queries", 0]),
        ("/retrieve", {"queries": [QUERY], "topk": 0}, ["topk"]),
        ("/passages", {"ids": []}, ["ids"]),
    ],
)
def test_bad_requests_are_422_and_name_the_field(  # C3
    url: str, path: str, body: dict, place: list
) -> None:
    content = json.dumps(body)
    answer = HTTP.post(url + path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert [error["loc"] for error in answer.json()["detail"]] == [["body", *place]]


def test_no_json_and_too_much_of_it(url: str) -> None:
    json_type = {"content-type": "application/json"}
    for content in (b"{", b"\xff", b"[" * 100_000):
        answer = HTTP.post(f"{url}/search", content=content, headers=json_type)
        assert answer.status_code in (400, 422)
    large = json.dumps({"query": "x" * SETTINGS.max_body_bytes}).encode()
    for content in (large, iter([large[:1000], large[1000:]])):  # with its length, and without
        answer = HTTP.post(f"{url}/search", content=content, headers=json_type)
        assert answer.status_code == 413
    assert HTTP.post(f"{url}/search", json={"query": QUERY}).status_code == 200


def test_the_client_gives_what_the_process_gives(url: str) -> None:
    here, there = FixtureRetriever(), client(url)
    queries = [QUERY, "river", "", "\ud800 Brost", "nothing of the kind", "\x00"]
    expected = here.search([QUERY, "river"], 4)
    assert there.search(queries, 4)[:2] == expected
    assert there.search(queries, 4)[2] == there.search(queries, 4)[5] == []
    assert there.search([], 4) == []
    assert there.search(["river"] * 600, 2) == here.search(["river"], 2) * 600  # three requests
    assert len(there.search([QUERY], 1_000)[0]) == len(here.search([QUERY], 12)[0])
    for hit in there.search([QUERY], 12)[0]:
        assert there.passage(hit.passage_id) == here.passage(hit.passage_id)
    assert client(url).passage("7") == PASSAGES[7]  # not among its hits
    with pytest.raises(KeyError, match="no passage has the id 'none'"):
        there.passage("none")
    with pytest.raises(ValueError, match="k must be at least 1"):
        there.search([QUERY], 0)


@pytest.mark.parametrize("title", ["a", 'a "b" c', 'a"\nb', "a\nb", "", '"', "a\u2028b"])
@pytest.mark.parametrize("text", ["", "one\ntwo", '"x"\ny', "\u2028"])
def test_title_and_text_survive_the_wire(title: str, text: str) -> None:
    passage = Passage("7", title, text)
    assert wire.passage(json.loads(json.dumps(wire.document(passage)))) == passage


def test_another_index_is_refused_with_both_hashes(url: str) -> None:
    with pytest.raises(BadInput, match="serves the index abc, the one here is def"):
        client(url, "def")


def test_requests_share_a_pass() -> None:
    gate = Gate()
    names = [p.title for p in PASSAGES[:10]]
    with serving(gate, 12, max_batch=8) as url, ThreadPoolExecutor(11) as pool:

        def ask(name: str, k: int) -> list[str]:
            body = {"query": name, "top_n": k}
            return [row["id"] for row in HTTP.post(f"{url}/search", json=body).json()]

        first = pool.submit(ask, QUERY, 3)
        assert gate.entered.wait(30)
        others = [pool.submit(ask, name, 1 + i % 3) for i, name in enumerate(names)]
        until(lambda: waiting(url) == 10)
        gate.open.set()
        found = [other.result() for other in others]
        assert len(first.result()) == 3
        passes = "search_pass_queries_count 3.0"
        assert passes in HTTP.get(f"{url}/metrics").text
    assert [len(batch) for batch in gate.batches] == [1, 8, 2]
    plain = FixtureRetriever()
    for i, (name, ids) in enumerate(zip(names, found, strict=True)):
        assert ids == [hit.passage_id for hit in plain.search([name], 1 + i % 3)[0]]


def test_only_what_a_deeper_search_answers_too_shares_its_pass() -> None:
    calls: list[tuple[list[str], int]] = []

    def look_up(queries: Sequence[str], k: int) -> list[Found]:
        calls.append((list(queries), k))
        return [[] for _ in queries]

    async def ask() -> None:
        batcher = Batcher(look_up, window_s=0, max_batch=9, max_waiting=9)
        never = asyncio.get_running_loop().create_future()
        asked = [
            asyncio.ensure_future(batcher.search([query], k, never))
            for query, k in (("a", 3), ("b", 101), ("c", 100), ("d", 101))
        ]
        await asyncio.sleep(0)
        with ThreadPoolExecutor(1) as thread:
            work = asyncio.ensure_future(batcher.run(thread))
            await asyncio.gather(*asked)
            work.cancel()

    asyncio.run(ask())
    assert calls == [(["a", "c"], 100), (["b", "d"], 101)]


def test_a_late_answer_is_an_outage_and_is_not_asked_for_again() -> None:
    gate = Gate()
    with serving(gate, 12) as url:
        there = client(url, timeout_s=0.5)
        with pytest.raises(RetrieverDown, match="/retrieve: ReadTimeout"):
            there.search(["Marel"], 1)
        gate.open.set()
        assert there.search(["Brost"], 1)[0]
    assert gate.batches == [["Marel"], ["Brost"]]


def test_a_full_queue_sheds_and_recovers() -> None:
    gate = Gate()
    with serving(gate, 12, max_waiting=2, max_queries=2) as url, ThreadPoolExecutor(4) as pool:

        def ask(queries: list[str]) -> httpx.Response:
            return HTTP.post(f"{url}/batch_search", json={"query": queries})

        going = pool.submit(ask, ["Marel"])
        assert gate.entered.wait(30)
        queued = pool.submit(ask, ["Brost", "Ansel"])
        until(lambda: waiting(url) == 2)
        shed = ask(["Orr"])
        assert shed.status_code == 503
        assert int(shed.headers["Retry-After"]) >= 1
        assert "2 queries wait" in shed.json()["detail"]
        patient = pool.submit(client(url).search, ["Orr"], 1)  # comes back after Retry-After
        assert HTTP.get(f"{url}/health").json()["ready"]
        gate.open.set()
        assert going.result().status_code == queued.result().status_code == 200
        assert patient.result()[0][0].passage_id in "67"
        assert ask(["Orr"]).status_code == 200


def test_a_client_that_goes_leaves_the_queue_and_nobody_else_notices() -> None:
    gate = Gate()
    with serving(gate, 12) as url, ThreadPoolExecutor(4) as pool:
        port = int(url.rpartition(":")[2])
        going = pool.submit(client(url).search, ["Marel"], 1)
        assert gate.entered.wait(30)
        body = b'{"query": "gone"}'
        head = b"POST /search HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(head + body[:5])
        with socket.create_connection(("127.0.0.1", port)) as whole:
            whole.sendall(head + body)
            until(lambda: waiting(url) == 1)
        until(lambda: waiting(url) == 0)
        other = pool.submit(client(url).search, ["Brost"], 1)
        until(lambda: waiting(url) == 1)
        gate.open.set()
        assert going.result()[0]
        assert other.result()[0]
        assert 'status="499"' in HTTP.get(f"{url}/metrics").text
    assert gate.batches == [["Marel"], ["Brost"]]


def test_a_search_that_breaks_is_a_500_with_its_cause() -> None:
    class Broken(FixtureRetriever):
        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            if queries[0] == "bad":
                raise IndexError("no passage 99")
            return super().search(queries, k)

    with serving(Broken(), 12) as url:
        there = client(url, retry_s=0.3)
        with pytest.raises(RetrieverDown, match=r"500.*IndexError: no passage 99"):
            there.search(["bad"], 1)
        assert there.search(["Marel"], 1)[0]


def test_what_cannot_be_served_ends_the_server_with_its_reason() -> None:
    def refuse() -> Opened:
        raise BadInput("dimension is 8 in the index and 16 here")

    said: list[object] = []
    with pytest.raises(BadInput, match="8 in the index and 16 here"):
        serve(refuse, SETTINGS, 3, on_listening=said.append, on_ready=said.append)
    assert len(said) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"127.0.0.1:{port}: Address already in use"):
            serve(refuse, replace(SETTINGS, port=port), 3, on_listening=said.append, on_ready=print)
    assert len(said) == 1


SLOW_SERVER = """
import time, yaml
from memsearcher.params import Serve
from memsearcher.retrieval.server import Opened, serve
from memsearcher.types import Hit, Passage

class Slow:
    def search(self, queries, k):
        print("searching", flush=True)
        time.sleep(0.5)
        return [[Hit("1", 1.0, 1)] for _ in queries]

    def passage(self, passage_id):
        return Passage("1", "Marel", "A town.")

with open("conf/config.yaml") as f:
    settings = Serve(**yaml.safe_load(f)["serve"] | {"port": 0, "max_batch": 2})
say = lambda what: print(what, flush=True)
serve(lambda: Opened(Slow(), 12, "abc"), settings, 3, on_listening=say, on_ready=say)
"""


def test_sigterm_answers_what_is_there_and_ends() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        there = client(url)
        with ThreadPoolExecutor(6) as pool:
            searches = [pool.submit(there.search, [name], 1) for name in ("Marel", "Brost", "Orr")]
            searches += [pool.submit(there.search, ["Ansel"], 1) for _ in range(3)]
            while process.stdout.readline().strip() != "searching":
                pass
            until(lambda: waiting(url) >= 4)
            process.send_signal(signal.SIGTERM)
            assert all(search.result()[0] for search in searches)
        assert process.wait(20) == -signal.SIGTERM
        with pytest.raises(RetrieverDown, match="ConnectError"):
            client(url, ready_s=0)
    finally:
        process.kill()
        process.wait()


class Scripted(BaseHTTPRequestHandler):
    """Statuses in their order, the last one for ever."""

    statuses: Sequence[int] = (200,)
    asked = 0

    def do_GET(self) -> None:
        kind = type(self)
        status = kind.statuses[min(kind.asked, len(kind.statuses) - 1)]
        kind.asked += 1
        if status == 0:
            self.connection.close()
            return
        body = json.dumps({"ntotal": 12, "limits": {"k": 9, "queries": 9}}).encode()
        self.send_response(status)
        self.send_header(wire.MANIFEST, "abc")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("statuses", "asked", "raised"),
    [
        ((503, 0, 500, 200), 4, None),
        ((404, 200), 1, BadInput),
        ((422, 200), 1, BadInput),
        ((500,), 2, RetrieverDown),
    ],
)
def test_only_what_may_pass_is_repeated(
    statuses: tuple[int, ...], asked: int, raised: type[Exception] | None
) -> None:
    kind = type("Script", (Scripted,), {"statuses": statuses, "asked": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            if raised is None:
                client(url)
            else:
                with pytest.raises(raised, match=f"answered {statuses[0]}"):
                    client(url, ready_s=20 if raised is BadInput else 0.3)
            assert kind.asked >= asked if raised is RetrieverDown else kind.asked == asked
        finally:
            server.shutdown()
            thread.join()
