"""The demo's figures, against what is known without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hfkvq import get_scheme, list_schemes
from hfkvq.measure.demo import Settings, choose_schemes, run_demo
from hfkvq.measure.demo.answers import answer, make_cache, predictions
from hfkvq.measure.demo.prompts import Subject, is_right, load, make_batches
from hfkvq.measure.divergence.measurement import read_memory
from hfkvq.measure.reference import evaluation_set

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def subject(stand_in: Path) -> Subject:
    return load(str(stand_in), device=CPU)


def test_every_distinct_scheme_is_run_once() -> None:
    chosen = choose_schemes(["all"])
    assert set(chosen.values()) == {scheme for scheme in list_schemes().values() if not scheme.latents}
    assert len(set(chosen.values())) == len(chosen)
    assert "kivi-2" in chosen
    assert "kivi" not in chosen
    assert list(choose_schemes(["kivi", "full"])) == ["kivi", "full"]


def test_scoring_of_other_models_takes_the_last_number(subject: Subject) -> None:
    example = evaluation_set("recall-24", 1)[0]
    grouped = f"{int(example.answer):,}"
    assert is_right(subject, example, f"<think>1 or 2?</think>The number is {grouped}.<|im_end|>")
    assert not is_right(subject, example, f"{example.answer} or 7")
    assert not is_right(subject, example, "I do not know")


def test_predictions_are_the_logits_of_a_forward_without_cache(subject: Subject) -> None:
    """Also where a row's own answer deviates: then the baseline's tokens are fed from the prompt's end."""
    batch = make_batches(subject, "recall-24", 3, 3, 0, 12)[0]
    baseline = answer(subject, batch, make_cache(subject, None), rows=2)
    ids = torch.cat([batch.ids, baseline.ids], 1)
    mask = torch.cat([batch.mask, torch.ones_like(baseline.ids)], 1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        logits = subject.model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits
    start = batch.ids.shape[1]
    want = torch.cat([logits[row, start : start + baseline.lengths[row] - 1] for row in (0, 1)])
    torch.testing.assert_close(predictions(subject, batch, baseline, baseline), want, atol=2e-4, rtol=2e-4)
    for deviating in ([0], [1], [0, 1]):
        mine = answer(subject, batch, make_cache(subject, None), rows=2)
        mine.ids = mine.ids.clone()
        mine.ids[deviating, 1] += 1
        torch.testing.assert_close(predictions(subject, batch, mine, baseline), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("task", ["recall-24", "tools"])
def test_full_holds_the_same_tokens_as_the_stock_cache(subject: Subject, task: str) -> None:
    batch = make_batches(subject, task, 3, 3, 0, 5)[0]
    stock = read_memory(answer(subject, batch, make_cache(subject, None)).cache, batch.mask)
    full = read_memory(answer(subject, batch, make_cache(subject, get_scheme("full"))).cache, batch.mask)
    assert full.bf16_bytes == stock.bf16_bytes
    # Padding and f32 are what the stock cache holds on top.
    rows, columns = batch.mask.shape
    assert stock.held_bytes == 2 * stock.bf16_bytes * rows * (columns + 4) / (int(batch.mask.sum()) + rows * 4)
    assert stock.code_bits == 32


def test_full_is_the_baseline_and_two_bits_on_everything_are_not(subject: Subject) -> None:
    settings = Settings(("recall-24", "tools"), ("full", "kivi-2", "kivi-4"), samples=3, batch_size=2, max_new_tokens=8)
    result = run_demo(subject, settings)
    rows = {row["name"]: row for row in result["rows"]}
    assert next(iter(rows)) == "DynamicCache"
    assert rows["full"]["agreement"] == 1.0
    assert rows["full"]["kl_999"] < 1e-6
    assert rows["full"]["kl_positions"] == rows["kivi-2"]["kl_positions"] == 2 * 3 * 7
    assert rows["kivi-2"]["kl_mean"] > rows["kivi-4"]["kl_mean"] > 1e-6
    assert rows["kivi-2"]["agreement"] < 1.0
    assert all(row["decode_tokens_per_second"] > 0 for row in result["rows"])
    assert result["memory"]["task"] == "tools"


@pytest.mark.gpu
def test_four_bits_answer_as_the_baseline_does() -> None:
    """Whole caches through ``generate``, with the kernels that are compiled there; test_accuracy measures on CPUs."""
    subject = load(None, device=torch.device("cuda"))
    settings = Settings(tasks=("recall-40",), schemes=("full", "saw-int4"), samples=4, batch_size=4)
    baseline, full, saw = (row["tasks"]["recall-40"] for row in run_demo(subject, settings)["rows"])
    assert baseline["right"] == full["right"] == saw["right"] == 4
    assert full["agreeing_tokens"] == saw["agreeing_tokens"] == saw["compared_tokens"] == 4 * 5
    assert full["kl_mean"] < 1e-3
