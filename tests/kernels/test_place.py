"""New tokens of requests that join windows: by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import place
from hfkvq.kernels.dispatch import reference


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


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
    found = [x.to(backend) for x in windows]
    place(keys.to(backend), values.to(backend), found, rows.to(backend), places.to(backend))
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
    found = [x.to(triton_backend) for x in windows]
    rest = rows.to(triton_backend), places.to(triton_backend)
    place(keys.to(triton_backend), values.to(triton_backend), found, *rest)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))
