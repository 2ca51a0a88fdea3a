"""A decode step without the host: append, attend and seal by counters on the device, over one buffer a layer.

What a step does never depends on anything that the host knows, so a CUDA graph that has recorded one serves every
length. `advance` works out what will be due; the kernels that seal are launched in every step and leave at once where
nothing is. What they have sealed is counted when the next step begins: see `settle`.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .decode import LENGTH, RUNS, START, decode_attention, sealed_count
from .dispatch import call, define, reference, triton_slot
from .norms import page_norms
from .pages import RunView, Side, StoreFormat
from .seal import seal

SIDES: tuple[Side, Side] = ("keys", "values")

MAX_STEP = 16
"""Most tokens of a step."""

_ALIGNMENT = 256

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


@dataclass(frozen=True)
class StepPlan:
    """Static description of a layer's buffer, and of when its tokens are sealed.

    Attributes:
        store: name of the store's format (`StoreFormat.spec`).
        rows: B, rows of the store; heads that hold tokens of their own are rows.
        heads: H, KV heads of a row.
        key_dim: D of the keys.
        value_dim: D of the values.
        dtype: of the windows, as ``str(torch.dtype)``.
        blocks: pages of a row, for each run.
        tails: slots of the tail of keys and of values.
        local: newest tokens that stay unsealed, of keys and of values.
        unit: tokens sealed together, likewise.
        capacity: most logical columns.
        rule: rule by which raised channels are chosen, see `kernels.channel_widths`; "" where there are none.
        query: "sum" keeps the sum of queries' magnitudes, by which ``rule`` weighs channels; "keep" the newest queries;
            "" nothing.
        fold: KV heads of the model that are rows of their own, or 1.
        query_heads: Hq of the model, where ``query`` is "keep".
        balance: rounds of `page_norms` for keys and values.
    """

    store: str
    rows: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    blocks: tuple[int, ...]
    tails: tuple[int, int]
    local: tuple[int, int]
    unit: tuple[int, int]
    capacity: int
    rule: str = ""
    query: str = ""
    fold: int = 1
    query_heads: int = 0
    balance: tuple[int, int] = (1, 1)

    @cached_property
    def spec(self) -> str:
        """Reversible name; the step takes it as its static argument."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(spec: str) -> StepPlan:
        """Inverse of `spec`."""
        found: dict[str, Any] = json.loads(spec)
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in found.items()}
        return StepPlan(**fields)

    @cached_property
    def format(self) -> StoreFormat:
        """The store's format."""
        return StoreFormat.parse(self.store)

    def due(self, side: int, tokens: int) -> int:
        """Most tokens of a side that are due after a step of so many, where nothing was due before."""
        return (self.unit[side] - 1 + tokens) // self.unit[side] * self.unit[side]


@dataclass(eq=False)
class StepState:
    """A buffer's tensors: views of its storage.

    Attributes:
        counters: see `decode_attention`; counts of sealed tokens lack what the last step has sealed.
        windows: sink keys, sink values, tail keys, tail values.
        runs: the runs of pages.
        new: i32 (2, B), tokens of keys and values that the last step has sealed.
        sealed: i32 (B,), tokens of keys that the step before has sealed.
        index: i32 (B * m,) for keys and values: room for the slots that are due.
        flag: i32 (1,), 1 once a token found no room and was not stored.
        sums: f64 (B, H, Dk), sums of query magnitudes since the last seal; empty unless the plan asks for it.
        counts: i32 (H, B), queries in ``sums``, which each head counts for itself.
        weight: f32 (B, H, Dk), their mean.
        query: (B / fold, Hq, 1, Dk), newest queries; empty unless the plan asks for it.
    """

    counters: Tensor
    windows: list[Tensor]
    runs: list[RunView]
    new: Tensor
    sealed: Tensor
    index: tuple[Tensor, Tensor]
    flag: Tensor
    sums: Tensor
    counts: Tensor
    weight: Tensor
    query: Tensor
    _slots: dict[int, list[Tensor]] = field(default_factory=dict)

    def flat_runs(self) -> list[Tensor]:
        """All runs' tensors in the order ops take them."""
        return self._flat

    @cached_property
    def _flat(self) -> list[Tensor]:
        return [tensor for run in self.runs for tensor in run.flat()]

    @cached_property
    def last_counts(self) -> tuple[Tensor, Tensor]:
        """i32 (B,): tokens of keys and of values that the last run has sealed."""
        keys, values = self.counters[-2:].unbind()
        return keys, values

    @cached_property
    def due_now(self) -> tuple[Tensor, Tensor]:
        """i32 (B,): tokens of keys and of values that the last step has sealed."""
        keys, values = self.new.unbind()
        return keys, values

    def due_slots(self, plan: StepPlan, tokens: int) -> list[Tensor]:
        """Room for the slots that are due after a step of ``tokens``: i32 (B, m) for keys and for values."""
        found = self._slots.get(tokens)
        if found is None:
            most = [plan.due(at, tokens) for at in (0, 1)]
            found = [x[: plan.rows * n].view(plan.rows, n) for x, n in zip(self.index, most, strict=True)]
            self._slots[tokens] = found
        return found


