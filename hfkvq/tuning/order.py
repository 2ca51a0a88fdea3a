"""`tune_order`: the order in which a cache with a budget goes down, by what each step down costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfkvq.caches.budget import ORDER_KIND, Budget
from hfkvq.caches.schemes.preset import Preset
from hfkvq.kernels.pages import Side

from .layerwise import LayerCell, LayerStep, tune_layers
from .score import Objective

SIDES: tuple[Side, Side] = ("keys", "values")


def tune_order(
    objective: Objective, layers: int, dim: int, on_step: Callable[[LayerCell | LayerStep], Any] | None = None
) -> list[tuple[int, Side]]:
    """Sides of layers in the order in which they go down: those first that lose least for each bit that they save.

    The middle of the ladder is measured (`tune_layers`), then it with one side of one layer a rung up or down.

    Args:
        objective: measures presets, e.g. `hfkvq.tuning.objectives.TextKLD`; about 4 times a layer.
        layers: of the model.
        dim: of a head.
        on_step: see `tune_layers`.
    """
    budget = Budget(1, layers, dim)
    middle = budget.scheme(0, (1, 1))
    # Layers in which a preset differs have rungs of their own; the middle rung is alike in all.
    moves = [move for move in budget.moves if move.rung > 0]
    last = {(layer, side): rung for layer, side, rung in moves}
    near = max(range(layers), key=lambda layer: sum(last.get((layer, side), 0) for side in SIDES))
    candidates = {
        f"{side} {rung}": budget.scheme(near, (rung, 1) if side == "keys" else (1, rung))
        for side in SIDES
        for rung in (0, 2)
    }
    plan = tune_layers(
        Preset(middle), candidates, objective, layers, noise=math.inf, top=1, compare=False, on_step=on_step
    )
    sign = 1 if objective.direction == "minimize" else -1
    prices = {}
    for layer, side, rung in moves:
        cell = plan.cell(layer, f"{side} {0 if rung == 1 else 2}")
        assert cell is not None, "measured"
        loss = sign * (plan.start.value - cell.value) * (1 if rung == 1 else -1)
        saved = budget.bits(layer, side, rung - 1) - budget.bits(layer, side, rung)
        prices[layer, side, rung] = max(loss, 0.0) / saved
        if rung > 1:
            # A side comes to a rung by the one above.
            prices[layer, side, rung] = max(prices[layer, side, rung], prices[layer, side, rung - 1])
    # Equal prices go by depth.
    place = {move: at for at, move in enumerate(moves)}
    ordered = sorted(moves, key=lambda move: (prices[tuple(move)], move.rung, place[move]))
    return [(layer, side) for layer, side, _ in ordered]


def save_order(path: str | Path, order: list[tuple[int, Side]], origin: dict[str, Any]) -> None:
    """Writes an order as JSON, which ``MixedKVCache(model, memory=..., order=path)`` takes.

    Args:
        path: of the file, which is replaced.
        order: pairs of a layer and "keys" or "values", those first that go down first.
        origin: plain data that says how it was measured.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({"kind": ORDER_KIND, "order": order, "origin": origin}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")
