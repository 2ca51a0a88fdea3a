"""Kernels compiled before they are needed: what a layer of a cache will launch follows from how it is held."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from .step import MAX_STEP, StepPlan

if TYPE_CHECKING:
    from .triton.ahead import Beside


SEVERAL = tuple(range(1, MAX_STEP + 1))
"""Tokens of steps where their number varies: attention has two variants then, what appends may have one for each."""

Layer = tuple[StepPlan, int, str | None]
"""Plan, query heads and rule of a layer, see `start`."""


def normal(plan: StepPlan) -> StepPlan:
    """The plan without what kernels do not depend on: rows, capacity and slots. Layers alike in the rest are one."""
    return dataclasses.replace(plan, rows=plan.fold, blocks=(1,) * len(plan.blocks), tails=plan.unit, capacity=1)


def start(
    plan: StepPlan, query_heads: int, device: torch.device, rule: str | None, several: bool = False
) -> Beside | None:
    """Begins to compile what a layer will launch, for its prompt and its steps, in other processes; returns at once.

    Until a kernel is there, its operation goes by the torch reference (see `hfkvq.kernels.dispatch.call`). Nothing is
    done twice, nor where there is no GPU, nor where Triton cannot be imported. What goes wrong is raised by the launch
    that meets it, not here.

    Args:
        plan: of the layer's buffer.
        query_heads: of the model.
        device: of the layer's tensors.
        rule: by which the channels of prompts are raised, see `kernels.seal`; None where a scheme gives their widths.
        several: whether steps may have several tokens, as in assisted decoding.

    Returns:
        What knows when all is there, or has failed; None where there is nothing to wait for.
    """
    return (
        _start(normal(plan), query_heads, device, rule, SEVERAL if several else (1,)) if device.type == "cuda" else None
    )


GPUS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities, times ten, that need not be there to be compiled for."""


def compile_now(layers: Sequence[Layer], gpu: int | None = None) -> list[tuple[str, float]]:
    """Compiles what layers will launch into Triton's cache, and waits for it.

    Args:
        layers: of any number of caches.
        gpu: one of `GPUS`; None for the current one.

    Returns:
        Name and seconds of each kernel, next to nothing for those that were there.

    Raises:
        ValueError: kernels are interpreted in this process.
        RuntimeError: a kernel does not compile.
    """
    own: Any = importlib.import_module("hfkvq.kernels.triton.warm")
    done = own.compile_now([own.Order(normal(plan), heads, rule, (1,)) for plan, heads, rule in layers], gpu)
    for name, _, error in done:
        if error:
            raise RuntimeError(f"{name} does not compile: {error}")
    return [(name, seconds) for name, seconds, _ in done]


def compile_missing(
    layers: Sequence[Layer], device: torch.device, steps: Sequence[int], begin: Callable[[], object]
) -> None:
    """Compiles what layers will launch on a GPU of this process, all of it together, and waits for it.

    What is in Triton's cache is loaded, and no process is started where that is all. Nothing is done where `start` does
    nothing. A kernel that does not compile is left to its launch, which says why.

    Args:
        layers: of any number of caches.
        device: of their tensors.
        steps: tokens of the steps that come.
        begin: is called once, before anything is compiled.

    Raises:
        RuntimeError: the process that compiles has failed.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        own: Any = importlib.import_module("hfkvq.kernels.triton.warm")
        orders = [own.Order(normal(plan), heads, rule, tuple(steps)) for plan, heads, rule in layers]
        own.compile_missing(list(dict.fromkeys(orders)), device, begin)


@lru_cache(maxsize=1024)
def _start(
    plan: StepPlan, query_heads: int, device: torch.device, rule: str | None, steps: tuple[int, ...]
) -> Beside | None:
    if importlib.util.find_spec("triton") is None:
        return None
    own: Any = importlib.import_module("hfkvq.kernels.triton.warm")
    return own.begin(own.Order(plan, query_heads, rule, steps), device)
