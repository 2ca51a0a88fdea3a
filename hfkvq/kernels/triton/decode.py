"""Launcher of decode attention: what a shape and a format make of the programs, then the launch and the merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..hadamard import hadamard
from ..pages import PageFormat, RunView, Side, StoreFormat, split_runs
from ._lib import cdiv, multiprocessors, on_device, power, shared_memory
from .attend import decode_kernel
from .configs import key_of, lookup
from .general import general_decode
from .merge import mask_arguments, merge_splits

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

SMALL = 1088
"""Bytes of shared memory of a program beside its tiles: metadata, and what the system keeps."""

FACTORS = 12
"""Tensors of a run as `_run_tensors` has them, of which normed formats have more."""

STEP = 7
"""Where `_format_constants` has the tokens of a step."""

BLOCK = 32
"""Tokens that a program takes of what is loose: within any group of key scales that has a kernel."""

PROGRAM_COST = 2.0
"""What a program of the page loop costs beside its pages, in pages: queries, first loads, storing."""


@lru_cache(maxsize=4096)
def split_counts(pages: tuple[int, ...], rows: int, resident: int) -> list[int]:
    """Splits of each run's pages: programs that run side by side should end together.

    A program takes the time of its pages and of what it costs besides, and programs come in waves.

    Args:
        pages: most pages of a row in each run.
        rows: rows, KV heads and tiles of queries: what multiplies the splits.
        resident: programs that the GPU runs at a time.
    """
    longest = max(pages)
    # More than five waves gain nothing.
    least = max(1, -(-longest * rows // (5 * resident)))

    def cost(share: int) -> float:
        programs = rows * sum(-(-count // share) for count in pages)
        return -(-programs // resident) * (share + PROGRAM_COST)

    share = min(range(least, longest + 1), key=cost, default=1)
    return [-(-count // share) for count in pages]


def most_behind(form: StoreFormat, key_tail: int, value_tail: int, queries: int) -> int:
    """Most tokens that a row has behind the sink and its full pages.

    What one side has sealed ahead of the other is still in the other's tail.
    """
    if not form.ordered:
        return max(key_tail, value_tail)
    keys, _ = form.runs[0]
    page = keys.page_size
    # A page that only some of the queries may see is not taken as a full one.
    part = 0 if keys.whole and queries == 1 else page - 1
    return max(key_tail + part, value_tail + page - 1) + queries - 1


def _low_bit(x: int) -> int:
    return x & -x


def _side_is_served(fmt: PageFormat, side: Side, head_dim: int) -> bool:
    """Whether fields of this side are tiles: at least sixteen elements, and whole groups of scales."""
    if fmt.bits == 16:
        return _low_bit(head_dim) >= 16
    if fmt.bits == 8:
        # One scale a token.
        return _low_bit(head_dim // 2) >= 16 and fmt.group_size == head_dim
    words = fmt.words(head_dim)
    if words * 16 != head_dim * fmt.bits:
        return False
    if fmt.normed and fmt.axis == "token" and (fmt.group_size != head_dim or side == "keys"):
        # Sums by channel and sums of zeros meet the factors together.
        return False
    if fmt.axis == "token":
        # A group holds whole fields.
        return fmt.group_size % words == 0
    group = fmt.group_size
    tile = min(fmt.page_size, 128)
    if power(group) != group or not 32 <= group <= tile:
        return False
    return not fmt.raised_count(4) or fmt.page_size == 128


@lru_cache(maxsize=1024)
def is_served(form: StoreFormat, head_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether `decode_kernel` takes a store; `general_decode` takes the others."""
    if dtype not in _DTYPES or max(head_dim, value_dim) > 256:
        return False
    pages = {keys.page_size for keys, _ in form.runs}
    if len(pages) != 1 or not pages <= {32, 64, 128, 256, 512}:
        return False
    if form.rotate_keys and any(keys.raised for keys, _ in form.runs):
        return False
    return all(
        _side_is_served(keys, "keys", head_dim) and _side_is_served(values, "values", value_dim)
        for keys, values in form.runs
    )


