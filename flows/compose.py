"""conf/ → params.yaml, the one file that says which experiment this is.

    python -m flows.compose experiment=smoke agent.max_memory_tokens=32

The result is byte for byte what DVC writes for `dvc exp run -S experiment=smoke`. Nothing is
written unless every key is known, present and valid.
"""

import re
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from memsearcher import files, params
from memsearcher.files import ROOT, BadInput


def composed(overrides: list[str], conf: Path = ROOT / "conf") -> str:
    """The text of params.yaml, keys in the order of conf/config.yaml."""
    if not (conf / "config.yaml").is_file():
        raise BadInput(f"{conf / 'config.yaml'}: no such file")
    try:
        with initialize_config_dir(str(conf), version_base=None):
            config = compose("config", overrides)
        OmegaConf.resolve(config)
    except OverrideParseException as e:
        raise BadInput(f"compose: {e.override!r}: not KEY=VALUE ({_one_line(e)})") from e
    except (HydraException, OmegaConfBaseException, YAMLError) as e:
        raise BadInput(f"compose: {_one_line(e)}") from e
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise BadInput(f"compose: {', '.join(missing)}: must be given, as in {missing[0]}=VALUE")
    params.validate(OmegaConf.to_container(config))
    return OmegaConf.to_yaml(config)


def check_paths(text: str) -> None:
    """A file that is not there is said here, before any stage has given up its earlier artifact."""
    chosen = params.validate(safe_load(text))
    for key, kind, path in (
        ("corpus.path", chosen.corpus.kind == "jsonl", chosen.corpus.path),
        ("questions.path", chosen.questions.kind == "local", chosen.questions.path),
    ):
        if kind and not (ROOT / Path(path or "").expanduser()).exists():
            raise BadInput(f"{key}: {path}: no such file or folder")


def _one_line(error: BaseException) -> str:
    """Hydra spreads a message over lines, ends it with hints and keeps the reason in the cause."""
    reasons = [str(error)] if error.__cause__ is None else [str(error), str(error.__cause__)]
    lines = [line.strip() for reason in reasons for line in reason.splitlines()]
    said = " ".join(dict.fromkeys(line for line in lines if line))
    return re.split(r" (?:Config search path:|See https:|full_key:)", said)[0]


def main() -> None:
    try:
        text = composed(sys.argv[1:])
        check_paths(text)
        with files.atomic_write(ROOT / "params.yaml") as f:
            f.write(text)
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    print("wrote params.yaml")


if __name__ == "__main__":
    main()
