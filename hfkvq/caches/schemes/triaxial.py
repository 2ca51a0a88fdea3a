"""TriAxialKV gives each token a width by its turn, its modality and its role in the conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.pages import PageFormat

from ..tags import PAD, TAGS, parse_tag
from .base import Entry, Layout, Scheme, SideLayout, knob

DEFAULT_TABLE: tuple[tuple[str, int], ...] = tuple(
    (tag, 2)
    for tag in sorted(TAGS[:PAD])
    for temporal, modal, semantic in [tag.split("|")]
    if modal == "image" or (semantic in ("obs", "reasoning") and temporal in ("older", "turn_m2"))
)
"""Tags of 2 bits without a calibration: images (most of a computer-use context, and of little effect each), and tool
results and thoughts two or more turns back, to which attention has decayed (the paper's 3.1 and 4.4). Instructions,
tool schemas, requests and calls, which must be reproduced to the letter, keep 4 bits."""


@dataclass(frozen=True, kw_only=True)
class TriAxial(Scheme):
    """Tokens in 2 or 4 bits, by a tag that is read from the chat template: turn x modality x role.

    Layout: two runs. 2-bit keys are quantized per channel over ``group_size`` tokens of 2 bits, in order of position
    across tags; 2-bit values, and keys and values of 4 bits, per token in groups of ``group_size`` channels.
    Tokens of 2 bits that do not fill a page get 4. The first tokens are whole; there is no local window by default;
    fewer than ``seal_unit`` of the newest tokens are whole, so that a decode step asks the device only when a unit is
    full. Tags age as a conversation goes on; a token keeps the bits of its first seal.

    Paper: Shen et al., arXiv:2605.17170. Section 3.2.1 is `layout`; the map b* of section 3.2.3 is ``table`` and
    `token_bits`; section 3.1.3 makes tables (`hfkvq.tuning`).
    Differs from the paper: the first tokens stay whole, and key channels are smoothed, unless ``sink_length`` and
    ``smooth_keys`` say otherwise; the newest ``seal_unit`` - 1 tokens at most are unquantized; a default table exists.
    Differs from the released code: no code was released.

    Attributes:
        table: bits of each tag, ``{"older|text|obs": 2, ...}`` (any mapping or pairs; kept as sorted pairs). Tags not
            in it, padding within a row, and tokens without a tag (generated ones) get 4 bits.
        group_size: g, elements that share a scale.
        seal_unit: number of tokens sealed together. It is smaller than a page, so that no decode step can fill a page
            of 2 bits. Steps then need not ask for the run of their tokens, and can be captured.
        sink_length: first tokens kept in full precision (0 in the paper). Models attend to the first token more than to
            any other, and its key is like no other.
        local_length: newest tokens kept in full precision (0 in the paper).
        page_size: G, tokens per page. 2-bit tokens are held in 2 bits only if they fill a page. With the default, the
            paper's, up to 31 tokens of a turn are left over and get 4 bits. With 64 or 128 more are left over, and
            decoding reads more tokens at a time.
    """

    name = "triaxial"
    paper = "arXiv:2605.17170"
    place = 70
    presets = {
        "triaxial": Entry(
            "Agents with tools and images: 2 or 4 bits by a token's age, modality and role.",
            lists=("fit",),
        ),
    }

    table: tuple[tuple[str, int], ...] = knob(DEFAULT_TABLE)
    group_size: int = knob(32, low=8, high=1024, search=[32, 64])
    seal_unit: int = knob(16, low=1, high=1024)
    sink_length: int = knob(16, low=0, high=1024, search=[0, 16, 32, 64])
    local_length: int = knob(0, low=0, high=4096, search=[0, 32, 64, 128])
    page_size: int = knob(32, low=8, high=1024)
    fit: int = knob(0, choices=POWERS, search=list(POWERS))
    fit_values: int = knob(0, choices=POWERS, search=[0, 4])
    smooth_keys: bool = knob(True, choices=(False, True))

    def __post_init__(self) -> None:
        """Checks the table's tags and widths, and keeps it as sorted pairs."""
        super().__post_init__()
        object.__setattr__(self, "table", _pairs(self.table))

    @property
    def needs(self) -> frozenset[str]:
        """Tags of the tokens."""
        return frozenset({"tags"})

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Layout of section 3.2.1: INT2 keys per channel, the others per token."""
        group, page = self.group_size, self.page_size
        fit, fit_values = self.fit, self.fit_values
        keys = PageFormat(2, "channel", group, page, fit=fit), PageFormat(4, "token", group, page, fit=fit)
        values = tuple(PageFormat(bits, "token", group, page, fit=fit_values) for bits in (2, 4))
        return Layout(
            SideLayout(keys, self.local_length, self.seal_unit),
            SideLayout(values, self.local_length, self.seal_unit),
            self.sink_length,
        )

    def token_bits(self, keys: Tensor, values: Tensor, position: Tensor, tags: Tensor | None = None) -> Tensor | None:
        """Bits ``b*(s(t))`` of section 3.2.3, 4 for tags that the table lacks: u8 (B, m)."""
        if tags is None:
            return None
        bits = [4] * 256
        for tag, width in self.table:
            bits[parse_tag(tag)] = width
        return torch.tensor(bits, dtype=torch.uint8, device=tags.device)[tags.long()]

    @property
    def reads_tokens(self) -> bool:
        """False unless a subclass has its own `token_bits`."""
        return type(self).token_bits is not TriAxial.token_bits


def _pairs(table: Any) -> tuple[tuple[str, int], ...]:
    """A table as sorted pairs.

    Raises:
        ValueError: not a mapping or pairs, an unknown tag, a tag given twice, or a width other than 2 and 4.
    """
    items: Iterable[Any] = table.items() if isinstance(table, Mapping) else table
    try:
        pairs = sorted((tag, bits) for tag, bits in items)
    except (TypeError, ValueError):
        raise ValueError(
            f'table: got {table!r}, allowed tags and their bits, e.g. {{"older|text|obs": 2, "current|text|user": 4}}.'
        ) from None
    for i, (tag, bits) in enumerate(pairs):
        try:
            known = isinstance(tag, str) and parse_tag(tag) != PAD and tag in TAGS
        except ValueError as error:
            raise ValueError(f"table: {error}") from None
        if not known:
            raise ValueError(
                f"table: got {tag!r}, allowed temporal|modal|semantic, e.g. {TAGS[0]!r}; padding has none."
            )
        if isinstance(bits, bool) or bits not in (2, 4):
            raise ValueError(f"table: got {bits!r} bits for {tag!r}, allowed 2 and 4.")
        if i and pairs[i - 1][0] == tag:
            raise ValueError(f"table: the tag {tag!r} is given twice.")
    return tuple((tag, int(bits)) for tag, bits in pairs)
