"""Kernels compiled before they are launched: which they are follows from how a layer is held."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from .fused import Widths
from .norms import BALANCE, Balance
from .pages import StoreFormat
from .step import MAX_STEP, StepPlan

SEVERAL = tuple(range(1, MAX_STEP + 1))
"""Tokens of steps where their number varies: attention has two variants then, appending may have one for each."""

GPUS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities, times ten, that need not be there to be compiled for."""

Layer = tuple[StepPlan, int, str | None, bool]
"""Plan and query heads of a layer, the rule by which the channels of prompts are raised (see `kernels.seal`), None
where its scheme gives their widths, and whether its keys are smoothed."""


def compile_layers(
    layers: Sequence[Layer],
    device: torch.device,
    steps: Sequence[int] = (1,),
    absent: int | None = None,
    around: tuple[Widths, torch.dtype] | None = None,
    slots: bool = False,
    moves: bool = False,
) -> list[tuple[str, str]]:
    """Compiles all that layers launch for prompts and steps, side by side into Triton's cache, and waits for it.

    Nothing is done on a CPU, on AMD's GPUs, under Triton's interpreter, or where Triton is not installed. A kernel that
    does not compile is left to its launch, which raises what is wrong.

    Args:
        layers: of any number of caches.
        steps: tokens of the steps that come.
        absent: one of `GPUS`, in place of this process's own GPU; the process can launch nothing afterwards.
        around: sizes and dtype of a model whose steps are fused around attention.
        slots: whether windows are slots of an engine, which a map gives to its requests.
        moves: whether layers come to other formats, for which their pages are read.

    Returns:
        Name of each kernel, and the compiler's error or "".
    """
    own = _variants(device)
    if own is None:
        return []
    if absent is not None:
        own.leave_gpu_alone(own.GPUS[absent])
    plain = dict.fromkeys((normal(plan), *rest) for plan, *rest in layers)
    every = [
        each
        for plan, heads, rule, smooths in plain
        for each in own.wanted(plan, heads, rule, tuple(steps), device, smooths, slots, moves)
    ]
    every += own.fused_wanted(*around, device) if around else ()
    return own.compile_all(every, device if absent is None else None)


def compile_prompts(
    form: StoreFormat,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    rule: str = "",
    sums: bool = False,
    balances: Sequence[Balance] = (BALANCE, BALANCE),
    slots: int = 1,
) -> list[tuple[str, str]]:
    """Compiles all that prompts launch whose pages are an engine's blocks, as `compile_layers` does.

    Args:
        form: of a layer; a sink of a page stands for windows.
        sizes: query heads, KV heads, and channels of a head.
        dtype: the model's.
        rule: by which raised channels are chosen, or "".
        sums: whether sums of queries weigh them.
        balances: of normed pages of keys and of values.
        slots: of requests, where the first page is in windows.

    Returns:
        Name of each kernel, and the compiler's error or "".
    """
    own = _variants(device)
    if own is None:
        return []
    return own.compile_all(list(own.prompts_wanted(form, sizes, dtype, device, rule, sums, balances, slots)), device)


def _variants(device: torch.device) -> Any:
    """Module `triton.variants`; None where nothing is compiled."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return None
    own: Any = importlib.import_module("hfkvq.kernels.triton.variants")
    return None if own.INTERPRETED.value else own


def normal(plan: StepPlan) -> StepPlan:
    """The plan without what kernels do not depend on: rows, capacity and slots. Layers alike in the rest are one."""
    return dataclasses.replace(plan, rows=plan.fold, blocks=(1,) * len(plan.blocks), tails=plan.unit, capacity=1)
