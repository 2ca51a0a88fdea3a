"""Caches of others among the schemes of `hfkvq kld`: Transformers' quantized ones, and classes by import path."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import QuantizedCache, QuantizedLayer

from hfkvq.measure.divergence import measure
from hfkvq.measure.divergence.naming import find_other, parse_measured
from tests.caches.models import build, prompt
from tests.command import assert_refused, invoke

QUANTO = "transformers:QuantizedCache:backend=quanto:nbits=4"


class Bytes(QuantizedLayer):
    """A stand-in backend: 8 bits and a scale for all, in nested containers."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax() / 127
        return (tensor / scale).round().to(torch.int8), {"scale": scale, "shape": tensor.shape}

    def _dequantize(self, qtensor):
        codes, meta = qtensor
        return codes.float() * meta["scale"]


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr("transformers.cache_utils.QuantoQuantizedLayer", Bytes)


def test_a_real_cache_and_all_its_bytes(backend) -> None:
    model, tokens = build("qwen3"), prompt(2, 300)
    assert isinstance(find_other(QUANTO).prepare(model, None, tokens)(), QuantizedCache)
    found = measure(model, tokens, parse_measured(["full", QUANTO]), prefill=200, chunk=10, batch_size=2)
    row = found.schemes[1]
    assert 0 < row.mean < 0.1
    # Two layers, keys and values, of two rows, with a scale for both: 199 tokens of 2 heads of 32 in 8 bits, and 100 in
    # f32, which is fewer than what makes it quantize all anew.
    assert row.bill.held_bytes * 2 == 2 * 2 * (2 * (199 + 100 * 4) * 2 * 32 + 4)
    assert row.bill.total_bits == pytest.approx(16 * row.bill.held_bytes / row.bill.bf16_bytes)
    assert row.bill.code_bits == 4


def test_a_missing_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    with pytest.raises(ImportError, match="pip install optimum-quanto"):
        find_other(QUANTO).check(build("qwen3").config)


def test_an_import_path_with_options() -> None:
    found = find_other("evals.simulated:Oscar:recent=128:key_clip=0.9")
    assert found.to_dict()["recent"] == 128
    assert (found.to_dict()["key_clip"], found.to_dict()["simulated"]) == (0.9, True)
    assert find_other("kivi-2:local_length=32") is None


def test_any_cache_of_transformers() -> None:
    model, tokens = build("qwen3"), prompt(2, 60)
    (row,) = measure(model, tokens, parse_measured(["transformers:DynamicCache"]), prefill=40).schemes
    assert float(row.kld.max()) < 1e-6
    # The model is f32.
    assert row.bill.total_bits == 32
    with pytest.raises(ValueError, match="DynamicCache does not take these options"):
        find_other("transformers:DynamicCache:rooms=3").check(model.config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evals.simulated:Oscar:recnt=1", "evals.simulated:Oscar does not take these options"),
        ("evals.simulated:TurboQuant:key_bits=9", "key_bits: got 9, allowed 1 to 8"),
        ("evals.simulated:Oskar", "cannot be imported"),
        ("no_such_module:Oscar", "cannot be imported: No module named 'no_such_module'"),
        ("math:sqrt", "math:sqrt is neither a transformers.Cache nor an OtherCache"),
        ("transformers:QuantizedCache:backend=quanto:bits=4", "QuantizedCache does not take these options"),
    ],
)
def test_wrong_paths_and_options(text, message) -> None:
    assert_refused(invoke("kld", "--schemes", text), message)
