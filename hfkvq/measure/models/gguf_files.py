"""GGUF files, dequantized once into a folder as Transformers saves a model.

Transformers reads GGUF files itself, but differently from version to version (5.23 keeps blocks packed unless told
otherwise), takes half a minute each time, and most of what a command calls wants a folder. So a file is unpacked once,
into the Hub's folder for assets, under its own sha256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

WHOLE_BYTES = 2**30
"""Files up to this size are unpacked in float32, which holds what they say exactly; larger ones in bfloat16."""


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def unpacked(sha256: str) -> Path | None:
    """The folder that a file with this sha256 was unpacked into, or None."""
    folder = _folder(sha256)
    # Folders appear under their name when they are finished, so each has all of its files.
    return folder if folder.is_dir() else None


def _folder(sha256: str) -> Path:
    return cached_assets_path("hfkvq", namespace="models", subfolder="gguf") / sha256


def unpack(path: Path, sha256: str | None = None) -> Path:
    """Dequantizes a GGUF file, unless that was done before.

    Any number of processes may do so at once: each writes a folder of its own, and the first to finish gives it its
    name.

    Args:
        sha256: that the file must have; None takes any.

    Returns:
        A folder with config, weights, tokenizer and, if the file has one, chat template.

    Raises:
        ValueError: the file has another sha256, or Transformers cannot read it.
        ImportError: the package gguf is missing.
        OSError: the folder cannot be written.
    """
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise ValueError(f"got {path.name}, which begins with {magic!r}, allowed files that begin with b'GGUF'.")
    found = file_sha256(path)
    if sha256 is not None and found != sha256:
        raise ValueError(f"{path.name} has the sha256 {found}, but it must be {sha256}; install it again.")
    folder = _folder(found)
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("GGUF files are read by the package gguf, which is not installed; pip install 'hfkvq[real]'.")
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        _convert(path, made)
        origin = {"file": path.name, "sha256": found, "transformers": transformers.__version__}
        (made / "origin.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        try:
            os.rename(made, folder)
        except OSError:
            # Another process was quicker; it has written the same.
            if not folder.is_dir():
                raise
    return folder


def _convert(path: Path, folder: Path) -> None:
    whole = path.stat().st_size <= WHOLE_BYTES
    options: dict[str, Any] = {"dtype": torch.float32 if whole else torch.bfloat16}
    # Some supported versions lack it; they always dequantize.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        # Each architecture and each kind of tokenizer fails in its own way.
        raise ValueError(f"{path.name} is not a GGUF file that Transformers can read: {error}") from error
    # `save_pretrained` refuses models that were quantized, also dequantized ones.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    # The default dtype is bfloat16: no such model was trained in float32.
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # Transformers 5.17 ignores it for these tokenizers, and warns of it at each load.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)
    weights: dict[int, tuple[str, torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        # The first of tied weights is the embedding.
        weights.setdefault(weight.data_ptr(), (name, weight.contiguous()))
    save_file(dict(weights.values()), folder / "model.safetensors", metadata={"format": "pt"})
