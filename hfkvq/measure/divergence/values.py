"""Values of a comparison of caches, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from hfkvq.caches.schemes.preset import Preset

from .naming import OtherCache


@dataclass(frozen=True)
class Bill:
    """Memory of a cache at the end of a window, mean over the windows.

    Attributes:
        code_bits: payload bits per element of sealed pages; NaN if none is sealed.
        total_bits: bits per element, every byte counted.
        held_bytes: of one window's cache; NaN if it is simulated, and total bits computed from its format.
        bf16_bytes: of the same tokens in bf16.
        key_bits: mean width of the keys' channels, as raised; NaN where that is not known.
    """

    code_bits: float
    total_bits: float
    held_bytes: float
    bf16_bytes: float
    key_bits: float = math.nan


@dataclass(frozen=True)
class Perplexity:
    """The predictions of one cache.

    Attributes:
        nll: f32 (W, n), ``-log p`` of each scored token, in nats.
        bill: its memory.
    """

    nll: Tensor
    bill: Bill

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean of ``nll``."""
        return math.exp(float(self.nll.double().mean()))


@dataclass(frozen=True)
class Divergence(Perplexity):
    """A scheme's predictions beside the baseline's; rows are windows, the independent units.

    Attributes:
        name: as it was asked for.
        preset: what was measured.
        kld: f32 (W, n), ``KL(baseline || scheme)`` of each scored token, in nats.
        agrees: bool (W, n), whether both have the same most likely token.
    """

    name: str
    preset: Preset | OtherCache
    kld: Tensor
    agrees: Tensor

    @property
    def mean(self) -> float:
        """Mean KLD."""
        return float(self.kld.double().mean())

    @property
    def top1(self) -> float:
        """Share of tokens where both have the same most likely token."""
        return float(self.agrees.double().mean())

    def quantile(self, share: float) -> float:
        """KLD that this share of the tokens does not exceed, interpolated."""
        values = self.kld.double().flatten().sort().values
        # `Tensor.quantile` refuses more than 2^24 values.
        at = share * (len(values) - 1)
        low, high = values[math.floor(at)], values[math.ceil(at)]
        return float(low + (high - low) * (at - math.floor(at)))


@dataclass(frozen=True)
class Measured:
    """Result of `measure`.

    Attributes:
        baseline: of the stock cache.
        schemes: in the order they were given.
        windows: how many, W.
        scored: tokens scored of each, n.
    """

    baseline: Perplexity
    schemes: tuple[Divergence, ...]

    @property
    def windows(self) -> int:
        """Windows, W."""
        return self.baseline.nll.shape[0]

    @property
    def scored(self) -> int:
        """Scored tokens of a window, n."""
        return self.baseline.nll.shape[1]
