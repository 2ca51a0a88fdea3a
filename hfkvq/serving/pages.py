"""Blocks of Transformers' paged cache that hold a scheme's pages, and attention over them.

The engine keeps one tensor of bytes for all layers, gives blocks of it to requests, and tells each layer which blocks a
batch reads and writes. Here a block's bytes are our page formats'. As in a cache of our own, a token is attended to
before it is quantized, in its step or its chunk.

A request has windows beside its blocks (`hfkvq.serving.windows`), unless tokens are quantized one by one, as schemes by
token do: a page depends on nothing but its own tokens then, requests can share it, and a row's tail is empty between
two batches.

How many tokens are sealed follows from how many there are, so they are not counted. A block is taken when there are
tokens to seal into it. What is stored is what a `MixedKVCache` of the scheme stores, by the same code: prompts go
through a `KVStore` over requests' blocks and windows, steps through the kernels of recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from hfkvq import kernels
from hfkvq.caches import Scheme
from hfkvq.caches.attention.interface import WITHOUT_CUDNN, dense_attention, flash_takes, lower_right
from hfkvq.caches.layer_state.query_statistics import QueryStatistics
from hfkvq.caches.layer_state.smoothing import KeySmoothing
from hfkvq.caches.steps.step_buffer import plan_of_layout
from hfkvq.caches.store import KVStore, Ragged, StoreState
from hfkvq.caches.store.row_lengths import RowState, WindowSizes
from hfkvq.caches.store.state import as_bytes
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import START, sealed_count
from hfkvq.kernels.pages import SIDES, PageFormat, RunView
from hfkvq.kernels.step import StepPlan, StepState, attend_and_seal
from hfkvq.kernels.windows import tokens_due, tokens_due_by_row

ALIGNED = 128
"""Bytes of a page are a multiple of this, so that a sector of the engine is one block."""

LONG, STEP = 4096, 1024
"""Tokens of first prompts that cuDNN may take, and a multiple of which they have there."""

TAIL = 16
"""Slots of a row's tail at the least, as kernels want them."""


def refusal(scheme: Scheme, head_dim: int) -> str | None:
    """Why pages of a scheme cannot be the engine's, if they cannot."""
    if scheme.evicts:
        return "it forgets tokens, and the engine's blocks belong to tokens"
    if len(scheme.layout(head_dim, head_dim).keys.formats) > 1:
        return "its tokens have several widths, and an engine's block is of one"
    captured = scheme.limits(head_dim, head_dim).captured
    return None if captured is None else f"steps run without the host here, and {captured}"


Parts = list[tuple[tuple[int, ...], torch.dtype, int]]
"""Shape, dtype and bytes of each tensor."""


