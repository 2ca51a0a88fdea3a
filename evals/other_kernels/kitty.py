"""Kitty's own kernels (github.com/Summer-Summer/Kitty): 2-bit pages of 128 tokens, strong key channels 4 bits."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from evals.kernel_cases import Shape
from evals.other_kernels.peer import Peer, Prepared, imported

PAGE = 128
SINK = 32
LOCAL = 128
"""Newest values that stay whole beside those that wait for a page, as its cache keeps them."""

PAGES = ("KeyCache", "KeyCache_metadata", "ValueCache", "ValueCache_metadata")
WINDOWS = ("Sink_Buffer_K", "Sink_Buffer_V", "Q_Buffer_K", "Q_Buffer_V", "Local_Buffer_V")


def two_bits(packed: Tensor) -> Tensor:
    """Codes (..., 4 N) of bytes (..., N), the first in the lowest bits."""
    return ((packed[..., None] >> torch.arange(0, 8, 2, device=packed.device)) & 3).flatten(-2)


class _Kitty(Peer):
    package = "kitty"
    remedy = "clone github.com/Summer-Summer/Kitty and put its src on PYTHONPATH (its package needs Transformers 4.53)"
    code_bits = (2, 2)
    # In fp16, logits and probabilities too.
    tolerance = 0.02
    boosted: ClassVar[int]

    def load(self) -> None:
        (self._layer,) = imported("kitty.kvcache.utils_kv_per_layer", "KVCache_Layer")
        (self._attend,) = imported("kitty.kvcache.kernels.kitty_attention", "kitty_attention_forward")
        self._pack = imported("kitty.kvcache.kernels.kitty_quant_pack", "quantize_pack_k", "quantize_pack_v")

    def variants(self, shape: Shape) -> tuple[str, ...]:
        return ("fp16, pages of 128",)

    def prepare(self, shape: Shape, query: Tensor, keys: Tensor, values: Tensor, variant: str) -> Prepared:
        tokens, heads, dim = shape.context, shape.kv_heads, shape.head_dim
        if tokens < SINK + LOCAL:
            raise ValueError(f"context: got {tokens}, allowed for {self.name}: {SINK + LOCAL} or more.")
        layer = self._layer(shape.batch, tokens, heads, dim, self.boosted, 2, 4, PAGE, SINK)
        keys, values = keys.half(), values.half()
        layer.Sink_Count = SINK
        layer.Sink_Buffer_K.copy_(keys[:, :, :SINK])
        layer.Sink_Buffer_V.copy_(values[:, :, :SINK])
        layer.PageCount_K, layer.Q_Buffer_Count_K = divmod(tokens - SINK, PAGE)
        layer.PageCount_V, layer.Q_Buffer_Count_V = divmod(tokens - SINK - LOCAL, PAGE)
        layer.Q_Buffer_K[:, :, : layer.Q_Buffer_Count_K] = keys[:, :, tokens - layer.Q_Buffer_Count_K :]
        waiting = values[:, :, SINK + PAGE * layer.PageCount_V : tokens - LOCAL]
        layer.Q_Buffer_V[:, :, : layer.Q_Buffer_Count_V] = waiting
        layer.Local_Count_V = LOCAL
        layer.Local_Buffer_V.copy_(values[:, :, tokens - LOCAL :])
        pack_keys, pack_values = self._pack
        for row in range(shape.batch):
            # All rows at once would need several times their size.
            one = slice(row, row + 1)
            pack_keys(
                keys[one],
                SINK,
                layer.PageCount_K,
                layer.PageTable_K[one],
                0,
                layer.KeyCache,
                layer.KeyCache_metadata,
                PAGE,
                self.boosted,
            )
            pack_values(
                values[one],
                SINK,
                layer.PageCount_V,
                layer.PageTable_V[one],
                0,
                layer.ValueCache,
                layer.ValueCache_metadata,
                PAGE,
            )
        cache = tuple(getattr(layer, name) for name in (*PAGES, *WINDOWS))
        module = SimpleNamespace(num_attention_heads=shape.heads, num_key_value_heads=heads)
        attend = partial(self._call, module, query.half().contiguous(), layer, shape.scaling)
        pages = self.bytes_of_pages(shape, layer.PageCount_K, layer.PageCount_V)
        whole = 2 * SINK + layer.Q_Buffer_Count_K + layer.Q_Buffer_Count_V + LOCAL
        read = pages + 2 * shape.batch * heads * dim * whole
        return Prepared(cache, attend, read, partial(self._exact, shape, layer, keys, values))

    def bytes_of_pages(self, shape: Shape, key_pages: int, value_pages: int) -> int:
        """Tensors of whole pages: codes, channels' places, scales and zeros."""
        dim = shape.head_dim
        of_keys = PAGE // 4 * (dim + self.boosted) + dim + 4 * dim
        of_values = PAGE * dim // 4 + 4 * PAGE
        return shape.batch * shape.kv_heads * (key_pages * of_keys + value_pages * of_values)

    def _call(self, module: Any, query: Tensor, layer: Any, scaling: float, *cache: Tensor) -> Tensor:
        own = copy.copy(layer)
        for name, tensor in zip((*PAGES, *WINDOWS), cache, strict=True):
            setattr(own, name, tensor)
        return self._attend(module, query, own, scaling)[0]

    def _exact(self, shape: Shape, layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, dim = shape.batch, shape.kv_heads, shape.head_dim
        keys, values = keys.float(), values.float()
        width = PAGE // 4
        head = layer.KeyCache.view(batch, -1, heads, width * (dim + self.boosted) + dim)[:, : layer.PageCount_K]
        low = two_bits(head[..., : width * dim].unflatten(-1, (dim, width)))
        high = two_bits(head[..., width * dim : -dim].unflatten(-1, (self.boosted, width)))
        place = head[..., -dim:].long()
        chosen = high.gather(-2, place.clamp(max=self.boosted - 1)[..., None].expand(*place.shape, PAGE))
        codes = low + 4 * torch.where(place[..., None] < self.boosted, chosen, 0)
        meta = layer.KeyCache_metadata.view(batch, -1, heads, dim, 2)[:, : layer.PageCount_K].float()
        found = codes * meta[..., :1] + meta[..., 1:]
        end = SINK + PAGE * layer.PageCount_K
        keys[:, :, SINK:end] = found.permute(0, 2, 1, 4, 3).reshape(batch, heads, -1, dim)
        head = layer.ValueCache.view(batch, -1, heads, PAGE, dim // 4)[:, : layer.PageCount_V]
        meta = layer.ValueCache_metadata.view(batch, -1, heads, PAGE, 2)[:, : layer.PageCount_V].float()
        found = two_bits(head) * meta[..., :1] + meta[..., 1:]
        end = SINK + PAGE * layer.PageCount_V
        values[:, :, SINK:end] = found.transpose(1, 2).reshape(batch, heads, -1, dim)
        return keys, values


class Kitty(_Kitty):
    """16 of 128 key channels raised."""

    name = "official-kitty"
    boosted = 16


class KittyPro(_Kitty):
    """32 of 128 key channels raised."""

    name = "official-kitty-pro"
    boosted = 32
