"""Bytes that the layers of a cache hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..store.accounting import StoreBytes, TokenShares, elements, nbytes, payload_bits, token_shares
from ..store.host import is_hosted
from .layer import KVLayer
from .recurrent import RecurrentLayer, StatePlaces


def format_bytes(count: float) -> str:
    """``1234567`` as ``1.18 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Exact memory of a cache.

    Attributes:
        compressed: bytes of compressed layers, by kind (`StoreBytes`).
        staged: bytes of tokens that are not in the store yet (between update and attention).
        stock: bytes of layers left to Transformers (sliding windows), whole storages counted.
        elements: key and value elements of all tokens given to compressed layers, including evicted ones.
        code_bits: payload bits per element of sealed pages, with all room for raised channels.
        used_bits: the same without the room that no raised channel uses.
        key_bits: used_bits of the keys only: the mean width of their channels (MixKVQ's B_eff, equation 17).
        seen: logical tokens of the cache.
        tokens: for each compressed layer that holds any, in order: shares of tokens whole, quantized and evicted.
        offloaded: bytes of compressed layers that lie in the host's memory; all others are on the model's device.
        states: bytes of recurrent states (Mamba, linear attention, convolutions), which do not grow with tokens.
    """

    compressed: StoreBytes
    staged: int
    stock: int
    elements: int
    code_bits: float
    used_bits: float
    key_bits: float
    seen: int
    tokens: tuple[TokenShares, ...] = ()
    offloaded: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        """All bytes the cache holds: codes, metadata, windows, tables, staged, stock and states."""
        return self.compressed.total + self.staged + self.stock + self.states

    @property
    def bf16(self) -> int:
        """Bytes of the same tokens' keys and values in bf16, compressed layers only."""
        return 2 * self.elements

    @property
    def total_bits(self) -> float:
        """Bits per element, every byte of the compressed layers counted."""
        return 8 * (self.compressed.total + self.staged) / self.elements if self.elements else float("nan")

    @property
    def ratio(self) -> float:
        """Ratio of bf16's bytes to those of the compressed layers."""
        held = self.compressed.total + self.staged
        return self.bf16 / held if held else float("nan")

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs for a table."""
        parts = self.compressed
        rows = [
            ("codes", format_bytes(parts.codes)),
            ("metadata", format_bytes(parts.metadata)),
            ("windows", format_bytes(parts.windows)),
            ("tables", format_bytes(parts.tables)),
            ("  of these reserved", format_bytes(parts.reserved)),
        ]
        others = ("  offloaded", "staged", "stock layers", "recurrent states")
        sizes = zip(others, (self.offloaded, self.staged, self.stock, self.states), strict=True)
        rows += [(name, format_bytes(size)) for name, size in sizes if size]
        shares = [sum(share) / len(self.tokens) for share in zip(*self.tokens, strict=True)]
        if shares and shares[-1] > 0:
            names = ("tokens whole", "tokens quantized", "tokens evicted")
            rows += [(name, f"{share:.1%}") for name, share in zip(names, shares, strict=True)]
        return [
            *rows,
            ("total", format_bytes(self.total)),
            ("bf16", format_bytes(self.bf16)),
            ("ratio to bf16", f"{self.ratio:.2f}x"),
            ("code bits", f"{self.code_bits:.2f}"),
            ("  of these used", f"{self.used_bits:.2f}"),
            ("  of the keys", f"{self.key_bits:.2f}"),
            ("total bits", f"{self.total_bits:.2f}"),
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {value:>12}" for label, value in self.rows())


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that tensors keep, however little of it they show, and however many share it."""
    storages = {storage._cdata: storage.nbytes() for storage in (x.untyped_storage() for x in tensors)}
    return sum(storages.values())


def memory_of(pieces: Sequence[Any], seen: int) -> MemoryReport:
    """Exact memory of layers, and of the recurrent states of those with attention beside; ``seen``: logical tokens."""
    layers = [layer for layer in pieces if isinstance(layer, KVLayer)]
    stores = [layer.store for layer in layers if layer.store is not None]
    parts = sum((nbytes(store.state) for store in stores), StoreBytes())
    counts = [elements(store.state) for store in stores]
    payload = [payload_bits(store.state) for store in stores]

    def mean(bits: Iterable[float]) -> float:
        pairs = [(each, n) for each, n in zip(bits, counts, strict=True) if n and not math.isnan(each)]
        return sum(each * n for each, n in pairs) / sum(n for _, n in pairs) if pairs else math.nan

    staged = [layer.staged for layer in layers if layer.staged is not None]
    # Layers share some of them.
    small = {id(tensor): tensor for layer in layers for tensor in layer.tensors()}
    buffers = [x for layer in layers if layer.buffer is not None for x in layer.buffer.memory()]
    ours = [*(x for store in stores for x in store.state.tensors()), *small.values(), *buffers]
    # Scratch of steps, statistics, and memory of which tensors show a part.
    parts += StoreBytes(tables=held_bytes(ours) - parts.total)
    states = StatePlaces([layer for layer in pieces if isinstance(layer, RecurrentLayer)]).tensors()
    stock = [layer for layer in pieces if not isinstance(layer, (KVLayer, RecurrentLayer))]
    # Windows with recurrent states beside them keep these in dicts.
    others = [
        each for layer in stock for x in vars(layer).values() for each in (x.values() if type(x) is dict else [x])
    ]
    return MemoryReport(
        compressed=parts,
        offloaded=held_bytes(x for x in ours if is_hosted(x)),
        staged=held_bytes(tensor for pair in staged for tensor in pair),
        stock=held_bytes(x for x in others if isinstance(x, torch.Tensor)),
        elements=sum(counts) + sum(tensor.numel() for pair in staged for tensor in pair),
        code_bits=mean(bits.room for bits in payload),
        used_bits=mean(bits.used for bits in payload),
        key_bits=mean(bits.keys for bits in payload),
        seen=seen,
        tokens=tuple(token_shares(store.state) for store in stores),
        states=held_bytes(states),
    )
