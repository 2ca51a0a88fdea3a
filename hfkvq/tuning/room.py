"""Room for raised channels that follows MixKVQ's thresholds: measured on text, layer by layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.schemes import MixKVQ
from hfkvq.caches.schemes.base import Scheme, get_scheme
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.kernels.pages import RAISED_STEP
from hfkvq.kernels.seal import channel_widths

COVERAGE = 0.99
"""Default share of pages in which all raised channels fit."""


@dataclass(frozen=True, kw_only=True)
class _Counting(MixKVQ):
    """MixKVQ without a bound on raised channels, which it counts.

    Attributes:
        layer: its number.
        found: by layer, i32 (n, 3) for each pass: of each page and head, channels above ``tau_bf16``, others above
            ``tau_int4``, and the rest.
    """

    name: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Any]] = {}

    layer: int = 0
    found: dict[int, list[Tensor]] = field(default_factory=dict, compare=False)

    def in_layer(self, layer: int, layers: int) -> _Counting:
        """Scheme of a layer, with its number."""
        return dataclasses.replace(self, layer=layer)

    def room(self, head_dim: int) -> tuple[int, int]:
        """Room for all channels at 16 bits."""
        return head_dim, 0

    def step_rule(self, head_dim: int, seen: bool = True) -> None:
        """Rule of the sealing kernel: none, so that each page of prompts and steps asks `channel_bits`."""

    def channel_bits(self, keys: Tensor, q_abs: Tensor | None) -> Tensor:
        """Bits of channels, 16 for all raised ones: u8 (B, H, n, D)."""
        if "query" in self.needs and q_abs is None:
            raise ValueError(
                "model: its attention does not expose its queries, so thresholds cannot be applied; load it with "
                "attn_implementation='sdpa', or use salience='error_only'."
            )
        head_dim, weight = keys.shape[-1], q_abs if "query" in self.needs else None
        fmt = self.layout(head_dim, head_dim).keys.formats[0]
        rules = [self.threshold_rule(head_dim, tau, tau) for tau in (self.tau_bf16, min(self.tau_bf16, self.tau_int4))]
        full, raised = (channel_widths(keys, fmt, rule, weight) == 16 for rule in rules)
        counts = torch.stack([each.sum(-1, dtype=torch.int32) for each in (full, raised & ~full, ~raised)], -1)
        self.found.setdefault(self.layer, []).append(counts.flatten(0, -2).cpu())
        return torch.where(raised, 16, 2).to(torch.uint8)


@dataclass(frozen=True)
class LayerRoom:
    """Channels that thresholds raise in a layer, and the room for them.

    Attributes:
        key_bits: mean width of the keys' channels, if all are raised that the thresholds raise (equation 17).
        bf16: channels of a page and head that there is room for at 16 bits.
        int4: at 4 bits.
        fits: share of pages and heads in which every channel gets its width.
    """

    layer: int
    head_dim: int
    key_bits: float
    bf16: int
    int4: int
    fits: float


def raises_by_threshold(preset: Preset) -> bool:
    """True for presets that `fit_room` takes."""
    return isinstance(preset.scheme, MixKVQ) and preset.scheme.select == "thresholds"


def measure_room(
    model: Any, preset: Preset | Scheme | str, tokens: Tensor, *, coverage: float = COVERAGE, batch_size: int = 8
) -> list[LayerRoom]:
    """Room that a layer needs for the channels that MixKVQ's thresholds raise in it.

    Three quarters of a window are its prompt; the rest is fed a page at a time, so that both kinds of pages
    are counted: those of a prompt, by all its queries, and those of later windows, by their own.

    Args:
        model: in eval mode.
        preset: of `MixKVQ` with ``select="thresholds"``; its own room does not matter.
        tokens: i64 (W, T), windows of text.
        coverage: share of a layer's pages and heads that must find room at 16 bits, and then at 4. The rest have
            channels that go down a tier. 1 makes room for every page that was seen.
        batch_size: windows run together.

    Returns:
        Room of each layer of the main scheme.

    Raises:
        ValueError: another scheme, a coverage out of range, windows in which no page fills, or a model whose
            attention does not show its queries.
    """
    preset = get_preset(preset)
    scheme = preset.scheme
    if not isinstance(scheme, MixKVQ) or scheme.select != "thresholds":
        raise ValueError(f"preset: got {scheme!r}, allowed mixkvq with select='thresholds'.")
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage: got {coverage}, allowed more than 0, up to 1.")
    counting = _Counting(**{knob.name: getattr(scheme, knob.name) for knob in dataclasses.fields(MixKVQ)})
    prompt = tokens.shape[1] * 3 // 4
    with torch.no_grad():
        for rows in tokens.to(model.device).split(batch_size):
            cache = MixedKVCache(model, Preset(counting, preset.layers))
            for part in (rows[:, :prompt], *rows[:, prompt:].split(scheme.page_size, 1)):
                model(input_ids=part, **with_cache(model, cache), use_cache=True)
    if not counting.found:
        least = scheme.sink_length + scheme.page_size
        raise ValueError(
            f"tokens: got windows of {tokens.shape[1]} tokens, in which no page is sealed; allowed {least} or more."
        )
    return [_layer_room(layer, torch.cat(counts), coverage) for layer, counts in sorted(counting.found.items())]


def _layer_room(layer: int, counts: Tensor, coverage: float) -> LayerRoom:
    head_dim = int(counts[0].sum())

    def of(wide: int) -> tuple[int, Tensor, Tensor]:
        """Room at 4 bits beside so much at 16, and by page channels that go down from 16 bits, and from 4."""
        demoted = (counts[:, 0] - wide).clamp(min=0)
        middle = _enough(counts[:, 1] + demoted, coverage, head_dim - wide)
        return middle, demoted, (counts[:, 1] + demoted - middle).clamp(min=0)

    # Pages may differ, so that both rooms together exceed the channels; less room at 16 bits is tried then.
    rooms = range(_enough(counts[:, 0], coverage, head_dim), -1, -RAISED_STEP)
    wide = min(rooms, key=lambda room: int(sum(each.sum() for each in of(room)[1:])))
    middle, *lost = of(wide)
    fits = (lost[0] + lost[1]) == 0
    bits = float((counts @ torch.tensor([16, 4, 2], dtype=counts.dtype, device="cpu")).sum()) / float(counts.sum())
    return LayerRoom(layer, head_dim, bits, wide, middle, float(fits.float().mean()))


def _enough(counts: Tensor, coverage: float, most: int) -> int:
    """Channels, in the steps that room comes in, which are enough for this share of pages."""
    count = int(counts.sort().values[math.ceil(coverage * len(counts)) - 1])
    return min(-(-count // RAISED_STEP) * RAISED_STEP, most)


def _roomy(scheme: Scheme, head_dim: int, bf16: int, int4: int) -> Scheme:
    share = bf16 / head_dim
    return get_scheme(scheme, most_bf16=share, most_int4=min(int4 / head_dim, 1.0 - share))


def fit_room(
    model: Any, preset: Preset | Scheme | str, tokens: Tensor, *, coverage: float = COVERAGE, batch_size: int = 8
) -> Preset:
    """A preset of MixKVQ whose layers have the room that its thresholds need: see `measure_room`."""
    preset = get_preset(preset)
    rooms = measure_room(model, preset, tokens, coverage=coverage, batch_size=batch_size)
    # The main scheme stands for all layers, and has the most room of any.
    main = _roomy(preset.scheme, rooms[0].head_dim, max(room.bf16 for room in rooms), max(room.int4 for room in rooms))
    own = [(str(room.layer), _roomy(main, room.head_dim, room.bf16, room.int4)) for room in rooms]
    return dataclasses.replace(preset, scheme=main, layers=(*preset.layers, *own))
