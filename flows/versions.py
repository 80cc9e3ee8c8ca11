"""code_versions.yaml: one integer per stage, and a hash of the code behind it.

    python -m flows.versions                 records the hashes again: results cannot have changed
    python -m flows.versions --bump report   raises the number: results may change, so it runs again
    python -m flows.versions --check         names the stages whose code is not the recorded one

A stage depends on its integer and not on source files: a docstring would else re-encode 21 million
passages. The hash covers every first-party module that the stage's file can reach (imports inside
functions and modules named in strings included) as syntax trees without docstrings and comments,
and what lies beside them that is not Python (templates, styles). A test fails while a hash differs:
then somebody decides which of the two it is.
"""

import argparse
import ast
import hashlib
import re
import sys
from pathlib import Path

from memsearcher import files
from memsearcher.files import ROOT, BadInput
from memsearcher.params import read_yaml

FILE = "code_versions.yaml"
PACKAGES = ("memsearcher", "stages")  # flows say when, not what
HEADER = (
    "# One integer per stage: raised when results may change. `make versions` records hashes.\n"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# How a result is reported, where it is kept and what is printed does not change it.
WITHOUT_RESULT = {
    f"memsearcher/{name}.py" for name in ("tracking", "uploader", "store", "traces", "cli")
}


def code_hash(stage: str, root: Path = ROOT) -> str:
    """Hash of all that `stages/<stage>.py` reaches.

    A module that cannot be found as a file of ours is somebody else's: the lock file says which.
    """
    todo, seen = [root / "stages" / f"{stage}.py"], set[Path]()
    if not todo[0].is_file():
        raise BadInput(f"{todo[0]}: no such file, but {FILE} has {stage}")
    while todo:
        path = todo.pop()
        if path in seen or str(path.relative_to(root)) in WITHOUT_RESULT:
            continue
        seen.add(path)
        todo += _imported(path, root)
    near = [p for folder in {path.parent for path in seen} for p in folder.iterdir() if p.is_file()]
    beside = [p for p in near if p.suffix != ".py" and not p.name.startswith(".")]
    parts = [f"{path.relative_to(root)} {_meaning(path)}" for path in sorted(seen)]
    parts += [f"{path.relative_to(root)} {files.sha256(path)}" for path in sorted(beside)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _imported(path: Path, root: Path) -> list[Path]:
    """Files of ours that the module imports anywhere, with the packages that they are in."""
    names = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise BadInput(
                    f"{path}:{node.lineno}: relative import; versions follow absolute ones"
                )
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"^\w+(?:\.\w+)+(?=$|:\w+$)", node.value)  # python -m, entry points
    found = []
    for name in names:
        parts = name.split(".")
        if parts[0] in PACKAGES:
            for i in range(1, len(parts) + 1):
                base = root.joinpath(*parts[:i])
                found += [p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()]
    return found


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as e:
        raise BadInput(f"{path}:{e.lineno}: {e.msg}") from e


def _meaning(path: Path) -> str:
    """The syntax tree as text, without docstrings, comments and positions."""
    tree = _tree(path)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def recorded(root: Path = ROOT) -> dict[str, tuple[int, str]]:
    raw = read_yaml(root / FILE)
    return {stage: (entry["version"], entry["code"]) for stage, entry in raw.items()}


def changed(root: Path = ROOT) -> list[str]:
    """Stages whose code is not the code that their number was recorded for."""
    return [stage for stage, (_, code) in recorded(root).items() if code != code_hash(stage, root)]


def record(bump: list[str], root: Path = ROOT) -> None:
    entries = recorded(root)
    if unknown := sorted(set(bump) - set(entries)):
        raise BadInput(
            f"versions: no stage {', '.join(unknown)} in {FILE}, only {', '.join(entries)}"
        )
    with files.atomic_write(root / FILE) as f:
        f.write(HEADER)
        for stage, (version, _) in sorted(entries.items()):
            version += stage in bump
            f.write(f'{stage}: {{version: {version}, code: "{code_hash(stage, root)}"}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.versions", description=__doc__)
    parser.add_argument("--bump", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    try:
        differ = changed()
        if arguments.check and differ:
            raise BadInput(
                f"the code of {', '.join(differ)} has changed: `make versions` if results cannot "
                f"have, else `python -m flows.versions --bump {' '.join(differ)}`"
            )
        if not arguments.check:
            record(arguments.bump)
            print(f"recorded: {', '.join(differ) or 'nothing'}; raised: {arguments.bump or 'none'}")
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
