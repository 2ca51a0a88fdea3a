"""A verdict on presets for one model, safe, lossy or unsafe: by divergence, a copy and a needle, with the reason."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import hfkvq
from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.compile import compile_ahead, shapes_of
from hfkvq.caches.schemes.base import split_knobs
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.terminal import duration, print_notes

from .demo.answers import answer, make_cache, texts
from .demo.prompts import Batch, Subject, is_right, make_batches
from .divergence import run as runs
from .divergence.measurement import NotNumbers, measure
from .divergence.windows import cut, find_texts
from .models import load_model
from .presets import long_context_bits
from .records import BASELINE, device_name, environment, now
from .tables import NOTHING, aligned, new_table, small_number

Record = dict[str, Any]

SAFE, LOSSY, UNSAFE, REFUSED = "safe", "lossy", "unsafe", "refused"
VERDICTS = (SAFE, LOSSY, UNSAFE)
STYLES = {SAFE: "green", LOSSY: "yellow", UNSAFE: "bold red", REFUSED: "dim"}

PRESETS = "best-4.3 best-3.4 best-2.8 best-2.5 saw-int4 saw-int4-kv int4 kitty-pro kitty kivi-2 mixkvq kvarn-k4v2"
PRESETS += " triaxial arkv"

FLOOR = "full"
"""Holds 16 bits: what it loses is rounding, so if it is not safe, no preset is at fault."""

SAFE_KLD, UNSAFE_KLD = 0.02, 0.2
"""Mean divergence, nats. Up to 0.02, perplexity grew by 1 % at most and answers stayed as they were (`best-*` on two
families of models); from 0.02 to 0.07, Kitty and KIVI lost a sixth to a half of hard needles at 4k. The worst cache
that still answers has 0.14, and the least of what breaks on uneven keys 0.35 (up to 8, which is garbage)."""

SAFE_TAIL, UNSAFE_TAIL = 1.0, 5.0
"""Divergence, nats, that 99.9 % of the tokens do not exceed: `best-2.5` has 0.5, `kitty` 2.3 to 3.6, what breaks 7 to
20. Beyond 1 single tokens are lost, such as a digit of a number; at 5 a token that was certain is gone."""

SAFE_TOP1, UNSAFE_TOP1 = 0.90, 0.75
"""Share of tokens with the same most likely one. Rounding alone changes 1 to 2 %, presets that lost no answers up to
6 %. With a quarter changed it is another text."""

LOSSY_LOST, UNSAFE_LOST, LEAST_LOST = 0.25, 0.75, 2
"""Shares of the right answers of `DynamicCache`: the share that may be lost before a preset is lossy, the share from
which it is unsafe, and the least number for either. One may be chance: at the edge of a model's ability any rounding
changes answers."""

TASK_WORKS = 0.5
"""A task of which `DynamicCache` answers a smaller share, or fewer than `LEAST_LOST`, says nothing of caches, and is
left out."""

UNEVEN = 20.0
"""Times the median channel from which keys count as uneven: 4 bits with one scale for all channels have 15 steps, so
the median channel then has less than one."""


@dataclass(frozen=True)
class Effort:
    """Amount of a measurement.

    Attributes:
        prompt: tokens of each, which are not scored.
        scored: tokens behind them.
        batch_size: windows or questions together.
    """

    windows: int
    prompt: int
    scored: int
    tasks: tuple[str, ...]
    samples: int
    batch_size: int


EFFORTS = {
    "cpu": Effort(2, 512, 64, ("copy-256", "passkey-256"), 2, 2),
    "cuda": Effort(8, 2048, 64, ("copy-512", "passkey-2000"), 8, 4),
}
"""Amounts by the kind of device, for about a minute, on a CPU with a small model. Prompts are longer than sinks and
windows, so much of what is attended to is compressed; on a GPU also longer than ARKV's budget."""


