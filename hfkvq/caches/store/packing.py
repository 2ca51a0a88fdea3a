"""A state for a file: its numbers, and its tensors without pages that hold nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.decode import RUNS
from hfkvq.kernels.pages import RunView

from ..lasting import lasting
from ..routing import read_counters
from ..row_states import RowState
from .pool import as_bytes
from .state import SIDES, StoreState, own_table

Packed = tuple[dict[str, Any], dict[str, Tensor]]
"""Plain data, and tensors by name."""


def packed(state: StoreState) -> Packed:
    """Numbers and tensors; the pages of a row lie one behind the other. Asks the device once a run."""
    counters = read_counters(state.counters)
    tensors = {"counters": state.counters, "dropped": state.dropped}
    tensors |= {f"window{i}": window for i, window in enumerate(state.windows)}
    for r, (view, formats) in enumerate(zip(state.runs, state.format.runs, strict=True)):
        page = formats[0].page_size
        blocks = -(-max(map(max, counters[RUNS + 2 * r : RUNS + 2 * r + 2])) // page)
        pages = view.table[:, : state.format.pages(blocks)].reshape(-1).long()
        if view.pos is not None:
            tensors[f"run{r}.pos"] = view.pos[:, : blocks * page]
        for side, fmt, parts in zip(SIDES, formats, (view.keys, view.values), strict=True):
            named = zip(fmt.names, parts, strict=True)
            tensors |= {f"run{r}.{side}.{name}": as_bytes(part)[pages] for name, part in named}
    numbers = {
        "rows": [list(row) for row in sorted(state.states)],
        "wide_bound": list(state.wide_bound),
        "settled": state.settled,
    }
    return numbers, tensors


@lasting
def unpacked(empty: StoreState, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StoreState:
    """The state that was packed, on the device of an empty one of the same layout, rows and dtype.

    It takes the tensors over, where they are on that device.

    Raises:
        ValueError: tensors are missing, or have other shapes than the layout's.
    """

    def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor; -1 in the shape is any length."""
        found = tensors.get(name)
        fits = found is not None and found.dtype == dtype and found.dim() == len(shape)
        if found is None or not fits or any(b not in (a, -1) for a, b in zip(found.shape, shape, strict=True)):
            got = "is missing" if found is None else f"is {found.dtype} of {tuple(found.shape)}"
            raise ValueError(f"{name} {got}, and must be {dtype} of {shape}")
        return found.to(empty.device)

    runs = []
    for r, formats in enumerate(empty.format.runs):
        sides, count = [], -1
        for side, fmt in zip(SIDES, formats, strict=True):
            parts = []
            for name, (shape, own) in fmt.shapes(side, empty.heads, empty.dims[side]).items():
                kind = own or empty.dtype
                stored = torch.uint8 if kind == torch.float8_e4m3fn else kind
                part = take(f"run{r}.{side}.{name}", (count, *shape), stored)
                count = part.shape[0]
                parts.append(part.view(kind))
            sides.append(parts)
        if count % empty.batch:
            raise ValueError(f"run{r} has {count} pages for {empty.batch} rows")
        blocks = count // empty.batch
        if empty.format.ring:
            blocks = -(-max(max(map(int, row[1:])) for row in numbers["rows"]) // formats[0].page_size)
            if count != empty.batch * empty.format.pages(blocks):
                raise ValueError(f"run{r} has {count} pages, and its rows fill {blocks} blocks each")
        table = own_table(empty.format, empty.batch, blocks, empty.device)
        slots = (empty.batch, blocks * formats[0].page_size)
        pos = None if empty.format.ordered else take(f"run{r}.pos", slots, torch.int32)
        runs.append(RunView(table, pos, *sides))
    windows = [
        take(f"window{i}", (*window.shape[:2], window.shape[2] if i < 2 else -1, window.shape[3]), empty.dtype)
        for i, window in enumerate(empty.windows)
    ]
    first, second = map(int, numbers["wide_bound"])
    return empty.replace(
        counters=take("counters", tuple(empty.counters.shape), torch.int32),
        dropped=take("dropped", tuple(empty.dropped.shape), torch.int32),
        windows=windows,
        runs=runs,
        states=frozenset(RowState(*map(int, row)) for row in numbers["rows"]),
        host_counters=None,
        wide_bound=(first, second),
        settled=int(numbers["settled"]),
    )
