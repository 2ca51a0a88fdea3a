"""What a store holds as dense tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.hadamard import saturated
from hfkvq.kernels.pages import Side
from hfkvq.kernels.products import table_pages

from .state import SIDES, StoreState


def dense_alike(store: StoreState, side: Side) -> Tensor:
    """`StoreView.dense` of rows that hold all columns, whose order the host knows: no operation for positions."""
    (state,) = store.states
    at, sealed, sink = SIDES.index(side), state.sealed(side), store.sizes.sink
    first, tail = store.windows[at], store.windows[2 + at]
    rotate = store.format.rotate_keys if side == "keys" else store.format.rotate_values
    # In the model's dtype at once, where nothing is computed from it.
    dtype = torch.float32 if rotate else store.dtype
    parts = [first[:, :, : min(sink, state.length)]]
    if sealed:
        view, fmt = store.runs[0], store.format.runs[0][at]
        table = view.table[:, : -(-sealed // fmt.page_size)]
        pages = table_pages(view.keys if side == "keys" else view.values, table, fmt, side, store.dims[side])
        parts.append(pages.transpose(1, 2).flatten(2, 3)[:, :, :sealed])
    ring, behind = tail.shape[2], sealed
    while behind < state.length - sink:
        slot = behind % ring
        count = min(ring - slot, state.length - sink - behind)
        parts.append(tail[:, :, slot : slot + count])
        behind += count
    dense = torch.cat([part.to(dtype) for part in parts], 2)
    return saturated(reference("hadamard")(dense, rotate, True), store.dtype) if rotate else dense