def parts_of(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> Parts:
    """Tensors that lie behind one another; each begins where 16 bytes can be read at a time."""
    return [(shape, kind, -(-torch.Size(shape).numel() * kind.itemsize // 16) * 16) for shape, kind in shapes]


def tensors_of(fmt: PageFormat, side: Any, heads: int, head_dim: int, dtype: torch.dtype) -> Parts:
    """Tensors of a page."""
    return parts_of((shape, own or dtype) for shape, own in fmt.shapes(side, heads, head_dim).values())


def page_bytes(scheme: Scheme, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a layer's page, keys and values, every scale counted."""
    formats = zip(scheme.layout(head_dim, head_dim).store.runs[0], SIDES, strict=True)
    return sum(size for fmt, side in formats for *_, size in tensors_of(fmt, side, heads, head_dim, dtype))


def tail_slots(sizes: WindowSizes) -> tuple[int, int]:
    """Slots of the tails of keys and of values: a token joins its tail before what is due leaves it."""
    keys, values = (max(TAIL, local + unit) for local, unit in zip(sizes.local, sizes.unit, strict=True))
    return keys, values


def typed(data: Tensor, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """A tensor that lies at the beginning of bytes."""
    return data[: torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)


def rows_of(
    starts_q: list[int], starts_k: list[int], blocks_for: Callable[[int], int]
) -> list[tuple[int, int, int, int, int]]:
    """Requests of a batch that have new tokens, from where these begin, and all of them; a row may have none: padding.

    Returns:
        Of each the column of its first new token, where its blocks begin in the engine's list, how many they are, its
        new tokens, and those before them.
    """
    rows, at = [], 0
    for (q, end_q), (k, end_k) in zip(pairwise(starts_q), pairwise(starts_k), strict=False):
        count = blocks_for(end_k - k) if end_k > k else 0
        if end_q > q:
            rows.append((q, at, count, end_q - q, end_k - k - (end_q - q)))
        at += count
    return rows


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


class CompressedPages(FullAttentionCacheAllocator):
    """Blocks of one scheme's pages, for layers with full attention; `pages_of` gives it the scheme.

    Attributes:
        forms: formats of pages, by layer.
        sizes: of the windows, alike in all layers.
        observes: whether queries have statistics.
        smoothing: of layers whose keys are smoothed; by it queries and keys come smoothed to `attend`.
    """

    schemes: tuple[Scheme, ...]
    config: ClassVar[Any]
    smoothing: Mapping[int, KeySmoothing] = MappingProxyType({})
    supports_block_sharing = True
    window_bytes = 0
    """Bytes that requests hold beside their blocks."""
    window_room = 0
    """The most that they can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Tokens of the indices that the engine makes: a block is as many as a page has, in every layer.
        self.block_physical_stride = self.tokens_per_page
        self._parts: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._windows: dict[int, list[Tensor]] = {}
        self._sums: dict[int, list[Tensor]] = {}
        # Flags of slots whose last step has sealed keys: i32.
        self._again = torch.empty(0, dtype=torch.int32, device="cpu")
        self._steps: Steps | None = None
        self._prompts: list[Prompt] = []
        self._first: FirstPrompts | None = None
        self.lay_out()

    def lay_out(self) -> None:
        """Takes the layouts of the layers' schemes."""
        self._scheme_of = dict(zip(self.layer_indices, self.schemes, strict=True))
        self.layouts = {x: scheme.layout(self.head_dim, self.head_dim) for x, scheme in self._scheme_of.items()}
        self.forms = {layer: layout.store for layer, layout in self.layouts.items()}
        (self.sizes,) = {WindowSizes.of(layout) for layout in self.layouts.values()}
        self.observes = any("query" in scheme.needs for scheme in self.schemes)
        self._plans: dict[tuple[int, int, int], StepPlan] = {}
        self._stores: dict[int, KVStore] = {}

    @classmethod
    def get_bytes_per_page(
        cls, num_key_value_heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int
    ) -> int:
        """Bytes of a page of keys and values, every scale counted, and what alignment adds: the mean of all layers."""
        sizes = [page_bytes(scheme, num_key_value_heads, head_dim, cache_dtype) for scheme in cls.schemes]
        return -(-sum(sizes) // (len(cls.schemes) * ALIGNED)) * ALIGNED

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Takes the engine's bytes: a layer after the other, and of a layer each tensor of all its pages in a row.

        So kernels read them like those of a cache of our own. The engine itself never looks into a block.
        """
        self.bytes_per_sector = bytes_per_sector
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        blocks = cache_tensor.numel() // self.bytes_per_block
        for layer in self.layer_indices:
            self._parts[layer], cache_tensor = self._page_views(layer, cache_tensor, blocks)

    def _page_views(self, layer: int, data: Tensor, blocks: int) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
        """Tensors of a layer's pages, keys and values, at the beginning of bytes; and the bytes behind them."""
        made = []
        for fmt, side in zip(self.forms[layer].runs[0], SIDES, strict=True):
            parts = []
            for shape, kind, size in tensors_of(fmt, side, self.num_key_value_heads, self.head_dim, self.cache_dtype):
                parts.append(typed(data, (blocks, *shape), kind))
                data = data[blocks * size :]
            made.append(parts)
        return (made[0], made[1]), data

    def settle(self, processor: Any) -> None:
        """Makes ready what waits for the engine's processor to be there; before anything is recorded."""
        # Room for every request's newest token, 16 bits each. The engine says how many where the user does not.
        shape = (self.config.max_requests_per_batch or 1, self.num_key_value_heads, TAIL, self.head_dim)
        tails = [torch.zeros(shape, dtype=self.cache_dtype, device=processor.cache.device) for _ in SIDES]
        windows = [*(tail[:, :, :0] for tail in tails), *tails]
        self._windows, self._sums = {x: windows for x in self.layer_indices}, {x: [] for x in self.layer_indices}

    @property
    def most_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.tokens_per_page

    @property
    def bits(self) -> float:
        """Bits per element of keys and values, every byte of a page counted."""
        return 8 * self.bytes_per_block / (2 * self.num_key_value_heads * self.head_dim * self.tokens_per_block)

    # Batches with prompts are told a number for each block, which the engine hands on as it is. Lists of each
    # token's place, which the engine would make, are 350,000 numbers long for 43 requests of 8,192 tokens.

    def sealed(self, tokens: int, side: int) -> int:
        """Number of sealed tokens among so many, of keys (0) or values (1)."""
        return tokens_due(max(tokens - self.sizes.sink, 0), 0, self.sizes.local[side], self.sizes.unit[side])

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a request: for what is sealed, and one at least."""
        return max(1, -(-max(self.sealed(tokens, side) for side in (0, 1)) // self.tokens_per_page))

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        return max(0, self.blocks_for(past_length + query_length) - allocated_blocks)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """A number for each block of a request."""
        tokens = past_length + query_length
        found = self._named_blocks(request_id)[: self.blocks_for(tokens)] if tokens else []
        assert not tokens or len(found) == self.blocks_for(tokens), "blocks of tokens that a batch has"
        return found

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The same, where the engine hands on nothing else: if no request of a batch has any tokens yet."""
        return [] if past_length else self.get_read_indices(request_id, past_length, query_length)

    def _named_blocks(self, request_id: str) -> list[int]:
        return self.block_table[request_id]

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copies blocks in all layers, for requests that fork."""
        device = self.cache_tensor.device
        source, dest = (
            torch.tensor(ids, device=device, dtype=torch.int64) for ids in (source_block_ids, dest_block_ids)
        )
        for part in [as_bytes(part) for sides in self._parts.values() for parts in sides for part in parts]:
            part[dest] = part[source]

    # Attention.

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, given: dict[str, Any]
    ) -> Tensor:
        """Attention of a batch's new tokens, which are stored then.

        Args:
            query: (1, Hq, n, D), of all requests one after another, after RoPE.
            key: (1, H, n, D).
            scaling: of the logits.

        Returns:
            (1, n, Hq, D).
        """
        layer = module.layer_idx
        arguments = AttentionArguments(scaling, softcap=given.get("softcap") or 0.0, sinks=given.get("s_aux"))
        if layer == self.layer_indices[0]:
            if given["block_table"] is not None:
                # Every request has one token; nothing is asked of the host, so that a graph can hold it.
                tokens = given["cu_seq_lens_k"][self.layer_type][: query.shape[2] + 1].diff().int()
                rows = self._parted(given["block_table"][self.index].clamp(min=0))
                self._prompts, self._first, self._steps = [], None, self._made(*rows, tokens)
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

    def _parted(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of each request and its windows, of the engine's table."""
        return table, torch.arange(len(table), dtype=torch.int32, device=table.device)

    def _made(self, table: Tensor, slot: Tensor, tokens: Tensor, columns: Tensor | None = None) -> Steps:
        """Steps of requests with so many tokens, the new one included, i32 (R,); 0 of rows that pad the batch."""
        sink, heads, places, before, new = self.sizes.sink, self.num_key_value_heads, [], [], []
        past = (tokens - 1).clamp(min=0)
        for length, local, unit in zip(tail_slots(self.sizes), self.sizes.local, self.sizes.unit, strict=True):
            had = tokens_due_by_row((past - sink).clamp(min=0), torch.zeros_like(past), local, unit)
            before.append(had)
            new.append(tokens_due_by_row((tokens - sink).clamp(min=0), had, local, unit))
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
        device, ends = given["cu_seq_lens_q"].device, given["cu_seq_lens_k"][self.layer_type].tolist()
        rows = rows_of(given["cu_seq_lens_q"].tolist(), ends, self.blocks_for)
        self._first, self._prompts, self._steps = None, [], None
        if not rows:
            return
        starts, listed, blocks, news, pasts = zip(*rows, strict=True)
        # Answers of `get_read_indices` for all requests: the engine hands them on if any has tokens already.
        read = given["read_index"][self.index]
        numbers = read if read.numel() else given["write_index"][self.index]
        # Few widths, each of which has plans of its own; behind a request's blocks the last one stands again.
        width = range(1 << (max(blocks) - 1).bit_length())
        found = [[at + min(j, count - 1) for j in width] for at, count in zip(listed, blocks, strict=True)]
        table, slot = self._found(numbers[torch.tensor(found, dtype=torch.int64, device="cpu").to(numbers.device)])
        first = [row for row, past in enumerate(pasts) if not past]
        alone = [row for row, (past, new) in enumerate(zip(pasts, news, strict=True)) if past and new == 1]
        later = [row for row, (past, new) in enumerate(zip(pasts, news, strict=True)) if past and new > 1]
        again = self._begin_anew(slot[first + later], 0)[len(first) :] if self.observes else slot[later]
        own = [slice(start, start + new) for start, new in zip(starts, news, strict=True)]
        if first:
            mine, counts = tuple([own[row] for row in first]), [news[row] for row in first]
            kept = [
                tokens - self.sizes.sink - sealed if (sealed := self.sealed(tokens, 0)) else tokens for tokens in counts
            ]
            left = tuple([slice(each.stop - count, each.stop) for each, count in zip(mine, kept, strict=True)])
            both = torch.tensor([counts, kept], dtype=torch.int32, device="cpu").to(device)
            ragged = Ragged([each.start for each in mine], counts, device)
            self._first = FirstPrompts(mine, slot[first].long(), table[first], ragged, left, both)
        places = slot.tolist() if later else []
        had = torch.tensor(
            [[0, x, self.sealed(x, 0), self.sealed(x, 1)] for x in pasts], dtype=torch.int32, device="cpu"
        ).to(device)
        self._prompts = [
            Prompt(
                own[row], pasts[row], places[row], table[row : row + 1, : blocks[row]], had[row, :, None],
                again[i : i + 1],
            )
            for i, row in enumerate(later)
        ]  # fmt: skip
        if alone:
            past, columns = torch.tensor(
                [[x[row] for row in alone] for x in (pasts, starts)], dtype=torch.int64, device="cpu"
            ).to(device)
            self._steps = self._made(table[alone], slot[alone], past.to(torch.int32) + 1, columns)

    def _found(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of each request and its windows, of numbers that `get_read_indices` gave the engine, (R, N)."""
        return self._parted(numbers.to(torch.int32))

    def _take_step(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, steps: Steps, arguments: AttentionArguments
    ) -> Tensor:
        """A step of requests, (R, Hq, 1, D): their tokens join the tails, attend, and what is due is sealed."""
        (keys, values), windows, sums = self._parts[layer], self._windows[layer], self._sums[layer]
        rows, blocks = steps.table.shape
        plan = self._plans.get((layer, rows, blocks))
        if plan is None:
            shape = rows, self.num_key_value_heads, self.head_dim, self.head_dim, str(self.cache_dtype)
            own = self._scheme_of[layer], self.layouts[layer]
            plan = plan_of_layout(*own, shape, (blocks,), tail_slots(self.sizes), 0)
            self._plans[layer, rows, blocks] = plan
        kernels.append(key, value, steps.counters, windows, plan.format, steps.slot)
        none, again = steps.weight, steps.again[int(plan.query == "total")] if sums else steps.again
        state = StepState(
            steps.counters, windows, [RunView(steps.table, None, keys, values)], steps.new, again, steps.due,
            flag=none, sums=sums[0] if sums else none, counts=sums[1] if sums else none, weight=steps.weight,
            query=none, rows=steps.slot,
        )  # fmt: skip
        return attend_and_seal(query, query, 1, arguments, state, plan)

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
        """Stores the first tokens of requests, and starts the statistics with their first queries."""
        needs, mean = self._scheme_of[layer].needs, None
        if "query" in needs:
            sums, counts = self._sums[layer]
            # Sums of few bits each: exact in f64.
            found = [query[0, :, own].abs().sum(1, dtype=torch.float64) for own in (*first.own, *first.left)]
            total, left = torch.stack(found).unflatten(1, (self.num_key_value_heads, -1)).mean(2).chunk(2)
            # Queries of sealed tokens count on only where all do.
            kept = 0 if "history" in needs else 1
            sums[first.slot], counts[:, first.slot] = (total, left)[kept], first.counts[kept].expand(len(counts), -1)
            mean = (total / first.counts[0, :, None, None]).float()
        count, windows = len(first.own), self._windows[layer]
        # Rows of these windows give the store their shape; what it makes instead goes to the requests' slots.
        shapes = [window[:1].expand(count, -1, -1, -1) for window in windows]
        counters = torch.zeros(4, count, dtype=torch.int32, device=key.device)
        store = self._store(layer, first.table, counters, shapes, RowState(0, 0, 0))
        store.extend_ragged(key, value, first.rows, mean)
        for window, new in zip(windows, store.windows, strict=True):
            window[first.slot] = new

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


def prompt_attention(module: Any, query: Tensor, keys: Tensor, values: Tensor, arguments: AttentionArguments) -> Tensor:
    """Causal attention of a request's newest tokens.

    PyTorch's first choice is cuDNN, which plans anew for every shape and stride: some 45 ms on an H200, as long as all
    of a prompt of 1,000 tokens takes. So cuDNN is kept for long first prompts, which are padded, so that there are few
    shapes.

    Args:
        query: (1, Hq, Q, D), of the newest Q tokens, after RoPE.
        keys: (1, H, T, D), of all.
        arguments: of the call, without a mask.

    Returns:
        (1, Q, Hq, D).
    """
    tokens = query.shape[2]
    if arguments.softcap or arguments.sinks is not None or not flash_takes(query, keys, values):
        given = {"softcap": arguments.softcap or None, "s_aux": arguments.sinks}
        return dense_attention(module, query, keys, values, arguments, **given)[0]
    asked = SDPAParams(query, keys, values, None, 0.0, True, True)
    if LONG <= tokens == keys.shape[2] and can_use_cudnn_attention(asked):
        q, k, v = (_padded(x, -(-tokens // STEP) * STEP) for x in (query, keys, values))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=arguments.scaling, enable_gqa=True)
    else:
        with WITHOUT_CUDNN:
            out = lower_right(query, keys, values, arguments.scaling)
    return out[:, :, :tokens].transpose(1, 2)


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With zeros behind it, which no token before them attends to; its strides depend on ``tokens`` alone."""
    found = x.new_empty((1, tokens, x.shape[1], x.shape[3]))
    found[:, : x.shape[2]] = x.transpose(1, 2)
    found[:, x.shape[2] :] = 0
    return found.transpose(1, 2)
