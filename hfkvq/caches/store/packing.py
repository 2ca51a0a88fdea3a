"""A state for a file: its numbers, and its tensors without pages that hold nothing.

What no token stands in is written as zeros: memory may hold anything there, tokens that were taken back or data of
others, which belongs in no file; and two files of one state are then equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, RUNS
from hfkvq.kernels.pages import PageFormat, RunView, Side, StoreFormat

from ..base import outside_inference_mode
from .routing import read_counters
from .row_lengths import RowState
from .state import SIDES, StoreState, as_bytes, token_axis

Packed = tuple[dict[str, Any], dict[str, Tensor]]
"""Plain data, and tensors by name."""


def packed(state: StoreState) -> Packed:
    """Numbers and tensors; the pages of a row lie one behind the other. Asks the device once a run."""
    counters, form = read_counters(state.counters), state.format
    tensors = {"counters": state.counters, "dropped": state.dropped}
    tensors |= {f"window{i}": _held(state, i, counters) for i in range(len(state.windows))}
    for r, (view, formats) in enumerate(zip(state.runs, form.runs, strict=True)):
        page, counts = formats[0].page_size, counters[RUNS + 2 * r : RUNS + 2 * r + 2]
        blocks = -(-max(map(max, counts)) // page)
        pages = view.table[:, : form.pages(blocks)].reshape(-1).long()
        if view.pos is not None:
            held = (
                torch.arange(blocks * page, device="cpu")
                < torch.tensor(counts[0], dtype=torch.int64, device="cpu")[:, None]
            )
            tensors[f"run{r}.pos"] = view.pos[:, : blocks * page].masked_fill(~held.to(view.pos.device), 0)
        for side, fmt, parts, count in zip(SIDES, formats, (view.keys, view.values), counts, strict=True):
            open_pages = [
                (at, filled) for at, filled in enumerate(_filled(form, count, blocks)) if filled < fmt.page_size
            ]
            for name, part in zip(fmt.names, parts, strict=True):
                made = as_bytes(part)[pages]
                _clear(made, name, fmt, side, open_pages)
                tensors[f"run{r}.{side}.{name}"] = made
    numbers = {
        "rows": [list(row) for row in sorted(state.states)],
        "wide_bound": list(state.wide_bound),
        "settled": state.settled,
    }
    return numbers, tensors


def _filled(form: StoreFormat, counts: Sequence[int], blocks: int) -> list[int]:
    """Tokens in each page of rows that have sealed so many of a side, a row behind the other."""
    page, pages, found = form.runs[0][0].page_size, form.pages(blocks), []
    for count in counts:
        last = -(-count // page) - 1
        # In a ring, a page has the newest block that came to it.
        block = [last - (last - at) % pages if form.ring else at for at in range(pages)]
        found += [min(max(count - at * page, 0), page) if at >= 0 else 0 for at in block]
    return found


def _clear(part: Tensor, name: str, fmt: PageFormat, side: Side, pages: Sequence[tuple[int, int]]) -> None:
    """Zeros in the slots of pages (their numbers, and how many slots are filled) behind the last token."""
    if not pages:
        return
    at, filled = torch.tensor(pages, dtype=torch.int64, device="cpu").T.to(part.device)
    if fmt.whole:
        # Whole pages or none are sealed.
        part[at[filled == 0]] = 0
        return
    dim = token_axis(name, fmt, side)
    free = torch.arange(part.shape[dim], device=part.device) >= filled[:, None]
    part[at] = part[at].masked_fill(free[:, None, :, None] if dim == 2 else free[:, None, None, :], 0)


def _held(state: StoreState, i: int, counters: Sequence[Sequence[int]]) -> Tensor:
    """A window, with zeros in slots that no token waits in."""
    window, lengths = state.windows[i], torch.tensor(counters[LENGTH], dtype=torch.int64, device="cpu")[:, None]
    slots, sink = torch.arange(window.shape[2], device="cpu"), state.format.sink
    if i < 2:
        held = slots < lengths
    else:
        sealed = torch.tensor(counters[RUNS + i % 2 :: 2], dtype=torch.int64, device="cpu").sum(0)[:, None]
        waiting, room = (lengths - sink - sealed).clamp(min=0), max(window.shape[2], 1)
        held = (slots - sealed) % room < waiting
    return window.masked_fill(~held.to(window.device)[:, None, :, None], 0)


@outside_inference_mode
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

    runs, counters = [], take("counters", tuple(empty.counters.shape), torch.int32)
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
            # Rows are counted as `packed` does: states may be of rows that were left out since.
            blocks = -(-int(counters[RUNS + 2 * r : RUNS + 2 * r + 2].max()) // formats[0].page_size)
            if count != empty.batch * empty.format.pages(blocks):
                raise ValueError(f"run{r} has {count} pages, and its rows fill {blocks} blocks each")
        slots = (empty.batch, blocks * formats[0].page_size)
        pos = None if empty.format.ordered else take(f"run{r}.pos", slots, torch.int32)
        runs.append(RunView(empty.own_table(blocks), pos, *sides))
    windows = [
        take(f"window{i}", (*window.shape[:2], window.shape[2] if i < 2 else -1, window.shape[3]), empty.dtype)
        for i, window in enumerate(empty.windows)
    ]
    first, second = map(int, numbers["wide_bound"])
    return empty.replace(
        counters=counters,
        dropped=take("dropped", tuple(empty.dropped.shape), torch.int32),
        windows=windows,
        runs=runs,
        states=frozenset(RowState(*map(int, row)) for row in numbers["rows"]),
        history=None,
        wide_bound=(first, second),
        settled=int(numbers["settled"]),
    )
