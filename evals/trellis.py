"""Trellis codes in place of scalar ones in `best-2.5`'s pages, simulated: what they would lose, and in how many bits.

    PYTHONPATH=. python evals/trellis.py --model FILE.gguf --out FILE.json [--data DIR] [--windows 16] CACHE ...

A cache is a preset (``best-2.5``) or ``trellis`` with options (``trellis:keys=3x44+2x84:values=2:states=1024``). Caches
named ``trellis`` are `MixedKVCache` with the sinks, windows, rotations, layer of 4 bits and query statistics of
`best-2.5`. Pages hold 16 bits: each is filled with what its trellis code would decode to, so losses come through the
cache's own path, and no memory is saved. Bits are computed from the format.

The preset `trellis-2.5` came of it: values in the code of `hfkvq.kernels.trellis`, whose states give two
numbers each, computed and not looked up. It loses a tenth more of values than the trained tables here.

A code is a walk through S states: ``state = ((state << k) | k new bits) mod S``, and each element is ``table[state]``
times a scale, of keys plus a mean. Keys are one sequence a channel and page, values one a token. `walk` finds the walk
of least squared error (Viterbi). A sequence of n elements takes k n bits, log2 S - k more for its first state unless it
bites its tail (its last states lead to its first one), and its scale and mean.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from hfkvq.caches.schemes.base import Layout, Limits, SideLayout, knob, split_knobs
from hfkvq.caches.schemes.kitty import Kitty
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.caches.store import kvstore
from hfkvq.kernels.pages import PageFormat
from hfkvq.kernels.quantize import dequantize_pages, quantize_pages
from hfkvq.kernels.seal import channel_widths
from hfkvq.measure.divergence import measure
from hfkvq.measure.divergence.run import as_record
from hfkvq.measure.divergence.windows import cut, find_texts
from hfkvq.measure.models import find_model, load_model, load_tokenizer
from hfkvq.measure.presets import page_bits
from hfkvq.measure.records import device_name

COSTS = {"cpu": 2**22, "cuda": 2**29}
"""Costs of a walk's states that are held at once, by device: f32 each."""

ROUNDS, NOISE = 12, 4096
"""Training of a table: rounds of walking and averaging, and sequences of 128 numbers walked in each."""

STEPS = 16
"""Steps an octave of scales of 8 bits."""


# Codes.


