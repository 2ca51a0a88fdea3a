"""The search, over invented times."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from hfkvq import kernels
from hfkvq.kernels.triton import configs
from hfkvq.measure.bench import tune
from hfkvq.measure.bench.cases import Shape
from hfkvq.measure.bench.timing import Timing

CPU = torch.device("cpu")
KEY = "2c128/2t128,D128,N8"
START = dict(configs.DEFAULTS["decode"])


def search(model, start=START):
    """Searches where ``model(knobs)`` gives the times."""
    said = []

    def times():
        knobs = configs.lookup(CPU, "decode", KEY)
        return model(knobs)

    with configs.override("decode", KEY, **start):
        found = tune.search("decode", KEY, start, times, lambda what, share: said.append((what, share)))
    assert all(0 <= share < 1 for _, share in said)
    return found, [what for what, _ in said]


def test_candidates_change_one_knob():
    tried = tune.candidates("decode", START)
    assert all(sum(knobs[name] != START[name] for name in START) == 1 for knobs in tried)
    assert len(tried) == sum(len(values) - 1 for values in tune.GRID["decode"].values())


def test_grid_and_knobs_are_the_same():
    assert {kernel: set(grid) for kernel, grid in tune.GRID.items()} == {
        kernel: set(knobs) for kernel, knobs in configs.DEFAULTS.items()
    }


def test_the_best_of_each_knob_are_tried_together():
    found, said = search(lambda knobs: [100.0 + 5 * abs(knobs["stages"] - 3) + abs(knobs["programs_per_sm"] - 6)])
    assert found.after == {**START, "stages": 3, "programs_per_sm": 6}
    assert found.share == pytest.approx(100 / 112)
    assert said[-1] == f"{KEY} programs_per_sm 6, stages 3"


def test_knobs_that_only_help_apart_are_not_joined():
    def model(knobs):
        changed = [name for name in START if knobs[name] != START[name]]
        return [{(): 100.0, ("stages",): 90.0, ("step",): 80.0}.get(tuple(changed), 120.0)]

    found, _ = search(model)
    assert found.after["stages"] == 5
    assert found.after["step"] != 0
    assert found.share == pytest.approx(0.8)


def test_less_than_two_per_cent_is_noise():
    found, _ = search(lambda knobs: [99.0 if knobs["step"] == 64 else 100.0])
    assert (found.after, found.share) == (START, 1.0)


def test_all_shapes_count_the_same():
    # Twice as fast where it is short, ten per cent slower where it is long.
    found, _ = search(lambda knobs: [5.0, 1100.0] if knobs["stages"] == 2 else [10.0, 1000.0])
    assert found.after["stages"] == 2
    assert found.share == pytest.approx(0.55**0.5)


def test_what_the_gpu_has_no_room_for_is_passed_over():
    def model(knobs):
        if knobs["stages"] == 7:
            raise RuntimeError("out of resource: shared memory")
        return [100.0 - 10 * (knobs["stages"] == 3)]

    found, _ = search(model)
    assert found.after["stages"] == 3


def test_tune_finds_the_variants_that_formats_use(monkeypatch):
    """The kernels' own look-ups tell which variants there are."""

    class Store:
        def __init__(self, key):
            self.key = key

    def store_calls(store, query, scaling, cache):
        return [lambda: configs.lookup(CPU, "decode", store.key)]

    def time_calls(calls, replays):
        knobs = calls[0]()
        return Timing(1, 500.0 - knobs["step"] if knobs else 0.0, 1, 1, 1, replays)

    monkeypatch.setattr(tune, "fill", lambda name, keys, values: Store({"kitty-pro": "kitty"}.get(name, name)))
    monkeypatch.setattr(tune, "store_calls", store_calls)
    monkeypatch.setattr(tune, "cache_size", lambda device: 1)
    monkeypatch.setattr(tune, "time_calls", time_calls)
    shapes = [Shape(1, 64, heads=1, kv_heads=1, head_dim=16), Shape(2, 64, heads=1, kv_heads=1, head_dim=16)]
    said = []
    findings = tune.tune(["kitty", "kitty-pro", "int4"], shapes, CPU, lambda what, share: said.append(what))
    assert [(finding.kernel, finding.key, finding.after["step"]) for finding in findings] == [
        ("decode", "int4", 128),
        ("decode", "kitty", 128),
    ]
    first_timing = next(i for i, what in enumerate(said) if what.startswith(("int4", "kitty")))
    assert any(what.startswith("compiling") for what in said[:first_timing])
    assert not any(what.startswith(("compiling", "filling")) for what in said[first_timing:])
    # Nothing stays overridden.
    assert configs.lookup(CPU, "decode", "kitty")["step"] == 0
    assert tune.to_save(findings)["decode"]["kitty"]["step"] == 128


def test_candidates_are_compiled_in_processes(monkeypatch):
    """Every candidate of every format that looks a variant up; a pool that dies is passed over."""
    done, said = [], []

    class Pool:
        def __init__(self, workers, context):
            assert context.get_start_method() == "spawn"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def submit(self, function, name, shape, kernel, key, knobs):
            assert function is tune.compile_format
            if name == "dies":
                raise BrokenProcessPool
            done.append((name, shape, key, knobs))
            job = Future()
            job.set_result(None)
            return job

    monkeypatch.setattr(tune, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 4)
    uses = {"kitty": {("decode", "a")}, "int4": {("decode", "b")}}
    starts = {("decode", "a"): START, ("decode", "b"): START}
    shape = Shape(32, 8192, heads=1, kv_heads=1, head_dim=16)
    tune._compile_apart(uses, shape, starts, lambda what, share: said.append(share))
    tried = tune.candidates("decode", START)
    assert [(name, key) for name, _, key, _ in done] == [("kitty", "a")] * len(tried) + [("int4", "b")] * len(tried)
    assert [knobs for *_, knobs in done] == [*tried, *tried]
    assert {(small.batch, small.context, small.head_dim) for _, small, _, _ in done} == {(1, 512, 16)}
    assert said == [i / len(done) for i in range(len(done))]
    tune._compile_apart({"dies": {("decode", "a")}}, shape, starts, lambda what, share: None)


def test_compiling_a_format_is_attending_once():
    looked = []
    with kernels.use_interpreter(), configs.watch() as seen:
        tune.compile_format("int4", Shape(1, 160, 2, 1, 32, "float16"), "decode", KEY, {"stages": 2}, "cpu")
        looked += seen
    assert [kernel for kernel, _ in looked] == ["decode"]
