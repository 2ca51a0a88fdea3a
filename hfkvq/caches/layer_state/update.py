"""New tokens of an update: what a layer takes, and padding among them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.quantize import F16_MAX

from ..base.recorded import is_recorded
from ..store import SIDES, KVStore, Padding


def as_stored(layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the dtype that a layer stores, where autocast gives them in others; else as they are.

    Autocast leaves keys in float32 after RoPE, and not values. An empty layer stores the dtype that both have, or that
    of autocast, in which attention is computed.
    """
    if keys.is_meta or not torch.is_autocast_enabled(keys.device.type):
        return keys, values
    if layer.store is not None and (layer.seen or is_recorded()):
        dtype = layer.dtype
    else:
        dtype = keys.dtype if keys.dtype == values.dtype else torch.get_autocast_dtype(keys.device.type)
    return keys.to(dtype), values.to(dtype)


def check_update(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Raises ValueError if a layer cannot take these tokens; see `KVLayer.update`."""
    like = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
    if not layer.seen or like != layer.accepted:
        _check_kind(layer, keys, values)
    layer.check_capacity(keys.shape[2])
    if layer.debug:
        _check_numbers(layer, keys, values)
    layer.accepted = like


def _check_numbers(layer: Any, keys: Tensor, values: Tensor) -> None:
    if not (keys.isfinite().all() and values.isfinite().all()):
        raise ValueError(
            "update: keys or values hold NaN or infinity; nothing was cached. Look for the layer that made them "
            "(torch.autograd.detect_anomaly, or fp16 overflow: try bfloat16)."
        )
    store = layer.scheme.layout(keys.shape[-1], values.shape[-1]).store
    for at, (x, block) in enumerate(((keys, store.rotate_keys), (values, store.rotate_values))):
        # Scales are float16, and so is what a rotation makes of float16.
        if all(formats[at].bits == 16 for formats in store.runs) and not (block and x.dtype == torch.float16):
            continue
        largest = float(kernels.hadamard(x.float(), block).abs().amax()) if x.numel() else 0.0
        if largest > F16_MAX:
            rotated = " once they are rotated" if block else ""
            raise ValueError(
                f"update: {SIDES[at]} are as large as {largest:.4g}{rotated}, but {layer.scheme.name} stores numbers "
                f"of up to {F16_MAX:g} only, and larger ones as less; nothing was cached. Use the scheme 'full' in "
                'this layer: layers={index: "full"}.'
            )


def _check_kind(layer: Any, keys: Tensor, values: Tensor) -> None:
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"update: got keys {tuple(keys.shape)} and values {tuple(values.shape)}, expected (batch, heads, "
            "tokens, dim) on both sides with the same batch, heads and tokens."
        )
    if not keys.shape[0]:
        raise ValueError("update: got a batch of 0 rows, allowed at least one.")
    if not keys.is_floating_point():
        raise ValueError(f"update: got keys of {keys.dtype}, allowed floating point.")
    if keys.dtype != values.dtype or keys.device != values.device:
        raise ValueError(
            f"update: keys are {keys.dtype} on {keys.device} but values {values.dtype} on {values.device}; "
            "they must agree."
        )
    # An empty layer takes anything: what it had allocated is for reuse, not a promise.
    if layer.store is None or not layer.seen:
        return
    *have, dtype, device = _kind_held(layer, layer.store)
    *got, new_dtype, new_device = _kind(keys, values)
    for name, a, b in zip(("batch size", "KV heads", "key dim", "value dim"), have, got, strict=True):
        if a != b:
            raise ValueError(
                f"update: got {name} {b}, but this cache was first used with {a}; use a new cache, or call "
                "reset() first (what it holds is kept until then)."
            )
    if (dtype, device) != (new_dtype, new_device):
        raise ValueError(
            f"update: got {new_dtype} on {new_device}, but this cache was first used with {dtype} on "
            f"{device}; use a new cache, or call reset() first."
        )


def _kind(keys: Tensor, values: Tensor) -> tuple[Any, ...]:
    return (*keys.shape[:2], keys.shape[-1], values.shape[-1], keys.dtype, keys.device)


def _kind_held(layer: Any, store: KVStore) -> tuple[Any, ...]:
    dims = store.dims
    return layer.batch_size, layer.heads, dims["keys"], dims["values"], layer.dtype, layer.device


def is_allocated_for(layer: Any, keys: Tensor, values: Tensor) -> bool:
    """True if a layer's store can take these tokens, which an empty one need not."""
    store = layer.store
    return store is not None and (bool(layer.seen) or _kind(keys, values) == _kind_held(layer, store))


class PaddingReader:
    """Finds the padding in attention masks, once per mask: all layers of a forward are given the same one."""

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int, int] | None = None
        self.found: Padding | None = None

    def read(self, mask: Tensor, seen: int, tokens: int, lengths: Tensor) -> Padding | None:
        """Padding among the newest ``tokens`` of ``seen`` columns, or None. Asks the device, once for each mask.

        Args:
            mask: (B or 1, heads or 1, Q or 1, L), True or nonzero where visible, or float and added to logits.
            lengths: i32 (B,), tokens that each row has stored before.
        """
        # Tensors of inference mode count no versions; nobody may change them in place either, but within that mode.
        key = (0 if mask.is_inference() else mask._version, seen, tokens)
        if self._mask is not None and self._mask() is mask and self._key == key:
            return self.found
        visible = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
        visible = visible[:, 0]
        if visible.shape[1] == tokens and tokens > 1:
            # A token that is no padding sees itself, whatever else the mask hides.
            valid = visible.diagonal(offset=seen - tokens, dim1=-2, dim2=-1)[:, :tokens]
        else:
            valid = visible[:, -1, seen - tokens : seen]
        valid = valid.to(lengths.device).expand(lengths.shape[0], -1)
        started = (lengths > 0)[:, None] | (valid.cumsum(1) > 0)
        lead = (~started).sum(1, dtype=torch.int32)
        holes = (started & ~valid).any().to(torch.int32).reshape(1)
        *amounts, has_holes = torch.cat([lead, holes]).tolist()
        found = None
        if has_holes or any(amounts):
            source = None
            if has_holes:
                column = torch.arange(tokens, device=valid.device).expand_as(valid)
                before = torch.where(valid, column, -1).cummax(1).values
                first = valid.to(torch.int8).argmax(1, keepdim=True)
                source = torch.where(valid.any(1, keepdim=True), torch.where(before >= 0, before, first), column)
            found = Padding(lead, frozenset(amounts), source)
        self._mask, self._key, self.found = weakref.ref(mask, self._forget), key, found
        return found

    def _forget(self, mask: weakref.ref[Tensor]) -> None:
        # The result is useless without the mask, and would only hold memory.
        if mask is self._mask:
            self._mask = self.found = None
