"""Lossless pages, the control that every other scheme is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from hfkvq.kernels.pages import PageFormat

from .base import Entry, Layout, Scheme, SideLayout, knob


@dataclass(frozen=True, kw_only=True)
class Full(Scheme):
    """Unquantized pages in the model's own dtype; reproduces `DynamicCache` token for token.

    Layout: every token is sealed as it arrives; no sink, no local window.

    Paper: none.
    Differs from the paper: not applicable.
    Differs from the released code: not applicable.
    """

    name = "full"
    place = 0
    presets = {
        "full": Entry(
            "The control: 16-bit pages, in which nothing is quantized or saved.",
            lists=("kld",),
            group="control",
        )
    }

    page_size: int = knob(128, low=8, high=1024)

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """16-bit pages on both sides."""
        side = SideLayout((PageFormat(16, "token", 1, self.page_size),))
        return Layout(side, side)
