"""`tests.interpreter` takes nothing from Triton's interpreter but its repetitions."""

import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

from hfkvq.kernels import use_interpreter
from tests.interpreter import KNOWN
from tests.kernels.stores import Case, build
from tests.kernels.test_decode import decode

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")


@pytest.mark.skipif(not KNOWN, reason="this Triton's interpreter is left as it is")
def test_the_language_is_patched_within_a_launch_and_restored_after_it(monkeypatch):
    """Once a launch, however many functions its kernels call; and again for the next."""
    names = ("load", "sum", "range", "static_range", "static_assert")
    before = [getattr(tl, name) for name in names]
    made = []
    patch = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda *args: (made.append(args), patch(*args)))
    layer, device = build(Case()), torch.device("cpu")
    outs, patches = [], []
    with use_interpreter():
        for _ in range(3):
            made.clear()
            outs.append(decode(layer, device, 0.1))
            patches.append(len(made))
    assert torch.equal(outs[0], outs[1])
    # A launch and the merge, and what the first one prepares; some modules name `tl.core` as well.
    assert all(2 <= count <= 6 for count in patches)
    assert patches[1] == patches[2]
    assert [getattr(tl, name) for name in names] == before


def test_dtypes_are_those_of_triton():
    for dtype, size in ((tl.bfloat16, 2), (tl.float8e4nv, 1), (tl.float32, 4), (tl.int1, 1), (tl.int64, 8)):
        for kind in (dtype, tl.block_type(dtype, [4, 8])):
            for _ in range(2):
                assert interpreter._get_np_dtype(kind).itemsize == size
        assert interpreter._get_np_dtype(tl.pointer_type(dtype)).itemsize == 8
        assert interpreter._get_np_dtype(tl.block_type(tl.pointer_type(dtype), [4])).itemsize == 8
