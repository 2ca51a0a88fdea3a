"""Bytes of a model's weights, and an estimate of a forward's activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hfkvq.measure.models.outline import Outline

_METHOD_BITS = {"fp8": 8, "fbgemm_fp8": 8, "finegrained_fp8": 8, "mxfp4": 4.25, "bitnet": 2, "eetq": 8}
"""Bits of a weight where a quantization config names none."""

METADATA_BITS = 0.5
"""Bits of scales and zeros of a weight of 4 bits in groups of 64 to 128, generously."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights.

    Attributes:
        parameters: of the model, tied ones once.
        total: bytes.
        source: origin of the bytes, in words.
        exact: True if they are counted, not estimated.
    """

    parameters: int
    total: int
    source: str
    exact: bool


def _quantized_bits(config: Any) -> float | None:
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    values = stated if isinstance(stated, dict) else stated.to_dict()
    if values.get("load_in_4bit") or values.get("_load_in_4bit"):
        return 4 + METADATA_BITS
    if values.get("load_in_8bit") or values.get("_load_in_8bit"):
        return 8
    bits = values.get("bits", values.get("w_bit"))
    if isinstance(bits, (int, float)):
        return bits + (METADATA_BITS if bits < 8 else 0)
    return _METHOD_BITS.get(str(values.get("quant_method", "")).split(".")[-1].lower())


def weights_of(outline: Outline, dtype: torch.dtype, stored: int | None = None) -> Weights:
    """Bytes by parameters and dtype; of quantized checkpoints ``stored``, or an estimate by their bits.

    Args:
        outline: of the model.
        dtype: of weights that are not quantized.
        stored: bytes of the checkpoint, if they are known.
    """
    full = outline.parameters * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    if getattr(outline.config, "quantization_config", None) is None:
        return Weights(outline.parameters, full, f"parameters in {name}", True)
    if stored is not None:
        return Weights(outline.parameters, stored, "the quantized checkpoint's size", True)
    bits = _quantized_bits(outline.config)
    if bits is None:
        return Weights(outline.parameters, full, f"{name}: the config states no bits of its quantization", False)
    total = round(outline.linear * bits / 8) + (outline.parameters - outline.linear) * dtype.itemsize
    return Weights(outline.parameters, total, f"estimate: linear layers in {bits:g} bits, the rest in {name}", False)


PEAK = (
    "tokens * itemsize * (4 hidden + 3 intermediate + 2 query heads * D) + 2 * context * itemsize * (K + V of the "
    "widest layer) + tokens * context bytes of mask + vocabulary * (itemsize + 4), times batch"
)
"""The estimate of `peak`, in words: ``tokens`` are those of a piece of the prompt."""


def peak(outline: Outline, batch: int, context: int, itemsize: int, chunk: int | None) -> int:
    """Estimated bytes that the forward of a prompt's last piece needs at its fullest; see `PEAK`.

    A prompt in one piece reads its own keys and values, and no mask; a later piece reads the layer dequantized, and
    once more joined to the piece. Experts count as one MLP of the widest size. No allocator is this exact.
    """
    text = outline.text
    tokens = context if chunk is None else min(chunk, context)
    hidden = text.hidden_size
    wide = [getattr(text, name, None) for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim")]
    inner = max([x for x in wide if isinstance(x, int)], default=4 * hidden)
    widest = max((x.heads * (x.key_dim + x.value_dim) for x in outline.layers), default=0)
    query = 2 * getattr(text, "num_attention_heads", 1) * max((x.key_dim for x in outline.layers), default=0)
    each = tokens * itemsize * (4 * hidden + 3 * inner + query)
    if tokens < context:
        each += 2 * context * itemsize * widest + tokens * context
    return batch * (each + text.vocab_size * (itemsize + 4))
