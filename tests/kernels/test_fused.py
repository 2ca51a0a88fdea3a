"""Norms, gated activations and rotary embedding in one launch: the reference is PyTorch's, the kernel the reference."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.fused import ACTIVATIONS, NORMS, activated_product, rms_norm, rotary

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_near(found, expected):
    """Within a rounding of the dtype, in nearly all places of nothing at all."""
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    eps = torch.finfo(found.dtype).eps
    # GELU's tail is a difference of two numbers near one, also PyTorch's.
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=4 * eps + 5e-6)
    assert (found.float() - expected.float()).norm() <= max(eps / 4, 1e-6) * expected.float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", range(len(NORMS)))
@pytest.mark.parametrize("shape", [(1, 1, 4096), (2, 3, 5, 80)])
def test_norms(triton_backend, shape, form, dtype):
    x, weight = 3 * torch.randn(shape), torch.randn(shape[-1])
    # Queries of one token lie as their projection has them.
    x, weight = x.to(triton_backend, dtype), weight.to(triton_backend, dtype)
    assert_near(rms_norm(x, weight, 1e-6, form), reference("rms_norm")(x, weight, 1e-6, form))
    turned = x.transpose(0, 1)
    assert_near(rms_norm(turned, weight, 1e-6, form), reference("rms_norm")(turned, weight, 1e-6, form).contiguous())


def test_norm_of_the_formula(backend):
    x, weight = torch.randn(3, 64).double(), torch.randn(64).double()
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    for form, factor in enumerate((weight, weight, 1 + weight)):
        found = rms_norm(x.float().to(backend), weight.float().to(backend), 1e-5, form)
        torch.testing.assert_close(found.cpu().double(), exact * factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
def test_products(triton_backend, activation, dtype):
    """Also of gates and inputs that one product of matrices has given."""
    both = (4 * torch.randn(2, 1, 2 * 700)).to(triton_backend, dtype)
    for gate, up in (both.chunk(2, dim=-1), [x.contiguous() for x in both.chunk(2, dim=-1)]):
        found = activated_product(gate, up, activation)
        assert_near(found, reference("activated_product")(gate, up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "angles"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_rotary(triton_backend, rows, angles, tokens, dtype):
    q, k = (torch.randn(rows, tokens, heads, 24).to(triton_backend, dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = torch.randn(2, angles, tokens, 24).to(triton_backend, dtype)
    for found, expected in zip(rotary(q, k, cos, sin), reference("rotary")(q, k, cos, sin), strict=True):
        assert_near(found, expected)


def test_no_rows(backend):
    nothing = torch.empty(0, 1, 32, device=backend)
    assert rms_norm(nothing, torch.ones(32, device=backend), 1e-6, 0).shape == (0, 1, 32)
    assert activated_product(nothing, nothing, 0).shape == (0, 1, 32)
