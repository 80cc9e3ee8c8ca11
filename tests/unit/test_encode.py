"""Encoding a shard: slices, kills, other encoders, the import of a published index."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np
import pytest
from tiny import ENCODE

from memsearcher.files import ROOT, BadInput
from memsearcher.params import Encode
from memsearcher.retrieval.encoder import Encoder, PooledEncoder, passage_text
from memsearcher.retrieval.flat_file import FlatFile
from memsearcher.types import Passage
from stages.encode import Encoded, Published, bounds, write_vectors

PASSAGES = [Passage(str(i), f"Title {i}", "word " * (i % 7)) for i in range(40)]


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Encode:
    """A random BERT of two layers over bytes."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token, tokenizer.chat_template = "<|endoftext|>", None
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return replace(ENCODE, model=str(folder))


def test_shards_cover_the_corpus_once() -> None:
    for count, shards in ((10, 3), (2, 4), (53_428, 2), (7, 7)):
        edges = [bounds(count, shards, i) for i in range(shards)]
        assert edges[0][0] == 0
        assert edges[-1][1] == count
        assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_encoding_that_was_interrupted_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, encode: Encode
) -> None:
    """A chunk is 16 passages here; the run breaks inside the third one."""
    source = Encoded(Encoder(encode))

    def breaking() -> Iterator[Passage]:
        yield from PASSAGES[:35]
        raise ConnectionError("unplugged")

    for name in ("whole", "resumed", "short"):
        (tmp_path / name).mkdir()
    assert write_vectors(source, iter(PASSAGES), 40, tmp_path / "whole") == 40
    with pytest.raises(ConnectionError):
        write_vectors(source, breaking(), 40, tmp_path / "resumed")
    with open(tmp_path / "resumed" / "vectors.f16", "ab") as f:
        f.write(b"half a row")  # what a kill in the middle of a write leaves behind
    assert write_vectors(source, iter(PASSAGES), 40, tmp_path / "resumed") == 8
    whole = (tmp_path / "whole" / "vectors.f16").read_bytes()
    assert len(whole) == 40 * source.dim * 2
    assert (tmp_path / "resumed" / "vectors.f16").read_bytes() == whole
    with pytest.raises(BadInput, match="39 passages for short, its manifest promises 40"):
        write_vectors(source, iter(PASSAGES[:39]), 40, tmp_path / "short")


SLOW = """
import sys, time
from pathlib import Path
import numpy as np
from memsearcher.types import Passage
from stages.encode import write_vectors

class Slow:
    dim, chunk = 8, 4
    def vectors(self, first, passages):
        time.sleep(0.005)
        return np.array([np.random.default_rng(int(p.id)).normal(size=8) for p in passages])

rows = (Passage(str(i), "t", "x") for i in range(500))
write_vectors(Slow(), rows, 500, Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_five_kills_leave_the_bytes_of_an_uninterrupted_run(tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, "-c", SLOW, str(tmp_path / name)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def done() -> int:
        path = tmp_path / "killed" / "done"
        return int(path.read_text()) if path.is_file() else 0

    kills = np.random.default_rng(0).integers(1, 20, size=5)
    for chunks in kills:
        running, before = start("killed"), done()
        while running.poll() is None and done() < before + 4 * chunks:
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    assert 0 < done() < 500
    assert start("killed").wait() == 0
    assert start("whole").wait() == 0
    whole = (tmp_path / "whole" / "vectors.f16").read_bytes()
    assert len(whole) == 500 * 8 * 2
    assert (tmp_path / "killed" / "vectors.f16").read_bytes() == whole


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_other_encoders_give_sentence_transformers_vectors(encode: Encode, pooling: str) -> None:
    """As BGE: another pooling, an instruction before the query, nothing before the passage."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    other = replace(encode, pooling=pooling, query_prefix="Find: ", passage_prefix="")
    ours = Encoder(other)
    body = Transformer(encode.model, max_seq_length=32)
    theirs = SentenceTransformer(
        modules=[body, Pooling(32, pooling_mode=pooling), Normalize()], device="cpu"
    )
    texts = [f"{p.title}: {p.text}".strip() for p in PASSAGES[:9]]
    assert ours.passages(texts) == pytest.approx(theirs.encode(texts), abs=1e-5)
    short = [t[:8] for t in texts]
    queries = theirs.encode([f"Find: {t}" for t in short])
    assert ours.queries(short) == pytest.approx(queries, abs=1e-5)


