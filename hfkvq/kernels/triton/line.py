"""Launches of `hfkvq.kernels.line`, one after the other, with one look at their tensors.

Nothing is remembered but launches of known shape: where tensors lie is asked anew each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from ..pages import RunView, StoreFormat
from .append import append_launch, new_tokens
from .configs import edition
from .decode import Plan, decode_plan, table_places
from .due import due_launch
from .launch import Launch, is_watched
from .seal import seal_launch


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch.cuda.current_device()


class _Sums(NamedTuple):
    """Where the sums of splits lie in one tensor: elements in all, and bytes before the tops and the weights."""

    elements: int
    tops: int
    totals: int


@lru_cache(maxsize=1024)
def _sums(part: tuple[int, ...]) -> _Sums:
    # Each begins at a multiple of sixteen bytes.
    count = -(-part[0] * part[1] * part[2] // 4) * 4
    return _Sums(count * part[3] + 2 * count, 4 * count * part[3], 4 * count * (part[3] + 1))


def append_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    scaling: float,
    softcap: float,
    store: StoreFormat,
) -> Tensor | None:
    """See `hfkvq.kernels.line.append_attend`; None where the operations have to go one by one, and nothing is done."""
    device = q.device
    if not _is_current(device):
        return None
    new = new_tokens(keys, values, windows)
    blocks = tuple([runs[at].shape[1] for at in table_places(store.spec)])
    plan: Plan | None = decode_plan(
        store.spec,
        q.shape,
        q.stride(),
        q.dtype,
        (windows[0].shape[1], windows[1].shape[3], new.key_tail, new.value_tail, new.held),
        blocks,
        scaling,
        softcap,
        device,
        edition(),
    )
    if plan is None:
        return None
    held = [x.data_ptr() for x in (counters, *windows, *runs)]
    add = append_launch(new, store.rotate_keys, store.rotate_values)
    added = [keys.data_ptr(), values.data_ptr(), *held[1:5], held[0]]
    sums = _sums(plan.part)
    part = torch.empty(sums.elements, dtype=torch.float32, device=device)
    out = torch.empty(plan.out, dtype=plan.dtype, device=device)
    at = part.data_ptr()
    parts = [at, at + sums.tops, at + sums.totals]
    asked = [q.data_ptr(), *held, *parts]
    merged = [*parts, out.data_ptr()]
    attend, merge = plan.launches[0], plan.merge
    ready = add.ready(added), attend.ready(asked), merge.ready(merged)
    if None in ready:
        return None
    stream, watched = driver.active.get_current_stream(device.index), is_watched()
    add.run(ready[0], added, stream, watched)
    attend.run(ready[1], asked, stream, watched)
    merge.run(ready[2], merged, stream, watched)
    return out


@lru_cache(maxsize=1024)
def _seals(
    store: str,
    rule: str | None,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: int,
    local: tuple[int, int],
    unit: tuple[int, int],
    most: tuple[int, int],
) -> tuple[Launch, tuple[Launch | None, ...]] | None:
    """The launch that counts, and those that seal keys and values; None where a side has no kernel."""
    form, tails = StoreFormat.parse(store), (shapes[0][2], shapes[1][2])
    count = due_launch(shapes[0][0], form.sink, tails, local, unit, most, device)
    sides: list[Launch | None] = []
    for at, side in enumerate(("keys", "values")):
        fmt = form.runs[0][at]
        made = None
        if most[at]:
            own = rule if fmt.raised and rule else ""
            made = seal_launch(fmt, side, shapes[at], strides[at], dtype, device, blocks, most[at], own)
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
    """See `hfkvq.kernels.line.seal_tail`; False where the operations have to go one by one, and nothing is done."""
    device, tails = counters.device, windows[2:]
    if not _is_current(device):
        return False
    made = _seals(
        store.spec,
        rule,
        (tails[0].shape, tails[1].shape),
        (tails[0].stride(), tails[1].stride()),
        tails[0].dtype,
        device,
        run.table.shape[1],
        local,
        unit,
        most,
    )
    if made is None:
        return False
    count, sides = made
    batch = counters.shape[1]
    found = torch.empty(4 * batch + batch * sum(most), dtype=torch.int32, device=device)
    at = found.data_ptr()
    table = run.table.data_ptr()
    counted = [counters.data_ptr(), at]
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
