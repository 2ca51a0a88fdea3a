"""SAW-INT4's calibrated variants, which its paper measures and leaves: k-means codes and Hessian-aware rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..capture import Capture
from .calibrated import Calibrated
from .simulated import LayerFormat, rotated

BITS, LEVELS = 4, 15
ROUNDS = 20
"""Of k-means."""


def int4(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Tokens (..., D) by INT4 a token (eqs. 3 and 4) in a rotated basis, and back; scale and minimum in f16."""
    turn = None if rotation is None else rotation.to(x.device, torch.float32)
    y = x.float() if turn is None else x.float() @ turn
    low = y.amin(-1, keepdim=True)
    scale = ((y.amax(-1, keepdim=True) - low) / LEVELS).half().float()
    low = low.half().float()
    codes = ((y - low) / scale.clamp(min=2**-24) + 0.5).floor().clamp(0, LEVELS)
    y = codes * scale + low
    return y if turn is None else y @ turn.T


def block_rotation(dim: int, block: int) -> Tensor:
    """Blocks of Hadamard matrices, f64 (D, D); the identity for 0."""
    size = min(block, dim)
    return torch.block_diag(*[rotated(torch.eye(size)).double()] * (dim // size)) if size else torch.eye(dim).double()


def hessian_rotation(captured: Sequence[Capture], damping: float) -> Tensor:
    """R, f64 (D, D): eigenvectors of the queries' second moment (eqs. 7, 9 and 10), largest eigenvalue first.

    The largest entry of each is positive.
    """
    query = torch.cat([one.query.cpu().double().flatten(0, 1) for one in captured])
    moment = query.T @ query / len(query)
    moment += damping * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    vectors = torch.linalg.eigh(moment).eigenvectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * largest.sign()


def kmeans(x: Tensor, count: int) -> Tensor:
    """Centroids of tokens (n, D), f32 (C, D): Lloyd's algorithm from k-means++, with a fixed seed."""
    x, generator = x.float(), torch.Generator().manual_seed(0)
    far, first = torch.ones(len(x)), []
    for _ in range(min(count, len(x))):
        first.append(x[torch.multinomial(far.clamp(min=1e-12), 1, generator=generator)])
        own = (x - first[-1]).square().sum(1)
        far = own if len(first) == 1 else torch.minimum(far, own)
    centres = torch.cat(first)
    for _ in range(ROUNDS):
        nearest = torch.cdist(x, centres).argmin(1)
        sums, sizes = torch.zeros_like(centres).index_add_(0, nearest, x), nearest.bincount(minlength=len(centres))
        # One that no token is nearest to stays where it is.
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centres)
    return centres


def residual(x: Tensor, centres: Tensor, rotation: Tensor | None) -> Tensor:
    """Tokens (B, H, n, D) by the nearest centroid of their head (H, C, D) and what is left in INT4 (eqs. 5 and 6)."""
    centres, x = centres.to(x.device), x.float()
    batch, heads = x.shape[:2]
    each = centres[None].expand(batch, -1, -1, -1).flatten(0, 1)
    nearest = torch.cdist(x.flatten(0, 1), each).argmin(-1)
    near = each.gather(1, nearest[..., None].expand(-1, -1, x.shape[-1])).unflatten(0, (batch, heads))
    return near + int4(x - near, rotation)


@dataclass(frozen=True, kw_only=True)
class SawHessian(Calibrated):
    """Keys and values rotated by Hadamard blocks and then by eigenvectors of the queries, then INT4 a token.

    Paper: Jia et al., SAW-INT4, arXiv 2604.19157, appendix A.3; equation 11 is taken as it stands, with eigenvectors of
    queries that are not rotated. Differs from the paper: scale and minimum in f16; calibrated on the package's texts.

    Attributes:
        block: order of the Hadamard blocks, at most that of a head; 0 for none.
        values: 1 rotates values likewise, 0 leaves them as they are.
        damping: α of equation 9.
    """

    about = "simulated-saw-hessian: SAW-INT4's Hessian-aware rotation (arXiv 2604.19157, A.3), INT4, no window."

    block: int = 128
    values: int = 1
    damping: float = 0.01

    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        """See `Calibrated.form`."""
        dim = captured[0].keys.shape[-1]
        turn = block_rotation(dim, self.block) @ hessian_rotation(captured, self.damping)
        values = partial(int4, rotation=turn if self.values else None)
        return LayerFormat(partial(int4, rotation=turn), values, BITS + 32 / dim, BITS)


@dataclass(frozen=True, kw_only=True)
class SawKMeans(Calibrated):
    """Tokens by the nearest of C centroids and INT4 of what is left; keys are rotated by Hadamard blocks for that.

    Paper: Jia et al., SAW-INT4, arXiv 2604.19157, appendix A.2. Differs from the paper: a codebook for each layer, KV
    head and side, which it leaves open and which is not counted; scale and minimum in f16; the package's texts.

    Attributes:
        centroids: C.
        block: order of the Hadamard blocks of keys, at most that of a head; 0 for none.
    """

    about = "simulated-saw-kmeans: SAW-INT4's k-means codes (arXiv 2604.19157, A.2), INT4 of residuals, no window."

    calibration: int = 20_000
    centroids: int = 256
    block: int = 128

    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        """See `Calibrated.form`."""
        sides = []
        for name in ("keys", "values"):
            x = torch.cat([getattr(one, name).cpu().float() for one in captured], 1)
            sides.append(torch.stack([kmeans(own, max(1, self.centroids)) for own in x]))
        dim = captured[0].keys.shape[-1]
        turn = block_rotation(dim, self.block) if self.block else None
        keys, values = (
            partial(residual, centres=sides[0], rotation=turn),
            partial(residual, centres=sides[1], rotation=None),
        )
        index = 0 if self.centroids <= 1 else 8 if self.centroids <= 256 else 16
        return LayerFormat(keys, values, BITS + (32 + index) / dim, BITS)
