"""What `hfkvq schemes` shows: every preset, in words and in bits."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.eviction import EvictionScheme, TokenEviction
from hfkvq.caches.registry import Entry, entry_of, in_order, presets
from hfkvq.caches.scheme import Layout, Limits, Scheme, SideLayout, get_scheme, list_schemes
from hfkvq.kernels.pages import PageFormat, Side

from ..tables import markdown_table

HEAD_DIM = 128


def format_words(fmt: PageFormat, head_dim: int) -> str:
    """A page format in words: "2 bits, a scale per channel and 128 tokens"."""
    if fmt.bits == 16:
        return "16 bits, unquantized"
    width = "8 bits (fp8)" if fmt.bits == 8 else f"{fmt.bits} bits"
    if fmt.axis == "channel":
        scale = f", a scale per channel and {fmt.group_size} tokens"
    elif fmt.group_size == head_dim:
        scale = ", a scale per token"
    else:
        scale = f", a scale per token and {fmt.group_size} channels"
    if fmt.normed:
        scale += f", a factor per {'token' if fmt.axis == 'channel' else 'channel'}"
    raised = "".join(f", {count} of {head_dim} channels in {bits} bits" for bits, count in fmt.raised)
    return f"{width}{scale}{raised}"


def side_words(side: SideLayout, head_dim: int) -> str:
    """A side's layout in words."""
    words = "; or ".join(format_words(fmt, head_dim) for fmt in side.formats)
    signs = " with random signs" if side.signs else ""
    return f"{words}, rotated in blocks of {side.rotate}{signs}" if side.rotate else words


def _layers_words(scheme: Scheme, side: Side, head_dim: int) -> str:
    dims = _dims(scheme, head_dim)
    words: Counter[str] = Counter()
    for each, count in _layers(scheme):
        smoothed = ", smoothed" if side == "keys" and each.smooths_keys else ""
        words[side_words(getattr(each.layout(*dims), side), dims[side == "values"]) + smoothed] += count
    (usual, _), *others = words.most_common()
    return "".join([usual, *(f"; in {count} % of the layers {each}" for each, count in others)])


def whole_words(layout: Layout) -> str:
    """What stays unquantized."""
    if all(fmt.bits == 16 for side in (layout.keys, layout.values) for fmt in side.formats):
        return "everything"
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


def budget_words(scheme: Scheme) -> str:
    """Which tokens stay; nothing where all do."""
    if not isinstance(scheme, EvictionScheme):
        return ""
    held = scheme.tokens
    budget = f"{held} tokens"
    if isinstance(scheme, TokenEviction) and scheme.budget_share is not None:
        budget = f"{scheme.budget_share:.4g} of the tokens"
    always = [f"first {scheme.first}"] if scheme.first else []
    always.append(f"newest {scheme.window}")
    heads = "the same in all KV heads of a layer" if scheme.alike else "each KV head chooses its own"
    when = "after prompts and in steps" if scheme.interval is not None else "after prompts"
    return f"{budget} ({heads}), always with the {' and the '.join(always)}; trimmed {when}"


def page_bits(fmt: PageFormat, side: Side, head_dim: int) -> float:
    """Bits per element of a sealed page, scales and indices included, for a bf16 model."""
    sizes = fmt.shapes(side, 1, head_dim).values()
    held = sum(math.prod(shape) * (2 if dtype is None else dtype.itemsize) for shape, dtype in sizes)
    return 8 * held / (fmt.page_size * head_dim)


def costly_choices(scheme: Scheme, head_dim: int = HEAD_DIM) -> dict[str, str]:
    """Choices of one knob for which steps can be neither captured nor compiled, and why.

    Of numbers the ends of their range are tried.
    """
    found = {}
    for field in dataclasses.fields(scheme):
        ends = (("as low as", field.metadata.get("low")), ("as high as", field.metadata.get("high")))
        choices = field.metadata.get("choices")
        for word, value in ends if choices is None else [("=", choice) for choice in choices]:
            if value is None:
                continue
            try:
                reason = get_scheme(scheme, **{field.name: value}).limits(head_dim, head_dim).captured
            except ValueError:
                # Not with the other knobs as they are.
                continue
            if reason is not None:
                found[f"{field.name}={value}" if word == "=" else f"{field.name} {word} {value}"] = reason
    return found


def long_context_bits(scheme: Scheme, head_dim: int = HEAD_DIM) -> list[float]:
    """Least and most bits per element, scales included, of pages alone: the mean of keys, values and layers."""
    return _mean_bits(scheme, head_dim, page_bits)


def _dims(scheme: Scheme, head_dim: int) -> tuple[int, int]:
    """Channels of keys and values; of latents and their rotary parts those of DeepSeek's models."""
    return (512, 64) if scheme.latents else (head_dim, head_dim)


def _layers(scheme: Scheme) -> list[tuple[Scheme, int]]:
    """What the layers of a model take, and how many of 100: shares of the depth count as they are written."""
    return list(Counter(scheme.in_layer(layer, 100) for layer in range(100)).items())


