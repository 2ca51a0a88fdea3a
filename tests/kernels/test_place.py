"""New tokens of requests that join windows: by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import place
from hfkvq.kernels.dispatch import reference
from tests.kernels.stores import numbers, on


def given(dtype, dims=(64, 80)):
    """Four requests: some tokens from the middle of a window on, none, a whole window, and one token."""
    torch.manual_seed(0)
    whole = torch.randn(60, 4, max(dims)).to(dtype)
    new = [whole[:, i : i + 2, :dim] for i, dim in zip((0, 2), dims, strict=True)]
    windows = [torch.randn(6, 2, 40, dim).to(dtype) for dim in dims]
    places = torch.stack([numbers(3, 0, 10, 59), numbers(7, 0, 0, 39), numbers(5, 0, 40, 1)])
    return *new, windows, numbers(5, 0, 1, 2), places


def test_by_hand(backend):
    keys, values, windows, rows, places = given(torch.float32)
    found = on(backend, windows)
    place(*on(backend, (keys, values)), found, *on(backend, (rows, places)))
    for x, window, got in zip((keys, values), windows, found, strict=True):
        window[5, :, 7:12] = x[3:8].transpose(0, 1)
        window[1] = x[10:50].transpose(0, 1)
        window[2, :, 39] = x[59]
        assert torch.equal(got.cpu(), window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernel_is_reference(triton_backend, dtype):
    keys, values, windows, rows, places = given(dtype)
    expected = [x.clone() for x in windows]
    reference("place")(keys, values, expected, rows, places)
    found = on(triton_backend, windows)
    place(*on(triton_backend, (keys, values)), found, *on(triton_backend, (rows, places)))
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))
