"""TriAxialKV: bits under a budget, calibration by hand, and the commands."""

from __future__ import annotations

import functools
import itertools
import json
import random

import pytest
import torch

from evals.ablations import without_axis
from evals.capture import Capture, capture, compressed_layers
from evals.triaxial.__main__ import app
from evals.triaxial.allocation import Choice, Sensitivity, allocate, allocate_exact, allocate_greedy
from evals.triaxial.calibration import aggregate, distortion
from hfkvq.caches import BitTable
from tests.caches.models import build, prompt
from tests.command import invoke

INST, USER, OBS, OLD = "older|text|inst", "current|text|user", "current|text|obs", "older|text|obs"


def brute_force(choices, room):
    best = None
    for chosen in itertools.product((False, True), repeat=len(choices)):
        cost = sum(c.cost for c, x in zip(choices, chosen, strict=True) if x)
        gain = sum(c.gain for c, x in zip(choices, chosen, strict=True) if x)
        if cost <= room and (best is None or (gain, -cost) > best):
            best = gain, -cost
    return best


def value(choices, chosen):
    picked = [c for c, x in zip(choices, chosen, strict=True) if x]
    return sum(c.gain for c in picked), -sum(c.cost for c in picked)


def test_equation_3_by_hand():
    """100 tokens, B = 3: room for 50 of them in 4 bits. 50 + nothing spares 6, 20 + 30 spare 7."""
    distortion = {INST: (7.0, 1.0), USER: (5.0, 1.0), OBS: (4.0, 1.0)}
    counts = {INST: 50, USER: 20, OBS: 30}
    assert allocate(distortion, counts, 3) == {INST: 2, USER: 4, OBS: 4}
    assert allocate(distortion, counts, 2.4) == {INST: 2, USER: 4, OBS: 2}
    assert allocate(distortion, counts, 2.39) == {INST: 2, USER: 2, OBS: 2}
    assert allocate(distortion, counts, 4) == {INST: 4, USER: 4, OBS: 4}
    assert allocate(distortion, counts, 2) == {INST: 2, USER: 2, OBS: 2}


def test_algorithm_1_by_hand():
    """ρ = 6/100, 4/40, 3/60 with R = 100: the second goes first, the first no longer fits, the third does."""
    choices = [Choice(6, 100), Choice(4, 40), Choice(3, 60)]
    assert allocate_greedy(choices, 100) == [False, True, True]
    assert allocate_greedy(choices, 120) == [False, True, True]
    assert allocate_greedy(choices, 140) == [True, True, False]


def test_greedy_may_miss_what_enumeration_finds():
    choices = [Choice(10, 10), Choice(99, 100)]
    assert allocate_greedy(choices, 100) == [True, False]
    assert allocate_exact(choices, 100) == [False, True]


@pytest.mark.parametrize("seed", range(20))
def test_exact_is_brute_force(seed):
    rng = random.Random(seed)
    choices = [Choice(rng.choice([rng.uniform(-1, 9), 3.0]), rng.randint(1, 20)) for _ in range(rng.randint(1, 9))]
    room = rng.uniform(0, 1) * sum(c.cost for c in choices)
    got = value(choices, allocate_exact(choices, room))
    assert got == pytest.approx(brute_force(choices, room))
    greedy = value(choices, allocate_greedy(choices, room))
    assert greedy[0] <= got[0] + 1e-9
    assert -greedy[1] <= room


FOUR = Sensitivity(
    {INST: (9.0, 1.0), USER: (7.0, 1.0), OBS: (3.0, 1.0), OLD: (1.5, 1.0)}, {INST: 10, USER: 10, OBS: 40, OLD: 40}
)


def test_an_axis_left_out_of_account():
    """Without time the two kinds of results are one, of 80 tokens; without roles, all old tokens are."""
    assert without_axis(FOUR, 2.9, 0) == {INST: 4, USER: 4, OBS: 2, OLD: 2}
    # Both groups have 50 tokens; the old ones gain 8.5, the current ones 8.
    assert without_axis(FOUR, 3, 2) == {INST: 4, OLD: 4, USER: 2, OBS: 2}


