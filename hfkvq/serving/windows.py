"""Blocks and slots of schemes whose tokens wait in 16 bits: windows that requests of the engine have, and attention.

A slot is a sink and a tail, keys and values, in every layer, and the statistics of queries where a scheme has some. It
is a request's from its first block to the end, and lies in the engine's own bytes, which hold fewer blocks then. Its
number comes to the device with the request's blocks: in a step as the last column of the engine's block table, else in
the numbers of blocks, which are ours alone. Slot 0 belongs to rows that pad a batch.

How many tokens are sealed follows from how many there are, so they are not counted. A block is taken when there are
tokens to seal into it. What is stored is what a `MixedKVCache` of the scheme stores, by the same code: prompts go
through a `KVStore` over requests' blocks and slots, steps through the kernels of recorded steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.caches import Scheme
from hfkvq.caches.layer_state.query_statistics import QueryStatistics
from hfkvq.caches.steps.step_buffer import plan_of_layout
from hfkvq.caches.store import KVStore, Ragged, StoreState
from hfkvq.caches.store.row_lengths import RowState, WindowSizes
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import START, sealed_count
from hfkvq.kernels.pages import SIDES, RunView
from hfkvq.kernels.step import StepPlan, StepState, attend_and_seal
from hfkvq.kernels.windows import tokens_due, tokens_due_by_row

from .pages import CompressedPages, arguments_of, prompt_attention, typed

MOST_SLOTS = 1024
"""Slots, where the user does not say how many requests a batch has."""

USUAL_TOKENS = 4096
"""Tokens of a request, by default: there are as many slots as requests of this length fit."""


def window_shapes(
    schemes: tuple[Scheme, ...], slots: int, heads: int, dim: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Windows of a layer: sink keys, sink values, tail keys, tail values; sums and counts of queries, if any."""
    sizes = WindowSizes.of(schemes[0].layout(dim, dim))
    # A token joins its tail before what is due leaves it.
    tails = [local + unit for local, unit in zip(sizes.local, sizes.unit, strict=True)]
    found = [((slots, heads, length, dim), dtype) for length in (sizes.sink, sizes.sink, *tails)]
    if any("query" in scheme.needs for scheme in schemes):
        found += [((slots, heads, dim), torch.float64), ((heads, slots), torch.int32)]
    return found


