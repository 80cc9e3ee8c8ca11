"""The official release's prompts, out of its own source file. The file is parsed, never run.

It is a Python module with a class that holds two texts, `system_prompt` and `user_prompt` (the
latter with {question} and {memory} in it; where a name is assigned twice the last counts), and an
f-string that puts {tool_call} and {result} between <tool_response> tags and asks for the memory.
"""

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import httpx

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import ReleaseTemplate

HOME = Path("work/release")  # fetched files, by their hash
TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Texts:
    """`user`: what stands before the question, between it and the memory, and behind that.
    `observation`: the same of the tool call and the passages."""

    system: str
    user: tuple[str, str, str]
    observation: tuple[str, str, str]


def texts(template: ReleaseTemplate) -> Texts:
    """Raises BadInput where the file is not there, has another hash or is of another kind."""
    where = template.source.replace("{revision}", template.revision or "")
    source = _content(where, template.sha256)
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as e:
        raise BadInput(f"agent.release_template: {where}: not Python: {e}") from e
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and (found := _texts_of(node)):
            return found
    raise BadInput(
        f"agent.release_template: {where}: no class with system_prompt, user_prompt and an "
        "f-string of {tool_call} and {result}"
    )


def _content(where: str, sha256: str) -> bytes:
    address = where.startswith(("http://", "https://"))
    path = HOME / f"{sha256}.py" if address else Path(where)
    if path.is_file():
        content = path.read_bytes()
    elif address:
        content = _fetched(where)
    else:
        raise BadInput(f"agent.release_template: {where}: no such file")
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise BadInput(f"agent.release_template: {where}: SHA-256 is {found}, wanted {sha256}")
    if address and not path.is_file():
        with files.atomic_write(path, "wb") as f:
            f.write(content)
    return content


def _fetched(address: str) -> bytes:
    try:
        answer = httpx.get(address, timeout=TIMEOUT_S, follow_redirects=True)
        return answer.raise_for_status().content
    except httpx.HTTPError as e:
        raise BadInput(f"agent.release_template: {address}: {e}") from e


def _texts_of(node: ast.ClassDef) -> Texts | None:
    named: dict[str, str] = {}
    for line in node.body:
        match line:
            case ast.Assign([ast.Name(name)], ast.Constant(str(text))):
                named[name] = text
    user = _split(named.get("user_prompt", ""), "question", "memory")
    strings = (_text(each) for each in ast.walk(node) if isinstance(each, ast.JoinedStr))
    observations = (_split(text, "tool_call", "result") for text in strings)
    observation = next((found for found in observations if found), None)
    if "system_prompt" not in named or user is None or observation is None:
        return None
    return Texts(named["system_prompt"], user, observation)


def _text(string: ast.JoinedStr) -> str:
    """The f-string as a template: {name} where the value of a variable goes."""
    parts = []
    for piece in string.values:
        match piece:
            case ast.Constant(str(text)):
                parts.append(text)
            case ast.FormattedValue(ast.Name(name)):
                parts.append(f"{{{name}}}")
    return "".join(parts)


def _split(text: str, first: str, second: str) -> tuple[str, str, str] | None:
    found = re.fullmatch(rf"(.*)\{{{first}\}}(.*)\{{{second}\}}(.*)", text, re.DOTALL)
    return (found[1], found[2], found[3]) if found else None