def judge(
    kld: float, tail: float, top1: float, lost: Mapping[str, tuple[int, int]], evicts: bool
) -> tuple[str, list[str]]:
    """The verdict, and what speaks against the preset.

    Args:
        kld: mean divergence, nats.
        tail: that 99.9 % of the tokens do not exceed.
        top1: share of tokens with the same most likely one.
        lost: of each task, how many of the answers that `DynamicCache` gave rightly are lost, of how many.
        evicts: whether tokens are forgotten: never safe, since what is asked later is not known here.
    """
    found = [(1, "it evicts: what does not fit its budget is lost")] if evicts else []
    for name, nats, safe, unsafe in (("mean", kld, SAFE_KLD, UNSAFE_KLD), ("99.9 %", tail, SAFE_TAIL, UNSAFE_TAIL)):
        if nats > safe:
            words = f"unsafe is above {unsafe:g}" if nats > unsafe else f"safe is up to {safe:g}"
            found.append((1 + (nats > unsafe), f"{name} KLD {nats:.3g}, {words}"))
    if top1 < SAFE_TOP1:
        words = f"unsafe is below {UNSAFE_TOP1:.0%}" if top1 < UNSAFE_TOP1 else f"safe is from {SAFE_TOP1:.0%} on"
        found.append((1 + (top1 < UNSAFE_TOP1), f"top-1 {top1:.1%}, {words}"))
    for task, (count, of) in lost.items():
        if count >= LEAST_LOST and count > LOSSY_LOST * of:
            found.append((1 + (count >= UNSAFE_LOST * of), f"{task}: {count} of {of} answers lost"))
    return VERDICTS[max((level for level, _ in found), default=0)], [words for _, words in found]


def python_line(name: str) -> str:
    """Line of Python to copy, which makes a cache of a preset."""
    base, knobs = split_knobs(name)
    if base == "triaxial":
        more = "".join(f", {knob}={value!r}" for knob, value in knobs.items())
        return f"TriAxialCache(model, tokenizer{more})"
    return f"MixedKVCache(model{'' if name == DEFAULT_SCHEME else f', {json.dumps(name)}'})"


@torch.inference_mode()
def uneven_keys(subject: Subject, tokens: Tensor) -> Record | None:
    """The layer whose key channels differ most: its number, and how many times the median the largest channel is.

    A channel's size is its mean magnitude after RoPE; heads are compared with their own median, the worst one counts.

    Args:
        tokens: i64 (T,), a prompt.
    """
    cache = make_cache(subject, None)
    subject.model(input_ids=tokens[None].to(subject.model.device), **with_cache(subject.model, cache), use_cache=True)
    found: list[tuple[float, int]] = []
    for number, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        # Layers with recurrent states have none.
        if isinstance(keys, Tensor) and keys.dim() == 4 and keys.numel():
            size = keys[0].float().abs().mean(1)
            found.append((float((size.amax(1) / size.median(1).values.clamp(min=1e-6)).max()), number))
    if not found:
        return None
    ratio, layer = max(found)
    return {"layer": layer, "times_median": ratio, "layers": len(found)}


def _by_token(preset: Preset, keys: Record, head_dim: int) -> bool:
    """True if a layer's keys have one scale for channels of all sizes, in few bits."""
    scheme = preset.by_layer(keys["layers"])[keys["layer"]] if keys["layer"] < keys["layers"] else preset.scheme
    try:
        side = scheme.layout(head_dim, head_dim).keys
    except ValueError:
        return False
    return any(fmt.axis == "token" and fmt.bits < 8 for fmt in side.formats)


