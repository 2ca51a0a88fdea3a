"""Blocks within a budget of bytes: 16 bits while there is room, then pages of all requests step down together.

The rungs differ in their pages alone. Sink, windows and page size are the same on each, so a request's block numbers
and its slot hold the same tokens on every rung. Where a request would have to wait for blocks or a slot, the pages of
all requests are quantized anew between two batches, a layer at a time. The bytes that come free are blocks and slots.

The pool is one tensor. Its layers lie one behind another, packed against its beginning, on every second rung against
its end. A step down moves each layer towards the other end, into bytes that no layer has any more: nothing is
allocated for it but the pages at work, and what each rung holds is known beforehand (`stages`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.caches import Scheme, get_scheme
from hfkvq.caches.base import warn_once
from hfkvq.caches.compile import compile_rungs
from hfkvq.caches.layer_state.smoothing import KeySmoothing
from hfkvq.caches.layers.memory import format_bytes
from hfkvq.caches.schemes.base import Layout, SideLayout
from hfkvq.caches.schemes.kivi import Kivi
from hfkvq.caches.store.kvstore import write_pages
from hfkvq.caches.store.relaid import basis_change
from hfkvq.caches.store.state import as_bytes
from hfkvq.kernels.hadamard import saturated
from hfkvq.kernels.pages import SIDES, PageFormat

from .pages import page_bytes
from .windows import MOST_SLOTS, WindowedPages, window_shapes

logger = logging.getLogger("hfkvq")

SCRATCH = 64
"""Part of the budget that the pages at work in a step down may take."""

COPIES = 8
"""Copies in f32, at the most, of the pages at work: dequantized, unpacked, turned, sealed."""

PADDING = 2
"""Blocks of every layer that belong to no request: rows that pad a batch read and write them."""

Rungs = tuple[tuple[Scheme, ...], ...]
"""Schemes of all layers on each rung, the widest first."""


@dataclass(frozen=True, kw_only=True)
class Unquantized(Kivi):
    """16-bit pages behind the windows of KIVI."""

    name: ClassVar[str] = ""

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """KIVI's, with pages of the model's own dtype and no rotation."""
        own, page = super().layout(key_dim, value_dim), PageFormat(16, "token", 1, self.local_length)
        keys, values = (SideLayout((page,), side.local, side.unit) for side in (own.keys, own.values))
        return Layout(keys, values, own.sink)


def ladder(page: int = 128) -> tuple[Scheme, ...]:
    """Schemes of the rungs: 16 bits, best-4.3, and best-2.5 with values that leave their window one by one.

    Args:
        page: tokens of a page, and of the windows.
    """
    windows: dict[str, Any] = {"local_length": page, "key_local_length": page}
    best = get_scheme("best-4.3", **windows, group_size=page)
    return (
        Unquantized(**windows, group_size=page, sink_length=best.knobs()["sink_length"]),
        best,
        get_scheme("best-2.5", **windows, page_size=page, value_unit=1),
    )


class Stage(NamedTuple):
    """Blocks and slots of a pool on a rung.

    Attributes:
        blocks: for requests.
        slots: for requests.
        layers: bytes of each layer, those of `PADDING` and slot 0 included.
    """

    blocks: int
    slots: int
    layers: tuple[int, ...]

    def places(self, rung: int, room: int) -> list[slice]:
        """Bytes of each layer in a pool of ``room`` bytes."""
        at, found = 0 if rung % 2 == 0 else room - sum(self.layers), []
        for size in self.layers:
            found.append(slice(at, at + size))
            at += size
        return found


class Shape(NamedTuple):
    """Shape of a pool.

    Attributes:
        dtype: of the model.
        most: requests at a time, at the most.
        usual: tokens of a usual request, by which slots are counted; the last rung has room for one.
    """

    rungs: Rungs
    heads: int
    head_dim: int
    dtype: torch.dtype
    most: int
    usual: int

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.rungs[0][0].layout(self.head_dim, self.head_dim).keys.formats[0].page_size

    def at_work(self, memory: int) -> int:
        """Tokens that are quantized anew at a time in a pool of this budget: whole pages, two at least."""
        token = COPIES * 4 * self.heads * self.head_dim
        return max(2, memory // SCRATCH // token // self.page) * self.page

    def scratch(self, memory: int) -> int:
        """Most bytes that the tokens at work take."""
        return COPIES * 4 * self.heads * self.head_dim * self.at_work(memory)

    def room(self, memory: int) -> int:
        """Bytes of the pool itself: the budget without the tokens at work, and without block and slot numbers."""
        return (memory - self.scratch(memory) - memory // 4096 - 16384) // 16 * 16

    def stages(self, memory: int) -> list[Stage] | None:
        """Stages of all rungs; None if a rung has no place for a block, or the last for a usual request.

        A rung that another one follows leaves room for one more layer. In a step down, a layer's new place is one that
        only moved layers had: the new layers up to it and the old ones from it on fit side by side.
        """
        room, found = self.room(memory), list[Stage]()
        for rung, schemes in enumerate(self.rungs):
            pages = [page_bytes(scheme, self.heads, self.head_dim, self.dtype) for scheme in schemes]
            last = rung + 1 == len(self.rungs)
            # Bytes for the windows and pages of so many layers, and those of a block's pages.
            limits = [(room, len(pages) + (not last), sum(pages) + (not last) * max(pages))]
            if found:
                old = found[-1].layers
                order = range(len(pages)) if rung % 2 == 0 else range(len(pages) - 1, -1, -1)
                for count, layer in enumerate(order, 1):
                    left = old[layer:] if rung % 2 == 0 else old[: layer + 1]
                    limits.append((room - sum(left), count, sum(pages[i] for i in order[:count])))
            # Slots for as many usual requests as fit, which have bytes in windows and in blocks.
            one, each = self._windows(schemes, 0), -(-self.usual // self.page)
            fit = min((size - count * one - PADDING * x) // (count * one + each * x) for size, count, x in limits)
            least = found[-1] if found else Stage(1, 1, ())
            for slots in range(max(least.slots, min(self.most, fit)), least.slots - 1, -1):
                windows = self._windows(schemes, slots)
                blocks = min((size - count * windows) // page for size, count, page in limits) - PADDING
                if blocks >= least.blocks:
                    found.append(Stage(blocks, slots, tuple(windows + (blocks + PADDING) * page for page in pages)))
                    break
            else:
                return None
        return found if found[-1].blocks * self.page >= self.usual else None

    def _windows(self, schemes: tuple[Scheme, ...], slots: int) -> int:
        """Bytes of a layer's windows, slot 0 included."""
        return sum(size for *_, size in window_shapes(schemes, slots + 1, self.heads, self.head_dim, self.dtype))

    def checked(self, memory: int) -> list[Stage]:
        """The stages of a budget.

        Raises:
            ValueError: a usual request does not fit on the last rung; the least budget is named.
        """
        found = self.stages(memory)
        if found is not None:
            return found
        low, high = memory, 2 * memory
        while self.stages(high) is None:
            low, high = high, 2 * high
        while high - low > 2**16:
            middle = (low + high) // 2
            low, high = (middle, high) if self.stages(middle) is None else (low, middle)
        raise ValueError(
            f"memory: got {format_bytes(memory)}, allowed {format_bytes(high + 2**14)} or more, which a request of "
            f"{self.usual} tokens needs in the narrowest pages; give more, or say with request_tokens that requests "
            "are shorter."
        )