def walk(x: Tensor, tables: Tensor, widths: Sequence[int], biting: bool = False) -> Tensor:
    """States of the walk of least squared error: i64 (N, n).

    Args:
        x: f32 (N, n), sequences.
        tables: f32 (c, S), what the states of elements i, i + c, i + 2 c... stand for; S is a power of two.
        widths: new bits of the same elements, c numbers.
        biting: whether the first state follows upon the last one. The bits that the two share are those of a free walk
            that begins in the middle of the sequence, of which n must hold two halves of whole multiples of c.
    """
    states = tables.shape[1]
    rows = max(1, COSTS[x.device.type] // (states * x.shape[1]))
    minus_twice, square = -2 * tables, tables.square()
    costs = x.new_empty(x.shape[1], min(rows, len(x)), states)
    given = minus_twice, square, widths, costs
    found = []
    for part in x.split(rows):
        shared = None
        if biting:
            half = x.shape[1] // 2
            shared = _walked(part.roll(-half, 1), *given)[:, x.shape[1] - half] >> widths[0]
        found.append(_walked(part, *given, shared))
    return torch.cat(found)


def _walked(
    x: Tensor,
    minus_twice: Tensor,
    square: Tensor,
    widths: Sequence[int],
    costs: Tensor,
    shared: Tensor | None = None,
) -> Tensor:
    """Walks of some sequences; ``shared`` i64 (N,) are the upper bits of the first state and lower bits of the last."""
    rows, count, states, cycle = len(x), x.shape[1], square.shape[1], len(widths)
    costs = costs[:, :rows]
    for i in range(count):
        at, k = i % cycle, widths[i % cycle]
        # The square of x is the same for all walks.
        if i == 0:
            torch.addcmul(square[at], x[:, :1], minus_twice[at], out=costs[0])
            if shared is not None:
                groups = torch.arange(states, device=x.device) >> k
                costs[0].masked_fill_(groups != shared[:, None], torch.inf)
            continue
        # State j (S >> k) + g leads to states g << k to (g << k) + 2^k - 1.
        best = costs[i - 1].view(rows, 1 << k, states >> k).amin(1)
        own = torch.addcmul(square[at], x[:, i : i + 1], minus_twice[at])
        torch.add(own.view(rows, -1, 1 << k), best[..., None], out=costs[i].view(rows, -1, 1 << k))
    found = torch.empty(rows, count, dtype=torch.int64, device=x.device)
    state = costs[-1].argmin(1) if shared is None else _best_before(costs[-1], shared, widths[0])
    found[:, -1] = state
    for i in range(count - 1, 0, -1):
        k = widths[i % cycle]
        state = _best_before(costs[i - 1], state >> k, k)
        found[:, i - 1] = state
    return found


def _best_before(costs: Tensor, group: Tensor, k: int) -> Tensor:
    """Cheapest state of those that lead to a group: i64 (N,)."""
    rows, states = costs.shape
    index = group[:, None, None].expand(-1, 1 << k, 1)
    return costs.view(rows, 1 << k, states >> k).gather(2, index)[..., 0].argmin(1) * (states >> k) + group


def looked_up(states: Tensor, tables: Tensor) -> Tensor:
    """Numbers that states i64 (N, n) stand for."""
    cycle = len(tables)
    return torch.stack([tables[i][states[:, i::cycle]] for i in range(cycle)], -1).flatten(1)


@lru_cache(maxsize=64)
def trained(widths: tuple[int, ...], states: int, device: torch.device) -> Tensor:
    """Tables f32 (c, S) for normal numbers: those of walks are averaged by state, and walked again."""
    generator = torch.Generator("cpu").manual_seed(0)
    count = NOISE * 64 // states if device.type == "cpu" else NOISE * 4
    noise = torch.randn(count, 128, generator=generator).to(device)
    tables = torch.randn(len(widths), states, generator=generator).to(device)
    for _ in range(ROUNDS):
        found = walk(noise, tables, widths)
        for i in range(len(widths)):
            at, own = found[:, i :: len(widths)].flatten(), noise[:, i :: len(widths)].flatten()
            sums = torch.zeros(2, states, device=device)
            sums[0].index_add_(0, at, own)
            sums[1].index_add_(0, at, torch.ones_like(own))
            tables[i] = torch.where(sums[1] > 0, sums[0] / sums[1].clamp(min=1), tables[i])
    return tables


@lru_cache(maxsize=64)
def computed(widths: tuple[int, ...], states: int, device: torch.device) -> Tensor:
    """Tables f32 (c, S) of QTIP's first computed code (arXiv:2406.11235): the sum of four bytes of a product."""
    state = torch.arange(states, dtype=torch.int64)
    mixed = (state * 34038481 + 76625530) & 0xFFFFFFFF
    total = sum((mixed >> shift) & 255 for shift in (0, 8, 16, 24))
    own = (total.double() - 510) / 147.8
    return own.float().to(device).expand(len(widths), -1)


TABLES = {"trained": trained, "computed": computed}


def fitted_scale(x: Tensor, found: Tensor, scale: Tensor, unbiased: bool) -> Tensor:
    """Scales of walks' numbers: by least squares, or as `Code` says of ``unbiased``."""
    along = (x * found).sum(1, keepdim=True)
    fitted = x.square().sum(1, keepdim=True) / along if unbiased else along / found.square().sum(1, keepdim=True)
    # A walk that tells nothing of its sequence keeps the scale that it was made with.
    return torch.where((along > 0) & fitted.isfinite() & (fitted < 2 * scale), fitted, scale)


@dataclass(frozen=True)
class Code:
    """A trellis code of sequences.

    Attributes:
        widths: new bits of each element, in turns.
        states: S.
        biting: see `walk`.
        centred: whether a sequence has a mean.
        scale_bits: of a sequence's scale, 16 (f16) or 8 (powers of ``2^(1 / STEPS)``).
        table: one of `TABLES`.
        fits: walks that are tried, with scales from the deviation to one that reaches the farthest number.
        power: of errors, whose sum chooses among them.
        unbiased: whether the fit keeps a sequence's length along itself, ``x·x̂ = x·x``, in place of the least error,
            which makes everything shorter: what many tokens have in common does not average out.
    """

    widths: tuple[int, ...]
    states: int = 256
    biting: bool = False
    centred: bool = False
    scale_bits: int = 16
    table: str = "trained"
    fits: int = 1
    power: int = 2
    unbiased: bool = False

    def rounded(self, x: Tensor) -> Tensor:
        """Sequences f32 (N, n) as they are decoded."""
        tables = TABLES[self.table](self.widths, self.states, x.device)
        own = x.mean(1, keepdim=True) if self.centred else torch.zeros_like(x[:, :1])
        deviation = (x - own).square().mean(1, keepdim=True).sqrt()
        middle = (x.amax(1, keepdim=True) + x.amin(1, keepdim=True)) / 2 if self.centred else own
        widest = torch.maximum((x - middle).abs().amax(1, keepdim=True) / tables.abs().max(), deviation)
        best: tuple[Tensor, Tensor] | None = None
        for i in range(self.fits):
            # Scales go from one by the deviation, which few far numbers exceed, to one that reaches all of them.
            share = i / max(1, self.fits - 1)
            mean = (own + share * (middle - own)).half().float()
            scale = self._stored(deviation + share * (widest - deviation))
            found = looked_up(walk((x - mean) / scale, tables, self.widths, self.biting), tables)
            fitted = self._fitted(x, found, scale)
            for made in (fitted,) if self.unbiased else (found * scale + mean, fitted):
                lost = (x - made).abs().pow(self.power).sum(1, keepdim=True)
                if best is None:
                    best = lost, made
                else:
                    less = lost < best[0]
                    best = torch.where(less, lost, best[0]), torch.where(less, made, best[1])
        assert best is not None
        return best[1]

    def _fitted(self, x: Tensor, found: Tensor, scale: Tensor) -> Tensor:
        """A walk's numbers times a scale, plus a mean, of least squared error."""
        middle, own = found.mean(1, keepdim=True), x.mean(1, keepdim=True)
        if not self.centred:
            middle = own = torch.zeros_like(own)
        scale = self._stored(fitted_scale(x - own, found - middle, scale, self.unbiased))
        return found * scale + (own - scale * middle).half().float()

    def _stored(self, scale: Tensor) -> Tensor:
        scale = scale.clamp(2.0**-14, 65504)
        return torch.exp2((scale.log2() * STEPS).round() / STEPS) if self.scale_bits == 8 else scale.half().float()

    def bits(self, count: int) -> float:
        """Bits per element of a sequence of ``count`` elements, its scale and mean included."""
        start = 0 if self.biting else math.log2(self.states) - self.widths[0]
        return sum(self.widths) / len(self.widths) + (start + self.scale_bits + 16 * self.centred) / count


# Pages.


@dataclass(frozen=True, kw_only=True)
class Trellis(Kitty):
    """Pages of `best-2.5` whose numbers are those that trellis codes would decode to.

    Attributes:
        keys: widths of key channels and how many of 128 have each, in each page and head; those get most that would
            lose most, by variance in the page and square of the mean magnitude of queries. ``21x64`` has one element of
            two and one of one bit in turns; "scalar" is `best-2.5`'s own.
        values: widths of values, in turns, or "scalar".
        states: S.
        biting: see `walk`.
        scale_bits: see `Code`.
        table: see `Code`.
        fits: see `Code`; of keys.
        power: see `Code`; of keys.
        unbiased: see `Code`; the sides that are.
    """

    # Registration needs a name.
    name = ""
    presets: ClassVar = {}

    keys: str = knob("4x32+2x96")
    values: str | int = knob("2")
    states: int = knob(256, choices=(64, 256, 1024, 4096))
    biting: bool = knob(False, choices=(False, True))
    scale_bits: int = knob(16, choices=(8, 16))
    table: str = knob("trained", choices=tuple(TABLES))
    fits: int = knob(2, low=1, high=8)
    power: int = knob(4, choices=(2, 4))
    unbiased: str = knob("values", choices=("neither", "keys", "values", "both"))

    def limits(self, key_dim: int, value_dim: int) -> Limits:
        """Steps are not captured, since pages are not written by their kernels."""
        return Limits("trellis codes are simulated")

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Layout of Kitty, with pages of 16 bits in layers that are not wide."""
        own = super().layout(key_dim, value_dim)
        return (
            own if self.is_wide else replace(own, keys=_whole(own.keys, key_dim), values=_whole(own.values, value_dim))
        )

    @property
    def is_wide(self) -> bool:
        """True in layers of 4-bit keys or values, whose pages are those of Kitty."""
        return self.key_bits == 4 or self.value_bits == 4

    def code(self, widths: tuple[int, ...], centred: bool) -> Code:
        """A code of these widths."""
        own = (self.fits, self.power) if centred else (1, 2)
        unbiased = self.unbiased in ("both", "keys" if centred else "values")
        return Code(widths, self.states, self.biting, centred, self.scale_bits, self.table, *own, unbiased)

    def classes(self, head_dim: int) -> list[tuple[tuple[int, ...], int]]:
        """Widths of key channels and how many have them, those of most bits first."""
        pairs = [part.split("x") for part in self.keys.split("+")]
        found = [(parsed(widths), round(int(count) * head_dim / 128)) for widths, count in pairs]
        if sum(count for _, count in found) != head_dim:
            raise ValueError(f"keys: got {self.keys!r}, allowed counts whose sum is 128.")
        return sorted(found, key=lambda each: -sum(each[0]) / len(each[0]))

    def page_bits(self, head_dim: int) -> tuple[float, float]:
        """Bits per element of pages of keys and of values, everything but tables of pages included."""
        real = Kitty.layout(self, head_dim, head_dim)
        keys, values = (
            page_bits(real.keys.formats[0], "keys", head_dim),
            page_bits(real.values.formats[0], "values", head_dim),
        )
        if self.is_wide:
            return keys, values
        if self.keys != "scalar":
            classes = self.classes(head_dim)
            keys = sum(count * self.code(widths, True).bits(self.page_size) for widths, count in classes) / head_dim
            # A byte a channel and page says which channel stands where.
            keys += 8 / self.page_size if len(classes) > 1 else 0
        if self.values != "scalar":
            values = self.code(parsed(self.values), False).bits(head_dim)
        return keys, values

    def rounded_keys(self, x: Tensor, q_abs: Tensor | None) -> Tensor:
        """Keys (B, H, n, G, D) of whole pages as they are decoded: f32."""
        if self.keys == "scalar":
            fmt = Kitty.layout(self, x.shape[-1], x.shape[-1]).keys.formats[0]
            widths = channel_widths(x, fmt, self.channel_rule, q_abs)
            return _scalar(x, fmt, "keys", widths)
        channels = x.float().transpose(3, 4)
        score = channels.var(-1, correction=0)
        if q_abs is not None:
            score = score * q_abs.float()[:, :, None].square()
        order = score.argsort(dim=-1, descending=True, stable=True)[..., None].expand(channels.shape)
        ranked, parts, at = channels.gather(3, order), [], 0
        for widths, count in self.classes(x.shape[-1]):
            own = ranked[..., at : at + count, :]
            parts.append(self.code(widths, True).rounded(own.flatten(0, 3)).view(own.shape))
            at += count
        return torch.empty_like(channels).scatter_(3, order, torch.cat(parts, 3)).transpose(3, 4)

    def rounded_values(self, x: Tensor) -> Tensor:
        """Values (B, H, n, G, D) of whole pages as they are decoded: f32."""
        if self.values == "scalar":
            return _scalar(x, Kitty.layout(self, x.shape[-1], x.shape[-1]).values.formats[0], "values")
        return self.code(parsed(self.values), False).rounded(x.float().flatten(0, 3)).view(x.shape)


def parse_cache(text: str) -> Preset:
    """A preset; ``trellis``, with options, is `Trellis` with what `best-2.5` has."""
    name, knobs = split_knobs(text)
    known = {key: value for key, value in get_preset("best-2.5").scheme.knobs().items() if key not in knobs}
    return get_preset(Trellis(**known, **knobs) if name == "trellis" else text)


def parsed(widths: str | int) -> tuple[int, ...]:
    """Widths that are written as digits."""
    return tuple(map(int, str(widths)))


def _whole(side: SideLayout, head_dim: int) -> SideLayout:
    return replace(side, formats=(PageFormat(16, "token", head_dim, side.formats[0].page_size),))


def _scalar(x: Tensor, fmt: PageFormat, side: Any, widths: Tensor | None = None) -> Tensor:
    """Pages (B, H, n, G, D) in a format and back: f32."""
    flat = x.transpose(1, 2).flatten(0, 1).contiguous()
    own = None if widths is None else widths.transpose(1, 2).flatten(0, 1).contiguous()
    back = dequantize_pages(quantize_pages(flat, fmt, side, own), fmt, side, x.shape[-1])
    return back.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


_write_pages = kvstore.write_pages


def write_pages(
    pages: Any,
    fmt: Any,
    side: Any,
    source: Tensor,
    index: Tensor,
    layout: Any,
    scheme: Any,
    q_abs: Tensor | None = None,
) -> None:
    """Pages of `Trellis` get tokens as they would be decoded, in place of `kvstore.write_pages`."""
    if isinstance(scheme, Trellis) and fmt.bits == 16 and source.shape[1]:
        shape = -1, source.shape[1], -1, source.shape[3]
        own = source.gather(2, index.long()[:, None, :, None].expand(shape)).unflatten(2, (-1, fmt.page_size))
        made = scheme.rounded_keys(own, q_abs) if side == "keys" else scheme.rounded_values(own)
        source = made.flatten(2, 3).to(source.dtype).contiguous()
        index = torch.arange(index.shape[1], dtype=index.dtype, device=index.device).expand(len(index), -1).contiguous()
    _write_pages(pages, fmt, side, source, index, layout, scheme, q_abs)


# Measuring.


def long_bits(scheme: Kitty, layers: int, head_dim: int = 128) -> float:
    """Bits per element of pages alone, mean of layers, keys and values."""
    found = 0.0
    for layer in range(layers):
        own = scheme.in_layer(layer, layers)
        if isinstance(own, Trellis):
            found += sum(own.page_bits(head_dim))
        else:
            made = own.layout(head_dim, head_dim)
            found += page_bits(made.keys.formats[0], "keys", head_dim)
            found += page_bits(made.values.formats[0], "values", head_dim)
    return found / layers / 2


def main() -> None:
    """Measures caches, and writes after each what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "caches", nargs="+", help="presets, also with options; those of one argument, with commas, share a baseline"
    )
    parser.add_argument("--model", required=True, help="reference, smollm2, FILE.gguf, a folder, or a name on the Hub")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--data", type=Path, help="its folder texts holds the texts; the bundled ones otherwise")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=7168)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=8, help="tokens fed at a time behind a prompt")
    parser.add_argument("--batch-size", type=int, default=4)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*trellis codes are simulated")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = find_model(given.model)
    model, tokenizer = load_model(source, device), load_tokenizer(source)
    files = sorted((given.data / "texts").glob("*.*")) if given.data else None
    texts = find_texts(files, None, "", "text", source.reference, 0)
    windows = cut(texts, tokenizer, given.prompt + given.scored, given.windows)
    groups = [{name: parse_cache(name) for name in text.split(",")} for text in given.caches]
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    options = {"prefill": given.prompt, "chunk": given.chunk, "batch_size": given.batch_size}
    about = {"model": source.name, "model_file": source.origin or None, "device": device_name(torch.device(device))}
    about |= {"settings": options | {"texts": [text.name for text in texts]}, "tokens_sha256": windows.sha256}
    rows: list[dict[str, Any]] = []
    for group in groups:
        begin = time.perf_counter()
        with mock.patch.object(kvstore, "write_pages", write_pages):
            measured = measure(model, windows.tokens, group, keep_bytes=2**33, **options)
        record = as_record(measured, 0, about, windows.names)
        for row, preset in zip(record["rows"], group.values(), strict=True):
            if isinstance(preset.scheme, Trellis):
                for key in ("held_bytes", "total_bits", "code_bits", "key_bits"):
                    row.pop(key, None)
                row["simulated"] = True
            row["long_context_bits"] = long_bits(preset.scheme, layers)
            kld = row["kld"]
            print(
                f"{source.name[:8]} {row['name']}: bits {row['long_context_bits']:.3f} KLD {kld['mean']:.5f} median "
                f"{kld['median']:.5f} 99.9% {kld['p999']:.3f} top-1 {row['top1']['share']:.4f} ppl "
                f"{row['perplexity_ratio']['value']:.4f}",
                flush=True,
            )
        print(f"{time.perf_counter() - begin:.1f} s", flush=True)
        rows += record["rows"]
        found = record | {"kind": "hfkvq trellis", "rows": rows}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
