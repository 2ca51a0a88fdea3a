"""Shared parts of kernels: layouts of page tiles in registers, and a little launch plumbing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..pages import SIDES, PageFormat, Side, StoreFormat
from .trellis import AGAIN, load_numbers

F16_MAX = tl.constexpr(65504.0)

DOT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of ``x`` current: Triton launches on the current device, whatever its arguments are on."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


class Gpu(NamedTuple):
    """Properties of a GPU that launchers read, by PyTorch's names."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_multiprocessor: int


ABSENT: list[Gpu] = []
"""A GPU that every GPU is, of a process that compiles for it and launches nothing; else empty."""


def properties(device: torch.device) -> Any:
    """Properties of a device's GPU, see `Gpu`."""
    return ABSENT[0] if ABSENT else torch.cuda.get_device_properties(device)


@lru_cache(maxsize=32)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) where there is none."""
    if device.type != "cuda":
        return 0, 0
    found = properties(device)
    return found.major, found.minor


def overlap(device: torch.device) -> dict[str, bool]:
    """Options of launches that begin while the one before them still runs, from compute capability 9.0 on."""
    return {"launch_pdl": True} if capability(device)[0] >= 9 else {}


@lru_cache(maxsize=32)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter runs one program at a time and wants few of them."""
    return properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=32)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor."""
    return properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 65536


def fields_of(bits: int) -> int:
    """Channels in a word; 8-bit and 16-bit pages count as words of one channel, of a byte or two."""
    return 16 // bits if bits < 8 else 1


def cdiv(x: int, y: int) -> int:
    """Parts of ``y`` that cover ``x``. Not Triton's own, which costs microseconds at every launch."""
    return -(-x // y)


def power(x: int) -> int:
    """The least power of two that is not below ``x``, as `tl.arange` needs it."""
    # Triton's own function costs microseconds at every launch, as does its `cdiv`.
    return 1 << max(0, x - 1).bit_length()


class Page(NamedTuple):
    """A side's tensors; None for what its format lacks, and bytes for fp8, a type that some GPUs lack."""

    codes: Any
    scale: Any
    zero: Any
    norm: Any
    high: Any
    high_index: Any
    full: Any
    full_index: Any


class PageShape(NamedTuple):
    """Constants of a side for `load_page`.

    Attributes:
        D: channels.
        G: tokens of a page.
        BITS: width of a code.
        GROUP: elements that share a scale.
        PER_CHANNEL: whether channels have scales of their own.
        TOKEN_MAJOR: whether a token's codes lie side by side.
        N3: channels in trellis codes whose rest is walked again.
        N4: channels that a page stores at 4 bits.
        N16: those at 16 bits.
        TRELLIS: whether codes are walks, see `hfkvq.kernels.trellis`.
    """

    D: int
    G: int
    BITS: int
    GROUP: int
    PER_CHANNEL: bool
    TOKEN_MAJOR: bool
    N3: int
    N4: int
    N16: int
    TRELLIS: bool


def page_tensors(parts: Sequence[Tensor], fmt: PageFormat) -> Page:
    """Tensors of a side as `load_page` takes them."""
    assert all(part.is_contiguous() for part in parts), "pages are contiguous"
    return page_nest((fmt,), 0)(parts)[0]


def side_kinds(fmt: PageFormat, side: Side, heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.dtype]:
    """Dtypes of a side's tensors as kernels read them, for pages of a model of ``dtype``."""
    kinds = fmt.shapes(side, heads, head_dim).items()
    return [torch.uint8 if fmt.bits == 8 and name == "codes" else kind or dtype for name, (_, kind) in kinds]


def page_nest(formats: Sequence[PageFormat], begin: int) -> Callable[[Sequence[Any]], list[Page]]:
    """Makes pages of keys and of values of a launch's tensors, or of their addresses, from place ``begin`` on."""
    places = []
    for fmt in formats:
        places.append([begin + fmt.names.index(name) if name in fmt.names else None for name in Page._fields])
        begin += len(fmt.names)

    def pages(given: Sequence[Any]) -> list[Page]:
        found = [[None if i is None else given[i] for i in side] for side in places]
        for page, fmt in zip(found, formats, strict=True):
            if isinstance(page[0], Tensor) and fmt.bits == 8:
                # Bytes stand in for fp8, a type that some GPUs lack.
                page[0] = page[0].view(torch.uint8)
        return [Page(*page) for page in found]

    return pages


def part_kinds(form: StoreFormat, heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.dtype]:
    """Dtypes of the tensors of both sides' pages, as kernels read them."""
    sides = zip(form.runs[0], SIDES, strict=True)
    return [kind for fmt, side in sides for kind in side_kinds(fmt, side, heads, head_dim, dtype)]


def page_shape(fmt: PageFormat, side: Side, head_dim: int) -> PageShape:
    """Constants of a side for `load_page`."""
    return PageShape(
        D=head_dim,
        G=fmt.page_size,
        BITS=fmt.bits,
        GROUP=fmt.group_size,
        PER_CHANNEL=fmt.axis == "channel",
        TOKEN_MAJOR=side == "keys" or fmt.bits >= 8,
        N3=fmt.raised_room(3),
        N4=fmt.raised_room(4),
        N16=fmt.raised_room(16),
        TRELLIS=fmt.trellis,
    )


def page_block(fmt: PageFormat, head_dim: int, elements: int) -> int:
    """Tokens of a page that are taken at a time: tiles of ``elements``, inside a group of tokens if there are any."""
    block = min(elements // power(head_dim), fmt.page_size)
    if fmt.axis == "channel" and fmt.bits < 8:
        block = min(block, fmt.group_size)
    return block


def run_shapes(formats: Sequence[PageFormat], dims: tuple[int, int], elements: int) -> dict[str, Any]:
    """Constants of a kernel that takes tiles of so many elements of a run's pages, keys and values, by name."""
    shapes = [page_shape(fmt, side, dim) for fmt, side, dim in zip(formats, SIDES, dims, strict=True)]
    block = min(page_block(fmt, dim, elements) for fmt, dim in zip(formats, dims, strict=True))
    wide = {"BDK": max(16, power(dims[0])), "BDV": max(16, power(dims[1]))}
    # The reference multiplies and adds, and rounds both.
    return {"KEYS": shapes[0], "VALUES": shapes[1], "BT": block, **wide, "enable_fp_fusion": False}


@triton.jit
def rank_of_channel(p_index, o_c, ROOM: tl.constexpr, BR: tl.constexpr):
    """First rank in ``high_index`` or ``full_index`` that names each channel; ROOM or more where none does.

    Unused ranks name channel 0 and hold zeros, so it does no harm if channel 0 finds the first of them.
    """
    o_r = tl.arange(0, BR)
    b_index = tl.load(p_index + o_r, mask=o_r < ROOM, other=0).to(tl.int32)
    # [BR, C]
    m_same = (b_index[:, None] == o_c[None, :]) & (o_r[:, None] < ROOM)
    return tl.min(tl.where(m_same, o_r[:, None], ROOM), 0)


@triton.jit
def from_e4m3(b_byte):
    """fp8 e4m3 bytes to f32, exactly: their bits, shifted to where f16 has them, are the number times 2^-8.

    Subnormals of one format are subnormals of the other. A code of NaN, which pages never hold, becomes 480.
    """
    b_bits = b_byte.to(tl.int16)
    b_bits = ((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)
    return b_bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def page_numbers(page, i_head, o_t, o_c, m_x, SHAPE: tl.constexpr):
    """Numbers f32 of trellis codes of slots ``o_t`` and channels ``o_c``, whose shapes broadcast."""
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    p_head = page.codes + i_head * (D * G * SHAPE.BITS // 16)
    if SHAPE.PER_CHANNEL:
        return load_numbers(p_head, o_c, o_t % (G // 8), o_t // (G // 8), m_x, D, SHAPE.BITS)
    else:
        return load_numbers(p_head, o_t, o_c % (D // 8), o_c // (D // 8), m_x, G, SHAPE.BITS)


@triton.jit
def rest_numbers(high, high_index, i_head, o_t, o_c, m_x, G: tl.constexpr, N3: tl.constexpr):
    """Numbers f32 [BT, BC] that raised channels have beside those of all, in parts of the same scales."""
    E: tl.constexpr = G // 8
    b_rank = rank_of_channel(high_index + i_head * N3, o_c, N3, triton.next_power_of_2(N3))[None, :]
    m_own = m_x & (b_rank < N3)
    b_x = load_numbers(high + i_head * (E * N3), b_rank, o_t % E, o_t // E, m_own, N3, 2)
    return tl.where(m_own, b_x * AGAIN, 0.0)


@triton.jit
def dequantize(
    b_code, page, i_head, i_first, o_t, m_t, o_c, m_c, SHAPE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """f32 [BT, BC] of the codes (bytes, for fp8) of slots ``o_t = i_first + [0, BT)`` and channels ``o_c``."""
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    GROUP: tl.constexpr = SHAPE.GROUP
    N4: tl.constexpr = SHAPE.N4
    N16: tl.constexpr = SHAPE.N16
    m_tile = m_t[:, None] & m_c[None, :]
    if N4 > 0:
        # Eight tokens of the page share a word.
        ROWS: tl.constexpr = G // 8
        b_rank = rank_of_channel(page.high_index + i_head * N4, o_c, N4, triton.next_power_of_2(N4))
        p_high = page.high + i_head * (G // 8 * N4) + b_rank[None, :]
        if G % BT == 0 and BT % ROWS == 0:
            # Whole fields of the words. [ROWS, BC]
            o_row = tl.arange(0, ROWS)
            b_high = tl.load(p_high + o_row[:, None] * N4, mask=(b_rank < N4)[None, :], other=0).to(tl.int32)
            o_shift = (i_first // ROWS + tl.arange(0, BT // ROWS)) * 2
            b_high = tl.reshape(b_high, (1, ROWS, BC)) >> o_shift[:, None, None]
            b_high = tl.reshape(b_high, (BT, BC))
        else:
            # [BT, BC]
            o_row = o_t % ROWS
            b_high = tl.load(p_high + o_row[:, None] * N4, mask=m_tile & (b_rank < N4)[None, :], other=0).to(tl.int32)
            b_high = b_high >> (o_t // ROWS * 2)[:, None]
        b_code += (b_high & 3) << 2
    b_x = from_e4m3(b_code) if SHAPE.BITS == 8 else b_code.to(tl.float32)
    if SHAPE.PER_CHANNEL:
        if SHAPE.N3 > 0:
            b_x += rest_numbers(page.high, page.high_index, i_head, o_t[:, None], o_c, m_tile, G, SHAPE.N3)
        p_group = i_head * (G // GROUP * D)
        if GROUP % BT == 0 or GROUP == G:
            # The tile lies within one group. [BC]
            p_group += i_first // GROUP * D + o_c
            b_scale = tl.load(page.scale + p_group, mask=m_c, other=0.0).to(tl.float32)[None, :]
            b_zero = tl.load(page.zero + p_group, mask=m_c, other=0.0).to(tl.float32)[None, :]
        else:
            # [BT, BC]
            p_group += (o_t // GROUP * D)[:, None] + o_c[None, :]
            b_scale = tl.load(page.scale + p_group, mask=m_tile, other=0.0).to(tl.float32)
            b_zero = tl.load(page.zero + p_group, mask=m_tile, other=0.0).to(tl.float32)
        b_x = b_x * b_scale + b_zero
    else:
        p_group = i_head * (D // GROUP * G)
        if GROUP == D:
            # [BT]
            p_group += o_t
            m_group = m_t
        elif BC == D:
            # Channels in their natural order, so that groups are slices. [BT, D / GROUP]
            p_group += (tl.arange(0, D // GROUP) * G)[None, :] + o_t[:, None]
            m_group = m_t[:, None]
            b_x = tl.reshape(b_x, (BT, D // GROUP, GROUP))
        else:
            # [BT, BC]
            p_group += (o_c // GROUP * G)[None, :] + o_t[:, None]
            m_group = m_tile
        b_scale = tl.load(page.scale + p_group, mask=m_group, other=0.0).to(tl.float32)
        if GROUP == D or BC == D:
            b_scale = tl.expand_dims(b_scale, -1)
        b_x = b_x * b_scale
        if SHAPE.BITS < 8 and not SHAPE.TRELLIS:
            b_zero = tl.load(page.zero + p_group, mask=m_group, other=0.0).to(tl.float32)
            if GROUP == D or BC == D:
                b_zero = tl.expand_dims(b_zero, -1)
            b_x = b_x + b_zero
        b_x = tl.reshape(b_x, (BT, BC))
    if page.norm is not None:
        if SHAPE.PER_CHANNEL:
            b_x = b_x * tl.load(page.norm + i_head * G + o_t, mask=m_t, other=0.0).to(tl.float32)[:, None]
        else:
            b_x = b_x * tl.load(page.norm + i_head * D + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if N16 > 0:
        b_rank = rank_of_channel(page.full_index + i_head * N16, o_c, N16, triton.next_power_of_2(N16))
        p_full = page.full + i_head * (G * N16) + o_t[:, None] * N16 + b_rank[None, :]
        b_x += tl.load(p_full, mask=m_tile & (b_rank < N16)[None, :], other=0.0).to(tl.float32)
    # A select, not a product: scale and zero of a page that is only reserved may be NaN.
    return tl.where(m_tile, b_x, 0.0)


@triton.jit
def word_pointers(page, i_head, o_t, o_e, E: tl.constexpr, SHAPE: tl.constexpr):
    """Addresses of words ``o_e`` of slots ``o_t``."""
    p_head = page.codes + i_head * (SHAPE.G * E)
    if SHAPE.TOKEN_MAJOR:
        return p_head + o_t[:, None] * E + o_e[None, :]
    else:
        return p_head + o_e[None, :] * SHAPE.G + o_t[:, None]


@triton.jit
def load_page(page, i_head, i_first, m_t, SHAPE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Dense [BT, BD] tile of a page: slots ``i_first + [0, BT)``, channels in their order.

    f32; 16-bit pages stay in their own dtype. Elements that ``m_t`` or the head's width rule out are 0, whatever the
    page holds there.
    """
    D: tl.constexpr = SHAPE.D
    BITS: tl.constexpr = SHAPE.BITS
    FIELDS: tl.constexpr = 16 // BITS if BITS < 8 else 1
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    o_t = i_first + tl.arange(0, BT)
    o_c = tl.arange(0, BD)
    m_c = o_c < D
    m_x = m_t[:, None] & m_c[None, :]
    i_head = i_head.to(tl.int64)
    if SHAPE.TRELLIS:
        b_x = page_numbers(page, i_head, o_t[:, None], o_c[None, :], m_x, SHAPE)
    elif BITS >= 8:
        b_x = tl.load(word_pointers(page, i_head, o_t, o_c, E, SHAPE), mask=m_x, other=0)
    elif FIELDS * E == D and D == BD:
        # [BT, E]
        b_x = tl.load(word_pointers(page, i_head, o_t, tl.arange(0, E), E, SHAPE), mask=m_t[:, None], other=0)
        # A reshape keeps the layout of the load; an axis added by indexing would take a default one, at twice the cost.
        b_x = tl.reshape(b_x.to(tl.int32), (BT, 1, E))
        # The arithmetic shift smears the sign bit into fields that the mask removes. [BT, FIELDS, E]
        b_x = (b_x >> (tl.arange(0, FIELDS) * BITS)[None, :, None]) & ((1 << BITS) - 1)
        b_x = tl.reshape(b_x, (BT, D))
    else:
        # Where words do not fill a power of two, every word is loaded again for each of its fields: from the cache.
        b_x = tl.load(word_pointers(page, i_head, o_t, o_c % E, E, SHAPE), mask=m_x, other=0).to(tl.int32)
        b_x = (b_x >> (o_c // E * BITS)[None, :]) & ((1 << BITS) - 1)
    if BITS < 16:
        b_x = dequantize(b_x, page, i_head, i_first, o_t, m_t, o_c, m_c, SHAPE, BT, BD)
    return b_x
