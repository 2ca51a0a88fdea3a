"""Nothing is compiled again for another batch or length, and all that a run needs can be compiled ahead of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from hfkvq.caches.attention.interface import hfkvq_attention
from hfkvq.caches.compile import LayerShape, layer_plan
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.layers.build import group_layers
from hfkvq.caches.schemes.base import get_scheme
from hfkvq.kernels.compile import compile_layers, normal

ROOT = Path(__file__).resolve().parents[2]

QUICK = ("best-3.4", "arkv", "kvarn", "kitty-pro@2048")
SLOW = ("mixkvq", "saw-int4", "kitty-pro", "triaxial", "full", "full@128")
PRESETS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    """What `launched_kernels` says of the presets that tests are run for.

    In a process of its own: at its import Triton decides whether it compiles.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    folder = tmp_path_factory.mktemp("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "HFKVQ_TUNING": str(folder / "none.json"), "TRITON_CACHE_DIR": str(folder)}
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    presets = dict.fromkeys(x.params["preset"] for x in params if x is not None and "preset" in x.params)
    command = [sys.executable, "-m", "tests.kernels.launched_kernels", ",".join(presets or QUICK[:1])]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def found(told):
    return told["launched"]


def variants(pairs, merges=False):
    return {(name, key) for name, key in pairs if merges or name != "merge.merge_kernel"}


@pytest.mark.parametrize("preset", PRESETS)
def test_variants_do_not_depend_on_rows_and_lengths(found, preset):
    first, *others = [variants(pairs) for name, pairs in found[preset].items() if " x " in name]
    if preset == "arkv":
        # Steps below the budget, which the first prompt exceeds, begin with a kernel of their own.
        first |= {pair for pair in others[0] if pair[0] == "step.advance_kernel"}
    for pairs in others:
        # Of a short prompt there may be nothing to seal.
        assert {name for name, _ in pairs - first} == set()
    merges = {key for name, key in found[preset]["ahead"] if name == "merge.merge_kernel"}
    assert len(merges) <= 3


@pytest.mark.parametrize("preset", PRESETS)
def test_all_that_runs_need_is_compiled_ahead(found, preset):
    ahead, several = (variants(found[preset][name], merges=True) for name in ("ahead", "several ahead"))
    assert ahead < several
    assert ("several" in found[preset]) == (preset not in ("triaxial", "arkv"))
    for case, pairs in found[preset].items():
        have = several if case.startswith("several") else ahead
        missing = sorted(name for name, _ in variants(pairs, merges=True) - have)
        assert missing == [], case


def test_names_of_kernels_do_not_depend_on_what_came_before(told):
    """Else a process would not find what another one has compiled."""
    first, second = told["names"], told["names_backward"]
    assert len(first) > 100
    assert [name for name in first if first[name] != second[name]] == []


def test_layers_alike_but_for_rows_and_capacity_are_one():
    plan = layer_plan(get_scheme("kitty-pro"), LayerShape(32, 8, 128), torch.bfloat16)
    assert plan.heads == 8
    assert normal(plan) == normal(normal(plan))
    assert normal(plan).capacity == 1


def test_variants_are_compiled_once_and_found_again(told):
    """Equal variants are one; one that does not compile stops no other, and is left to its launch."""
    found = told["compiled"]
    done = [["hadamard_kernel", False]] * 3 + [["due_kernel", True]]
    assert found["said"] == [{"done": done, "compiled": 2}] * 2
    assert found["again"] == [["hadamard_kernel", ""]]
    assert found["compiled"] == 2


def test_nothing_is_compiled_on_a_cpu():
    plan = layer_plan(get_scheme("full"), LayerShape(32, 8, 128), torch.bfloat16)
    assert compile_layers([(plan, 32, None)], torch.device("cpu")) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
def test_interpreted_kernels_are_not_compiled():
    plan = layer_plan(get_scheme("full"), LayerShape(32, 8, 128), torch.bfloat16)
    assert compile_layers([(plan, 32, None)], torch.device("cuda", 0)) == []


@pytest.mark.gpu
def test_a_cache_finds_what_was_compiled_for_it(monkeypatch):
    """After `compile_layers` a prompt and its steps compile no kernel, whichever variant they launch."""
    triton = pytest.importorskip("triton")
    scheme = get_scheme("kitty-pro")
    plan = layer_plan(scheme, LayerShape(8, 2, 128), torch.bfloat16)
    done = compile_layers([(plan, 8, scheme.channel_rule)], torch.device("cuda", 0))
    assert not any(error for _, error in done)
    missed = []

    def listen(src, cache_hit, **_):
        if not cache_hit:
            missed.append(src.name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    layer = KVLayer(scheme, PaddingReader(), recordable=True)
    group_layers([layer], 4)
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    for tokens in (300, *[1] * 140):
        query, key, value = (
            torch.randn(1, heads, tokens, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
        )
        hfkvq_attention(module, query, *layer.update(key, value), None, scaling=128**-0.5)
    assert missed == []


def test_a_kernel_that_could_not_be_loaded_is_not_launched():
    """Triton has a launcher then, and no function."""
    compile = pytest.importorskip("hfkvq.kernels.triton.compile")
    compiled = types.SimpleNamespace(name="decode_kernel", function=None, _init_handles=lambda: None)
    with pytest.raises(RuntimeError, match="decode_kernel: this kernel could not be loaded"):
        compile.load(compiled)
