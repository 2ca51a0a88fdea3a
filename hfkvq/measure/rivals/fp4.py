"""FP4 as SGLang holds it, simulated: E2M1 with an 8-bit exponent for 16 channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .simulated import LayerFormat, Simulated, full_layers, head_dim

BLOCK = 16
"""Channels of a token that share a scale."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1; what lies in the middle between two becomes the greater."""


def rounded(x: Tensor) -> Tensor:
    """Keys or values (B, H, n, D): each block over the least power of two by which it stays within 6, in E2M1."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    most = (blocks.abs().amax(-1, keepdim=True) / VALUES[-1]).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(most)))
    values = torch.tensor(VALUES, device=x.device)
    code = torch.bucketize((blocks / scale).abs(), (values[1:] + values[:-1]) / 2, right=True)
    return (values[code] * blocks.sign() * scale).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class FP4(Simulated):
    """Keys and values in 4-bit floats, all tokens at once: the baseline of TriAxialKV's tables.

    Paper: none; "SGLang FP4" of Shen et al., arXiv:2605.17170, Tables 2 and 3. A step reads its own token as it is
    stored, as SGLang's does; a prompt's own forward reads it as it came.
    """

    about = (
        "simulated-fp4: SGLang's FP4 cache, E2M1 with an 8-bit exponent for 16 channels of a token, keys and values, "
        "no window and no sink."
    )

    def check(self, config: Any) -> None:
        """See `Rival.check`."""
        dim = head_dim(config)
        if dim % BLOCK:
            raise ValueError(f"schemes: FP4 (simulated) takes heads of multiples of {BLOCK} channels, got {dim}.")
        if not full_layers(config):
            raise ValueError("schemes: FP4 (simulated) takes layers of full attention; got none.")

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        """See `Simulated.forms`."""
        form = LayerFormat(rounded, rounded, bits=4 + 8 / BLOCK, code_bits=4, step_reads_stored=True)
        return [form] * full_layers(model.config)
