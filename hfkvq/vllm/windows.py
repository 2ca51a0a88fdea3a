"""Pages of one layer that are sealed whole, and 16 bits for what is not in one: a request's first and newest tokens.

A page is a block of the engine, and is sealed in the step or the chunk that fills it, so that a request may share it
from then on. What is attended to in 16 bits lies in slots beside the blocks, one for each request that runs: the first
page, whose tokens all others look at, and the page that is being filled. Everything is read from the device, so that a
graph can hold a step.

The engine tells a backend no request's name, so slots are found by blocks: the block of a request's last token is its
own while it is being filled. At a page's end it may be shared; then the first request that goes on takes it, and others
are as requests that come with a prefix: their first page comes from a slot that has the same one, or from its sealed
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.norms import Balance
from hfkvq.kernels.pages import SIDES, StoreFormat
from hfkvq.kernels.step import observe
from hfkvq.kernels.step.buffer import side_by_side

from .pages import PAGE, LayerPages, Prompts


class Claim(NamedTuple):
    """Slots of a batch's requests.

    Attributes:
        slot: i32 (R,); the last slot is that of rows that pad the batch.
        due: i32 (R,), whether a request is new to its slot and has tokens already, whose first page it lacks.
        source: i32 (R,), the slot that has the same first page; -1 for none.
    """

    slot: Tensor
    due: Tensor
    source: Tensor

    def rows(self, own: slice) -> Claim:
        """Slots of some of the requests."""
        return Claim(self.slot[own], self.due[own], self.source[own])


class Slots:
    """Slots of requests that run, found by their blocks, the same in all layers of a format.

    Args:
        count: requests that run at a time, at the most.
        device: of the engine's block tables.

    Attributes:
        lost: i32 (1,), requests in the middle of a page whose slot was another's; see `check`.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        # Each slot's block of its request's last token, the request's first block, and the batch that used it last.
        self._last, self._first = (torch.full((count + 1,), -1, dtype=torch.int32, device=device) for _ in range(2))
        self._used = torch.zeros(count + 1, dtype=torch.int64, device=device)
        self._now = torch.zeros(1, dtype=torch.int64, device=device)
        self.lost = torch.zeros(1, dtype=torch.int32, device=device)
        self._told = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")

    def claim(self, table: Tensor, past: Tensor, total: Tensor, sealed: Tensor | None = None) -> Claim:
        """Slots of requests; asks the device for nothing.

        Args:
            table: i32 (R, N), their blocks; block 0 belongs to none.
            past: i32 (R,), tokens that they have.
            total: i32 (R,), tokens that they have afterwards; 0 for rows that pad the batch.
            sealed: i32 (P,), blocks that prompts among them fill.
        """
        none, spare = -1, self.count
        last, head, used = self._last[:spare], self._first[:spare], self._used[:spare]
        first = table[:, 0]
        real = (total > 0) & (first > 0)
        before, after = (
            table.gather(1, ((tokens - 1).clamp(min=0) // PAGE)[:, None].long())[:, 0] for tokens in (past, total)
        )
        match = (last == before[:, None]) & (real & (past > 0))[:, None]
        match &= match.cumsum(0) == 1
        has = match.any(1)
        need, fresh = real & ~has, real & (past == 0)
        self.lost += (need & (past % PAGE > 0)).sum(dtype=torch.int32)
        self._now += 1
        # The longest unused come first; all that go on have been used now.
        oldest = torch.where(match.any(0), self._now, used).argsort()
        taken = oldest[(need.cumsum(0) - 1).clamp(min=0, max=spare - 1)]
        slot = torch.where(has, match.int().argmax(1), torch.where(need, taken, spare))
        self._used[slot] = self._now
        # Blocks that are written now are in no other slot.
        stale = ((last == after[:, None]) & real[:, None]).any(0)
        if sealed is not None:
            stale |= torch.isin(last, sealed)
        last.masked_fill_(stale, none)
        self._last[slot] = torch.where(real, after, none)
        head.masked_fill_(((head == first[:, None]) & fresh[:, None]).any(0), none)
        new = torch.where(need, slot, spare)
        self._first[new] = torch.where(fresh, first, none)
        # A slot is a source if its first page is there, or is written in this batch.
        due = need & (past > 0)
        same = head == first[:, None]
        source = torch.where(same.any(1), same.int().argmax(1), none)
        self._first[torch.where(due, slot, spare)] = torch.where(due, first, none)
        return Claim(slot.int(), due.int(), source.int())

    def check(self) -> None:
        """Raises RuntimeError if a request lost its slot in a batch before; asks the device without waiting for it."""
        if int(self._told):
            raise RuntimeError(
                "hfkvq: a request's newest tokens were lost, since more requests ran at a time than max_num_seqs."
            )
        self._told.copy_(self.lost, non_blocking=True)


class WindowSteps(NamedTuple):
    """Requests with one token each, the same in all layers of a format.

    Attributes:
        claim: of their slots.
        table: i32 (R, N), their blocks.
        run: i32 (R, N), those behind the first, as attention reads them.
        counters: i32 (4, R), as `kernels.decode_attention` wants them.
        again: i32 (R,), whether a page begins.
        start: i32 (R,), tokens before the page that is being filled.
        full: i32 (R,), its tokens if this one fills it, else 0.
        columns: i32 (R, `PAGE`), where they lie in `side_by_side` windows.
    """

    claim: Claim
    table: Tensor
    run: Tensor
    counters: Tensor
    again: Tensor
    start: Tensor
    full: Tensor
    columns: Tensor

    @classmethod
    def of(cls, table: Tensor, lengths: Tensor, claim: Claim, heads: int, slots: int) -> WindowSteps:
        """From the tokens of each request, i32 (R,), the one that comes included; a graph can hold it."""
        past = (lengths - 1).clamp(min=0)
        start = past // PAGE * PAGE
        sealed = (start - PAGE).clamp(min=0)
        # Rows that pad the batch have a token of their own, in the last slot.
        counters = torch.stack([torch.zeros_like(past), past + 1, sealed, sealed])
        full = ((lengths % PAGE == 0) & (claim.slot < slots)) * PAGE
        window = torch.where(start > 0, claim.slot + slots + 1, claim.slot)
        columns = window[:, None] * (heads * PAGE) + torch.arange(PAGE, dtype=torch.int32, device=past.device)
        run = (table[:, 1:] if table.shape[1] > 1 else table).contiguous()
        return cls(claim, table, run, counters, (past == start).int(), start, full.int(), columns.int())


class WindowPrompts(NamedTuple):
    """Requests with several tokens, the same in all layers of a format: what follows from what the host knows.

    Tokens of a request are the new ones of the batch, and those of the page that was being filled, `PAGE` columns for
    each such request behind all new ones.

    Attributes:
        rows: the requests.
        open: i64 (O,), requests with tokens in a page that was being filled.
        order: place of each such request in ``open``.
        blocks: i32 (P, 1), those that are filled.
        columns: i32 (P, `PAGE`), their tokens.
        full: i32 (P,), `PAGE`.
        first: i64 (R, `PAGE`), tokens of each request's first page.
        last: i64 (R, `PAGE`), of the page that is being filled afterwards.
        places: bool (3, R): whether the page that was being filled, is written as the first, and is being filled
            afterwards is not the first, is the first, and is not the first.
        ranges: i32 (3, P + R), as `kernels.query_sums` wants them: the new tokens of filled pages, and of those that
            are being filled afterwards.
        owner: i64 (P + R,), the request of each range.
        carried: bool (P + R, 1, 1), whether queries of earlier batches belong to it.
        most: tokens of a range.
        left: i32 (R,), tokens of the page that is being filled afterwards.
        counters: i32 (R, 4, 1), as `kernels.gather_rows` wants those of the pages that each request has.
    """

    rows: Prompts
    open: Tensor
    order: dict[int, int]
    blocks: Tensor
    columns: Tensor
    full: Tensor
    first: Tensor
    last: Tensor
    places: Tensor
    ranges: Tensor
    owner: Tensor
    carried: Tensor
    most: int
    left: Tensor
    counters: Tensor

    @classmethod
    def of(cls, rows: Prompts) -> WindowPrompts:
        """From the requests of a batch."""
        device, count = rows.table.device, len(rows.counts)
        held, new = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (rows.held, rows.counts))
        total, start = held + new, new.cumsum(0) - new
        base, opened = held // PAGE * PAGE, held % PAGE > 0
        at_end, sealed = total // PAGE * PAGE, (base - PAGE).clamp(min=0)
        place = opened.cumsum(0) - 1
        page = torch.arange(PAGE, dtype=torch.int64, device="cpu")

        def columns(row: Tensor, begin: Tensor) -> Tensor:
            token = torch.minimum(torch.maximum(begin, base[row])[:, None] + page, total[row, None] - 1)
            before = int(new.sum()) + place[row, None] * PAGE + token - base[row, None]
            return torch.where(token < held[row, None], before, start[row, None] + token - held[row, None])

        every = torch.arange(count, dtype=torch.int64, device="cpu")
        filled = (at_end - base).clamp(min=0) // PAGE
        row = every.repeat_interleave(filled)
        number = torch.arange(len(row), dtype=torch.int64, device="cpu") - (filled.cumsum(0) - filled)[row]
        begin = base[row] + number * PAGE
        owner, begins = torch.cat([row, every]), torch.cat([begin, at_end])
        ends = torch.cat([begin + PAGE, total])
        shift = start[owner] - held[owner]
        low, high = torch.maximum(begins, held[owner]) + shift, ends + shift
        carried = opened[owner] & (begins == base[owner])
        wide = torch.cat([row, begin // PAGE, owner, opened.nonzero()[:, 0]])
        wide = wide.to(device)
        row_, block, owner_, open_ = wide.split([len(row), len(row), len(owner), int(opened.sum())])
        full = torch.full((len(row), 1), PAGE, dtype=torch.int64, device="cpu")
        narrow = torch.cat([columns(row, begin), full], 1).int().to(device)
        places = torch.stack([base > 0, held < PAGE, at_end > 0]).to(device)
        both = torch.stack([columns(every, torch.zeros_like(held)), columns(every, at_end)]).to(device)
        ranges = torch.stack([torch.zeros_like(low), low, torch.maximum(low, high)]).int().to(device)
        return cls(
            rows, open_, {int(x): i for i, x in enumerate(opened.nonzero()[:, 0])}, rows.table[row_, block][:, None],
            narrow[:, :PAGE].contiguous(), narrow[:, PAGE].contiguous(), both[0], both[1], places, ranges, owner_,
            carried[:, None, None].to(device), max(int((high - low).max()), 0), (total - at_end).int().to(device),
            torch.stack([torch.zeros_like(base), base, sealed, sealed], 1)[:, :, None].int().to(device),
        )  # fmt: skip

    def windows(self, claim: Claim, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Windows, i64: of pages that were being filled (O,), of first pages (R,), of those filled afterwards (R,).

        The last slot, which no request has, takes what is not to be written.
        """
        slot = claim.slot.long()
        beside = slot + slots + 1
        before = torch.where(self.places[0], beside, slot)[self.open]
        first, last = torch.where(self.places[1], slot, slots), torch.where(self.places[2], beside, slots)
        return before, first, last


class WindowPages(LayerPages):
    """Pages of one layer that are sealed whole, and its slots.

    Args:
        form: the layer's format, with a sink of `PAGE` tokens.
        heads: KV heads.
        head_dim: their channels.
        data: u8, contiguous, for a whole number of pages.
        windows: keys and values (2 S + 2, H, `PAGE`, D): first pages of all slots, then pages that are being filled.
        rule: by which raised channels are chosen, or "".
        balance: of normed pages, for keys and values.
        sums: f64 (S + 1, H, D) and i32 (H, S + 1), magnitudes of queries of the page that is being filled; None where
            the rule asks for none.
    """

    def __init__(
        self,
        form: StoreFormat,
        heads: int,
        head_dim: int,
        data: Tensor,
        windows: tuple[Tensor, Tensor],
        rule: str,
        balance: Sequence[Balance],
        sums: tuple[Tensor, Tensor] | None,
    ) -> None:
        super().__init__(form, heads, head_dim, data, windows)
        self.rule, self.balance, self.sums = rule, balance, sums
        self.slots = windows[0].shape[0] // 2 - 1
        (keys, values), half = windows, self.slots + 1
        self.windows = [keys[:half], values[:half], keys[half:], values[half:]]
        self._batch: tuple[WindowPrompts, Claim, list[Tensor]] | None = None

    def take_step(self, query: Tensor, key: Tensor, value: Tensor, rows: WindowSteps) -> None:
        """Stores one token of each request, (R, H, D), and seals the pages that are full."""
        claim, weight = rows.claim, None
        kernels.append(key[:, :, None], value[:, :, None], rows.counters, self.windows, self.form, claim.slot)
        if self.sums is not None:
            weight = query.new_empty((*key.shape[:2], query.shape[2]), dtype=torch.float32)
            observe(query[:, :, None], *self.sums, rows.again, weight, claim.slot)
        sources = [side_by_side(window, len(claim.slot)) for window in self.tails]
        self._seal_whole(rows.table, rows.start, rows.full, sources, rows.columns, weight)

    def take_prompts(self, query: Tensor, key: Tensor, value: Tensor, prompts: WindowPrompts, claim: Claim) -> None:
        """Stores the new tokens of requests, (n, Hq, D) and (n, H, D), and seals the pages that are full."""
        before, first, last = prompts.windows(claim, self.slots)
        sources, opened = [], []
        rotations = self.form.rotate_keys, self.form.rotate_values
        for x, rotation, window in zip((key, value), rotations, self.tails, strict=True):
            source = hadamard(x, rotation).to(window.dtype).transpose(0, 1)
            if len(before):
                opened.append(window[before])
                source = torch.cat([source, opened[-1].transpose(0, 1).flatten(1, 2)], 1)
            sources.append(source)
        weight = None
        if self.sums is not None:
            weight = self._weights(query, prompts, claim)
        count = len(prompts.full)
        if count:
            given = [source.expand(count, -1, -1, -1) for source in sources]
            zero = torch.zeros_like(prompts.full)
            self._seal_whole(prompts.blocks, zero, prompts.full, given, prompts.columns, weight)
        for source, window in zip(sources, self.tails, strict=True):
            window[first] = source[:, prompts.first].transpose(0, 1)
            window[last] = source[:, prompts.last].transpose(0, 1)
        self._batch = prompts, claim, opened

    def _weights(self, query: Tensor, prompts: WindowPrompts, claim: Claim) -> Tensor:
        """Mean magnitudes of queries of each page that is filled, f32 (P, H, D); keeps the sums of what is left."""
        assert self.sums is not None
        (sums, counts), slot, filled = self.sums, claim.slot.long(), len(prompts.full)
        given = query.transpose(0, 1)[None]
        row, begin, end = prompts.ranges.unbind()
        found = kernels.query_sums(given, row, begin, end, prompts.most, sums.shape[1])
        found = found + torch.where(prompts.carried, sums[slot[prompts.owner]], 0.0)
        sums[slot], counts[:, slot] = found[filled:], prompts.left.expand(len(counts), -1)
        return (found[:filled] / PAGE).float()

    def restore(self, table: Tensor, claim: Claim) -> None:
        """Fills the first pages of requests that are new to their slots."""
        (keys, values), rest = self.parts, (claim.due, claim.source, claim.slot, self.form)
        kernels.restore(self.windows[:2], [table, *keys, *values], *rest)

    def attend_step(self, query: Tensor, rows: WindowSteps, scaling: float) -> Tensor:
        """Attention (R, Hq, D) of one token of each request, (R, Hq, D)."""
        (keys, values), slot = self.parts, rows.claim.slot
        runs, rest = [rows.run, *keys, *values], (None, None, scaling, 0.0, self.form)
        found = kernels.decode_attention(query[:, :, None], rows.counters, self.windows, runs, *rest, rows=slot)
        return found[:, :, 0]

    def _held(self, at: int, rows: Prompts, row: int) -> Tensor:
        assert self._batch is not None
        prompts, claim, opened = self._batch
        held, parts = rows.held[row], []
        start = held // PAGE * PAGE
        if start:
            (keys, values), slot = self.parts, claim.slot[row : row + 1].long()
            windows = [*(window[slot] for window in self.windows[:2]), *(window[:1] for window in self.windows[2:])]
            # The second block and those behind it; where there is none, any.
            blocks = rows.table[row, min(1, start // PAGE - 1) : max(start // PAGE, 1)][None].contiguous()
            runs = [blocks, *keys, *values]
            found = kernels.gather_rows(prompts.counters[row], windows, runs, start, self.form, SIDES[at])
            parts.append(found[0].transpose(0, 1))
        if held > start:
            rotation = (self.form.rotate_keys, self.form.rotate_values)[at]
            own = opened[at][prompts.order[row], :, : held - start]
            parts.append(hadamard(own, rotation, back=True).transpose(0, 1))
        return torch.cat(parts)

    def _seal_whole(
        self,
        table: Tensor,
        start: Tensor,
        full: Tensor,
        sources: Sequence[Tensor],
        columns: Tensor,
        weight: Tensor | None,
    ) -> None:
        def seal(at: int) -> None:
            fmt, side, query = self.form.runs[0][at], SIDES[at], (weight, None)[at]
            rest = fmt, side, self.rule, query, self.balance[at]
            kernels.seal_side(self.parts[at], table, start, full, sources[at], columns, *rest)

        self._side_by_side(table, seal)
