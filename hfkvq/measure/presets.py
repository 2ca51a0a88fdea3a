"""Presets in words, bits and measured figures: `hfkvq schemes` as a table, a page about one preset, and Markdown."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.named import NamedCache
from hfkvq.caches.schemes.base import (
    Entry,
    Layout,
    Limits,
    Scheme,
    SideLayout,
    entry_of,
    get_scheme,
    presets,
)
from hfkvq.caches.schemes.eviction import EvictionScheme, TokenEviction
from hfkvq.caches.schemes.preset import Preset
from hfkvq.kernels.pages import PageFormat, Side

from .tables import NOTHING, narrow_table, number, small_number

KIND = "hfkvq figures"
PATH = Path(__file__).parent / "figures.json"


@functools.cache
def figures() -> dict[str, Any]:
    """Under "loss", "steps" and "attention": what was measured on, and under "presets" the figures of each preset.

    Loss is the divergence from `DynamicCache` on SmolLM2, steps are milliseconds of one row, attention the speed-up of
    one layer of many rows. Presets that nobody measured are missing.
    """
    return json.loads(PATH.read_text(encoding="utf-8"))


def figure(kind: str, preset: str) -> Any:
    """One of `figures`, None if it was not measured."""
    return figures()[kind]["presets"].get(preset)


_ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_SEE = re.compile(r"see `\w+`[;.]?\s*")


def _own_texts(cls: type) -> dict[str, str]:
    """The section "Attributes" of a class's own docstring, by name, each on one line."""
    doc = inspect.cleandoc(vars(cls).get("__doc__") or "")
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in doc.partition("\nAttributes:\n")[2].splitlines():
        if line and not line.startswith("    "):
            break
        if entry := _ENTRY.fullmatch(line):
            first, *others = entry[1].split(", ")
            names = [first]
            found |= {first: [entry[2]]} | {name: [f"with {first}, see there."] for name in others}
        elif line.strip():
            for name in names:
                found[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def knob_texts(cls: type[Scheme]) -> dict[str, str]:
    """Texts of a scheme's knobs by name, in the order of its docstring.

    A class's own words go before those of the classes that it derives from; "see `TokenEviction`" stands for theirs.
    Nothing where Python was told to drop docstrings.
    """
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        for name, text in _own_texts(each).items():
            base, see = found.get(name, ""), _SEE.match(text)
            # "See there. And more": theirs, and the rest as a sentence of its own.
            rest = text[see.end() :] if see else ""
            found[name] = f"{base} {rest[:1].upper()}{rest[1:]}".strip() if see else text
    fields = {field.name for field in dataclasses.fields(cls)}
    return {name: found[name] for name in dict.fromkeys([*_own_texts(cls), *found]) if name in fields}


def _words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def allowed_words(field: dataclasses.Field[Any]) -> str:
    """Legal values of a knob, in words; nothing where any value of its type may do."""
    meta: Mapping[str, Any] = field.metadata
    low, high, choices = (meta.get(name) for name in ("low", "high", "choices"))
    if choices is not None:
        return "" if field.type == "bool" else ", ".join(map(repr, choices))
    if low is None and high is None:
        return ""
    if high is None:
        return f"from {_words(low)}"
    return f"up to {_words(high)}" if low is None else f"{_words(low)} to {_words(high)}"


HEAD_DIM = 128


def format_words(fmt: PageFormat, head_dim: int) -> str:
    """A page format in words: "2 bits, a scale per channel and 128 tokens"."""
    if fmt.bits == 16:
        return "16 bits, unquantized"
    width = "8 bits (fp8)" if fmt.bits == 8 else "1 bit" if fmt.bits == 1 else f"{fmt.bits} bits"
    if fmt.trellis:
        width += " in trellis codes"
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


def _layers_words(scheme: Scheme, side: Side, head_dim: int) -> str:
    dims = _dims(scheme, head_dim)
    words: Counter[str] = Counter()
    for each, count in _layers(scheme):
        own = getattr(each.layout(*dims), side)
        said = "; or ".join(format_words(fmt, dims[side == "values"]) for fmt in own.formats)
        if own.rotate:
            said += f", rotated in blocks of {own.rotate}"
        words[said + ", smoothed" * (side == "keys" and each.smooths_keys)] += count
    (usual, _), *others = words.most_common()
    return "".join([usual, *(f"; in {count} % of the layers {each}" for each, count in others)])


def whole_words(layout: Layout) -> str:
    """Unquantized tokens of a layout."""
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
    """Number of newest tokens that wait unsealed, least to most."""
    if all(fmt.bits == 16 for fmt in side.formats):
        return ""
    most = side.local + side.unit - 1
    return "" if not most else str(most) if most == side.local else f"{side.local}–{most}"


def budget_words(scheme: Scheme) -> str:
    """Kept tokens in words; empty where all stay."""
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


def long_context_bits(scheme: Scheme, head_dim: int = HEAD_DIM) -> list[float]:
    """Least and most bits per element, scales included, of pages alone: the mean of keys, values and layers."""
    return _mean_bits(scheme, head_dim, page_bits)


def _dims(scheme: Scheme, head_dim: int) -> tuple[int, int]:
    """Channels of keys and values; of latents and their rotary parts those of DeepSeek's models."""
    return (512, 64) if scheme.latents else (head_dim, head_dim)


def _layers(scheme: Scheme) -> list[tuple[Scheme, int]]:
    """Schemes of a model's layers, and how many of 100 take each: shares of the depth count as they are written."""
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
    """A preset: whom it is for, words, bits, knobs, and what its steps lose.

    Bits are the mean of keys and values, least and most where tokens differ in width; ``long_context_bits`` counts
    pages alone, since windows and tables vanish in a long context. ``not_captured`` says why steps can be neither
    captured nor compiled, ``requantized`` why tokens that stay are quantized again; None if they do not. ``stays`` says
    which tokens do, where others are evicted.
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
        "requantized": limits.requantized,
        "knobs": scheme.knobs(),
    }


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


# The table and the page of `hfkvq schemes`.


def _change(ratio: float) -> str:
    """In per cent, with its sign unless it rounds to nothing."""
    words = f"{100 * (ratio - 1):+.1f}"
    return f"{'0.0' if words in ('+0.0', '-0.0') else words} %"


def _purpose(name: str) -> str:
    entry, scheme = entry_of(name)[1], get_scheme(name)
    same = [other for other in presets() if other != name and get_scheme(other) == scheme]
    if not entry.purpose and same:
        return f"Another name for {same[-1]}."
    return entry.purpose or (inspect.getdoc(type(scheme)) or "").split("\n")[0]


def schemes_table(width: int) -> Table:
    """A line for each preset; what a screen of this width has no room for ends in dots."""
    rows = []
    for name in presets():
        shown, scheme = f"{name} (default)" if name == DEFAULT_SCHEME else name, get_scheme(name)
        # With a star the bits of a token that is kept.
        bits = bits_words(long_context_bits(scheme)) + ("*" if scheme.evicts else "")
        loss, steps = figure("loss", name), figure("steps", name)
        change = NOTHING if loss is None else _change(loss["perplexity_ratio"])
        rows.append((shown, bits, change, number(steps and steps["ms"], 1), _purpose(name)))
    view = narrow_table(padding=(0, 2, 0, 0), collapse_padding=False)
    room = width - 2
    for place, title in enumerate(("preset", "bits", "loss", "ms")):
        least = max(len(title), *(len(row[place]) for row in rows))
        view.add_column(title, justify="right" if place else "left", no_wrap=True, min_width=least)
        room -= least + 3
    view.add_column("description", no_wrap=True)
    for *measured, purpose in rows:
        view.add_row(*measured, purpose if len(purpose) <= room else f"{purpose[: max(room - 1, 0)].rstrip()}…")
    return view


def schemes_notes() -> list[str]:
    """Legend of the table."""
    loss = figures()["loss"]
    return [
        f"bits: per element in a long context, scales included, mean of keys and values, heads of {HEAD_DIM} channels; "
        "* per token that is kept.",
        f"loss: increase in perplexity over DynamicCache, on {loss['model']}, {loss['windows']} contexts of "
        f"{loss['context']:,} tokens; full shows what rounding alone does. Large models have not been measured.",
        f"{steps_note()} {NOTHING}: not measured.",
        "`hfkvq schemes NAME` explains a preset and its options; `hfkvq recommend` chooses one for your GPU and text.",
    ]


def steps_note() -> str:
    """Legend of the times of steps."""
    steps = figures()["steps"]
    return (
        f"ms: one decode step at batch size 1 after {steps['context']:,} tokens, {steps['model']}, on one "
        f"{steps['device']}; DynamicCache takes {steps['dynamic_ms']:.1f}."
    )


def explain(name: str, preset: Preset) -> dict[str, Any]:
    """All that `describe` says, what each knob is for, and what was measured.

    Args:
        name: as it was typed: a preset, maybe with knobs, or a file.
    """
    scheme = preset.scheme
    texts, fields = knob_texts(type(scheme)), {field.name: field for field in dataclasses.fields(scheme)}
    knobs = {
        knob: {
            "value": scheme.knobs()[knob],
            "default": f"{len(default)} entries" if isinstance(default, tuple) else _words(default),
            "allowed": allowed_words(fields[knob]),
            "about": texts.get(knob, ""),
        }
        for knob in dict.fromkeys([*texts, *fields])
        for default in [fields[knob].default]
    }
    kin = {other: dict(entry_of(other)[1].knobs) for other in presets() if entry_of(other)[0] is type(scheme)}
    equal = [other for other in presets() if get_scheme(other) == scheme]
    known = name if name in equal else next(iter(equal), name)
    measured = {kind: figure(kind, known) for kind in ("loss", "steps", "attention")}
    # The cache that is named after the scheme, if there is one.
    named = (cls.__name__ for cls in NamedCache.__subclasses__() if entry_of(cls.preset_name)[0] is type(scheme))
    found = describe(known, scheme) | {"name": name, "layers": {which: own.to_dict() for which, own in preset.layers}}
    return found | {"explained": knobs, "presets": kin, "class_name": next(named, None), "measured": measured}


def _facts(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "about", item["purpose"]
    yield "keys", item["keys"]
    yield "values", "as the keys" if item["values"] == item["keys"] else item["values"]
    yield "16 bits", item["whole"]
    if item["stays"]:
        yield "kept", item["stays"]
    total, codes = bits_words(item["long_context_bits"]), bits_words(item["code_bits"])
    yield "bits", f"{total} in a long context, scales included; {codes} of codes"
    # The layer that is timed alone has the formats that are named first.
    timed = "a narrower layer" if any(" of the layers " in item[side] for side in ("keys", "values")) else "a layer"
    yield from _measured(item["measured"], timed)
    captured = [] if item["not_captured"] else ["captured as CUDA graphs"]
    yield "steps", "; ".join([*captured, *Limits(item["not_captured"], item["requantized"]).words()])
    for which, scheme in item["layers"].items():
        yield "layers", f"{which}: {_knobs(scheme)}"
    if item["paper"]:
        yield "paper", item["paper"]
    for name, knobs in item["presets"].items():
        default = ", the default of MixedKVCache" if name == DEFAULT_SCHEME else ""
        yield "presets", f"{name}: {_knobs(knobs) or 'defaults'}{default}"


def _knobs(knobs: dict[str, Any]) -> str:
    return ", ".join(f"{knob}={value!r}" for knob, value in knobs.items())


def _measured(found: dict[str, Any], timed: str) -> Iterator[tuple[str, str]]:
    loss, steps, about = found["loss"], found["steps"], figures()
    if loss is not None:
        low, high = map(small_number, loss["kld_interval"])
        yield (
            "loss",
            f"perplexity {_change(loss['perplexity_ratio'])}, KLD {small_number(loss['kld'])} nats ({low} to "
            f"{high}), same top token {100 * loss['top1']:.1f} % ({about['loss']['model']}, {loss['file']})",
        )
    if steps is not None:
        words = f"a decode step at 32k takes {steps['ms']:.2f} ms, DynamicCache {about['steps']['dynamic_ms']:.2f}"
        if found["attention"] is not None:
            words += f"; decode attention of {timed} at 32 x 32k is {found['attention']:.2f} times as fast as bf16"
        yield "speed", f"{words} ({about['steps']['model']}, {about['steps']['device']})"
    missing = [what for what, one in (("loss", loss), ("speed", steps)) if one is None]
    if missing:
        yield "not measured", ", ".join(missing)


def preset_page(item: dict[str, Any]) -> Group:
    """A page about a preset, from what `explain` says."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True, style="dim")
    facts.add_column()
    before = ""
    for what, words in _facts(item):
        facts.add_row("" if what == before else what, Text(words))
        before = what
    knobs = narrow_table(padding=(0, 2, 0, 0))
    knobs.add_column("knob", no_wrap=True)
    knobs.add_column("here", no_wrap=True)
    knobs.add_column("what it does")
    for name, knob in item["explained"].items():
        value = knob["value"]
        # A table of widths by tag would take the whole screen.
        here = f"{len(value)} entries" if isinstance(value, (list, tuple)) else _words(value)
        words = Text(knob["about"].replace("``", ""))
        words.append(
            f" Default {knob['default']}" + (f"; allowed: {knob['allowed']}." if knob["allowed"] else "."), style="dim"
        )
        knobs.add_row(name, Text(here), words)
    # An example with a number says more than one with None.
    settings = {knob: each["value"] for knob, each in item["explained"].items()}
    typed, knob = (
        item["name"].partition(":")[0],
        next((k for k in settings if settings[k] is not None), next(iter(settings))),
    )
    value = settings[knob]
    lines = [f'MixedKVCache(model, "{typed}", {knob}={value!r})']
    lines.append(f'"{typed}:{knob}={value}", the same there and in every command')
    if item["class_name"]:
        lines.append(f"{item['class_name']}(model, {knob}={value!r})")
    use = Text("Set knobs by name:\n" + "\n".join(f"  {line}" for line in lines))
    return Group(Text(f"{item['name']} ({item['class']})", style="bold"), facts, knobs, use)
