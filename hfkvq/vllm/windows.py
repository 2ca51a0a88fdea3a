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
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.norms import Balance
from hfkvq.kernels.pages import StoreFormat
from hfkvq.kernels.step.buffer import side_by_side

from .pages import PAGE, LayerPages, Prompts, Writes, sent


class Slots:
    """Slots of requests that run, found by their blocks, the same in all layers.

    Args:
        count: requests that run at a time, at the most.
        device: of the engine's block tables.

    Attributes:
        tensors: as `kernels.claim` wants them. The last is i32 (1,): requests in the middle of a page whose slot was
            another's; see `check`.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.tensors = count, kernels.new_slots(count, device)
        self._told = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")

    def check(self) -> None:
        """Raises RuntimeError if a request lost its slot in a batch before; asks the device without waiting for it."""
        if int(self._told):
            raise RuntimeError(
                "hfkvq: a request's newest tokens were lost, since more requests ran at a time than max_num_seqs."
            )
        self._told.copy_(self.tensors[-1], non_blocking=True)


class WindowPrompts(NamedTuple):
    """Requests with several tokens, the same in all layers of a format: what follows from what the host knows.

    Attributes:
        rows: the requests, and the P blocks that are full of new tokens.
        shifts: i32 (3, R), windows beside a request's slot: of its first page, of the one that was being filled, and of
            one that is begun.
        before: i32 (3, R), as `kernels.place` wants them: new tokens that join those of the page that was being filled,
            or are in the first. They are placed before pages are sealed; None for no tokens.
        after: those of pages that are begun, which are placed when all have attended.
        opened: the O pages that were being filled and are full now, but for their columns.
        owner: i32 (O,), the request of each.
        heads: KV heads.
        sums: i32 (8, P + R), as `kernels.page_weights` wants them.
    """

    rows: Prompts
    shifts: Tensor
    before: Tensor | None
    after: Tensor | None
    opened: Writes
    owner: Tensor
    heads: int
    sums: Tensor

    @classmethod
    def of(cls, rows: Prompts, heads: int, slots: int) -> WindowPrompts:
        """From the requests of a batch, of which `Prompts` has whole blocks; asks the device for nothing."""
        count, width, full = len(rows.counts), rows.table.shape[1], len(rows.writes.new)
        before, after, shift = ([[0] * count for _ in range(3)] for _ in range(3))
        shift[2] = [slots + 1] * count
        place, owner, pages, requests = [], [], [], []
        for row, (held, new, start) in enumerate(zip(rows.held, rows.counts, rows.starts, strict=False)):
            total, base, column = held + new, held // PAGE * PAGE, start - held
            end, is_open = total // PAGE * PAGE, held > base
            shift[1][row] = (base > 0) * (slots + 1)
            if is_open or not base:
                before[0][row], before[1][row], before[2][row] = start, held - base, min(total, base + PAGE) - held
            if total > end > 0 and not (is_open and end == base):
                after[0][row], after[2][row] = column + end, total - end
            first, stop, page = base, start, -1
            if is_open and end > base:
                first, stop, page = base + PAGE, column + base + PAGE, full + len(place)
                place.append(row * width + base // PAGE)
                owner.append(row)
            pages += [column + i for i in range(first, end, PAGE)]
            begin = column + max(end, held)
            requests.append((start, stop, page, row, begin, start + new, int(is_open), total - end))
        assert len(pages) == full, "blocks full of new tokens"
        sums = [(first, first + PAGE, page, -1, 0, 0, 0, 0) for page, first in enumerate(pages)] + requests
        parts = [list(chain(*numbers)) for numbers in (shift, before, after, zip(*sums, strict=True))]
        data = sent([*parts, place, owner], rows.table.device)
        zero = torch.zeros_like(data[4])
        opened = Writes(rows.table.reshape(-1).index_select(0, data[4])[:, None], zero, zero + PAGE, zero)
        shifts, first, last = (x.view(3, -1) for x in data[:3])
        some = [stretch if any(numbers[2]) else None for stretch, numbers in ((first, before), (last, after))]
        return cls(rows, shifts, some[0], some[1], opened, data[5], heads, data[3].view(8, -1))

    @property
    def sealed(self) -> Tensor:
        """Blocks that are full now, i32 (P + O,)."""
        return torch.cat([self.rows.writes.table, self.opened.table])[:, 0]

    def placed(self, slot: Tensor) -> PlacedPrompts:
        """The same requests with their slots, i32 (R,)."""
        windows = self.shifts + slot
        page = torch.arange(PAGE, dtype=torch.int32, device=windows.device)
        columns = windows[1].index_select(0, self.owner)[:, None] * (self.heads * PAGE) + page
        return PlacedPrompts(self, slot, windows, columns)


class PlacedPrompts(NamedTuple):
    """Requests with several tokens and their slots.

    Attributes:
        prompts: the requests.
        slot: i32 (R,).
        windows: i32 (3, R), see ``shifts`` of `WindowPrompts`.
        columns: i32 (O, `PAGE`), where tokens of ``opened`` lie in `side_by_side` windows.
    """

    prompts: WindowPrompts
    slot: Tensor
    windows: Tensor
    columns: Tensor


class WindowPages(LayerPages):
    """Pages of one layer that are sealed whole, and its slots: see `LayerPages`.

    Args:
        form: the layer's format, with a sink of `PAGE` tokens.
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
        self._batch: tuple[PlacedPrompts, list[Tensor]] | None = None

    def take_step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        claimed: kernels.Claimed,
        table: Tensor,
        restores: bool,
    ) -> None:
        """Stores one token of each request, (R, H, D), and seals the pages that are full.

        Args:
            claimed: slots of the requests, and what follows from them.
            table: i32 (R, N), their blocks.
            restores: whether a request may lack its first page, and no other batch's prompt fills it now.
        """
        new, sums = (query[:, :, None], key[:, :, None], value[:, :, None]), [] if self.sums is None else self.sums
        rest = self.tails, self.parts, table, sums, self.form, self.rule, self.balance, restores
        kernels.take_page(*new, claimed, *rest)

    def take_prompts(self, query: Tensor, key: Tensor, value: Tensor, rows: PlacedPrompts) -> None:
        """Stores the new tokens of requests, (n, Hq, D) and (n, H, D), and seals the pages that are full.

        Until `finish_prompts`, windows of pages that were being filled hold what these held before.
        """
        prompts, sources, weight = rows.prompts, self._rotated(key, value), None
        self._batch = rows, sources
        if prompts.before is not None:
            kernels.place(sources[0], sources[1], self.tails, rows.windows[1], prompts.before)
        full, opened = prompts.rows.writes, prompts.opened
        count = len(full.new)
        if self.sums is not None:
            weight = kernels.page_weights(query, prompts.sums, rows.slot, *self.sums, count + len(opened.new), PAGE)
        if count:
            given = [source.transpose(0, 1).expand(count, -1, -1, -1) for source in sources]
            own = None if weight is None else weight[:count]
            self._seal(full, given, own)
        if len(opened.new):
            given = [side_by_side(window, len(opened.new)) for window in self.tails]
            own = None if weight is None else weight[count:]
            self._seal(opened._replace(columns=rows.columns), given, own)

    def finish_prompts(self) -> None:
        """Keeps tokens of pages that are begun, when all requests of a batch have attended."""
        assert self._batch is not None
        (rows, sources), self._batch = self._batch, None
        if rows.prompts.after is not None:
            kernels.place(sources[0], sources[1], self.tails, rows.windows[2], rows.prompts.after)

    def restore(self, table: Tensor, claimed: kernels.Claimed) -> None:
        """Fills the first pages of requests that are new to their slots."""
        (keys, values), (slot, due, source) = self.parts, claimed.found
        kernels.restore(due, source, slot, self.windows[:2], [table, *keys, *values], self.form)

    def attend_step(self, query: Tensor, claimed: kernels.Claimed, scaling: float, out: Tensor) -> None:
        """Attention (R, Hq, D) of one token of each request, into (R, Hq, D)."""
        keys, values = self.parts
        slot, runs = claimed.found[0, : len(query)], [claimed.run, *keys, *values]
        # Queries were there before tokens were stored.
        kernels.decode_attention(
            query[:, :, None], claimed.counters, self.windows, runs, None, None, scaling, 0.0, self.form, True, slot,
            out=out[:, :, None],
        )  # fmt: skip

    def _held(self) -> Sequence[Tensor]:
        assert self._batch is not None
        return self._batch[0].windows[:2], *self.tails