@pytest.mark.slow
def test_a_pool_of_processes_gives_the_vectors_of_one(encode: Encode) -> None:
    """Stands in for several GPUs; the library's own pool, a process a device."""
    texts = [passage_text(p.title, p.text) for p in PASSAGES]
    pooled = PooledEncoder(encode, ["cpu", "cpu"])
    try:
        together = pooled.passages(texts)
    finally:
        pooled.close()
    assert pooled.chunk == 2 * Encoder(encode).chunk
    assert together == pytest.approx(Encoder(encode).passages(texts), abs=1e-5)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, encode: Encode) -> list[str]:
    """A published index over PASSAGES, split in the middle of a row."""
    folder = tmp_path_factory.mktemp("published")
    index = faiss.IndexFlatIP(32)
    index.add(Encoder(encode).passages([passage_text(p.title, p.text) for p in PASSAGES]))
    data = bytes(faiss.serialize_index(index))
    for name, part in (("part_aa", data[:2001]), ("part_ab", data[2001:])):
        (folder / name).write_bytes(part)
    return [str(folder / "part_aa"), str(folder / "part_ab")]


def test_a_published_index_is_read_in_place_of_encoding(
    tmp_path: Path, encode: Encode, parts: list[str]
) -> None:
    encoder = Encoder(encode)
    theirs = encoder.passages([passage_text(p.title, p.text) for p in PASSAGES])
    start = 11
    source = Published(parts, start, 40, encoder)
    assert write_vectors(source, iter(PASSAGES[start:]), 29, tmp_path) == 29
    got = np.fromfile(tmp_path / "vectors.f16", np.float16).reshape(29, 32)
    assert (got == theirs[start:].astype(np.float16)).all()

    import fsspec

    memory = fsspec.filesystem("memory")  # a remote one, as far as the code can tell
    for part in parts:
        memory.pipe_file(f"/{Path(part).name}", Path(part).read_bytes())
    remote = FlatFile(["memory://part_aa", "memory://part_ab"])
    assert (remote.rows(3, 30) == theirs[3:33]).all()


def test_a_published_index_of_something_else_is_refused(
    tmp_path: Path, encode: Encode, parts: list[str]
) -> None:
    encoder = Encoder(encode)
    with pytest.raises(BadInput, match="40 vectors of 32, the corpus has 39 passages"):
        Published(parts, 0, 39, encoder)
    with pytest.raises(BadInput, match=r"part is missing or cut short"):
        FlatFile(parts[:1])
    with pytest.raises(BadInput, match=r"part_ab: not a FAISS flat inner-product index"):
        FlatFile(parts[::-1])
    with pytest.raises(BadInput, match=r"part_ac: no such file"):
        FlatFile([*parts, str(tmp_path / "part_ac")])
    with pytest.raises(BadInput, match=r"row 5 is not passage '30' .*\(cosine -?0\.\d+\)"):
        write_vectors(Published(parts, 5, 40, encoder), iter([PASSAGES[30]]), 1, tmp_path)
    long = faiss.IndexFlatIP(32)
    long.add(np.full((3, 32), 0.5, np.float32))
    faiss.write_index(long, str(tmp_path / "long"))
    with pytest.raises(BadInput, match=r"row 1 has length 2\.828, not 1"):
        FlatFile([str(tmp_path / "long")]).rows(1, 2)
