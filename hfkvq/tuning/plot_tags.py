"""A calibration as a picture: what 2 and 4 bits do to each tag, and how many tokens it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from hfkvq.measure.drawing import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .sensitivity import Sensitivity


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
    # Last is on top.
    tags.sort(key=lambda tag: (distortion[tag][0] - distortion[tag][1]) / counts[tag])
    figure, grid = new_figure(10.0, 1.5 + 0.3 * len(tags), columns=2, sharey=True, width_ratios=[2.2, 1])
    left, right = grid[0]
    rows = range(len(tags))
    narrow, wide = ([distortion[tag][k] for tag in tags] for k in (0, 1))
    left.hlines(rows, wide, narrow, color=GREY, linewidth=1.5, zorder=1)
    left.plot(narrow, rows, "o", color=ORANGE, markersize=6, label="in 2 bits")
    left.plot(wide, rows, "s", color=BLUE, markersize=5, label="in 4 bits")
    positive = [x for x in (*narrow, *wide) if x > 0]
    if positive and max(positive) / min(positive) > 8:
        # Linear near nothing, which a logarithm does not have.
        left.set_xscale("log" if len(positive) == 2 * len(tags) else "symlog", **_linear(narrow, wide, positive))
    left.set_xlabel("distortion D of the attention's output, sum over layers")
    # Above the rows, where there are no points.
    left.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, fontsize=9, frameon=False)
    bars = right.barh(rows, [counts[tag] for tag in tags], color=GREY, height=0.6)
    right.bar_label(bars, [f"{counts[tag]:,.0f}" for tag in tags], padding=3, fontsize=8)
    right.set_xlim(0, 1.25 * max(counts[tag] for tag in tags))
    right.set_xlabel("tokens N")
    names = [tag if bits is None or tag not in bits else f"{tag}  ({bits[tag]} bits)" for tag in tags]
    left.set_yticks(rows, names, fontsize=8.5)
    left.grid(alpha=0.25)
    left.set_axisbelow(True)
    left.set_ylim(-0.7, len(tags) - 0.3)
    # A folder's name is enough.
    model = PurePath(sensitivity.origin.model).name
    figure.suptitle(f"Sensitivity of {len(tags)} tags{', ' if model else ''}{model}", fontsize=11)
    return figure


def _linear(narrow: list[float], wide: list[float], positive: list[float]) -> dict[str, float]:
    return {} if len(positive) == len(narrow) + len(wide) else {"linthresh": min(positive)}
