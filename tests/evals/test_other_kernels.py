"""Kernels of other packages: layouts by their inverse, a fake of one package from end to end, plain Triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from evals.kernel_bench import error_of
from evals.kernel_cases import Shape
from evals.other_kernels import kitty, kivi, turboquant
from evals.other_kernels.split_kv import GRID, split_kv


def test_codes_come_back_from_their_words():
    x = torch.randn(2, 64, 3).half()
    for bits, most in ((2, 0.5), (4, 0.1)):
        words, scale, least = kivi.pack(x, bits, 1)
        assert words.shape == (2, 64 * bits // 32, 3)
        assert error_of(kivi.unpacked(words, scale, least, bits, 1), x) < most
    assert kitty.two_bits(torch.tensor([0b11100100], dtype=torch.uint8)).tolist() == [0, 1, 2, 3]
    assert turboquant.unpack(torch.tensor([0b10001000, 0b11000110, 0b11111010]), 3, 8).tolist() == list(range(8))
    matrix = turboquant.rotation(8, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(8))


def exact(data):
    return F.scaled_dot_product_attention(*(x.double() for x in data), enable_gqa=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter")
@pytest.mark.parametrize("context", [128, 131])
def test_plain_triton(context):
    shape = Shape(2, context, 4, 2, 32)
    data = shape.data(torch.device("cpu"))
    assert error_of(split_kv(*data, shape.scaling), exact(data)) < 0.005


@pytest.mark.gpu
def test_every_variant_of_plain_triton_gives_the_same():
    shape = Shape(2, 5000)
    data = shape.data(torch.device("cuda"))
    for tuning in GRID:
        assert error_of(split_kv(*data, shape.scaling, tuning), exact(data)) < 0.005