def _mean_bits(scheme: Scheme, head_dim: int, bits: Callable[[PageFormat, Side, int], float]) -> list[float]:
    ends, dims = [], _dims(scheme, head_dim)
    for each, count in _layers(scheme):
        layout = each.layout(*dims)
        pairs = zip(layout.keys.formats, layout.values.formats, strict=True)
        total = [
            (bits(keys, "keys", dims[0]) * dims[0] + bits(values, "values", dims[1]) * dims[1]) / sum(dims)
            for keys, values in pairs
        ]
        ends.append((count * min(total), count * max(total)))
    return [sum(end) / 100 for end in zip(*ends, strict=True)]


def describe(name: str, scheme: Scheme, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """A preset: whom it is for, words, bits, knobs, and what steps lose by its choices.

    Bits are the mean of keys and values, least and most where tokens differ in width; ``long_context_bits`` counts
    pages alone, since windows and tables vanish in a long context. ``not_captured`` says why steps can be neither
    captured nor compiled, ``several_launches`` why those in Python seal in more than one launch, ``requantized`` why
    tokens that stay are quantized again; None if they do not. ``stays`` says which tokens do, where others are evicted.
    """
    entry = entry_of(name)[1] if name in presets() else Entry()
    dims = _dims(scheme, head_dim)
    layout, limits = scheme.layout(*dims), scheme.limits(*dims)
    return {
        "name": name,
        "class": type(scheme).__name__,
        # A scheme that declares no purpose says what it is.
        "purpose": entry.purpose or (inspect.getdoc(type(scheme)) or "").split("\n")[0],
        "group": entry.group,
        "lists": list(entry.lists),
        "paper": scheme.paper,
        "keys": _layers_words(scheme, "keys", head_dim),
        "values": _layers_words(scheme, "values", head_dim),
        "whole": whole_words(layout),
        "head_dim": dims[0],
        "code_bits": _mean_bits(scheme, head_dim, lambda fmt, _, dim: fmt.code_bits(dim)),
        "long_context_bits": long_context_bits(scheme, head_dim),
        "stays": budget_words(scheme),
        "not_captured": limits.captured,
        "several_launches": limits.fused,
        "requantized": limits.requantized,
        "costly_choices": costly_choices(scheme, head_dim),
        "knobs": scheme.knobs(),
    }


def describe_all() -> list[dict[str, Any]]:
    """Every preset, aliases included."""
    return [describe(name, scheme) for name, scheme in list_schemes().items()]


def widest_first(names: Iterable[str]) -> list[str]:
    """Presets by their bits in a long context; those that evict come last, since they hold a budget."""

    def place(name: str) -> tuple[bool, float]:
        scheme = get_scheme(name)
        return scheme.evicts, -sum(long_context_bits(scheme))

    return sorted(names, key=place)


def bits_words(least_most: list[float]) -> str:
    """Least and most, or one figure."""
    least, most = least_most
    return f"{least:.2f}" if least == most else f"{least:.2f}–{most:.2f}"


def knob_words(name: str, value: Any) -> str:
    """A knob as it is printed."""
    # A table of widths by tag would take the whole screen.
    if isinstance(value, tuple):
        return f"{name}: {len(value)} entries"
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value!r}"


def step_words(item: dict[str, Any]) -> list[str]:
    """What steps lose, line by line; nothing where they lose nothing."""
    lines = Limits(item["not_captured"], item["several_launches"], item["requantized"]).words()
    by_reason: dict[str, list[str]] = {}
    for choice, reason in item["costly_choices"].items():
        by_reason.setdefault(reason, []).append(choice)
    lines += [f"not captured with {' or '.join(choices)}: {reason}" for reason, choices in by_reason.items()]
    return lines


def _paper_words(item: dict[str, Any]) -> str:
    number = item["paper"].removeprefix("arXiv:")
    link = item["paper"] if number == item["paper"] else f"[{number}](https://arxiv.org/abs/{number})"
    return f"baseline in {link}" if item["group"] == "baseline" else link


def _markdown_rows() -> Iterator[tuple[str, ...]]:
    names: dict[Scheme, list[str]] = {}
    for name in in_order():
        names.setdefault(get_scheme(name), []).append(name)
    for scheme, own in names.items():
        item = describe(own[0], scheme)
        if item["group"] == "eviction":
            continue
        known = ", ".join(f"`{name}`" for name in own) + (" (default)" if DEFAULT_SCHEME in own else "")
        # An alias says nothing of its own.
        purpose = next((text for name in own if (text := entry_of(name)[1].purpose)), item["purpose"])
        values = "as the keys" if item["values"] == item["keys"] else item["values"]
        bits = bits_words(item["long_context_bits"])
        yield known, purpose, bits, item["keys"], values, item["whole"], _paper_words(item)


def eviction_markdown() -> str:
    """Table of the schemes that only evict, whose pages are any other scheme's."""
    lines = ["| name | description | tokens kept | paper |", "|---|---|---|---|"]
    for name in in_order():
        if entry_of(name)[1].group == "eviction":
            item = describe(name, get_scheme(name))
            lines.append(f"| `{name}` | {item['purpose']} | {item['stays']} | {_paper_words(item)} |")
    return "\n".join(lines)


def schemes_markdown() -> str:
    """The table of docs/schemes.md: a row for each scheme with its knobs; without those that only evict."""
    return markdown_table(
        ("name", "description", "bits", "keys", "values", "kept in 16 bits", "paper"), _markdown_rows()
    )
