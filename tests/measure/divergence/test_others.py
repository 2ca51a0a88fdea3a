"""Caches of others among the schemes of `hfkvq kld`: Transformers' quantized ones, and classes by import path."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
from rich.console import Console
from transformers.cache_utils import QuantizedCache, QuantizedLayer

from hfkvq.measure.divergence import measure
from hfkvq.measure.divergence.naming import QUANTIZED, find_other, held_tensors, parse_measured
from hfkvq.measure.divergence.report import as_record, notes, table
from tests.caches.models import build, prompt
from tests.command import assert_refused, flat, invoke


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


def test_the_help_names_them() -> None:
    help_text = flat(invoke("kld", "--help").output)
    assert all(name in help_text for name in ("quanto-2", "quanto-4", "hqq-2", "hqq-4"))
    assert set(QUANTIZED) == {"quanto-2", "quanto-4", "hqq-2", "hqq-4"}


def test_a_real_cache_and_all_its_bytes(backend) -> None:
    model, tokens = build("qwen3"), prompt(2, 300)
    assert isinstance(QUANTIZED["quanto-4"].prepare(model, None, tokens)(), QuantizedCache)
    found = measure(model, tokens, parse_measured(["full", "quanto-4"]), prefill=200, chunk=10, batch_size=2)
    row = found.schemes[1]
    assert 0 < row.mean < 0.1
    # Two layers, keys and values, of two rows, with a scale for both: 199 tokens of 2 heads of 32 in 8 bits, and 100 in
    # f32, which is fewer than what makes it quantize all anew.
    assert row.bill.held_bytes * 2 == 2 * 2 * (2 * (199 + 100 * 4) * 2 * 32 + 4)
    assert row.bill.total_bits == pytest.approx(16 * row.bill.held_bytes / row.bill.bf16_bytes)
    assert row.bill.code_bits == 4


def test_what_is_held() -> None:
    x, y = torch.zeros(3), torch.zeros(5)
    assert [each.numel() for each in held_tensors({"a": (x, {"b": [y]}), "c": 1, "d": torch.float32})] == [3, 5]


def test_a_missing_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    with pytest.raises(ImportError, match="pip install optimum-quanto"):
        QUANTIZED["quanto-2"].check(build("qwen3").config)


def test_failures_of_a_package_are_told(backend, monkeypatch) -> None:
    def fail(self, tensor, axis):
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(Bytes, "_quantize", fail)
    with pytest.raises(ValueError, match="quanto-4 failed in its own package: sizes differ"):
        measure(build("qwen3"), prompt(1, 30), parse_measured(["quanto-4"]), prefill=20)


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="optimum-quanto is not installed")
def test_quanto_itself() -> None:
    found = measure(build("qwen3"), prompt(1, 300), parse_measured(["quanto-2", "quanto-4"]), prefill=200)
    two, four = found.schemes
    assert two.mean > four.mean > 0
    assert two.bill.held_bytes < four.bill.held_bytes < found.baseline.bill.held_bytes


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
        ("quanto-2:axis=1", "quanto-2 has no options"),
    ],
)
def test_wrong_paths_and_options(text, message) -> None:
    assert_refused(invoke("kld", "--schemes", text), message)


def test_reports_mark_simulated_rows() -> None:
    given = parse_measured(["full", "evals.simulated:TurboQuant:boundary=0"])
    found = measure(build("qwen3"), prompt(2, 60), given, prefill=40)
    about = {
        "model": "m",
        "dtype": "float32",
        "device_type": "cpu",
        "settings": {"context": 60, "prefill": 40, "chunk": 16},
        "text": {"source": "x"},
    }
    record = as_record(found, 0, about, ["x", "x"])
    full, four = record["rows"]
    assert (full["simulated"], full["about"]) == (False, None)
    assert (four["simulated"], four["held_bytes"]) == (True, None)
    assert four["scheme"] == {
        "cache": "TurboQuant",
        "simulated": True,
        "key_bits": 4,
        "value_bits": 4,
        "boundary": 0,
    }
    # Heads of 32; all 59 tokens that the cache was given are quantized.
    assert four["total_bits"] == pytest.approx(4 + 48 / 64)
    console = Console(width=100, file=io.StringIO())
    console.print(table(record, wide=False))
    shown = console.file.getvalue()
    assert "computed" in shown
    said = " ".join(notes(record))
    assert "Simulated rows are not usable caches" in said
    assert "arXiv 2504.19874" in said