def reason(verdict: str, against: Sequence[str], preset: Preset, keys: Record | None, head_dim: int | None) -> str:
    """In plain words: the cause, as far as it is known, and the figures that speak against the preset."""
    if verdict == SAFE:
        return "its predictions and answers are those of DynamicCache, as far as this was measured"
    cause = []
    smooth = getattr(preset.scheme, "smooth_keys", False)
    if keys and keys["times_median"] >= UNEVEN and head_dim and not smooth and _by_token(preset, keys, head_dim):
        cause = [
            f"keys of layer {keys['layer']} have channels {keys['times_median']:.0f} times the median, and this preset "
            "has one scale for all channels of a token"
        ]
    elif not any(each.evicts for each in preset.schemes):
        least, most = long_context_bits(preset.scheme)
        bits = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
        words = "are too few for" if verdict == UNSAFE else "cost accuracy on"
        cause = [f"{bits} bits an element, as it spends them, {words} this model"]
    return "; ".join([*cause, *against])


def _answers(subject: Subject, batches: Mapping[str, list[Batch]], preset: Preset | None) -> dict[str, list[bool]]:
    """Right answers of each task through the cache."""
    found: dict[str, list[bool]] = {}
    for task, parts in batches.items():
        right = found[task] = []
        for batch in parts:
            written = texts(subject, answer(subject, batch, make_cache(subject, preset)))  # type: ignore[arg-type]
            right += [is_right(subject, each, text) for each, text in zip(batch.examples, written, strict=True)]
    return found


def examine(
    subject: Subject,
    tokens: Tensor,
    presets: Mapping[str, Preset],
    effort: Effort,
    refused: Mapping[str, str] | None = None,
    on_progress: Callable[[str, float], Any] = lambda what, share: None,
) -> Record:
    """Measures presets on a model, all through caches as users have them, and judges them.

    Args:
        tokens: i64 (W, T), windows of text; all but the last ``effort.scored`` of each are its prompt.
        refused: by name, why other presets cannot be used with this model.
        on_progress: called with what is being done and the share of the work that is.

    Raises:
        ValueError: the model's own logits are not numbers, or it cannot be measured.
    """
    config = subject.model.config
    shapes = shapes_of(config) or []
    attention = config.get_text_config(decoder=True)._attn_implementation
    compile_ahead(subject.model, presets.values(), tell=lambda what: on_progress(what, 0.0))
    keys = uneven_keys(subject, tokens[0, :512])
    left, broken, measured = dict(presets), dict[str, str](), None
    options: dict[str, Any] = {"prefill": tokens.shape[1] - effort.scored, "batch_size": effort.batch_size}
    options |= {"tokenizer": subject.tokenizer, "on_progress": lambda name, share: on_progress(name, share / 2)}
    while measured is None:
        try:
            measured = measure(subject.model, tokens, left, **options)
        except NotNumbers as error:
            if left.pop(error.cache, None) is None:
                raise
            broken[error.cache] = "its logits are not numbers"
    batches: dict[str, list[Batch]] = {}
    left_out = {}
    for task in effort.tasks:
        try:
            parts = make_batches(subject, task, effort.samples, effort.batch_size, 0, None)
        except ValueError:
            left_out[task] = "longer than the model's positions"
            continue
        # Only what begins with the answer is right, so what would come behind it is not asked for.
        batches[task] = [dataclasses.replace(part, limit=part.limit - 6) for part in parts]
    on_progress(f"{BASELINE} tasks", 0.5)
    stock = _answers(subject, batches, None)
    for task, right in stock.items():
        if sum(right) < max(LEAST_LOST, TASK_WORKS * len(right)):
            left_out[task] = f"DynamicCache itself answers {sum(right)} of {len(right)}"
            del batches[task]
    rows: list[Record] = [
        {"name": name, "verdict": UNSAFE, "reason": words, "preset": presets[name].to_dict()}
        for name, words in broken.items()
    ]
    rows += [{"name": name, "verdict": REFUSED, "reason": words} for name, words in (refused or {}).items()]
    for number, one in enumerate(measured.schemes):
        on_progress(f"{one.name} tasks", 0.5 + 0.5 * (number + 1) / (len(measured.schemes) + 1))
        preset = presets[one.name]
        right = _answers(subject, batches, preset)
        pairs = {task: list(zip(stock[task], each, strict=True)) for task, each in right.items()}
        lost = {
            task: (max(0, sum(a for a, _ in each) - sum(b for _, b in each)), sum(a for a, _ in each))
            for task, each in pairs.items()
        }
        tail, evicts = one.quantile(0.999), any(each.evicts for each in preset.schemes)
        verdict, against = judge(one.mean, tail, one.top1, lost, evicts)
        head_dim = shapes[0].head_dim if shapes else None
        rows.append(
            {
                "name": one.name,
                "verdict": verdict,
                "reason": reason(verdict, against, preset, keys, head_dim),
                "kld": {"mean": one.mean, "p999": tail},
                "top1": one.top1,
                "tasks": {task: {"right": sum(each), "of": len(each)} for task, each in right.items()},
                "bits": sum(long_context_bits(preset.scheme)) / 2,
                "preset": preset.to_dict(),
            }
        )
    rows.sort(key=lambda row: [*presets, *(refused or {})].index(row["name"]))
    safe = [row for row in rows if row["verdict"] == SAFE and row["name"] != FLOOR]
    for row in rows:
        # The line to copy: the preset's own, or that of the safe one nearest in bits.
        near = [row] if row["verdict"] == SAFE else safe
        best = min(near, key=lambda each: abs(each["bits"] - row.get("bits", 4.0)), default=None)
        row["take"] = "DynamicCache()" if best is None else python_line(best["name"])
    return {
        "kind": "hfkvq doctor",
        "date": now(),
        "model": subject.name,
        "layers": config.get_text_config(decoder=True).num_hidden_layers,
        "attention_shapes": [shape._asdict() for shape in shapes],
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "device": device_name(subject.model.device),
        "device_type": subject.model.device.type,
        "attention": attention,
        "effort": dataclasses.asdict(effort) | {"windows": len(tokens), "prompt": tokens.shape[1] - effort.scored},
        "keys": keys,
        "stock": {task: {"right": sum(each), "of": len(each)} for task, each in stock.items()},
        "left_out": left_out,
        "rows": rows,
    }


