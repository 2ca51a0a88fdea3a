"""Which key channels a filled cache has raised to more bits, and a picture of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfkvq.caches.layers import KVLayer
from hfkvq.caches.store import KVStore
from hfkvq.kernels.decode import run_count
from hfkvq.measure.drawing import BLACK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hfkvq.caches.cache import MixedKVCache

_TENSORS = {4: ("high_index", "high"), 16: ("full_index", "full")}

_ROWS = 96
"""Most rows of a heat map; above, the heads of a layer share one."""


def raised_channels(cache: MixedKVCache) -> dict[int, dict[int, Tensor]]:
    """How often each key channel was raised.

    A page names its raised channels, and leaves ranks that it did not need at channel 0 with zeros, so channel 0 counts
    where what it holds is not all zero.

    Args:
        cache: that has seen tokens.

    Returns:
        By layer and width (4 or 16), f32 (H, D): share of the sealed pages of all rows in which the channel had that
        width, channels in the basis of the pages. Only layers whose pages can raise channels and have sealed some.
    """
    found = {}
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, KVLayer) and layer.store is not None:
            shares = _shares(layer.store)
            if shares:
                found[number] = shares
    return found


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
            index_name, payload_name = _TENSORS[width]
            index, payload = parts[index_name][ids].long(), parts[payload_name][ids]
            used = (index > 0) | (payload != 0).any(2)
            count = torch.zeros(*index.shape[:2], head_dim, device=index.device)
            # A channel is named once in a page; unused ranks all add nothing to channel 0.
            count.scatter_add_(2, index, used.float())
            counts[width] = counts.get(width, 0) + count.sum(0)
    return {width: (count / pages).cpu() for width, count in sorted(counts.items())} if pages else {}


def channels_by_layer(cache: MixedKVCache) -> Figure:
    """Heat map of `raised_channels`: a row for each layer and head, a column for each channel, a panel for each width.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no page of the cache has room for raised channels, or none is sealed yet.
    """
    found = raised_channels(cache)
    if not found:
        raise ValueError(
            "cache: it has no sealed pages whose channels are raised; use a scheme that raises channels, such as "
            "'kitty' or 'mixkvq', and a prompt longer than its windows."
        )
    layers = list(found)
    widths = sorted({width for shares in found.values() for width in shares})
    heads, head_dim = next(iter(found[layers[0]].values())).shape
    merged = heads * len(layers) > _ROWS
    each = 1 if merged else heads
    height = min(7.0, max(2.2, 0.13 * each * len(layers)))
    figure, grid = new_figure(9.0, 0.9 + (height + 0.5) * len(widths), rows=len(widths), sharex=True)
    for axes, width in zip(grid[:, 0], widths, strict=True):
        nothing = torch.zeros(heads, head_dim)
        shares = [found[layer].get(width, nothing) for layer in layers]
        rows = torch.cat([share.mean(0, keepdim=True) if merged else share for share in shares])
        image = axes.imshow(rows.numpy(), cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        for edge in range(1, len(layers) if each > 1 else 0):
            axes.axhline(edge * each - 0.5, color="white", linewidth=0.8)
        step = -(-len(layers) // 24)
        marks = range(0, len(layers), step)
        axes.set_yticks([(i + 0.5) * each - 0.5 for i in marks], [str(layers[i]) for i in marks], fontsize=8)
        axes.set_ylabel("layer (mean of heads)" if merged else f"layer ({heads} heads each)" if heads > 1 else "layer")
        axes.tick_params(axis="y", length=0)
        channels = rows.sum(1).mean().item()
        axes.set_title(
            f"raised to {width} bits: {channels:.1f} of {head_dim} channels a page", fontsize=10, color=BLACK
        )
        figure.colorbar(image, ax=axes, pad=0.02).set_label("share of pages", fontsize=9)
    tick = max(1, head_dim // 8)
    grid[-1, 0].set_xticks(range(0, head_dim, tick))
    rotated = any(
        isinstance(layer, KVLayer) and layer.store is not None and layer.store.format.rotate_keys
        for layer in cache.layers
    )
    grid[-1, 0].set_xlabel("key channel, in the rotated basis" if rotated else "key channel")
    figure.suptitle(f"Key channels raised by {cache.scheme.name}, {cache.get_seq_length():,} tokens", fontsize=11)
    return figure
