"""The byte contract: how tokens of one KV head become words, defined once for references, kernels and accounting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from .groups import MOST, POWERS

Side = Literal["keys", "values"]

SIDES: tuple[Side, Side] = ("keys", "values")
Axis = Literal["channel", "token"]

RAISED_STEP = 8
"""Room for raised channels comes in steps of eight: rows of 16 bytes, which one load takes."""

TRELLIS_MOST = 512
"""Channels of a head in trellis codes, at most: sums of products stay within 31 bits."""

WALK = 2
"""Bits of a walk of what another one leaves of a raised channel."""

SPARE = 80
"""Tokens that a layer with a window holds beyond it: sixteen of a step, and those that may be taken back."""

_SPEC = re.compile(
    r"(?P<bits>\d+)(?P<axis>[ct])(?P<group>\d+)p(?P<page>\d+)(?P<normed>n?)(?P<trellis>t?)(f(?P<fit>\d))?"
    r"(?P<raised>(\+\d+x\d+)*)"
)


@dataclass(frozen=True)
class PageFormat:
    """Format of a page: how G tokens x D channels of one KV head become bytes.

    A code is affine: ``x̂ = code * scale + zero`` in fp32, with scale and zero as stored (f16). Codes are fields of
    16-bit words: a token has ``E = ceil(D * bits / 16)`` words, and field f of word e, bits [f*bits, (f+1)*bits), holds
    channel ``f*E + e``. Keys are token-major and values channel-major, so that the axis a dot product sums over is
    contiguous in memory.

    For one side of one layer, with P pages, H KV heads and page size G:

    ============  =======================================  =====================================================
    tensor        keys                                     values
    ============  =======================================  =====================================================
    codes         i16 (P, H, G, E)                         i16 (P, H, E, G)
    codes, 8 bit  fp8 e4m3 (P, H, G, D)                    fp8 e4m3 (P, H, G, D)
    codes, 16     model dtype (P, H, G, D)                 model dtype (P, H, G, D)
    scale, zero   f16 (P, H, G/g, D) per channel           f16 (P, H, D/g, G) per token (both sides)
    norm          f16 (P, H, G) per channel                f16 (P, H, D) per token (both sides)
    codes, walks  i16 (P, H, G/8, D*bits/2)                i16 (P, H, D/8, G*bits/2)
    high          i16 (P, H, G/8, n3 or n4)                never
    high_index    u8 (P, H, n3 or n4), i16 if D > 256       never
    full          model dtype (P, H, G, n16)               never
    full_index    u8 (P, H, n16), i16 if D > 256            never
    ============  =======================================  =====================================================

    8-bit pages have a scale and no zero, as have values in trellis codes, whose words ("walks") are those of
    `hfkvq.kernels.trellis`; 16-bit pages have neither. A channel raised to 4 bits keeps the lower two bits
    of its code in ``codes`` and the upper two in ``high``, where a word holds eight tokens of one channel: field f of
    row t is token ``f*G/8 + t`` of the page. In trellis codes ``high`` holds 2-bit walks of what the first ones leave
    of raised channels, lanes like those of a page of so many channels. A channel raised to 16 bits has scale, zero and
    code 0 in the plane and its values in ``full``. ``high_index[r]`` and ``full_index[r]`` name the channel of rank r;
    unused ranks hold zeros, which add nothing. The dense keys of a page are therefore::

        code = unpack(codes)                                # (G, D)
        code.scatter_add(channel, high_index, 4 * unpack(high))     # unpacked along tokens
        x = code * scale + zero                             # scale, zero repeated over the g tokens of their group
        x = x * norm[:, None]                               # of its token; per-token formats: of its channel
        x.scatter_add(channel, full_index, full)

    Attributes:
        bits: width of a code: 2 or 4 (integer), 1 or 2 (trellis codes), 8 (fp8 e4m3) or 16 (the model's own dtype,
            unquantized).
        axis: the axis that keeps its own scale: "channel" (KIVI keys) or "token".
        group_size: g, elements along the other axis that share a scale.
        page_size: G, tokens in a page, a power of two.
        raised: ((width, count), ...): room for that many channels of greater width per page and head. Widths 4 (only
            over 2-bit pages) and 16; counts are rounded up to a multiple of eight. Keys in trellis codes have
            width 3 alone, in multiples of eight. Keys, per channel, only.
        normed: whether a page also holds a factor along the other axis, one of each token (per channel) or channel (per
            token): ``x̂ = (code * scale + zero) * norm``. Integer widths without raised channels only; a page is then
            sealed as a whole.
        trellis: whether codes are walks through a trellis, see `hfkvq.kernels.trellis`: ``x̂ = number * scale``, plus
            a zero of each channel of keys. Scales are of whole tokens (values) or whole channels of a page (keys), and
            pages are sealed as a whole.
        fit: how scale and zero are chosen when tokens are sealed: 0 takes the range of each group, 2, 3 or 4 what loses
            least by the sum of |error| to this power (see `hfkvq.kernels.groups`). Integer widths only. What is stored,
            and how it is read, is the same.
    """

    bits: int
    axis: Axis
    group_size: int
    page_size: int = 128
    raised: tuple[tuple[int, int], ...] = ()
    normed: bool = False
    fit: int = 0
    trellis: bool = False

    def __post_init__(self) -> None:
        """Checks the relations that the layout really requires."""
        if self.bits not in (2, 4, 8, 16) and not (self.trellis and self.bits == 1):
            raise ValueError(f"bits: got {self.bits}, allowed 2, 4, 8 (fp8) or 16 (unquantized); 1 in trellis codes.")
        if self.axis not in ("channel", "token"):
            raise ValueError(f"axis: got {self.axis!r}, allowed 'channel' or 'token'.")
        if self.page_size < 8 or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"page_size: got {self.page_size}, allowed powers of two from 8 on; use 128 unless memory is tiny."
            )
        if self.group_size < 1:
            raise ValueError(f"group_size: got {self.group_size}, allowed 1 or more.")
        if self.bits == 8 and self.axis != "token":
            raise ValueError("axis: 8-bit (fp8) pages are scaled per token; use axis='token'.")
        if self.axis == "channel" and self.bits < 8 and self.page_size % self.group_size:
            raise ValueError(
                f"group_size: got {self.group_size}, which does not divide the page of {self.page_size} tokens; "
                "per-channel groups lie within one page, so choose a divisor of page_size."
            )
        if self.normed and (self.bits >= 8 or self.raised):
            raise ValueError(
                f"normed: got pages of {self.bits} bits, raised={self.raised}, allowed with 2 and 4 bits and without "
                "raised channels only."
            )
        if self.trellis and (self.bits > 2 or self.normed or self.fit):
            raise ValueError(
                f"trellis: got pages of {self.bits} bits, normed={self.normed} and fit={self.fit}, "
                "allowed with 1 or 2 bits, neither normed nor fitted."
            )
        if self.trellis and self.axis == "channel":
            self._check_walks()
            return
        if self.fit not in POWERS or (self.fit and (self.bits >= 8 or self.group_size > MOST)):
            raise ValueError(
                f"fit: got {self.fit} for {self.bits} bits and groups of {self.group_size}, allowed "
                f"{', '.join(map(str, POWERS))}; not 0 with 2 and 4 bits only, and groups of at most {MOST}."
            )
        if self.raised and (self.axis != "channel" or self.bits not in (2, 4)):
            raise ValueError("raised: only channels of 2-bit or 4-bit per-channel pages can be raised.")
        for width, count in self.raised:
            if width not in (4, 16) or width <= self.bits or count < 1:
                raise ValueError(
                    f"raised: got {count} channels of width {width}, allowed one or more of width 4 (over 2-bit) or 16."
                )

    def _check_walks(self) -> None:
        if self.bits != 1:
            raise ValueError(f"trellis: got keys of {self.bits} bits, allowed 1; raise channels to 3.")
        if self.group_size != self.page_size or self.page_size > TRELLIS_MOST:
            raise ValueError(
                f"trellis: got a scale for {self.group_size} of a page's {self.page_size} tokens, allowed one of each "
                f"channel and page of up to {TRELLIS_MOST} tokens."
            )
        for width, count in self.raised:
            if width != 1 + WALK or count < 1 or count % RAISED_STEP:
                raise ValueError(
                    f"raised: got {count} channels of width {width} over trellis codes, allowed "
                    f"multiples of {RAISED_STEP} of width {1 + WALK}."
                )

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ValueError if a head of ``head_dim`` channels cannot be stored in this format."""
        if self.axis == "token" and self.bits < 16 and head_dim % self.group_size:
            raise ValueError(
                f"group_size: got {self.group_size}, which does not divide head_dim {head_dim}; "
                "per-token groups lie within one head, so choose a divisor of head_dim."
            )
        if self.trellis and self.axis == "channel" and head_dim % 8:
            raise ValueError(f"trellis: got head_dim {head_dim}, allowed multiples of 8.")
        if (
            self.trellis
            and self.axis == "token"
            and (head_dim % 8 or head_dim != self.group_size or head_dim > TRELLIS_MOST)
        ):
            raise ValueError(
                f"trellis: got head_dim {head_dim} and a scale for {self.group_size} channels, allowed multiples of 8 "
                f"up to {TRELLIS_MOST} and a scale per token."
            )
        if sum(count for _, count in self.raised) > head_dim:
            raise ValueError(f"raised: got {self.raised}, more channels than head_dim {head_dim} has.")

    @cached_property
    def spec(self) -> str:
        """Short, reversible name, e.g. ``"2c128p128+4x16"``; ops take it as their static argument."""
        raised = "".join(f"+{width}x{count}" for width, count in self.raised)
        fit = f"f{self.fit}" if self.fit else ""
        flags = "n" * self.normed + "t" * self.trellis
        return f"{self.bits}{self.axis[0]}{self.group_size}p{self.page_size}{flags}{fit}{raised}"

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(spec: str) -> PageFormat:
        """The format whose ``spec`` this is."""
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ValueError(f"page format: got {spec!r}, expected something like '2c128p128+4x16'.")
        raised = tuple(
            (int(width), int(count)) for width, count in (part.split("x") for part in match["raised"].split("+")[1:])
        )
        axis: Axis = "channel" if match["axis"] == "c" else "token"
        group, page = int(match["group"]), int(match["page"])
        flags = bool(match["normed"]), int(match["fit"] or 0), bool(match["trellis"])
        return PageFormat(int(match["bits"]), axis, group, page, raised, *flags)

    @cached_property
    def whole(self) -> bool:
        """True where a page is sealed as a whole, since a part of it depends on all its tokens."""
        return self.normed or self.trellis or (self.axis == "channel" and self.bits < 8)

    def words(self, head_dim: int) -> int:
        """E, 16-bit words that one token's codes take (integer widths)."""
        return -(-head_dim * self.bits // 16)

    def raised_count(self, width: int) -> int:
        """Channels a page has room for at ``width``, as asked for (before rounding up to whole words)."""
        return dict(self.raised).get(width, 0)

    def raised_room(self, width: int) -> int:
        """Channels a page stores at ``width``: the count rounded up to a multiple of eight."""
        return -(-self.raised_count(width) // RAISED_STEP) * RAISED_STEP

    @staticmethod
    def index_dtype(head_dim: int) -> torch.dtype:
        """Dtype of indices of channels: u8 while it holds them, i16 for more than 256."""
        return torch.uint8 if head_dim <= 256 else torch.int16

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a side of this format holds, in the order in which ops take them."""
        names = ["codes"]
        if self.bits < 16:
            names.append("scale")
        if self.bits < 8 and not (self.trellis and self.axis == "token"):
            names.append("zero")
        if self.normed:
            names.append("norm")
        if self.raised_count(3) or self.raised_count(4):
            names += ["high", "high_index"]
        if self.raised_count(16):
            names += ["full", "full_index"]
        return tuple(names)

    def shapes(self, side: Side, heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Shape of one page (without P) and dtype of each tensor; dtype None stands for the model's dtype."""
        page, words = self.page_size, self.words(head_dim)
        if self.bits == 16:
            shapes: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {"codes": ((heads, page, head_dim), None)}
        elif self.bits == 8:
            shapes = {"codes": ((heads, page, head_dim), torch.float8_e4m3fn)}
        elif self.trellis:
            along, lanes = (page, head_dim) if side == "keys" else (head_dim, page)
            shapes = {"codes": ((heads, along // 8, lanes * self.bits // 2), torch.int16)}
        else:
            shapes = {"codes": ((heads, page, words) if side == "keys" else (heads, words, page), torch.int16)}
        if self.axis == "channel":
            scale = (heads, page // self.group_size, head_dim) if self.bits < 8 else (heads, 1, head_dim)
        else:
            scale = (heads, head_dim // self.group_size, page) if self.bits < 16 else (heads, 1, page)
        room, room16, index = (
            self.raised_room(3) or self.raised_room(4),
            self.raised_room(16),
            self.index_dtype(head_dim),
        )
        shapes |= {
            "scale": (scale, torch.float16),
            "zero": (scale, torch.float16),
            "norm": ((heads, page if self.axis == "channel" else head_dim), torch.float16),
            "high": ((heads, page // 8, room), torch.int16),
            "high_index": ((heads, room), index),
            "full": ((heads, page, room16), None),
            "full_index": ((heads, room16), index),
        }
        return {name: shapes[name] for name in self.names}

    def allocate(
        self, side: Side, pages: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Tensors for ``pages`` pages, in the order of ``names``: uninitialized, but scales and zeros of single tokens.

        Those are 0: slots without a token may be read with those that have one, and must make nothing infinite or NaN.
        """
        open_slots = self.bits < 8 and not self.whole
        found = []
        for name, (shape, own) in self.shapes(side, heads, head_dim).items():
            make = torch.zeros if open_slots and name in ("scale", "zero") else torch.empty
            found.append(make((pages, *shape), dtype=own or dtype, device=device))
        return found

    def code_bits(self, head_dim: int) -> float:
        """Payload bits an element: codes alone, no scale, index or window."""
        raised = sum((width - self.bits) * count for width, count in self.raised) / head_dim
        return self.bits + raised


@dataclass(frozen=True)
class StoreFormat:
    """Static description of everything one layer holds: `sink | runs of pages | tail`, keys beside values.

    A *run* is a set of tokens kept in one pair of formats. Its keys and values share one page table. With a single run
    the tokens are in order: run token j is the row's token ``sink + j``. With several runs each has a table of
    positions as well.

    Attributes:
        runs: (key format, value format) of each run, narrow to wide; both have the same page size.
        sink: first tokens of a row, never quantized.
        rotate_keys: rotation of the stored keys (queries are rotated to match), 0 for none: the Hadamard block.
        rotate_values: of the stored values (outputs are rotated back).
        latent: whether the keys' side holds latents, which are key and value at once, and the values' side the rotary
            parts of the keys: see `hfkvq.kernels.decode_attention`.
        window: tokens that a query sees, itself the last of them; 0 for all. Then a row has `ring` pages at the most,
            which its table names in turn: what has fallen out of the window makes room for what is sealed next.
    """

    runs: tuple[tuple[PageFormat, PageFormat], ...]
    sink: int = 0
    rotate_keys: int = 0
    rotate_values: int = 0
    latent: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        """Checks that keys and values of a run can share a page table."""
        if self.window < 0 or (self.window and (len(self.runs) > 1 or self.latent)):
            raise ValueError(
                f"window: got {self.window} tokens, {len(self.runs)} runs and latent={self.latent}, allowed 0 or a "
                "window of one run of keys and values."
            )
        if not self.runs:
            raise ValueError("runs: got none, at least one pair of page formats is needed.")
        for keys, values in self.runs:
            if keys.page_size != values.page_size:
                raise ValueError(
                    f"page_size: keys have {keys.page_size} and values {values.page_size}; a run shares one page "
                    "table, so use the same."
                )
            if keys.trellis and keys.axis == "token":
                raise ValueError("keys: trellis codes of keys have a scale per channel; use axis='channel'.")
            if values.raised or (values.axis == "channel" and values.bits < 16):
                raise ValueError("values: only per-token formats without raised channels are supported.")
        if self.latent and (len(self.runs) > 1 or any(fmt.whole for pair in self.runs for fmt in pair)):
            raise ValueError(
                "latent: only one run of formats per token, neither normed nor in trellis codes, is attended to as "
                "latents."
            )

    @cached_property
    def ordered(self) -> bool:
        """True where run token j is the row's token ``sink + j`` (a single run)."""
        return len(self.runs) == 1

    @cached_property
    def ring(self) -> int:
        """Pages of a row where there is a window: block i of a row lies in the page of block ``i % ring``; else 0.

        As many as hold what the queries of a step see, once `SPARE` tokens at the most have been taken back, beside the
        page that is being filled.
        """
        page = self.runs[0][0].page_size
        return 1 + -(-(self.window + SPARE - 2) // page) if self.window else 0

    def pages_seen(self, blocks: int, queries: int) -> int:
        """Most of so many blocks of a row that so many of the newest queries see."""
        page = self.runs[0][0].page_size
        return min(blocks, 1 + -(-(self.window + queries - 2) // page)) if self.window else blocks

    def pages(self, blocks: int) -> int:
        """Pages that so many blocks of a row have."""
        return min(blocks, self.ring or blocks)

    @cached_property
    def spec(self) -> str:
        """Reversible name; ops take it as their static argument."""
        runs = "|".join(f"{keys.spec}/{values.spec}" for keys, values in self.runs)
        window = f"w{self.window};" if self.window else ""
        return f"{'l' * self.latent}{window}s{self.sink};k{self.rotate_keys};v{self.rotate_values};{runs}"

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(spec: str) -> StoreFormat:
        """The store format whose ``spec`` this is."""
        *window, sink, rotate_keys, rotate_values, runs = spec.removeprefix("l").split(";")
        pairs = tuple(
            (PageFormat.parse(keys), PageFormat.parse(values))
            for keys, values in (run.split("/") for run in runs.split("|"))
        )
        rotate = int(rotate_keys[1:]), int(rotate_values[1:])
        return StoreFormat(pairs, int(sink[1:]), *rotate, spec[0] == "l", int(window[0][1:]) if window else 0)


@dataclass(frozen=True, slots=True)
class RunView:
    """The tensors of one run, by name, as ops receive them in a flat list.

    Which tensors they are does not change, so that what is known of them can be kept beside them: see `KVStore.runs`.

    Attributes:
        table: i32 (B, n): the page that holds (or is reserved for) block i of a row.
        pos: i32 (B, n*G): row position of each token of the run, or None where the run is ordered.
        keys: tensors of the key format, in the order of ``PageFormat.names``.
        values: tensors of the value format.
    """

    table: Tensor
    pos: Tensor | None
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def __post_init__(self) -> None:
        """Keeps tuples."""
        object.__setattr__(self, "keys", tuple(self.keys))
        object.__setattr__(self, "values", tuple(self.values))

    def flat(self) -> list[Tensor]:
        """The flat list that ``split_runs`` takes apart again."""
        return [self.table, *([] if self.pos is None else [self.pos]), *self.keys, *self.values]


def split_runs(store: StoreFormat, parts: Sequence[Tensor]) -> list[RunView]:
    """Takes the flat list of all runs' tensors apart, following the store's format."""
    views, at = [], 0
    for keys, values in store.runs:
        table, pos, at = parts[at], None, at + 1
        if not store.ordered:
            pos, at = parts[at], at + 1
        split = at + len(keys.names)
        end = split + len(values.names)
        views.append(RunView(table, pos, list(parts[at:split]), list(parts[split:end])))
        at = end
    return views
