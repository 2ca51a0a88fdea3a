"""The handle that `update` returns: a tensor in shape only; attention knows it, anything else dequantizes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.pages import Side

from ..store import MAX_STEP

# Reading these does not touch the data.
_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "is_cuda",
                 "is_sparse", "is_quantized", "is_meta", "is_mps", "is_xpu", "is_nested", "names", "itemsize", "nbytes")
    if hasattr(getattr(Tensor, name, None), "__get__")
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.get_device, Tensor.__len__,
}  # fmt: skip


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "hfkvq: no gradient flows through compressed keys and values, so k_proj and v_proj would get none. Train "
            "without past_key_values (use_cache=False) or with DynamicCache, and run what needs no gradient under "
            "torch.no_grad()."
        )


def refuse_gradient(layer: Any, x: Tensor) -> Tensor:
    """Guard of a layer's keys, values and attention output: backward through them raises.

    Only where the keys or values that came last would have got a gradient: a forward alone is nobody's harm.
    """
    if not layer.differentiated or not torch.is_grad_enabled():
        return x
    return _NoGradient.apply(x, torch.zeros((), device=x.device, requires_grad=True, dtype=torch.float32))


class LazyKV(torch.Tensor):
    """Stands for a layer's keys or values: (B, H, T, D) in logical shape, no storage.

    The "hfkvq" attention, and PyTorch's `scaled_dot_product_attention`, attend to the pages behind it. ``repeat_kv``
    and no-op conversions give another handle. Any other function gets the dequantized tensor: right, only slower.

    A handle is good until the layer changes: the next update, a crop, a reorder or a reset.

    Attributes:
        handlers: functions that need no data; a handler that declines returns NotImplemented.
        side: "keys" or "values".
        repeats: query heads per KV head that the shape pretends to.
        form: "bhsd", or a stage of ``repeat_kv``: "bh1sd", "bhnsd".
    """

    handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    _layer: Any
    _edition: int
    side: Side
    repeats: int
    form: str
    # Dequantized once for all views of an update's keys, or values.
    _made: list[Tensor]

    # ``x += y`` binds x anew, to another tensor.
    __iadd__ = Tensor.__add__  # type: ignore[assignment]
    __isub__ = Tensor.__sub__  # type: ignore[assignment]
    __imul__ = Tensor.__mul__  # type: ignore[assignment]
    __itruediv__ = Tensor.__truediv__  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        layer: Any,
        side: Side,
        shape: tuple[int, ...],
        repeats: int = 1,
        form: str = "bhsd",
    ) -> LazyKV:
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=layer.device)
        handle._layer, handle._edition, handle.side = layer, layer.edition, side
        handle.repeats, handle.form, handle._made = repeats, form, []
        return handle

    @property
    def hfkvq_layer(self) -> Any:
        """The cache layer; a RuntimeError if it has changed since: what it holds now may have another shape."""
        if self._layer.edition != self._edition:
            raise RuntimeError(
                "These keys or values are from an earlier update, and the cache has changed since; take a copy "
                "(x.clone()) of what is needed later."
            )
        return self._layer

    def __repr__(self) -> str:  # type: ignore[override]
        """Side and logical shape; never the data."""
        return f"LazyKV({self.side}, {tuple(self.shape)})"

    def like(self, form: str, shape: tuple[int, ...], repeats: int | None = None) -> LazyKV:
        """Another view of the same data."""
        view = LazyKV(self.hfkvq_layer, self.side, shape, self.repeats if repeats is None else repeats, form)
        view._made = self._made
        return view

    def _dequantized(self, layer: Any) -> Tensor:
        """(B, H, T, D); of a step made once, as some attention asks for it twice."""
        if layer.defer or layer.staged_length > MAX_STEP or layer.staged_length == layer.seen:
            return layer.dense(self.side)
        if not self._made:
            self._made.append(layer.dense(self.side))
        return self._made[0]

    def materialize(self) -> Tensor:
        """The dequantized tensor, in this handle's shape."""
        layer = self.hfkvq_layer
        if layer.evicted:
            # Zeros in their place would draw attention.
            raise RuntimeError(
                f"{layer.scheme.name}: tokens have been evicted, so only the 'hfkvq' attention (attach=True) "
                "and sdpa can attend to this cache."
            )
        dense = refuse_gradient(layer, self._dequantized(layer))
        if dense.shape[2] != self.shape[-2]:
            raise RuntimeError(
                "These keys or values have fallen out of the layer's window since they were attended to; take a copy "
                "(x.clone()) of what is needed later."
            )
        if self.form == "bh1sd":
            return dense[:, :, None]
        if self.repeats != 1 or self.form == "bhnsd":
            batch, heads, length, dim = dense.shape
            dense = dense[:, :, None].expand(batch, heads, self.repeats, length, dim)
            dense = dense if self.form == "bhnsd" else dense.reshape(batch, heads * self.repeats, length, dim)
        return dense

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata, then what has a handler, then compute on touch."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = cls.handlers.get(func)
        # Another tensor may be asked to be like a handle.
        if handler is not None and (handler is _attend or (args and isinstance(args[0], LazyKV))):
            try:
                result = handler(*args, **kwargs)
            except TypeError as error:
                # From inside the handler, or does it not know arguments of these names?
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                result = NotImplemented
            if result is not NotImplemented:
                return result
        if _writes(func, args, kwargs):
            raise _refuse_write(func)
        return func(*tree_map(dense_of, args), **tree_map(dense_of, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached from C++ (custom attention kernels, scripted functions): compute."""
        if func._schema.is_mutable:
            for own, x in zip(func._schema.arguments, args, strict=False):
                if own.alias_info is not None and own.alias_info.is_write and isinstance(x, LazyKV):
                    raise _refuse_write(func)
        return func(*tree_map(dense_of, args), **tree_map(dense_of, kwargs or {}))


def dense_of(x: Any) -> Any:
    """The dequantized tensor of a handle; anything else as it is."""
    return x.materialize() if isinstance(x, LazyKV) else x


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """True if a function would write to a handle."""
    name = getattr(func, "__name__", "")
    writes = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
    if (writes or kwargs.get("inplace") is True) and args and isinstance(args[0], LazyKV):
        return True
    return isinstance(kwargs.get("out"), LazyKV)


def _refuse_write(func: Any) -> RuntimeError:
    return RuntimeError(
        f"{func.__name__}: cached keys and values cannot be changed in place, the change would be lost; work on a copy "
        "(x.clone())."
    )


def layer_of(key: Any, value: Any) -> Any:
    """The layer whose keys and values these are handles of, in the shape of its own; None of anything else."""
    if not isinstance(key, LazyKV) or not isinstance(value, LazyKV):
        return None
    layer, edition = key._layer, key._edition
    # Stale handles raise below; or keys and values are of different layers.
    if (
        layer.edition != edition or value._layer is not layer or value._edition != edition
    ) and key.hfkvq_layer is not value.hfkvq_layer:
        return None
    return layer if key.form == value.form == "bhsd" else None


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)


def _getitem(handle: LazyKV, index: Any) -> Any:
    # repeat_kv: x[:, :, None, :, :]
    whole, plain = slice(None), isinstance(index, tuple) and all(i is None or isinstance(i, slice) for i in index)
    if not plain or index != (whole, whole, None, whole, whole) or handle.form != "bhsd" or handle.repeats != 1:
        return NotImplemented
    return handle.like("bh1sd", (*handle.shape[:2], 1, *handle.shape[2:]))


def _expand(handle: LazyKV, *shape: Any) -> Any:
    sizes = _sizes(shape)
    if handle.form != "bh1sd" or len(sizes) != 5:
        return NotImplemented
    full = tuple(own if asked == -1 else asked for own, asked in zip(handle.shape, sizes, strict=True))
    if full[:2] + full[3:] != tuple(handle.shape[:2] + handle.shape[3:]):
        return NotImplemented
    return handle.like("bhnsd", full, full[2])


def _reshape(handle: LazyKV, *shape: Any) -> Any:
    sizes = _sizes(shape)
    if handle.form != "bhnsd" or sizes != (handle.shape[0], handle.shape[1] * handle.shape[2], *handle.shape[3:]):
        return NotImplemented
    return handle.like("bhsd", sizes)


def _to(handle: LazyKV, *args: Any, **kwargs: Any) -> Any:
    layer = handle._layer
    for x in (*args, *kwargs.values()):
        device = torch.device(x) if isinstance(x, (str, torch.device)) else layer.device
        if isinstance(x, Tensor) or (isinstance(x, torch.dtype) and x != layer.dtype) or device != layer.device:
            return NotImplemented
    return handle


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
    if dropout_p:
        return NotImplemented
    query = query.to(layer.dtype)
    queries, columns = query.shape[2], key.shape[2]
    mask = attn_mask
    while mask is not None and mask.dim() < 4:
        mask = mask[None]
    # A query of one row per KV head group carries heads where tokens are expected (Transformers packs them so).
    packed = query.shape[1] == layer.heads and queries > 1 and layer.staged_length == 1
    if mask is None and (packed or (queries > 1 and not (is_causal and queries == columns))):
        # The mask says in full what PyTorch would do; the cache's own rule (newest queries, causal) differs.
        mask = torch.ones(1, 1, queries, columns, dtype=torch.bool, device=query.device)
        mask = mask.tril() if is_causal and not packed else mask
    arguments = AttentionArguments(query.shape[-1] ** -0.5 if scale is None else scale, mask)

    def dense() -> Tensor:
        keys, values = key.materialize(), value.materialize()
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return layer.forward(query, arguments, dense, mask)


LazyKV.handlers = {
    Tensor.__getitem__: _getitem,
    Tensor.expand: _expand,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.view: _reshape,
    Tensor.float: lambda handle: _to(handle, torch.float32),
    Tensor.contiguous: lambda handle, **_: handle,
    Tensor.detach: lambda handle: handle,
    Tensor.to: _to,
    F.scaled_dot_product_attention: _attend,
}
