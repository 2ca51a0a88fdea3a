"""Plan of a layer's step buffer, and the moves of a store into it."""

from __future__ import annotations

from typing import Any

from hfkvq.kernels.step import MAX_STEP, StepPlan

from ..eviction.evictor import Eviction
from ..layer_state.base import LayerBase
from ..schemes.base import Layout, Scheme
from ..store import SIDES, KVStore


def make_plan(
    layer: LayerBase, room: int, before: StepPlan | None, eviction: Eviction[Any] | None, queries_per_head: int
) -> StepPlan | None:
    """The plan of a buffer that what a layer holds can lie in; None while the store holds more than that.

    Args:
        layer: with a store, of which tails are made as long as they may become in such a buffer.
        room: logical columns.
        before: of the buffer that there is.
        eviction: of a layer that evicts.
        queries_per_head: query heads of a KV head.
    """
    store, hold = layer.held(), layer.hold
    # Staged tokens have been seen, and are to join the store.
    new = room - layer.seen + layer.staged_length
    most = None if eviction is None else eviction.most_held(room)
    if most is not None:
        blocks = _budget_blocks(store, layer, room, new, before, most)
    elif eviction is not None or (len(store.runs) > 1 and (layer.capacity is None or splits_room(layer))):
        # Prompt-only eviction: current pages, plus room for all remaining columns, which may all go to
        # the last run.
        blocks = _blocks_ahead(store, new, room, before, layer.capacity is not None)
    else:
        rest = max(room - store.layout.sink, 0)
        blocks = tuple(
            max(-(-rest // keys.page_size), view.table.shape[1])
            for view, (keys, _) in zip(store.runs, store.format.runs, strict=True)
        )
    if blocks is None:
        return None
    if hold:
        store.reserve_tail(hold)
    for side in SIDES:
        # Tails need no more slots than the buffer has columns. While nothing is there, nothing has to move.
        slots = min(store.tail_limit[side], max(room - store.layout.sink, MAX_STEP))
        store.grow_tail(side, slots, store.longest == 0)
    keys, values = store.layout.keys, store.layout.values
    rule, query = sealing_rules(layer.scheme, store.layout, store.dims["keys"])
    keeps = eviction is not None and eviction.keeps_query
    return StepPlan(
        store=store.format.spec,
        rows=store.batch,
        heads=store.heads,
        key_dim=store.dims["keys"],
        value_dim=store.dims["values"],
        dtype=str(store.dtype),
        blocks=blocks,
        tails=(store.windows[2].shape[2], store.windows[3].shape[2]),
        local=(max(keys.local, hold), max(values.local, hold)),
        unit=(keys.unit, values.unit),
        capacity=room,
        rule=rule,
        query="keep" if keeps else query,
        fold=store.fold,
        query_heads=store.fold * store.heads * queries_per_head if keeps else 0,
        balance=(keys.balance, values.balance),
        offloaded=layer.offloaded,
    )


def sealing_rules(scheme: Scheme, layout: Layout, key_dim: int) -> tuple[str, str]:
    """``rule`` and ``query`` of `StepPlan`, as a scheme that keeps all tokens has them."""
    needs = scheme.needs
    rule = scheme.step_rule(key_dim) if layout.keys.formats[-1].raised else None
    summed = "total" if "history" in needs else "sum"
    return rule or "", summed if "query" in needs else ""


def splits_room(layer: LayerBase) -> bool:
    """True if a fixed capacity has room for narrow tokens as prompts need it, and in the last run for what is left.

    Else every run has room for all. Of tokens that are quantized again as turns age, every turn would need other room,
    and steps would have to be captured again.
    """
    return len(layer.held().runs) > 1 and "turns" not in layer.scheme.needs


def _budget_blocks(
    store: KVStore, layer: LayerBase, room: int, new: int, before: StepPlan | None, budget: tuple[int, ...]
) -> tuple[int, ...] | None:
    # A trim is due as soon as a row holds more; steps of up to so many tokens may pass before.
    slack = 2 * MAX_STEP
    page = store.format.runs[0][0].page_size
    most = [-(-min(tokens + slack, room) // page) for tokens in budget]
    if layer.capacity is None:
        # A budget that is not used up is not paid for.
        return _blocks_ahead(store, new, most[-1] * page, before)
    have = [view.table.shape[1] for view in store.runs]
    return None if any(a > b for a, b in zip(have, most, strict=True)) else tuple(most)


def _blocks_ahead(store: KVStore, new: int, most: int, before: StepPlan | None, fixed: bool = False) -> tuple[int, ...]:
    """Pages of a row with so many new tokens, ``most`` tokens at the most: steps seal into the last run only.

    With a fixed capacity, room that the last run need not have goes to the others when these need more.
    """
    have, page = [view.table.shape[1] for view in store.runs], store.format.runs[-1][0].page_size
    held = min(store.state.wide_most + max(new, 0), most)
    # Sizes of the buffer hold until it has no room; after a reset, rows of one run may come to hold more.
    if (
        before is not None
        and all(a <= b for a, b in zip(have, before.blocks, strict=True))
        and (not store.longest or held <= before.blocks[-1] * page)
    ):
        return before.blocks
    last = -(-held // page)
    return (*have[:-1], last if fixed and not store.format.ordered else max(have[-1], last))
