"""What the retriever must show, measured on real passages: one JSON object a line.

    python benchmarks/retrieval.py --data FOLDER [--embeddings FOLDER] [--only NAME ...] [--quick]

`holds` says whether `value` keeps its `bound`; null: reported, nothing promised. FOLDER holds
corpus.jsonl, <set>_test.jsonl and qrels_<set>_test.jsonl; --embeddings a data/embeddings of those
passages made with laptop's parameters (without it a part of the passages is encoded on the spot).
Threads are fixed before anything is imported: two OpenMP pools on two cores measure nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

THREADS = os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from memsearcher import corpus, files  # noqa: E402
from memsearcher.params import Bm25, Encode, Index, read_yaml  # noqa: E402
from memsearcher.retrieval import measures  # noqa: E402
from memsearcher.retrieval.contract import Manifest, Retriever  # noqa: E402
from memsearcher.retrieval.dense import (  # noqa: E402
    BLAS_FROM,
    METRIC,
    DenseIndex,
    DenseRetriever,
    build_shard,
    lists_of,
    write_manifest,
)
from memsearcher.retrieval.passages import Passages  # noqa: E402
from memsearcher.statistics import score_interval  # noqa: E402
from memsearcher.types import Hit  # noqa: E402

# recall@3, @5, @20 of Pyserini 1.6.0's BM25 (k1 0.9, b 0.4) on these files
BM25_RECALL = {
    "nq": (0.877, 0.945, 0.959),
    "hotpotqa": (0.620, 0.706, 0.877),
    "2wikimultihopqa": (0.569, 0.628, 0.708),
    "musique": (0.348, 0.424, 0.595),
}
KS = (3, 5, 20)
CONFIG = read_yaml(files.ROOT / "conf" / "config.yaml")
ENCODE = replace(Encode(**CONFIG["encode"]), max_passage_tokens=128)
AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()  # without it bfloat16 is slower than float32
FLAT = Index(kind="flat", nlist=1, nprobe=1)
IVF = Index(kind="ivf_sq8", nlist=4096, nprobe=256)
JITTER = 0.03
FAISS_BLAS_FROM = 128_000  # its default


@dataclass
class Bench:
    data: Path
    embeddings: Path | None
    work: Path
    quick: bool

    def passages(self) -> Passages:
        folder = self.work / "corpus"
        if not folder.is_dir():
            raw = self.data / "corpus.jsonl"
            corpus.write(raw, folder, "jsonl", raw.name, lambda n: None)
        return Passages(folder)


def say(
    name: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    bound: str | None = None,
    holds: bool | None = None,
    **more: object,
) -> None:
    row = {"name": name, "value": value, "low": low, "high": high, "bound": bound, "holds": holds}
    shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in (row | more).items()}
    print(json.dumps(shown, ensure_ascii=False), flush=True)


def judged(bench: Bench, dataset: str) -> tuple[list[str], list[measures.Groups]]:
    """(questions, their gold groups)"""
    rows = files.read_jsonl(bench.data / f"{dataset}_test.jsonl")
    text = {row["id"]: row["question"] for row in rows}
    qrels = list(files.read_jsonl(bench.data / f"qrels_{dataset}_test.jsonl"))
    groups = [[frozenset(group) for group in row["groups"]] for row in qrels]
    return [text[row["question_id"]] for row in qrels], groups


def every_question(bench: Bench) -> list[str]:
    return [text for dataset in BM25_RECALL for text in judged(bench, dataset)[0]]


def bm25_retriever(bench: Bench, passages: Passages) -> Retriever:
    from memsearcher.retrieval.lexical import LexicalRetriever, build

    folder = bench.work / "bm25"
    if not folder.is_dir():
        count = build(corpus.read_passages(bench.work / "corpus"), folder / "lucene", int(THREADS))
        manifest = {"count": count, "corpus_sha256": passages.sha256}
        files.write_json(folder / "manifest.json", manifest)
    return LexicalRetriever(folder, passages, Bm25(k1=0.9, b=0.4))


def say_recall(
    mode: str, dataset: str, found: Sequence[Sequence[Hit]], groups: list[measures.Groups]
) -> None:
    for place, k in enumerate(KS):
        scores = [measures.recall(h, g, k) for h, g in zip(found, groups, strict=True)]
        i = score_interval([scores])
        name = f"{mode} {dataset} recall@{k}"
        if mode == "bm25":
            wanted = BM25_RECALL[dataset][place]
            holds = abs(i.mean - wanted) <= 0.01
            say(name, i.mean, i.low, i.high, f"{wanted} ± 0.01", holds, n=i.n)
        else:
            say(name, i.mean, i.low, i.high, n=i.n)


def bm25(bench: Bench) -> None:
    retriever = bm25_retriever(bench, bench.passages())
    for dataset in BM25_RECALL:
        asked, groups = judged(bench, dataset)
        say_recall("bm25", dataset, retriever.search(asked, max(KS)), groups)


def vectors(bench: Bench) -> NDArray[np.float16]:
    """(n, dim): all passages' where --embeddings is given, else those of the first few."""
    if bench.embeddings is None:
        from memsearcher.retrieval.encoder import Encoder

        count = 1000 if bench.quick else 4000
        kept = bench.work / f"sample-{count}.npy"
        if not kept.is_file():
            np.save(kept, Encoder(ENCODE).passages(texts(bench, count)).astype(np.float16))
        return np.load(kept)
    shards, sha256 = [], bench.passages().sha256
    for folder in sorted(bench.embeddings.glob("shard-*")):
        manifest = files.read_json(folder / "manifest.json")
        if manifest["corpus_sha256"] != sha256:
            raise files.BadInput(
                f"{folder}: of the corpus {manifest['corpus_sha256']}, not {sha256}"
            )
        shards.append(np.fromfile(folder / "vectors.f16", np.float16).reshape(-1, manifest["dim"]))
    return np.concatenate(shards)


