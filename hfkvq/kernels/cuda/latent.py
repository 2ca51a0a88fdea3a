"""Launcher of attention to latents of 4 bits in CUDA C++; see ``latent.cu``."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil
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
        loose = 32 * 2 * (WIDTH + ROTARY) + 4 * 4 * (WIDTH // 2 + 20)
        sums = (
            (2 * queries + 16 * self.units * self.slots + 16 * self.units + 8 + 127) // 128 * 128 + 64 + 64 * self.units
        )
        return (sums + 512 * self.units + 127) // 128 * 128 + self.units * max(self.slots * slot, loose)


LARGE = Build(3, 6, 4)
"""One block on each multiprocessor of 228 KB, twelve warps that compute."""

WEIGHT = 4
"""Chunks that take as long as a block of loose tokens."""

START = 1090
"""Tokens in whose time a block begins and ends: it rotates queries, joins its units' sums and its cluster's."""

SLICES, PART = 4, 132
"""Slices of a query that blocks join, and numbers that a cluster writes for one, as in the source."""

COUNT, READ = 112, 30
"""Tokens in whose time a row's clusters are counted, and one's part is read by the last of them."""

FULL, LATE = 0.9, 100
"""Share of a GPU from which on the last clusters begin once those of the kernel before have ended; tokens they lose."""

MOST_ROWS = 65535
"""Rows are a grid's second direction."""


class Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "counters", "table")),
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "rotary", "rotary_scale")),
        *((name, ctypes.c_void_p) for name in ("sink", "sink_rotary", "tail", "tail_rotary")),
        *((name, ctypes.c_void_p) for name in ("out", "part", "arrived", "logits")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "columns", "splits", "cluster", "weight")),
        *((name, ctypes.c_int) for name in ("sinks", "slots", "n_logits", "wide")),
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
        cluster: blocks that share their shared memory: 1, 2, 4 or 8, and `splits` is a multiple.
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
    cluster: int
    sinks: int
    slots: int
    scaling: float
    row_stride: int
    head_stride: int

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of a launch."""
        return self.splits, self.rows

    @property
    def counters(self) -> int:
        """Counters in global memory that a launch needs."""
        return self.rows * self.cluster if self.splits > self.cluster else 0

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of what clusters write for each other in f32, where a row has several."""
        return self.rows, self.splits // self.cluster, self.heads, SLICES, PART

    def arguments(
        self, tensors: Sequence[Tensor], sinks: Tensor | None, out: Tensor, part: int = 0, arrived: int = 0
    ) -> Arguments:
        """For the tensors of `hfkvq.kernels.latent_attention`.

        Args:
            tensors: queries, counters, windows and the run's.
            sinks: logits that join the denominators, of the queries' dtype or f32.
            out: result.
            part: address of `part`, if it is needed.
            arrived: address of `counters`, 0 all of them.
        """
        address = [x.data_ptr() for x in tensors]
        assert not any([x & 15 for x in address[2:]]), "what is copied begins at multiples of sixteen bytes"
        q, counters, sink, sink_rotary, tail, tail_rotary, table, codes, scale, zero, rotary, rotary_scale = address
        logits, count, wide = 0, 1, False
        if sinks is not None:
            logits, count, wide = sinks.data_ptr(), sinks.shape[0], sinks.dtype == torch.float32
        return Arguments(
            *(q, counters, table, codes, scale, zero, rotary, rotary_scale, sink, sink_rotary, tail, tail_rotary),
            *(out.data_ptr(), part, arrived, logits),
            *(self.rows, self.heads, self.columns, self.splits, self.cluster.bit_length() - 1, WEIGHT),
            *(self.sinks, self.slots, count, wide),
            *(self.scaling * LOG2E, self.row_stride, self.head_stride),
        )


def serves(form: StoreFormat, heads: int, dim: int, rope_dim: int, dtype: torch.dtype, queries: int = 1) -> bool:
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


