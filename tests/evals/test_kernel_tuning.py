"""The search, over invented times."""

from __future__ import annotations

import pytest
import torch

from evals import kernel_cases, kernel_tuning
from evals.kernel_cases import Shape
from hfkvq import kernels
from hfkvq.kernels.triton import configs

CPU = torch.device("cpu")
KEY = "2c128/2t128,D128,N8"
START = dict(configs.DEFAULTS["decode"])


def search(model, start=START):
    """Searches where ``model(knobs)`` gives the times."""
    said = []

    timers = [lambda i=i: model(configs.lookup(CPU, "decode", KEY))[i] for i in range(len(model(start)))]
    configs.try_out("decode", KEY, start)
    found = kernel_tuning.search("decode", KEY, start, timers, lambda what, share: said.append((what, share)))
    configs.try_out("decode", KEY, None)
    assert all(0 <= share < 1 for _, share in said)
    return found, [what for what, _ in said]


def test_grid_and_knobs_are_the_same():
    assert {kernel: set(grid) for kernel, grid in kernel_tuning.GRID.items()} == {
        kernel: set(knobs) for kernel, knobs in configs.DEFAULTS.items()
    }


def test_the_best_of_each_knob_are_tried_together():
    found, said = search(lambda knobs: [100.0 + 5 * abs(knobs["stages"] - 3) + abs(knobs["programs_per_sm"] - 6)])
    assert found.after == {**START, "stages": 3, "programs_per_sm": 6}
    assert found.share == pytest.approx(100 / 112)
    assert said[-1] == f"{KEY} programs_per_sm 6, stages 3"


def test_variants_of_a_format():
    """Variants are those that a launch takes, and nothing is launched for them."""
    configs.renew()
    with kernels.use_interpreter():
        wanted = list(kernel_cases.attending("int4", Shape(1, 160, 2, 1, 32, "float16"), CPU))
    assert [kernel for _, kernel, _ in configs.ANSWERS] == ["decode"]
    assert {each.kernel.__name__ for each in wanted} == {"decode_kernel", "merge_kernel"}
    prompt = Shape(1, 160, 2, 1, 32, "float16", queries=20)
    assert not list(kernel_cases.attending("int4", prompt, CPU)), "a launch compiles what dequantizes pages"
    stored = {each.kernel.__name__ for each in kernel_cases.storing("int4", prompt, CPU)}
    assert {"seal_token_kernel", "advance_kernel"} <= stored