def texts(bench: Bench, count: int) -> list[str]:
    """Titles and texts of passages drawn from all kinds there are."""
    from memsearcher.retrieval.encoder import passage_text

    passages = bench.passages()
    rows = np.random.default_rng(0).choice(len(passages), count, replace=False)
    return [passage_text(p.title, p.text) for p in map(passages.at, map(int, rows))]


def build_index(bench: Bench, made: NDArray[np.float16], index: Index) -> DenseIndex:
    from memsearcher.retrieval.encoder import locate

    folder = bench.work / f"{index.kind}-{len(made)}"
    files.remove(folder)
    folder.mkdir()
    build_shard(made, index, folder / "shard-0.faiss", lambda n: None)
    source = locate(ENCODE.model, ENCODE.revision)
    manifest = Manifest(
        encoder=source.name,
        revision=source.revision,
        pooling=ENCODE.pooling,
        query_prefix=ENCODE.query_prefix,
        passage_prefix=ENCODE.passage_prefix,
        dim=made.shape[1],
        metric=METRIC,
        ntotal=len(made),
        corpus_sha256=bench.passages().sha256,
        kind=index.kind,
        shards=["shard-0.faiss"],
    )
    write_manifest(folder, manifest, ENCODE.max_query_tokens, index.nprobe)
    return DenseIndex(folder)


def dense(bench: Bench) -> None:
    """Dense and fused recall beside BM25's, and the ids of an exact search."""
    from memsearcher.retrieval.encoder import Encoder
    from memsearcher.retrieval.fusion import DEPTH, fuse

    made, encoder = vectors(bench), Encoder(ENCODE)
    index, passages = build_index(bench, made, FLAT), bench.passages()
    queries = encoder.queries(every_question(bench)[:1000])
    exact, same = queries @ made.astype(np.float32).T, 0
    for scores, hits in zip(exact, index.search(queries, 10), strict=True):
        best = np.sort(scores)[::-1][:10]
        same += np.allclose(scores[[row for row, _ in hits]], best, rtol=0, atol=1e-6)
    share = same / len(queries)
    say("flat ids are exact numpy's (ties aside)", share, bound="= 1", holds=share == 1, n=same)
    if len(made) != len(passages):
        return  # recall over a part of the passages compares with nothing
    ours, lexical = DenseRetriever(encoder, index, passages), bm25_retriever(bench, passages)
    for dataset in BM25_RECALL:
        asked, groups = judged(bench, dataset)
        by_vector, by_word = ours.search(asked, DEPTH), lexical.search(asked, DEPTH)
        say_recall("dense", dataset, by_vector, groups)
        fused = [fuse(pair, max(KS), 60) for pair in zip(by_vector, by_word, strict=True)]
        say_recall("fusion", dataset, fused, groups)


