"""Layer-wise search against objectives whose best answers are known by hand, and once on a tiny model."""

from __future__ import annotations

import math

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import get_preset
from hfkvq.tuning.layerwise import LayerCell, LayerStep, tune_layers
from hfkvq.tuning.score import Score
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

    def __init__(self, loss=LOSS, **score):
        self.loss, self.score, self.calls = loss, score, []

    def value(self, own):
        return sum(loss[NAMES[scheme]] for loss, scheme in zip(self.loss, own, strict=True))

    def __call__(self, preset, report=None):
        own = preset.by_layer(len(self.loss))
        self.calls.append(tuple(NAMES[scheme] for scheme in own))
        value, bits = self.value(own), sum(BITS[scheme] for scheme in own) / len(own)
        return Score(value, bits, bits, cache_bytes=1000 * bits, samples=4, **self.score)


def plan_of(objective=None, base="kivi-2", candidates=("kivi-4", "full"), layers=3, **options):
    return tune_layers(base, candidates, objective or Additive(), layers, **options)


def chosen(plan):
    return [NAMES[scheme] for scheme in plan.preset.by_layer(plan.layers)]


class TestGreedy:
    def test_table(self):
        seen = []
        objective = Additive()
        plan = plan_of(objective, max_total_bits=2.0, on_step=seen.append)
        assert plan.start.value == pytest.approx(1.45)
        assert [(cell.layer, cell.candidate) for cell in plan.table] == [
            (layer, name) for layer in range(3) for name in ("kivi-4", "full")
        ]
        assert plan.cell(2, "full").value == pytest.approx(0.55)
        assert plan.gain(plan.cell(0, "kivi-4")) == pytest.approx(0.4)
        assert plan.cell(0, "full").total_bits == pytest.approx((16 + 2 + 2) / 3)
        # No room for any of it: the base stays.
        assert seen == list(plan.table)
        assert plan.preset == get_preset("kivi-2")
        assert plan.steps == ()
        assert plan.stopped.startswith("budget: nothing that would still gain fits into the")
        assert len(set(objective.calls)) == len(objective.calls) == 7 + 2

    def test_gain_per_bit_under_a_budget(self):
        """Gains a bit of a layer: 4 bits 0.4/2, 0.01/2 and 0.3/2; whole 0.5/14, 0.05/14 and 0.9/14."""
        plan = plan_of(max_total_bits=10 / 3)
        assert chosen(plan) == ["kivi-4", "kivi-2", "kivi-4"]
        assert [step.changes for step in plan.steps] == [((0, "kivi-4"),), ((2, "kivi-4"),)]
        assert [step.gain for step in plan.steps] == pytest.approx([0.4, 0.3])
        assert plan.score.value == pytest.approx(0.75)
        assert plan.score.total_bits == pytest.approx(10 / 3)
        assert plan.candidate_of(0) == "kivi-4"
        assert plan.candidate_of(1) is None

    def test_without_a_budget_all_that_gains(self):
        plan = plan_of()
        assert chosen(plan) == ["full"] * 3
        assert plan.preset.layers == (("0-2", get_scheme("full")),)
        assert plan.stopped == "done: no change gains anything"
        assert plan.limit is None

    def test_bytes(self):
        plan = plan_of(max_bytes=3333.4)
        assert plan.cost == "cache_bytes"
        assert chosen(plan) == ["kivi-4", "kivi-2", "kivi-4"]

    def test_base_over_the_budget_is_lowered(self):
        plan = plan_of(base="kivi-4", candidates=("kivi-2", "full"), max_total_bits=3.0)
        # Layer 1 loses 0.01, layer 2 0.3 and layer 0 0.4.
        assert chosen(plan) == ["kivi-4", "kivi-2", "kivi-2"]
        assert [step.reason for step in plan.steps] == ["lower", "lower"]
        assert plan.score.total_bits <= 3.0

    def test_gains_are_measured_again(self):
        """Either of layers 0 and 2 does, and both together are no better: the second must not be bought."""

        class Either(Additive):
            def value(self, own):
                raised = own[0] != get_scheme("kivi-2"), own[2] != get_scheme("kivi-2")
                return (0.2 if any(raised) else 1.0) - (0.1 if own[1] != get_scheme("kivi-2") else 0.0)

        plan = plan_of(Either(), candidates=["kivi-4"])
        assert chosen(plan) == ["kivi-4", "kivi-4", "kivi-2"]
        assert [step.gain for step in plan.steps] == pytest.approx([0.8, 0.1])


class TestNoise:
    def test_given(self):
        plan = plan_of(noise=0.35, max_total_bits=4.0)
        assert [step.changes for step in plan.steps] == [((0, "kivi-4"),)]
        assert plan.stopped == "noise: the best change left gains 0.3, which is within 0.35"

    def test_what_gains_enough_is_found_behind_what_is_cheap(self):
        """Layer 2 whole gains 0.9, but ranks behind four cheaper changes a bit."""
        plan = plan_of(noise=0.7, top=1)
        assert [step.changes for step in plan.steps] == [((2, "full"),)]

    @pytest.mark.parametrize(("parts", "steps"), [((1.0, 1.2, 0.8, 1.0), 2), ((4.0, -1.0, -1.0, 2.0), 0), ((1.0,), 0)])
    def test_paired_by_part(self, parts, steps):
        """The same parts both times: what is common to them says nothing, what the change does to each does."""

        class Parts(Additive):
            def __call__(self, preset, report=None):
                score = super().__call__(preset)
                values = [100.0 * k + part * score.value for k, part in enumerate(parts)]
                for n in range(1, len(values) + 1):
                    report(n - 1, sum(values[:n]) / n)
                return score

        plan = plan_of(Parts(low=-100.0, high=200.0), candidates=["kivi-4"], max_total_bits=10 / 3)
        assert len(plan.steps) == steps


