"""Routing: tokens that leave the tail go to the run of pages of their width, worked out once for all layers.

A layout with several runs has pages of 2 bits, say, beside pages of 4, and a scheme gives each token one of these
widths. Where widths follow from tags and positions alone, layers whose counters are equal send the same tokens the same
way, so they share a `Route`. Counters are on the device, and to ask for them in every layer would stall both sides; so
a store knows its ``history``: stores of equal layouts, histories and row states have equal counters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, RUNS, START, run_count, sealed_count
from hfkvq.kernels.windows import tokens_due_by_row

from ..schemes.base import UNTAGGED, Layout, Scheme
from .row_lengths import RowState


def read_counters(counters: Tensor) -> tuple[tuple[int, ...], ...]:
    """Counters (n, B) as numbers; waits for the device."""
    return tuple(tuple(row) for row in counters.tolist())


@lru_cache(maxsize=64)
def followed(known: object, states: frozenset[RowState]) -> object:
    """History of stores of which all this was known before steps or seals into the last run, and these states after."""
    return None if known is None else object()


class SealSource(NamedTuple):
    """Source of a seal's keys, or values: the tail, new tokens, or the tail with new tokens behind it.

    Attributes:
        tensor: (B, H, L, D).
        ring: slots of the tail, a ring buffer, which come first in the tensor; 0 for none.
        tokens: new tokens, which come behind them, the last one of each row last.
        first: column of the oldest token that is not sealed, with its successors behind it: a number for all rows, or
            i32 (B, 1). None where the tail comes first, or the host does not know.
    """

    tensor: Tensor
    ring: int
    tokens: int = 0
    first: int | Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """All that tells where tokens stand, beside the counters."""
        return self.ring, self.tokens, self.tensor.shape[2]

    def columns(self, behind: Tensor, length: Tensor, sink: int) -> Tensor:
        """Columns of tokens ``behind`` the sink (i32 (B, m)) in rows of these lengths (i32 (B,))."""
        if not self.tokens:
            return behind % self.ring
        new = behind + (sink + self.tokens - length)[:, None]
        column = new if not self.ring else torch.where(new >= 0, new + self.ring, behind % self.ring)
        return column.clamp(0, self.tensor.shape[2] - 1)

    def oldest(self, count: Tensor, span: int, length: Tensor, sink: int) -> Tensor:
        """i32 (B, span): where the oldest tokens stand of which none is sealed, ``count`` (i32 (B,)) of them are."""
        if self.first is not None:
            index = self.first + torch.arange(span, dtype=torch.int32, device=count.device)
            return index.clamp(max=self.tensor.shape[2] - 1).expand(count.shape[0], -1).contiguous()
        behind = count[:, None] + torch.arange(span, dtype=torch.int32, device=count.device)
        return self.columns(behind, length, sink).to(torch.int32)


class RunTokens(NamedTuple):
    """The new tokens of one run of pages.

    Attributes:
        held: the most tokens that a row has in the run then.
        new: i32 (B,), new ones.
        columns: i32 (B, m) of keys and of values, where in the source.
        place: i64 (n,) and (n,), row and slot of each new token, whatever row it is of.
        position: i32 (n,), its row position.
    """

    held: int
    new: Tensor
    columns: tuple[Tensor, Tensor]
    place: tuple[Tensor, Tensor]
    position: Tensor


class Route(NamedTuple):
    """Routes of all rows' tokens to runs.

    Attributes:
        runs: new tokens of each run; None where no row has any for it.
        added: i32 (2*runs, B), by how much the runs' counters grow.
        held: the most tokens that a row has in the last run then.
        history: of the stores that take it.
    """

    runs: tuple[RunTokens | None, ...]
    added: Tensor
    held: int
    history: object

    def tensors(self) -> list[Tensor]:
        found = [self.added]
        for run in self.runs:
            found += [] if run is None else [run.new, *run.columns, *run.place, run.position]
        return found


class SealStart(NamedTuple):
    """A store's counters before the tokens came that are sealed now.

    Attributes:
        counters: the device's, before new tokens came.
        known: the store's history and row states then; None if the host does not know.
        padding: the padding among the new tokens, a `Padding` or None.
    """

    counters: Tensor
    known: object
    padding: object


class ColumnTags:
    """Tags of the first columns of a conversation, and the routes by them: one object for all layers of a forward.

    It belongs to tags as they are; other tags need another object.

    Args:
        codes: u8 (B, n).
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes
        # With what keys name by id.
        self._routes: dict[tuple[object, ...], tuple[Route, tuple[object, ...]]] = {}

    def tensors(self) -> list[Tensor]:
        return [tensor for route, _ in self._routes.values() for tensor in route.tensors()]

    def route(
        self,
        counters: Tensor,
        layout: Layout,
        scheme: Scheme,
        sources: tuple[SealSource, SealSource],
        bound: int,
        hold: int,
        start: SealStart,
    ) -> Route:
        """`route_by_width`, or what that has given for a layer of which all is the same that a route follows from.

        Asks the device for the counters that new tokens came upon, if the host does not know them.
        """
        known = read_counters(start.counters) if start.known is None else start.known
        key = (known, id(start.padding), id(scheme), layout, hold, *(source.shape for source in sources))
        if key not in self._routes:
            route = route_by_width(counters, layout, scheme, sources, bound, hold, self.codes)
            self._routes[key] = route, (start.padding, scheme)
        return self._routes[key][0]


