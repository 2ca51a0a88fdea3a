"""OScaR, "omni-scaled canalized rotation" (not OSCAR), simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .simulated import LayerFormat, Simulated, full_layers, head_dim, rotated

BITS = 2


def _grouped(x: Tensor) -> Tensor:
    """Groups (..., g) in 2 bits with a whole zero point; scale, and scale times zero point, stored in f16."""
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / (2**BITS - 1)
    step = torch.where(scale > 0, scale, 1.0)
    zero = torch.round(-low / step)
    codes = (torch.round(x / step) + zero).clamp(0, 2**BITS - 1)
    return torch.where(scale > 0, codes * scale.half().float() - (zero * scale).half().float(), low)


def quantized_keys(x: Tensor, group: int) -> Tensor:
    """Keys (B, H, n, D): rotated, each token divided by its norm over all heads, then per channel of g tokens."""
    y = rotated(x)
    norm = y.square().sum((1, 3), keepdim=True).sqrt()
    norm = torch.where(norm > 0, norm, 1.0)
    parts = (y / norm).transpose(2, 3).unflatten(3, (-1, group))
    return rotated(_grouped(parts).flatten(3).transpose(2, 3) * norm)


def quantized_values(x: Tensor, group: int) -> Tensor:
    """Values (B, H, n, D): rotated, then per token of g channels."""
    return rotated(_grouped(rotated(x).unflatten(3, (-1, group))).flatten(3))


@dataclass(frozen=True, kw_only=True)
class OmniScaled(Simulated):
    """Keys rotated and evened out by token norms, then KIVI's codes; whole blocks leave the window together.

    Paper: Su et al., "OScaR: The Occam's Razor for Extreme KV Cache Quantization", arXiv 2605.19660: Canalized Rotation
    and Omni-Token Scaling, in INT2. Settings are those of the authors' evaluation on LongBench.
    Differs from the paper: norms and whole tokens are as their kernels have them, one f32 norm a token for all heads.

    Attributes:
        group: elements that share a scale: tokens of a channel of keys, channels of a token of values.
        unit: tokens that are quantized together; up to one less stay whole.
    """

    about = (
        "simulated-oscar-omni: OScaR (Omni-Scaled Canalized Rotation, arXiv 2605.19660, not OSCAR), INT2, groups of "
        "32, the newest up to 255 tokens whole, no sink."
    )

    group: int = 32
    unit: int = 256

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        """See `Simulated.forms`."""
        dim, text = head_dim(model.config), model.config.get_text_config(decoder=True)
        group = min(self.group, dim)
        if not self.unit or self.unit % group:
            raise ValueError(f"unit: got {self.unit}, allowed multiples of the group of {group} tokens.")
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        form = LayerFormat(
            partial(quantized_keys, group=group),
            partial(quantized_values, group=group),
            # Scale and zero point of 16 bits each; norms of keys.
            bits=BITS + 32 / group + 32 / (heads * dim) / 2,
            code_bits=BITS,
            unit=self.unit,
        )
        return [form] * full_layers(model.config)
