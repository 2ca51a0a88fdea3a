"""The search, over invented times."""

from __future__ import annotations

import pytest
import torch

from evals import kernel_cases, kernel_tuning
from evals.kernel_bench import Timing
from evals.kernel_cases import Shape
from hfkvq import kernels
from hfkvq.kernels.triton import configs

CPU = torch.device("cpu")
KEY = "2c128/2t128,D128,N8"
START = dict(configs.DEFAULTS["decode"])


def search(model, start=START):
    """Searches where ``model(knobs)`` gives the times."""
    said = []

    timers = [lambda i=i: model(configs.lookup(CPU, "decode", KEY))[i] for i in range(len(model(start)))]
    configs.try_out("decode", KEY, start)
    found = kernel_tuning.search("decode", KEY, start, timers, lambda what, share: said.append((what, share)))
    configs.try_out("decode", KEY, None)
    assert all(0 <= share < 1 for _, share in said)
    return found, [what for what, _ in said]


def test_candidates_change_one_knob():
    tried = kernel_tuning.candidates("decode", START)
    assert all(sum(knobs[name] != START[name] for name in START) == 1 for knobs in tried)
    assert len(tried) == sum(len(values) - 1 for values in kernel_tuning.GRID["decode"].values())


def test_grid_and_knobs_are_the_same():
    assert {kernel: set(grid) for kernel, grid in kernel_tuning.GRID.items()} == {
        kernel: set(knobs) for kernel, knobs in configs.DEFAULTS.items()
    }


def test_the_best_of_each_knob_are_tried_together():
    found, said = search(lambda knobs: [100.0 + 5 * abs(knobs["stages"] - 3) + abs(knobs["programs_per_sm"] - 6)])
    assert found.after == {**START, "stages": 3, "programs_per_sm": 6}
    assert found.share == pytest.approx(100 / 112)
    assert said[-1] == f"{KEY} programs_per_sm 6, stages 3"


def test_less_than_two_per_cent_is_noise():
    found, _ = search(lambda knobs: [99.0 if knobs["step"] == 64 else 100.0])
    assert (found.after, found.share) == (START, 1.0)


def test_what_the_gpu_has_no_room_for_is_passed_over():
    def model(knobs):
        if knobs["stages"] == 7:
            raise RuntimeError("out of resource: shared memory")
        return [100.0 - 10 * (knobs["stages"] == 3)]

    found, _ = search(model)
    assert found.after["stages"] == 3


@pytest.fixture
def invented(monkeypatch):
    """Formats that are variants, and times that fall with their steps."""

    class Store:
        def __init__(self, key):
            self.key = key

    def attending(name, shape, device):
        configs.lookup(CPU, "decode", {"kitty-pro": "kitty"}.get(name, name))
        return iter(())

    def store_calls(store, query, scaling, cache):
        return [lambda: configs.lookup(CPU, "decode", store.key)]

    def time_calls(calls, replays, aim):
        return Timing(1, 500.0 - calls[0]()["step"], 1, 1, 1, replays)

    monkeypatch.setattr(kernel_tuning, "attending", attending)
    monkeypatch.setattr(kernel_tuning, "fill", lambda name, keys, values: Store({"kitty-pro": "kitty"}.get(name, name)))
    monkeypatch.setattr(kernel_tuning, "store_calls", store_calls)
    monkeypatch.setattr(kernel_tuning, "cache_size", lambda device: 1)
    monkeypatch.setattr(kernel_tuning, "time_calls", time_calls)
    return [Shape(1, 64, heads=1, kv_heads=1, head_dim=16), Shape(2, 64, heads=1, kv_heads=1, head_dim=16)]


def test_tune_finds_the_variants_that_formats_use(invented):
    """The kernels' own look-ups tell which variants there are; what is found is kept at once."""
    kept = []
    findings, variants = kernel_tuning.tune(["kitty", "kitty-pro", "int4"], invented, CPU, keep=kept.append)
    found = [(finding.kernel, finding.key, finding.after["step"]) for finding in findings]
    # In the order of the formats.
    assert found == [("decode", "kitty", 128), ("decode", "int4", 128)]
    assert (variants, kept) == (2, findings)
    # Nothing stays overridden.
    assert configs.lookup(CPU, "decode", "kitty")["step"] == 0


def test_variants_of_a_format():
    """Variants are those that a launch takes, and nothing is launched for them."""
    configs.renew()
    with kernels.use_interpreter():
        wanted = list(kernel_cases.attending("int4", Shape(1, 160, 2, 1, 32, "float16"), CPU))
    assert [kernel for _, kernel, _ in configs.ANSWERS] == ["decode"]
    assert {each.kernel.__name__ for each in wanted} == {"decode_kernel", "merge_kernel"}
    prompt = Shape(1, 160, 2, 1, 32, "float16", queries=20)
    assert {each.kernel.__name__ for each in kernel_cases.attending("int4", prompt, CPU)} == {"gather_pages_kernel"}
    stored = {each.kernel.__name__ for each in kernel_cases.storing("int4", prompt, CPU)}
    assert {"seal_token_kernel", "advance_kernel"} <= stored
