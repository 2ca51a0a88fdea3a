"""The demo on the trained reference model."""

from __future__ import annotations

import pytest
import torch

from hfkvq.measure.demo import Settings, run_demo
from hfkvq.measure.demo.prompts import load


@pytest.mark.gpu
def test_four_bits_answer_as_the_baseline_does() -> None:
    """Whole caches through ``generate``, with the kernels that are compiled there; test_accuracy measures on CPUs."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    subject = load(None, device=torch.device("cuda"))
    settings = Settings(tasks=("recall-40",), schemes=("full", "saw-int4"), samples=4, batch_size=4)
    baseline, full, saw = (row["tasks"]["recall-40"] for row in run_demo(subject, settings)["rows"])
    assert baseline["right"] == full["right"] == saw["right"] == 4
    assert full["agreeing_tokens"] == saw["agreeing_tokens"] == saw["compared_tokens"] == 4 * 5
    assert full["kl_mean"] < 1e-3