def test_aggregate_is_max_over_heads_then_mean_over_requests_then_sum_over_layers():
    """Two layers, two requests, two heads: (max(1, 3) + max(5, 2)) / 2 + (max(0, 2) + max(4, 4)) / 2 = 4 + 3."""
    assert aggregate(torch.tensor([[[1.0, 3], [5, 2]], [[0, 2], [4, 4]]])) == 7


def test_distortion_by_hand():
    """One query that looks at two tokens alike: the error of its output is half the error of the value it sees.

    Values of the second token: 0, 1, 3, ... 3 in a group of eight, so INT2 has the step 1 and is exact; of a group
    0, 0.4, 3: 0.4 becomes 0, and the output is off by 0.2 in one channel.
    """
    keys = torch.zeros(1, 2, 8)
    values = torch.zeros(1, 2, 8)
    values[0, 1] = torch.tensor([0, 0.4, 3, 3, 3, 3, 3, 3])
    captured = Capture(torch.zeros(1, 1, 8), keys, values, 1.0)
    exact = captured.attend(keys, values)
    assert exact[0, 0, 1] == pytest.approx(0.2)
    second = torch.tensor([1])
    assert distortion(captured, second, exact, 2, 8).tolist() == [pytest.approx(0.2**2, rel=1e-3)]
    # 15 steps of 0.2: exact.
    assert distortion(captured, second, exact, 4, 8).item() == pytest.approx(0, abs=1e-6)
    assert distortion(captured, torch.tensor([0]), exact, 2, 8).item() == 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-oss", "gemma2"])
def test_replay_is_what_the_model_computes(family):
    """Replayed outputs equal those of the stock attention, sinks and softcap included."""
    model = build(family)
    layers = compressed_layers(model)
    seen = {}

    def keep(index):
        # The input of the output projection is the attention's output.
        return lambda module, args: seen.__setitem__(index, args[0].detach()[0])

    handles = [model.model.layers[i].self_attn.o_proj.register_forward_pre_hook(keep(i)) for i in layers]
    before = model.config._attn_implementation_internal
    ids = prompt(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        stock = dict(seen)
        captures = capture(model, ids[0].tolist(), layers)
        assert model.config._attn_implementation_internal == before
        assert torch.equal(model(ids).logits, expected)
    for i, captured in zip(layers, captures, strict=True):
        got = captured.attend(captured.keys.float(), captured.values.float())
        torch.testing.assert_close(got.transpose(0, 1).flatten(1), stock[i], rtol=1e-4, atol=1e-5)
    for handle in handles:
        handle.remove()


def test_calibrate_then_allocate(tmp_path, monkeypatch):
    from hfkvq import TriAxialCache
    from hfkvq.measure.demo import prompts
    from hfkvq.measure.reference import load_reference, tools

    # CPUs take several times as long in the checkpoint's bf16.
    monkeypatch.setattr(prompts, "load", functools.partial(prompts.load, dtype=torch.float32))

    data, found, table = (tmp_path / name for name in ("data.jsonl", "s.json", "table.json"))
    with data.open("w") as file:
        for seed in range(2):
            example = tools(seed=seed)
            messages = [*example.messages, {"role": "assistant", "content": example.answer}]
            file.write(json.dumps({"messages": messages, "tools": list(example.tools)}) + "\n")
    done = invoke("calibrate", str(data), "--out", str(found), "--layers", "1", "--device", "cpu", app=app)
    assert done.exit_code == 0, done.output
    assert INST in done.output
    sensitivity = Sensitivity.load(found)
    assert sensitivity.origin.requests == 2
    done = invoke("allocate", str(found), app=app)
    assert done.exit_code == 0, done.output
    assert "2.7" in done.output
    done = invoke("allocate", str(found), "--budget", "2.7", "--out", str(table), app=app)
    assert done.exit_code == 0, done.output
    model, tokenizer = load_reference(torch.float32)
    # Words that the call repeats to the letter get the bits.
    assert BitTable.load(table).bits[USER] == 4
    assert dict(TriAxialCache(model, tokenizer, table=table).scheme.table).keys() == sensitivity.counts.keys()
