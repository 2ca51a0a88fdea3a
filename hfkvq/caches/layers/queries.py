"""Statistics of queries, by which some schemes weigh the channels of keys when they are sealed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.decode import sealed_count
from hfkvq.kernels.step import MAX_STEP, observe
from hfkvq.kernels.step_tensors import Observing

from ..lasting import lasting
from ..store import KVStore, Padding


class QueryStatistics:
    """Mean magnitude of a layer's queries in each channel, since a row's keys were last sealed.

    Attributes:
        sums: f64 (B, H, D), sums of magnitudes; None before the first query.
        counts: i32 (H, B), queries in them, which each head counts for itself; None before the first query.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.counts: Tensor | None = None

    def forget(self) -> None:
        """Forgets all queries."""
        self.sums = self.counts = None

    def observing(self) -> Observing | None:
        """Where a step adds its queries itself; None before the first query."""
        return None if self.sums is None or self.counts is None else Observing(self.sums, self.counts)

    def observe(self, query: Tensor, tokens: int, heads: int, padding: Padding | None) -> None:
        """Adds queries.

        Args:
            query: (B, Hq, Q, D), those of the newest tokens.
            tokens: of the update that they belong to.
            heads: KV heads.
            padding: among these tokens, or None.
        """
        if query.shape[2] > tokens:
            # A packed step: query heads of one token stand where tokens are expected (see `handle`).
            query = query.flatten(1, 2)[:, :, None]
        sums, counts = self.sums, self.counts
        if padding is None and sums is not None and counts is not None and query.shape[2] <= MAX_STEP:
            observe(query.detach() if query.requires_grad else query, sums, counts)
        else:
            self._observe(query, tokens, heads, padding)

    @lasting
    def _observe(self, query: Tensor, tokens: int, heads: int, padding: Padding | None) -> None:
        sums, counts = self.sums, self.counts
        # Sums of f32 would depend on where padding stands; these are of few bits each.
        magnitude = query.detach().abs().double()
        batch, _, queries, _ = query.shape
        real = torch.ones(batch, queries, dtype=torch.bool, device=query.device)
        if padding is not None:
            # The newest queries may be all there are.
            column = (torch.arange(queries, device=query.device) + tokens - queries).clamp(min=0)
            real = column >= padding.lead.to(query.device)[:, None]
            if padding.source is not None:
                real = real & (padding.source.to(query.device)[:, column] == column)
            magnitude = magnitude * real[:, None, :, None]
        total, count = magnitude.sum(2).unflatten(1, (heads, -1)).mean(2), real.sum(1, dtype=torch.int32)
        if sums is None or counts is None:
            # Each head counts for itself, as in a step without the host.
            self.sums, self.counts = total, count.expand(heads, -1).contiguous()
        else:
            self.sums, self.counts = sums + total, counts + count

    def mean(self) -> Tensor | None:
        """Mean magnitude in each channel: f32 (B, H, D)."""
        if self.sums is None or self.counts is None:
            return None
        count = self.counts[0, :, None, None]
        # A row that has shown no query since its last seal weighs its channels alike.
        return torch.where(count > 0, self.sums / count.clamp(min=1), 1.0).float()

    @lasting
    def forget_sealed(self, store: KVStore, before: Tensor) -> None:
        """Starts over in rows whose keys were sealed: a row's statistics must not depend on its batch mates.

        Args:
            store: after sealing.
            before: i32, sealed keys of each of the store's rows before; heads that are rows of their own are alike.
        """
        if self.sums is not None and self.counts is not None:
            sealed = (sealed_count(store.counters, "keys") > before)[:: len(before) // self.sums.shape[0]]
            self.sums = self.sums.masked_fill(sealed[:, None, None], 0.0)
            self.counts = self.counts.masked_fill(sealed, 0)

    def take_rows(self, rows: Tensor) -> None:
        """Row b becomes what row ``rows[b]`` was."""
        if self.sums is not None and self.counts is not None:
            rows = rows.to(self.sums.device)
            self.sums, self.counts = self.sums[rows], self.counts[:, rows]

    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [tensor for tensor in (self.sums, self.counts) if tensor is not None]

    @lasting
    def __deepcopy__(self, memo: dict[int, Any]) -> QueryStatistics:
        """Independent tensors: steps add to them in place."""
        new = copy.copy(self)
        new.sums, new.counts = (None if x is None else x.clone() for x in (self.sums, self.counts))
        return new
