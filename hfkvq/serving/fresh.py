"""Requests whose first tokens come in a batch: what `KVStore.extend` does for one of them, for all in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.caches import Scheme
from hfkvq.caches.layers.plan import sealing_rules
from hfkvq.caches.scheme import Layout
from hfkvq.kernels.pages import SIDES


class Fresh(NamedTuple):
    """P requests that have nothing yet, the same in all layers.

    Attributes:
        own: where each one's tokens stand in the batch.
        slot: i64 (P,), their windows.
        table: i32 (P, N), their blocks.
        counts: i32 (2, P), keys and values that are sealed at once.
        columns: of what is sealed, i32 (P, m) for keys and for values, and of each window, i64 (P, W).
        ranges: whose queries are summed, i32 (3, 2 * P): row 0, the first token of each request and the one behind
            its last; and the same of those that are not sealed then.
        most: tokens of the longest.
        lengths: i32 (2, P), tokens, and those that are not sealed then.
    """

    own: tuple[slice, ...]
    slot: Tensor
    table: Tensor
    counts: Tensor
    columns: tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]
    ranges: Tensor
    most: int
    lengths: Tensor

    @classmethod
    def of(
        cls,
        own: Sequence[slice],
        sealed: Sequence[tuple[int, int]],
        slot: Tensor,
        table: Tensor,
        windows: Sequence[int],
        sink: int,
    ) -> Fresh:
        """Of requests whose keys and values are sealed as ``sealed`` says.

        Args:
            own: where their tokens stand.
            sealed: keys and values of each that are sealed.
            slot: (P,), any integers.
            table: i32 (P, N).
            windows: tokens of the sink, for keys and values, and of the tails of either.
            sink: tokens of the sink.
        """
        device = table.device
        numbers = [[each.start, each.stop - each.start, *held] for each, held in zip(own, sealed, strict=True)]
        # (4, P, 1)
        start, length, *counts = torch.tensor(numbers, dtype=torch.int32).to(device).T[:, :, None].unbind()
        last = start + length - 1

        def ahead(count: int, first: int) -> Tensor:
            step = torch.arange(first, first + count, dtype=torch.int32, device=device)
            return torch.minimum(start + step, last)

        due = [ahead(max(held[at] for held in sealed), sink) for at in (0, 1)]
        places = [ahead(size, 0).long() for size in windows[:2]]
        rest = length - sink - 1
        for size in windows[2:]:
            slots = torch.arange(size, dtype=torch.int32, device=device)
            # The newest token that stands in each slot; slots without one hold anything.
            behind = (rest - (rest - slots) % size).clamp(min=0)
            places.append(torch.minimum(start + sink + behind, last).long())
        left = torch.where(counts[0] > 0, length - sink - counts[0], length)
        first, stop = torch.cat([start, last + 1 - left]), (last + 1).repeat(2, 1)
        ranges = torch.stack([torch.zeros_like(first), first, stop])[:, :, 0]
        return cls(
            tuple(own), slot.long(), table, torch.cat(counts, 1).T.contiguous(), ((due[0], due[1]), tuple(places)),
            ranges.contiguous(), max(each.stop - each.start for each in own),
            torch.cat([length, left], 1).T.contiguous(),
        )  # fmt: skip

    def store(
        self,
        tokens: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        windows: Sequence[Tensor],
        layout: Layout,
        scheme: Scheme,
        q_abs: Tensor | None,
    ) -> None:
        """Seals what is due of a layer's tokens, and puts the rest into the windows.

        Args:
            tokens: keys and values of the batch, (1, H, n, D), not rotated.
            parts: tensors of the pages, of keys and of values.
            windows: sink keys, sink values, tail keys, tail values, of all slots.
            layout: of the layer.
            scheme: of the layer.
            q_abs: f32 (P, H, D), see `Scheme.channel_bits`; None without.
        """
        form, none, count = layout.store, torch.zeros_like(self.counts[0]), len(self.own)
        rule, _ = sealing_rules(scheme, layout, tokens[0].shape[-1])
        sides = (layout.keys, form.rotate_keys), (layout.values, form.rotate_values)
        for at, (x, (own, rotation)) in enumerate(zip(tokens, sides, strict=True)):
            x, index, new = kernels.hadamard(x, rotation), self.columns[0][at], self.counts[at]
            if index.shape[1]:
                pages = parts[at], self.table, none, new, x.expand(count, -1, -1, -1), index
                kernels.seal_side(*pages, form.runs[0][at], SIDES[at], rule, q_abs, own.balance)
            for window, columns in ((windows[at], self.columns[1][at]), (windows[2 + at], self.columns[1][2 + at])):
                window[self.slot] = x[0][:, columns].transpose(0, 1)

    def observe(self, query: Tensor, heads: int, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics of queries, as `QueryStatistics` has them.

        Args:
            query: (1, Hq, n, D), of the batch.
            heads: KV heads.
            scheme: of the layer.

        Returns:
            Their means, f32 (P, H, D), by which pages are sealed now; and sums, f64 (P, H, D), and counts, i32 (P,), as
            they are then.
        """
        kept = 0 if "history" in scheme.needs else 1
        row, first, stop = self.ranges.unbind()
        sums = kernels.query_sums(query, row, first, stop, self.most, heads, "signs" in scheme.needs)
        total, last = sums.chunk(2)
        return (total / self.lengths[0, :, None, None]).float(), (total, last)[kept], self.lengths[kept]
