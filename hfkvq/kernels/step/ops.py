"""A decode step without the host: append, attend and seal by counters on the device, over one buffer a layer.

What a step does never depends on anything that the host knows, so a CUDA graph that has recorded one serves every
length. `advance` works out what will be due; sealing kernels are launched in every recorded step, and leave at once
where nothing is. What they have sealed is counted when the next step begins: see `settle`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..arguments import AttentionArguments
from ..decode import LENGTH, START, decode_attention, sealed_count
from ..dispatch import Keep, launched, reference
from ..masks import fold_mask, has_room, mask_kind
from ..pages import SIDES
from ..seal import seal_side
from ..windows import tokens_due_by_row
from .buffer import Ahead, StepState, side_by_side, views_of_buffer
from .plan import StepPlan


@launched("step:advance_triton")
def _advance(
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    scratch: Sequence[Tensor],
    capacity: int,
    room: int,
    local: Sequence[int],
    unit: Sequence[int],
    rotate_keys: int,
    rotate_values: int,
    keep: Keep | None = None,
) -> None:
    new, sealed, index_keys, index_values, flag, *pos = scratch
    sealed.copy_(new[0])
    counters[-2:] += new
    tokens, sink = keys.shape[2], windows[0].shape[2]
    length = counters[LENGTH] + tokens
    rest = (length - sink).clamp(min=0)
    fits = counters[START] + length <= capacity
    due = []
    for at, index in enumerate((index_keys, index_values)):
        total, tail = sealed_count(counters, SIDES[at]), windows[2 + at].shape[2]
        due.append(tokens_due_by_row(rest, total, local[at], unit[at]))
        fits &= (rest - total <= tail) & (counters[counters.shape[0] - 2 + at] + due[at] <= room)
        fits &= due[at] <= index.shape[1]
        step = torch.arange(index.shape[1], dtype=torch.int32, device=index.device)
        index.copy_((total[:, None] + step) % tail)
        if pos and at == 0:
            slot = counters[-2, :, None] + step
            inside = step < (due[0] * fits)[:, None]
            rows = torch.arange(keys.shape[0], device=keys.device)[:, None].expand_as(slot)[inside]
            pos[0][rows, slot[inside].long()] = (sink + total[:, None] + step)[inside]
    flag.copy_(torch.maximum(flag, (~fits).any().int()))
    # On CPUs, which may be asked, rows hardly ever lack room.
    before = [] if keys.device.type == "cpu" and bool(fits.all()) else [x.clone() for x in (counters[LENGTH], *windows)]
    reference("append")(keys, values, counters, windows, rotate_keys, rotate_values)
    for x, old in zip((counters[LENGTH], *windows), before, strict=bool(before)):
        x.copy_(torch.where(fits.view(-1, *(1,) * (x.dim() - 1)), x, old))
    for at in (0, 1):
        new[at] = due[at] * fits


def advance(keys: Tensor, values: Tensor, state: StepState, plan: StepPlan) -> None:
    """Begins a step: counts what the last one sealed, appends, and works out what this one will seal.

    A row that has no room for its tokens is left as it is, and ``state.flag`` set.

    Args:
        keys: (B, H, t, Dk), after RoPE, not rotated; t <= 16.
        values: (B, H, t, Dv).
        state: the layer's tensors; ``new`` and ``index`` say afterwards what is due: the first ``new[side, b]`` slots
            of row b of ``index``.
    """
    form, tokens = plan.format, keys.shape[2]
    key = "advance", keys.shape, keys.stride(), keys.dtype, values.shape, values.stride(), values.dtype
    ready = state.ready(key, keys)
    if ready is not None:
        ready(keys, values)
        return
    index = [state.due_slots(plan, tokens, at) for at in (0, 1)]
    scratch = [state.new, state.sealed, *index, state.flag]
    last = state.runs[-1]
    if last.pos is not None:
        scratch.append(last.pos)
    room, windows = plan.blocks[-1] * form.runs[-1][0].page_size, (list(plan.local), list(plan.unit))
    rest = state.counters, state.windows, scratch, plan.capacity, room, *windows, form.rotate_keys, form.rotate_values
    _advance(keys, values, *rest, state.keep(key))


@launched("step:observe_triton")
def observe(
    q: Tensor,
    sums: Tensor,
    counts: Tensor,
    sealed: Tensor | None = None,
    weight: Tensor | None = None,
    rows: Tensor | None = None,
    keep: Keep | None = None,
) -> None:
    """Adds magnitudes of queries to their sums, which begin anew where something was sealed.

    Args:
        q: (B, Hq, t, D), t <= 16.
        sums: f64 (B, H, D), written in place: means over the query heads of a KV head.
        counts: i32 (H, B), queries in ``sums``, likewise.
        sealed: i32 (B,), tokens of keys that the step before has sealed; None for nothing.
        weight: f32 (B, H, D), written: the mean of the queries in ``sums``; None if it is not asked for.
        rows: i32 (B,), the row of ``sums`` and ``counts`` that each row has, of any number of them; None where row b
            has row b.
        keep: see `dispatch.Keep`; a call that takes queries.
    """
    heads = sums.shape[1]
    total = q.abs().double().sum(2).unflatten(1, (heads, -1)).mean(2)
    again = torch.zeros_like(counts[0, : q.shape[0]]) > 0 if sealed is None else sealed > 0
    at = slice(None) if rows is None else rows.long()
    own, count = sums[at].masked_fill(again[:, None, None], 0.0) + total, counts[:, at].masked_fill(again, 0)
    count = count + q.shape[2]
    sums[at], counts[:, at] = own, count
    if weight is not None:
        weight.copy_((own / count.T[:, :, None]).float())


def seal_due(state: StepState, plan: StepPlan, tokens: int, sides: Sequence[int] = (0, 1)) -> None:
    """Seals, into the last run, what `advance` found due: keys (0), values (1) or both."""
    run = state.runs[-1]
    for at in sides:
        ready = state.ready(("seal", at, tokens), state.counters)
        if ready is not None:
            ready()
            continue
        pages = (run.keys, run.values)[at], run.table, state.counters[-2 + at], state.new[at]
        tail = state.windows[2 + at]
        source = tail if state.rows is None else side_by_side(tail, len(state.rows))
        index, fmt = state.due_slots(plan, tokens, at), plan.format.runs[-1][at]
        query = state.weight if plan.sums_queries else None
        rest = source, index, fmt, SIDES[at], plan.rule, query, plan.balance[at]
        seal_side(*pages, *rest, keep=state.keep(("seal", at, tokens)))


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def branches(x: Tensor, count: int) -> list[torch.cuda.Stream]:
    """Streams whose kernels become branches of their own in the CUDA graph that is being recorded, if one is.

    Branches begin with what has been launched before; the current stream has to wait for them. Where nothing is
    recorded there are none: to change streams costs more than their kernels take.
    """
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return []
    sides = [_side_stream(x.device, number) for number in range(count)]
    for side in sides:
        side.wait_stream(torch.cuda.current_stream(x.device))
    return sides


_NO_BRANCH = contextlib.nullcontext()


def _fetched(state: StepState) -> list[Tensor]:
    """The runs to attend to: where pages come a layer ahead, those that have come, and the next ones are on their way.

    A page that the last step has sealed is there: it was written to the host's memory before this step began.
    """
    ahead = state.ahead
    if ahead is None or (ahead.target.is_cuda and not torch.cuda.is_current_stream_capturing()):
        return state.flat_runs
    device = ahead.target.device
    main, side = None, None
    if ahead.target.is_cuda:
        main, side = torch.cuda.current_stream(device), _side_stream(device, 2)

    def fetch(each: Ahead) -> None:
        if side is not None and main is not None:
            side.wait_stream(main)
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            each.target.copy_(each.source, non_blocking=True)

    if ahead.leads:
        fetch(ahead)
    if side is not None and main is not None:
        main.wait_stream(side)
        # A launch may begin before the launch before it has ended, but not before a copy has.
        ahead.mark.neg_()
    following = None if ahead.following is None else ahead.following()
    if following is not None:
        fetch(following)
    return ahead.runs


def run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: AttentionArguments,
    state: StepState,
    plan: StepPlan,
    due: bool = True,
) -> Tensor:
    """A whole step of one layer; see `step`. ``due`` is False where the host knows that nothing will be sealed."""
    whole, fold = q, plan.fold
    if fold > 1:
        arguments = arguments._replace(mask=fold_mask(arguments.mask, q.shape[0], fold))
        q, k, v = (x.reshape(x.shape[0] * fold, x.shape[1] // fold, *x.shape[2:]) for x in (q, k, v))
    runs = _fetched(state)
    advance(k, v, state, plan)
    out = attend_and_seal(whole, q, k.shape[2], arguments, state, plan, due, runs)
    return out if fold == 1 else out.reshape(*whole.shape[:3], out.shape[-1])


def attend_and_seal(
    whole: Tensor,
    q: Tensor,
    tokens: int,
    arguments: AttentionArguments,
    state: StepState,
    plan: StepPlan,
    due: bool = True,
    runs: Sequence[Tensor] | None = None,
) -> Tensor:
    """Rest of a step once its tokens are in the windows and counted: (B, Hq, t, Dv).

    Args:
        whole: (B / fold, Hq, t, D), the queries as the model has them.
        q: (B, Hq, t, D), the same as the layer has them.
        state: the layer's tensors; ``new`` and ``index`` say what is due.
        due: False where the host knows that nothing is.
        runs: where attention reads the pages; None where they are.
    """
    scaling, mask, softcap, sinks, *_ = arguments
    # Attention is as long as two kernels that find nothing to do. More than two in a row would be waited for.
    long = due and (plan.sums_queries or any(fmt.normed for fmt in plan.format.runs[-1]))
    sides = branches(q, 2 if long else 1)
    # Pages that are sealed now are no part of what is attended to, so both can run at the same time.
    with torch.cuda.stream(sides[0]) if sides else _NO_BRANCH:
        if plan.sums_queries:
            # A buffer's sums of all queries never begin anew; a slot's do with its next request.
            sealed = None if plan.query == "total" and state.rows is None else state.sealed
            key = "observe", q.shape, q.stride(), q.dtype
            ready = state.ready(key, q)
            if ready is None:
                observe(q, state.sums, state.counts, sealed, state.weight, state.rows, state.keep(key))
            else:
                ready(q)
        elif plan.query == "keep":
            state.query.copy_(whole[:, :, -1:])
        if due:
            seal_due(state, plan, tokens, (0,))
    # Values ask for no queries.
    with torch.cuda.stream(sides[-1]) if sides else _NO_BRANCH:
        if due:
            seal_due(state, plan, tokens, (1,))
    own = state.flat_runs
    # Other masks differ from step to step, and pages that come a layer ahead lie elsewhere.
    alike = (runs is None or runs is own) and (mask is None or has_room(mask))
    given = None if sinks is None else (sinks.shape, sinks.dtype)
    key = "attend", q.shape, q.stride(), q.dtype, mask if mask is None else mask_kind(mask), given, scaling, softcap
    ready = state.ready(key, q) if alike else None
    if ready is None:
        # A buffer's queries were there before `advance`.
        out = decode_attention(
            q, state.counters, state.windows, own if runs is None else runs, mask, sinks, scaling, softcap, plan.format,
            state.rows is None, state.rows, state.keep(key) if alike else None,
        )  # fmt: skip
    else:
        out = ready(q, mask, sinks)
    for side in sides:
        torch.cuda.current_stream(q.device).wait_stream(side)
    return out


@torch.library.custom_op("hfkvq::step", mutates_args=("buffer", "pages"))
def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    buffer: Tensor,
    pages: Tensor | None,
    scaling: float,
    softcap: float,
    plan: str,
) -> Tensor:
    """One decode step of a layer as one opaque operation: append, attend, observe, seal. Asks the host nothing.

    Args:
        q: (B, Hq, t, D), after RoPE, not scaled, not rotated; t <= 16.
        k: (B, H, t, D), the new tokens' keys.
        v: (B, H, t, Dv).
        mask: see `decode_attention`; None is causal.
        sinks: see `decode_attention`.
        buffer: u8, the layer's buffer, written in place.
        pages: u8, memory of offloaded pages, likewise; None where they lie in the buffer.
        softcap: see `decode_attention`.
        plan: `StepPlan.spec` of the buffer.

    Returns:
        (B, Hq, t, Dv). Where a row had no room for its tokens (``StepState.flag``), they are missing.
    """
    own = StepPlan.parse(plan)
    state = views_of_buffer(buffer, own, pages)
    return run_step(q, k, v, AttentionArguments(scaling, mask, softcap, sinks), state, own)


@step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    latent = StepPlan.parse(rest[-1]).format.latent
    return q.new_empty((*q.shape[:3], k.shape[-1] if latent else v.shape[-1]))
