"""What `hfkvq schemes` prints: a line for each preset, or a page about one of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.knob_texts import allowed_words, default_words, knob_texts
from hfkvq.caches.named import NamedCache
from hfkvq.caches.preset import Preset
from hfkvq.caches.registry import entry_of, in_order, presets
from hfkvq.caches.scheme import Scheme, get_scheme

from ..figures import figure, figures
from ..tables import NOTHING, narrow_table, number, small_number
from .schemes import HEAD_DIM, bits_words, describe, knob_words, long_context_bits, step_words


def kept_bits(scheme: Scheme) -> str:
    """Bits in a long context; with a star those of a token that is kept."""
    return bits_words(long_context_bits(scheme)) + ("*" if scheme.evicts else "")


def loss_words(preset: str) -> str:
    """What the preset does to the perplexity of the real model."""
    found = figure("loss", preset)
    return NOTHING if found is None else _change(found["perplexity_ratio"])


def _change(ratio: float) -> str:
    """In per cent, with its sign unless it rounds to nothing."""
    words = f"{100 * (ratio - 1):+.1f}"
    return f"{'0.0' if words in ('+0.0', '-0.0') else words} %"


def step_time(preset: str) -> str:
    """Milliseconds of a step."""
    found = figure("steps", preset)
    return number(None if found is None else found["ms"], 1)


def _purpose(name: str) -> str:
    entry, scheme = entry_of(name)[1], get_scheme(name)
    same = [other for other in presets() if other != name and get_scheme(other) == scheme]
    if not entry.purpose and same:
        return f"Another name for {same[-1]}."
    return entry.purpose or (inspect.getdoc(type(scheme)) or "").split("\n")[0]


def schemes_table(width: int) -> Table:
    """A line for each preset; what a screen of this width has no room for ends in dots."""
    rows = []
    for name in in_order():
        shown = f"{name} (default)" if name == DEFAULT_SCHEME else name
        rows.append((shown, kept_bits(get_scheme(name)), loss_words(name), step_time(name), _purpose(name)))
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
    """How to read the table."""
    loss, steps = figures()["loss"], figures()["steps"]
    return [
        f"bits: per element in a long context, scales included, mean of keys and values, heads of {HEAD_DIM} channels; "
        "* per token that is kept.",
        f"loss: increase in perplexity over DynamicCache, on {loss['model']}, {loss['windows']} contexts of "
        f"{loss['context']:,} tokens; full shows what rounding alone does. Large models have not been measured.",
        f"ms: one decode step at batch size 1 after {steps['context']:,} tokens, {steps['model']}, on one "
        f"{steps['device']}; DynamicCache takes {steps['dynamic_ms']:.1f}. {NOTHING}: not measured.",
        "`hfkvq schemes NAME` explains a preset and its options; `hfkvq recommend` chooses one for your GPU and text.",
    ]


def named_class(scheme: Scheme) -> str | None:
    """The cache that is named after a scheme, if there is one."""
    own = type(scheme)
    found = (cls.__name__ for cls in NamedCache.__subclasses__() if entry_of(cls.preset_name)[0] is own)
    return next(found, None)


def explain(name: str, preset: Preset) -> dict[str, Any]:
    """All that `describe` says, what each knob is for, and what was measured.

    Args:
        name: as it was typed: a preset, maybe with knobs, or a file.
        preset: what it stands for.
    """
    scheme = preset.scheme
    texts, fields = knob_texts(type(scheme)), {field.name: field for field in dataclasses.fields(scheme)}
    knobs = {
        knob: {
            "value": scheme.knobs()[knob],
            "default": default_words(fields[knob]),
            "allowed": allowed_words(fields[knob]),
            "about": texts.get(knob, ""),
        }
        for knob in dict.fromkeys([*texts, *fields])
    }
    kin = {other: dict(entry_of(other)[1].knobs) for other in in_order() if entry_of(other)[0] is type(scheme)}
    equal = [other for other in presets() if get_scheme(other) == scheme]
    known = name if name in equal else next(iter(equal), name)
    measured = {kind: figure(kind, known) for kind in ("loss", "steps", "attention")}
    found = describe(known, scheme) | {"name": name, "layers": {which: own.to_dict() for which, own in preset.layers}}
    return found | {"explained": knobs, "presets": kin, "class_name": named_class(scheme), "measured": measured}


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
    yield "steps", "; ".join([*captured, *step_words(item)])
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
        value = tuple(knob["value"]) if isinstance(knob["value"], list) else knob["value"]
        here = knob_words(name, value).removeprefix(f"{name}=").removeprefix(f"{name}: ")
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
    lines = [f'MixedKVCache(model.config, "{typed}", {knob}={value!r})']
    lines.append(f'"{typed}:{knob}={value}", the same there and in every command')
    if item["class_name"]:
        lines.append(f"{item['class_name']}(model.config, {knob}={value!r})")
    use = Text("Set knobs by name:\n" + "\n".join(f"  {line}" for line in lines))
    return Group(Text(f"{item['name']} ({item['class']})", style="bold"), facts, knobs, use)
