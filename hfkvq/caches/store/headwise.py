"""A store in which every KV head of a row has tokens of its own: heads are folded into rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH
from hfkvq.kernels.masks import fold_mask
from hfkvq.kernels.pages import Side

from ..schemes.base import Layout, Scheme
from . import EVICTING_GROWTH, KVStore, Padding
from .routing import ColumnTags


class HeadwiseStore(KVStore):
    """`KVStore` of B*H rows with one head each; row ``b*H + h`` is KV head h of the layer's row b.

    What comes in and goes out has the layer's shapes (B, H, ...); counters, tables, windows and `reorder`'s pages are
    folded. Tokens seal as in any store until a requantization gives each row tokens and tiers of its own. Arguments are
    those of `StoreView`.
    """

    growth = EVICTING_GROWTH

    def __init__(
        self, layout: Layout, scheme: Scheme, keys: Tensor, values: Tensor, capacity: int | None = None
    ) -> None:
        self.fold = keys.shape[1]
        super().__init__(layout, scheme, self.folded(keys), self.folded(values), capacity)

    def folded(self, x: Tensor) -> Tensor:
        """(B, H*n, ...) as (B*H, n, ...)."""
        rows, heads, *rest = x.shape
        return x.reshape(rows * self.fold, heads // self.fold, *rest)

    def unfolded(self, x: Tensor) -> Tensor:
        """(B*H, n, ...) as (B, H*n, ...)."""
        rows, heads, *rest = x.shape
        return x.reshape(rows // self.fold, heads * self.fold, *rest)

    def folded_padding(self, padding: Padding | None) -> Padding | None:
        """Padding of the layer's rows, for each of their heads."""
        if padding is None:
            return None
        source = None if padding.source is None else padding.source.repeat_interleave(self.fold, 0)
        return Padding(padding.lead.repeat_interleave(self.fold), padding.amounts, source)

    def rows_of(self, rows: Tensor) -> Tensor:
        """Folded rows of the layer's rows: i64 (B',) to (B'*H,)."""
        heads = torch.arange(self.fold, device=rows.device)
        return (rows[:, None] * self.fold + heads).flatten()

    @property
    def row_lengths(self) -> Tensor:
        """i32 (B,): tokens that each of the layer's rows holds (the same in all heads)."""
        return self.counters[LENGTH, :: self.fold]

    def push(self, keys: Tensor, values: Tensor, padding: Padding | None = None) -> None:
        """See `KVStore.push`."""
        super().push(self.folded(keys), self.folded(values), self.folded_padding(padding))

    def extend(
        self,
        keys: Tensor,
        values: Tensor,
        padding: Padding | None = None,
        hold: int = 0,
        q_abs: Tensor | None = None,
        tags: ColumnTags | None = None,
    ) -> None:
        """See `KVStore.extend`; tags are the layer's, and are not for folded rows."""
        q_abs = None if q_abs is None else self.folded(q_abs)
        super().extend(self.folded(keys), self.folded(values), self.folded_padding(padding), hold, q_abs)

    def commit(self, hold: int = 0, q_abs: Tensor | None = None, tags: ColumnTags | None = None) -> bool:
        """See `KVStore.commit`; tags are the layer's, and are not for folded rows."""
        return super().commit(hold, None if q_abs is None else self.folded(q_abs))

    def attend(self, query: Tensor, arguments: AttentionArguments) -> Tensor:
        """See `StoreView.attend`."""
        # The layer's list of sinks has those of each head in turn: rows here take turns with it.
        arguments = arguments._replace(mask=fold_mask(arguments.mask, query.shape[0], self.fold))
        return self.unfolded(super().attend(self.folded(query), arguments))

    def dense(self, side: Side, columns: int, back: bool = True) -> Tensor:
        """See `KVStore.dense`; 0 where a head has evicted a token."""
        return self.unfolded(super().dense(side, columns, back))

    def reorder(self, rows: Tensor) -> None:
        """See `KVStore.reorder`."""
        super().reorder(self.rows_of(rows.to(self.device)))

    def select(self, rows: Tensor) -> None:
        """See `KVStore.select`."""
        super().select(self.rows_of(rows.to(self.device)))
