"""Smoothing of queries and keys: the kernel is the reference, and what is undone is what was given."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import smooth, unsmooth
from hfkvq.kernels.dispatch import reference

SHAPES = [
    # batch, query heads, KV heads, queries, tokens, channels
    (1, 4, 4, 1, 1, 128),
    (2, 6, 2, 3, 37, 64),
    (2, 4, 2, 0, 7, 80),
    (3, 4, 1, 16, 0, 32),
]


def given(batch, query_heads, heads, queries, tokens, dim, dtype, device):
    """Queries and keys as models have them (tokens before heads in memory), and vectors."""
    q = torch.randn(batch, queries, query_heads, dim).to(device, dtype).transpose(1, 2)
    k = (30 * torch.randn(batch, tokens, heads, dim) + 100).to(device, dtype).transpose(1, 2)
    factor = torch.rand(heads, dim) + 0.1
    return q, k, torch.stack([100 + torch.randn(heads, dim), factor, 1 / factor]).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_rounding_of_the_formula(backend, shape, dtype):
    """``q' = q s`` and ``k' = (k - μ) / s`` in f64, within half a unit in the last place and f32's own error."""
    q, k, vectors = given(*shape, dtype, backend)
    shift, factor, scale = vectors.double()[:, :, None]
    got = smooth(q, k, vectors)
    wide = q.double().unflatten(1, (shape[2], -1)) * scale[:, None]
    for found, exact in zip(got, (wide.flatten(1, 2), (k.double() - shift) * factor), strict=True):
        assert found.shape == exact.shape
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_is_the_reference(triton_backend, shape, dtype):
    q, k, vectors = given(*shape, dtype, triton_backend)
    for found, expected in zip(smooth(q, k, vectors), reference("smooth")(q, k, vectors), strict=True):
        assert torch.equal(found, expected)


def test_undone(backend):
    """Keys come back within a rounding of what they are beyond the mean, and one of themselves."""
    _, k, vectors = given(*SHAPES[1], torch.bfloat16, backend)
    back = unsmooth(smooth(k[:, :, :0], k, vectors)[1], vectors)
    torch.testing.assert_close(back, k, rtol=2**-7, atol=0.5)


def test_half_precision_saturates(backend):
    """Channels at the end of f16's range stay finite."""
    k = torch.full((1, 1, 2, 32), 6e4, dtype=torch.float16, device=backend)
    vectors = torch.stack([torch.full((1, 32), -6e4), torch.full((1, 32), 4.0), torch.full((1, 32), 0.25)]).to(backend)
    found = smooth(k[:, :, :0], k, vectors)[1]
    assert (found == 65504).all()
