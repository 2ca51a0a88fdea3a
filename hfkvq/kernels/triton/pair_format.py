"""Constants of a run's pair of formats for attention's kernels, and the places of its tensors."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import triton.language as tl


class PairFormat(NamedTuple):
    """A run's formats of keys and values, as an element of the kernels' FORMATS.

    Attributes:
        key_bits: width of the keys' codes.
        key_channel: whether channels of keys have scales of their own; else tokens have.
        key_group: elements that share a scale.
        room4: channels of keys that a page stores at 4 bits.
        room16: those at 16 bits.
        value_bits: width of the values' codes.
        value_group: elements that share a scale.
        step: tokens of a turn of the page loop.
        sub: tokens of a tile: what shares the scales of a key channel.
        ranks4: channels at 4 bits that are taken at a time.
        ranks16: room for those at 16 bits, a power of two.
        key_words: elements of a field of keys, a power of two.
        value_words: of a field of values.
        stages: loads of the page loop in flight.
        part: tokens of a step that have a maximum of their own.
        key_norm: where in a run's tensors the factors of normed keys stand, 0 if nowhere.
        value_norm: likewise of values.
        open: whether the page loop takes pages that are not full.
        rests: whether blocks of loose tokens take those, where tokens have positions.
        digits: whether the page loop makes integer products.
        layout: a fingerprint of where all this stands: Triton's cache knows kernels by their source and these numbers,
            and does not look at what ``pair.KEY_BITS`` is.
    """

    key_bits: int
    key_channel: bool
    key_group: int
    room4: int
    room16: int
    value_bits: int
    value_group: int
    step: int
    sub: int
    ranks4: int
    ranks16: int
    key_words: int
    value_words: int
    stages: int
    part: int
    key_norm: int
    value_norm: int
    open: bool
    rests: bool
    digits: bool
    layout: int


# Where its fields stand, for kernels: FORMATS[I][pair.KEY_BITS].
(
    KEY_BITS, KEY_CHANNEL, KEY_GROUP, ROOM4, ROOM16, VALUE_BITS, VALUE_GROUP, STEP, SUB, RANKS4, RANKS16,
    KEY_WORDS, VALUE_WORDS, STAGES, PART, KEY_NORM, VALUE_NORM, OPEN, RESTS, DIGITS, _,
) = map(tl.constexpr, range(len(PairFormat._fields)))  # fmt: skip

KEY_TENSORS = ("codes", "scale", "zero", "high", "high_index", "full", "full_index")
VALUE_TENSORS = ("codes", "scale", "zero")

LAYOUT = crc32(repr((PairFormat._fields, KEY_TENSORS, VALUE_TENSORS)).encode())

FACTORS = 2 + len(KEY_TENSORS) + len(VALUE_TENSORS)
"""Tensors of a run behind which normed formats have their factors."""

# Where a run's tensors stand, for kernels: run[pair.K_CODES].
(
    TABLE, POS, K_CODES, K_SCALE, K_ZERO, K_HIGH, K_HIGH_INDEX, K_FULL, K_FULL_INDEX, V_CODES, V_SCALE, V_ZERO,
) = map(tl.constexpr, range(FACTORS))  # fmt: skip
