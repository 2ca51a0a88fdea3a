"""The rotation: orthogonal, its own inverse, and exact where nothing is quantized."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import hadamard
from hfkvq.kernels.hadamard import check_rotation, largest_block, sylvester
from tests.kernels.stores import rotate
from tests.kernels.stores import sylvester as by_definition


@pytest.mark.parametrize("order", [1, 2, 16, 128])
def test_matrix_is_orthogonal_and_symmetric(order):
    matrix = sylvester(order, torch.device("cpu")).double()
    assert torch.allclose(matrix, by_definition(order), atol=1e-7)
    assert torch.allclose(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), atol=1e-6)
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (80, 16), (96, 32), (128, 2)])
def test_rotation(backend, dtype, head_dim, block):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, head_dim).to(dtype)
    got = hadamard(x.to(backend), block)
    assert got.dtype == dtype
    exact = rotate(x, block)
    # Rounded once: a half unit in the last place of the result, and a little for f32 sums.
    assert torch.allclose(got.cpu().double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-6)
    back = hadamard(got.float(), block).cpu().double()
    assert torch.allclose(back, x.double(), atol=8 * torch.finfo(dtype).eps)


def test_no_rotation_is_no_copy():
    x = torch.randn(2, 8)
    assert hadamard(x, 0) is x


def test_opcheck():
    torch.library.opcheck(torch.ops.hfkvq.hadamard.default, (torch.randn(2, 3, 16), 8))


def test_blocks_that_do_not_fit_are_refused():
    assert largest_block(80) == 16
    check_rotation("rotate_keys", 0, 80)
    check_rotation("rotate_keys", 16, 80)
    with pytest.raises(ValueError, match="rotate_keys: got block 12"):
        check_rotation("rotate_keys", 12, 96)
    with pytest.raises(ValueError, match="largest block for this model is 16"):
        check_rotation("rotate_keys", 32, 80)
