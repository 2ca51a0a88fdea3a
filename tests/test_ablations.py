"""evals/ablations.py: the constructed case at its smallest, and what evals/README.md says of the measured ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from hfkvq.caches.scheme import Scheme
from hfkvq.measure.divergence.measurement import measure
from hfkvq.measure.reference import load_reference

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


# What evals/README.md says of the figures on record.


def test_tables_are_those_of_the_record(ablations, recorded):
    text = (EVALS / "README.md").read_text(encoding="utf-8")
    assert ablations.put_table(text, recorded) == text


def test_every_scheme_on_record_is_measured_as_the_script_would(ablations, recorded):
    made = {name: scheme for room in ablations.ROOMS for name, scheme in ablations.mixkvq_schemes(room).items()}
    made |= ablations.kivi_schemes()
    for kib in ablations.BUDGETS:
        made |= ablations.arkv_schemes(kib)
    rows = [row for part in ("mixkvq", "arkv") for row in recorded[part]["rows"] if row["scheme"] is not None]
    assert {row["name"] for row in rows} == made.keys()
    for row in rows:
        # Knobs that have come since are at what was there before them.
        assert Scheme.from_dict(row["scheme"]) == made[row["name"]]
        assert len(row["kld"]) == recorded["samples"]


@pytest.mark.parametrize(("room", "wins"), [(16, False), (32, True), (64, True)])
def test_mixkvq_against_kivi_at_no_more_bits(ablations, recorded, room, wins):
    rows, other = recorded["mixkvq"]["rows"], ablations.EQUAL[room]
    mine = ablations._row(rows, f"mixkvq, {room}", "plain")
    assert mine["total_bits"] <= ablations._row(rows, other, "plain")["total_bits"]
    assert (ends(recorded, "mixkvq", mine["name"], other)[1] < 0) == wins


@pytest.mark.parametrize("room", [16, 32, 64])
def test_mixkvq_against_error_alone(recorded, room):
    names = f"mixkvq, {room}", f"error only, {room}"
    assert ends(recorded, "mixkvq", *names, "outliers, least seen")[1] < 0
    # Elsewhere it is no better, and with little room worse.
    for model in ("plain", "outliers, lowest frequencies"):
        low, high = ends(recorded, "mixkvq", *names, model)
        assert low > 0 if room < 64 else low < 0 < high


def test_arkv_at_equal_budgets(ablations, recorded):
    low, high = ends(recorded, "arkv", "arkv, 128 KiB", "arkv-origin, 128 KiB")
    assert low < 0 < high
    assert mean(ablations, recorded, "arkv", "arkv, 256 KiB") < mean(
        ablations, recorded, "arkv", "arkv-origin, 256 KiB"
    )
    for kib in ablations.BUDGETS:
        for name in ("arkv-quant", "arkv-quant, INT4"):
            assert ends(recorded, "arkv", f"{name}, {kib} KiB", f"arkv-origin, {kib} KiB")[1] < 0


def test_triaxial_tables(ablations, recorded):
    rows = recorded["triaxial"]["rows"]
    right = {(row["model"], row["name"]): sum(row["right"]) for row in rows}
    assert len({tuple(row["right"]) for row in rows if row["model"] == "plain"}) == 1
    hard = {name: count for (model, name), count in right.items() if model == "value outliers"}
    assert hard["uniform 2 bits"] == 0
    assert hard["uniform 4 bits"] == hard["DynamicCache"]
    assert (hard["calibrated"], hard["calibrated, unshared"], recorded["samples"]) == (4, 6, 12)
    assert ends(recorded, "triaxial", "calibrated", "uniform 2 bits", "value outliers")[1] < 0

    without = [mean(ablations, recorded, "triaxial", f"no {axis} axis") for axis in ablations.AXES]
    assert 4.5 < without[0] / without[1] < 5.5
    for model in ("plain", "value outliers"):
        low, high = ends(recorded, "triaxial", "no semantic axis", "no temporal axis", model)
        assert low < 0 < high
    tokens = recorded["triaxial"]["settings"]["tokens"]
    assert tokens["older|text|inst"] / sum(tokens.values()) == pytest.approx(0.65, abs=0.005)


def test_arguments(ablations, tmp_path):
    from typer.testing import CliRunner

    for arguments, said in ((["draw"], "measure or table"), (["measure", "--parts", "kitty"], "mixkvq, arkv")):
        done = CliRunner().invoke(ablations.app, [*arguments, "--out", str(tmp_path)])
        assert done.exit_code == 2
        assert said in done.output
    assert not list(tmp_path.iterdir())
