"""Launches of `hfkvq.kernels.fused_step`, one after the other, with one look at their tensors.

A store's tensors say once where they lie, and are another `StepTensors` when one of them is replaced; all others are
asked anew each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver

from ..decode import LENGTH
from ..masks import has_room
from ..pages import RunView, StoreFormat
from ..step_tensors import Observing, Sealing, StepTensors
from .append import NewTokens, append_launch, is_misrounded
from .configs import edition
from .decode_plan import Plan, Queries, Scoring, decode_plan, table_places
from .due import due_launch
from .fused_kernels import begin_launch, end_launch
from .launch import Launch, is_watched
from .merge import MaskKind, mask_kind, mask_words
from .seal import seal_launch


class _Sums(NamedTuple):
    """Where the sums of splits lie in one tensor: f32 in all, and which are tops, weights, and what is due."""

    elements: int
    tops: int
    totals: int
    found: int

    def split(self, buffer: Tensor, part: tuple[int, ...]) -> list[Tensor]:
        """Sums, tops and weights as tensors, and what is due, i32."""
        places = ((0, part), (self.tops, part[:3]), (self.totals, part[:3]))
        sums = [buffer[at : at + math.prod(shape)].view(shape) for at, shape in places]
        return [*sums, buffer[self.found :].view(torch.int32)]


def _sums(part: tuple[int, ...], rows: int) -> _Sums:
    # Each begins at a multiple of sixteen bytes.
    count = -(-part[0] * part[1] * part[2] // 4) * 4
    found = count * part[3] + 2 * count
    return _Sums(found + 4 * rows, count * part[3], count * (part[3] + 1), found)


class _Step(NamedTuple):
    """A step's launches, and what they write beside the store.

    Attributes:
        begin: see `begin_launch` and `append_launch`.
        attend: see `decode_plan`.
        end: see `end_launch` and `merge_launch`.
        sums: where the sums of splits and what is due lie.
        part: shape of the sums.
        out: shape of the result.
        turned: whether that is (B, t, Hq, Dv): of one token it lies in memory as (B, Hq, t, Dv) does.
        dtype: of the result.
    """

    begin: Launch
    attend: Launch
    end: Launch
    sums: _Sums
    part: tuple[int, ...]
    out: tuple[int, ...]
    turned: bool
    dtype: torch.dtype


@lru_cache(maxsize=1024)
def _step(
    store: str,
    device: torch.device,
    tail_dtype: torch.dtype,
    windows: tuple[int, int, int],
    blocks: tuple[int, ...],
    query: tuple[int, ...],
    query_stride: tuple[int, ...],
    dtype: torch.dtype,
    keys: tuple[int, ...],
    key_stride: tuple[int, ...],
    key_dtype: torch.dtype,
    values: tuple[int, ...],
    value_stride: tuple[int, ...],
    value_dtype: torch.dtype,
    mask: MaskKind | None,
    scaling: float,
    softcap: float,
    sealing: Sealing | None,
    observes: bool,
    signed: bool,
    edition: int,
) -> _Step | None:
    form = StoreFormat.parse(store)
    if form.latent:
        # Attended to by a kernel of their own.
        return None
    new = NewTokens(keys, key_stride, values, value_stride, (key_dtype, value_dtype), tail_dtype, *windows, device)
    held = (keys[1], values[3], new.key_tail, new.value_tail, new.held)
    queries, scoring = Queries(query, query_stride, dtype, dtype), Scoring(mask, None, scaling, softcap)
    plan: Plan | None = decode_plan(store, queries, held, blocks, scoring, device, edition)
    if plan is None:
        return None
    if sealing is None and not observes:
        begin = append_launch(new, form.rotate_keys, form.rotate_values)
    else:
        begin = begin_launch(new, form, sealing, (query, query_stride, signed) if observes else None)
    end = plan.merge if sealing is None else end_launch(plan.merge, new, form, blocks[0], sealing.most)
    batch, heads, tokens, dim = plan.out
    out = (batch, tokens, heads, dim) if tokens == 1 else plan.out
    return _Step(begin, plan.launches[0], end, _sums(plan.part, batch), plan.part, out, tokens == 1, plan.dtype)


_KIND = "hfkvq_kind"
"""Attribute of a mask with `ROOM`: its `MaskKind`."""

_Where = TypeVar("_Where", int, Tensor)

# Tensors on a GPU have asked for it already, so there is nothing to initialize.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


class _Noted:
    """What steps remember of a `StepTensors`: where its tensors lie, and the launches of the last step.

    Attributes:
        device: of the tensors.
        index: its number, -1 for a CPU.
        lie: addresses of counters, windows and runs.
        held: the part of `_step`'s arguments that is theirs.
        asked: what the last step was like.
        step: its launches; None where it takes the operations themselves.
    """

    __slots__ = ("asked", "device", "held", "index", "lie", "step")

    def __init__(self, held: StepTensors) -> None:
        counters, windows, runs = held.counters, held.windows, held.runs
        sink_k, _, tail_k, tail_v = windows
        self.device, self.index = counters.device, counters.get_device()
        self.lie = [x.data_ptr() for x in (counters, *windows, *runs)]
        lengths = sink_k.shape[2], tail_k.shape[2], tail_v.shape[2]
        blocks = tuple([runs[at].shape[1] for at in table_places(held.store.spec)])
        self.held = held.store.spec, self.device, tail_k.dtype, lengths, blocks
        self.asked: tuple[Any, ...] | None = None
        self.step: _Step | None = None

    def ask(self, asked: tuple[Any, ...], keys: Tensor, held: StepTensors) -> None:
        """Looks up the launches of a step that is not like the last one."""
        rotate = held.store.rotate_keys or held.store.rotate_values
        own = None if self.index < 0 and is_misrounded(keys, held.windows[2], rotate) else _step(*self.held, *asked)
        self.asked, self.step = asked, own


def _kind(mask: Tensor) -> MaskKind:
    """`mask_kind`, once for all layers of a step's mask, whose `ROOM` nobody else's has."""
    kind: MaskKind | None = getattr(mask, _KIND, None)
    if kind is None:
        kind = mask_kind(mask)
        if has_room(mask):
            setattr(mask, _KIND, kind)
    return kind


def _given(
    new: Sequence[_Where], lie: Sequence[_Where], masked: bool, seals: bool, observes: bool
) -> tuple[list[_Where], list[_Where], list[_Where]]:
    """What begin, attention and end are given: tensors or their addresses.

    Args:
        new: queries, keys, values, the result, sums, tops and weights of splits, what is due; then the mask if there
            is one, and sums and counts of queries that are observed.
        lie: counters, windows and runs.
        masked: whether there is a mask.
        seals: whether what is due is sealed.
        observes: whether queries are observed.
    """
    q, k, v, out, *parts, found = new[:8]
    begun = [k, v, *lie[1:5], lie[0]]
    asked = [q, *lie, *new[8 : 8 + masked], *parts]
    ended = [*parts, out]
    if seals:
        begun.append(found)
        ended += [lie[0], found, *lie[3:]]
    if observes:
        begun += [q, *new[-2:]]
    return begun, asked, ended


def append_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    held: StepTensors,
    scaling: float,
    softcap: float,
    sealing: Sealing | None = None,
    observing: Observing | None = None,
    mask: Tensor | None = None,
) -> Tensor | None:
    """See `hfkvq.kernels.fused_step`; None where the operations have to go one by one, and nothing is done."""
    noted: _Noted | None = held.noted
    if noted is None:
        noted = held.noted = _Noted(held)
    index = noted.index
    if q.get_device() != index or (index >= 0 and index != _current_device()):
        return None
    asked = (
        q.shape,
        q.stride(),
        q.dtype,
        keys.shape,
        keys.stride(),
        keys.dtype,
        values.shape,
        values.stride(),
        values.dtype,
        None if mask is None else _kind(mask),
        scaling,
        softcap,
        sealing,
        observing is not None,
        observing is not None and observing.signed,
        edition(),
    )
    if asked != noted.asked:
        noted.ask(asked, keys, held)
    step = noted.step
    if step is None:
        return None
    sums = step.sums
    buffer = torch.empty(sums.elements, dtype=torch.float32, device=noted.device)
    out = torch.empty(step.out, dtype=step.dtype, device=noted.device)
    at = buffer.data_ptr()
    new = [
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        at,
        at + 4 * sums.tops,
        at + 4 * sums.totals,
        at + 4 * sums.found,
    ]
    if mask is not None:
        new.append(mask.data_ptr())
    if observing is not None:
        new += [observing.sums.data_ptr(), observing.counts.data_ptr()]
    which = mask is not None, sealing is not None, observing is not None
    given, launches = _given(new, noted.lie, *which), (step.begin, step.attend, step.end)
    ready = [launch.ready(own) for launch, own in zip(launches, given, strict=True)]
    if None in ready:
        # Some have not been needed yet, or there is nothing to compile for.
        tensors = [q, keys, values, out, *sums.split(buffer, step.part)]
        tensors += [] if mask is None else [mask_words(mask)]
        tensors += [] if observing is None else observing[:2]
        _first(launches, _given(tensors, [held.counters, *held.windows, *held.runs], *which), held.counters, keys)
        out = out if out.dtype == q.dtype else out.to(q.dtype)
    else:
        stream, watched = driver.active.get_current_stream(index), is_watched()
        step.begin.run(ready[0], given[0], stream, watched)
        try:
            step.attend.run(ready[1], given[1], stream, watched)
            step.end.run(ready[2], given[2], stream, watched)
        except BaseException:
            _take_back(held.counters, keys)
            raise
    return out if step.turned else out.transpose(1, 2)


def _first(
    launches: tuple[Launch, Launch, Launch], given: tuple[list[Tensor], ...], counters: Tensor, keys: Tensor
) -> None:
    """Begins, attends and ends with tensors. What cannot be compiled or loaded fails before anything is launched."""
    for launch, tensors in zip(launches, given, strict=True):
        launch.prepare(tensors)
    begin, attend, end = launches
    begin(*given[0])
    try:
        attend(*given[1])
        end(*given[2])
    except BaseException:
        _take_back(counters, keys)
        raise


def _take_back(counters: Tensor, keys: Tensor) -> None:
    """Counts new tokens as not stored: the step failed, and they will come again."""
    counters[LENGTH] -= keys.shape[2]


@lru_cache(maxsize=1024)
def _seals(
    store: str,
    rule: str | None,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: int,
    sealing: Sealing,
    positions: int | None,
) -> tuple[Launch, tuple[Launch | None, ...]] | None:
    """The launch that counts, and those that seal keys and values; None where a side has no kernel."""
    form, tails = StoreFormat.parse(store), (shapes[0][2], shapes[1][2])
    count = due_launch(shapes[0][0], form.sink, tails, sealing, device, len(form.runs), positions)
    sides: list[Launch | None] = []
    for at, side in enumerate(("keys", "values")):
        fmt = form.runs[-1][at]
        made = None
        if sealing.most[at]:
            own = rule if fmt.raised and rule else ""
            made = seal_launch(fmt, side, shapes[at], strides[at], dtype, device, blocks, sealing.most[at], own)
            if made is None:
                return None
        sides.append(made)
    return count, tuple(sides)


def seal_tail(
    counters: Tensor,
    windows: Sequence[Tensor],
    run: RunView,
    local: tuple[int, int],
    unit: tuple[int, int],
    most: tuple[int, int],
    store: StoreFormat,
    rule: str | None,
) -> bool:
    """See `hfkvq.kernels.fused_step`; False where the operations have to go one by one, and nothing is done."""
    device, tails = counters.device, windows[2:]
    if counters.is_cuda and counters.get_device() != torch.cuda.current_device():
        return False
    shapes, strides = (tails[0].shape, tails[1].shape), (tails[0].stride(), tails[1].stride())
    blocks, positions = run.table.shape[1], None if run.pos is None else run.pos.shape[1]
    sealing = Sealing(local, unit, most)
    made = _seals(store.spec, rule, shapes, strides, tails[0].dtype, device, blocks, sealing, positions)
    if made is None:
        return False
    count, sides = made
    batch = counters.shape[1]
    found = torch.empty(4 * batch + batch * sum(most), dtype=torch.int32, device=device)
    at = found.data_ptr()
    table = run.table.data_ptr()
    counted = [counters.data_ptr(), at] if run.pos is None else [counters.data_ptr(), at, run.pos.data_ptr()]
    ready = [count.ready(counted)]
    given = []
    index = at + 16 * batch
    for i, (side, parts) in enumerate(zip(sides, (run.keys, run.values), strict=True)):
        if side is not None:
            own = [x.data_ptr() for x in parts]
            own += [table, at + 4 * batch * i, at + 4 * batch * (2 + i), tails[i].data_ptr(), index]
            given.append((side, own))
            ready.append(side.ready(own))
        index += 4 * batch * most[i]
    if None in ready:
        return False
    stream, watched = driver.active.get_current_stream(device.index), is_watched()
    count.run(ready[0], counted, stream, watched)
    for (side, own), variant in zip(given, ready[1:], strict=True):
        side.run(variant, own, stream, watched)
    return True
