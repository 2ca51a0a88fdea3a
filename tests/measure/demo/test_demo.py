"""The demo's figures, against what is known without it, and the command line, as its user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hfkvq
from hfkvq import get_scheme, list_schemes
from hfkvq.caches.schemes.base import presets
from hfkvq.measure.demo import Settings, choose_schemes, run_demo
from hfkvq.measure.demo.answers import answer, make_cache, predictions
from hfkvq.measure.demo.prompts import Subject, is_right, load, make_batches
from hfkvq.measure.divergence.measurement import read_memory
from hfkvq.measure.presets import describe, figure, figures
from hfkvq.measure.reference import evaluation_set
from tests.command import invoke

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


def lost(preset: str) -> str:
    """What a preset adds to the perplexity, as tables write it."""
    return f"{100 * (figure('loss', preset)['perplexity_ratio'] - 1):+.1f}"


def test_help_and_version() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    assert "demo" in done.output
    assert "schemes" in done.output
    assert invoke("--version").output.strip() == hfkvq.__version__


@pytest.mark.parametrize("columns", [70, 120])
def test_schemes_are_a_line_each(columns: int) -> None:
    done = invoke("schemes", columns=columns)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= columns
    first = [line.split()[0] for line in lines[2:] if line.strip()]
    assert [name for name in first if name in hfkvq.list_schemes()] == presets()
    found = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert found["best-3.4"][1:5] == ["(default)", "3.37", lost("best-3.4"), "%"]
    step = f"{figure('steps', 'kitty-pro')['ms']:.1f}"
    assert found["kitty-pro"][1:5] == ["2.51", lost("kitty-pro"), "%", step]
    # Nobody has measured it.
    assert found["kvarn-k4v4"][1:4] == ["4.38", "–", "–"]
    assert found["snapkv"][1] == "16.00*"


def test_schemes_as_json() -> None:
    items = {item["name"]: item for item in json.loads(invoke("schemes", "--json").output)}
    assert set(items) == set(hfkvq.list_schemes())
    assert items["full"]["long_context_bits"] == [16.0, 16.0]
    # 4 bits, and two f16 for 128 channels.
    assert items["saw-int4"]["long_context_bits"] == [4.25, 4.25]
    # 2 bits, and two f16 for 32 elements.
    assert items["kivi-2"]["long_context_bits"] == [3.0, 3.0]
    # Keys: 3 of payload, 0.5 of scales, 64 indices a page, but 4.25 in 3 of 100 layers. Values: 2.25, 4.25 in 47.
    keys = 0.97 * (3.5 + 64 * 8 / 128**2) + 0.03 * 4.25
    assert items["best-3.4"]["long_context_bits"][0] == pytest.approx((keys + 2.25 + 0.47 * 2) / 2)
    assert "in 47 % of the layers 4 bits" in items["best-3.4"]["values"]
    assert "in 3 % of the layers 4 bits" in items["best-3.4"]["keys"]
    # Keys: 2.25 of payload, 0.25 of scales, a byte of index for each of 32 channels in a page of 128 * 128.
    kitty = describe("kitty-pro", hfkvq.get_scheme("kitty-pro"))
    assert kitty["code_bits"] == [2.25, 2.25]
    assert kitty["long_context_bits"][0] == pytest.approx((2.5 + 0.25 + 32 * 8 / 128**2 + 2.25) / 2)


def test_demo_makes_a_table_and_json(stand_in: Path, tmp_path: Path) -> None:
    data = tmp_path / "demo.json"
    arguments = ["--schemes", "full,kivi-2", "--samples", "2", "--tasks", "recall-24,arithmetic-4"]
    arguments += ["--max-new-tokens", "6", "--seed", "3", "--device", "cpu"]
    done = invoke("demo", "--model", str(stand_in), *arguments, "--json", str(data), columns=100)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if not line.startswith("Saved")]
    assert max(map(len, lines)) <= 100
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert {"DynamicCache", "full", "kivi-2"} <= set(rows)
    assert "100.0" in rows["full"]
    assert "float32" in done.output

    saved = json.loads(data.read_text(encoding="utf-8"))
    assert [row["name"] for row in saved["rows"]] == ["DynamicCache", "full", "kivi-2"]
    full = saved["rows"][1]
    assert full["agreement"] == 1.0
    assert 0 <= full["kl_mean"] < 1e-6
    assert full["kl_positions"] == 2 * 2 * 5
    assert set(full["tasks"]) == {"recall-24", "arithmetic-4"}
    assert full["tasks"]["recall-24"]["total"] == 2
    assert saved["settings"]["seed"] == 3
    assert saved["dtype"] == "float32"
    assert {"torch", "transformers", "hfkvq", "python"} <= set(saved["versions"])


def test_figures_are_of_presets_as_they_are():
    found = figures()
    assert all(set(found[kind]["presets"]) <= set(list_schemes()) for kind in ("loss", "steps", "attention"))
    assert figure("loss", "kvarn-k4v4") is None
    # Its keys were not smoothed then.
    assert figure("steps", "saw-int4") is None