class LadderPages(WindowedPages):
    """Blocks and slots that step down together.

    Attributes:
        rung: where all requests stand.
        smoothings: of the keys of each rung, by layer.
    """

    rungs: ClassVar[Rungs]
    memory: ClassVar[int]
    rung = 0
    smoothings: Sequence[dict[int, KeySmoothing]] = ()

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Makes a pool of its own, in place of the engine's bytes, which are few."""
        most = min(MOST_SLOTS, self.config.max_requests_per_batch or MOST_SLOTS)
        shape = Shape(self.rungs, self.num_key_value_heads, self.head_dim, self.cache_dtype, most, self.usual)
        self.stages, self.at_work = shape.checked(self.memory), shape.at_work(self.memory)
        self.scratch = shape.scratch(self.memory)
        self.config.max_requests_per_batch = self.stages[-1].slots
        self._bytes = torch.zeros(shape.room(self.memory), dtype=torch.uint8, device=cache_tensor.device)
        # Mean magnitudes of the newest prompts' queries, f32 (H, D), by layer: they weigh key channels.
        self._queries: dict[int, Tensor] = {}
        self._stand_on(0)
        size = self.bytes_per_block
        self._after_cache_tensor_init(self.num_blocks * size, size, self._bytes, pool)
        pool.num_sectors = self.num_blocks
        pool.reset()

    def compile_ladder(self, config: Any) -> None:
        """Has a thread compile what a model's requests launch on the rungs to come, before they do."""
        shape = 1, self.num_key_value_heads, 0, self.head_dim
        like = torch.empty(shape, dtype=self.cache_dtype, device=self._bytes.device)
        compile_rungs(config, (x for rung in self.rungs[1:] for x in rung), like, later=True, slots=True)

    def _stand_on(self, rung: int) -> None:
        """Lays the pool out for a rung, in views of its own; nothing is written."""
        stage = self.stages[rung]
        self.rung, self.schemes = rung, self.rungs[rung]
        self.lay_out()
        pages = [page_bytes(x, self.num_key_value_heads, self.head_dim, self.cache_dtype) for x in self.schemes]
        self.bytes_per_block = self.bytes_per_sector = sum(pages)
        self.num_blocks, self.window_room = stage.blocks, (stage.slots + 1) * self.bytes_per_slot
        self._parts, self._windows, self._sums = {}, {}, {}
        for layer, place in zip(self.layer_indices, stage.places(rung, len(self._bytes)), strict=True):
            found, rest = self._window_views(self._bytes[place], stage.slots + 1)
            self._windows[layer], self._sums[layer] = found[:4], found[4:]
            self._parts[layer], _ = self._page_views(layer, rest, stage.blocks + PADDING)
        self._again = torch.zeros(stage.slots + 1, dtype=torch.int32, device=self._bytes.device)
        taken = set(self.slots.values())
        self._free = [slot for slot in range(stage.slots, 0, -1) if slot not in taken]
        self.smoothing = self.smoothings[rung] if self.smoothings else {}

    @property
    def most_tokens(self) -> int:
        """Tokens that all blocks hold on the last rung."""
        return self.stages[-1].blocks * self.tokens_per_page

    def settle(self, processor: Any) -> None:
        """Has the scheduler ask for a step down before it lets a request wait."""
        super().settle(processor)
        self._processor, cache, scheduler = processor, processor.cache, processor.scheduler
        cache.bytes_per_sector, cache.max_tokens_read = self.bytes_per_block, self.most_tokens
        # The engine's own bytes are free again.
        cache.cache_tensor = self._bytes
        store, meets = cache.can_store_request_tokens, scheduler._try_to_meet_safety_margin

        def store_or_step_down(state: Any, new: int, dry_run: bool = False) -> bool:
            found, name = store(state, new, dry_run), state.request_id
            # Warm-up asks for all blocks, in the name of no request.
            known = not dry_run and (name in scheduler.active_requests or name in scheduler.waiting_requests)
            # A step down can help a request that does not fit if it has a slot, or the next rung has more.
            while not found and known:
                more = self.stages[min(self.rung + 1, len(self.stages) - 1)].slots > self.stages[self.rung].slots
                if not (more or self._free or name in self.slots) or not self.step_down():
                    break
                found = store(state, new)
            return found

        def meet_or_step_down() -> bool:
            if self.rung and not self.block_table and not self.slots:
                # No request has a block or a slot: the next ones begin with 16 bits again.
                with self._between_batches():
                    self._bytes.zero_()
                    self._stand_on(0)
            found = meets()
            active = scheduler.active_requests.values()
            waits = scheduler.waiting_requests and len(active) < scheduler.max_requests_per_batch
            # The rest of a prompt waits as well while few blocks are free.
            waits = waits or any(state.remaining_prefill_tokens for state in active)
            while not found and waits and self.step_down():
                found = meets()
            return found

        cache.can_store_request_tokens = store_or_step_down
        scheduler._try_to_meet_safety_margin = meet_or_step_down

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        """Changes of the pool take place in it: no batch runs, graphs are gone, and the engine hears of the blocks."""
        before, io = self.num_blocks, self._processor.inputs_and_outputs
        if io.compute_stream is not None:
            io.compute_stream.synchronize()
        for each in [pair.device_io for pair in io.io_pairs] if hasattr(io, "io_pairs") else [io]:
            each.graphs = type(each.graphs)()
        with torch.no_grad(), torch.cuda.stream(io.compute_stream):
            yield
        cache, pool = self._processor.cache, self.pool
        cache.num_sectors = pool.num_sectors = self.num_blocks
        cache.bytes_per_sector = self.bytes_per_block
        if self.block_table:
            pool.free_sectors.extend(range(before + PADDING, self.num_blocks + PADDING))
        else:
            pool.reset()
        logger.info(
            "memory: %.2f bits per element now, blocks for %d tokens and windows for %d requests.",
            self.bits, self.num_blocks * self.tokens_per_page, self.stages[self.rung].slots,
        )  # fmt: skip

    def step_down(self) -> bool:
        """Takes the pages of all requests a rung down; False on the last one, and where the device has no memory."""
        if self.rung + 1 == len(self.rungs):
            return False
        try:
            torch.empty(self.scratch, dtype=torch.uint8, device=self._bytes.device)
        except torch.OutOfMemoryError:
            # The pool has not changed yet, and requests wait as on the last rung.
            warn_once(f"memory: a step down needs {format_bytes(self.scratch)} that the device has not; requests wait.")
            return False
        with self._between_batches():
            old = copy.copy(self)
            self._stand_on(self.rung + 1)
            places = self.stages[self.rung].places(self.rung, len(self._bytes))
            moves = list(zip(self.layer_indices, places, strict=True))
            for layer, place in moves if self.rung % 2 == 0 else reversed(moves):
                # Kernels read pages that are not full, and bytes of other formats may be NaN there.
                self._bytes[place].zero_()
                self._move(layer, old)
        return True

    def _move(self, layer: int, old: LadderPages) -> None:
        """Fills a layer's windows and pages from those of ``old``, in the basis and the format of its scheme."""
        before, after = old.smoothing.get(layer), self.smoothing.get(layer)
        raw, smooth = before and before.raw, after and after.keys
        layouts, device = (old.layouts[layer], self.layouts[layer]), self._bytes.device
        slots = torch.tensor(sorted(self.slots.values()), dtype=torch.int64, device=device)
        taken = sorted({block for blocks in self.block_table.values() for block in blocks})
        blocks = torch.tensor(taken, dtype=torch.int64, device=device)
        for at, side in enumerate(SIDES):
            change = basis_change(*layouts, side, None if at else raw, None if at else smooth)
            for window in (at, 2 + at):
                mine, theirs = self._windows[layer][window], old._windows[layer][window]
                for ids in slots.split(max(1, self.at_work // max(1, mine.shape[2]))):
                    mine[ids] = theirs[ids] if change is None else change(theirs[ids])
            fmt, new = (held.forms[layer].runs[0][at] for held in (old, self))
            for ids in blocks.split(self.at_work // self.tokens_per_page):
                parts = [as_bytes(part)[ids].view(part.dtype) for part in old._parts[layer][at]]
                if change is None and fmt == new:
                    for mine, part in zip(self._parts[layer][at], parts, strict=True):
                        as_bytes(mine)[ids] = as_bytes(part)
                    continue
                tokens = saturated(kernels.dequantize_pages(parts, fmt, side, self.head_dim), self.cache_dtype)
                count, page = len(ids), self.tokens_per_page
                none = torch.zeros(count, dtype=torch.int32, device=device)
                index = torch.arange(page, dtype=torch.int32, device=device).expand(count, -1).contiguous()
                weights = None if at else self._queries.get(layer)
                write_pages(
                    (self._parts[layer][at], ids[:, None].to(torch.int32), none, none + page), new, side,
                    tokens if change is None else change(tokens), index, layouts[1], self._scheme_of[layer],
                    None if weights is None else weights.expand(count, -1, -1).contiguous(),
                )  # fmt: skip

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, given: dict[str, Any]
    ) -> Tensor:
        layer = module.layer_idx
        if given["block_table"] is None and self.rung + 1 < len(self.rungs):
            # Requests have no statistics of their own before the last rung.
            asked = query[0].unflatten(0, (self.num_key_value_heads, -1))
            found = torch.linalg.vector_norm(asked, 1, dim=(1, 2), dtype=torch.float32)
            found /= asked.shape[1] * asked.shape[2]
            smoothing = self.smoothing.get(layer)
            self._queries[layer] = found if smoothing is None else found * smoothing.vectors[1]
        return super().attend(module, query, key, value, scaling, given)
