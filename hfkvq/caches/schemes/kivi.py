"""KIVI: the uniform 2-bit and 4-bit baseline."""

from __future__ import annotations

from dataclasses import dataclass

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.pages import PageFormat

from ..registry import Entry
from ..scheme import Layout, Scheme, SideLayout, knob


@dataclass(frozen=True, kw_only=True)
class Kivi(Scheme):
    """Keys per channel, values per token, all of one width; the newest tokens stay whole.

    Layout: keys are sealed ``local_length`` tokens at a time, each channel of ``group_size`` tokens with its own scale;
    values leave the local window one by one, each ``group_size`` channels with their own scale.

    Paper: Liu et al., arXiv:2402.02750, section 3.2 and Algorithm 1 (G = 32, R = 128).
    Differs from the paper: nothing known.
    Differs from the released code: scale and minimum are f16 whatever the model's dtype, and codes are computed against
    them as stored; rounds half up.

    Attributes:
        bits: width of keys and values, 2 or 4.
        group_size: g, tokens (keys) or channels (values) that share a scale.
        local_length: R, tokens sealed together on the key side and kept whole on the value side.
        sink_length: first tokens kept whole (0 in the paper).
        token_norm: divide each key by a factor of its own before its page is quantized, which evens out keys that are
            larger than others (not in the paper; 0.125 bits an element of keys at 128 channels).
        fit: how scale and minimum of keys are chosen: 0 takes the extremes of each group, as the paper does; 2, 3 or 4
            what loses least by the sum of |error| to this power (2 or 3, with a sink alone: keys of the first tokens
            are outliers, which a fit clips). Bytes and decoding stay as they are.
        fit_values: likewise of values (rotated, if at all, and 4).
    """

    name = "kivi"
    paper = "arXiv:2402.02750"
    place = 20
    presets = {
        "kivi-2": Entry(
            "2 bits for all alike: what others compare with.",
            {"bits": 2},
            ("demo", "kld", "bench kernels", "bench generate", "fit"),
        ),
        "kivi-4": Entry("A short distance from bf16, for 5 bits.", {"bits": 4}, ("bench kernels", "fit")),
    }

    bits: int = knob(2, choices=(2, 4))
    group_size: int = knob(32, low=8, high=1024, search=[32, 64, 128])
    local_length: int = knob(128, low=8, high=1024, search=[128, 256])
    sink_length: int = knob(0, low=0, high=1024, search=[0, 16, 32, 64])
    token_norm: bool = knob(False, choices=(False, True), search=[False, True])
    fit: int = knob(0, choices=POWERS, search=list(POWERS))
    fit_values: int = knob(0, choices=POWERS, search=[0, 4])

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """One page is one residual block of R tokens."""
        page = self.local_length
        keys = PageFormat(self.bits, "channel", self.group_size, page, normed=self.token_norm, fit=self.fit)
        values = PageFormat(self.bits, "token", self.group_size, page, fit=self.fit_values)
        return Layout(SideLayout((keys,), unit=page), SideLayout((values,), local=self.local_length), self.sink_length)
