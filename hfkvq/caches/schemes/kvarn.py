"""KVarN rotates, evens out tokens and channels, then rounds as KIVI does."""

from __future__ import annotations

from dataclasses import dataclass

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.norms import RULES, Balance
from hfkvq.kernels.pages import Axis, PageFormat

from .base import Entry, Layout, Scheme, SideLayout, knob, rotation_block


@dataclass(frozen=True, kw_only=True)
class KVarN(Scheme):
    """Hadamard rotation and two-way scaling, which together spread outlier channels and outlier tokens.

    Layout: keys and values are rotated, and sealed ``page_size`` tokens at a time. Keys are quantized per channel
    over the page, with a factor for each token; values per token over the head, with a factor for each channel of a
    page. The first ``sink_length`` tokens, and the newest, which fill no page, stay whole. At D = 128 and with pages of
    128 tokens, scales, minima and factors take 0.375 bits per element.

    Paper: KVarN, arXiv 2606.03458.
    Differs from the paper: root mean squares are divided out, not standard deviations, rows before columns, and beside
    a page of mean square 1. The round of least error by `kernels.page_norms` is kept, or none, not the round
    of least imbalance. One round, not 16: on the reference model 8 gain nothing. ``balance="deviation"`` with
    ``rounds=16`` is the authors' balancing.
    Differs from the released code: as above. With its balancing too, the factors' mean is 1, and codes are computed
    against scale, minimum and factor as stored in f16, so that a few codes differ by one.

    Attributes:
        key_bits: width of keys, 2 or 4.
        value_bits: width of values, 2 or 4.
        rotate: rotated sides, in blocks of up to 128 channels: "both", "keys", "values" or "none".
        rounds: number of times that rows and columns of a page are balanced in turn; the authors use 16.
        balance: rule by which a page is balanced: "error" for the least expected error, "deviation" as KVarN's authors.
    """

    name = "kvarn"
    paper = "KVarN"
    place = 50
    presets = {
        "kvarn": Entry(
            "4-bit keys, 2-bit values: made for keys with outlier tokens and outlier channels.",
            lists=("fit",),
        ),
        "kvarn-k4v2": Entry("Another name for kvarn.", {"key_bits": 4, "value_bits": 2}),
        "kvarn-k4v4": Entry("KVarN with 4-bit values: less loss, for one bit more.", {"key_bits": 4, "value_bits": 4}),
        "kvarn-k2v2": Entry(
            "KVarN with 2-bit keys, for models without outlier channels.", {"key_bits": 2, "value_bits": 2}
        ),
    }

    key_bits: int = knob(4, choices=(2, 4), search=[2, 4])
    value_bits: int = knob(2, choices=(2, 4), search=[2, 4])
    rotate: str = knob("both", choices=("both", "keys", "values", "none"), search=["both", "keys", "values", "none"])
    rounds: int = knob(1, low=0, high=64)
    balance: str = knob("error", choices=RULES)
    sink_length: int = knob(128, low=0, high=1024, search=[0, 32, 64, 128])
    page_size: int = knob(128, low=8, high=1024)
    fit: int = knob(0, choices=POWERS, search=list(POWERS))
    fit_values: int = knob(0, choices=POWERS, search=[0, 4])
    smooth_keys: bool = knob(True, choices=(False, True))

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Normed pages of their own widths on both sides, sealed together."""

        def side(bits: int, axis: Axis, group: int, dim: int, rotated: bool, fit: int) -> SideLayout:
            return SideLayout(
                (PageFormat(bits, axis, group, self.page_size, normed=True, fit=fit),),
                unit=self.page_size,
                rotate=rotation_block(dim) if rotated else 0,
                balance=Balance(self.rounds, self.balance),
            )

        return Layout(
            side(self.key_bits, "channel", self.page_size, key_dim, self.rotate in ("both", "keys"), self.fit),
            side(self.value_bits, "token", value_dim, value_dim, self.rotate in ("both", "values"), self.fit_values),
            self.sink_length,
        )
