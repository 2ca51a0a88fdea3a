"""What eager steps of a growing store do, several operations in a call.

A step at batch 1 waits for the host, not for the GPU, and this is less for the host to do.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType

from torch import Tensor

from .dispatch import launches
from .due import due
from .pages import RunView, StoreFormat
from .seal import seal
from .step import SIDES


@cache
def _lines() -> ModuleType:
    # Nothing here needs Triton to be installed.
    return importlib.import_module("hfkvq.kernels.triton.line")


def append_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    scaling: float,
    softcap: float,
    store: StoreFormat,
) -> Tensor | None:
    """`append`, then causal `decode_attention` of the new tokens' queries; see there.

    Args:
        q: (B, Hq, t, D), after RoPE, not scaled, not rotated.
        keys: (B, H, t, Dk), after RoPE, not rotated; t at most the shorter tail's slots.
        values: (B, H, t, Dv).
        counters: i32 (2 + 2*runs, B); ``length`` grows by t.
        windows: sink keys, sink values, tail keys, tail values; written in place.
        runs: flat tensors of all runs.
        scaling: factor on the logits.
        softcap: 0 for none.
        store: the layer's format.

    Returns:
        (B, Hq, t, Dv) in the dtype of q; None where it takes the operations themselves: nothing is done then. So it is
        with kernels that have not been launched for such tensors yet.
    """
    if not launches(q):
        return None
    return _lines().append_attend(q, keys, values, counters, windows, runs, scaling, softcap, store)


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
    """Seals what has left the windows of a store of one run: `due`, then `seal` of both sides.

    Args:
        counters: i32 (4, B), written in place.
        windows: sink keys, sink values, tail keys, tail values.
        run: the run, whose pages are written in place and have room.
        local: newest tokens that stay as they are, of keys and of values.
        unit: tokens that are sealed together.
        most: the most that any row has to seal; 0 for nothing.
        store: the layer's format, not normed.
        rule: by which raised channels are chosen; None if there are none.
    """
    if launches(counters) and _lines().seal_tail(counters, windows, run, local, unit, most, store, rule):
        return
    found = due(counters, store.sink, (windows[2].shape[2], windows[3].shape[2]), local, unit, most)
    try:
        for at, side in enumerate(SIDES):
            if most[at]:
                parts, fmt = (run.keys, run.values)[at], store.runs[0][at]
                own = rule if fmt.raised else None
                seal(
                    parts,
                    run.table,
                    found.count[at],
                    found.new[at],
                    windows[2 + at],
                    found.index[at],
                    None,
                    fmt,
                    side,
                    own,
                )
    except BaseException:
        found.take_back(counters)
        raise
