"""Calibration: D_k(b) and N_k by hand, what is captured, requests from conversations, and the commands."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from evals.capture import Capture, capture, compressed_layers
from evals.triaxial.__main__ import app
from evals.triaxial.allocation import Sensitivity
from evals.triaxial.calibration import aggregate, distortion
from hfkvq.caches import BitTable
from tests.caches.models import build, prompt
from tests.command import invoke

OBS, USER, INST = "older|text|obs", "current|text|user", "older|text|inst"


# D_k(b).


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


# Capture.


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


# The commands, on the reference model.


def test_calibrate_then_allocate(tmp_path, monkeypatch):
    from hfkvq import TriAxialCache
    from hfkvq.measure.demo import prompts
    from hfkvq.measure.reference import load_reference, tools

    # CPUs take several times as long in the checkpoint's bf16.
    monkeypatch.setattr(prompts, "load", functools.partial(prompts.load, dtype=torch.float32))

    data, found, table = (tmp_path / name for name in ("data.jsonl", "s.json", "table.json"))
    with data.open("w") as file:
        for seed in range(2):
            example = tools(seed=seed, rounds=2)
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