def _shapes(plan: StepPlan) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a buffer, in order."""
    form, own = plan.format, _DTYPES[plan.dtype]
    rows, heads, dims = plan.rows, plan.heads, (plan.key_dim, plan.value_dim)
    found: list[tuple[tuple[int, ...], torch.dtype]] = [((RUNS + 2 * len(form.runs), rows), torch.int32)]
    found += [((rows, heads, form.sink, dim), own) for dim in dims]
    found += [((rows, heads, length, dim), own) for length, dim in zip(plan.tails, dims, strict=True)]
    for blocks, formats in zip(plan.blocks, form.runs, strict=True):
        found.append(((rows, blocks), torch.int32))
        if not form.ordered:
            found.append(((rows, blocks * formats[0].page_size), torch.int32))
        for side, fmt, dim in zip(SIDES, formats, dims, strict=True):
            found += [((rows * blocks, *shape), kind or own) for shape, kind in fmt.shapes(side, heads, dim).values()]
    found += [((2, rows), torch.int32), ((rows,), torch.int32)]
    found += [((rows * plan.due(side, MAX_STEP),), torch.int32) for side in (0, 1)]
    found.append(((1,), torch.int32))
    summed = (rows, heads, plan.key_dim) if plan.query == "sum" else (0, heads, plan.key_dim)
    found += [(summed, torch.float64), ((heads, summed[0]), torch.int32), (summed, torch.float32)]
    kept = plan.rows // plan.fold if plan.query == "keep" else 0
    found.append(((kept, plan.query_heads, 1, plan.key_dim), own))
    return found


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=512)
def buffer_bytes(plan: StepPlan) -> int:
    """Size of a plan's buffer."""
    return sum(_size(*each) for each in _shapes(plan))


# What layers have carved, for steps that are given the buffer alone.
_STATES: weakref.WeakValueDictionary[tuple[int, str], StepState] = weakref.WeakValueDictionary()


