"""Plans of decode attention: launches and their merge for a shape and a format, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hadamard import factor_of
from ..masks import MaskKind, mask_kind
from ..pages import SIDES, PageFormat, StoreFormat
from ._lib import cdiv, multiprocessors, overlap, power, shared_memory
from .attend import decode_kernel
from .compile import Wanted
from .configs import FORGET, Knobs, key_of, lookup
from .decode_formats import DTYPES, loose_room, most_behind, pair_format, split_counts
from .launch import Launch, Nest
from .merge import SPLITS, merge_launch
from .pair_format import EARLY, FINE, TURNED, DecodeShape, Factors, PairFormat, Row, Run


class Plan(NamedTuple):
    """Numbers that launches need beside addresses.

    Attributes:
        launches: one for two runs each; of latents one.
        part: shape of the splits' sums, which end with the channels.
        out: shape of the result.
        rotate: rotation that is taken back.
        turn: rotates what is merged back; None where the merge does.
    """

    launches: tuple[Launch, ...]
    merge: Launch
    part: tuple[int, ...]
    out: tuple[int, ...]
    dtype: torch.dtype
    rotate: int
    turn: Launch | None = None

    def run(
        self,
        launches: Sequence[Callable[..., None]],
        q: Tensor,
        held: Sequence[Tensor],
        last: Sequence[Tensor],
        sinks: Tensor | None,
        given: Tensor | None = None,
    ) -> Tensor:
        """Launches of queries, what is held, and what comes last before the sums of splits, and their merge.

        The result is ``given`` where that can be written.
        """
        *rows, value_dim = self.part
        # Sums, tops and weights lie one behind the other, each aligned.
        count = cdiv(prod(rows), 4) * 4
        sums = torch.empty(count * (value_dim + 2), dtype=torch.float32, device=q.device)
        sums = sums.split_with_sizes((count * value_dim, count, count))
        direct = given is not None and given.dtype == self.dtype and given.is_contiguous()
        out = given if direct else torch.empty(self.out, dtype=self.dtype, device=q.device)
        for launch in launches:
            launch(q, *held, *last, *sums)
        merged = out if self.turn is None else torch.empty(self.out, dtype=torch.float32, device=q.device)
        self.merge(*sums, *([] if sinks is None else [sinks.contiguous()]), merged)
        if self.turn is not None:
            self.turn(merged, out)
        return out if given is None or direct else given.copy_(out)

    def wanted(
        self, form: StoreFormat, own: torch.dtype, heads: int, dims: tuple[int, int], device: torch.device, mapped: bool
    ) -> Iterator[Wanted]:
        """The variants for queries of dtype ``own`` and pages of these heads, in any number of rows of any length."""
        kinds, sums = [own, torch.int32, *[self.dtype] * 4], [torch.float32] * 3
        for formats in form.runs:
            kinds += [torch.int32] * (1 if form.ordered else 2)
            for fmt, side, dim in zip(formats, SIDES, dims, strict=True):
                found = [kind or self.dtype for _, kind in fmt.shapes(side, heads, dim).values()]
                # Words stand in for fp8, a type that some GPUs lack.
                kinds += [torch.int16 if kind == torch.float8_e4m3fn else kind for kind in found]
        for launch in self.launches:
            yield launch.wanted([*kinds, *[torch.int32] * mapped, *sums])
        back, merged = (self.rotate, self.dtype) if self.turn is None else (0, torch.float32)
        for splits in SPLITS:
            part = self.part[0], splits, *self.part[2:]
            yield merge_launch(part, self.out[2], None, back, device).wanted([*sums, merged])
        if self.turn is not None:
            yield self.turn.wanted([torch.float32, self.dtype])


class Queries(NamedTuple):
    """Queries but for their address: shape and strides as kernels read them, and the dtype that they came in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Scoring(NamedTuple):
    """Treatment of logits: see `mask_kind`, the number of sinks, and `decode_attention` for the factor and the cap."""

    mask: MaskKind | None
    sinks: int | None
    scaling: float
    softcap: float


def scoring_of(mask: Tensor | None, sinks: Tensor | None, scaling: float, softcap: float = 0.0) -> Scoring:
    """Treatment of a call's logits."""
    return Scoring(mask if mask is None else mask_kind(mask), sinks if sinks is None else len(sinks), scaling, softcap)


