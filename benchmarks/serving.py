"""The retrieval server under load: micro-batching, latency, memory, a full queue.

    python benchmarks/serving.py [--quick] [--data FOLDER] [--minutes 10]

One JSON object a line: name, value, low, high, bound, holds (null: nothing is promised). Ratios
are medians over alternating runs, with the lowest and the highest. FOLDER holds corpus.jsonl and
nq_test.jsonl; without it passages and questions are the demo's. `encoder` is the real one on the
CPU; `fixed` stands for one on a GPU: a pass takes 20 ms however many queries it holds. Servers have
processes of their own and one OpenMP thread; the load comes from threads of this one.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and FAISS bring a pool each

import numpy as np
import psutil
from numpy.typing import NDArray
from scipy.stats import theilslopes

from memsearcher import corpus, files, world, world_questions
from memsearcher.params import Encode, Index, Serve, World, read_yaml
from memsearcher.retrieval.client import HttpRetriever
from memsearcher.retrieval.contract import Manifest
from memsearcher.retrieval.dense import (
    METRIC,
    DenseIndex,
    DenseRetriever,
    build_shard,
    write_manifest,
)
from memsearcher.retrieval.passages import Passages
from memsearcher.retrieval.server import Opened, serve

CLIENTS = 64
PASSAGES = {True: 1_000, False: 5_000}  # quick or not
PASSAGE_TOKENS = 32  # enough for vectors that differ; the queries' side is what is measured
FIXED_S = 0.02
K = 3
WARM_UP_S = 1.0
SHED_PAUSE_S = 0.2  # less than Retry-After asks for
OFF = {"max_batch": 1, "window_ms": 0}
FLAT = Index(kind="flat", nlist=1, nprobe=1)
DEMO = read_yaml(files.ROOT / "conf" / "config.yaml")
WORLD, ENCODE, SERVE = World(**DEMO["world"]), Encode(**DEMO["encode"]), Serve(**DEMO["serve"])


class FixedEncoder:
    """Costs the same however many texts there are."""

    def __init__(self, dim: int) -> None:
        self._vectors = np.random.default_rng(0).normal(size=(997, dim)).astype(np.float32)

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        time.sleep(FIXED_S)
        return self._vectors[[sum(text.encode()) % 997 for text in texts]]


@dataclass(slots=True)
class Load:
    """What closed-loop clients saw: each asks again as soon as it has its answer."""

    seconds: float
    latencies: list[float]  # of the answered requests
    shed: int = 0  # 503 with Retry-After
    failed: int = 0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.latencies, share))


def load(url: str, questions: Sequence[str], clients: int, seconds: float) -> Load:
    """The first WARM_UP_S are not counted, but what fails in them is."""
    begin = time.monotonic() + WARM_UP_S
    end = begin + seconds
    seen = [Load(seconds, []) for _ in range(clients)]
    threads = [
        threading.Thread(target=_ask, args=(url, questions, number, begin, end, its))
        for number, its in enumerate(seen)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latencies = [latency for its in seen for latency in its.latencies]
    return Load(seconds, latencies, sum(its.shed for its in seen), sum(its.failed for its in seen))


def _ask(
    url: str, questions: Sequence[str], number: int, begin: float, end: float, seen: Load
) -> None:
    draw = random.Random(number)
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    while (start := time.monotonic()) < end:
        body = json.dumps({"query": draw.choice(questions), "top_n": K})
        try:
            connection.request("POST", "/search", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            seen.failed += 1
            continue
        done = time.monotonic()
        if answer.status == 200 and len(json.loads(found)) == K:
            if begin <= done <= end:
                seen.latencies.append(done - start)
        elif answer.status == 503 and answer.headers["Retry-After"]:
            seen.shed += 1
            time.sleep(SHED_PAUSE_S)
        else:
            seen.failed += 1
    connection.close()


def prepare(folder: Path, data: Path | None, quick: bool) -> list[str]:
    """Writes corpus and index of the first passages to `folder`; gives the questions."""
    from memsearcher.retrieval.encoder import Encoder

    raw, count = folder / "raw.jsonl", PASSAGES[quick]
    if data is None:
        made = world.build(WORLD.seed, max(count, WORLD.passages))
        rows = world_questions.write(made, WORLD.seed, 1, 40)
        questions = [row["question"] for part in rows.values() for row in part]
        lines: Iterator[dict] = iter(made.lines)
    else:
        questions = [row["question"] for row in files.read_jsonl(data / "nq_test.jsonl")]
        lines = files.read_jsonl(data / "corpus.jsonl")
    files.write_jsonl(raw, itertools.islice(lines, count))
    manifest = corpus.write(raw, folder / "corpus", "jsonl", raw.name, lambda block: None)
    encoder = Encoder(replace(ENCODE, max_passage_tokens=PASSAGE_TOKENS))
    texts = [f"{p.title}\n{p.text}" for p in corpus.read_passages(folder / "corpus")]
    vectors = encoder.passages(texts).astype(np.float16)
    (folder / "index").mkdir()
    build_shard(vectors, FLAT, folder / "index" / "shard-0.faiss", lambda n: None)
    own = Manifest(
        encoder=encoder.source.name,
        revision=encoder.source.revision,
        pooling=ENCODE.pooling,
        query_prefix=ENCODE.query_prefix,
        passage_prefix=ENCODE.passage_prefix,
        dim=encoder.dim,
        metric=METRIC,
        ntotal=len(vectors),
        corpus_sha256=manifest["sha256"],
        kind="flat",
        shards=["shard-0.faiss"],
    )
    write_manifest(folder / "index", own, ENCODE.max_query_tokens, 1)
    return questions


def open_index(folder: Path, kind: str) -> Opened:
    from memsearcher.retrieval.encoder import Encoder

    index, passages = DenseIndex(folder / "index"), Passages(folder / "corpus")
    encoder = Encoder(ENCODE) if kind == "encoder" else FixedEncoder(index.manifest.dim)
    retriever = DenseRetriever(encoder, index, passages)  # type: ignore[arg-type]
    return Opened(retriever, len(passages), "benchmark")


@contextmanager
def server(folder: Path, kind: str, **changes: object) -> Iterator[tuple[str, psutil.Process]]:
    """A server in its own process, ready; its address and the process."""
    words = [sys.executable, __file__, "--serve", kind, "--data", str(folder)]
    process = subprocess.Popen(
        [*words, "--settings", json.dumps(changes)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the server {kind} {changes} did not start")
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def row(
    name: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> bool:
    """Prints one object; whether it holds."""
    bound = at_least if at_most is None else at_most
    holds = bound is None or bool(value <= bound if at_least is None else value >= bound)
    numbers = [None if n is None else round(float(n), 4) for n in (value, low, high, bound)]
    fields = dict(zip(("value", "low", "high", "bound"), numbers, strict=True))
    print(
        json.dumps({"name": name, **fields, "holds": None if bound is None else holds}), flush=True
    )
    return holds


def batching(
    urls: dict[str, str], kind: str, questions: list[str], runs: int, each_s: float
) -> list[bool]:
    """Rows of one kind of encoder, micro-batching on against off, alternating."""
    on, off = [], []
    for _ in range(runs):
        off.append(load(urls["off"], questions, CLIENTS, each_s))
        on.append(load(urls["on"], questions, CLIENTS, each_s))
    ratios = [a.rate / b.rate for a, b in zip(on, off, strict=True)]
    least = {"encoder": 1.3, "fixed": 8.0}[kind]
    name = f"{kind}: micro-batching on / off, {CLIENTS} clients"
    holds = [row(name, np.median(ratios), min(ratios), max(ratios), at_least=least)]
    for label, values in (
        ("on, requests/s", [one.rate for one in on]),
        ("off, requests/s", [one.rate for one in off]),
        ("on, p50 ms", [1000 * one.percentile(50) for one in on]),
    ):
        row(f"{kind}: {label}", np.median(values), min(values), max(values))
    tails = [one.percentile(95) / one.percentile(50) for one in on]
    holds.append(row(f"{kind}: p95 / p50", np.median(tails), min(tails), max(tails), at_most=3.0))
    failed = sum(one.failed + one.shed for one in on + off)
    holds.append(row(f"{kind}: failed requests", failed, at_most=0))
    return holds


def steady(
    url: str, process: psutil.Process, kind: str, questions: list[str], seconds: float
) -> list[bool]:
    """Rows of a long load: failures and the growth of the server's memory."""
    memory: list[tuple[float, float]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            memory.append((time.monotonic() / 60, process.memory_info().rss / 2**20))

    load(url, questions, CLIENTS, min(60.0, seconds / 3))  # warm-up
    watcher = threading.Thread(target=watch)
    watcher.start()
    seen = load(url, questions, CLIENTS, seconds)
    done.set()
    watcher.join()
    minutes, sizes = zip(*memory, strict=True)
    slope, _, low, high = theilslopes(sizes, minutes)
    name = f"{kind}: {seconds / 60:g} min"
    row(f"{name}, requests", len(seen.latencies))
    row(f"{name}, memory MiB", sizes[-1], min(sizes), max(sizes))
    tail = seen.percentile(95) / seen.percentile(50)
    return [
        row(f"{name}, failed requests", seen.failed + seen.shed, at_most=0),
        row(f"{name}, memory MiB per minute", slope, low, high, at_most=1.0),
        row(f"{name}, p95 / p50", tail, at_most=3.0),
    ]


def overload(folder: Path, questions: list[str], seconds: float) -> list[bool]:
    """Rows of a queue that is too short for its clients, then of few enough clients."""
    limits = {"max_batch": 4, "max_waiting": 16, "max_queries": 4}
    with server(folder, "fixed", **limits) as (url, _):
        many = load(url, questions, 2 * CLIENTS, seconds)
        few = load(url, questions, 4, seconds)
    most = limits["max_batch"] / FIXED_S
    asked = len(many.latencies) + many.shed + many.failed
    answered = len(few.latencies) / (len(few.latencies) + few.shed + few.failed)
    return [
        row("full queue: share answered 503 with Retry-After", many.shed / asked, at_least=0.01),
        row("full queue: answered, of what passes allow", many.rate / most, at_least=0.5),
        row("full queue: other failures", many.failed, at_most=0),
        row("after it: share answered 200", answered, at_least=1.0),
    ]


def same_hits(url: str, folder: Path, questions: list[str]) -> bool:
    """Row: ids that the client and the retriever in this process agree on, ties aside."""
    here = open_index(folder, "encoder").retriever
    settings = replace(SERVE, url=url)
    there = HttpRetriever(settings, "benchmark")
    equal = 0
    asked = questions[:200]
    for a, b in zip(here.search(asked, K), there.search(asked, K), strict=True):
        near = all(abs(x.score - y.score) < 1e-4 for x, y in zip(a, b, strict=True))
        ids = [hit.passage_id for hit in a] == [hit.passage_id for hit in b]
        tied = any(x.score - y.score < 1e-5 for x, y in itertools.pairwise(a))
        equal += near and (ids or tied)
    return row(
        "client and process: share of queries with the same hits", equal / len(asked), at_least=1.0
    )


def measure(data: Path | None, quick: bool, minutes: float) -> bool:
    runs, each_s = (3, 3.0) if quick else (5, 6.0)
    holds: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = prepare(folder, data, quick)
        for kind in ("encoder", "fixed"):
            with ExitStack() as servers:
                on = servers.enter_context(server(folder, kind))
                off = servers.enter_context(server(folder, kind, **OFF))
                if kind == "encoder":
                    holds.append(same_hits(on[0], folder, questions))
                urls = {"on": on[0], "off": off[0]}
                holds += batching(urls, kind, questions, runs, each_s)
                if kind == "encoder":
                    holds += steady(*on, kind, questions, 30 if quick else 60 * minutes)
        holds += overload(folder, questions, 3 if quick else 20)
    return all(holds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two and a half minutes")
    parser.add_argument("--data", type=Path, help="a folder with corpus.jsonl and nq_test.jsonl")
    parser.add_argument("--minutes", type=float, default=10, help="of load, without --quick")
    parser.add_argument("--serve", choices=("encoder", "fixed"), help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, default={}, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve is None:
        sys.exit(0 if measure(a.data, a.quick, a.minutes) else 1)
    settings: Serve = replace(SERVE, port=0, **a.settings)
    serve(
        lambda: open_index(a.data, a.serve),
        settings,
        K,
        on_listening=lambda url: print(url, flush=True),
        on_ready=lambda opened: print("ready", flush=True),
    )


if __name__ == "__main__":
    main()