def ivf(bench: Bench) -> None:
    """The real vectors jittered into many, by more than SQ8's step (about 0.002 a dimension)."""
    import faiss

    from memsearcher.retrieval.encoder import Encoder

    count, real = 20_000 if bench.quick else 1_000_000, vectors(bench)
    rng = np.random.default_rng(0)
    made = np.empty((count, real.shape[1]), np.float16)
    for start in range(0, count, 50_000):
        rows = np.arange(start, min(start + 50_000, count)) % len(real)
        block = real[rows] + rng.normal(0, JITTER, (len(rows), real.shape[1])).astype(np.float32)
        made[start : start + len(rows)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    flat, small = build_index(bench, made, FLAT), build_index(bench, made, IVF)
    asked = every_question(bench)
    batches = np.random.default_rng(1).choice(len(asked), (12, 64), replace=False)
    found, encoder = [], Encoder(ENCODE)
    ratios: dict[str, list[float]] = {"FAISS's own flat": [], "our flat (by BLAS)": []}
    for index in (flat, small):
        index.search(real[:64].astype(np.float32), 5)  # reads the mapped files once
    for batch in batches:
        queries = encoder.queries([asked[row] for row in batch])
        (a, slow), (b, fast) = timed(flat, queries), timed(small, queries)
        faiss.cvar.distance_compute_blas_threshold = FAISS_BLAS_FROM
        _, slowest = timed(flat, queries)
        faiss.cvar.distance_compute_blas_threshold = BLAS_FROM
        ratios["FAISS's own flat"].append(fast / slowest)
        ratios["our flat (by BLAS)"].append(fast / slow)
        found += [
            len({row for row, _ in x} & {row for row, _ in y}) / 5
            for x, y in zip(a, b, strict=True)
        ]
    recall = score_interval([found])
    lists = lists_of(IVF, count)
    what = (
        f"ivf_sq8 ({lists} lists, {min(IVF.nprobe, lists)} probed) against flat, {count:,} vectors"
    )
    bound = None if bench.quick else "≥ 0.98"  # too few to say anything
    holds = None if bench.quick else recall.mean >= 0.98
    say(f"{what}: recall@5", recall.mean, recall.low, recall.high, bound, holds, n=recall.n)
    share = small.plan.memory_needed / flat.plan.memory_needed
    if bench.quick:
        say(f"{what}: memory", share)
    else:
        say(f"{what}: memory", share, bound="≤ 0.26", holds=share <= 0.26)
    for than, measured in ratios.items():
        name = f"{what}: time of a batch of 64 against {than}"
        if bench.quick:
            say_ratio(name, measured)
        else:
            say_ratio(name, measured, "≤ 0.4", lambda ratio: ratio <= 0.4)


def timed(index: DenseIndex, queries: NDArray[np.float32]) -> tuple[list, float]:
    began = time.perf_counter()
    found = index.search(queries, 5)
    return found, time.perf_counter() - began


def say_ratio(
    name: str,
    ratios: Sequence[float],
    bound: str | None = None,
    holds: Callable[[float], bool] | None = None,
) -> None:
    """Median of paired ratios and their quartiles."""
    low, value, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    say(name, value, low, high, bound, holds and holds(value), n=len(ratios))


def encode(bench: Bench) -> None:
    """Ours against sentence-transformers as it comes, turn and turn about on the same passages."""
    from sentence_transformers import SentenceTransformer

    from memsearcher.retrieval.encoder import Encoder, locate

    sample = texts(bench, 128 if bench.quick else 512)
    longer = replace(ENCODE, max_passage_tokens=256)
    names = ("float32", "bfloat16") if AMX else ("float32",)
    ours = {name: Encoder(replace(longer, precision=name)) for name in names}
    theirs = SentenceTransformer(locate(ENCODE.model, None).path, device="cpu")
    theirs.max_seq_length = 256
    prefixed = [ENCODE.passage_prefix + text for text in sample]
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    rates: dict[str, list[float]] = {name: [] for name in ours}
    theirs.encode(prefixed[:32])
    for turn in range(4 if bench.quick else 6):
        began = time.perf_counter()
        other = theirs.encode(prefixed, normalize_embeddings=True)
        slow = time.perf_counter() - began
        for name, encoder in ours.items():
            began = time.perf_counter()
            mine = encoder.passages(sample)
            seconds = time.perf_counter() - began
            if turn:  # the first warms up
                ratios[name].append(slow / seconds)
                rates[name].append(len(sample) / seconds)
            else:
                cosine = float((mine * other).sum(axis=1).min())
                what, holds = f"encoding in {name}: smallest cosine", cosine >= 0.9999
                say(what, cosine, bound="≥ 0.9999", holds=holds, n=len(sample))
    for name in ours:
        what = f"encoding in {name}: times sentence-transformers' speed"
        say_ratio(what, ratios[name], "≥ 1.15", lambda ratio: ratio >= 1.15)
        rate = float(np.median(rates[name]))
        hours = round(21_015_324 / rate / 3600, 1)
        say(f"encoding in {name}: passages/s", rate, hours_for_wiki18=hours)


KILLED = """
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from benchmarks.retrieval import ENCODE
from memsearcher.corpus import read_passages
from memsearcher.retrieval.encoder import Encoder
from stages.encode import Encoded, write_vectors
source = Encoded(Encoder(replace(ENCODE, batch_size=2)))
out, count = Path(sys.argv[2]), int(sys.argv[4])
out.mkdir(exist_ok=True)
write_vectors(source, islice(read_passages(Path(sys.argv[1])), count), count, out)
"""


def kills(bench: Bench) -> None:
    """Five SIGKILLs at random moments of an encoding run, then its end: the same bytes?"""
    bench.passages()
    count = 160 if bench.quick else 640
    folders = [bench.work / name for name in ("whole", "killed")]
    for folder in folders:
        files.remove(folder)

    def start(folder: Path) -> subprocess.Popen[bytes]:
        where = (str(bench.work / "corpus"), str(folder), str(files.ROOT), str(count))
        return subprocess.Popen([sys.executable, "-c", KILLED, *where], stderr=subprocess.DEVNULL)

    def done() -> int:
        path = folders[1] / "done"
        return int(path.read_text()) if path.is_file() else 0

    if start(folders[0]).wait():
        raise RuntimeError("the encoding run failed")
    rng, killed = np.random.default_rng(), 0
    for _ in range(5):
        running, before = start(folders[1]), done()
        while running.poll() is None and done() == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 2))  # somewhere in the next chunks
        running.kill()
        killed += running.wait() == -signal.SIGKILL
    if start(folders[1]).wait():
        raise RuntimeError("the resumed run failed")
    same = files.sha256(folders[0] / "vectors.f16") == files.sha256(folders[1] / "vectors.f16")
    say("encoding after SIGKILLs, bytes equal", float(same), bound="= 1", holds=same, kills=killed)


