"""TurboQuant as vLLM has it, simulated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .simulated import LayerFormat, Simulated, full_layers, head_dim, rotated

# Layers that vLLM leaves alone at each end of a model: without it 3-bit keys lose some 30 points of GSM8K.
BOUNDARY = 2


@lru_cache(maxsize=8)
def levels(bits: int) -> tuple[float, ...]:
    """The ``2^bits`` levels of least mean squared error for a standard normal variable (Lloyd and Max)."""
    count = 2**bits
    found = [3.5 * ((2 * i + 1) / count - 1) for i in range(count)]
    for _ in range(2000):
        edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(found)), math.inf]
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in edges]
        below = [(1 + math.erf(x / math.sqrt(2))) / 2 for x in edges]
        # The mean of what falls between two edges.
        found = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(count)]
    return tuple(found)


def quantized_keys(x: Tensor, bits: int) -> Tensor:
    """Keys (..., D), rotated, by direction and norm: ``n c / |c|``, c the nearest levels of N(0, 1/D)."""
    x, dim = x.float(), x.shape[-1]
    norm = x.norm(dim=-1, keepdim=True)
    table = torch.tensor(levels(bits), device=x.device) / math.sqrt(dim)
    near = torch.bucketize(rotated(x / (norm + 1e-8)), (table[1:] + table[:-1]) / 2, right=True)
    c = table[near]
    return norm.half().float() * rotated(c / c.norm(dim=-1, keepdim=True))


def quantized_values(x: Tensor, bits: int) -> Tensor:
    """Values (..., D) per token: ``s q + m`` with s the range over ``2^bits - 1``, s and m stored in f16."""
    x, most = x.float(), 2**bits - 1
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / most).clamp(min=1e-8)
    codes = ((x - low) / scale + 0.5).floor().clamp(0, most)
    return codes * scale.half().float() + low.half().float()


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Simulated):
    """Every token is quantized at once, without sink or window; the first and last two layers stay whole.

    Paper: Zandieh et al., "TurboQuant", arXiv 2504.19874, the variant for least squared error (its algorithm 1).
    Differs from the paper: as vLLM's ``turboquant_4bit_nc`` and ``turboquant_3bit_nc`` do. A Hadamard matrix in place
    of a random rotation, no QJL residual, directions of unit norm, values by equal steps and unrotated.

    Attributes:
        key_bits: of a channel of keys.
        value_bits: of a channel of values.
        boundary: layers at each end of the model that stay whole.
    """

    about = (
        "simulated-turboquant-*: TurboQuant (arXiv 2504.19874) as vLLM has it, with norm correction and without QJL; "
        "the first and last two layers whole, no sink, no window."
    )

    key_bits: int
    value_bits: int
    boundary: int = BOUNDARY

    def __post_init__(self) -> None:
        """Checks widths.

        Raises:
            ValueError: a width is out of range.
        """
        for name in ("key_bits", "value_bits"):
            if not 1 <= (bits := getattr(self, name)) <= 8:
                raise ValueError(f"{name}: got {bits}, allowed 1 to 8.")

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        """See `Simulated.forms`."""
        dim, layers = head_dim(model.config), full_layers(model.config)
        codes = (self.key_bits + self.value_bits) / 2
        form = LayerFormat(
            partial(quantized_keys, bits=self.key_bits),
            partial(quantized_values, bits=self.value_bits),
            # A norm for keys, scale and minimum for values, of 16 bits each.
            bits=codes + (16 + 32) / (2 * dim),
            code_bits=codes,
            step_reads_stored=True,
        )
        ends = min(self.boundary, layers // 2)
        return [None if i < ends or i >= layers - ends else form for i in range(layers)]