def bytes_of(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> list[int]:
    """Bytes of each window; whatever comes behind it can be read 16 bytes at a time."""
    return [-(-torch.Size(shape).numel() * kind.itemsize // 16) * 16 for shape, kind in shapes]


def of_schemes(schemes: tuple[Scheme, ...], head_dim: int) -> str | None:
    """Why layers with windows of these schemes cannot share slots, if they cannot."""
    layouts = [scheme.layout(head_dim, head_dim) for scheme in schemes]
    sizes = {WindowSizes.of(layout) for layout in layouts}
    pages = {layout.keys.formats[0].page_size for layout in layouts}
    return None if len(sizes) == len(pages) == 1 else "its layers have windows or pages of several sizes"


class Steps(NamedTuple):
    """Requests that have one token each, the same in all layers.

    Attributes:
        table: i32 (R, N), blocks of each request.
        slot: i32 (R,).
        counters: i32 (4, R), as `kernels.decode_attention` wants them.
        new: i32 (2, R), keys and values that are sealed behind the step.
        due: i32 (R * m,) for keys and values: the columns of `side_by_side` tails that are sealed.
        again: whether the queries' statistics begin anew, since the step before has sealed keys or the request is new
            to its slot; and whether it is new. i32 (2, R); anything without statistics.
        weight: f32 (R, H, D), room for the means of queries; empty without statistics.
        columns: i64 (R,), where the tokens stand in the batch; None for all in a row.
    """

    table: Tensor
    slot: Tensor
    counters: Tensor
    new: Tensor
    due: tuple[Tensor, Tensor]
    again: Tensor
    weight: Tensor
    columns: Tensor | None = None


class Prompt(NamedTuple):
    """A request with several tokens behind those that it has.

    Attributes:
        own: its tokens in the batch.
        slot: its windows.
        table: i32 (1, N), its blocks.
        counters: i32 (4, 1), as `KVStore` has them.
        again: i32 (1,), whether the step before has sealed keys.
    """

    own: slice
    past: int
    slot: int
    table: Tensor
    counters: Tensor
    again: Tensor


class FirstPrompts(NamedTuple):
    """P requests that have nothing yet, the same in all layers.

    Attributes:
        own: the tokens of each in the batch.
        slot: i64 (P,), their windows.
        table: i32 (P, N), their blocks.
        rows: where their tokens stand, for the store.
        left: those of each that are not sealed at once.
        counts: i32 (2, P), how many all of them are, and those that are left.
    """

    own: tuple[slice, ...]
    slot: Tensor
    table: Tensor
    rows: Ragged
    left: tuple[slice, ...]
    counts: Tensor


class WindowedPages(CompressedPages):
    """Blocks of pages and slots of windows, which are attended to and written.

    Attributes:
        sizes: of the windows, alike in all layers.
        tails: slots of the tails of keys and of values.
        observes: whether queries have statistics.
        slots: of requests, by their id.
    """

    asked: ClassVar[int | None] = None
    """Number of requests in a batch, if the user says so."""
    usual: ClassVar[int] = USUAL_TOKENS
    """Tokens of a usual request."""

    supports_block_sharing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots: dict[str, int] = {}
        self._forks: list[tuple[int, int]] = []
        self._steps: Steps | None = None
        self._prompts: list[Prompt] = []
        self._first: FirstPrompts | None = None

    def lay_out(self) -> None:
        super().lay_out()
        sizes = {WindowSizes.of(layout) for layout in self.layouts.values()}
        assert len(sizes) == 1, "see `refusal`"
        self.sizes = sizes.pop()
        (key_local, value_local), (key_unit, value_unit) = self.sizes.local, self.sizes.unit
        self.tails = key_local + key_unit, value_local + value_unit
        self.observes = any("query" in scheme.needs for scheme in self.schemes)
        self._scheme_of = dict(zip(self.layer_indices, self.schemes, strict=True))
        self._plans: dict[tuple[int, int, int], StepPlan] = {}
        self._stores: dict[int, KVStore] = {}

    # Memory.

    def _window_shapes(self, slots: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Windows of a layer."""
        return window_shapes(self.schemes, slots, self.num_key_value_heads, self.head_dim, self.cache_dtype)

    def _window_views(self, data: Tensor, slots: int) -> tuple[list[Tensor], Tensor]:
        """Windows of a layer at the beginning of bytes; and the bytes behind them."""
        shapes, found = self._window_shapes(slots), []
        for (shape, kind), size in zip(shapes, bytes_of(shapes), strict=True):
            found.append(typed(data, shape, kind))
            data = data[size:]
        return found, data

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot, in all layers."""
        return len(self.layer_indices) * sum(bytes_of(self._window_shapes(1)))

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Takes the engine's bytes: slots at their end, and blocks before them."""
        most = self.asked
        if most is None:
            usual = self.bytes_per_slot + self.blocks_for(self.usual) * self.bytes_per_block
            most = max(1, min(MOST_SLOTS, self.config.max_requests_per_batch or MOST_SLOTS, non_trash_bytes // usual))
        # Slot 0 belongs to no request, and every request needs a block.
        fits = (non_trash_bytes - self.bytes_per_slot) // (self.bytes_per_slot + self.bytes_per_block)
        if most > fits:
            raise ValueError(
                f"max_requests_per_batch: got {most}, allowed at most {max(fits, 0)}: with this scheme each request "
                f"has windows of {self.bytes_per_slot / 2**20:.1f} MiB beside its blocks, and there are "
                f"{non_trash_bytes / 2**20:.1f} MiB; allow fewer requests, or give the engine more num_blocks."
            )
        self.config.max_requests_per_batch, slots = most, most + 1
        taken = -(-slots * self.bytes_per_slot // bytes_per_sector)
        pool.num_sectors -= taken
        pool.reset()
        taken *= bytes_per_sector
        blocks, rest = cache_tensor[:-taken], cache_tensor[-taken:]
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes - taken, blocks, pool)
        self.window_room, self._free = taken, list(range(most, 0, -1))
        self._windows, self._sums = {}, {}
        for layer in self.layer_indices:
            found, rest = self._window_views(rest, slots)
            self._windows[layer], self._sums[layer] = found[:4], found[4:]
        self._again = torch.zeros(slots, dtype=torch.int32, device=cache_tensor.device)

    def settle(self, processor: Any) -> None:
        """Tells the engine's cache what slots mean for it."""
        cache = processor.cache
        cache.num_sectors = self.pool.num_sectors
        # The last column of a block table is the slot's.
        room = max(0, cache.max_blocks_per_request - 1) * self.tokens_per_page
        cache.max_decode_fast_path_length = min(cache.max_decode_fast_path_length, room)
        fork = cache.prepare_fork_request

        def fork_as_slots_allow(state: Any, requests: list[str], copies: Any) -> list[str]:
            return fork(state, requests[: len(self._free)], copies)

        cache.prepare_fork_request = fork_as_slots_allow

    @property
    def window_bytes(self) -> int:
        """Bytes of the slots that requests have."""
        return len(self.slots) * self.bytes_per_slot

    # Blocks and slots of requests.

    def sealed(self, tokens: int, side: int) -> int:
        """Number of sealed tokens among so many, of keys (0) or values (1)."""
        return tokens_due(max(tokens - self.sizes.sink, 0), 0, self.sizes.local[side], self.sizes.unit[side])

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a request: for what is sealed, and one at least."""
        return max(1, -(-max(self.sealed(tokens, side) for side in (0, 1)) // self.tokens_per_page))

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        return max(0, self.blocks_for(past_length + query_length) - allocated_blocks)

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Blocks that a request needs for new tokens; more than there are while it has no slot and none is free."""
        if request_id not in self.slots and not self._free:
            return self.num_blocks + 1
        return super().needs_new_blocks(request_id, past_length, query_length)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Gives a request blocks, and with the first ones a slot."""
        super().allocate_cache_to_request(request_id, past_length, query_length)
        if request_id not in self.slots:
            self.slots[request_id] = self._free.pop()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Takes a request's blocks and its slot back."""
        super().free_blocks(request_id, no_cache)
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Gives a fork blocks and a slot of its own, to which `copy_blocks` copies."""
        copies = super().fork_blocks(source_request_id, dest_request_id, past_length)
        self.slots[dest_request_id] = self._free.pop()
        self._forks.append((self.slots[source_request_id], self.slots[dest_request_id]))
        return copies

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copies blocks in all layers, and the slots of the forks that they are of."""
        super().copy_blocks(source_block_ids, dest_block_ids)
        source, dest = torch.tensor(self._forks, device=self._again.device, dtype=torch.int64).T
        self._forks = []
        self._again[dest] = self._again[source]
        for layer in self.layer_indices:
            for window in self._windows[layer]:
                window[dest] = window[source]
            for sums, counts in [self._sums[layer]] if self.observes else []:
                sums[dest], counts[:, dest] = sums[source], counts[:, source]

    def _named_blocks(self, request_id: str) -> list[int]:
        """Numbers of each block, and of the slot: see `_sort`."""
        slot, slots = self.slots[request_id], len(self._again)
        return [block * slots + slot for block in self.block_table[request_id]]

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """Fills a request's row of the table: blocks, and the slot last."""
        blocks = self.block_table[request_id]
        row = [*blocks, *[-1] * (len(block_table) - 1 - len(blocks)), self.slots[request_id]]
        block_table.copy_(torch.tensor(row, dtype=block_table.dtype, device="cpu"), non_blocking=True)

    # Attention.

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, given: dict[str, Any]
    ) -> Tensor:
        layer, arguments = module.layer_idx, arguments_of(scaling, given)
        if layer == self.layer_indices[0]:
            if given["block_table"] is not None:
                self._prompts, self._first, self._steps = [], None, self._steps_of(given, query.shape[2])
            else:
                self._sort(given)
        steps = self._steps
        if steps is not None and steps.columns is None:
            # Every token is a request: rows of one token.
            q, k, v = (x.transpose(0, 2) for x in (query, key, value))
            return self._take_step(layer, q, k, v, steps, arguments).transpose(0, 2).transpose(1, 2)
        out = query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
        if steps is not None:
            at = steps.columns
            q, k, v = (x[:, :, at].transpose(0, 2) for x in (query, key, value))
            out[0, at] = self._take_step(layer, q, k, v, steps, arguments)[:, :, 0]
        if self._first is not None:
            for own in self._first.own:
                q, k, v = (x[:, :, own] for x in (query, key, value))
                out[:, own] = prompt_attention(module, q, k, v, arguments)
            self._store_first(layer, query, key, value, self._first)
        for prompt in self._prompts:
            q, k, v = (x[:, :, prompt.own] for x in (query, key, value))
            out[:, prompt.own] = self._take_prompt(layer, module, q, k, v, prompt, arguments)
        return out

    def _steps_of(self, given: dict[str, Any], count: int) -> Steps:
        """A batch in which every request has one token; asks nothing of the host, so that a graph can hold it."""
        ends = given["cu_seq_lens_k"][self.layer_type][: count + 1]
        table = given["block_table"][self.index].clamp(min=0)
        # Rows that pad the batch have no tokens; those of slot 0 may be anything.
        past = (ends[1:] - ends[:-1] - 1).clamp(min=0).to(torch.int32)
        return self._made(table[:, :-1].contiguous(), table[:, -1].contiguous(), past)

    def _made(self, table: Tensor, slot: Tensor, past: Tensor, columns: Tensor | None = None) -> Steps:
        """Steps of requests with ``past`` tokens, i32 (R,)."""
        sink, heads, places, before, new = self.sizes.sink, self.num_key_value_heads, [], [], []
        for length, local, unit in zip(self.tails, self.sizes.local, self.sizes.unit, strict=True):
            had = tokens_due_by_row((past - sink).clamp(min=0), torch.zeros_like(past), local, unit)
            before.append(had)
            new.append(tokens_due_by_row((past + 1 - sink).clamp(min=0), had, local, unit))
            oldest = had[:, None] + torch.arange(unit, dtype=torch.int32, device=past.device)
            places.append((oldest % length + slot[:, None] * (heads * length)).flatten())
        again, weight = past, torch.empty(0, device=past.device, dtype=torch.float32)
        if self.observes:
            again, weight = self._begin_anew(slot, new[0] > 0), weight.new_empty(len(slot), heads, self.head_dim)
            # The slot's sums are of the request before.
            fresh = (past == 0).to(again.dtype)
            again = torch.stack([torch.maximum(again, fresh), fresh])
        counters = torch.stack([torch.zeros_like(past), past + 1, *before])
        return Steps(table, slot, counters, torch.stack(new), (places[0], places[1]), again, weight, columns)

    def _begin_anew(self, slot: Tensor, sealed: Tensor | int) -> Tensor:
        """Flags of slots whose statistics begin anew now (i32); notes those of the next step."""
        at = slot.long()
        again = self._again[at]
        self._again[at] = sealed.int() if isinstance(sealed, Tensor) else sealed
        return again

    def _sort(self, given: dict[str, Any]) -> None:
        """Rows of a batch with prompts, or parts of them: asks the device for lengths and slots."""
        slots, device = len(self._again), self._again.device
        columns = self._columns(given)
        self._first, self._prompts, self._steps = None, [], None
        if columns is None:
            return
        starts, news, pasts, blocks = columns.first, columns.new, columns.held, columns.blocks
        # Few widths, each of which has plans of its own.
        found = columns.table(self._numbers(given), 1 << (max(blocks) - 1).bit_length())
        table, slot = (found // slots).to(torch.int32), (found[:, 0] % slots).to(torch.int32)
        first = [row for row, past in enumerate(pasts) if not past]
        alone = [row for row, (past, new) in enumerate(zip(pasts, news, strict=True)) if past and new == 1]
        later = [row for row, (past, new) in enumerate(zip(pasts, news, strict=True)) if past and new > 1]
        again = self._begin_anew(slot[first + later], 0)[len(first) :] if self.observes else slot[later]
        own = [slice(start, start + new) for start, new in zip(starts, news, strict=True)]
        if first:
            self._first = self._first_of([own[row] for row in first], slot[first], table[first])
        numbers = slot.tolist() if later else []
        had = torch.tensor(
            [[0, x, self.sealed(x, 0), self.sealed(x, 1)] for x in pasts], dtype=torch.int32, device="cpu"
        ).to(device)
        self._prompts = [
            Prompt(
                own[row], pasts[row], numbers[row], table[row : row + 1, : blocks[row]], had[row, :, None],
                again[i : i + 1],
            )
            for i, row in enumerate(later)
        ]  # fmt: skip
        if alone:
            past, columns = torch.tensor(
                [[x[row] for row in alone] for x in (pasts, starts)], dtype=torch.int64, device="cpu"
            ).to(device)
            self._steps = self._made(table[alone], slot[alone], past.to(torch.int32), columns)

    def _first_of(self, own: list[slice], slot: Tensor, table: Tensor) -> FirstPrompts:
        """Requests whose tokens, slots and blocks these are."""
        counts: list[list[int]] = [[each.stop - each.start for each in own], []]
        for tokens in counts[0]:
            sealed = self.sealed(tokens, 0)
            counts[1].append(tokens - self.sizes.sink - sealed if sealed else tokens)
        left = tuple([slice(each.stop - count, each.stop) for each, count in zip(own, counts[1], strict=True)])
        numbers = torch.tensor(counts, dtype=torch.int32, device="cpu").to(table.device)
        rows = Ragged([each.start for each in own], counts[0], table.device)
        return FirstPrompts(tuple(own), slot.long(), table, rows, left, numbers)

    def _take_step(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, steps: Steps, arguments: AttentionArguments
    ) -> Tensor:
        """A step of requests, (R, Hq, 1, D): their tokens join the tails, attend, and what is due is sealed."""
        (keys, values), windows, sums = self._parts[layer], self._windows[layer], self._sums[layer]
        plan = self._plan(layer, *steps.table.shape)
        kernels.append(key, value, steps.counters, windows, plan.format, steps.slot)
        none, again = steps.weight, steps.again[int(plan.query == "total")] if sums else steps.again
        state = StepState(
            steps.counters, windows, [RunView(steps.table, None, keys, values)], steps.new, again, steps.due,
            flag=none, sums=sums[0] if sums else none, counts=sums[1] if sums else none, weight=steps.weight,
            query=none, rows=steps.slot,
        )  # fmt: skip
        return attend_and_seal(query, query, 1, arguments, state, plan)

    def _plan(self, layer: int, rows: int, blocks: int) -> StepPlan:
        """Plan of steps of so many requests."""
        plan = self._plans.get((layer, rows, blocks))
        if plan is None:
            shape = rows, self.num_key_value_heads, self.head_dim, self.head_dim, str(self.cache_dtype)
            plan = plan_of_layout(self._scheme_of[layer], self.layouts[layer], shape, (blocks,), self.tails, 0)
            self._plans[layer, rows, blocks] = plan
        return plan

    def _take_prompt(
        self,
        layer: int,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prompt: Prompt,
        arguments: AttentionArguments,
    ) -> Tensor:
        """Attention of a request's tokens, (1, n, Hq, D), over what it has, dequantized, and themselves."""
        row = RowState(prompt.past, self.sealed(prompt.past, 0), self.sealed(prompt.past, 1))
        windows = [window[prompt.slot : prompt.slot + 1] for window in self._windows[layer]]
        store, sides = self._store(layer, prompt.table, prompt.counters.clone(), windows, row), (key, value)
        sides = [torch.cat([store.dense(SIDES[at], prompt.past), x], 2) for at, x in enumerate(sides)]
        out = prompt_attention(module, query, sides[0], sides[1], arguments)
        scheme, own = self._scheme_of[layer], store.layout.keys
        if "query" not in scheme.needs:
            store.extend(key, value)
            return out
        queries, (sums, counts) = QueryStatistics("history" in scheme.needs), self._sums[layer]
        at, begun = slice(prompt.slot, prompt.slot + 1), prompt.again > 0
        if "history" not in scheme.needs:
            sums[at], counts[:, at] = sums[at].masked_fill(begun, 0.0), counts[:, at].masked_fill(begun, 0)
        queries.sums, queries.counts = sums[at].clone(), counts[:, at].clone()
        queries.observe(query, query.shape[2], self.num_key_value_heads, None, own.local + own.unit)
        before = sealed_count(store.counters, "keys")
        store.extend(key, value, q_abs=queries.mean())
        queries.forget_sealed(store, before)
        sums[at], counts[:, at] = queries.sums, queries.counts
        return out

    def _store_first(self, layer: int, query: Tensor, key: Tensor, value: Tensor, first: FirstPrompts) -> None:
        """Stores the first tokens of requests."""
        mean = self._observe_first(layer, query, first) if "query" in self._scheme_of[layer].needs else None
        count, windows = len(first.own), self._windows[layer]
        # Rows of these windows give the store their shape; what it makes instead goes to the requests' slots.
        shapes = [window[:1].expand(count, -1, -1, -1) for window in windows]
        counters = torch.zeros(4, count, dtype=torch.int32, device=key.device)
        store = self._store(layer, first.table, counters, shapes, RowState(0, 0, 0))
        store.extend_ragged(key, value, first.rows, mean)
        for window, new in zip(windows, store.windows, strict=True):
            window[first.slot] = new

    def _observe_first(self, layer: int, query: Tensor, first: FirstPrompts) -> Tensor:
        """Starts the statistics of requests with their first queries; means, f32 (P, H, D), of all of these."""
        needs, (sums, counts) = self._scheme_of[layer].needs, self._sums[layer]
        # Sums of few bits each: exact in f64.
        found = [query[0, :, own].abs().sum(1, dtype=torch.float64) for own in (*first.own, *first.left)]
        total, left = torch.stack(found).unflatten(1, (self.num_key_value_heads, -1)).mean(2).chunk(2)
        # Queries of sealed tokens count on only where all do.
        kept = 0 if "history" in needs else 1
        sums[first.slot], counts[:, first.slot] = (total, left)[kept], first.counts[kept].expand(len(counts), -1)
        return (total / first.counts[0, :, None, None]).float()

    def _store(self, layer: int, table: Tensor, counters: Tensor, windows: Sequence[Tensor], row: RowState) -> KVStore:
        """Requests' windows and blocks of a layer as a store, whose rows are alike."""
        store = self._stores.get(layer)
        if store is None:
            like = windows[2][:, :, :1]
            store = self._stores[layer] = KVStore(self.layouts[layer], self._scheme_of[layer], like, like)
        keys, values = self._parts[layer]
        runs = (RunView(table, None, keys, values),)
        store.adopt(
            StoreState(store.format, self.sizes, counters, counters[START], tuple(windows), runs, frozenset({row}))
        )
        return store
