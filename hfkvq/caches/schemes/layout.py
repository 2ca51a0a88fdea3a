"""Layout of a layer's keys and values: page formats, windows, and transforms before they are sealed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfkvq.kernels.hadamard import check_rotation, largest_block, rotation
from hfkvq.kernels.norms import BALANCE, Balance
from hfkvq.kernels.pages import PageFormat, StoreFormat


def rotation_block(dim: int) -> int:
    """The largest Hadamard block, up to 128 channels, of heads of ``dim``; 0 if it is one channel."""
    block = min(128, largest_block(dim))
    return block if block > 1 else 0


@dataclass(frozen=True, slots=True)
class SideLayout:
    """Layout of a layer's keys, or of its values.

    Attributes:
        formats: page format of each run, narrow to wide; several only if the scheme assigns token widths.
        local: newest tokens that stay unquantized.
        unit: tokens that are sealed together; a multiple of the page where pages are sealed whole.
        rotate: Hadamard block, 0 for none.
        signs: seed of the random signs that channels have before they are rotated, 0 for none.
        balance: how `kernels.page_norms` balances pages of normed formats.
    """

    formats: tuple[PageFormat, ...]
    local: int = 0
    unit: int = 1
    rotate: int = 0
    balance: Balance = BALANCE
    signs: int = 0

    @property
    def rotation(self) -> int:
        """The number by which kernels know its rotation; see `hfkvq.kernels.hadamard.rotation`."""
        return rotation(self.rotate, self.signs)


@dataclass(frozen=True, slots=True)
class Layout:
    """Static layout of one layer: both sides and the sink they share.

    Attributes:
        keys: the key side.
        values: the value side.
        sink: first tokens of a row, never quantized.
        latent: whether the key side is of latents and the value side of rotary parts, to be attended to as they are.
        window: tokens that a query sees, see `hfkvq.kernels.pages.StoreFormat`; 0 for all.
    """

    keys: SideLayout
    values: SideLayout
    sink: int = 0
    latent: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        """Checks what the store relies on."""
        for name, side in (("keys", self.keys), ("values", self.values)):
            for fmt in side.formats:
                if fmt.whole and len(side.formats) == 1 and side.unit % fmt.page_size:
                    raise ValueError(
                        f"{name}: got a seal unit of {side.unit} tokens, which must be a multiple of the page of "
                        f"{fmt.page_size} tokens where scales are per channel, or pages normed."
                    )
        if len(self.keys.formats) > 1 and (self.keys.local, self.keys.unit) != (self.values.local, self.values.unit):
            raise ValueError("local, unit: keys and values must leave the tail together where tokens have widths.")
        if self.window and self.own_tokens() > self.window:
            raise ValueError(
                f"window: got {self.window} tokens, but the newest {self.own_tokens()} are held outside of pages; take "
                "shorter local windows and units, or another scheme in this layer."
            )

    @property
    def store(self) -> StoreFormat:
        """The format that kernels see."""
        runs = tuple(zip(self.keys.formats, self.values.formats, strict=True))
        return StoreFormat(runs, self.sink, self.keys.rotation, self.values.rotation, self.latent, self.window)

    def own_tokens(self) -> int:
        """Most of the newest tokens that are not in pages yet."""
        return max(side.local + side.unit for side in (self.keys, self.values))

    def in_window(self, window: int) -> Layout:
        """The same for a layer whose queries see so many tokens: first tokens fall out of sight like any others."""
        return replace(self, sink=0, window=window)

    def of_latents(self) -> Layout | None:
        """The same for latents that are attended to as they are; None if they cannot be in pages like these."""
        keys, values = self.keys, self.values
        together = (keys.local, keys.unit) == (values.local, values.unit)
        single = len(keys.formats) == 1 and not keys.formats[0].whole and not values.formats[0].whole
        return replace(self, latent=True) if together and single else None

    def check(self, key_dim: int, value_dim: int) -> None:
        """Raises ValueError if heads of these dimensions cannot be held."""
        check_rotation("rotate (keys)", self.keys.rotate, key_dim)
        check_rotation("rotate (values)", self.values.rotate, value_dim)
        for side, dim in ((self.keys, key_dim), (self.values, value_dim)):
            for fmt in side.formats:
                fmt.check_head_dim(dim)
