"""Formats that decode attention has tiles for, their constants, and how programs share the pages."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton.language as tl

from ..pages import PageFormat, Side, StoreFormat
from ._lib import power
from .fields import words_of
from .pair_format import PairFormat

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

SMALL = 1088
"""Bytes of shared memory of a program beside its tiles: metadata, and what the system keeps."""

BLOCK = 32
"""Most tokens that a program takes of what is loose: within any group of key scales that has a kernel."""

PROGRAM_COST = 2.0
"""Cost of a program of the page loop beside its pages, in pages: queries, first loads, storing."""

BESIDE, SPILL_COST = 1.15, 1.7
"""Extra time of a page where programs of loose tokens run beside the page loop's last wave, and what they cost
where they come after it, in pages: measured on an H200, at 16k to 128k tokens in one row."""


@lru_cache(maxsize=4096)
def split_counts(pages: tuple[int, ...], rows: int, resident: int, loose: int = 0) -> list[int]:
    """Splits of each run's pages: programs that run side by side should end together.

    A program takes the time of its pages and of what it costs besides, and programs come in waves.

    Args:
        pages: most pages of a row in each run.
        rows: rows, KV heads and tiles of queries: what multiplies the splits.
        resident: programs that the GPU runs at a time.
        loose: further programs of a row.
    """
    longest = max(pages)
    # More than five waves gain nothing.
    least = min(max(1, -(-longest * rows // (5 * resident))), max(1, longest))

    def cost(share: int) -> float:
        programs = rows * sum(-(-count // share) for count in pages)
        waves = -(-programs // resident)
        if loose and programs + rows * loose <= waves * resident:
            return waves * (share * BESIDE + PROGRAM_COST)
        return waves * (share + PROGRAM_COST) + (SPILL_COST if loose else 0.0)

    share = min(range(least, longest + 1), key=cost, default=1)
    return [-(-count // share) for count in pages]


def takes_open(keys: PageFormat, values: PageFormat) -> bool:
    """True where the page loop takes pages of these formats that are not full.

    Empty slots have scales and minima of 0, or those of a token that is gone: always finite, unlike codes of 8 and 16
    bits.
    """
    return not keys.whole and not values.whole and max(keys.bits, values.bits) < 8


def most_behind(form: StoreFormat, key_tail: int, value_tail: int, queries: int) -> int:
    """Most tokens that a row has behind the sink and what the page loop takes, from the first block on.

    What one side has sealed ahead of the other is still in the other's tail.
    """
    if not form.ordered:
        return max(key_tail, value_tail)
    keys, values = form.runs[0]
    if takes_open(keys, values):
        return max(key_tail, value_tail) + queries - 1 + BLOCK - 1
    page = keys.page_size
    # A page that only some of the queries may see is not taken as a full one.
    key_part, value_part = (0 if fmt.whole and queries == 1 else page - 1 for fmt in (keys, values))
    return max(key_tail + key_part, value_tail + value_part) + queries - 1


def loose_room(block: int, head_dim: int, value_dim: int) -> int:
    """Shared memory of a program that takes so many loose tokens: keys and values of a window, in 16 bits."""
    return 2 * block * (power(head_dim) + power(value_dim)) + SMALL


def _low_bit(x: int) -> int:
    return x & -x


def _side_is_served(fmt: PageFormat, side: Side, head_dim: int) -> bool:
    """True where fields of this side are tiles: at least sixteen elements, and whole groups of scales."""
    if fmt.bits == 16:
        return _low_bit(head_dim) >= 16
    if fmt.bits == 8:
        # One scale a token.
        return _low_bit(head_dim // 2) >= 16 and fmt.group_size == head_dim
    if fmt.trellis:
        # Where channels are lanes, fields hold pairs of them, and rows of words are tiles of 16 tokens.
        return side == "values" or (head_dim % 16 == 0 and fmt.page_size == 128)
    words = fmt.words(head_dim)
    if words * 16 != head_dim * fmt.bits:
        return False
    if fmt.normed and fmt.axis == "token" and (fmt.group_size != head_dim or side == "keys"):
        # Sums by channel and sums of zeros meet the factors together.
        return False
    if fmt.axis == "token":
        # A group holds whole fields.
        return fmt.group_size % words == 0
    if fmt.group_size < 32:
        return False
    return not fmt.raised_count(4) or fmt.page_size == 128


def _halves(keys: PageFormat) -> bool:
    """True where the page loop takes pages in halves beside keys of this format, as it takes trellis codes."""
    return keys.whole and keys.page_size in (64, 128) and 2 * keys.group_size >= keys.page_size


@lru_cache(maxsize=1024)
def is_served(store: str, head_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """True where `decode_kernel` takes a store of this format; `dequantized_decode` takes the others."""
    form = StoreFormat.parse(store)
    if dtype not in DTYPES or max(head_dim, value_dim) > 256:
        return False
    pages = {keys.page_size for keys, _ in form.runs}
    if len(pages) != 1 or not pages <= {32, 64, 128, 256, 512}:
        return False
    if any(
        (values.trellis and not _halves(keys)) or (keys.trellis and not values.trellis) for keys, values in form.runs
    ):
        return False
    if form.rotate_keys and any(keys.raised for keys, _ in form.runs):
        return False
    return all(
        _side_is_served(keys, "keys", head_dim) and _side_is_served(values, "values", value_dim)
        for keys, values in form.runs
    )


@lru_cache(maxsize=1024)
def pair_format(
    keys: PageFormat,
    values: PageFormat,
    head_dim: int,
    value_dim: int,
    stages: int,
    room: int,
    step: int = 0,
    rotated: bool = False,
) -> tuple[PairFormat, int]:
    """A run's pair of formats as `decode_kernel` takes it, and the shared memory that its loop needs of ``room``."""
    channel = keys.axis == "channel" and keys.bits < 8
    bits = max(keys.bits, values.bits)
    room3, room4, room16 = (keys.raised_room(width) for width in (3, 4, 16))
    # Few enough bytes a step for the next one to be on its way while eight programs run on a multiprocessor.
    coarse = bits <= 2 and (not channel or keys.group_size == keys.page_size)
    # Words of raised channels hold tokens from all over the page: a step is a page, or half of it.
    step = min(keys.page_size, 128 if coarse or keys.raised_count(4) else 32 if bits == 16 else step or 64)
    if values.trellis:
        step = keys.page_size
    size = (room3 + room4) / 4 + 2 * room16
    for fmt, dim in ((keys, head_dim), (values, value_dim)):
        size += dim * (fmt.bits + (32 / fmt.group_size if fmt.bits < 8 else 0)) / 8
        if fmt.normed:
            size += 2 if fmt.axis == "channel" else 2 * dim / step
    size = math.ceil(step * size)
    if bits == 8 or (bits == 4 and not channel and not rotated):
        # One more buffer: measured.
        stages += 2
    buffers = max(1, (stages - 1) // 2)
    if bits < 8 and buffers * size + SMALL > room:
        stages, buffers = min(stages, 3), 1

    def width(fmt: PageFormat, dim: int) -> int:
        if fmt.bits < 8:
            return max(16, power(words_of(dim, fmt.bits)))
        return min(4 * fmt.bits, _low_bit(dim * fmt.bits // 16))

    open_pages = takes_open(keys, values)
    constants = PairFormat(
        key_bits=keys.bits,
        key_channel=channel,
        key_group=keys.group_size if keys.bits < 8 else head_dim,
        room3=room3,
        room4=room4,
        room16=room16,
        key_trellis=keys.trellis,
        value_bits=values.bits,
        value_group=values.group_size if values.bits < 8 else value_dim,
        value_trellis=values.trellis,
        step=step,
        sub=min(keys.group_size, step, 128 if coarse or values.trellis else 64) if channel else step,
        ranks16=max(16, power(room16)),
        key_words=width(keys, head_dim),
        value_words=width(values, value_dim),
        stages=stages,
        part=step if coarse or values.trellis else min(step, 64),
        key_norm=keys.normed,
        value_norm=values.normed,
        open=open_pages,
        rests=not keys.whole and not open_pages,
    )
    return constants, buffers * size + SMALL
