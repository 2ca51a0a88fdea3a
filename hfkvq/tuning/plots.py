"""Shares of raised channels, and a figure of tags' sensitivities, made with ``hfkvq[plot]``.

Studies have Optuna's own: ``optuna.visualization.matplotlib`` takes `TuningStudy.optuna`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfkvq.caches.layers import KVLayer
from hfkvq.caches.store import KVStore
from hfkvq.kernels.decode import run_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hfkvq.caches.cache import MixedKVCache

    from .sensitivity import Sensitivity

# Colours of Okabe and Ito, which the colour-blind can tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"

_TENSORS = {4: ("high_index", "high"), 16: ("full_index", "full")}


def raised_channels(cache: MixedKVCache) -> dict[int, dict[int, Tensor]]:
    """Shares of the pages in which each key channel was raised.

    Args:
        cache: that has seen tokens.

    Returns:
        By layer and width (4 or 16), f32 (H, D): share of the sealed pages of all rows in which the channel had that
        width, channels in the basis of the pages. Only layers whose pages can raise channels and have sealed some.
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
            index_name, payload_name = _TENSORS[width]
            index, payload = parts[index_name][ids].long(), parts[payload_name][ids]
            # Unused ranks of a page name channel 0, with zeros.
            used = (index > 0) | (payload != 0).any(2)
            count = torch.zeros(*index.shape[:2], head_dim, device=index.device, dtype=torch.float32)
            count.scatter_add_(2, index, used.float())
            counts[width] = counts.get(width, 0) + count.sum(0)
    return {width: (count / pages).cpu() for width, count in sorted(counts.items())} if pages else {}


def tag_sensitivity(sensitivity: Sensitivity, bits: Mapping[str, int] | None = None) -> Figure:
    """Distortion in 2 and in 4 bits and tokens, tag by tag; the tag that 4 bits help most, for its tokens, is on top.

    Args:
        sensitivity: of `hfkvq.tuning.calibrate`.
        bits: 2 or 4 by tag, as `make_table` gives them, shown beside the names.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no tag has tokens.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots: matplotlib is not installed; pip install 'hfkvq[plot]'.") from error
    counts, distortion = sensitivity.counts, sensitivity.distortion
    tags = [tag for tag, count in counts.items() if count > 0]
    if not tags:
        raise ValueError("sensitivity: no tag has a token, so there is nothing to draw.")
    tags.sort(key=lambda tag: (distortion[tag][0] - distortion[tag][1]) / counts[tag])
    names = [tag if bits is None or tag not in bits else f"{tag}  ({bits[tag]} bits)" for tag in tags]
    figure = Figure(figsize=(10.0, 1.5 + 0.3 * len(tags)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
    narrow, wide = ([distortion[tag][k] for tag in tags] for k in (0, 1))
    left.hlines(names, wide, narrow, color=GREY, zorder=1)
    left.plot(narrow, names, "o", color=ORANGE, label="in 2 bits")
    left.plot(wide, names, "s", color=BLUE, label="in 4 bits")
    # Symmetric logarithms have a place for zero.
    left.set_xscale("symlog", linthresh=min((x for x in (*narrow, *wide) if x > 0), default=1.0))
    left.set_xlabel("distortion D of the attention's output, sum over layers")
    left.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False)
    right.bar_label(right.barh(names, [counts[tag] for tag in tags], color=GREY), fmt="{:,.0f}", fontsize=8)
    right.set_xlabel("tokens N")
    figure.suptitle(f"{PurePath(sensitivity.origin.model).name}: sensitivity of {len(tags)} tags", fontsize=11)
    return figure