WRITTEN = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from memsearcher import corpus
manifest = corpus.write(Path(sys.argv[1]), Path(sys.argv[2]), "jsonl", "x", lambda n: None)
status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory too
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024
print(json.dumps({"count": manifest["count"], "peak": peak}))
"""


def memory(bench: Bench) -> None:
    """The corpus stage's work on the real passages, again and again with fresh ids."""
    wanted = 500_000 if bench.quick else 5_000_000
    raw, out = bench.work / "many.jsonl", bench.work / "many"
    rows = files.read_jsonl(bench.data / "corpus.jsonl")
    ends = [json.dumps({"contents": row["contents"]}, ensure_ascii=False)[1:] for row in rows]
    files.require_room(bench.work, wanted * 1400, "many passages")
    with open(raw, "w", encoding="utf-8") as f:
        f.writelines(f'{{"id": "{n:x}", {ends[n % len(ends)]}\n' for n in range(wanted))
    began = time.monotonic()
    command = [sys.executable, "-c", WRITTEN, str(raw), str(out), str(files.ROOT)]
    row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    seconds, gib = time.monotonic() - began, row["peak"] / 2**30
    files.remove(raw)
    files.remove(out)
    holds = gib < 2 and row["count"] == wanted
    say(f"corpus of {wanted:,} lines, GiB", gib, bound="< 2", holds=holds, seconds=round(seconds))


MEASURES: dict[str, Callable[[Bench], None]] = {
    "bm25": bm25,
    "dense": dense,
    "ivf": ivf,
    "encode": encode,
    "kills": kills,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--embeddings", type=Path)
    parser.add_argument("--work", type=Path, help="kept and used again; a temporary folder if none")
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--quick", action="store_true", help="smaller samples: under 5 minutes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = asked.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for name in asked.only:
            MEASURES[name](Bench(asked.data, asked.embeddings, work, asked.quick))


if __name__ == "__main__":
    main()
