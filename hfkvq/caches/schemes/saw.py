"""SAW-INT4 rotates, then quantizes token by token to INT4."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.pages import PageFormat

from .base import Entry, Layout, Scheme, SideLayout, knob, rotation_block


@dataclass(frozen=True, kw_only=True)
class SawInt4(Scheme):
    """Token-wise INT4 after a block-diagonal Hadamard rotation, which spreads outlier channels over their block.

    Layout: every token but the first few is INT4 from the step after it was written; no local window unless asked for.
    The query is rotated as the keys are, the output is rotated back where the values are.

    Paper: Jia et al., arXiv:2604.19157, section 3; block 128, keys only, is its default.
    Differs from the paper: the first tokens stay whole, key channels are smoothed, and scales of keys fitted, each of
    which an option undoes: ``saw-int4:sink_length=0:smooth_keys=false:fit=0`` is the paper's letter. Scale and minimum
    are stored in f16 (4.25 bits per element), not scale and zero point in f32 (4.5), which also keeps constant vectors
    exact. Channels have no random signs, which gained nothing (docs/papers.md). The newest tokens are attended before
    they are quantized, and prompts attend to their own unquantized keys and values. K-means codes (A.2) and
    Hessian-aware rotation (A.3) are simulated only, in evals/simulated.py.
    Differs from the released code: as above, but for signs, which it has not either; any head dim with a power of two
    in it; no environment variables.

    Attributes:
        rotate: rotated sides: "keys", "both", or "none" (plain token-wise INT4, a baseline).
        block: h, order of the Hadamard blocks, a power of two that divides head_dim; None takes the largest up to 128.
        sink_length: first tokens kept in full precision (0 in the paper). Models attend to the first token more than to
            any other, and its key is like no other.
        local_length: newest tokens kept in full precision (0 in the paper).
    """

    name = "saw-int4"
    paper = "arXiv:2604.19157"
    place = 40
    presets = {
        "saw-int4": Entry(
            "4 bits with rotated keys, and no 16-bit windows but 16 tokens: saves memory in short contexts too.",
            {},
            lists=("demo", "kld", "fit"),
        ),
        "saw-int4-kv": Entry("saw-int4 with rotated values too, for values with outlier channels.", {"rotate": "both"}),
        "int4": Entry(
            "Plain INT4, the baseline without rotation: outlier channels in keys cost it more than saw-int4.",
            {"rotate": "none", "fit": 0},
            ("kld",),
            group="baseline",
        ),
    }

    rotate: str = knob("keys", choices=("keys", "both", "none"), search=["keys", "both"])
    block: int | None = knob(None, low=2, high=1024)
    sink_length: int = knob(16, low=0, high=1024, search=[0, 16, 32, 64])
    local_length: int = knob(0, low=0, high=4096, search=[0, 32, 64, 128])
    page_size: int = knob(128, low=8, high=1024)
    fit: int = knob(2, choices=POWERS, search=list(POWERS))
    fit_values: int = knob(0, choices=POWERS, search=[0, 4])
    smooth_keys: bool = knob(True, choices=(False, True))

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """4-bit pages per token on both sides."""

        def side(dim: int, rotated: bool, fit: int) -> SideLayout:
            block = (self.block or rotation_block(dim)) if rotated else 0
            pages = PageFormat(4, "token", dim, self.page_size, fit=fit)
            return SideLayout((pages,), self.local_length, rotate=block)

        keys = side(key_dim, self.rotate in ("keys", "both"), self.fit)
        return Layout(keys, side(value_dim, self.rotate == "both", self.fit_values), self.sink_length)

    @property
    def shared(self) -> Scheme:
        """Scheme without first tokens in 16 bits, unless the user set their number; requests then share prefixes."""
        return replace(self, sink_length=0) if self.sink_length == type(self).sink_length else self
