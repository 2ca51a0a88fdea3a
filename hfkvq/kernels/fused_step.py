"""Fused steps: what eager steps of a growing store do, several operations in a call.

A step at batch 1 waits for the host, not for the GPU, and this is less for the host to do.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType

from torch import Tensor

from .dispatch import launches
from .due import due
from .pages import SIDES, RunView, StoreFormat
from .seal import seal_side
from .step_tensors import Observing, Sealing, StepTensors

FEW = 16
"""Most tokens of a side that a step seals itself."""


def seals_with_steps(store: StoreFormat, most: tuple[int, int]) -> bool:
    """Whether a step can seal so many tokens of keys and values itself: few, and not by whole pages."""
    return _seals_few(store.spec, most)


# By name: to hash a format takes longer than all the rest.
@lru_cache(maxsize=1024)
def _seals_few(store: str, most: tuple[int, int]) -> bool:
    form = StoreFormat.parse(store)
    return form.ordered and all(
        not count or (count <= FEW and not fmt.whole) for count, fmt in zip(most, form.runs[0], strict=True)
    )


@cache
def _launches() -> ModuleType:
    # Nothing here needs Triton to be installed.
    return importlib.import_module("hfkvq.kernels.triton.fused_step")


def append_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    held: StepTensors,
    scaling: float,
    softcap: float,
    sealing: Sealing | None = None,
    observing: Observing | None = None,
    mask: Tensor | None = None,
) -> Tensor | None:
    """`append`, then `decode_attention` of the new tokens' queries, `observe` and `seal_tail`; see there.

    Args:
        q: (B, Hq, t, D), after RoPE, not scaled, not rotated.
        keys: (B, H, t, Dk), after RoPE, not rotated; t at most the shorter tail's slots.
        values: (B, H, t, Dv).
        held: the store, written in place: its ``length`` grows by t.
        scaling: factor on the logits.
        softcap: 0 for none.
        sealing: what is sealed in the end, of which `seals_with_steps` is true; None for nothing.
        observing: where the queries are added; None for nowhere.
        mask: see `decode_attention`; None is causal.

    Returns:
        (B, t, Hq, Dv), as models take it, in the dtype of q; None where it takes the operations themselves: nothing is
        done then.
    """
    if not launches(q):
        return None
    return _launches().append_attend(q, keys, values, held, scaling, softcap, sealing, observing, mask)


def seal_tail(
    counters: Tensor,
    windows: Sequence[Tensor],
    run: RunView,
    local: tuple[int, int],
    unit: tuple[int, int],
    most: tuple[int, int],
    store: StoreFormat,
    rule: str | None = None,
) -> None:
    """Seals what has left the windows into a store's last run: `due`, then `seal` of both sides.

    Args:
        counters: i32 (2 + 2*runs, B), written in place.
        windows: sink keys, sink values, tail keys, tail values.
        run: the last run, whose pages are written in place and have room.
        local: newest tokens that stay as they are, of keys and of values.
        unit: tokens that are sealed together.
        most: the most that any row has to seal; 0 for nothing.
        store: the layer's format; its last run is not normed.
        rule: by which raised channels are chosen; None if there are none.

    What fails leaves ``counters`` as they may be: who calls keeps a copy.
    """
    if launches(counters) and _launches().seal_tail(counters, windows, run, local, unit, most, store, rule):
        return
    found = due(counters, store.sink, (windows[2].shape[2], windows[3].shape[2]), local, unit, most, run.pos)
    for at, side in enumerate(SIDES):
        if most[at]:
            parts, fmt = (run.keys, run.values)[at], store.runs[-1][at]
            new, source, index = found.new[at], windows[2 + at], found.index[at]
            seal_side(parts, run.table, found.count[at], new, source, index, fmt, side, rule)