class Arrivals:
    """Counters of a device that are 0 whenever no kernel runs that counts with them.

    Launches on one stream follow each other, so they share counters; so do those of one captured graph on one stream,
    which no other graph, and no launch outside, has: graphs may be replayed side by side.
    """

    SIZE = 1 << 18

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        self._kernel, self._device, self._lock = kernel, device, threading.Lock()
        self._given: dict[tuple[int, int, int], Tensor] = {}
        self._spare: Tensor | None = None

    def __call__(self, count: int, stream: int) -> Tensor:
        """So many counters, for a launch on a stream, which is the current one."""
        graph = self._kernel.capture_of(stream)
        with self._lock:
            found = self._given.get((stream, graph, count))
            if found is not None:
                return found
            enough = self._spare is not None and self._spare.numel() >= (count if graph else max(count, self.SIZE // 2))
            if graph and not enough:
                # Nothing can be made ready while a graph is captured: it sets these to 0 at each replay.
                return torch.zeros(count, dtype=torch.int32, device=self._device)
            if not enough:
                self._spare = torch.zeros(max(count, self.SIZE), dtype=torch.int32, device=self._device)
                # Other streams take their counters from it too.
                torch.cuda.synchronize(self._device)
            assert self._spare is not None
            found, self._spare = self._spare[:count], self._spare[count:]
            self._given[stream, graph, count] = found
            return found


class CudaLatents:
    """A launch for tensors of known shapes: it takes those of `hfkvq.kernels.latent_attention`."""

    __slots__ = ("_arrivals", "_index", "_kernel", "_shapes")

    def __init__(self, kernel: Kernel, shapes: Shapes, device: torch.device) -> None:
        self._kernel, self._shapes = kernel, shapes
        self._index = 0 if device.index is None else device.index
        self._arrivals = arrivals_of(kernel, device) if shapes.counters else None

    def __call__(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
        """Launches, on the tensors' device and its current stream.

        Args:
            tensors: queries, counters, windows and the run's.
            sinks: logits that join the denominators: one a head, or one a row and head.

        Returns:
            (rows, heads, 1, 512), of the queries' dtype.
        """
        if torch.cuda.current_device() == self._index:
            return self._launched(tensors, sinks)
        with torch.cuda.device(self._index):
            return self._launched(tensors, sinks)

    def _launched(self, tensors: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
        q, shapes = tensors[0], self._shapes
        out = torch.empty((shapes.rows, shapes.heads, 1, WIDTH), dtype=q.dtype, device=q.device)
        if sinks is not None:
            sinks = (sinks if sinks.dtype in (q.dtype, torch.float32) else sinks.float()).contiguous()
        stream = torch.cuda.current_stream(self._index).cuda_stream
        if self._arrivals is None:
            arguments = shapes.arguments(tensors, sinks, out)
        else:
            # Kept until the launch: what is freed after it is only used again behind it.
            part = torch.empty(shapes.part, dtype=torch.float32, device=q.device)
            arrived = self._arrivals(shapes.counters, stream)
            arguments = shapes.arguments(tensors, sinks, out, part.data_ptr(), arrived.data_ptr())
        self._kernel(shapes.grid, shapes.cluster, stream, arguments)
        return out


def splits_of(rows: int, tokens: int, resident: Mapping[int, int]) -> tuple[int, int]:
    """Blocks that attend to a row of so many tokens, one at a time on a multiprocessor, and how many are a cluster.

    What takes which time was fitted to measurements on an H200 (evals/results/latents-cuda-h200.json).

    Args:
        rows: of the batch.
        tokens: of a row, at most.
        resident: clusters that run at a time, by their blocks.
    """

    def cost(cluster: int, clusters: int) -> float:
        share = rows * clusters / resident[cluster]
        join = COUNT + READ * clusters if clusters > 1 else 0
        return ceil(share) * (tokens / (cluster * clusters) + START) + join + (LATE if share > FULL else 0)

    # A row of several waves of clusters is better cut into fewer.
    sizes = [size for size, most in resident.items() if most]
    each = [(size, count) for size in sizes for count in range(1, max(1, resident[size] // rows) + 1)]
    cluster, clusters = min(each, key=lambda given: cost(*given))
    return cluster * clusters, cluster


@lru_cache(maxsize=16)
def arrivals_of(kernel: Kernel, device: torch.device) -> Arrivals:
    """Counters of a kernel's launches on a device."""
    return Arrivals(kernel, device)


def get_ready(dtype: torch.dtype, device: torch.device) -> None:
    """Compiles and loads the kernel, which a first launch within a captured graph could not do."""
    kernel = kernel_of(dtype, device)
    if kernel is not None:
        resident_of(kernel, device)


@lru_cache(maxsize=16)
def resident_of(kernel: Kernel, device: torch.device) -> dict[int, int]:
    """Clusters of the kernel that run at a time on a GPU, by their blocks."""
    with torch.cuda.device(device):
        return {size: kernel.resident(size) for size in (1, 2, 4, 8)}


def code_of(dtype: torch.dtype) -> bytes:
    """Machine code for compute capability 9.0, compiled if it is not on disk; no GPU is needed.

    Raises:
        Unavailable: there is no NVRTC, or it does not compile this.
        OSError: no source is installed.
    """
    defines = {"UNITS": LARGE.units, "SLOTS": LARGE.slots, "TILES": LARGE.tiles, "BF16": int(dtype == torch.bfloat16)}
    return compiled(SOURCE.read_text(encoding="utf-8"), "sm_90a", defines)


@lru_cache(maxsize=16)
def kernel_of(dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel on a GPU of compute capability 9.0; None where it cannot be had, which is said once."""
    try:
        with torch.cuda.device(device):
            return Kernel(code_of(dtype), "latent_attention", LARGE.threads, LARGE.shared)
    except (Unavailable, OSError, AttributeError) as error:
        # The last two: no source is installed; a driver or NVRTC is too old for a function.
        logger.warning("Attention to latents in CUDA C++ is not to be had, so Triton's is launched: %s", error)
        return None
