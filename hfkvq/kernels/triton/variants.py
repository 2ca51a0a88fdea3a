"""Variants of kernels that a layer launches: those that its launchers would choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..norms import Balance
from ..pages import SIDES, StoreFormat
from ..step import StepPlan
from ..windows import Sealing
from .append import NewTokens, append_launch
from .claim import claim_wanted
from .compile import GPUS, Wanted, compile_all, leave_gpu_alone
from .decode import decode_wanted
from .fused import fused_wanted
from .gather import requests_wanted, run_wanted
from .hadamard import hadamard_wanted
from .latent import latent_wanted
from .norms import norms_wanted
from .place import place_wanted
from .query_sums import page_weights_wanted
from .restore import restore_wanted
from .seal import seal_wanted
from .smooth import smooth_wanted
from .step import advance_launch, observe_launch
from .tiles import INTERPRETED

I32 = torch.int32

__all__ = ["GPUS", "INTERPRETED", "compile_all", "fused_wanted", "leave_gpu_alone", "prompts_wanted", "wanted"]

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def prompts_wanted(
    form: StoreFormat, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, rule: str, sums: bool,
    balances: Sequence[Balance], slots: int,
) -> Iterator[Wanted]:  # fmt: skip
    """All that prompts launch whose pages are an engine's blocks; see `hfkvq.kernels.compile.compile_prompts`."""
    query_heads, heads, dim = sizes
    for side, fmt, balance in zip(SIDES, form.runs[0], balances, strict=True):
        ruled = rule if fmt.raised and rule else None
        # Every row of a call looks at the same tokens.
        given = (1, heads, dim), (0, dim, heads * dim, 1), dtype, device, fmt.page_size, ruled
        yield from seal_wanted(fmt, side, *given, sums and ruled is not None)
        yield from norms_wanted(fmt, heads, dim, balance, dtype)
    for rotate in {form.rotate_keys, form.rotate_values} - {0}:
        yield hadamard_wanted(dtype, rotate)
    yield requests_wanted(form, heads, dim, dtype, device, windowed=form.sink > 0)
    if form.sink:
        yield place_wanted(heads, form.sink, dim, dtype, device)
        yield restore_wanted(form, heads, dim, dtype, device)
        yield from claim_wanted(slots, form.sink, device)
    if sums:
        yield page_weights_wanted(query_heads, heads, dim, form.sink, dtype, device)


def wanted(
    plan: StepPlan, query_heads: int, rule: str | None, steps: Sequence[int], device: torch.device,
    smooths: bool = False, slots: bool = False, moves: bool = False,
) -> list[Wanted]:  # fmt: skip
    """All that prompts launch for a layer, and steps of so many tokens; see `hfkvq.kernels.compile`."""
    dtype = DTYPES.get(plan.dtype)
    if dtype is None:
        # Kernels leave f64 to the reference.
        return []
    own = query_heads // plan.fold
    found = []
    for queries in steps:
        if plan.format.latent:
            found += latent_wanted(plan.format, own, plan.key_dim, plan.value_dim, dtype, device, queries)
        else:
            dims = plan.heads, own, plan.key_dim, plan.value_dim
            found += decode_wanted(plan.format, *dims, dtype, device, queries, slots)
    found += _seals(plan, dtype, device, rule)
    found += _rest(plan, own, steps, dtype, device, slots)
    if smooths:
        found += smooth_wanted(query_heads, plan.heads * plan.fold, plan.key_dim, dtype, device)
    if moves:
        for side, fmt, dim in zip(SIDES, plan.format.runs[0], (plan.key_dim, plan.value_dim), strict=True):
            found += [run_wanted(fmt, side, plan.heads, dim, dtype, device, True)] if fmt.bits < 16 else []
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
            weighed = ruled is not None and plan.sums_queries
            yield from seal_wanted(fmt, side, shape, stride, dtype, device, whole, ruled, weighed)
            if i == len(form.runs) - 1 and plan.query != "keep":
                ruled = plan.rule if fmt.raised and plan.rule else None
                weighed = ruled is not None and plan.sums_queries
                due = plan.due(at, 1)
                yield from seal_wanted(fmt, side, shape, stride, dtype, device, due, ruled, weighed)


def _rest(
    plan: StepPlan, query_heads: int, steps: Sequence[int], dtype: torch.dtype, device: torch.device, slots: bool
) -> Iterator[Wanted]:
    form, runs = plan.format, len(plan.format.runs)
    positions = None if form.ordered else 1
    for fmt, dim, balance in zip(form.runs[-1], (plan.key_dim, plan.value_dim), plan.balance, strict=True):
        yield from norms_wanted(fmt, plan.heads, dim, balance, dtype)
    rotate = form.rotate_keys, form.rotate_values
    for tokens in steps:
        new = _new_tokens(plan, tokens, device)
        if slots:
            yield append_launch(new, *rotate, mapped=True).wanted([dtype] * 6 + [I32] * 2)
            continue
        sealing = Sealing(plan.local, plan.unit, (plan.due(0, tokens), plan.due(1, tokens)))
        advance = advance_launch(new, runs, plan.capacity, 1, positions, sealing, *rotate)
        yield advance.wanted([dtype] * 6 + [I32] * (6 if form.ordered else 7))
    if plan.sums_queries:
        shape, stride = (plan.rows, query_heads, 1, plan.key_dim), _step_stride(query_heads, plan.key_dim)
        # A slot's sums begin anew with its next request.
        anew = plan.query != "total" or slots
        observe = observe_launch(shape, stride, device, plan.heads, anew, True, int(slots))
        yield observe.wanted([dtype, torch.float64, I32, *[I32] * anew, torch.float32, *[I32] * slots])
        # Steps that go one operation after the other.
        plain = observe_launch(shape, stride, device, plan.heads, False, False)
        yield plain.wanted([dtype, torch.float64, I32])
    if plan.query == "keep":
        for fmt, _ in form.runs:
            yield run_wanted(fmt, "keys", plan.heads, plan.key_dim, dtype, device, False)
        # Their steps are the host's, unless they are recorded.
        for tokens in steps:
            yield append_launch(_new_tokens(plan, tokens, device), *rotate).wanted([dtype] * 6 + [I32])
    for block in {form.rotate_keys, form.rotate_values} - {0}:
        yield hadamard_wanted(dtype, block)


def _step_stride(heads: int, dim: int, tokens: int = 1) -> tuple[int, ...]:
    """Keys, values and queries as models make them, of so many tokens."""
    return tokens * heads * dim, dim, heads * dim, 1


def _new_tokens(plan: StepPlan, tokens: int, device: torch.device) -> NewTokens:
    shapes = [(plan.rows, plan.heads, tokens, dim) for dim in (plan.key_dim, plan.value_dim)]
    strides = [_step_stride(plan.heads, dim, tokens) for dim in (plan.key_dim, plan.value_dim)]
    return NewTokens(shapes[0], strides[0], shapes[1], strides[1], plan.format.sink, *plan.tails, device)
