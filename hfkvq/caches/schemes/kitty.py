"""Kitty gives the strongest key channels of 2-bit pages 4 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.pages import PageFormat

from .base import Entry, Layout, Scheme, SideLayout, knob, rotation_block

_BEST = {"boost_ratio": 0.25, "score": "q_error", "fit": 4, "rotate_values": True, "key_local_length": 128}
# Layer 19 of SmolLM2's 30 loses nearly as much as all others together: it has 4 bits.
_HEAVY = {"wide_from": 0.6, "wide_to": 0.63, "wide_keys_from": 0.6, "wide_keys_to": 0.63}
# Layers 19 and 23 of Qwen2.5-Coder-1.5B's 28 look strings up, and 14, whose values count for more than its keys.
_LOOK_UPS = {"wide_keys_from": 0.6, "wide_keys_to": 0.63, "two_bit_keys_from": 0.68, "two_bit_keys_to": 0.86}
# The presets of fewest bits are for the longest contexts, where whole tokens cost least.
_LONG = {"sink_length": 128, "local_length": 256, "key_local_length": 256, "trellis_values": True}


@dataclass(frozen=True, kw_only=True)
class Kitty(Scheme):
    """2-bit KV cache in which the strongest key channels of each page get 4 bits.

    Layout: the first ``sink_length`` tokens and the newest ``local_length`` values stay whole. Keys are quantized per
    channel over a page, values per token over the whole head; both are sealed a page at a time.

    Paper: Xia et al., arXiv:2511.18643. Eq. (2) is `channel_rule`; section 4.1 is the ``high`` plane of `PageFormat`;
    Figure 1 is `layout`.
    Differs from the paper: nothing known.
    Differs from the released code: codes are computed against scale and minimum as stored in f16; any dtype, any head
    dim, any prompt length, several tokens at once and padding work; Pro is 25 % as in the paper (its scripts: 20 %).

    Attributes:
        boost_ratio: share of key channels raised to 4 bits, per page and KV head; of keys of 1 bit to 3 bits. Kitty
            0.125, Kitty-Pro 0.25.
        score: ranking of channels: mean |K| of the page ("k_abs", the paper's), mean |K| times mean |Q|
            of the queries seen since the last seal ("qk_abs"), the squared error that the channel would have at 2 bits
            ("error"), or that times the square of mean |Q| ("q_error").
        local_length: R, newest values kept in full precision.
        key_local_length: newest keys kept in full precision, besides those waiting for a full page (0 in the paper:
            right after a page is sealed, only the sink's keys are in full precision).
        group_size: tokens of a channel that share a key scale; None takes the page, as in the paper.
        value_bits: width of values, 1, 2 or 4 (2 in the paper); of 1 bit in trellis codes.
        value_unit: number of values sealed together; None takes the page, as in the paper's Figure 1 and its runtime; 1
            seals each value as it leaves the local window, as the simulator behind its accuracy tables does.
        key_bits: width of keys, 1, 2 or 4 (2 in the paper). Keys of 4 bits are those of ``best-4.3``: rotated by
            Hadamard blocks, scaled by the extremes of each channel in a page, no channel raised. Keys of 1 bit are in
            trellis codes, see ``trellis_values``: a mean and a scale of each channel in a page, and a walk of 2 bits
            of what the first one leaves of the channels that are raised. They ignore ``group_size`` and ``fit``.
        wide_from, wide_to: layers between these shares of the depth hold their values in 4 bits (none in the paper).
            For example, 0.55 and 0.8 mean layers 16 to 23 of 30.
        narrow_to: layers up to this share of the depth hold values of 2 bits in 1 bit (none in the paper).
        wide_keys_from, wide_keys_to: the same for keys (none in the paper).
        two_bit_keys_from, two_bit_keys_to: layers between these shares of the depth have Kitty-Pro's keys in place of
            keys of 1 bit (none in the paper).
        rotate_values: rotate values by Hadamard blocks of up to 128 channels, and the output back (not in the paper).
        trellis_values: encode 2-bit values as walks through a trellis (not in the paper; QTIP, arXiv:2406.11235, does
            so with weights), see `hfkvq.kernels.trellis`: one scale a token, no minimum, sealed a page at a time. For
            rotated values, of heads with a multiple of 8 channels; values of 4 bits stay scalar.
    """

    name = "kitty"
    paper = "arXiv:2511.18643"
    place = 10
    presets = {
        "kitty": Entry(
            "2 bits, with the strongest 12.5 % of the key channels in 4 bits. Loses more than kitty-pro.",
            lists=("kld", "fit"),
        ),
        "kitty-pro": Entry(
            "2 bits, with the strongest 25 % of the key channels in 4 bits.",
            {"boost_ratio": 0.25},
            ("demo", "kld", "fit"),
        ),
        "best-2.5": Entry(
            "Our own preset for little memory: few more bits than kitty-pro, with much less loss.",
            {**_BEST, **_HEAVY},
            ("kld", "fit"),
        ),
        "trellis-2.5": Entry(
            "Our own preset: best-2.5, values in trellis codes, more key channels in 4 bits: as many bits, less loss.",
            {**_BEST, **_HEAVY, "trellis_values": True, "boost_ratio": 0.3125},
            ("kld", "fit"),
        ),
        "best-2.0": Entry(
            "Our own preset for less memory than best-2.5: its keys, and values in trellis codes of 1 bit.",
            {**_BEST, **_HEAVY, **_LONG, "narrow_to": 0.93},
            ("kld", "fit"),
        ),
        "best-1.5": Entry(
            "Our own preset for the least memory: trellis codes of 1 bit, and more for keys where look-ups need them.",
            {**_BEST, **_LONG, **_LOOK_UPS, "key_bits": 1, "narrow_to": 1.0, "boost_ratio": 0.1875},
            ("kld", "fit"),
        ),
        "best-2.8": Entry(
            "Our own preset: best-2.5 with more key channels in 4 bits and finer key scales.",
            {**_BEST, **_HEAVY, "boost_ratio": 0.3125, "group_size": 64},
            ("kld", "fit"),
        ),
        "best-3.4": Entry(
            "Our own preset for most uses: half of the key channels in 4 bits, 4-bit values in the middle layers.",
            {**_BEST, **_HEAVY, "boost_ratio": 0.5, "group_size": 64, "wide_from": 0.34, "wide_to": 0.81},
            ("demo", "kld", "fit"),
        ),
    }

    boost_ratio: float = knob(0.125, low=0.0, high=1.0, search=[0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5])
    score: str = knob("k_abs", choices=("k_abs", "qk_abs", "error", "q_error"))
    sink_length: int = knob(32, low=0, high=1024, search=[0, 16, 32, 64])
    local_length: int = knob(128, low=0, high=4096, search=[32, 64, 128, 256])
    key_local_length: int = knob(0, low=0, high=4096, search=[0, 32, 64, 128])
    page_size: int = knob(128, low=8, high=1024)
    group_size: int | None = knob(None, low=8, high=1024)
    key_bits: int = knob(2, choices=(1, 2, 4))
    value_bits: int = knob(2, choices=(1, 2, 4))
    value_unit: int | None = knob(None, low=1, high=1024)
    wide_from: float = knob(0.0, low=0.0, high=1.0)
    wide_to: float = knob(0.0, low=0.0, high=1.0)
    narrow_to: float = knob(0.0, low=0.0, high=1.0)
    wide_keys_from: float = knob(0.0, low=0.0, high=1.0)
    wide_keys_to: float = knob(0.0, low=0.0, high=1.0)
    two_bit_keys_from: float = knob(0.0, low=0.0, high=1.0)
    two_bit_keys_to: float = knob(0.0, low=0.0, high=1.0)
    rotate_values: bool = knob(False, choices=(False, True), search=[False, True])
    fit: int = knob(0, choices=POWERS, search=list(POWERS))
    fit_values: int = knob(0, choices=POWERS, search=[0, 4])
    trellis_values: bool = knob(False, choices=(False, True))

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in ("wide", "wide_keys", "two_bit_keys"):
            begin, end = (getattr(self, f"{side}_{name}") for name in ("from", "to"))
            if begin > end:
                raise ValueError(
                    f"{side}_from: got {begin} with {side}_to={end}, allowed at most {side}_to; swap the two."
                )

    @property
    def needs(self) -> frozenset[str]:
        """Queries, if they take part in the score."""
        return frozenset({"query"}) if self.score in ("qk_abs", "q_error") and self.key_bits < 4 else frozenset()

    def in_layer(self, layer: int, layers: int) -> Kitty:
        """Scheme with the widths of a layer, whose middle may be between the shares of depth that have others."""
        place = (layer + 0.5) / layers
        values = 4 if self.wide_from <= place < self.wide_to else self.value_bits
        if values == 2 and place < self.narrow_to:
            values = 1
        keys, ratio = self.key_bits, self.boost_ratio
        if self.wide_keys_from <= place < self.wide_keys_to:
            keys = 4
        elif keys == 1 and self.two_bit_keys_from <= place < self.two_bit_keys_to:
            keys, ratio = 2, 0.25
        ranges = [name for name in self.knobs() if name.endswith(("_from", "_to"))]
        return replace(self, key_bits=keys, boost_ratio=ratio, value_bits=values, **dict.fromkeys(ranges, 0.0))

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Sink, pages with raised key channels or keys of 4 bits, local window on the values."""
        # Channels raised in a page: n_b, 16 of 128 for Kitty.
        page, count = self.page_size, int(self.boost_ratio * key_dim + 0.5)
        if self.key_bits == 4:
            keys = PageFormat(4, "channel", page, page)
        elif self.key_bits == 1:
            # In trellis codes counts are multiples of eight.
            eights = min(int(self.boost_ratio * key_dim / 8 + 0.5), key_dim // 8)
            raised = ((3, 8 * eights),) if eights else ()
            keys = PageFormat(1, "channel", page, page, raised, trellis=True)
        else:
            group = page if self.group_size is None else self.group_size
            raised = ((4, count),) if count else ()
            keys = PageFormat(2, "channel", group, page, raised, fit=self.fit)
        trellis = self.value_bits == 1 or (self.trellis_values and self.value_bits == 2)
        values = PageFormat(self.value_bits, "token", value_dim, page, fit=self.fit_values, trellis=trellis)
        block = rotation_block(value_dim) if self.rotate_values else 0
        unit = page if self.value_unit is None else self.value_unit
        own = SideLayout((values,), self.local_length, unit, rotate=block)
        rotated = rotation_block(key_dim) if self.key_bits == 4 else 0
        return Layout(SideLayout((keys,), self.key_local_length, page, rotate=rotated), own, self.sink_length)

    @property
    def channel_rule(self) -> str:
        """Rule of eq. (2): the channels of greatest mean |K| over the page, or of another score, get 4 bits."""
        return {"qk_abs": "k_abs", "q_error": "error"}.get(self.score, self.score)
