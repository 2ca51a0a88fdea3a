"""evals/ablations.py: the constructed case at its smallest, and what evals/README.md says of the measured ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from hfkvq.divergence.measurement import measure
from hfkvq.reference import load_reference

EVALS = Path(__file__).resolve().parents[1] / "evals"


@pytest.fixture(scope="module")
def ablations():
    spec = importlib.util.spec_from_file_location("ablations", EVALS / "ablations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recorded():
    return json.loads((EVALS / "results/ablations.json").read_text(encoding="utf-8"))


def mean(ablations, recorded, part, name, model="plain"):
    kld = ablations._row(recorded[part]["rows"], name, model)["kld"]
    return sum(kld) / len(kld)


def ends(recorded, part, first, second, model="plain"):
    """Interval of the difference of two rows' KLD."""
    found = [pair for pair in recorded[part]["differences"] if pair["name"] == [first, second]]
    return next(pair["interval"] for pair in found if pair["model"][1] == model)


@pytest.fixture(scope="module")
def models():
    return load_reference(torch.float32)


def test_query_awareness_in_the_constructed_case(ablations, models):
    model, tokenizer = models
    tokens = ablations.recall_windows(tokenizer, 1, entries=40, context=704)
    hidden = ablations.with_unseen_outliers(model, ablations.FACTOR, 32)
    schemes = ablations.mixkvq_schemes(64)
    found = [measure(x, tokens, schemes, prefill=608, chunk=32).schemes for x in (model, hidden)]
    (product, error), (product_hidden, error_hidden) = found
    assert product_hidden.mean < error_hidden.mean / 2
    assert error.mean < error_hidden.mean / 2
    # Why MixKVQ is measured on one of these models only.
    assert torch.equal(product.kld, product_hidden.kld)
    # Room is the same, so bytes are, but for the queries that are counted.
    assert product.bill.total_bits == pytest.approx(error.bill.total_bits, rel=0.02)


def test_constructed_models_compute_the_same(ablations, models):
    model, tokenizer = models
    tokens = ablations.recall_windows(tokenizer, 1, entries=8, context=64)
    with torch.inference_mode():
        expected = model(tokens).logits
        for made in (ablations.with_unseen_outliers(model, 8.0, 32), ablations.with_value_outliers(model, 16.0, 8)):
            assert any(not torch.equal(a, b) for a, b in zip(made.parameters(), model.parameters(), strict=True))
            torch.testing.assert_close(made(tokens).logits, expected)
