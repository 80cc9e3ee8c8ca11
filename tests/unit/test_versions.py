"""The code behind a stage: what changes its hash and what does not."""

from pathlib import Path

import pytest

from flows import versions
from memsearcher.files import BadInput

PROGRAM = '''"""Docstring."""
import os

def run() -> int:
    """What it does."""
    from memsearcher import noun  # inside a function

    return noun.value()
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        "stages/__init__.py": "",
        "stages/verb.py": PROGRAM,
        "stages/other.py": "",
        "memsearcher/__init__.py": "",
        "memsearcher/noun.py": "W = 'memsearcher.learner.worker'\ndef value():\n    return 1\n",
        "memsearcher/unused.py": "",
        "memsearcher/learner/__init__.py": "",
        "memsearcher/learner/worker.py": "x = 1\n",
        "memsearcher/learner/page.html.j2": "<p>",
        "code_versions.yaml": 'verb: {version: 1, code: ""}\nother: {version: 3, code: ""}\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    versions.record([], tmp_path)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text or not old
    path.write_text(text.replace(old, new) if old else text + new)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("stages/verb.py", "What it does.", "What it says that it does."),
        ("stages/verb.py", "# inside a function", "# here"),
        ("stages/verb.py", "import os\n", "import os\n\n\n"),
        ("stages/verb.py", '    """What it does."""\n', ""),
        ("memsearcher/unused.py", "", "x = 2\n"),
    ],
)
def test_what_cannot_change_results(root: Path, name: str, old: str, new: str) -> None:
    edit(root / name, old, new)
    assert versions.changed(root) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("stages/verb.py", "import os", "import sys"),
        ("memsearcher/noun.py", "return 1", "return 2"),
        ("memsearcher/learner/worker.py", "x = 1", "x = 2"),
        ("memsearcher/learner/page.html.j2", "<p>", "<b>"),
    ],
)
def test_what_can(root: Path, name: str, old: str, new: str) -> None:
    edit(root / name, old, new)
    assert versions.changed(root) == ["verb"]
    versions.record([], root)
    assert versions.changed(root) == []
    assert versions.recorded(root)["verb"][0] == 1


def test_bump_raises_one_number(root: Path) -> None:
    versions.record(["verb"], root)
    assert [versions.recorded(root)[name][0] for name in ("verb", "other")] == [2, 3]
    with pytest.raises(BadInput, match="no stage nope"):
        versions.record(["nope"], root)


def test_a_stage_without_a_file_is_named(root: Path) -> None:
    (root / "stages/verb.py").unlink()
    with pytest.raises(BadInput, match=r"verb\.py: no such file"):
        versions.changed(root)


def test_code_versions_match_the_code() -> None:
    assert versions.changed() == [], "see `python -m flows.versions --check`"
