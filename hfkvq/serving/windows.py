"""Slots of schemes whose tokens wait in 16 bits: windows that requests of the engine have beside their blocks.

A slot is a sink and a tail, keys and values, in every layer, and the statistics of queries where a scheme has some. It
is a request's from its first block to the end, and lies in the engine's own bytes, which hold fewer blocks then. Its
number comes to the device with the request's blocks: in a step as the last column of the engine's block table, else in
the numbers of blocks, which are ours alone. Slot 0 belongs to rows that pad a batch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hfkvq.caches import Scheme
from hfkvq.caches.store.row_lengths import WindowSizes

from .pages import CompressedPages, Parts, parts_of, tail_slots, typed

MOST_SLOTS = 1024
"""Slots, where the user does not say how many requests a batch has."""

USUAL_TOKENS = 4096
"""Tokens of a request, by default: there are as many slots as requests of this length fit."""


def window_shapes(schemes: tuple[Scheme, ...], slots: int, heads: int, dim: int, dtype: torch.dtype) -> Parts:
    """Windows of a layer: sink keys, sink values, tail keys, tail values; sums and counts of queries, if any."""
    sizes = WindowSizes.of(schemes[0].layout(dim, dim))
    found = [((slots, heads, length, dim), dtype) for length in (sizes.sink, sizes.sink, *tail_slots(sizes))]
    if any("query" in scheme.needs for scheme in schemes):
        found += [((slots, heads, dim), torch.float64), ((heads, slots), torch.int32)]
    return parts_of(found)


class WindowedPages(CompressedPages):
    """Blocks of pages and slots of windows.

    Attributes:
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

    # Memory.

    def _window_shapes(self, slots: int) -> Parts:
        """Windows of a layer."""
        return window_shapes(self.schemes, slots, self.num_key_value_heads, self.head_dim, self.cache_dtype)

    def _window_views(self, data: Tensor, slots: int) -> tuple[list[Tensor], Tensor]:
        """Windows of a layer at the beginning of bytes; and the bytes behind them."""
        found = []
        for shape, kind, size in self._window_shapes(slots):
            found.append(typed(data, shape, kind))
            data = data[size:]
        return found, data

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot, in all layers."""
        return len(self.layer_indices) * sum(size for *_, size in self._window_shapes(1))

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

    def _parted(self, table: Tensor) -> tuple[Tensor, Tensor]:
        return table[:, :-1].contiguous(), table[:, -1].contiguous()

    def _found(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        slots = len(self._again)
        return (numbers // slots).to(torch.int32), (numbers[:, 0] % slots).to(torch.int32)
