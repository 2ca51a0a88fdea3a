"""Norms, linear layers, gated MLPs and rotary embedding in one launch: the kernel gives what PyTorch does."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.fused import ACTIVATIONS, NORMS, gated_linear, linears, rms_norm, rotary

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
@pytest.mark.parametrize("shape", [(1, 1, 4096), (2, 3, 5, 80), (2, 2049, 1, 32)])
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


SHAPES = [(1, 64), (2, 576), (3, 200), (16, 128), (40, 64)]
"""Rows and channels: of both kinds of tiles, with a part of one at the end, too."""


def assert_near_exact(found, exact):
    """An error against f64 of at most twice that of rounding the exact product once."""
    assert found.is_contiguous()
    error = (found.double() - exact).norm() / exact.norm()
    assert error <= 2 * ((exact.to(found.dtype).double() - exact).norm() / exact.norm()) + 1e-6


def drawn(*shape, device, dtype):
    return (torch.randn(*shape) / shape[-1] ** 0.25).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linears(triton_backend, rows, width, biased, dtype):
    x = drawn(rows, 1, width, device=triton_backend, dtype=dtype)
    weights = [drawn(size, width, device=triton_backend, dtype=dtype) for size in (70, 24, 33)]
    biases = [drawn(each.shape[0], device=triton_backend, dtype=dtype) for each in weights] if biased else []
    for count in (1, 2, 3):
        found = linears(x, weights[:count], biases[:count])
        for i, out in enumerate(found):
            exact = torch.nn.functional.linear(
                x.double(), weights[i].double(), *(b.double() for b in biases[i : i + 1])
            )
            assert_near_exact(out, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
def test_gated_linear(triton_backend, rows, width, activation, dtype):
    """Weights also as parts of one."""
    x = drawn(rows, 1, width, device=triton_backend, dtype=dtype)
    gate, up = drawn(2 * 70, width, device=triton_backend, dtype=dtype).chunk(2)
    found = gated_linear(x, gate, up, activation)
    first, second = (torch.nn.functional.linear(x.double(), each.double()).to(dtype).double() for each in (gate, up))
    gelu = {1: "tanh", 2: "none"}.get(activation)
    first = torch.nn.functional.silu(first) if gelu is None else torch.nn.functional.gelu(first, approximate=gelu)
    assert found.dtype == dtype
    assert found.is_contiguous()
    eps = torch.finfo(dtype).eps
    assert (found.double() - first * second).norm() <= max(eps, 2e-6) * (first * second).norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "angles"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_rotary(triton_backend, rows, angles, tokens, dtype):
    q, k = (torch.randn(rows, tokens, heads, 24).to(triton_backend, dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = torch.randn(2, angles, tokens, 24).to(triton_backend, dtype)
    found, expected = rotary(q, k, cos, sin), reference("rotary")(q, k, cos, sin)
    # Queries lie token by token.
    for own, other in ((found[0].transpose(1, 2), expected[0].transpose(1, 2)), (found[1], expected[1])):
        assert_near(own, other)


def test_no_rows(backend):
    nothing = torch.empty(0, 1, 32, device=backend)
    assert rms_norm(nothing, torch.ones(32, device=backend), 1e-6, 0).shape == (0, 1, 32)
    weight = torch.ones(8, 32, device=backend)
    assert linears(nothing, [weight])[0].shape == (0, 1, 8)
    assert gated_linear(nothing, weight, weight, 0).shape == (0, 1, 8)
