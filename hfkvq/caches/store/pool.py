"""Pages that deep copies share: a pool of pages in one tensor a part, of which every copy has a lease.

A copy reads the full pages of its original where they lie, and writes to pages of its own in the same tensors: to
kernels it is a run with a table like any other.

1. A page that several leases have is *frozen*: it was full when it was shared, and nobody writes to it any more.
2. A lease writes to its own pages alone. It takes them from the pool when tokens are to be sealed there (`backed`);
   what the table says of later blocks names some page that nobody looks for a token in.
3. Where no page is free, whoever needs one makes larger tensors, another *generation*, and moves there. The others
   follow when they need pages themselves, or are copied: nobody's tensors are replaced while he works with them, so
   that copies may be used by several threads, and a step never waits for another.
4. What arranges pages anew (rows are reordered, a crop opens pages) takes tensors of its own first (`taken`).
5. A lease ends with the last state that has it, and pages that nobody has are free.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as replaced
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfkvq.kernels.pages import RunView

Pages = Callable[[int], list[Tensor]]
"""Makes tensors of so many fresh pages: the parts of keys, then those of values."""

POOL_GROWTH = 1.5
"""Factor by which another generation is larger: the first copy takes half of what a copy of all pages would."""

FIRST_FREE, LEAST_FREE = 1 / 8, 1 / 16
"""Shares of a pool that are free after its first copy, and after others: whoever finds no page moves, and those who do
not move with him keep what they have a second time."""

ANY, NONE = -1, -2
"""Streams beside real ones: every stream may write to a page that nobody has had, none where several have read it."""

# Held for a few operations of the host.
LOCK = threading.RLock()


def as_bytes(part: Tensor) -> Tensor:
    """A tensor as it is, but fp8 as bytes: not every device indexes it, and nothing can unpickle it."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


def taken(view: RunView, rows: Tensor | None = None) -> RunView:
    """A run of some rows (i64 (B',)), or of all, in tensors of its own."""
    chosen = slice(None) if rows is None else rows
    table, pos = view.table[chosen], None if view.pos is None else view.pos[chosen].clone()
    ids = table.flatten().long()
    keys, values = ([as_bytes(part)[ids].view(part.dtype) for part in parts] for parts in (view.keys, view.values))
    own = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device).view(table.shape)
    return RunView(own, pos, keys, values)


class Generation:
    """Tensors of a pool's pages. A page has the same number in all generations.

    Attributes:
        parts: of keys, then of values.
        frozen: bool (pages,), frozen pages that are here.
        streams: i64 (pages,), on which stream each page was written; ANY or NONE.
        others: all generations of the pool.
        counts: of all of them: how many leases have each page, i32 (pages of the largest,).
        leases: those whose pages are here.
        ready: what another stream than the last one has to wait for; None on the CPU.
        last: stream on which frozen pages came here.
    """

    def __init__(self, parts: Sequence[Tensor], before: Generation | None, stream: int) -> None:
        self.parts, pages = tuple(parts), parts[0].shape[0]
        self.frozen, self.streams = np.zeros(pages, bool), np.full(pages, ANY)
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        if before is None:
            self.others: weakref.WeakSet[Generation] = weakref.WeakSet()
            self.counts = [np.zeros(pages, np.int32)]
            # There is no telling which of them have held tokens.
            self.streams[:] = stream
        else:
            self.others, self.counts = before.others, before.counts
            self.frozen[: before.pages] = before.frozen
            self.counts[0] = np.pad(self.held, (0, max(pages - len(self.held), 0)))
        self.others.add(self)
        self.ready, self.last = None, stream
        self.note(stream)

    @property
    def pages(self) -> int:
        """How many there are."""
        return self.parts[0].shape[0]

    @property
    def held(self) -> Any:
        """How many leases have each page of the pool."""
        return self.counts[0]

    def note(self, stream: int) -> None:
        """Frozen pages have come here, on this stream."""
        self.meet(stream)
        if self.parts[0].is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(self.parts[0].device))
        self.last = stream

    def meet(self, stream: int) -> None:
        """This stream is to use what has come here."""
        if self.ready is not None and self.last != stream:
            current = torch.cuda.current_stream(self.parts[0].device)
            current.wait_event(self.ready)
            for part in self.parts:
                part.record_stream(current)

    def free(self, stream: int) -> Any:
        """Numbers of pages that nobody has and this stream may write to."""
        return np.flatnonzero((self.held[: self.pages] == 0) & np.isin(self.streams, (stream, ANY)))

    def give(self, count: int, stream: int) -> Any:
        """Numbers of so many free pages."""
        ids = self.free(stream)[:count]
        self.streams[ids] = stream
        for each in self.others:
            each.frozen[ids[ids < each.pages]] = False
        return ids

    def take_back(self, ids: Any, stream: int) -> None:
        """A lease of these pages has ended."""
        with LOCK:
            self.held[ids] -= 1
            self.streams[ids] = np.where(self.streams[ids] == stream, stream, NONE)


