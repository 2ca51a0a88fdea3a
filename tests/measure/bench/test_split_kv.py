"""The plain Triton baseline against torch."""

from __future__ import annotations

import pytest
import torch

from hfkvq.measure.bench.cases import Shape
from hfkvq.measure.bench.split_kv import GRID, Tuning, split_kv


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Triton's interpreter, or a GPU."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("no CUDA device" if request.param == "cuda" else "kernels are compiled in this process")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def error(got, exact):
    return float((got.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "programs"),
    [
        ((1, 192, 8, 2, 64), 1),
        ((2, 256, 4, 1, 128), 8),
        ((2, 100, 5, 1, 40), 4),
        ((1, 1, 3, 3, 64), 2),
        ((1, 300, 40, 2, 32), 12),
    ],
    ids=["one-split", "splits", "odd", "one-token", "many-heads"],
)
def test_as_good_as_torch(device, shape, programs, dtype):
    shape = Shape(*shape, dtype=dtype)
    query, keys, values = shape.data(device)
    got = split_kv(query, keys, values, shape.scaling, Tuning(programs_per_sm=programs))
    assert got.dtype == query.dtype
    assert torch.isfinite(got).all()

    def attend(dtype):
        wide = [x.to(dtype).repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (keys, values)]
        logits = (query.to(dtype) @ wide[0].transpose(-1, -2)).mul(shape.scaling)
        return torch.softmax(logits.float() if dtype != torch.float64 else logits, -1).to(dtype) @ wide[1]

    exact = attend(torch.float64)
    assert error(got, exact) <= 2 * error(attend(query.dtype), exact) + 1e-6


@pytest.mark.gpu
def test_every_variant_gives_the_same():
    shape = Shape(2, 5000)
    data = shape.data(torch.device("cuda"))
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in data), enable_gqa=True)
    for tuning in GRID:
        assert error(split_kv(*data, shape.scaling, tuning), exact) < 1e-3
