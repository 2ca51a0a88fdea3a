"""Latents of multi-head latent attention, compressed and attended to as they are."""

from __future__ import annotations

from dataclasses import dataclass

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.hadamard import largest_block
from hfkvq.kernels.pages import PageFormat

from .base import Entry, Layout, Scheme, SideLayout, knob


@dataclass(frozen=True, kw_only=True)
class Latent(Scheme):
    """Token-wise latents of 4 or 8 bits, rotated if they have 4, beside rotary parts of 8 or 16 bits.

    Layout: the key side holds latents, the value side rotary parts. The first and the newest tokens are kept whole; the
    others are sealed one by one, as they leave the window.

    Paper: none; latents are DeepSeek-V2's (arXiv:2405.04434), rotation and token-wise INT4 are SAW-INT4's
    (arXiv:2604.19157).
    Differs from the paper: not applicable.
    Differs from the released code: not applicable.

    Attributes:
        bits: of latents: 4 (integers), 8 (e4m3) or 16.
        rope_bits: of rotary parts: 8 (e4m3) or 16.
        group_size: channels of a latent of 4 bits that share a scale; None for all of them.
        block: h, order of the Hadamard blocks by which latents of 4 bits are rotated, a power of two; 0 for none, None
            for the largest.
    """

    name = "latent-4"
    latents = True
    place = 45
    presets = {
        "latent-4": Entry("Latent attention (DeepSeek, Kimi, GLM, LongCat): latents in 4 bits.", lists=("fit",)),
        "latent-8": Entry(
            "Latent attention: latents in 8 bits, with less loss.", {"bits": 8, "rope_bits": 16}, ("fit",)
        ),
    }

    bits: int = knob(4, choices=(4, 8, 16))
    rope_bits: int = knob(8, choices=(8, 16), search=[8, 16])
    group_size: int | None = knob(None, low=8, high=4096, search=[None, 128])
    block: int | None = knob(None, low=0, high=4096)
    sink_length: int = knob(32, low=0, high=1024, search=[0, 16, 32, 64])
    local_length: int = knob(128, low=0, high=4096, search=[0, 32, 64, 128])
    page_size: int = knob(128, low=8, high=1024)
    fit: int = knob(0, choices=POWERS, search=list(POWERS))

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Latents as keys, rotary parts as values."""
        page, local = self.page_size, self.local_length
        if self.bits == 4:
            block = largest_block(key_dim) if self.block is None else self.block
            pages = PageFormat(4, "token", self.group_size or key_dim, page, fit=self.fit)
            latents = SideLayout((pages,), local, rotate=block if block > 1 else 0)
        else:
            latents = SideLayout((_wide(self.bits, key_dim, page),), local)
        return Layout(latents, SideLayout((_wide(self.rope_bits, value_dim, page),), local), self.sink_length)


def _wide(bits: int, dim: int, page: int) -> PageFormat:
    return PageFormat(bits, "token", dim if bits < 16 else 1, page)
