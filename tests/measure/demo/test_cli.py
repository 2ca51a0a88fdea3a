"""The command line, as its user types it, and the figures that ship in the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hfkvq
from hfkvq.caches import list_schemes
from hfkvq.caches.schemes.base import in_order
from hfkvq.measure.presets import describe, figure, figures
from tests.command import invoke


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
    assert [name for name in first if name in hfkvq.list_schemes()] == list(in_order())
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
