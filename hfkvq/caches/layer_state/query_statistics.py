"""Queries of a layer: statistics, by which some schemes weigh channels of keys, and the newest as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, sealed_count
from hfkvq.kernels.step import MAX_STEP, observe

from ..base import outside_inference_mode
from ..store import KVStore, Padding
from ..store.packing import Packed


def _unpacked(query: Tensor, tokens: int) -> Tensor:
    """Queries of an update; in a packed step heads of one token stand where tokens are expected (see `handle`)."""
    return query.flatten(1, 2)[:, :, None] if query.shape[2] > tokens else query


_HELD = ("sums", "counts", "shown", "newest", "real")


class QueryStatistics:
    """Mean of the magnitudes of a layer's queries in each channel, since a row's keys were last sealed.

    When a prompt is sealed, the queries of its newest tokens, which fill no page yet, stay counted: with those to come
    they are the window that the next page is judged by.

    Args:
        always: whether all queries count, since the row's first one; seals then change nothing.
        window: newest queries that are kept as they are, for a cache with a budget that may forget tokens.

    Attributes:
        sums: f64 (B, H, D), sums of magnitudes; None before the first query.
        counts: i32 (H, B), queries in them, which each head counts for itself; None before the first query.
        newest: the same of a prompt's newest queries, f64 (B, H, n, D), 0 where there is padding; None when what is due
            of it has been sealed.
        real: which of these are no padding, bool (B, n); None with them.
        shown: (B, Hq, window, D), the newest queries, not smoothed, the newest last; 0 where there was none. Taken back
            tokens leave theirs. Captured steps write to it, so that it stays where it is; None before the first query.
        scaling: factor on the logits of the newest attention call.
        softcap: of the same call, or 0.
    """

    def __init__(self, always: bool = False, window: int = 0) -> None:
        self.always, self.window = always, window
        self.scaling, self.softcap = 1.0, 0.0
        self.forget()

    def forget(self) -> None:
        self.sums: Tensor | None = None
        self.counts: Tensor | None = None
        self.shown: Tensor | None = None
        self.newest: Tensor | None = None
        self.real: Tensor | None = None

    @outside_inference_mode
    def note(self, query: Tensor, tokens: int, arguments: AttentionArguments) -> None:
        """Keeps the newest queries (B, Hq, Q, D), after RoPE, not smoothed, of an update of so many tokens.

        Only if they are to be kept; a captured step does so, too.
        """
        if not self.window or not tokens:
            return
        query = _unpacked(query, tokens)
        self.scaling, self.softcap = arguments.scaling, arguments.softcap
        newest = query.detach()[:, :, -self.window :]
        shape = (*query.shape[:2], self.window, query.shape[3])
        if self.shown is None or self.shown.shape != shape:
            self.shown = query.new_zeros(shape)
        kept = self.shown[:, :, newest.shape[2] :]
        self.shown.copy_(torch.cat([kept, newest], 2) if kept.shape[2] else newest)

    def observe(self, query: Tensor, tokens: int, heads: int, padding: Padding | None, waiting: int) -> None:
        """Adds queries (B, Hq, Q, D) of the newest of an update's tokens; ``waiting`` tokens may wait to be sealed."""
        query = _unpacked(query, tokens)
        sums, counts = self.sums, self.counts
        if padding is None and sums is not None and counts is not None and query.shape[2] <= MAX_STEP:
            observe(query.detach() if query.requires_grad else query, sums, counts)
            self.newest = self.real = None
        else:
            self._observe(query, tokens, heads, padding, waiting)

    @outside_inference_mode
    def _observe(self, query: Tensor, tokens: int, heads: int, padding: Padding | None, waiting: int) -> None:
        sums, counts = self.sums, self.counts
        batch, _, queries, _ = query.shape
        query = query.detach()
        real = torch.ones(batch, queries, dtype=torch.bool, device=query.device)
        if padding is not None:
            # The newest queries may be all there are.
            lead = padding.lead.to(query.device)
            column = (torch.arange(queries, device=query.device) + tokens - queries).clamp(min=0)
            real = column >= lead[:, None]
            if padding.source is not None:
                real = real & (padding.source.to(query.device)[:, column] == column)
            # Queries of padding may be NaN.
            query = query.masked_fill(~real[:, None, :, None], 0)
        # Sums of f32 would depend on where padding stands; these are of few bits each, and exact.
        total = query.abs().sum(2, dtype=torch.float64).unflatten(1, (heads, -1)).mean(2)
        count = real.sum(1, dtype=torch.int32)
        if not self.always:
            newest, shown = query[:, :, -waiting:], real[:, -waiting:]
            magnitude = newest.abs().double() * shown[:, None, :, None]
            self.newest, self.real = magnitude.unflatten(1, (heads, -1)).mean(2), shown
        if sums is None or counts is None:
            # Each head counts for itself, as in a step without the host.
            self.sums, self.counts = total, count.expand(heads, -1).contiguous()
        else:
            self.sums, self.counts = sums + total, counts + count

    def mean(self) -> Tensor | None:
        """Mean in each channel: f32 (B, H, D)."""
        if self.sums is None or self.counts is None:
            return None
        count = self.counts[0, :, None, None]
        # A row that has shown no query since its last seal weighs its channels alike.
        return torch.where(count > 0, self.sums / count.clamp(min=1), 1.0).float()

    def pack(self) -> Packed:
        numbers = {} if self.shown is None else {"attention": [self.scaling, self.softcap]}
        return numbers, {name: tensor for name in _HELD if (tensor := getattr(self, name)) is not None}

    @outside_inference_mode
    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        for name in _HELD:
            setattr(self, name, tensors.get(name) if self.window or name != "shown" else None)
        if self.shown is not None:
            self.scaling, self.softcap = map(float, found["attention"])

    @outside_inference_mode
    def forget_sealed(self, store: KVStore, before: Tensor) -> None:
        """Starts over in rows whose keys were sealed: a row's statistics must not depend on its batch mates.

        Args:
            before: i32, sealed keys of each of the store's rows before; heads that are rows of their own are alike.
        """
        if self.sums is None or self.counts is None or self.always:
            return
        fold, now = len(before) // self.sums.shape[0], sealed_count(store.counters, "keys")
        sealed = (now > before)[::fold]
        if self.newest is None or self.real is None:
            self.sums = self.sums.masked_fill(sealed[:, None, None], 0.0)
            self.counts = self.counts.masked_fill(sealed, 0)
            return
        waiting = (store.counters[LENGTH] - store.format.sink - now)[::fold, None]
        real = self.real & (self.real.flip(1).cumsum(1).flip(1) <= waiting)
        left = (self.newest * real[:, None, :, None]).sum(2)
        self.sums = torch.where(sealed[:, None, None], left, self.sums)
        self.counts = torch.where(sealed, real.sum(1, dtype=torch.int32), self.counts)
        self.newest = self.real = None

    def take_rows(self, rows: Tensor) -> None:
        if self.sums is not None and self.counts is not None:
            rows = rows.to(self.sums.device)
            self.sums, self.counts = self.sums[rows], self.counts[:, rows]
        if self.newest is not None and self.real is not None:
            self.newest, self.real = self.newest[rows], self.real[rows]
        if self.shown is not None:
            shown = self.shown[rows.to(self.shown.device)]
            # Captured steps write to these: beams take turns in every step.
            self.shown = self.shown.copy_(shown) if shown.shape == self.shown.shape else shown

    def tensors(self) -> list[Tensor]:
        return [tensor for name in _HELD if (tensor := getattr(self, name)) is not None]

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> QueryStatistics:
        """Independent tensors: steps add to them in place."""
        new = copy.copy(self)
        for name, tensor in self.pack()[1].items():
            setattr(new, name, tensor.clone())
        return new
