"""What `hfkvq kld` needs to know of a cache that is not ours."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import Cache


@dataclass(frozen=True, kw_only=True)
class Rival(ABC):
    """A cache of others; its fields are its knobs.

    Attributes:
        simulated: whether it only rounds as its method would, and holds everything in full precision.
        about: a sentence for the report: what it is, whose, and how it differs from what its authors have.
    """

    simulated: ClassVar[bool]
    about: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Its settings, for records."""
        return {"rival": type(self).__name__, "simulated": self.simulated, **dataclasses.asdict(self)}

    @abstractmethod
    def check(self, config: Any) -> None:
        """Raises before any weights are loaded.

        Raises:
            ImportError: a package is missing; the message says what to install.
            ValueError: the cache cannot hold this model's heads or layers.
        """

    @abstractmethod
    def prepare(self, model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Cache]:
        """What makes empty caches of a model.

        Args:
            model: that is measured.
            tokenizer: the model's, or None.
            tokens: i64 (W, T), the windows to be measured, which no calibration may see.
        """

    def told(self, found: Iterator[Tensor], name: str) -> Iterator[Tensor]:
        """What forwards with the cache ``name`` give; a failure of its own becomes a ValueError with a remedy."""
        return found

    @abstractmethod
    def held_bytes(self, cache: Cache) -> float:
        """Bytes of every tensor that a cache holds; NaN if it is simulated."""

    @abstractmethod
    def bits(self, cache: Cache) -> tuple[float, float]:
        """Payload bits of a quantized element (NaN without any), and bits per element with everything, of a cache.

        Those with everything are computed from the format if it is simulated, and otherwise NaN: bytes tell them.
        """
