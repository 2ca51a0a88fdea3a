"""A budget of tokens or bytes that each KV head of a layer may hold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, run_count

from ..store import KVStore


class Budget(NamedTuple):
    """Budget of a row's KV head.

    Attributes:
        tokens: the most tokens, where the budget counts them.
        bytes: the most bytes; None where it counts tokens.
        costs: bytes of a token in few bits and whole.
    """

    tokens: int
    bytes: int | None
    costs: tuple[int, int]

    def check(self, window: int, dtype: torch.dtype) -> None:
        """Raises ValueError if there is no room for more than the window of newest tokens."""
        least = window * self.costs[1]
        if self.bytes is not None and self.bytes <= least:
            raise ValueError(
                f"budget_bytes: got {self.bytes}, allowed more than {least}, which the window of {window} tokens takes "
                f"in each KV head in {dtype}; raise it, or lower window."
            )

    @property
    def most(self) -> tuple[int, int]:
        """Most tokens that fit: all in few bits, and all whole."""
        if self.bytes is None:
            return self.tokens, self.tokens
        low, whole = self.costs
        return self.bytes // low, self.bytes // whole

    def room(self, store: KVStore) -> Tensor:
        """Whole tokens that each row of a store has room for, negative where it has outgrown the budget: i64 (B*H,)."""
        length = store.counters[LENGTH].long()
        if self.bytes is None:
            return self.tokens - length
        low, whole = self.costs
        held = length * whole - run_count(store.counters, 0, "keys").long() * (whole - low)
        return (self.bytes - held).div(whole, rounding_mode="floor")

    def least_room(self, few: list[int], lengths: list[int]) -> int:
        """The least of `room` for rows of these lengths with so many tokens in few bits, which the host knows."""
        if self.bytes is None:
            return self.tokens - max(lengths)
        low, whole = self.costs
        held = [n * whole - narrow * (whole - low) for n, narrow in zip(lengths, few, strict=True)]
        return (self.bytes - max(held)) // whole
