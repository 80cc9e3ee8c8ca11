"""The export that reaches the engine: names, head, shapes; and the engine process's death watch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from memsearcher import files
from memsearcher.engine.weights import complete, shapes_of, untied_export, untied_folder
from memsearcher.files import BadInput

EMBEDDING = "model.embed_tokens.weight"
STATE = {EMBEDDING: torch.arange(6.0).reshape(3, 2), "model.norm.weight": torch.ones(2)}


def policy(folder: Path, *, tied: bool) -> Path:
    folder.mkdir()
    save_file(STATE, folder / "model.safetensors")
    files.write_json(folder / "config.json", {"hidden_size": 2, "tie_word_embeddings": tied})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_tied_export_ends_with_an_explicit_head_of_its_own():
    sent = dict(untied_export(STATE.items(), SimpleNamespace(tie_word_embeddings=True)))
    assert list(sent) == [EMBEDDING, "model.norm.weight", "lm_head.weight"]
    assert torch.equal(sent["lm_head.weight"], STATE[EMBEDDING])
    assert sent["lm_head.weight"].data_ptr() != STATE[EMBEDDING].data_ptr()


def test_the_head_is_taken_while_the_embedding_is_gathered():
    def gathered():
        embedding = torch.ones(3, 2)
        yield EMBEDDING, embedding
        embedding.zero_()  # ZeRO-3 takes it back

    sent = dict(untied_export(gathered(), SimpleNamespace(tie_word_embeddings=True)))
    assert torch.equal(sent["lm_head.weight"], torch.ones(3, 2))


def test_a_tied_state_dict_that_lists_the_head_is_sent_once():
    state = STATE | {"lm_head.weight": STATE[EMBEDDING]}
    names = [n for n, _ in untied_export(state.items(), SimpleNamespace(tie_word_embeddings=True))]
    assert names == [EMBEDDING, "model.norm.weight", "lm_head.weight"]


def test_untied_export_is_the_module_as_it_is():
    state = STATE | {"lm_head.weight": torch.zeros(3, 2)}
    sent = dict(untied_export(state.items(), SimpleNamespace(tie_word_embeddings=False)))
    assert sent == state


def test_tied_export_without_an_embedding_raises():
    with pytest.raises(ValueError, match="embed_tokens"):
        list(untied_export([], SimpleNamespace(tie_word_embeddings=True)))


def test_a_partial_an_unknown_and_a_missing_tensor_are_named():
    shapes = {name: list(t.shape) for name, t in STATE.items()}
    assert dict(complete(STATE.items(), shapes)) == STATE
    with pytest.raises(ValueError, match=r"norm.weight is \[0\], not \[2\]"):  # C24: ZeRO-3
        list(complete((STATE | {"model.norm.weight": torch.ones(0)}).items(), shapes))
    with pytest.raises(ValueError, match="has no extra"):
        list(complete([("extra", torch.ones(1))], shapes))
    with pytest.raises(ValueError, match=r"without model.norm.weight"):
        list(complete([(EMBEDDING, STATE[EMBEDDING])], shapes))


def test_a_tied_folder_is_served_as_an_untied_copy(tmp_path):
    folder = policy(tmp_path / "policy", tied=True)
    served = untied_folder(folder, tmp_path)
    assert files.read_json(served / "config.json")["tie_word_embeddings"] is False
    assert (served / "tokenizer.json").read_text() == "{}"
    tensors = {n: t for f in served.glob("*.safetensors") for n, t in load_file(f).items()}
    assert torch.equal(tensors["lm_head.weight"], STATE[EMBEDDING])
    index = files.read_json(served / "model.safetensors.index.json")["weight_map"]
    assert {name: (served / file).exists() for name, file in index.items()} == dict.fromkeys(
        tensors, True
    )
    assert shapes_of(served)["lm_head.weight"] == [3, 2]
    assert untied_folder(folder, tmp_path) == served  # made once


def test_new_weights_in_the_same_folder_get_a_copy_of_their_own(tmp_path):
    folder = policy(tmp_path / "policy", tied=True)
    before = untied_folder(folder, tmp_path / "copies")
    save_file(STATE | {EMBEDDING: torch.zeros(3, 2)}, folder / "model.safetensors")
    after = untied_folder(folder, tmp_path / "copies")
    assert list((tmp_path / "copies").iterdir()) == [after] != [before]


def test_an_untied_folder_is_served_itself(tmp_path):
    folder = policy(tmp_path / "policy", tied=False)
    assert untied_folder(folder) == folder


def test_a_folder_without_whole_weights_is_bad_input(tmp_path):
    folder = policy(tmp_path / "policy", tied=True)
    (folder / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(BadInput, match=r"model.safetensors: not a safetensors file"):
        untied_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"no .safetensors"):
        untied_folder(folder)


PARENT = """
import multiprocessing, sys, time
from memsearcher.engine import plugin

def child(pipe):
    plugin.die_with_parent()
    pipe.send(multiprocessing.current_process().pid)
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=child, args=(there,)).start()
    print(here.recv(), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_engine_process_dies_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(files.ROOT)}
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    )
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}/cmdline").exists() and _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """A dead process that init has not collected yet is not alive."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
