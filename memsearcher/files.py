"""Files: atomic writes, JSON lines, hashes, room on disk. Nothing here knows what a file means."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


class BadInput(ValueError):
    """The user's input is wrong. The message names the thing; the stage prints it as one line."""


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO]:
    """Opens a temporary neighbour and renames it over `path` when the block ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
        with os.fdopen(fd, mode, encoding=encoding, newline=newline) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def publish(made: Path, out: Path) -> None:
    """Moves a finished folder or file to where DVC looks for it; what stood there is replaced."""
    out.parent.mkdir(parents=True, exist_ok=True)
    remove(out)
    shutil.move(made, out)


def write_json(path: Path, value: object) -> None:
    with atomic_write(path) as f:
        json.dump(value, f, ensure_ascii=False, indent=2, sort_keys=True)
        f.write("\n")


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise BadInput(f"{path}: not JSON: {e}") from e


def write_jsonl(path: Path, rows: Iterable[dict]) -> int:
    """Writes one object a line; returns how many."""
    count = 0
    with atomic_write(path) as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def read_jsonl(path: Path) -> Iterator[dict]:
    """Objects of a JSON-lines file. Splits on \\n only: U+2028 inside a text is text."""
    return (row for _, row in numbered_jsonl(path))


def numbered_jsonl(path: Path, lines: Iterable[bytes] | None = None) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object); blank lines are passed over. `lines`: for a packed file."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    with open(path, "rb") as f:
        for number, line in enumerate(f if lines is None else lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as e:
                raise BadInput(f"{path}:{number}: not UTF-8: {e.reason}") from e
            except json.JSONDecodeError as e:
                raise BadInput(f"{path}:{number}: broken JSON: {e.msg}") from e
            if not isinstance(row, dict):
                raise BadInput(f"{path}:{number}: not a JSON object")
            yield number, row


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def content_hash(path: Path) -> str:
    """SHA-256 of a file or folder. A folder that carries a manifest.json is known by that file,
    since it holds the hashes of its large neighbours."""
    if path.is_file():
        return sha256(path)
    if not path.is_dir():
        raise BadInput(f"{path}: no such file or folder (run the stage that makes it)")
    if (path / "manifest.json").is_file():
        return sha256(path / "manifest.json")
    parts = [f"{p.relative_to(path)} {sha256(p)}" for p in sorted(path.rglob("*")) if p.is_file()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def digest(value: object) -> str:
    """Short hash of anything that JSON can hold, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def require_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises BadInput before work starts that could not be written."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise BadInput(
            f"{what} needs {needed_bytes / 2**20:,.0f} MiB on the disk of {folder}, "
            f"{free / 2**20:,.0f} MiB are free"
        )


def remove(path: Path) -> None:
    """Removes a file or folder; one that is not there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
