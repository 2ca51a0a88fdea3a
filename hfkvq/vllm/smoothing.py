"""Smoothing vectors of a model in a file, which a plug-in reads whose engine knows no way to measure them.

    python -m hfkvq.vllm.smoothing MODEL FILE

See `hfkvq.caches.layer_state.smoothing`.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hfkvq.caches.attention.interface import register
from hfkvq.caches.base.model_config import text_config
from hfkvq.caches.layer_state.smoothing import measure, vectors_of

logger = logging.getLogger("hfkvq")

BIASES = ("attention_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias", "use_bias", "enable_bias")
"""Names of a config's field that gives keys biases."""

BIASED = ("qwen2", "phi", "gpt2", "gpt_neox", "opt")
"""Beginnings of model types whose keys have them without such a field."""


def has_key_biases(config: Any) -> bool:
    """True if keys of a model have biases, as far as its config says."""
    kind = str(getattr(config, "model_type", ""))
    listed = kind.startswith(BIASED) and not kind.startswith("phi3")
    return listed or any(getattr(config, name, False) is True for name in BIASES)


def save(model: Any, path: str) -> int:
    """Measures a Transformers model, and writes f32 (2, 3, H, D) for each layer: for keys as they are, and rotated.

    Returns:
        The number of layers.

    Raises:
        ValueError: the model cannot be measured.
    """
    # Queries are seen by hfkvq's own attention.
    register()
    found = measure(model, text_config(model.config))
    if not found:
        raise ValueError(f"model: got {type(model).__name__}, whose keys cannot be measured.")
    vectors = {
        str(layer): torch.stack([vectors_of(own.mean, own.deviation, own.query, rotated) for rotated in (False, True)])
        for layer, own in found.items()
    }
    save_file({layer: own.cpu() for layer, own in vectors.items()}, path, {"format": "hfkvq smoothing 1"})
    return len(vectors)


def vectors_of_layer(layer: int, heads: int, rotated: bool, rank: int = 0, ranks: int = 1) -> Tensor | None:
    """The vectors f32 (3, H, D) for a layer of vLLM, on the device that is current; None where there is no file.

    Args:
        heads: KV heads of this rank.
        rotated: whether keys are rotated.
        rank: of tensor parallelism.
        ranks: their number; where they are more than heads, several have the same.

    Raises:
        ValueError: the file has no such layer, or not these heads.
    """
    path = os.environ.get("HFKVQ_SMOOTHING")
    if not path:
        if not layer:
            logger.warning("keys are not smoothed, since HFKVQ_SMOOTHING names no file: see hfkvq.vllm.smoothing.")
        return None
    with safe_open(path, "pt") as file:
        if str(layer) not in file.keys():  # noqa: SIM118
            raise ValueError(f"HFKVQ_SMOOTHING: got {path}, which has no layer {layer}; measure this model.")
        found = file.get_tensor(str(layer))[int(rotated)]
    total = found.shape[1]
    first = rank * heads if total >= ranks else rank * total // ranks
    if heads != max(1, total // ranks):
        raise ValueError(f"HFKVQ_SMOOTHING: got {path} with {total} heads, allowed {heads * ranks}; measure this one.")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return found[:, first : first + heads].contiguous().to(device)


def main() -> None:
    """The command."""
    from hfkvq.measure.models import find_model, load_model

    parser = argparse.ArgumentParser(
        prog="python -m hfkvq.vllm.smoothing", description="Measures the smoothing vectors of a model."
    )
    parser.add_argument("model", help="folder, GGUF file or name of a model")
    parser.add_argument("file", help="where to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    layers = save(load_model(find_model(given.model), given.device), given.file)
    print(f"{given.file}: vectors of {layers} layers")


if __name__ == "__main__":
    main()
