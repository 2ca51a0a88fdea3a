"""Pictures of layers: their sensitivity, the steps of `tune_layers`, and the bits that each holds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfkvq.caches.layers import KVLayer
from hfkvq.caches.preset import Preset
from hfkvq.caches.scheme import Scheme
from hfkvq.kernels.pages import Side
from hfkvq.measure.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, legend_beside, new_figure

from .plot_figure import cost_of, cost_title, cost_unit, draw_scores, scale_values, value_title, write_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hfkvq.caches.cache import MixedKVCache

    from .layer_plan import LayerPlan

_WRITTEN = 16
"""Most layers of which every cell of a table still has room for its number."""

_UNITS = {"total_bits": "bits", "cache_bytes": "MiB", "milliseconds": "ms"}


def layer_sensitivity(plan: LayerPlan) -> Figure:
    """What changing one layer does, layer by candidate; what was chosen in the end is framed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    layers, names = plan.measured_layers, list(plan.candidates)
    each = 0.62 if len(layers) <= _WRITTEN else 0.3
    figure, grid = new_figure(2.6 + max(5.0, each * len(layers)), 1.7 + 0.55 * len(names))
    axes = grid[0, 0]
    relative = plan.direction == "minimize" and plan.start.value > 0
    scale = 100 / plan.start.value if relative else 100.0
    cells = [[plan.cell(layer, name) for layer in layers] for name in names]
    gains = [[math.nan if score is None else scale * plan.gain(score) for score in row] for row in cells]
    most = max((abs(gain) for row in gains for gain in row if not math.isnan(gain)), default=0.0) or 1.0
    worst = min((gain for row in gains for gain in row if not math.isnan(gain)), default=0.0)
    # No loss can shrink by more than itself, but it may grow by any factor, and would leave the rest without colour.
    most = min(most, 100.0)
    image = axes.imshow(gains, cmap="PuOr", vmin=-most, vmax=most, aspect="auto")
    for row, name in enumerate(names):
        for column, layer in enumerate(layers):
            gain = gains[row][column]
            if len(layers) <= _WRITTEN and not math.isnan(gain):
                color = "white" if abs(gain) > 0.5 * most else BLACK
                text = f"{gain:+.1f}" if abs(gain) < 1000 else f"{gain:+,.0f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
            if plan.candidate_of(layer) == name:
                axes.add_patch(_frame(column, row))
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=9 if len(layers) <= 48 else 6)
    axes.set_yticks(range(len(names)), [f"{name}\n{_spent(plan, name)}" for name in names], fontsize=9)
    axes.tick_params(length=0)
    axes.set_xlabel("layer that was changed")
    bar = figure.colorbar(image, ax=axes, pad=0.02, extend="min" if worst < -most else "neither")
    unit = f"% of the base's {plan.objective}" if relative else f"{plan.objective}, points of 100"
    bar.set_label(f"gain, {unit}", fontsize=9)
    figure.suptitle(f"{_label(plan.base.scheme)} with one layer changed; framed: chosen in the end", fontsize=11)
    return figure


def _frame(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, edgecolor=RED, linewidth=2.2)


def _spent(plan: LayerPlan, name: str) -> str:
    """What a candidate costs a layer, on average."""
    spent = [cell.score.cost(plan.cost) - plan.start.cost(plan.cost) for cell in plan.table if cell.candidate == name]
    mean = sum(spent) / len(spent) / cost_unit(plan.cost) if spent else 0.0
    return f"{mean:+.2f} {_UNITS[plan.cost]} each"


def _label(scheme: Scheme) -> str:
    """A preset's name, or the scheme's own with a mark that knobs differ."""
    from hfkvq.caches.scheme import list_schemes

    return next((name for name, other in list_schemes().items() if other == scheme), f"{scheme.name}*")


