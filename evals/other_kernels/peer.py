"""Base of peers: a decode kernel of another package, over its own layout."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from evals.kernel_cases import Shape


@dataclass(frozen=True)
class Prepared:
    """One layer's keys and values as a peer keeps them.

    Attributes:
        cache: what a step reads; benchmarks copy it to keep caches cold.
        attend: called with the tensors of ``cache``; returns (B, Hq, Q, D), in any shape of that order.
        read: bytes of the cache that a step cannot do without.
        exact: the keys and values (B, H, T, D) that the cache stands for.
    """

    cache: tuple[Tensor, ...]
    attend: Callable[..., Tensor]
    read: int
    exact: Callable[[], tuple[Tensor, Tensor]]


class Peer(ABC):
    """A decode kernel of another package.

    Attributes:
        name: as `--peers` takes it.
        package: what `pip` or its authors call the package.
        remedy: how to get it.
        code_bits: bits of a key's code and of a value's; 16 for unquantized ones.
        tolerance: allowed error, root mean square, relative to the output of the fp32 reference over `Prepared.exact`.
            None: twice the error of PyTorch's own attention in the same dtype.
        graph: whether its calls can be captured in a CUDA graph.
        several: whether it takes several queries of a row, causal and aligned to the newest.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    remedy: ClassVar[str]
    code_bits: ClassVar[tuple[int, int]]
    tolerance: ClassVar[float | None] = None
    graph: ClassVar[bool] = True
    several: ClassVar[bool] = False

    @abstractmethod
    def load(self) -> None:
        """Imports what `prepare` needs. Raises ImportError where it is not there."""

    @abstractmethod
    def variants(self, shape: Shape) -> tuple[str, ...]:
        """Settings that are tried; the fastest is reported."""

    @abstractmethod
    def prepare(self, shape: Shape, query: Tensor, keys: Tensor, values: Tensor, variant: str) -> Prepared:
        """Puts one layer's keys and values (B, H, T, D) into the peer's layout, for a query (B, Hq, Q, D).

        Raises:
            ValueError: the peer does not serve the shape.
        """

    @property
    def quantized(self) -> bool:
        """True if it reads fewer than 16 bits a value."""
        return max(self.code_bits) < 16

    def missing(self) -> str:
        """Why it cannot be timed here, with the remedy; empty if it can."""
        try:
            self.load()
        except ImportError as error:
            absent = (
                isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == self.package_root
            )
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"{f'{self.package} is not installed' if absent else lines[0][:160]}; {self.remedy}"
        return ""

    @property
    def package_root(self) -> str:
        """The package's top-level module."""
        return self.package.replace("-python", "").replace("-", "_")


def imported(module: str, *names: str) -> list[Any]:
    """Names out of a module. Raises ImportError where one is not there, whatever went wrong while it was imported."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:
        # Packages built for another torch or CUDA fail in many ways while they are imported.
        raise ImportError(f"{module}: {type(error).__name__}: {error}") from error
    absent = [name for name in names if not hasattr(found, name)]
    if absent:
        raise ImportError(f"{module} has no {', '.join(absent)}; another version of the package is needed")
    return [getattr(found, name) for name in names]


def paged(x: Tensor, page: int, heads_first: bool) -> Tensor:
    """Keys or values (B, H, T, D) as pages, those of a row one after the other; the last ones are padded with zeros.

    Returns:
        (B * pages, page, H, D), or (B * pages, H, page, D) with ``heads_first``.
    """
    batch, heads, tokens, dim = x.shape
    pages = -(-tokens // page)
    if pages * page != tokens:
        x = torch.nn.functional.pad(x, (0, 0, 0, pages * page - tokens))
    parts = x.reshape(batch, heads, pages, page, dim)
    order = (0, 2, 1, 3, 4) if heads_first else (0, 2, 3, 1, 4)
    return parts.permute(order).reshape(batch * pages, *((heads, page) if heads_first else (page, heads)), dim)


def page_table(batch: int, tokens: int, page: int, device: torch.device) -> Tensor:
    """Numbers (B, pages), int32, of the pages that `paged` makes."""
    pages = -(-tokens // page)
    return torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)


def check_multiple(shape: Shape, of: int, name: str) -> None:
    """Raises ValueError unless the context is a multiple of ``of`` tokens."""
    if shape.context % of:
        raise ValueError(f"context: got {shape.context}, allowed for {name}: multiples of {of}.")
