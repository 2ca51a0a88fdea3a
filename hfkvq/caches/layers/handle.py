"""The handle that `update` returns: a tensor in shape only; attention knows it, anything else dequantizes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.pages import Side

from ..store import MAX_STEP
from .base import LayerBase
from .forward import attend
from .gradient import refuse_gradient
from .lazy import LazyTensor
from .steps import StepKV


class LazyKV(LazyTensor):
    """Stands for a layer's keys or values: (B, H, T, D) in logical shape, no storage.

    The "hfkvq" attention, and PyTorch's `scaled_dot_product_attention`, attend to the pages behind it. ``repeat_kv``
    and no-op conversions give another handle; where a layer `LayerBase.follows` the model's own attention, other views
    and dtypes do so, too. Any other function gets the dequantized tensor: right, only slower.

    A handle is good until the layer changes: the next update, a crop, a reorder or a reset.

    Attributes:
        side: "keys" or "values".
        repeats: query heads per KV head that the shape pretends to.
        form: "bhsd", or "tiled", or a stage of ``repeat_kv``: "bh1sd", "bhnsd"; with batch and heads in one, "nsd";
            transposed, "bhds" or "nds".
    """

    _layer: LayerBase
    _edition: int
    side: Side
    repeats: int
    form: str
    # Of a recorded step, in which there is nothing to dequantize.
    step: StepKV | None
    # What has been dequantized of all views of an update's keys, or values.
    _made: list[Tensor]

    @staticmethod
    def __new__(
        cls,
        layer: LayerBase,
        side: Side,
        repeats: int = 1,
        form: str = "bhsd",
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> LazyKV:
        shape = layer.logical_shape(side) if shape is None else shape
        dtype = dtype or layer.dtype
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=layer.device)
        handle.sizes, handle.kind = shape, dtype
        handle._layer, handle._edition, handle.side = layer, layer.edition, side
        handle.repeats, handle.form, handle.step, handle._made = repeats, form, None, []
        return handle

    @property
    def hfkvq_layer(self) -> LayerBase:
        """The cache layer.

        Raises:
            RuntimeError: the layer has changed since; it would show what it holds now in the shape of then.
        """
        if self._layer.edition != self._edition:
            raise RuntimeError(
                "These keys or values are from an earlier update, and the cache has changed since; take a copy "
                "(x.clone()) of what is needed later."
            )
        return self._layer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything happens in ``__new__``."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Side and logical shape; never the data."""
        return f"LazyKV({self.side}, {tuple(self.shape)})"

    def like(
        self, form: str, shape: tuple[int, ...], repeats: int | None = None, dtype: torch.dtype | None = None
    ) -> LazyKV:
        """Another view of the same data."""
        repeats = self.repeats if repeats is None else repeats
        view = LazyKV(self.hfkvq_layer, self.side, repeats, form, shape, dtype or self.kind)
        view.step, view._made = self.step, self._made
        return view

    def _dequantized(self, layer: LayerBase) -> Tensor:
        """(B, H, T, D); of a step made once, as some attention asks for it twice."""
        if self.step is not None:
            raise RuntimeError("A recorded step cannot dequantize: the model's own attention could not be followed.")
        if layer.defer or layer.staged_length > MAX_STEP or layer.staged_length == layer.seen:
            return layer.dense(self.side)
        if not self._made:
            self._made.append(layer.dense(self.side))
        return self._made[0]

    @property
    def tiles(self) -> int:
        """How many times the heads come, one after another, and not each of them in a row."""
        return self.repeats if self.form == "tiled" else 1

    def materialize(self) -> Tensor:
        """The dequantized tensor, in this handle's shape."""
        layer = self.hfkvq_layer
        layer.check_complete()
        dense = refuse_gradient(layer, self._dequantized(layer))
        transposed = self.form in ("bhds", "nds")
        if dense.shape[2] != self.shape[-1 if transposed else -2]:
            raise RuntimeError(
                "These keys or values have fallen out of the layer's window since they were attended to; take a copy "
                "(x.clone()) of what is needed later."
            )
        if self.form == "bh1sd":
            return dense[:, :, None].to(self.kind)
        if self.form == "tiled":
            return dense.repeat(1, self.repeats, 1, 1).to(self.kind)
        if self.repeats != 1 or self.form == "bhnsd":
            batch, heads, length, dim = dense.shape
            dense = dense[:, :, None].expand(batch, heads, self.repeats, length, dim)
            dense = dense if self.form == "bhnsd" else dense.reshape(batch, heads * self.repeats, length, dim)
        if self.form in ("nsd", "nds"):
            dense = dense.flatten(0, 1)
        return (dense.transpose(-1, -2) if transposed else dense).to(self.kind)


def handles(layer: LayerBase, batch: int, heads: int, seen: int, key_dim: int, value_dim: int) -> tuple[LazyKV, LazyKV]:
    """Both handles of a layer that has seen so many tokens: what its update returns."""
    keys = LazyKV(layer, "keys", shape=(batch, heads, seen, key_dim))
    return keys, LazyKV(layer, "values", shape=(batch, heads, seen, value_dim))


def layer_of(key: Any, value: Any) -> LayerBase | None:
    """The layer whose keys and values these are handles of, in the shape of its own; None of anything else.

    Raises:
        RuntimeError: see `LazyKV.hfkvq_layer`.
    """
    if not isinstance(key, LazyKV) or not isinstance(value, LazyKV):
        return None
    layer, edition = key._layer, key._edition
    # Of the past, which raises, or of two layers.
    if (
        layer.edition != edition or value._layer is not layer or value._edition != edition
    ) and key.hfkvq_layer is not value.hfkvq_layer:
        return None
    same = key.form == value.form and (key.form == "bhsd" or (key.form == "tiled" and key.repeats == value.repeats))
    return layer if same else None


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)


