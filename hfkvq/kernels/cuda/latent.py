"""Launcher of attention to latents of 4 bits in CUDA C++; see ``latent.cu``."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..pages import StoreFormat
from .rtc import Kernel, Unavailable, compiled

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("latent.cu")

WIDTH, ROTARY, HEADS = 512, 64, 16
"""Channels of latents and of rotary parts, and most query heads."""

MOST = 1 << 24
"""Most tokens of a row: its chunks times its units are a number of 32 bits."""

LOG2E = 1.4426950408889634


class Build(NamedTuple):
    """What the source is compiled for.

    Attributes:
        units: groups of four warps, which share a block's queries.
        slots: chunks that a unit's ring holds.
        tiles: eights of tokens in a chunk.
    """

    units: int
    slots: int
    tiles: int

    @property
    def threads(self) -> int:
        """Of a block: four more warps copy."""
        return 128 * self.units + 128

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: SHARED of the source."""
        queries, slot = (WIDTH + ROTARY) // 16 * 512, 8 * self.tiles * 326 + 64
        loose = 32 * 2 * (WIDTH + ROTARY) + 32 * 32 + 64
        sums = (2 * queries + 16 * self.units * self.slots + 8 * self.units + 127) // 128 * 128 + 64 + 64 * self.units
        return (sums + 512 * self.units + 127) // 128 * 128 + self.units * max(self.slots * slot, loose)


LARGE = Build(3, 6, 4)
"""One block on each multiprocessor of 228 KB, twelve warps that compute."""

WEIGHT = 2
"""Chunks that take as long as a block of loose tokens."""


START = 512
"""Tokens in whose time a block rotates queries and joins its units' sums."""


class Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "counters", "table")),
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "rotary", "rotary_scale")),
        *((name, ctypes.c_void_p) for name in ("sink", "sink_rotary", "tail", "tail_rotary")),
        *((name, ctypes.c_void_p) for name in ("out", "top", "total")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "columns", "splits", "weight", "sinks", "slots")),
        ("scaling", ctypes.c_float),
        ("row_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
    )


class Shapes(NamedTuple):
    """What a launch has to know besides addresses.

    Attributes:
        rows: of the batch.
        heads: query heads, at most `HEADS`.
        columns: of the page table.
        splits: parts that each row's pages are cut into, one a block.
        sinks: slots of the sink.
        slots: of the tail.
        scaling: factor on the logits.
        row_stride: of queries, in elements.
        head_stride: of queries, in elements.
    """

    rows: int
    heads: int
    columns: int
    splits: int
    sinks: int
    slots: int
    scaling: float
    row_stride: int
    head_stride: int

    def arguments(self, tensors: Sequence[Tensor]) -> Arguments:
        """For `CudaLatents`' tensors."""
        address = [x.data_ptr() for x in tensors]
        assert not any([x & 15 for x in address[2:]]), "what is copied begins at multiples of sixteen bytes"
        q, counters, sink, sink_rotary, tail, tail_rotary, table, codes, scale, zero, rotary, rotary_scale = address[
            :12
        ]
        return Arguments(
            *(q, counters, table, codes, scale, zero, rotary, rotary_scale, sink, sink_rotary, tail, tail_rotary),
            *address[12:],
            *(self.rows, self.heads, self.columns, self.splits, WEIGHT, self.sinks, self.slots),
            *(self.scaling * LOG2E, self.row_stride, self.head_stride),
        )


def serves(form: StoreFormat, dim: int, rope_dim: int, dtype: torch.dtype, queries: int, heads: int) -> bool:
    """Whether the source is for a store of this format, and queries like these, without a mask or a cap."""
    latents, rotary = form.runs[0]
    return (
        (latents.bits, latents.group_size, latents.page_size) == (4, WIDTH, 128)
        and (rotary.bits, rotary.group_size) == (8, ROTARY)
        and (dim, rope_dim) == (WIDTH, ROTARY)
        and (form.rotate_keys, form.rotate_values) == (WIDTH, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and queries == 1
        and heads <= HEADS
        and not latents.normed
    )


class CudaLatents:
    """A launch for tensors of known shapes: it takes those of `hfkvq.kernels.latent_attention`, and three to write.

    Those are f32: (rows, splits, heads, 512), a split's weighted sums, rotated back; (rows, splits, heads), what they
    are relative to in units of ln 2, -inf for an empty split; and (rows, splits, heads), sums of probabilities.
    """

    __slots__ = ("_index", "_kernel", "_shapes")

    def __init__(self, kernel: Kernel, shapes: Shapes, device: torch.device) -> None:
        self._kernel, self._shapes = kernel, shapes
        self._index = 0 if device.index is None else device.index

    def __call__(self, *tensors: Tensor) -> None:
        """Launches, on the tensors' device and its current stream."""
        if torch.cuda.current_device() == self._index:
            self._launch(tensors)
        else:
            with torch.cuda.device(self._index):
                self._launch(tensors)

    def _launch(self, tensors: Sequence[Tensor]) -> None:
        stream = torch.cuda.current_stream(self._index).cuda_stream
        self._kernel(self._shapes.rows * self._shapes.splits, stream, self._shapes.arguments(tensors))


def splits_of(rows: int, tokens: int, multiprocessors: int) -> int:
    """Parts of a row of so many tokens: a block each, one at a time on a multiprocessor.

    A block's beginning and end take as long as `START` tokens.
    """

    def cost(splits: int) -> float:
        return -(-rows * splits // multiprocessors) * (tokens / splits + START)

    return min(range(1, max(1, 4 * multiprocessors // rows) + 1), key=cost)


@lru_cache(maxsize=16)
def kernel_of(dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel on a GPU of compute capability 9.0; None where it cannot be had, which is said once."""
    defines = {"UNITS": LARGE.units, "SLOTS": LARGE.slots, "TILES": LARGE.tiles, "BF16": int(dtype == torch.bfloat16)}
    try:
        with torch.cuda.device(device):
            code = compiled(SOURCE.read_text(encoding="utf-8"), "sm_90a", defines)
            return Kernel(code, "latent_attention", LARGE.threads, LARGE.shared)
    except Unavailable as error:
        logger.warning("Attention to latents in CUDA C++ is not to be had, so Triton's is launched: %s", error)
        return None
