"""BitDecoding's kernels (github.com/DD-DuDa/BitDecoding): keys by channel of 128 tokens, values by token."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from evals.kernel_cases import Shape
from evals.other_kernels.peer import Peer, Prepared, check_multiple, imported

GROUP = 128
MODE = "k-channel"


def rounded(x: Tensor, bits: int, axis: int) -> Tensor:
    """(B, H, T, D) rounded to an asymmetric grid between the ends of each group of 128 along an axis, fp32."""
    groups = x.float().unflatten(axis, (-1, GROUP))
    least = groups.amin(axis + 1, keepdim=True)
    scale = (groups.amax(axis + 1, keepdim=True) - least) / (2**bits - 1)
    return (least + ((groups - least) / scale).round() * scale).flatten(axis, axis + 1)


class _BitDecoding(Peer):
    package = "bit_decode_cuda"
    remedy = "build github.com/DD-DuDa/BitDecoding for this torch and GPU"
    # There is no way back from its fragments, so it is held against plain rounding to the same grid.
    tolerance = 0.1
    bits: ClassVar[int]

    def load(self) -> None:
        self._pack, self._attend = imported(
            "bit_decode_cuda", f"kvcache_pack_i{self.bits}", f"fwd_kvcache_i{self.bits}"
        )

    def variants(self, shape: Shape) -> tuple[str, ...]:
        return ("fp16, groups of 128",)

    def prepare(self, shape: Shape, query: Tensor, keys: Tensor, values: Tensor, variant: str) -> Prepared:
        check_multiple(shape, 256, self.name)
        if shape.head_dim != GROUP:
            raise ValueError(f"head_dim: got {shape.head_dim}, allowed for {self.name}: {GROUP}.")
        batch, tokens, heads, dim = shape.batch, shape.context, shape.kv_heads, shape.head_dim
        per = 16 // self.bits

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=query.device)

        cache = (
            zeros(batch, tokens // per, heads, dim, dtype=torch.uint16),
            zeros(batch, tokens // GROUP, heads, dim, dtype=torch.float32),
            zeros(batch, tokens, heads, dim // per, dtype=torch.uint16),
            zeros(batch, dim // GROUP, heads, tokens, dtype=torch.float32),
        )
        flat = [x.half().transpose(1, 2).reshape(batch * tokens, heads, dim) for x in (keys, values)]
        ends = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * tokens
        self._pack(flat[0], *cache[:2], flat[1], *cache[2:], None, ends, tokens, MODE, GROUP)
        attend = partial(self._call, query[:, :, 0].half().unsqueeze(1).contiguous(), shape.scaling)
        return Prepared(cache, attend, sum(x.nbytes for x in cache), partial(self._exact, keys, values))

    def _call(self, query: Tensor, scaling: float, *cache: Tensor) -> Tensor:
        return self._attend(query, *cache, None, scaling, MODE, GROUP, False, -1, -1, 0.0, True, 0)

    def _exact(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return rounded(keys.half(), self.bits, 2), rounded(values.half(), self.bits, 3)


class BitDecoding4(_BitDecoding):
    """4-bit codes."""

    name = "bitdecoding-4"
    code_bits = (4, 4)
    bits = 4


class BitDecoding2(_BitDecoding):
    """2-bit codes."""

    name = "bitdecoding-2"
    code_bits = (2, 2)
    bits = 2
