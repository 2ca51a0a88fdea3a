"""Several processes and several GPUs: each rank, or device, holds its own heads or layers."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hfkvq import MixedKVCache
from tests.caches.driver import small
from tests.caches.models import build, prompt
from tests.caches.test_generate import _generate

ROOT = Path(__file__).parents[2]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpu", [False, pytest.param(True, marks=[pytest.mark.gpu, TWO_GPUS])], ids=["two processes", "two GPUs"]
)
def test_tensor_parallel(gpu, tmp_path):
    """Two ranks hold a KV head each, and say what one process says; growing, fixed and compiled."""
    model = build("llama")
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "tokens.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(ROOT / "tests/caches/tensor_parallel.py"), str(tmp_path / "model"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    # Where the ranks have been: a code that another device rounds otherwise may become another token.
    alone = copy.deepcopy(model).cuda(0) if gpu else model
    ids = torch.arange(60).view(2, 30).to(alone.device)
    for name in ("full", "kitty", "saw-int4", "mixkvq", "arkv"):
        knobs = {"budget_tokens": 40} if name == "arkv" else {}
        expected = _generate(alone, MixedKVCache(alone, small(name, **knobs)), ids, max_new_tokens=40)
        for length in (None, 120):
            assert found[f"{name} {length} heads"] == 1
            # A fixed capacity is compiled here.
            assert bool(found[f"{name} {length} captured"]) == (gpu and length is None)
            assert found[f"{name} {length}"] == expected.tolist(), (name, length)
    assert found["full None"] == found["dynamic None"]


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("name", ["full", "kitty", "arkv"])
def test_layers_on_two_gpus(name):
    """``device_map``: every layer's pages stay where its weights are."""
    from accelerate import dispatch_model

    knobs = {"budget_tokens": 40} if name == "arkv" else {}
    # What `build` returns is everybody's.
    alone = copy.deepcopy(build("llama")).cuda(0)
    ids = prompt(2, 30).cuda(0)
    expected = _generate(alone, MixedKVCache(alone, small(name, **knobs)), ids, max_new_tokens=40)
    last = alone.config.num_hidden_layers - 1
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": int(i == last) for i in range(last + 1)}
    model = dispatch_model(copy.deepcopy(build("llama")), places)
    for length in (None, 120):
        cache = MixedKVCache(model, small(name, **knobs), max_cache_len=length)
        assert torch.equal(_generate(model, cache, ids, max_new_tokens=40), expected)
        assert all(form is not None for form in model._compiled_call_impl.fusion.found.values())
        # One graph goes over both.
        assert len(cache.layers[0].buffer.sync.buffers.recordings) == 1
        assert [layer.device.index for layer in (cache.layers[0], cache.layers[last])] == [0, 1]
