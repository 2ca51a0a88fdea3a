"""Windows filled from pages or from each other: by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, quantize_pages, restore
from hfkvq.kernels.dispatch import reference

HEADS, DIM, PAGE = 2, 64, 128
FORMATS = ["2c128p128f4+4x16", "4c64p128", "4c128p128n", "2t64p128", "4t32p128"]


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def given(spec, side, dtype):
    torch.manual_seed(0)
    fmt, dense = PageFormat.parse(spec), torch.randn(5, HEADS, PAGE, DIM)
    widths = None
    if fmt.raised:
        widths = torch.full((5, HEADS, DIM), fmt.bits, dtype=torch.uint8)
        widths[..., 3:19] = 4
    parts = [part.contiguous() for part in quantize_pages(dense, fmt, side, widths)]
    windows = torch.randn(6, HEADS, PAGE, DIM).to(dtype)
    # Row 0 wants nothing, row 1 the first of its pages, row 2 what another row's window holds.
    rest = numbers(4, 1, 3, 0, 2, 2).view(3, 2), numbers(0, 1, 1), numbers(5, -1, 4), numbers(0, 1, 3)
    return fmt, parts, windows, rest


@pytest.mark.parametrize("side", ["keys", "values"])
def test_by_hand(backend, side):
    fmt, parts, windows, rest = given("4t32p128", side, torch.float32)
    expected = windows.clone()
    expected[1] = dequantize_pages([part[3:4] for part in parts], fmt, side, DIM)[0].float()
    expected[3] = windows[4]
    found = windows.to(backend)
    restore(found, [part.to(backend) for part in parts], *(x.to(backend) for x in rest), fmt, side)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(
    ("spec", "side"), [(spec, side) for spec in FORMATS for side in ("keys", "values")[: 1 + ("t" in spec)]]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernel_is_reference(triton_backend, spec, side, dtype):
    fmt, parts, windows, rest = given(spec, side, dtype)
    expected = windows.clone()
    reference("restore")(expected, parts, *rest, spec, side)
    found = windows.to(triton_backend)
    restore(found, [part.to(triton_backend) for part in parts], *(x.to(triton_backend) for x in rest), fmt, side)
    assert torch.equal(found.cpu(), expected)
