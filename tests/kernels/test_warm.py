"""Nothing is compiled again for another batch or length, and all that a run needs can be compiled ahead of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hfkvq.caches.make import layer_plan
from hfkvq.caches.scheme import get_scheme
from hfkvq.kernels import warm

ROOT = Path(__file__).resolve().parents[2]

PRESETS = ("kitty-pro", "mixkvq", "saw-int4", "triaxial", "arkv", "kivi-2", "kvarn", "full")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    # A process of its own, since Triton decides when it is imported whether it compiles.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"HFKVQ_TUNING": str(tmp_path_factory.mktemp("tuning") / "none.json"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.warm_kernels", ",".join(PRESETS)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def variants(pairs, merges=False):
    return {(name, key) for name, key in pairs if merges or name != "merge.merge_kernel"}


@pytest.mark.parametrize("preset", PRESETS)
def test_variants_do_not_depend_on_rows_and_lengths(found, preset):
    first, *others = [pairs for name, pairs in found[preset].items() if name != "ahead"]
    for pairs in others:
        # Of a short prompt there may be nothing to seal.
        assert {name for name, _ in variants(pairs) - variants(first)} == set()
    merges = {key for pairs in found[preset].values() for name, key in pairs if name == "merge.merge_kernel"}
    assert len(merges) <= 3


@pytest.mark.parametrize("preset", PRESETS)
def test_all_that_runs_need_is_compiled_ahead(found, preset):
    have = variants(found[preset]["ahead"], merges=True)
    for case, pairs in found[preset].items():
        missing = sorted(name for name, _ in variants(pairs, merges=True) - have)
        assert missing == [], case


def test_layers_alike_but_for_rows_and_capacity_are_one():
    plan = layer_plan(get_scheme("kitty-pro"), 32, 8, 128, torch.bfloat16)
    assert plan.heads == 8
    assert warm.normal(plan) == warm.normal(warm.normal(plan))
    assert warm.normal(plan).capacity == 1


def test_nothing_begins_without_a_gpu():
    plan = layer_plan(get_scheme("arkv"), 32, 8, 128, torch.float16)
    assert (plan.fold, plan.heads, plan.query_heads) == (8, 1, 32)
    before = warm._start.cache_info().currsize
    warm.start(plan, 32, torch.device("cpu"), None)
    assert warm._start.cache_info().currsize == before


def test_launches_do_not_wait_for_what_goes_wrong():
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")
    seen = threading.Event()

    def wanted():
        seen.set()
        raise OSError("no room left")

    ahead.compile_beside(wanted, torch.device("cpu"))
    ahead.wait_until_told()
    assert seen.is_set()
    assert ahead._BEGUN == []
