"""Shares of pages in which key channels are raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfkvq.caches.layers import KVLayer
from hfkvq.caches.store import KVStore
from hfkvq.kernels.decode import run_count

if TYPE_CHECKING:
    from hfkvq.caches.cache import MixedKVCache

_TENSORS = {4: ("high_index", "high"), 16: ("full_index", "full")}


def raised_channels(cache: MixedKVCache) -> dict[int, dict[int, Tensor]]:
    """Shares of the pages in which each key channel was raised.

    Args:
        cache: that has seen tokens.

    Returns:
        By layer and width (4 or 16; of trellis codes 3), f32 (H, D): share of the sealed pages of all rows in
        which the channel had that width, channels in the basis of the pages. Only layers whose pages can raise channels
        and have sealed some.
    """
    stores = {at: layer.store for at, layer in enumerate(cache.layers) if isinstance(layer, KVLayer)}
    found = {at: _shares(store) for at, store in stores.items() if store is not None}
    return {at: shares for at, shares in found.items() if shares}


def _shares(store: KVStore) -> dict[int, Tensor]:
    head_dim, counts, pages = store.dims["keys"], {}, 0
    for run, (view, (fmt, _)) in enumerate(zip(store.runs, store.format.runs, strict=True)):
        if not fmt.raised:
            continue
        blocks = (run_count(store.counters, run, "keys") // fmt.page_size)[:, None]
        sealed = torch.arange(view.table.shape[1], device=view.table.device) < blocks
        ids = view.table[sealed].long()
        pages += len(ids)
        parts = dict(zip(fmt.names, view.keys, strict=True))
        for width, _ in fmt.raised:
            if fmt.trellis:
                # All ranks are used.
                index = parts["high_index"][ids].long()
                count = torch.zeros(*index.shape[:2], head_dim, device=index.device, dtype=torch.float32)
                counts[width] = counts.get(width, 0) + count.scatter_(2, index, 1.0).sum(0)
                continue
            index_name, payload_name = _TENSORS[width]
            index, payload = parts[index_name][ids].long(), parts[payload_name][ids]
            # Unused ranks of a page name channel 0, with zeros.
            used = (index > 0) | (payload != 0).any(2)
            count = torch.zeros(*index.shape[:2], head_dim, device=index.device, dtype=torch.float32)
            count.scatter_add_(2, index, used.float())
            counts[width] = counts.get(width, 0) + count.sum(0)
    return {width: (count / pages).cpu() for width, count in sorted(counts.items())} if pages else {}