def carve(buffer: Tensor, plan: StepPlan) -> StepState:
    """The tensors of a buffer.

    Args:
        buffer: u8 (buffer_bytes(plan),).
        plan: what it holds.

    Returns:
        Views that keep the storage alive, though not ``buffer`` itself.
    """
    key = (buffer.data_ptr(), plan.spec)
    known = _STATES.get(key)
    if known is not None and known.counters.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        return known
    storage, at = buffer.untyped_storage(), buffer.storage_offset()
    views: list[Tensor] = []
    for shape, dtype in _shapes(plan):
        # fp8 views are made of bytes: not every PyTorch builds them of a storage.
        plain = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        stride = torch.empty(shape, device="meta").stride()
        view = torch.empty(0, dtype=plain, device=buffer.device)
        view.set_(storage, at // plain.itemsize, shape, stride)  # type: ignore[call-overload]
        views.append(view.view(dtype))
        at += _size(shape, dtype)
    form = plan.format
    counters, windows, rest = views[0], views[1:5], views[5:]
    runs = []
    for keys, values in form.runs:
        table, pos, rest = rest[0], None, rest[1:]
        if not form.ordered:
            pos, rest = rest[0], rest[1:]
        split = len(keys.names)
        end = split + len(values.names)
        runs.append(RunView(table, pos, rest[:split], rest[split:end]))
        rest = rest[end:]
    new, sealed, index_keys, index_values, flag, sums, counts, weight, query = rest
    state = StepState(
        counters, windows, runs, new, sealed, (index_keys, index_values), flag, sums, counts, weight, query
    )
    _STATES[key] = state
    return state


def settle(state: StepState) -> None:
    """Counts what the last step has sealed, as the next one would; without asking the device."""
    state.counters[-2:] += state.new
    if state.sums.numel():
        sealed = state.new[0] > 0
        state.sums.masked_fill_(sealed[:, None, None], 0.0)
        state.counts.masked_fill_(sealed, 0)
    state.new.zero_()


@torch.library.custom_op("hfkvq::seen", mutates_args=())
def _seen(buffer: Tensor, rows: int) -> Tensor:
    # The buffer begins with the counters.
    counters = buffer[: 4 * 2 * rows].view(torch.int32)
    start, length = (counters[at * rows : at * rows + 1] for at in (START, LENGTH))
    return (start + length).long()


@_seen.register_fake
def _(buffer: Tensor, rows: int) -> Tensor:
    return buffer.new_empty((1,), dtype=torch.long)


def seen(buffer: Tensor, rows: int) -> Tensor:
    """Logical tokens that a layer has seen, on the device: i64 (1,).

    An operation, though it but reads: inductor does not know that a view in another dtype shares memory, and would read
    it again after a step has written there.

    Args:
        buffer: u8, the layer's buffer, which begins with the counters (see `carve`).
        rows: B, its rows.
    """
    return _seen(buffer, rows)


# Beginning a step.


@define("advance", mutates=("counters", "windows", "scratch"))
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
        target = (rest - local[at]).clamp(min=0) // unit[at] * unit[at]
        due.append((target - total).clamp(min=0))
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
    before = [x.clone() for x in (counters[LENGTH], *windows)]
    reference("append")(keys, values, counters, windows, rotate_keys, rotate_values)
    for x, old in zip((counters[LENGTH], *windows), before, strict=True):
        x.copy_(torch.where(fits.view(-1, *(1,) * (x.dim() - 1)), x, old))
    for at in (0, 1):
        new[at] = due[at] * fits


@_advance.register_fake
def _(
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
) -> None:
    return None


triton_slot("advance", "step:advance_triton")


def advance(keys: Tensor, values: Tensor, state: StepState, plan: StepPlan) -> None:
    """Begins a step: counts what the last one sealed, appends, and works out what this one will seal.

    A row that has no room for its tokens is left as it is, and ``state.flag`` set.

    Args:
        keys: (B, H, t, Dk), after RoPE, not rotated; t <= 16.
        values: (B, H, t, Dv).
        state: the layer's tensors; ``new`` and ``index`` say afterwards what is due: the first ``new[side, b]`` slots
            of row b of ``index``.
        plan: what they hold.
    """
    form, tokens = plan.format, keys.shape[2]
    index = state.due_slots(plan, tokens)
    scratch = [state.new, state.sealed, *index, state.flag]
    last = state.runs[-1]
    if last.pos is not None:
        scratch.append(last.pos)
    call(
        _advance,
        keys,
        keys,
        values,
        state.counters,
        state.windows,
        scratch,
        plan.capacity,
        plan.blocks[-1] * form.runs[-1][0].page_size,
        list(plan.local),
        list(plan.unit),
        form.rotate_keys,
        form.rotate_values,
    )


@define("observe", mutates=("sums", "counts", "weight"))
def _observe(q: Tensor, sealed: Tensor | None, sums: Tensor, counts: Tensor, weight: Tensor | None) -> None:
    heads = sums.shape[1]
    total = q.abs().double().sum(2).unflatten(1, (heads, -1)).mean(2)
    again = torch.zeros_like(counts[0]) > 0 if sealed is None else sealed > 0
    sums.copy_(sums.masked_fill(again[:, None, None], 0.0) + total)
    counts.copy_(counts.masked_fill(again, 0) + q.shape[2])
    if weight is not None:
        weight.copy_((sums / counts.T[:, :, None]).float())


@_observe.register_fake
def _(q: Tensor, sealed: Tensor | None, sums: Tensor, counts: Tensor, weight: Tensor | None) -> None:
    return None


triton_slot("observe", "step:observe_triton")


def observe(
    q: Tensor, sums: Tensor, counts: Tensor, sealed: Tensor | None = None, weight: Tensor | None = None
) -> None:
    """Adds magnitudes of queries to their sums, which begin anew where something was sealed.

    Args:
        q: (B, Hq, t, D), t <= 16.
        sums: f64 (B, H, D), written in place: means over the query heads of a KV head.
        counts: i32 (H, B), queries in ``sums``, likewise.
        sealed: i32 (B,), tokens of keys that the step before has sealed; None for nothing.
        weight: f32 (B, H, D), written: the mean of the queries in ``sums``; None if it is not asked for.
    """
    call(_observe, q, q, sealed, sums, counts, weight)


def seal_due(state: StepState, plan: StepPlan, tokens: int, sides: Sequence[int] = (0, 1)) -> None:
    """Seals, into the last run, what `advance` found due: keys (0), values (1) or both."""
    run, formats, index = state.runs[-1], plan.format.runs[-1], state.due_slots(plan, tokens)
    for at in sides:
        side, fmt = SIDES[at], formats[at]
        parts, source = (run.keys, run.values)[at], state.windows[2 + at]
        new = state.due_now[at]
        norm = None
        if fmt.normed:
            norm = page_norms(source, index[at], fmt.axis, fmt.page_size, plan.balance[at], new)
        rule = plan.rule if fmt.raised and plan.rule else None
        weight = state.weight if rule and plan.query == "sum" else None
        seal(parts, run.table, state.last_counts[at], new, source, index[at], None, fmt, side, rule, weight, norm)


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside(x: Tensor, branches: int) -> Iterator[list[contextlib.AbstractContextManager[object]]]:
    """Contexts whose kernels become branches of their own in the CUDA graph that is being recorded, if one is.

    Branches begin with what has been launched before and end with this context. Where nothing is recorded their kernels
    go to the same stream: to change streams costs more than they take.
    """
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        yield [contextlib.nullcontext()] * branches
        return
    main = torch.cuda.current_stream(x.device)
    sides = [_side_stream(x.device, number) for number in range(branches)]
    for side in sides:
        side.wait_stream(main)
    yield [torch.cuda.stream(side) for side in sides]
    for side in sides:
        main.wait_stream(side)


def run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    state: StepState,
    plan: StepPlan,
    scaling: float,
    softcap: float,
    due: bool = True,
) -> Tensor:
    """A whole step of one layer; see `step`. ``due`` is False where the host knows that nothing will be sealed."""
    whole, fold = q, plan.fold
    if fold > 1:
        q, k, v = (x.reshape(x.shape[0] * fold, x.shape[1] // fold, *x.shape[2:]) for x in (q, k, v))
        if mask is not None and (mask.shape[0] > 1 or mask.shape[1] > 1):
            if mask.shape[1] > 1:
                mask = mask.expand(whole.shape[0], -1, -1, -1)
                mask = mask.reshape(mask.shape[0] * fold, mask.shape[1] // fold, *mask.shape[2:])
            else:
                mask = mask.repeat_interleave(fold, 0)
    advance(k, v, state, plan)
    # Attention is as long as two kernels that find nothing to do. More than two in a row would be waited for.
    long = due and (plan.query == "sum" or any(fmt.normed for fmt in plan.format.runs[-1]))
    with _beside(q, 2 if long else 1) as beside:
        # Pages that are sealed now are no part of what is attended to, so both can run at the same time.
        with beside[0]:
            if plan.query == "sum":
                observe(q, state.sums, state.counts, state.sealed, state.weight)
            elif plan.query == "keep":
                state.query.copy_(whole[:, :, -1:])
            if due:
                seal_due(state, plan, k.shape[2], (0,))
        # Values ask for no queries.
        with beside[-1]:
            if due:
                seal_due(state, plan, k.shape[2], (1,))
        out = decode_attention(
            q, state.counters, state.windows, state.flat_runs(), mask, sinks, scaling, softcap, plan.format, early=True
        )
    return out.reshape(*whole.shape[:3], out.shape[-1])


@torch.library.custom_op("hfkvq::step", mutates_args=("buffer",))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    buffer: Tensor,
    scaling: float,
    softcap: float,
    plan: str,
) -> Tensor:
    own = StepPlan.parse(plan)
    return run_step(q, k, v, mask, sinks, carve(buffer, own), own, scaling, softcap)


@_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    buffer: Tensor,
    scaling: float,
    softcap: float,
    plan: str,
) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[-1]))


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    buffer: Tensor,
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
        scaling: factor on the logits.
        softcap: see `decode_attention`.
        plan: `StepPlan.spec` of the buffer.

    Returns:
        (B, Hq, t, Dv). Where a row had no room for its tokens (``StepState.flag``), they are missing.
    """
    return _step(q, k, v, mask, sinks, buffer, scaling, softcap, plan)
