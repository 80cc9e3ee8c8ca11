"""Where question files are: the registry's entries found in a folder or fetched, checked and read.

JSON lines are read as such: `datasets` guesses one schema over all rows, which NQ (no metadata)
and HotpotQA (nested metadata) do not share, and forgets the line that a fault is on. Parquet has a
schema of its own and goes through `datasets`.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import QuestionFile, Questions

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Row = dict[str, object]


def found(p: Questions, folder: Path) -> dict[str, Path]:
    """The files below `folder`, by the registry's names."""
    if not folder.is_dir():
        raise BadInput(f"questions.path: {folder}: no such folder")
    for name, entry in p.sets.items():
        if not (folder / entry.file).is_file():
            near = (folder / entry.file).parent
            there = [f.name for f in near.iterdir()] if near.is_dir() else []
            raise _no_split(name, entry, str(folder), there)
    return {name: folder / entry.file for name, entry in p.sets.items()}


def fetched(p: Questions, folder: Path, hub: "HfApi") -> tuple[dict[str, Path], str]:
    """The files of one commit of `p.source`, and that commit: what `p.revision` names today."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    assert p.source is not None
    try:
        info = hub.dataset_info(p.source, revision=p.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as e:
        raise BadInput(f"questions.source: {p.source} at {p.revision}: not on the hub") from e
    on_hub = [each.rfilename for each in info.siblings or []]
    paths = {}
    for name, entry in p.sets.items():
        if entry.file not in on_hub:
            near = entry.file.rpartition("/")[0]
            there = [f.rpartition("/")[2] for f in on_hub if f.rpartition("/")[0] == near]
            raise _no_split(name, entry, p.source, there)
        paths[name] = Path(
            hub.hf_hub_download(
                p.source, entry.file, repo_type="dataset", revision=info.sha, local_dir=folder
            )
        )
    return paths, str(info.sha)


def check(name: str, entry: QuestionFile, path: Path) -> str:
    """The file's SHA-256. Raises BadInput where the registry has another one."""
    got = files.sha256(path)
    if entry.sha256 not in (None, got):
        raise BadInput(f"{path}: SHA-256 {got}, but questions.sets.{name}.sha256 is {entry.sha256}")
    return got


def raw_rows(path: Path) -> Iterator[tuple[int, Row | BadInput]]:
    """(line from 1, row); a line that cannot be read comes as the error that says why."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path), 1)
        return
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                yield number, _json(line, f"{path}:{number}")


def _json(line: bytes, where: str) -> Row | BadInput:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        return BadInput(f"{where}: not UTF-8: {e.reason}")
    except json.JSONDecodeError as e:
        return BadInput(f"{where}: broken JSON: {e.msg}")
    return row if isinstance(row, dict) else BadInput(f"{where}: not a JSON object")


def _parquet(path: Path) -> Iterator[Row]:
    from datasets import Dataset
    from pyarrow import ArrowInvalid

    with tempfile.TemporaryDirectory() as cache:
        try:
            table = Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except ArrowInvalid as e:
            raise BadInput(f"{path}: not Parquet: {e}") from e
        yield from table


def _no_split(name: str, entry: QuestionFile, source: str, there: list[str]) -> BadInput:
    splits = sorted(Path(f).stem for f in there if Path(f).suffix in (".jsonl", ".parquet"))
    return BadInput(
        f"questions.sets.{name}: no {entry.file} in {source}, so no split {entry.split!r} "
        f"(there are: {', '.join(splits) or 'none'})"
    )
