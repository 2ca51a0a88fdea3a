"""The rotation: orthogonal, its own inverse, and exact where nothing is quantized."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import hadamard
from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.hadamard import check_rotation, largest_block
from tests.kernels.stores import rotate, sylvester


@pytest.mark.parametrize("order", [2, 16, 128])
def test_rotation_of_unit_vectors_is_the_matrix(order):
    matrix = hadamard(torch.eye(order), order).double()
    assert torch.allclose(matrix, sylvester(order), atol=1e-7)
    assert torch.allclose(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), atol=1e-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (80, 16), (512, 512)])
def test_kernel_equals_reference_to_the_bit(backend, dtype, head_dim, block):
    """A token's stored bits must not depend on what computed its rotation, or on the shape it came in."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, head_dim).to(dtype)
    expected = reference("hadamard")(x, block)
    assert torch.equal(hadamard(x.to(backend), block).cpu(), expected)
    assert torch.equal(hadamard(x[:, :, 3:4].to(backend), block).cpu(), expected[:, :, 3:4])
    # Tokens of a projection that is shared with others.
    own = torch.randn(4, 5, 3, head_dim).to(dtype).to(backend)[:, 1:4]
    assert torch.equal(hadamard(own, block).cpu(), reference("hadamard")(own.cpu(), block))


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