def _getitem(handle: Any, index: Any) -> Any:
    # repeat_kv: x[:, :, None, :, :]
    if not isinstance(handle, LazyKV) or handle.form != "bhsd" or handle.repeats != 1:
        return NotImplemented
    whole = slice(None)
    if not isinstance(index, tuple) or len(index) != 5:
        return NotImplemented
    if index[2] is not None or any(not isinstance(i, slice) or i != whole for i in (*index[:2], *index[3:])):
        return NotImplemented
    batch, heads, length, dim = handle.shape
    return handle.like("bh1sd", (batch, heads, 1, length, dim))


def _expand(handle: Any, *shape: Any) -> Any:
    sizes = _sizes(shape)
    if not isinstance(handle, LazyKV) or handle.form != "bh1sd" or len(sizes) != 5:
        return NotImplemented
    full = tuple(own if asked == -1 else asked for own, asked in zip(handle.shape, sizes, strict=True))
    if full[:2] + full[3:] != tuple(handle.shape[:2] + handle.shape[3:]):
        return NotImplemented
    return handle.like("bhnsd", full, full[2])


def _reshape(handle: Any, *shape: Any) -> Any:
    sizes = _sizes(shape)
    if isinstance(handle, LazyKV) and handle.form == "bhsd" and len(sizes) == 3 and handle._layer.follows:
        batch, heads, length, dim = handle.sizes
        own = batch * heads, length, dim
        fits = all(asked in (-1, size) for asked, size in zip(sizes, own, strict=True)) and sizes.count(-1) < 2
        return handle.like("nsd", own) if fits else NotImplemented
    if not isinstance(handle, LazyKV) or handle.form != "bhnsd" or len(sizes) != 4:
        return NotImplemented
    batch, heads, repeats, length, dim = handle.shape
    return handle.like("bhsd", sizes) if sizes == (batch, heads * repeats, length, dim) else NotImplemented


def _repeat(handle: Any, *sizes: Any) -> Any:
    """Heads as often, one after another; `repeat_kv` has them in a row."""
    sizes = _sizes(sizes)
    if not isinstance(handle, LazyKV) or handle.form != "bhsd" or handle.repeats != 1 or len(sizes) != 4:
        return NotImplemented
    batch, heads, length, dim = handle.shape
    if sizes[0] != 1 or tuple(sizes[2:]) != (1, 1):
        return NotImplemented
    return handle.like("tiled", (batch, heads * sizes[1], length, dim), sizes[1])


_TURNED = {"bhsd": "bhds", "bhds": "bhsd", "nsd": "nds", "nds": "nsd"}


def _transpose(handle: Any, first: int, second: int) -> Any:
    turned = _TURNED.get(handle.form) if isinstance(handle, LazyKV) and handle._layer.follows else None
    dims = len(handle.sizes)
    if turned is None or {first % dims, second % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    *outer, rows, columns = handle.sizes
    return handle.like(turned, (*outer, columns, rows))


def _same(handle: Any, *args: Any, **kwargs: Any) -> Any:
    return handle


def _to(handle: Any, *args: Any, **kwargs: Any) -> Any:
    layer, dtype = handle._layer, handle.kind
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.dtype) and x != dtype:
            if not layer.follows or not x.is_floating_point:
                return NotImplemented
            dtype = x
        if isinstance(x, (str, torch.device)) and torch.device(x) != layer.device:
            return NotImplemented
        if isinstance(x, Tensor):
            return NotImplemented
    return handle if dtype == handle.kind else handle.like(handle.form, handle.sizes, dtype=dtype)


def _float(handle: Any) -> Any:
    return _to(handle, torch.float32)


def _attend(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """PyTorch's own attention, called on handles by a model that was not switched to "hfkvq"."""
    if not isinstance(key, LazyKV) or not isinstance(value, LazyKV) or isinstance(query, LazyKV):
        return NotImplemented
    layer = key.hfkvq_layer
    if value.hfkvq_layer is not layer or key.form != "bhsd" or value.form != "bhsd" or key.side == value.side:
        return NotImplemented
    if dropout_p or key.kind != layer.dtype or value.kind != layer.dtype:
        return NotImplemented
    queries, columns = query.shape[2], key.shape[2]
    mask = attn_mask
    while mask is not None and mask.dim() < 4:
        mask = mask[None]
    # A query of one row per KV head group carries heads where tokens are expected (Transformers packs them so).
    packed = query.shape[1] == layer.heads and queries > 1 and layer.staged_length == 1
    if mask is None and (packed or (queries > 1 and not (is_causal and queries == columns))):
        # Not the cache's own rule (newest queries, causal): say in full what PyTorch would do.
        mask = torch.ones(1, 1, queries, columns, dtype=torch.bool, device=query.device)
        mask = mask.tril() if is_causal and not packed else mask
    arguments = AttentionArguments(query.shape[-1] ** -0.5 if scale is None else scale, mask)

    def dense() -> Tensor:
        keys, values = key.materialize(), value.materialize()
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return attend(layer, query, arguments, dense, mask)


LazyKV.handlers = {
    Tensor.__getitem__: _getitem,
    Tensor.expand: _expand,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.view: _reshape,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.float: _float,
    Tensor.repeat: _repeat,
    Tensor.contiguous: _same,
    Tensor.detach: _same,
    Tensor.to: _to,
    F.scaled_dot_product_attention: _attend,
}