@lru_cache(maxsize=1024)
def _format_constants(
    keys: PageFormat,
    values: PageFormat,
    head_dim: int,
    value_dim: int,
    stages: int,
    room: int,
    step: int = 0,
    rotated: bool = False,
) -> tuple[tuple[Any, ...], int]:
    """A run's pair of formats as `decode_kernel` takes it, and the shared memory that its loop needs of ``room``."""
    channel = keys.axis == "channel" and keys.bits < 8
    bits = max(keys.bits, values.bits)
    room4, room16 = keys.raised_room(4), keys.raised_room(16)
    # Few enough bytes a step for the next one to be on its way while eight programs run on a multiprocessor.
    coarse = bits == 2 and (not channel or keys.group_size == keys.page_size)
    # Words of raised channels hold tokens from all over the page.
    step = min(keys.page_size, 128 if coarse or keys.raised_count(4) else 32 if bits == 16 else step or 64)
    size = room4 / 4 + 2 * room16
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
            return max(16, power(fmt.words(dim)))
        return min(4 * fmt.bits, _low_bit(dim * fmt.bits // 16))

    constants = (
        keys.bits,
        channel,
        keys.group_size if keys.bits < 8 else head_dim,
        room4,
        room16,
        values.bits,
        values.group_size if values.bits < 8 else value_dim,
        step,
        min(keys.group_size, step, 128 if coarse else 64) if channel else step,
        16,
        max(16, power(room16)),
        width(keys, head_dim),
        width(values, value_dim),
        stages,
        step if coarse else min(step, 64),
        # Behind the tensors that all formats have.
        FACTORS if keys.normed else 0,
        FACTORS + keys.normed if values.normed else 0,
    )
    return constants, buffers * size + SMALL


def _run_tensors(view: RunView, keys: PageFormat, values: PageFormat) -> tuple[Tensor, ...]:
    """A run's tensors in the kernel's order; the table stands for what a format does not have."""
    table = view.table.contiguous()
    key = dict(zip(keys.names, view.keys, strict=True))
    value = dict(zip(values.names, view.values, strict=True))
    for fmt, named in ((keys, key), (values, value)):
        assert all(part.is_contiguous() for part in named.values()), "pages are contiguous"
        if fmt.bits == 8:
            named["codes"] = named["codes"].view(torch.uint8).view(torch.int16)
    names = ("codes", "scale", "zero", "high", "high_index", "full", "full_index")
    parts = [key.get(name, table) for name in names] + [value.get(name, table) for name in names[:3]]
    parts += [named["norm"] for named in (key, value) if "norm" in named]
    return table, table if view.pos is None else view.pos.contiguous(), *parts


def decode_attention_triton(
    q: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    store: str,
    early: bool = False,
) -> Tensor:
    """Launcher of `hfkvq.kernels.decode_attention`."""
    form = StoreFormat.parse(store)
    batch, query_heads, queries, head_dim = q.shape
    heads, value_dim = windows[0].shape[1], windows[1].shape[-1]
    dtype = q.dtype
    if not is_served(form, head_dim, value_dim, dtype):
        return general_decode(q, counters, windows, runs, mask, sinks, scaling, softcap, store)
    views = split_runs(form, runs)
    rows = query_heads // heads * queries
    columns = 8 if rows <= 8 else 16
    tiles = cdiv(rows, columns)
    # Where fields do not divide blocks of the rotation, queries are rotated before.
    rotate = form.rotate_keys
    if rotate and (_low_bit(head_dim) != head_dim or any(keys.bits == 8 for keys, _ in form.runs)):
        q, rotate, early = hadamard(q.float(), rotate), 0, False
    elif q.stride(-1) != 1:
        q, early = q.contiguous(), False
    page = form.runs[0][0].page_size
    counters = counters.contiguous()
    held = tuple(window.contiguous() for window in windows)
    mask, mask_strides, mask_length, mask_kind = mask_arguments(mask, q)

    sms = multiprocessors(q.device)
    knobs = [lookup(q.device, "decode", key_of(keys, values, head_dim, columns)) for keys, values in form.runs]
    memory = shared_memory(q.device)
    room = memory // knobs[0]["programs_per_sm"]
    formats = [
        _format_constants(*own, head_dim, value_dim, knob["stages"], room, knob["step"], form.rotate_keys > 0)
        for own, knob in zip(form.runs, knobs, strict=True)
    ]
    # At least one: where loads are not asynchronous, they take no shared memory.
    resident = sms * max(1, min(knobs[0]["programs_per_sm"], *(memory // size for _, size in formats)))
    rows_of_programs = batch * heads * tiles
    most_pages = [view.table.shape[1] for view in views]
    loose = cdiv(form.sink, BLOCK) + cdiv(most_behind(form, held[2].shape[2], held[3].shape[2], queries), BLOCK)
    rest = 0 if form.ordered else page // BLOCK
    rests = [rest] * len(views)
    paged = split_counts(tuple(most_pages), rows_of_programs, resident)
    # Where pages are few and many bytes, steps of one run side by side.
    steps = [pages * (page // constants[STEP]) for pages, (constants, _) in zip(most_pages, formats, strict=True)]
    wide = all(min(keys.bits, values.bits) >= 8 for keys, values in form.runs)
    fine = wide and 2 * sum(steps) * rows_of_programs <= resident
    if fine:
        paged = steps
    pairs = [range(at, min(at + 2, len(views))) for at in range(0, len(views), 2)]
    splits = sum(paged) + loose + sum(rests)

    part = torch.empty((batch * heads, splits, rows, value_dim), dtype=torch.float32, device=q.device)
    part_top, part_sum = torch.empty((2, batch * heads, splits, rows), dtype=torch.float32, device=q.device)
    # Triton's interpreter truncates where bf16 should be rounded.
    out_dtype = dtype if q.is_cuda else torch.float32
    out = torch.empty((batch, query_heads, queries, value_dim), dtype=out_dtype, device=q.device)
    dependent = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] >= 9
    unquantized = PageFormat(16, "token", 1, page)
    plain, _ = _format_constants(unquantized, unquantized, head_dim, value_dim, 1, room)
    first = 0
    with on_device(q):
        for own in pairs:
            counts = [paged[own[0]], 0, loose if own[0] == 0 else 0, rests[own[0]], 0]
            if len(own) > 1:
                counts[1], counts[4] = paged[own[1]], rests[own[1]]
            registers = knobs[own[0]]["max_registers"]
            decode_kernel[(batch * heads, sum(counts), tiles)](
                q,
                counters,
                held,
                tuple(_run_tensors(views[i], *form.runs[i]) for i in own),
                mask,
                part,
                part_top,
                part_sum,
                *q.stride()[:3],
                *mask_strides,
                scaling * (rotate**-0.5 if rotate else 1.0),
                softcap,
                batch,
                mask_length,
                held[2].shape[2],
                held[3].shape[2],
                splits,
                first,
                *counts,
                views[own[0]].table.shape[1],
                views[own[-1]].table.shape[1],
                int(fine),
                # Long programs first, so that short ones fill what they leave; but where all fit side by side, windows
                # first: they have more to wait for.
                sum(counts[:2]) if sum(counts) * rows_of_programs <= 2 * sms else 0,
                FORMATS=(*(formats[i][0] for i in own), plain),
                AT=own[0],
                TOTAL=len(views),
                H=heads,
                SHARE=query_heads // heads,
                Q=queries,
                D=head_dim,
                DV=value_dim,
                S=form.sink,
                G=page,
                BM=columns,
                BR=BLOCK,
                MASK=mask_kind,
                ROWS=mask_strides[1] != 0 or mask_strides[2] != 0,
                SOFTCAP=softcap > 0,
                DTYPE=_DTYPES[dtype],
                ROTATE=rotate,
                ROTATED=form.rotate_keys > 0,
                PDL=dependent,
                # Only the first launch comes behind `advance`.
                EARLY=early and dependent and first == 0,
                num_warps=1,
                **({"launch_pdl": True} if dependent else {}),
                **({"maxnreg": registers} if registers else {}),
            )
            first += sum(counts)
        merge_splits(part, part_top, part_sum, sinks, out, form.rotate_values, dependent)
    return out.to(dtype)
