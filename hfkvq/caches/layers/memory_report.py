"""`MemoryReport`, what ``cache.memory()`` returns: bytes by kind, bits per element, ratio to bf16."""

from __future__ import annotations

from dataclasses import dataclass

from ..store import StoreBytes
from ..store.accounting import TokenShares


def format_bytes(count: float) -> str:
    """``1234567`` as ``1.18 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError


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
        if self.offloaded:
            rows.append(("  offloaded", format_bytes(self.offloaded)))
        if self.staged:
            rows.append(("staged", format_bytes(self.staged)))
        if self.stock:
            rows.append(("stock layers", format_bytes(self.stock)))
        if self.states:
            rows.append(("recurrent states", format_bytes(self.states)))
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
        """A small table."""
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {value:>12}" for label, value in self.rows())