def examine_named(
    model: str | None,
    names: Sequence[str],
    text: Sequence[Path] | None,
    where: torch.device,
    dtype: torch.dtype | None,
    on_progress: Callable[[str, float], Any],
) -> Record:
    """Record of a model by its name; see `examine`. It also has text, weights, machine and duration."""
    begin = time.monotonic()
    chosen = {name: get_preset(name) for name in (FLOOR, *(names or PRESETS.split()))}
    found = runs.find_checkpoint(model)
    source, effort = found.source, EFFORTS[where.type]
    refused = {}
    for name in list(chosen):
        try:
            runs.check_schemes(found, {name: chosen[name]})
        except ValueError as error:
            refused[name] = str(error)
            del chosen[name]
    if not chosen.keys() - {FLOOR}:
        raise ValueError(f"presets: {source.name} can use none of them: {'; '.join(refused.values())}")
    room = getattr(found.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30
    given = cut(
        find_texts(text, None, "", "text", source.reference, 0),
        found.tokenizer,
        min(room, effort.prompt + effort.scored),
        effort.windows,
    )
    if source.reference and where.type == "cpu":
        # Its operations are so small that several threads gain little.
        torch.set_num_threads(1)
    loaded = load_model(source, where, dtype)
    subject = Subject(source.name, loaded, found.tokenizer, source.reference)
    record = examine(subject, given.tokens, chosen, effort, refused, on_progress)
    weights = source.origin or {"revision": getattr(loaded.config, "_commit_hash", None)}
    if source.reference:
        weights = {"bundled with hfkvq": hfkvq.__version__}
    texts = ", ".join(dict.fromkeys(given.names))
    seconds = time.monotonic() - begin
    return record | {"weights": weights, "text": texts, "environment": environment(), "seconds": seconds}


def print_record(console: Console, record: Record) -> None:
    """Prints verdicts, reasons, lines to copy and what a bug report needs."""
    console.print(_table(record))
    print_notes(console, _notes(record))
    console.print()
    width = max(len(row["name"]) for row in record["rows"])
    for row in record["rows"]:
        if row["name"] == FLOOR:
            continue
        word = f"[{STYLES[row['verdict']]}]{row['verdict']:<7}[/]"
        instead = "" if row["verdict"] == SAFE else "instead: "
        console.print(
            f"{row['name']:<{width}}  {word}  {instead}{escape(row['take'])}", highlight=False, soft_wrap=True
        )
        if instead:
            console.print(f"  {row['reason']}", markup=False, highlight=False, soft_wrap=True)
    console.print("\nFor a bug report:\n\n```text", highlight=False)
    for line in report_lines(record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print("```")


def _cells(record: Record) -> list[list[str]]:
    """Cells of the table: heads of the columns, the baseline, and a row for each preset."""
    rows = [["preset", "verdict", "KLD", "99.9 %", "top-1 %", *record["stock"]]]
    stock = {"name": BASELINE, "verdict": "", "tasks": record["stock"]}
    for row in [stock, *record["rows"]]:
        figures = [NOTHING] * 3
        if "kld" in row:
            figures = [*map(small_number, row["kld"].values()), f"{100 * row['top1']:.1f}"]
        answers = [row.get("tasks", {}).get(task) for task in record["stock"]]
        right = [NOTHING if each is None else f"{each['right']}/{each['of']}" for each in answers]
        rows.append([row["name"], row["verdict"], *figures, *right])
    return rows


def _table(record: Record) -> Table:
    view = new_table(f"{escape(record['model'])}, {record['dtype']}, on {record['device_type']}")
    heads, *rows = _cells(record)
    for at, head in enumerate(heads):
        view.add_column(head, justify="right" if at > 1 else "left", no_wrap=True)
    for at, (name, verdict, *figures) in enumerate(rows):
        style = STYLES.get(verdict, "none")
        view.add_row(name, f"[{style}]{verdict}[/]", *figures, end_section=not at)
    return view


def _notes(record: Record) -> list[str]:
    effort = record["effort"]
    said = [
        f"KLD, nats, from DynamicCache's predictions: {effort['windows']} windows of {record['text']}, "
        f"{effort['scored']} tokens each after {effort['prompt']:,}. Tasks: right answers, of short texts. In "
        f"{duration(record['seconds'])}. So few tokens tell garbage from text, not 1 % from 2 %: `hfkvq kld` measures "
        "more.",
    ]
    said += [f"{task} is left out of the verdicts: {words}." for task, words in record["left_out"].items()]
    if keys := record["keys"]:
        said.append(
            f"Keys are most uneven in layer {keys['layer']}: a channel has {keys['times_median']:.0f} times the median."
        )
    floor = next((row for row in record["rows"] if row["name"] == FLOOR), None)
    if floor is not None and floor["verdict"] in (LOSSY, UNSAFE):
        said.append(
            "`full` holds all 16 bits, and yet differs: the attention or the kernels are at fault, not the presets. "
            "Please report it."
        )
    return said


def report_lines(record: Record) -> list[str]:
    """Block for a bug report: model, machine, versions and figures, in plain text."""
    shapes = [
        f"{one['heads']} query and {one['kv_heads']} KV heads of {one['head_dim']}"
        + f", window {one['window']}" * bool(one["window"])
        for one in record["attention_shapes"]
    ]
    weights = ", ".join(f"{name} {value}" for name, value in record["weights"].items() if value)
    about = {
        "model": f"{record['model']}, {record['layers']} layers, {'; '.join(shapes) or 'heads unknown'}",
        "weights": weights or "unknown",
        "run": f"{record['dtype']}, attention {record['attention']}, on {record['device']}, {record['date']}",
    }
    about |= record["environment"]
    if keys := record["keys"]:
        about["keys"] = f"layer {keys['layer']}: a channel {keys['times_median']:.1f} times the median"
    return [*aligned(about.items()), "", *aligned(_cells(record))]
