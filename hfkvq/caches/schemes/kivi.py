"""KIVI quantizes keys per channel and values per token, each to one width."""

from __future__ import annotations

from dataclasses import dataclass

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.pages import PageFormat

from .base import Entry, Layout, Scheme, SideLayout, knob, rotation_block


@dataclass(frozen=True, kw_only=True)
class Kivi(Scheme):
    """Keys per channel and values per token, in 2 or 4 bits; the newest tokens stay in 16 bits.

    Layout: keys are sealed ``local_length`` tokens at a time, each channel of ``group_size`` tokens with its own scale;
    values leave the local window one by one, each ``group_size`` channels with their own scale.

    Paper: Liu et al., arXiv:2402.02750, section 3.2 and Algorithm 1 (G = 32, R = 128).
    Differs from the paper: nothing known.
    Differs from the released code: scale and minimum are f16 for any model dtype, and codes are computed against
    them as stored; rounds half up.

    Attributes:
        bits: width of keys and values, 2 or 4.
        key_bits: width of keys; None takes ``bits``.
        value_bits: width of values; None takes ``bits``.
        group_size: g, tokens (keys) or channels (values) that share a scale; all channels if a head has fewer, and
            for rotated values if it does not divide their head.
        local_length: R, number of keys sealed together, and of newest values kept in full precision.
        key_local_length: newest keys kept in full precision, besides those waiting for a full page (0 in the paper).
        sink_length: first tokens kept in full precision (0 in the paper).
        rotate_keys: rotate keys, and queries with them, by Hadamard blocks of up to 128 channels before their page is
            quantized per channel (not in the paper).
        rotate_values: rotate values by Hadamard blocks of up to 128 channels, and the output back (not in the paper).
    """

    name = "kivi"
    paper = "arXiv:2402.02750"
    place = 20
    presets = {
        "kivi-2": Entry(
            "2 bits for all keys and values: the baseline of most papers.",
            {"bits": 2},
            ("kld", "fit"),
        ),
        "kivi-4": Entry(
            "4 bits for all keys and values, in groups of 32: little loss, for 5 bits.",
            {"bits": 4},
            ("fit",),
        ),
        "best-4.3": Entry(
            "Our own preset for the least loss at about 4 bits: KIVI with rotated keys and values.",
            {
                "bits": 4,
                "group_size": 128,
                "sink_length": 32,
                "key_local_length": 128,
                "rotate_keys": True,
                "rotate_values": True,
                "smooth_keys": True,
            },
            ("kld", "fit"),
        ),
    }

    bits: int = knob(2, choices=(2, 4))
    key_bits: int | None = knob(None, choices=(None, 2, 4))
    value_bits: int | None = knob(None, choices=(None, 2, 4))
    group_size: int = knob(32, low=8, high=1024, search=[32, 64, 128])
    local_length: int = knob(128, low=8, high=1024, search=[128, 256])
    key_local_length: int = knob(0, low=0, high=4096, search=[0, 32, 64, 128])
    sink_length: int = knob(0, low=0, high=1024, search=[0, 16, 32, 64])
    rotate_keys: bool = knob(False, choices=(False, True), search=[False, True])
    rotate_values: bool = knob(False, choices=(False, True), search=[False, True])
    fit: int = knob(0, choices=POWERS, search=list(POWERS))
    fit_values: int = knob(0, choices=POWERS, search=[0, 4])
    smooth_keys: bool = knob(False, choices=(False, True))

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """One page is one residual block of R tokens."""
        page, group = self.local_length, min(self.group_size, value_dim)
        if self.rotate_values and value_dim % group:
            group = value_dim
        bits = (self.bits if own is None else own for own in (self.key_bits, self.value_bits))
        keys = PageFormat(next(bits), "channel", self.group_size, page, fit=self.fit)
        values = PageFormat(next(bits), "token", group, page, fit=self.fit_values)
        rotated = rotation_block(key_dim) if self.rotate_keys else 0
        block = rotation_block(value_dim) if self.rotate_values else 0
        return Layout(
            SideLayout((keys,), self.key_local_length, page, rotate=rotated),
            SideLayout((values,), page, rotate=block),
            self.sink_length,
        )
