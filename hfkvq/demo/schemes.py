"""What `hfkvq schemes` shows: every preset, in words and in bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich import box
from rich.table import Table

from hfkvq.caches.scheme import Layout, Scheme, SideLayout, list_schemes
from hfkvq.kernels.pages import PageFormat, Side

HEAD_DIM = 128


def format_words(fmt: PageFormat, head_dim: int) -> str:
    """A page format in words: "2 bits, a scale per channel and 128 tokens"."""
    if fmt.bits == 16:
        return "16 bits, unquantized"
    width = "8 bits (fp8)" if fmt.bits == 8 else f"{fmt.bits} bits"
    if fmt.axis == "channel":
        scale = f"per channel of {fmt.group_size} tokens"
    elif fmt.group_size == head_dim:
        scale = "per token"
    else:
        scale = f"per token of {fmt.group_size} channels"
    if fmt.normed:
        scale += f", a factor per {'token' if fmt.axis == 'channel' else 'channel'}"
    raised = "".join(f", {count} of {head_dim} channels {bits} bits" for bits, count in fmt.raised)
    return f"{width} {scale}{raised}"


def side_words(side: SideLayout, head_dim: int) -> str:
    """A side's layout in words."""
    words = "; or ".join(format_words(fmt, head_dim) for fmt in side.formats)
    return f"{words}, rotated in blocks of {side.rotate}" if side.rotate else words


def whole_words(layout: Layout) -> str:
    """What stays unquantized."""
    parts = [f"first {layout.sink}"] if layout.sink else []
    keys, values = _newest(layout.keys), _newest(layout.values)
    if keys == values:
        parts += [f"newest {keys}"] if keys else []
    else:
        parts += [f"newest {amount} {name}" for name, amount in (("keys", keys), ("values", values)) if amount]
    return ", ".join(parts) or "nothing"


def _newest(side: SideLayout) -> str:
    """How many of the newest tokens wait unsealed, least to most."""
    if all(fmt.bits == 16 for fmt in side.formats):
        return ""
    most = side.local + side.unit - 1
    return "" if not most else str(most) if most == side.local else f"{side.local}–{most}"


def page_bits(fmt: PageFormat, side: Side, head_dim: int) -> float:
    """Bits an element of a sealed page, scales and indices included, for a bf16 model."""
    sizes = fmt.shapes(side, 1, head_dim).values()
    held = sum(math.prod(shape) * (2 if dtype is None else dtype.itemsize) for shape, dtype in sizes)
    return 8 * held / (fmt.page_size * head_dim)


def describe(name: str, scheme: Scheme, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """A preset: words, bits and knobs.

    Bits are the mean of keys and values, least and most where tokens differ in width; ``long_context_bits`` counts
    pages alone, since windows and tables vanish in a long context.
    """
    layout = scheme.layout(head_dim, head_dim)
    pairs = list(zip(layout.keys.formats, layout.values.formats, strict=True))
    code = [(keys.code_bits(head_dim) + values.code_bits(head_dim)) / 2 for keys, values in pairs]
    total = [(page_bits(k, "keys", head_dim) + page_bits(v, "values", head_dim)) / 2 for k, v in pairs]
    return {
        "name": name,
        "class": type(scheme).__name__,
        "paper": scheme.paper,
        "keys": side_words(layout.keys, head_dim),
        "values": side_words(layout.values, head_dim),
        "whole": whole_words(layout),
        "head_dim": head_dim,
        "code_bits": [min(code), max(code)],
        "long_context_bits": [min(total), max(total)],
        "knobs": dataclasses.asdict(scheme),
    }


def describe_all() -> list[dict[str, Any]]:
    """Every preset, aliases included."""
    return [describe(name, scheme) for name, scheme in list_schemes().items()]


def _bits(least_most: list[float]) -> str:
    least, most = least_most
    return f"{least:.2f}" if least == most else f"{least:.2f}–{most:.2f}"


def _knob_words(name: str, value: Any) -> str:
    # A table of widths by tag would take the whole screen.
    if isinstance(value, tuple):
        return f"{name}: {len(value)} entries"
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value!r}"


def schemes_table() -> Table:
    """All presets."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    view.add_column("preset\nscheme\npaper", no_wrap=True)
    view.add_column("what is held", min_width=24)
    view.add_column("code\nbits", justify="right")
    view.add_column("total\nbits", justify="right")
    view.add_column("knobs", no_wrap=True)
    items = describe_all()
    for number, item in enumerate(items):
        same = item["keys"] == item["values"]
        held = [f"keys, values: {item['keys']}"] if same else [f"keys: {item['keys']}", f"values: {item['values']}"]
        view.add_row(
            f"{item['name']}\n{item['class']}\n{item['paper'].removeprefix('arXiv:')}",
            "\n".join([*held, f"whole: {item['whole']}"]),
            _bits(item["code_bits"]),
            _bits(item["long_context_bits"]),
            "\n".join(_knob_words(name, value) for name, value in item["knobs"].items()),
        )
        if number < len(items) - 1:
            view.add_row()
    return view