class Lease:
    """What one copy has of a pool.

    Attributes:
        generation: where its pages are.
        frozen: numbers of pages that others may have as well.
        own: of those that it writes to.
        backed: blocks of a row that have a page.
        stream: where it was made.
    """

    def __init__(self, generation: Generation, frozen: Any, own: Any, backed: int, stream: int) -> None:
        self.generation, self.frozen, self.own, self.backed, self.stream = generation, frozen, own, backed, stream
        generation.held[self.pages] += 1
        generation.leases.add(self)
        end = weakref.finalize(self, generation.take_back, self.pages, stream)
        end.atexit = False

    @property
    def pages(self) -> Any:
        """Numbers of all of them."""
        return np.concatenate([self.frozen, self.own])

    def common(self) -> tuple[int, int]:
        """Pages of these tensors that others have or may take as well as this one, and those that only others have."""
        with LOCK:
            others = [lease.pages for lease in self.generation.leases if lease is not self]
            if not others:
                return 0, 0
            theirs, mine = np.unique(np.concatenate(others)), self.pages
            alone = len(np.setdiff1d(mine, theirs))
            foreign = len(np.setdiff1d(theirs, mine))
        return self.generation.pages - alone - foreign, foreign

    def contradictions(self, table: Tensor, is_open: Tensor) -> Iterator[str]:
        """What is wrong with a table i64 (B, n) of backed blocks of which some are open, bool (B, n)."""
        mine = table.cpu().numpy()
        with LOCK:
            others = [each for each in self.generation.leases if each is not self]
        if len(np.setdiff1d(mine, self.pages)) or int(self.generation.held[self.pages].min(initial=1)) < 1:
            yield "a table names pages of deep copies, or of nobody"
        theirs = np.concatenate([self.frozen, *(each.pages for each in others)])
        if len(np.intersect1d(mine[is_open.cpu().numpy()], theirs)):
            yield "a page that is not full is shared with a deep copy"


def backed(view: RunView, blocks: int, more: Pages) -> RunView:
    """A shared run in which so many blocks of each row have a page; asks the device nothing.

    Args:
        view: has that many blocks, some of which have no page yet.
        blocks: of a row.
        more: makes pages.
    """
    rows = view.table.shape[0]
    with LOCK:
        count = rows * (blocks - view.lease.backed)
        view, stream = _with_room(view, count, more), _stream(view)
        lease: Lease = view.lease
        ids = lease.generation.give(count, stream)
        own = Lease(lease.generation, lease.frozen, np.concatenate([lease.own, ids]), blocks, stream)
    table = view.table.clone()
    table[:, lease.backed : blocks] = _on_device(ids, table).view(rows, -1)
    return replaced(view, table=table, lease=own)


def shared(view: RunView, full: Sequence[int], used: Sequence[int], more: Pages) -> tuple[RunView, RunView]:
    """A run and a copy of it that has the same full pages. Asks the device.

    Args:
        view: the run; it is not changed, but what it is to be from now on comes back.
        full: by row, blocks that are full.
        used: by row, blocks in which any token is.
        more: makes pages.
    """
    table, last, stream = view.table.cpu().numpy(), max(used), _stream(view)
    frozen = np.unique(np.concatenate([table[row, :count] for row, count in enumerate(full)]))
    places = [(row, block) for row, count in enumerate(full) for block in range(count, last)]
    with LOCK:
        if view.lease is None:
            generation, have, free = Generation([*view.keys, *view.values], None, stream), last, FIRST_FREE
        else:
            generation, have, free = view.lease.generation, view.lease.backed, LEAST_FREE
        own = np.setdiff1d(table[:, :have], frozen)
        generation.frozen[frozen] = True
        generation.note(stream)
        room = max(len(places), int(generation.pages * free))
        view = _with_room(replaced(view, lease=Lease(generation, frozen, own, have, stream)), room, more)
        generation = view.lease.generation
        ids = generation.give(len(places), stream)
        lease = Lease(generation, frozen, ids, last, stream)
    new = view.table.clone()
    if places:
        rows, blocks = torch.tensor(places, device=new.device).T
        new[rows, blocks] = _on_device(ids, new)
        for part in map(as_bytes, generation.parts):
            part[new[rows, blocks].long()] = part[view.table[rows, blocks].long()]
    pos = None if view.pos is None else view.pos.clone()
    return view, replaced(view, table=new, pos=pos, lease=lease)


def _with_room(view: RunView, count: int, more: Pages) -> RunView:
    """A run where so many pages are free: as it is, in the largest generation, or in another one."""
    lease, stream = view.lease, _stream(view)
    own, largest = lease.generation, max(lease.generation.others, key=lambda each: each.pages)
    if largest is own and len(own.free(stream)) >= count:
        return view
    own.meet(stream)
    if len(largest.free(stream)) >= count:
        largest.meet(stream)
        moved = np.concatenate([lease.own, lease.frozen[~largest.frozen[lease.frozen]]])
        index = _on_device(moved, view.table).long()
        for old, new in zip(map(as_bytes, own.parts), map(as_bytes, largest.parts), strict=True):
            new[index] = old[index]
        largest.streams[moved] = stream
        largest.frozen[lease.frozen] = True
        largest.note(stream)
    else:
        pages = max(int(largest.pages * POOL_GROWTH) + 1, largest.pages + count)
        extra = more(pages - own.pages)
        largest = Generation([torch.cat([x, new]) for x, new in zip(own.parts, extra, strict=True)], own, stream)
        largest.streams[: own.pages] = np.where(own.held[: own.pages] > 0, stream, ANY)
    split = len(view.keys)
    return replaced(
        view,
        keys=largest.parts[:split],
        values=largest.parts[split:],
        lease=Lease(largest, lease.frozen, lease.own, lease.backed, stream),
    )


def _stream(view: RunView) -> int:
    return torch.cuda.current_stream(view.table.device).cuda_stream if view.table.is_cuda else 0


def _on_device(ids: Any, table: Tensor) -> Tensor:
    """Page numbers, mostly some that follow each other, as a table has them, without waiting for the device."""
    parts = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1) if len(ids) else []
    spans = [torch.arange(int(x[0]), int(x[-1]) + 1, dtype=table.dtype, device=table.device) for x in parts]
    return torch.cat(spans) if spans else table.new_zeros(0)
