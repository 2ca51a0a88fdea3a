"""Parameters of attention's kernels that come as one: formats, a run's tensors, what a row holds, and constants."""

from __future__ import annotations

from typing import Any, NamedTuple


class PairFormat(NamedTuple):
    """A run's formats of keys and values.

    Attributes:
        key_bits: width of the keys' codes.
        key_channel: whether channels of keys have scales of their own; else tokens have.
        key_group: elements that share a scale.
        room3: channels of keys in trellis codes whose rest is walked again.
        room4: channels of keys that a page stores at 4 bits.
        room16: those at 16 bits.
        key_trellis: whether their codes are walks, see `hfkvq.kernels.trellis`.
        value_bits: width of the values' codes.
        value_group: elements that share a scale.
        value_trellis: whether their codes are walks, see `hfkvq.kernels.trellis`.
        step: tokens of a turn of the page loop.
        sub: tokens of a tile: what shares the scales of a key channel.
        ranks16: room for those at 16 bits, a power of two.
        key_words: elements of a field of keys, a power of two.
        value_words: of a field of values.
        stages: loads of the page loop in flight.
        part: tokens of a step that have a maximum of their own.
        open: whether the page loop takes pages that are not full.
        rests: whether blocks of loose tokens take those, where tokens have positions.
    """

    key_bits: int
    key_channel: bool
    key_group: int
    room3: int
    room4: int
    room16: int
    key_trellis: bool
    value_bits: int
    value_group: int
    value_trellis: bool
    step: int
    sub: int
    ranks16: int
    key_words: int
    value_words: int
    stages: int
    part: int
    key_norm: bool
    value_norm: bool
    open: bool
    rests: bool


class Run(NamedTuple):
    """A run's tensors; the table stands for those that its formats lack."""

    table: Any
    pos: Any
    k_codes: Any
    k_scale: Any
    k_zero: Any
    k_high: Any
    k_high_index: Any
    k_full: Any
    k_full_index: Any
    k_norm: Any
    v_codes: Any
    v_scale: Any
    v_zero: Any
    v_norm: Any


class Row(NamedTuple):
    """Counters, windows, and the map of a batch's rows to rows of the windows, or None: see `decode_attention`."""

    counters: Any
    sink_k: Any
    sink_v: Any
    tail_k: Any
    tail_v: Any
    rows: Any


class Factors(NamedTuple):
    """Factor and cap of logits, 0 for none."""

    scaling: float
    softcap: float


class DecodeShape(NamedTuple):
    """Constants of `attend.decode_kernel`.

    Attributes:
        FORMATS: of the launch's runs, then of unquantized tokens.
        AT: the first of the runs, of TOTAL.
        TOTAL: runs of the store. One is in order.
        H: KV heads.
        SHARE: query heads that share one.
        SEVERAL: whether a step has several tokens; one has a variant of its own.
        D: channels of a key.
        DV: of a value.
        S: tokens of the sink.
        G: tokens of a page.
        BM: queries of a program.
        BR: tokens of a block of what is loose.
        MASK: kind of the mask, see `MaskKind`.
        ROWS: whether the mask differs by query.
        SOFTCAP: whether logits have a cap.
        DTYPE: of the model.
        ROTATE: rotation of queries that is left to the kernel, 0 for none.
        ROTATED: whether keys are rotated.
        PDL: whether launches overlap.
        WINDOW: tokens that a query sees, 0 for all.
    """

    FORMATS: tuple[PairFormat, ...]
    AT: int
    TOTAL: int
    H: int
    SHARE: int
    SEVERAL: bool
    D: int
    DV: int
    S: int
    G: int
    BM: int
    BR: int
    MASK: int
    ROWS: bool
    SOFTCAP: bool
    DTYPE: Any
    ROTATE: int
    ROTATED: bool
    PDL: bool
    WINDOW: int


FINE, EARLY, TURNED = 1, 2, 4
"""Bits of a launch's MODE: splits are of steps, not of whole pages; queries were there before the launch before this
one; windows come before pages."""
