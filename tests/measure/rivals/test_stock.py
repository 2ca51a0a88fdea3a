"""Transformers' own quantized caches among the schemes of `hfkvq kld`, and names that other commands refuse."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
from rich.console import Console
from transformers.cache_utils import QuantizedCache, QuantizedLayer

from hfkvq.measure.bench.generate.engines import STOCK, parse_engines
from hfkvq.measure.divergence import measure
from hfkvq.measure.divergence.naming import parse_measured, parse_scheme
from hfkvq.measure.divergence.report import as_record, notes, table
from hfkvq.measure.rivals import RIVALS, Rival
from hfkvq.measure.rivals.stock import QUANTIZED, held_tensors
from tests.caches.models import build, prompt
from tests.command import flat, invoke


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


def test_names_are_those_of_generation() -> None:
    assert set(QUANTIZED) == {"quanto-2", "quanto-4", "hqq-2", "hqq-4"}
    assert {name for name in STOCK if name.startswith(("quanto", "hqq"))} == set(QUANTIZED)
    help_text = flat(invoke("kld", "--help").output)
    assert all(name in help_text for name in RIVALS)


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
        RIVALS["quanto-2"].check(build("qwen3").config)


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


def test_rivals_have_knobs() -> None:
    found = parse_measured(["simulated-oscar:recent=128:key_clip=0.9", "kivi-2"])
    first = found["simulated-oscar:recent=128:key_clip=0.9"]
    assert isinstance(first, Rival)
    assert first.to_dict()["recent"] == 128
    assert (first.to_dict()["key_clip"], first.to_dict()["simulated"]) == (0.9, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("simulated-oscar:recnt=1", "knob 'recnt' is unknown; did you mean 'recent'"),
        ("simulated-oscar:recent=-1", "recent: got -1, allowed int of 0 or more"),
        ("simulated-oscar:recent=much", "recent: got 'much'"),
        ("simulated-turboquant-4:key_bits=9", "key_bits: got 9, allowed 1 to 8"),
        ("quanto-2:axis=1", "knob 'axis' is unknown"),
    ],
)
def test_wrong_knobs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_measured([text])


def test_other_commands_refuse_them() -> None:
    for refused in (lambda: parse_scheme("simulated-oscar"), lambda: parse_engines(["simulated-oscar"], [])):
        with pytest.raises(ValueError, match="is simulated: it holds everything in full precision"):
            refused()
    with pytest.raises(ValueError, match="a cache of Transformers; hfkvq kld --schemes and hfkvq bench generate"):
        parse_scheme("quanto-2")


def test_reports_mark_simulated_rows() -> None:
    given = parse_measured(["full", "simulated-turboquant-4:boundary=0"])
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
    assert four["scheme"] == {"rival": "TurboQuant", "simulated": True, "key_bits": 4, "value_bits": 4, "boundary": 0}
    # Heads of 32; all 59 tokens that the cache was given are quantized.
    assert four["total_bits"] == pytest.approx(4 + 48 / 64)
    console = Console(width=100, file=io.StringIO())
    console.print(table(record, wide=False))
    shown = console.file.getvalue()
    assert "computed" in shown
    said = " ".join(notes(record))
    assert "Simulated rows are not usable caches" in said
    assert "arXiv 2504.19874" in said
