"""The demo on the trained reference model."""

from __future__ import annotations

import pytest
import torch

from hfkvq.measure.demo import Settings, run_demo
from hfkvq.measure.demo.prompts import load


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_four_bits_answer_as_the_baseline_does(device: str) -> None:
    """Whole caches through ``generate``; on a GPU with the kernels that are compiled there."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    subject = load(None, device=torch.device(device))
    settings = Settings(tasks=("recall-24",), schemes=("full", "saw-int4"), samples=2, batch_size=2)
    baseline, full, saw = (row["tasks"]["recall-24"] for row in run_demo(subject, settings)["rows"])
    assert baseline["right"] == full["right"] == saw["right"] == 2
    assert full["agreeing_tokens"] == saw["agreeing_tokens"] == saw["compared_tokens"] == 2 * 5
    assert full["kl_mean"] < 1e-3
