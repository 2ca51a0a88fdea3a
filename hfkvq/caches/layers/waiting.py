"""Steps that wait for the compiler: PyTorch's operations go in place of kernels, so there have to be few of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.pages import Side

from ..store import SIDES, StoreState
from .base import LayerBase

MOST_KEPT = 256 << 20
"""Bytes of dequantized keys and values that the layers of a cache keep between such steps."""


class Kept(NamedTuple):
    """A store's tokens, dequantized.

    Attributes:
        state: of the store when this was made; a store that changes gets another one.
        columns: number of tokens.
        sides: keys (B, H, columns, Dk) and values (B, H, columns, Dv), in the model's dtype.
    """

    state: StoreState
    columns: int
    sides: tuple[Tensor, Tensor]


def may_gather(layer: LayerBase, tokens: int) -> bool:
    """Whether steps' tokens that are staged, and so many more, may stay staged: nothing of it would be sealed yet.

    Moving one token into the windows takes PyTorch more operations than the rest of a layer's step.

    Args:
        layer: a layer whose steps wait for the compiler.
        tokens: new tokens of this step.
    """
    store = layer.store
    if store is None or layer.staged is None or layer.padding is not None or layer.newest != 1 or tokens > 1:
        return False
    if layer.window or layer.differentiated or "tags" in layer.scheme.needs or layer.scheme.evicts:
        return False
    then = store.forecast(layer.staged_length + tokens, layer.hold)
    return then.shortest > 0 and then.due == (0, 0)


def gathered(staged: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Staged tokens with those that come now."""
    return torch.cat([staged[0], keys], 2), torch.cat([staged[1], values], 2)


def dense_before(layer: LayerBase, side: Side, kept: Kept | None, layers: int) -> tuple[Tensor, Kept | None]:
    """A layer's tokens except the staged ones, dequantized, (B, H, columns, D), and what to keep for the next step.

    Args:
        layer: see `may_gather`.
        side: keys or values.
        kept: what the last step kept.
        layers: number of layers that share `MOST_KEPT`.
    """
    store, columns = layer.held(), layer.columns - layer.staged_length
    if kept is not None and kept.state is store.state and kept.columns == columns:
        return kept.sides[SIDES.index(side)], kept
    size = layer.batch_size * layer.heads * columns * sum(store.dims.values()) * layer.dtype.itemsize
    if layer.staged is None or size > MOST_KEPT // layers:
        return store.dense(side, columns, True), None
    sides = store.dense("keys", columns, True), store.dense("values", columns, True)
    return sides[SIDES.index(side)], Kept(store.state, columns, sides)