def route_by_width(
    counters: Tensor,
    layout: Layout,
    scheme: Scheme,
    sources: tuple[SealSource, SealSource],
    bound: int,
    hold: int,
    codes: Tensor | None,
) -> Route:
    """Sends the tokens that leave the tail to the run of their width.

    Tokens that do not fill a page of a format per channel go to the next wider run. Asks the device once: widths come
    from data, and so does the room that they need.

    Args:
        counters: i32 (2 + 2*runs, B), new tokens included.
        bound: no row has more to seal.
        codes: u8 (B, n), tag of each of the first n logical columns, or None.
    """
    sink, own, formats = layout.sink, layout.keys, layout.keys.formats
    length, sealed, device = counters[LENGTH], sealed_count(counters, "keys"), counters.device
    rest = (length - sink).clamp(min=0)
    new = tokens_due_by_row(rest, sealed, max(own.local, hold), own.unit)
    step = torch.arange(bound, dtype=torch.int32, device=device)
    behind = sealed[:, None] + step
    position = behind + sink
    keys = sources[0].columns(behind, length, sink)
    values = keys if sources[0].shape == sources[1].shape else sources[1].columns(behind, length, sink)
    tokens = [_tokens(*both, scheme.reads_tokens) for both in zip(sources, (keys, values), strict=True)]
    bits = scheme.token_bits(tokens[0], tokens[1], position, _tags_at(position, counters, codes))
    run_of = torch.full_like(position, len(formats) - 1)
    if bits is not None:
        for i, fmt in enumerate(formats[:-1]):
            run_of = torch.where(bits == fmt.bits, i, run_of)
    run_of = torch.where(step < new[:, None], run_of, len(formats))
    members, taken = [], []
    for i, fmt in enumerate(formats):
        mine = run_of == i
        count = mine.sum(1, dtype=torch.int32)
        if fmt.whole:
            count = count // fmt.page_size * fmt.page_size
            run_of = torch.where(mine & (mine.cumsum(1) > count[:, None]), i + 1, run_of)
            mine = run_of == i
        members.append(mine)
        taken.append(count)

    rows = read_counters(torch.cat([counters, torch.stack(taken)]))
    before, added = rows[RUNS : RUNS + 2 * len(formats) : 2], rows[RUNS + 2 * len(formats) :]
    paths, held = [], 0
    for i, (fmt, mine, count, counts) in enumerate(zip(formats, members, taken, added, strict=True)):
        held, most = max(a + b for a, b in zip(before[i], counts, strict=True)), max(counts)
        if not most:
            paths.append(None)
            continue
        span = -(-most // fmt.page_size) * fmt.page_size
        order = torch.argsort(mine.to(torch.int8), dim=1, descending=True, stable=True)
        order = torch.nn.functional.pad(order, (0, max(span - bound, 0)))[:, :span]
        index = keys.gather(1, order).to(torch.int32)
        both = index, index if values is keys else values.gather(1, order).to(torch.int32)
        row = torch.arange(count.shape[0], device=device)
        row = torch.repeat_interleave(row, count.long(), output_size=sum(counts))
        rank = torch.arange(sum(counts), device=device) - (count.cumsum(0) - count)[row]
        place = row, run_count(counters, i, "keys").long()[row] + rank
        paths.append(RunTokens(held, count, both, place, position[row, order[row, rank]]))
    return Route(tuple(paths), torch.stack(taken).repeat_interleave(2, 0), held, object())


def _tokens(source: SealSource, index: Tensor, wanted: bool) -> Tensor:
    """(B, H, m, D): tokens at columns (B, m), or anything of that shape if they are not wanted."""
    x = source.tensor
    if not wanted:
        return x[:, :, :1].expand(-1, -1, index.shape[1], -1)
    return x.gather(2, index.long()[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _tags_at(position: Tensor, counters: Tensor, codes: Tensor | None) -> Tensor | None:
    """Tags of row positions (B, m): logical columns count the padding that a row began with."""
    if codes is None or not codes.shape[1]:
        return None
    column = counters[START][:, None] + position
    found = codes.gather(1, column.clamp(0, codes.shape[1] - 1).long())
    return torch.where(column < codes.shape[1], found, UNTAGGED)
