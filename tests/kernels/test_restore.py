"""Windows filled from pages or from each other: by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import StoreFormat, dequantize_pages, quantize_pages, restore
from hfkvq.kernels.dispatch import reference
from tests.kernels.stores import numbers, on

HEADS, DIM, PAGE = 2, 64, 128
FORMATS = [
    "2c128p128f4+4x16/2t64p128",
    "2c128p128/2t64p128t",
    "4c64p128/4t32p128",
    "4c128p128n/2t64p128n",
    "4t32p128/4t64p128",
]


def given(spec, dtype):
    """Formats, windows, a run and what three rows want."""
    torch.manual_seed(0)
    store = StoreFormat.parse(f"s0;k0;v0;{spec}")
    # Row 0 wants nothing, row 1 the first of its pages, row 2 what another row's window holds.
    run = [numbers(4, 1, 3, 0, 2, 2).view(3, 2)]
    for fmt, side in zip(store.runs[0], ("keys", "values"), strict=True):
        widths = None
        if fmt.raised:
            widths = torch.full((5, HEADS, DIM), fmt.bits, dtype=torch.uint8)
            widths[..., 3:19] = 4
        made = quantize_pages(torch.randn(5, HEADS, PAGE, DIM), fmt, side, widths)
        run += [part.contiguous() for part in made]
    windows = [torch.randn(6, HEADS, PAGE, DIM).to(dtype) for _ in range(2)]
    return store, windows, run, (numbers(0, 1, 1), numbers(5, -1, 4), numbers(0, 1, 3))


def test_by_hand(backend):
    store, windows, run, rest = given("4t32p128/2t64p128", torch.float32)
    found = [x.clone() for x in on(backend, windows)]
    restore(*on(backend, rest), found, on(backend, run), store)
    for at, side, parts in ((0, "keys", run[1:4]), (1, "values", run[4:])):
        expected = windows[at].clone()
        expected[1] = dequantize_pages([part[3:4] for part in parts], store.runs[0][at], side, DIM)[0].float()
        expected[3] = windows[at][4]
        assert torch.equal(found[at].cpu(), expected)


@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernel_is_reference(triton_backend, spec, dtype):
    store, windows, run, rest = given(spec, dtype)
    expected = [x.clone() for x in windows]
    reference("restore")(*rest, expected, run, store)
    found = [x.clone() for x in on(triton_backend, windows)]
    restore(*on(triton_backend, rest), found, on(triton_backend, run), store)
    # A GPU may round the last bit of a narrow number otherwise.
    torch.testing.assert_close([x.cpu() for x in found], expected, rtol=torch.finfo(dtype).eps, atol=0)