class TestComparison:
    def test_naive_rule_at_the_same_or_more_bits(self):
        six = [{"kivi-2": x, "kivi-4": x / 2, "full": 0.0} for x in (0.1, 0.9, 0.1, 0.8, 0.1, 0.1)]
        plan = plan_of(Additive(six), layers=6, max_total_bits=7.0, held_out=Additive([*six[1:], six[0]]))
        names = [other.name for other in plan.compared]
        assert names == ["plan", "base", "first and last 1 full", "first and last 2 full"]
        ours, base, _, naive = plan.compared
        assert naive.preset.by_layer(6) == [get_scheme(x) for x in ("full", "full", "kivi-2", "kivi-2", "full", "full")]
        assert naive.score.total_bits >= ours.score.total_bits
        assert ours.score.value < naive.score.value
        assert base.held_out.value == pytest.approx(base.score.value)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_total_bits": 1.5}, "max_total_bits: got 1.5, but the base has 2 and the least possible .* is 2;"),
            ({"max_bytes": 1500}, "max_bytes: got 1,500, but the base has 2,000 and the least possible .* is 2,000"),
            (
                {"base": "full", "candidates": ["kivi-4", "kivi-2"], "max_total_bits": 1.5},
                "the base has 16 and the least possible with these candidates is 2;",
            ),
            (
                {"base": get_preset("kivi-4", {"1": "full"}), "candidates": ["kivi-4"], "max_total_bits": 3.0},
                "the base has 8 and the least possible with these candidates is 4;",
            ),
            ({"max_total_bits": 3, "max_bytes": 3}, "got both; choose one"),
            ({"candidates": []}, r"candidates: got \[\], allowed one or more"),
            ({"candidates": "full"}, "candidates: got 'full', allowed one or more"),
            ({"candidates": ["kivi-2"]}, "candidates: got only the base's own scheme"),
            ({"candidates": ["kivi-3"]}, "scheme: got 'kivi-3', which is unknown"),
            ({"candidates": [get_preset("full", {"0": "kivi-2"})]}, "differs by layer, but a candidate is for one"),
            ({"compressed": [0, 3]}, r"compressed: got \[3\], allowed layers 0 to 2"),
            ({"compressed": []}, "compressed: got no layer"),
            ({"layers": 0}, "layers: got 0, allowed 1 or more"),
            ({"base": get_preset("kivi-2", {"5": "full"})}, "layers: got '5', but the model has layers 0 to 2"),
            ({"noise": -1.0}, "noise: got -1.0, allowed 0 or more"),
            ({"top": 0}, "top: got 0, allowed 1 or more"),
        ],
    )
    def test_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            plan_of(**options)

    def test_nan(self):
        class Breaks(Additive):
            def value(self, own):
                return math.nan if own[1] == get_scheme("full") else super().value(own)

        with pytest.raises(ValueError, match=r"objective: got nan at 6.66.* total_bits for full in layer 1, allowed"):
            plan_of(Breaks())


def test_the_choice_is_a_preset_file(tmp_path):
    plan = plan_of(max_total_bits=10 / 3, held_out=Additive())
    assert plan.preset.origin["objective"] == "KLD"
    plan.preset.save(tmp_path / "preset.json")
    assert get_preset(tmp_path / "preset.json") == plan.preset


def test_tiny_model():
    """Real measurements: the plan fits, is no worse than the base, and makes a cache."""
    from hfkvq.tuning.objectives import TextKLD

    model = build("qwen3", num_hidden_layers=3)
    tokens = torch.randint(3, 120, (4, 224))
    objective = TextKLD(model, tokens, prefill=160, chunk=32, batch_size=1, parts=4)
    steps = []
    plan = tune_layers(
        get_preset("kivi-2", group_size=32, local_length=32),
        ["full"],
        objective,
        3,
        compressed=[0, 1, 2],
        noise=0.0,
        max_total_bits=22.0,
        on_step=steps.append,
    )
    assert sum(isinstance(step, LayerCell) for step in steps) == 3
    assert sum(isinstance(step, LayerStep) for step in steps) == len(plan.steps) >= 1
    assert plan.score.value < plan.start.value
    assert plan.score.total_bits <= 22.0
    # The first step takes the layer that gains most a bit.
    best = min((cell.score.value, cell.layer) for cell in plan.table)[1]
    assert plan.steps[0].changes == ((best, "full"),)
    cache = MixedKVCache(model, plan.preset, attach=False)
    assert [layer.scheme for layer in cache.layers] == plan.preset.by_layer(3)