def layer_steps(plan: LayerPlan) -> Figure:
    """Value against cost: the base, each step, and the naive rule, with held-out scores where there are any.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, grid = new_figure(8.4, 4.8)
    axes, cost = grid[0, 0], plan.cost
    cells = [replace(cell.score, low=None, high=None) for cell in plan.table]
    draw_scores(axes, cells, cost, fmt="o", markersize=3.5, color=GREY, alpha=0.7, label="one layer changed")
    path = [plan.start, *(step.score for step in plan.steps)]
    plain = [replace(score, low=None, high=None) for score in path]
    axes.plot(
        [cost_of(score, cost) for score in plain],
        [score.value for score in plain],
        color=BLUE,
        marker="o",
        markersize=4,
        linewidth=1.2,
        label="steps from the base",
    )
    naive = [other for other in plan.compared if other.name not in ("plan", "base")]
    scores = [replace(other.score, low=None, high=None) for other in naive]
    if scores:
        draw_scores(axes, scores, cost, fmt="s", markersize=6, color=ORANGE, label="first and last layers full")
    held_out = [other.held_out for other in plan.compared if other.held_out is not None]
    if held_out:
        draw_scores(
            axes,
            held_out,
            cost,
            fmt="D",
            markersize=6,
            color=GREEN,
            markerfacecolor="none",
            label="on held-out samples,\nwith 95 % intervals",
        )
    if plan.limit is not None:
        axes.axvline(plan.limit / cost_unit(cost), color=BLACK, linestyle="--", linewidth=0.9, label="budget")
    axes.set_xlabel(cost_title(cost))
    axes.set_ylabel(value_title(plan.objective, plan.direction))
    scale_values(axes, [*cells, *plain, *scores, *held_out], plan.direction)
    axes.margins(x=0.1)
    legend_beside(axes)
    figure.suptitle(f"{_label(plan.base.scheme)}, layer by layer: {len(plan.steps)} steps", fontsize=11)
    names = [("base", plan.start, BLUE)]
    if plan.steps:
        names.append(("plan", plan.score, BLUE))
    names += [(f"{other.name.split()[3]} + {other.name.split()[3]}", other.score, BLACK) for other in naive]
    write_scores(axes, [(name, (cost_of(score, cost), score.value), color) for name, score, color in names])
    return figure


def layer_bits(preset: Preset, layers: int, head_dim: int) -> list[dict[Side, tuple[float, float]]]:
    """Code bits and all bits per element of sealed pages, of the keys and the values of each layer.

    What a long context comes to: windows and tables vanish there. Where tokens differ in width, the widest.
    """
    from hfkvq.measure.demo.schemes import page_bits

    found = []
    for scheme in preset.by_layer(layers):
        layout = scheme.layout(head_dim, head_dim)
        keys, values = layout.keys.formats[-1], layout.values.formats[-1]
        sides: dict[Side, tuple[float, float]] = {
            "keys": (keys.code_bits(head_dim), page_bits(keys, "keys", head_dim)),
            "values": (values.code_bits(head_dim), page_bits(values, "values", head_dim)),
        }
        found.append(sides)
    return found


def bits_by_layer(what: Preset | MixedKVCache, layers: int | None = None, head_dim: int = 128) -> Figure:
    """Bits per element that each layer takes: of a preset in a long context, or of a filled cache as it is.

    Args:
        what: a preset, or a cache that has seen tokens.
        layers: of the decoder, for a preset.
        head_dim: for a preset.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a preset without the number of layers, or a cache that holds nothing.
    """
    if isinstance(what, Preset):
        if layers is None:
            raise ValueError("layers: a preset does not say how many there are; pass the model's number of layers.")
        return _preset_bits(what, layers, head_dim)
    stores = {
        number: layer.store
        for number, layer in enumerate(what.layers)
        if isinstance(layer, KVLayer) and layer.store is not None and layer.store.elements()
    }
    if not stores:
        raise ValueError("cache: it holds no tokens yet; run a prompt through it first.")
    figure, grid = new_figure(2.4 + max(4.6, 0.27 * len(stores)), 4.0)
    axes, bottom = grid[0, 0], [0.0] * len(stores)
    for kind, color in (("codes", BLUE), ("metadata", SKY), ("windows", ORANGE), ("tables", PINK)):
        heights = [8 * getattr(store.nbytes(), kind) / store.elements() for store in stores.values()]
        axes.bar(range(len(stores)), heights, bottom=bottom, color=color, label=kind, width=0.8)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _finish_bars(axes, list(stores), bottom)
    seen = what.get_seq_length()
    # Windows are in the model's own dtype, which weighs much in float32.
    dtype = str(next(iter(stores.values())).dtype).removeprefix("torch.")
    figure.suptitle(f"Bits by layer at {seen:,} tokens in {dtype}: {_words(what.preset)}", fontsize=11)
    return figure


def _preset_bits(preset: Preset, layers: int, head_dim: int) -> Figure:
    figure, grid = new_figure(2.6 + max(4.6, 0.27 * layers), 4.0)
    axes, bits = grid[0, 0], layer_bits(preset, layers, head_dim)
    tops = [0.0] * layers
    looks: tuple[tuple[Side, float, str, str], ...] = (("keys", -0.2, BLUE, SKY), ("values", 0.2, RED, ORANGE))
    for side, shift, dark, light in looks:
        at = [layer + shift for layer in range(layers)]
        codes = [sides[side][0] for sides in bits]
        more = [sides[side][1] - sides[side][0] for sides in bits]
        axes.bar(at, codes, color=dark, width=0.38, label=f"{side}: codes")
        axes.bar(at, more, bottom=codes, color=light, width=0.38, label=f"{side}: scales, indices")
        tops = [max(top, sides[side][1]) for top, sides in zip(tops, bits, strict=True)]
    _finish_bars(axes, list(range(layers)), tops)
    mean = sum(sum(total for _, total in sides.values()) / 2 for sides in bits) / layers
    figure.suptitle(f"Bits by layer in a long context: {_words(preset)}, {mean:.2f} bits on average", fontsize=11)
    return figure


def _words(preset: Preset) -> str:
    return _label(preset.scheme) + (" and layers of their own" if preset.layers else "")


def _finish_bars(axes: Any, layers: list[int], tops: list[float]) -> None:
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=9 if len(layers) <= 40 else 6)
    axes.set_xlabel("layer")
    axes.set_ylabel("bits per element")
    axes.set_ylim(0, 1.08 * max(tops))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    legend_beside(axes)
