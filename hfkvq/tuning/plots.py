"""Figures of channels, layers and tags, made with ``hfkvq[plot]``; ``figure.savefig`` writes them.

Studies have Optuna's own: ``optuna.visualization.matplotlib`` takes `TuningStudy.optuna`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfkvq.caches.layers import KVLayer
from hfkvq.caches.store import KVStore
from hfkvq.kernels.decode import run_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hfkvq.caches.cache import MixedKVCache

    from .layerwise import LayerPlan
    from .sensitivity import Sensitivity

# Colours of Okabe and Ito, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, RED, GREY, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999", "#222222"

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


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure in inches, and its axes as an array."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots: matplotlib is not installed; pip install 'hfkvq[plot]'.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def channels_by_layer(cache: MixedKVCache) -> Figure:
    """Heat map of `raised_channels`: a row for each layer and head, a column for each channel, a panel for each width.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no page of the cache has raised channels, or none is sealed yet.
    """
    found = raised_channels(cache)
    if not found:
        raise ValueError(
            "cache: it has no sealed pages whose channels are raised; use a scheme that raises channels, such as "
            "'kitty' or 'mixkvq', and a prompt longer than its windows."
        )
    layers, widths = list(found), sorted({width for shares in found.values() for width in shares})
    nothing = torch.zeros_like(next(iter(found[layers[0]].values())))
    (heads, head_dim), shown = nothing.shape, range(0, len(layers), -(-len(layers) // 24))
    figure, grid = _figure(9.0, 0.9 + 3.5 * len(widths), rows=len(widths), sharex=True)
    for axes, width in zip(grid[:, 0], widths, strict=True):
        rows = torch.cat([found[layer].get(width, nothing) for layer in layers])
        image = axes.imshow(rows.numpy(), cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        mean = rows.sum(1).mean().item()
        axes.set_title(f"raised to {width} bits: {mean:.1f} of {head_dim} channels a page", fontsize=10)
        axes.set_yticks([(i + 0.5) * heads - 0.5 for i in shown], [str(layers[i]) for i in shown], fontsize=8)
        axes.set_ylabel(f"layer ({heads} heads each)")
        figure.colorbar(image, ax=axes, label="share of pages")
    grid[-1, 0].set_xlabel("key channel, in the basis of the pages")
    return figure


def layer_sensitivity(plan: LayerPlan) -> Figure:
    """Gain by changing one layer, layer by candidate; the cells that were chosen in the end are framed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    layers, names = plan.measured_layers, list(plan.candidates)
    cells = [[plan.cell(layer, name) for layer in layers] for name in names]
    gains = [[float("nan") if score is None else plan.gain(score) for score in row] for row in cells]
    # Colours end at the base's loss: losses may grow by any factor, and would leave the gains pale.
    most = max((abs(gain) for row in gains for gain in row if gain == gain), default=0.0) or 1.0
    most = min(most, plan.start.value) if plan.direction == "minimize" and plan.start.value > 0 else most
    figure, grid = _figure(2.6 + max(5.0, 0.4 * len(layers)), 1.7 + 0.55 * len(names))
    axes = grid[0, 0]
    image = axes.imshow(gains, cmap="PuOr", vmin=-most, vmax=most, aspect="auto")
    chosen = [(x, names.index(name)) for x, layer in enumerate(layers) if (name := plan.candidate_of(layer))]
    if chosen:
        axes.plot(*zip(*chosen, strict=True), "s", color=RED, markersize=16, markerfacecolor="none", linestyle="none")
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="layer that was changed", title=f"base: {plan.objective} {plan.start.value:.3g}")
    figure.colorbar(image, ax=axes, label=f"gain, {plan.objective}")
    return figure


def layer_steps(plan: LayerPlan) -> Figure:
    """Value against cost: the base, each step, and the naive rule, with held-out scores where there are any.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, grid = _figure(8.4, 4.8)
    axes, naive = grid[0, 0], [other for other in plan.compared if other.name not in ("plan", "base")]
    for scores, look, color, label in (
        ([cell.score for cell in plan.table], ".", GREY, "one layer changed"),
        ([plan.start, *(step.score for step in plan.steps)], "o-", BLUE, "steps from the base"),
        ([other.score for other in naive], "s", ORANGE, "first and last layers full"),
        ([other.held_out for other in plan.compared if other.held_out is not None], "D", GREEN, "held-out samples"),
    ):
        if scores:
            axes.plot([x.cost(plan.cost) for x in scores], [x.value for x in scores], look, color=color, label=label)
    if plan.limit is not None:
        axes.axvline(plan.limit, color=BLACK, linestyle="--", linewidth=0.9, label="budget")
    axes.set(xlabel=plan.cost.replace("_", " "), ylabel=plan.objective)
    axes.set_yscale("log" if plan.direction == "minimize" and plan.start.value > 0 else "linear")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def tag_sensitivity(sensitivity: Sensitivity, bits: Mapping[str, int] | None = None) -> Figure:
    """Distortion in 2 and in 4 bits and tokens, tag by tag; the tag that 4 bits help most, for its tokens, is on top.

    Args:
        sensitivity: of `hfkvq.tuning.calibrate`.
        bits: 2 or 4 by tag, as `make_table` gives them, shown beside the names.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no tag has tokens.
    """
    counts, distortion = sensitivity.counts, sensitivity.distortion
    tags = [tag for tag, count in counts.items() if count > 0]
    if not tags:
        raise ValueError("sensitivity: no tag has a token, so there is nothing to draw.")
    tags.sort(key=lambda tag: (distortion[tag][0] - distortion[tag][1]) / counts[tag])
    names = [tag if bits is None or tag not in bits else f"{tag}  ({bits[tag]} bits)" for tag in tags]
    figure, grid = _figure(10.0, 1.5 + 0.3 * len(tags), columns=2, sharey=True, width_ratios=[2.2, 1])
    left, right = grid[0]
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
