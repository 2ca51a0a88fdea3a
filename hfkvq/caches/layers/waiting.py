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
    """What a store holds, dequantized; ``state`` and ``columns`` are other ones once it holds something else."""

    state: StoreState
    columns: int
    sides: tuple[Tensor, Tensor]


def may_gather(layer: LayerBase, tokens: int) -> bool:
    """Whether steps' tokens that are staged, and so many more, may stay staged: nothing of it would be sealed yet.

    To bring a token into the windows takes PyTorch more operations than a step of the model has.

    Args:
        layer: of which a step waits for the compiler.
        tokens: that come now.
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
    """What a layer holds besides its staged tokens, (B, H, columns, D), and what of it to keep for the next step.

    Args:
        layer: see `may_gather`.
        side: of which.
        kept: by the last step.
        layers: that keep something; they share `MOST_KEPT`.
    """
    store, columns = layer.held(), layer.columns - layer.staged_length
    if kept is not None and kept.state is store.state and kept.columns == columns:
        return kept.sides[SIDES.index(side)], kept
    size = layer.batch_size * layer.heads * columns * sum(store.dims.values()) * layer.dtype.itemsize
    if layer.staged is None or size > MOST_KEPT // layers:
        return store.dense(side, columns, True), None
    sides = store.dense("keys", columns, True), store.dense("values", columns, True)
    return sides[SIDES.index(side)], Kept(store.state, columns, sides)
