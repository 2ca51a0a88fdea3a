"""KIVI's own kernels (github.com/jy-yuan/KIVI): keys by channel and values by token, groups of 32, the newest whole."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from evals.kernel_cases import Shape
from evals.other_kernels.peer import Peer, Prepared, imported

GROUP = 32
RESIDUAL = 128


def pack(x: Tensor, bits: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds groups of 32 along an axis of (N, A, B) to an asymmetric grid, and packs codes along it into 32-bit words.

    Returns:
        Words (32 / bits of ``axis`` in one, the first in the lowest bits), scales and minima, both fp16.
    """
    per = 32 // bits
    groups = x.unflatten(axis, (-1, GROUP))
    least = groups.amin(axis + 1)
    scale = (groups.amax(axis + 1) - least) / (2**bits - 1)
    codes = ((groups - least.unsqueeze(axis + 1)) / scale.unsqueeze(axis + 1)).clamp(0, 2**bits - 1).round().long()
    codes = codes.flatten(axis, axis + 1).unflatten(axis, (-1, per)).movedim(axis + 1, -1)
    words = (codes << (bits * torch.arange(per, device=x.device))).sum(-1)
    # The highest bit is the sign of what holds the word.
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.int().contiguous(), scale.contiguous(), least.contiguous()


def unpacked(words: Tensor, scale: Tensor, least: Tensor, bits: int, axis: int) -> Tensor:
    """Values that `pack` stands for, fp32."""
    per = 32 // bits
    codes = (
        words.unsqueeze(axis + 1) >> (bits * torch.arange(per, device=words.device)).view(-1, *[1] * (2 - axis))
    ) & (2**bits - 1)
    codes = codes.flatten(axis, axis + 1).float()
    return codes * scale.float().repeat_interleave(GROUP, axis) + least.float().repeat_interleave(GROUP, axis)


class _Kivi(Peer):
    package = "kivi_gemv"
    remedy = "build github.com/jy-yuan/KIVI's quant folder for this torch"
    # In fp16, logits and probabilities too.
    tolerance = 0.02
    # Its kernels go to CUDA's default stream, which cannot be captured.
    graph = False
    bits: ClassVar[int]

    def load(self) -> None:
        (self._product,) = imported("kivi_gemv", "gemv_forward_cuda_outer_dim")

    def variants(self, shape: Shape) -> tuple[str, ...]:
        return ("fp16; its words as its kernel reads them, without the copy that its Python makes each call",)

    def prepare(self, shape: Shape, query: Tensor, keys: Tensor, values: Tensor, variant: str) -> Prepared:
        if shape.context % RESIDUAL or shape.context <= RESIDUAL:
            raise ValueError(f"context: got {shape.context}, allowed for {self.name}: multiples of 128 from 256 on.")
        keys, values = keys.half(), values.half()
        # Words (N, tokens / per, D) of keys, and (N, D / per, tokens) of values.
        of_keys = pack(keys.flatten(0, 1), self.bits, 1)
        of_values = pack(values[:, :, :-RESIDUAL].flatten(0, 1).mT, self.bits, 1)
        cache = (*of_keys, *of_values, values[:, :, -RESIDUAL:].contiguous())
        attend = partial(self._call, shape, query.half().flatten(0, 1).contiguous())
        return Prepared(cache, attend, sum(x.nbytes for x in cache), partial(self._exact, shape, cache))

    def _call(
        self,
        shape: Shape,
        query: Tensor,
        keys: Tensor,
        key_scale: Tensor,
        key_least: Tensor,
        values: Tensor,
        value_scale: Tensor,
        value_least: Tensor,
        newest: Tensor,
    ) -> Tensor:
        options = (self.bits, GROUP, shape.heads, shape.kv_heads)
        logits = self._product(query, keys, key_scale, key_least, *options) * shape.scaling
        shares = torch.softmax(logits, -1, dtype=torch.float32).half()
        packed, whole = shares[..., :-RESIDUAL].contiguous(), shares[..., -RESIDUAL:]
        out = self._product(packed, values, value_scale, value_least, *options)
        own = whole.reshape(shape.batch, shape.kv_heads, -1, RESIDUAL) @ newest
        return out.view(own.shape) + own

    def _exact(self, shape: Shape, cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        rows = (shape.batch, shape.kv_heads)
        keys = unpacked(cache[0], cache[1], cache[2], self.bits, 1).unflatten(0, rows)
        values = unpacked(cache[3], cache[4], cache[5], self.bits, 1).mT.unflatten(0, rows)
        return keys, torch.cat([values, cache[6].float()], 2)


class Kivi2(_Kivi):
    """2-bit codes."""

    name = "official-kivi-2"
    code_bits = (2, 2)
    bits = 2


class Kivi4(_Kivi):
    """4-bit codes."""

    name = "official-kivi-4"
    code_bits = (4, 4)
    bits = 4
