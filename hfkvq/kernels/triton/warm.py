"""What a layer will launch: the variants that its launchers would choose, longest to compile first."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..pages import PageFormat
from ..step import SIDES, StepPlan
from . import ahead
from .ahead import Wanted
from .append import NewTokens, append_launch
from .decode import decode_wanted
from .due import due_launch
from .hadamard import hadamard_wanted
from .moments import moments_wanted
from .norms import norms_wanted
from .qk import qk_wanted
from .seal import seal_wanted
from .step import advance_launch, observe_launch

I32 = torch.int32

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}

WINDOW = 32
"""Queries at the end of a prompt that schemes with a budget judge its tokens by; more or fewer are another variant."""


def begin(plan: StepPlan, query_heads: int, device: torch.device, rule: str | None) -> None:
    """See `hfkvq.kernels.warm.start`."""
    ahead.compile_beside(lambda: wanted(plan, query_heads, device, rule), device)


def wanted(plan: StepPlan, query_heads: int, device: torch.device, rule: str | None) -> list[Wanted]:
    """All that prompts and steps of one token launch for a layer; see `hfkvq.kernels.warm.start`."""
    dtype = DTYPES.get(plan.dtype)
    if dtype is None:
        # Kernels leave f64 to the reference.
        return []
    own = query_heads // plan.fold
    # In the order of what they take: decode attention is most of it.
    found = list(decode_wanted(plan.format, plan.heads, own, plan.key_dim, plan.value_dim, dtype, device))
    found += _seals(plan, dtype, device, rule)
    found += _rest(plan, own, dtype, device)
    return found


def _seals(plan: StepPlan, dtype: torch.dtype, device: torch.device, rule: str | None) -> Iterator[Wanted]:
    """Prompts seal what came, or what has been rotated, and steps seal tails."""
    dims, form = (plan.key_dim, plan.value_dim), plan.format
    for i, formats in enumerate(form.runs):
        for at, (side, fmt) in enumerate(zip(SIDES, formats, strict=True)):
            shape = (plan.rows, plan.heads, dims[at])
            # Strides are multiples of the head dim whatever the length, and nothing else is asked of them.
            stride = (plan.heads * 64 * dims[at], 64 * dims[at], dims[at], 1)
            whole = -(-4 * fmt.page_size // plan.unit[at]) * plan.unit[at]
            ruled = rule if fmt.raised else None
            weighed = ruled is not None and plan.query == "sum"
            yield from seal_wanted(fmt, side, shape, stride, dtype, device, whole, ruled, weighed)
            if i == len(form.runs) - 1 and plan.query != "keep":
                ruled = plan.rule if fmt.raised and plan.rule else None
                weighed = ruled is not None and plan.query == "sum"
                due = plan.due(at, 1)
                yield from seal_wanted(fmt, side, shape, stride, dtype, device, due, ruled, weighed)


def _rest(plan: StepPlan, query_heads: int, dtype: torch.dtype, device: torch.device) -> Iterator[Wanted]:
    form, runs = plan.format, len(plan.format.runs)
    positions = None if form.ordered else 1
    for fmt, dim, rounds in _normed(plan):
        yield from norms_wanted(fmt, plan.heads, dim, rounds, dtype)
    yield advance_launch(
        _new_tokens(plan, dtype, device),
        runs,
        plan.capacity,
        1,
        positions,
        plan.local,
        plan.unit,
        (plan.due(0, 1), plan.due(1, 1)),
        form.rotate_keys,
        form.rotate_values,
    ).wanted([dtype] * 6 + [I32] * (6 if form.ordered else 7))
    if plan.query == "sum":
        shape, stride = (plan.rows, query_heads, 1, plan.key_dim), _step_stride(query_heads, plan.key_dim)
        observe = observe_launch(shape, stride, dtype, device, plan.heads, True, True)
        yield observe.wanted([dtype, torch.float64, I32, I32, torch.float32])
    if plan.query == "keep":
        for queries in (1, WINDOW):
            for fmt, _ in form.runs:
                yield from qk_wanted(fmt, plan.heads, plan.key_dim, dtype, query_heads * queries)
            yield from moments_wanted(queries)
        # Their steps are the host's, unless they are recorded.
        append = append_launch(_new_tokens(plan, dtype, device), form.rotate_keys, form.rotate_values)
        yield append.wanted([dtype] * 6 + [I32])
    yield due_launch(plan.rows, form.sink, plan.tails, plan.local, plan.unit, (0, 0), device, runs).wanted([I32] * 2)
    for block in {form.rotate_keys, form.rotate_values} - {0}:
        yield hadamard_wanted(dtype, block)


def _normed(plan: StepPlan) -> list[tuple[PageFormat, int, int]]:
    dims = (plan.key_dim, plan.value_dim)
    formats = plan.format.runs[-1]
    return [(f, d, b) for f, d, b in zip(formats, dims, plan.balance, strict=True) if f.normed]


def _step_stride(heads: int, dim: int) -> tuple[int, ...]:
    """As models make keys, values and queries of one token."""
    return heads * dim, dim, heads * dim, 1


def _new_tokens(plan: StepPlan, dtype: torch.dtype, device: torch.device) -> NewTokens:
    shapes = [(plan.rows, plan.heads, 1, dim) for dim in (plan.key_dim, plan.value_dim)]
    strides = [_step_stride(plan.heads, dim) for dim in (plan.key_dim, plan.value_dim)]
    return NewTokens(
        shapes[0], strides[0], shapes[1], strides[1], (dtype, dtype), dtype, plan.format.sink, *plan.tails, device
    )
