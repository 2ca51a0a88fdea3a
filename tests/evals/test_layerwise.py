"""Searches over layers against objectives whose best answers are known by hand."""

from __future__ import annotations

import json

import pytest

from evals.budget import tune_order
from evals.layerwise import tune_layers
from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.budget import ORDER_KIND
from hfkvq.caches.schemes.full import Full
from hfkvq.caches.schemes.kivi import Kivi
from hfkvq.tuning.objectives import Score
from tests.caches.models import build

BITS = {get_scheme("kivi-2"): 2.0, get_scheme("kivi-4"): 4.0, get_scheme("full"): 16.0}
NAMES = {get_scheme("kivi-2"): "kivi-2", get_scheme("kivi-4"): "kivi-4", get_scheme("full"): "full"}
# What is lost by holding a layer so, added up over layers.
LOSS = (
    {"kivi-2": 0.50, "kivi-4": 0.10, "full": 0.0},
    {"kivi-2": 0.05, "kivi-4": 0.04, "full": 0.0},
    {"kivi-2": 0.90, "kivi-4": 0.60, "full": 0.0},
)


class Additive:
    """Losses add up over layers, and bits are their mean."""

    name, direction = "KLD", "minimize"

    def __init__(self, loss=LOSS):
        self.loss, self.calls = loss, []

    def value(self, own):
        return sum(loss[NAMES[scheme]] for loss, scheme in zip(self.loss, own, strict=True))

    def __call__(self, preset):
        own = preset.by_layer(len(self.loss))
        self.calls.append(tuple(NAMES[scheme] for scheme in own))
        value, bits = self.value(own), sum(BITS[scheme] for scheme in own) / len(own)
        return Score(value, bits, bits, cache_bytes=1000 * bits, samples=4)


def plan_of(objective=None, base="kivi-2", candidates=("kivi-4", "full"), layers=3, max_total_bits=10 / 3, **options):
    return tune_layers(base, candidates, objective or Additive(), layers, max_total_bits=max_total_bits, **options)


def chosen(plan):
    return [NAMES[scheme] for scheme in plan.preset.by_layer(3)]


def test_gain_per_bit_within_the_budget():
    """Gains a bit of a layer: 4 bits 0.4/2, 0.01/2 and 0.3/2; whole 0.5/14, 0.05/14 and 0.9/14."""
    plan = plan_of()
    assert chosen(plan) == ["kivi-4", "kivi-2", "kivi-4"]
    assert plan.score.value == pytest.approx(0.75)
    assert plan.score.total_bits == pytest.approx(10 / 3)
    everything = plan_of(max_total_bits=16)
    assert chosen(everything) == ["full"] * 3
    assert everything.preset.layers == (("0-2", get_scheme("full")),)
    # A layer of 4 bits is judged by what 16 bring beyond that.
    assert chosen(plan_of(max_total_bits=8.0)) == ["kivi-4", "kivi-4", "full"]


def test_gains_are_measured_in_the_state_they_change():
    """Either of layers 0 and 2 does, and both together are no better: the second must not be bought."""

    class Either(Additive):
        def value(self, own):
            raised = own[0] != get_scheme("kivi-2"), own[2] != get_scheme("kivi-2")
            return (0.2 if any(raised) else 1.0) - (0.1 if own[1] != get_scheme("kivi-2") else 0.0)

    plan = plan_of(Either(), candidates=["kivi-4"], max_total_bits=4.0)
    assert chosen(plan) == ["kivi-4", "kivi-4", "kivi-2"]
    assert plan.score.value == pytest.approx(0.1)


LAYERS = 4
# Loss of 4 and of 2 bits, by layer, of keys and of values; layer 2 of 4 stays at 4 bits.
SIDES_LOSS = {
    "keys": ((0.3, 9.0), (0.1, 2.0), (5.0, 0.0), (0.2, 4.0)),
    "values": ((0.01, 1.0), (0.6, 8.0), (0.7, 0.0), (0.02, 0.1)),
}


class Prices:
    """Losses add up over layers and sides."""

    name, direction = "KLD", "minimize"

    def __call__(self, preset):
        value = 0.0
        for layer, scheme in enumerate(preset.by_layer(LAYERS)):
            for side, own in (("keys", scheme.key_scheme), ("values", scheme.value_scheme)):
                value += 0.0 if isinstance(own, Full) else SIDES_LOSS[side][layer][not isinstance(own, Kivi)]
        return Score(value, 4.0)


@pytest.fixture(scope="module")
def order():
    return tune_order(Prices(), LAYERS, 128)


def test_the_least_loss_for_each_bit_goes_first(order):
    # 12 bits are saved from 16 to 4, less than 2 from there.
    assert order[:4] == [(0, "values"), (3, "values"), (1, "keys"), (3, "keys")]
    # A side comes to 2 bits after it has come to 4.
    assert sorted(order) == sorted(
        [(layer, side) for layer in range(LAYERS) for side in ("keys", "values") for _ in range(1 + (layer != 2))]
    )
    assert order.index((2, "keys")) > order.index((1, "values"))
    assert order[-1] == (0, "keys")


def test_a_file_of_it_is_followed(order, tmp_path):
    path = tmp_path / "order.json"
    path.write_text(json.dumps({"kind": ORDER_KIND, "order": order}))
    model = build("llama", num_hidden_layers=LAYERS)
    cache = MixedKVCache(model, memory="1MiB", order=path)
    assert [(layer, side) for layer, side, _ in cache.budget.moves] == order
