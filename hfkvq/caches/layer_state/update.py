"""From an update to the store: new tokens are checked, wait for their attention, join the store, and are sealed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.decode import sealed_count
from hfkvq.kernels.quantize import F16_MAX

from ..store import MAX_STEP, SIDES, KVStore
from .base import LayerBase
from .query_statistics import QueryStatistics
from .tags import TokenTags


def check_update(layer: LayerBase, keys: Tensor, values: Tensor) -> None:
    """Raises ValueError if a layer cannot take these tokens; see `KVLayer.update`."""
    like = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
    if not layer.seen or like != layer.accepted:
        _check_kind(layer, keys, values)
    layer.check_capacity(keys.shape[2])
    if layer.debug:
        _check_numbers(layer, keys, values)
    layer.accepted = like


def _check_numbers(layer: LayerBase, keys: Tensor, values: Tensor) -> None:
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


def _check_kind(layer: LayerBase, keys: Tensor, values: Tensor) -> None:
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


def _kind_held(layer: LayerBase, store: KVStore) -> tuple[Any, ...]:
    dims = store.dims
    return layer.batch_size, layer.heads, dims["keys"], dims["values"], layer.dtype, layer.device


def is_allocated_for(layer: LayerBase, keys: Tensor, values: Tensor) -> bool:
    """True if a layer's store can take these tokens, which an empty one need not."""
    store = layer.store
    return store is not None and (bool(layer.seen) or _kind(keys, values) == _kind_held(layer, store))


def push_staged(layer: LayerBase, mask: Tensor | None, queries: int) -> bool:
    """Lets staged tokens of a step join the store before attention; see `KVLayer.begin`.

    Args:
        layer: whose they are.
        mask: shows where padding is.
        queries: number of query rows.
    """
    store = layer.held()
    if layer.staged is None:
        return queries <= MAX_STEP
    keys, values = layer.staged
    tokens = keys.shape[2]
    # With shared keys and values, a later layer may come without a mask: what was found stays.
    if mask is not None and (tokens > 1 or any(state.length == 0 for state in store.states)):
        layer.padding = layer.reader.read(mask, layer.columns, tokens, store.row_lengths)
    if layer.hold:
        store.reserve_tail(layer.hold)
    holes = layer.padding is not None and layer.padding.source is not None
    if store.longest == 0 or not store.fits(tokens) or holes:
        return False
    store.push(keys, values, layer.padding)
    layer.staged, layer.uncommitted = None, True
    return True


def store_tokens(
    layer: LayerBase, queries: QueryStatistics | None, tags: TokenTags | None, commit: bool = True
) -> None:
    """Lets staged tokens join the store as a prompt does; or seals what is due of those that have joined it.

    Args:
        layer: whose they are.
        queries: of the layer.
        tags: of the layer.
        commit: whether what is due of a step is sealed.
    """
    if layer.staged is not None:
        store, before = layer.held(), _sealed_keys(layer, queries)
        mean = None if queries is None else queries.mean()
        found = None if tags is None else tags.of_columns(layer)
        store.extend(*layer.staged, layer.padding, layer.hold, mean, found)
        # Staged tokens are dropped here and no earlier: if memory runs out, they are still staged.
        layer.staged = layer.padding = None
        if layer.window:
            # Tokens that only these queries saw are gone.
            layer.newest = 0
        if before is not None and queries is not None:
            queries.forget_sealed(store, before)
    elif layer.uncommitted and commit:
        seal_due(layer, queries, tags)
    layer.uncommitted = layer.uncommitted and not commit


def seal_due(layer: LayerBase, queries: QueryStatistics | None, tags: TokenTags | None) -> None:
    """Seals what is due; asks the device nothing where nothing is."""
    store, hold = layer.held(), layer.hold
    if tags is None and (queries is None or queries.sums is None):
        store.commit(hold)
    elif store.is_due(hold):
        before = _sealed_keys(layer, queries)
        found = tags.of_columns(layer) if tags is not None and tags.may_be_due(layer) else None
        store.commit(hold, None if queries is None else queries.mean(), found)
        if before is not None and queries is not None:
            queries.forget_sealed(store, before)
    layer.padding, layer.uncommitted = None, False


def _sealed_keys(layer: LayerBase, queries: QueryStatistics | None) -> Tensor | None:
    """i32 (B,): sealed keys of each row, where it matters."""
    return None if queries is None or queries.sums is None else sealed_count(layer.held().counters, "keys")
