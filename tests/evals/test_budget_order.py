"""The order in which a cache with a budget goes down, by prices that are known by hand."""

from __future__ import annotations

import json

import pytest

from evals.budget import tune_order
from hfkvq import MixedKVCache
from hfkvq.caches.budget import ORDER_KIND
from hfkvq.caches.schemes.full import Full
from hfkvq.caches.schemes.kivi import Kivi
from hfkvq.tuning.objectives import Score
from tests.caches.models import build

LAYERS = 4
# Loss of 4 and of 2 bits, by layer, of keys and of values; layer 2 of 4 stays at 4 bits.
LOSS = {
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
                value += 0.0 if isinstance(own, Full) else LOSS[side][layer][not isinstance(own, Kivi)]
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
