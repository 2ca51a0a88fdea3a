"""OSCAR, "offline spectral covariance-aware rotation" (not OScaR), simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..capture import Capture
from .calibrated import Calibrated
from .simulated import LayerFormat, rotated

BITS = 2


def composed(covariance: Tensor) -> Tensor:
    """``R = U H P`` (D, D), f64: eigenvectors, Hadamard, and the order that spreads large eigenvalues over a row.

    P puts the column of the i-th largest eigenvalue where the bits of i, reversed, say.
    """
    size = len(covariance)
    eigenvalues, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    hadamard = rotated(torch.eye(size)).double()
    order = torch.empty(size, dtype=torch.long)
    width = size.bit_length() - 1
    reverse = torch.tensor([int(f"{i:0{width}b}"[::-1], 2) if width else 0 for i in range(size)])
    order[reverse] = eigenvalues.argsort(descending=True)
    return (vectors @ hadamard)[:, order]


def rotations(captured: Sequence[Capture]) -> tuple[Tensor, Tensor]:
    """``R_K`` and ``R_V`` of one layer, f64 (D, D), of several rows of calibration text.

    ``C_Q`` is the second moment of the queries, and ``C_S`` that of the values, each token weighted by ``k C_Q k`` of
    its own head; both are means over KV heads.
    """
    heads = captured[0].keys.shape[0]
    query, key, value = (
        torch.cat([getattr(x, name).cpu().double().unflatten(0, (heads, -1)) for x in captured], 2)
        for name in ("query", "keys", "values")
    )
    moments = torch.einsum("hsnd,hsne->hde", query, query) / (query.shape[1] * query.shape[2])
    key, value = key.squeeze(1), value.squeeze(1)
    weight = torch.einsum("hnd,hde,hne->hn", key, moments, key)
    weight = weight / weight.mean(1, keepdim=True).clamp(min=1e-12)
    spread = torch.einsum("hn,hnd,hne->de", weight, value, value) / (heads * value.shape[1])
    return composed(moments.mean(0)), composed(spread)


def quantized(x: Tensor, rotation: Tensor, clip: float) -> Tensor:
    """Tokens (..., D): rotated, clipped at the entry of rank ``floor(clip D)`` of its magnitudes, 2 bits a channel.

    Scale and zero point are a token's, and stored in f16.
    """
    rotation = rotation.to(x.device, torch.float32)
    y = x.float() @ rotation
    rank = min(int(clip * y.shape[-1]), y.shape[-1] - 1)
    limit = y.abs().sort(-1).values[..., rank, None]
    y = torch.minimum(torch.maximum(y, -limit), limit)
    low = y.amin(-1, keepdim=True)
    scale = ((y.amax(-1, keepdim=True) - low).clamp(min=1e-8) / (2**BITS - 1)).half().float().clamp(min=2**-24)
    zero = (-low / scale).half().float()
    codes = (y / scale + zero + 0.5).floor().clamp(0, 2**BITS - 1)
    return (codes - zero) * scale @ rotation.T


@dataclass(frozen=True, kw_only=True)
class Oscar(Calibrated):
    """Rotations of queries' and weighted values' second moments, from calibration text, then INT2 per token, clipped.

    Paper: Zhou et al., "OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization", arXiv
    2605.17757, section 3; windows, clips and the order of columns as in the authors' settings.
    Differs from the paper: weights of values are those of the authors' ``compute_kv_rotation.py``; calibrated on the
    package's own texts, not on GPQA prompts; a group is a whole head; scale and zero point in 16 bits, as the paper's
    2.28 bits have it, where the authors' runs keep 32.

    Attributes:
        sink: first tokens that stay whole.
        recent: newest tokens that stay whole.
        key_clip: rank at which keys are clipped, as a share of the channels.
        value_clip: the same of values.
    """

    about = (
        "simulated-oscar: OSCAR (arXiv 2605.17757), INT2, sink of 64, newest 256 whole, rotations per layer calibrated "
        "on text of the package that no window holds."
    )

    sink: int = 64
    recent: int = 256
    key_clip: float = 0.96
    value_clip: float = 0.92

    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        """See `Calibrated.form`."""
        turns = zip(rotations(captured), (self.key_clip, self.value_clip), strict=True)
        keys, values = (partial(quantized, rotation=rotation, clip=clip) for rotation, clip in turns)
        # Scale and zero point of 16 bits each a token and head.
        return LayerFormat(keys, values, BITS + 32 / captured[0].keys.shape[-1], BITS, self.sink, self.recent)