def _tiles(
    form: StoreFormat,
    head_dim: int,
    value_dim: int,
    columns: int,
    device: torch.device,
) -> tuple[list[Knobs], list[tuple[PairFormat, int]], int]:
    """Launch parameters and formats of the runs, with the shared memory of each, and that of a program."""
    knobs = [lookup(device, "decode", key_of(keys, values, head_dim, columns)) for keys, values in form.runs]
    room = shared_memory(device) // knobs[0]["programs_per_sm"]
    dims, rotated = (head_dim, value_dim), form.rotate_keys > 0
    formats = [
        pair_format(*own, *dims, knob["stages"], room, knob["step"], rotated)
        for own, knob in zip(form.runs, knobs, strict=True)
    ]
    return knobs, formats, room


def programs_planned(form: StoreFormat, head_dim: int, value_dim: int, columns: int, device: torch.device) -> int:
    """Programs of a multiprocessor that splits are made for: at least one."""
    knobs, formats, _ = _tiles(form, head_dim, value_dim, columns, device)
    memory, loose = shared_memory(device), loose_room(knobs[0]["loose"], head_dim, value_dim)
    return max(1, min(knobs[0]["programs_per_sm"], *(memory // max(size, loose) for _, size in formats)))


@lru_cache(maxsize=1024)
def plan_of(
    store: str,
    query: Queries,
    windows: tuple[int, int, int, int],
    blocks: tuple[int, ...],
    scoring: Scoring,
    device: torch.device,
    rotate: int,
    early: bool,
    mapped: bool = False,
) -> Plan:
    """Plan of a call: nothing here is asked again for another layer, or another step, of the same shape.

    Args:
        store: name of the store's format.
        query: of the queries, rotated or not.
        windows: KV heads, value dim, slots of the tail of keys and of values.
        blocks: pages of a row, for each run.
        scoring: of the logits.
        rotate: rotation by which the kernel turns queries, 0 where that is done.
        mapped: whether rows of the windows are others than those of the batch.
    """
    form = StoreFormat.parse(store)
    batch, query_heads, queries, head_dim = query.shape
    heads, value_dim, key_tail, value_tail = windows
    rows = query_heads // heads * queries
    columns = 8 if rows <= 8 else 16
    tiles = cdiv(rows, columns)
    page = form.runs[0][0].page_size
    kind, softcap = scoring.mask or MaskKind(), scoring.softcap

    sms = multiprocessors(device)
    knobs, formats, room = _tiles(form, head_dim, value_dim, columns, device)
    planned = programs_planned(form, head_dim, value_dim, columns, device)
    resident = sms * planned
    rows_of_programs = batch * heads * tiles
    block = knobs[0]["loose"]
    loose = cdiv(form.sink, block) + cdiv(most_behind(form, key_tail, value_tail, queries), block)
    rests = [page // block if constants.rests and not form.ordered else 0 for constants, _ in formats]
    blocks_seen = tuple(form.pages_seen(count, queries) for count in blocks)
    paged = split_counts(blocks_seen, rows_of_programs, resident, loose + sum(rests))
    # Where pages are few and many bytes, steps of one run side by side.
    steps = [pages * (page // constants.step) for pages, (constants, _) in zip(blocks_seen, formats, strict=True)]
    wide = all(min(keys.bits, values.bits) >= 8 for keys, values in form.runs)
    fine = wide and 2 * sum(steps) * rows_of_programs <= resident
    if fine:
        paged = steps
    pairs = [range(at, min(at + 2, len(blocks))) for at in range(0, len(blocks), 2)]
    splits = sum(paged) + loose + sum(rests)

    unquantized = PageFormat(16, "token", 1, page)
    whole, _ = pair_format(unquantized, unquantized, head_dim, value_dim, 1, room)
    launches, first = [], 0
    for own in pairs:
        pages = [paged[i] for i in own]
        programs = sum(pages) + (loose if own[0] == 0 else 0) + sum(rests[i] for i in own)
        mode = FINE if fine else 0
        # Only the first launch comes behind `advance`.
        mode |= EARLY * (early and bool(overlap(device)) and first == 0)
        # Long programs first, so that short ones fill what they leave; but where all fit side by side, windows first:
        # they have more to wait for.
        mode |= TURNED * (programs * rows_of_programs <= 2 * sms)
        numbers = {
            "strides": (*query.stride[:3], kind.strides[3]),
            "factors": Factors(scoring.scaling * factor_of(rotate), softcap),
            **dict(zip(("s_mb", "s_mh", "s_mq"), kind.strides, strict=False)),
            "B": batch,
            "L": kind.length,
            "WK": key_tail,
            "WV": value_tail,
            "SPLITS": splits,
            "FIRST": first,
            "PAGES0": pages[0],
            "PAGES1": sum(pages[1:]),
            "TABLE0": blocks[own[0]],
            "TABLE1": blocks[own[-1]],
            "MODE": mode,
            "QUERIES": queries,
        }
        shape = DecodeShape(
            FORMATS=(*(formats[i][0] for i in own), whole),
            AT=own[0],
            TOTAL=len(blocks),
            H=heads,
            SHARE=query_heads // heads,
            SEVERAL=queries > 1,
            D=head_dim,
            DV=value_dim,
            S=form.sink,
            G=page,
            BM=columns,
            BR=block,
            MASK=kind.kind,
            ROWS=kind.strides[1] != 0 or kind.strides[2] != 0,
            SOFTCAP=softcap > 0,
            DTYPE=DTYPES[query.dtype],
            ROTATE=rotate,
            ROTATED=form.rotate_keys > 0,
            PDL=bool(overlap(device)),
            WINDOW=form.window,
        )
        constants = {
            "SHAPE": shape,
            "num_warps": 1,
            **overlap(device),
        }
        grid = (batch * heads, programs, tiles)
        nest = nest_of(form, tuple(own), scoring.mask is not None, mapped)
        launches.append(Launch(decode_kernel, grid, numbers, constants, device, nest, planned))
        first += programs
    part = (batch * heads, splits, rows, value_dim)
    merge = merge_launch(part, queries, scoring.sinks, form.rotate_values, device)
    return Plan(tuple(launches), merge, part, (batch, query_heads, queries, value_dim), query.dtype, form.rotate_values)


FORGET.append(plan_of.cache_clear)


@lru_cache(maxsize=256)
def table_places(store: str) -> tuple[int, ...]:
    """Places of the runs' tables among their tensors."""
    form, at, found = StoreFormat.parse(store), 0, []
    for keys, values in form.runs:
        found.append(at)
        at += 1 + (not form.ordered) + len(keys.names) + len(values.names)
    return tuple(found)


def nest_of(form: StoreFormat, own: tuple[int, ...], masked: bool, mapped: bool) -> Nest:
    """From queries, counters, four windows, all runs' tensors, and sums, tops and weights.

    Before these come the mask and the map of rows, if there are any.
    """
    tables = table_places(form.spec)
    pick = [itemgetter(*[tables[i] + at for at in _order(*form.runs[i], ordered=form.ordered)]) for i in own]
    end = tables[-1] + 1 + (not form.ordered) + sum(len(fmt.names) for fmt in form.runs[-1])

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        parts = given[6 : 6 + end]
        if isinstance(given[0], Tensor):
            # Bytes stand in for fp8, a type that some GPUs lack.
            parts = [x.view(torch.uint8).view(torch.int16) if x.dtype == torch.float8_e4m3fn else x for x in parts]
        runs = tuple([Run._make(each(parts)) for each in pick])
        mask = given[6 + end] if masked else given[0]
        return given[0], Row(*given[1:6], given[-4] if mapped else None), runs, mask, *given[-3:]

    return nest


def _order(keys: PageFormat, values: PageFormat, ordered: bool) -> list[int]:
    """Indices of a run's flat tensors in the order of `Run`; the table stands for parts that a format lacks."""
    first = 1 if ordered else 2
    at = {f"k_{name}": first + i for i, name in enumerate(keys.names)}
    at |= {f"v_{name}": first + len(at) + i for i, name in enumerate(values.names)}
    return [0, 0 if ordered else 1, *(at.get(name, 0) for name in Run._fields[2:])]


@lru_cache(maxsize=1024)
def rotates(store: str, head_dim: int) -> int:
    """Rotation by which the kernel turns queries; 0 where fields do not divide blocks of the rotation."""
    form = StoreFormat.parse(store)
    outside = power(head_dim) != head_dim or any(keys.bits == 8 for keys, _ in form.runs)
    return 0 if outside else form.rotate_keys
