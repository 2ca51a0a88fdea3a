"""Kernels compile without a GPU, none again for another batch or length, and all that a run needs ahead of it."""

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

QUICK = ("best-3.4", "arkv", "kitty-pro@2048")
SLOW = (
    "kvarn",
    "mixkvq",
    "saw-int4",
    "kitty-pro",
    "trellis-2.5",
    "best-2.0",
    "best-1.5",
    "triaxial",
    "full",
    "full@128",
)
PRESETS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def compiling(module, *arguments, folder):
    """Runs a module where Triton compiles, which it decides when it is imported; what is tuned here does not matter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-X", "faulthandler", "-m", f"tests.kernels.{module}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """Process in which `launched_kernels` looks at the presets that tests are run for, and its folder."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    folder = tmp_path_factory.mktemp("triton")
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    presets = dict.fromkeys(x.params["preset"] for x in params if x is not None and "preset" in x.params)
    return compiling("launched_kernels", ",".join(presets or QUICK[:1]), folder, folder=folder), folder


@pytest.fixture(scope="module")
def told(ran):
    """Words of `launched_kernels`."""
    done, _ = ran
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def found(told):
    return told["launched"]


def failures_of(log, printed):
    """Where, in which case and how a GPU's kernels failed."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    failures = [event[1:] for event in events if event[0] == "failed"]
    if events[-1][0] != "done":
        failures.append([*events[-1][1:3], f"The process ended here. All processes printed:\n{printed[-4000:]}"])
    return failures


def check_front_end(logs, printed):
    """One error of a kind: what is wrong with a kernel is wrong in many cases, and mostly for all GPUs."""
    assert all(log.exists() for log in logs), printed
    found = {}
    for log in logs:
        for where, case, error in failures_of(log, printed):
            _, gpus, cases = found.setdefault((where, error.splitlines()[0]), (error, {}, {}))
            gpus[log.name] = cases[case] = True
    said = [
        f"{where} fails for compute capability {', '.join(gpus)}; {len(cases)} cases, the first: {next(iter(cases))}\n"
        f"{error}"
        for (where, _), (error, gpus, cases) in found.items()
    ]
    if said:
        pytest.fail("\n\n".join(said), pytrace=False)


def test_kernels_pass_the_front_end(ran):
    """A few variants of each kernel: the interpreter runs Python, which knows no types."""
    done, folder = ran
    check_front_end([folder / "9.0"], done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_all_variants_pass_the_front_end_for_every_gpu(tmp_path):
    gpus = ("8.0", "9.0", "10.0")
    done = compiling("compile_kernels", tmp_path, 0, *gpus, folder=tmp_path)
    check_front_end([tmp_path / name for name in gpus], done.stdout + done.stderr)


def variants(pairs, merges=False):
    return {(name, key) for name, key in pairs if merges or name != "merge.merge_kernel"}


@pytest.mark.parametrize("preset", PRESETS)
def test_variants_do_not_depend_on_rows_and_lengths(found, preset):
    first, *others = [variants(pairs) for name, pairs in found[preset].items() if " x " in name]
    if preset == "arkv":
        # Steps below the budget, which the first prompt exceeds, begin with a kernel of their own.
        first |= {pair for pair in others[0] if pair[0] == "step.advance_kernel"}
    for pairs in others:
        # Short prompts may have nothing to seal.
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


def test_all_that_an_engine_needs_for_prompts_is_compiled_ahead(told):
    for case, (launched, ahead) in told["engine"].items():
        have = {(name, key) for name, key in ahead}
        assert sorted(name for name, key in launched if (name, key) not in have) == [], case
        assert {name for name, _ in launched} == {name for name, _ in ahead}, case


@pytest.mark.parametrize("kind", ["cache", "engine"])
def test_all_that_is_launched_down_a_ladder_is_compiled_ahead(kind, tmp_path):
    """By changes and steps of a cache with a budget, and of an engine with one."""
    pytest.importorskip("triton")
    if kind == "engine":
        pytest.importorskip("hfkvq.serving", reason="Transformers before 5.19", exc_type=ImportError)
    done = compiling("ladder_kernels", kind, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missing"] == []
    assert {"attend.decode_kernel", "channel.seal_channel_kernel", "smooth.smooth_kernel"} < set(found["launched"])


@pytest.mark.parametrize("before", [5e-3, 1e-5])
def test_threads_wait_less_for_pythons_lock_while_kernels_are_compiled(before, monkeypatch):
    compiler, seen = pytest.importorskip("hfkvq.kernels.triton.compile"), []
    monkeypatch.setattr(compiler, "_submit", lambda *_: seen.append(sys.getswitchinterval()) or [None])
    usual = sys.getswitchinterval()
    sys.setswitchinterval(before)
    try:
        assert compiler.compile_all([compiler.Wanted(compiling, (), {})], None) == [("compiling", "")]
        found = sys.getswitchinterval()
    finally:
        sys.setswitchinterval(usual)
    assert seen == pytest.approx([min(before, compiler.TURN)])
    assert found == pytest.approx(before)


def test_names_of_kernels_do_not_depend_on_what_came_before(told):
    """Kernels that one process has compiled are found by another by name."""
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
    done = [["hadamard_kernel", False]] * 3 + [["place_kernel", True]]
    assert found["said"] == [{"done": done, "compiled": 2}] * 2
    assert found["again"] == [["hadamard_kernel", ""]]
    assert found["compiled"] == 2


def test_nothing_is_compiled_on_a_cpu():
    plan = layer_plan(get_scheme("full"), LayerShape(32, 8, 128), torch.bfloat16)
    assert compile_layers([(plan, 32, None, False)], torch.device("cpu")) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
def test_interpreted_kernels_are_not_compiled():
    plan = layer_plan(get_scheme("full"), LayerShape(32, 8, 128), torch.bfloat16)
    assert compile_layers([(plan, 32, None, False)], torch.device("cuda", 0)) == []


@pytest.mark.gpu
def test_a_cache_finds_what_was_compiled_for_it(monkeypatch):
    """After `compile_layers` a prompt and its steps compile no kernel, whichever variant they launch."""
    triton = pytest.importorskip("triton")
    scheme = get_scheme("kitty-pro")
    plan = layer_plan(scheme, LayerShape(8, 2, 128), torch.bfloat16)
    done = compile_layers([(plan, 8, scheme.channel_rule, False)], torch.device("cuda", 0))
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
