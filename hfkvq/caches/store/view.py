"""Read side of a store: its tensors, the host's knowledge of its rows, dense tensors, bytes and bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH
from hfkvq.kernels.pages import RunView, Side
from hfkvq.kernels.step import MAX_STEP

from ..schemes.base import Layout, Scheme
from . import accounting
from .accounting import PayloadBits, StoreBytes
from .growth import GROWTH, grow, grow_tail, pages_for, tail_limits
from .row_lengths import Forecast, RowState, WindowSizes, forecast
from .state import SIDES, StoreState


class StoreView:
    """A layer's store as its readers see it. What changes is `state`, which only this package gives another value.

    Attributes:
        growth: factor by which runs that have no room grow.

    Args:
        layout: static layout of both sides.
        scheme: decides widths at sealing.
        keys: (B, H, t, Dk), any tensor of the shape, dtype and device to come.
        values: (B, H, t, Dv), likewise.
        capacity: most tokens of a row, allocated at once; None grows.
        offloaded: whether pages lie in the host's memory.
    """

    growth = GROWTH

    def __init__(
        self,
        layout: Layout,
        scheme: Scheme,
        keys: Tensor,
        values: Tensor,
        capacity: int | None = None,
        offloaded: bool = False,
    ) -> None:
        layout.check(keys.shape[-1], values.shape[-1])
        self.layout, self.format, self.scheme = layout, layout.store, scheme
        self.sizes, self.capacity = WindowSizes.of(layout), capacity
        self.seals_widely = scheme.seals_widely(layout)
        self.state = StoreState.empty(layout, keys, values, MAX_STEP, "tags" in scheme.needs, offloaded)
        self.heads, self.dims, self.dtype = self.state.heads, self.state.dims, self.state.dtype
        # Tails grow up to this, so that short contexts do not pay for windows they cannot fill.
        self.tail_limit: dict[Side, int] = tail_limits(layout, 0)
        self._reserve()

    def _reserve(self) -> None:
        """Makes room for the capacity, if there is one."""
        if self.capacity is None:
            return
        for side in SIDES:
            self.state = grow_tail(self.state, side, self.tail_limit[side], self.tail_limit[side])
        for run in range(len(self.format.runs)):
            blocks = pages_for(self.format, run, max(self.capacity - self.layout.sink, 0))
            self.state = grow(self.state, run, blocks, 1)

    @property
    def batch(self) -> int:
        """Rows."""
        return self.state.counters.shape[1]

    @property
    def device(self) -> torch.device:
        """Bytes of all tensors."""
        return self.state.counters.device

    @property
    def counters(self) -> Tensor:
        """i32 (2 + 2*runs, B)."""
        return self.state.counters

    @property
    def dropped(self) -> Tensor:
        """i32 (B,): tokens of each row that were forgotten."""
        return self.state.dropped

    @property
    def windows(self) -> tuple[Tensor, ...]:
        """Sink keys, sink values, tail keys, tail values."""
        return self.state.windows

    @property
    def runs(self) -> tuple[RunView, ...]:
        """Pages of each run."""
        return self.state.runs

    @property
    def states(self) -> frozenset[RowState]:
        """States that rows may be in, as the host knows them."""
        return self.state.states

    def flat_runs(self) -> list[Tensor]:
        """All runs' tensors in the order ops take them."""
        return self.state.flat_runs()

    def tensors(self) -> list[Tensor]:
        """Every tensor the store holds."""
        return [*self.state.tensors()]

    @property
    def longest(self) -> int:
        """Most tokens that a row may hold."""
        return self.state.longest

    @property
    def row_lengths(self) -> Tensor:
        """i32 (B,): tokens that each row holds."""
        return self.state.counters[LENGTH]

    def forecast(self, tokens: int = 0, hold: int = 0) -> Forecast:
        """Forecast of the rows with ``tokens`` more; see `hfkvq.caches.store.row_lengths.forecast`."""
        return forecast(self.state.states, self.sizes, tokens, hold)

    def fits(self, tokens: int) -> bool:
        """True if ``tokens`` more can join the tail before anything is sealed."""
        return self.has_room(tokens, self.forecast(tokens).tail_slots)

    def has_room(self, tokens: int, needs: tuple[int, int]) -> bool:
        """True if so many new tokens are a step, and tails may grow to the slots that are needed then."""
        limit = self.tail_limit
        return tokens <= MAX_STEP and needs[0] <= limit["keys"] and needs[1] <= limit["values"]

    def is_due(self, hold: int = 0) -> bool:
        """True if some row has something to seal now."""
        return any(self.forecast(hold=hold).due)

    def attend(self, query: Tensor, arguments: AttentionArguments) -> Tensor:
        """Attention of the newest queries (B, Hq, Q, D) over everything held; see `kernels.store_attention`.

        A bias has to be a part of the mask, see `AttentionArguments.biased`.
        """
        state, (scaling, mask, softcap, sinks, *_) = self.state, arguments
        return kernels.store_attention(
            query, state.counters, state.windows, self.flat_runs(), mask, sinks, scaling, softcap, self.format
        )

    def dense(self, side: Side, columns: int, back: bool = True) -> Tensor:
        """(B, H, columns, D) in logical order, 0 at padding.

        Rotated back, or else in the store's basis.
        """
        state = self.state
        if not back:
            form = replace(self.format, rotate_keys=0, rotate_values=0)
            return kernels.gather_rows(state.counters, state.windows, self.flat_runs(), columns, form, side)
        return kernels.gather_rows(state.counters, state.windows, self.flat_runs(), columns, self.format, side)

    def dense_before(self, new: Tensor, side: Side, columns: int, back: bool = True) -> Tensor:
        """(B, H, columns, D): everything held, as `dense` has it, and ``new`` (B, H, t, D) in the last columns.

        Written where it belongs: to join the two would copy all that has been dequantized.
        """
        dense = self.dense(side, columns, back=back)
        if not back:
            new = kernels.hadamard(new, self.format.rotate_keys if side == "keys" else self.format.rotate_values)
        dense[:, :, columns - new.shape[2] :] = new
        return dense

    def nbytes(self) -> StoreBytes:
        """Exact bytes by kind (asks the device for the rows' lengths)."""
        return accounting.nbytes(self.state)

    def elements(self) -> int:
        """Key and value elements of all tokens, forgotten ones included (asks the device)."""
        return accounting.elements(self.state)

    def payload_bits(self) -> PayloadBits:
        """Payload bits per element of sealed pages (asks the device)."""
        return accounting.payload_bits(self.state)
