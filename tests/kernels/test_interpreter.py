"""`tests.interpreter` takes nothing from Triton's interpreter but its repetitions."""

import math

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl
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


def test_shapes_are_checked_however_often_they_come():
    for _ in range(2):
        made = tl.block_type(tl.int32, [tl.constexpr(4), 8])
        assert (list(made.shape), made.numel, str(made)) == ([4, 8], 32, str(tl.block_type(tl.int32, [4, 8])))
        assert made != tl.block_type(tl.int32, [8, 4])
        assert made != tl.block_type(tl.int64, [4, 8])
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [4, 7])
    assert str(tl.block_type(tl.float32, [4])) != str(tl.block_type(tl.float32, [4, 1]))


def test_blocks_are_broadcast_to_one_shape():
    semantic = interpreter.interpreter_semantic

    def block(*shape):
        data = torch.arange(shape[0]).view(shape[:1] + (1,) * (len(shape) - 1)).expand(shape).int().numpy()
        return tl.tensor(interpreter.TensorHandle(data, tl.int32), tl.block_type(tl.int32, list(shape)))

    for one, two, shape in (((4, 8), (4, 8), (4, 8)), ((4, 1), (1, 8), (4, 8)), ((4, 1), (4, 8), (4, 8))):
        for x in semantic.broadcast_impl_value(block(*one), block(*two)):
            assert tuple(size.value for size in x.shape) == x.handle.data.shape == shape
    one = tl.tensor(interpreter.TensorHandle(block(1).handle.data, tl.int32), tl.int32)
    assert [x.handle.data.shape for x in semantic.broadcast_impl_value(block(4, 8), one)] == [(4, 8)] * 2
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.broadcast_impl_value(block(4, 8), block(8, 4))


def test_bfloat16_is_the_upper_half_of_float32():
    short = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    # PyTorch takes subnormal numbers for what they are, Triton's interpreter almost.
    short = short[(short == 0) | ~(short.abs() < 2.0**-126)]
    wide = short.float().view(torch.int32)
    for shape in ((-1,), (1, -1, 1)):
        data = short.view(torch.int16).numpy().view("uint16").reshape(shape)
        found = interpreter._convert_float(data, tl.bfloat16, tl.float32, None)
        assert found.shape == data.shape
        assert torch.equal(torch.from_numpy(found.view("int32")).flatten(), wide)
        # Cut off, as the interpreter does it.
        data = (wide[short != 0] | 0x7FFF).numpy().view("float32").reshape(shape)
        found = interpreter._convert_float(data, tl.float32, tl.bfloat16, None)
        assert found.shape == data.shape
        assert torch.equal(torch.from_numpy(found.view("int16")).flatten(), short[short != 0].view(torch.int16))


def block_of(dtype, *shape, start=1):
    kind = interpreter._get_np_dtype(dtype)
    data = torch.arange(start, start + math.prod(shape)).view(shape).numpy().astype(kind)
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)))


def test_operands_are_converted_however_often_they_come():
    """By their types, or by a number's value; what is refused once is refused again."""
    semantic = interpreter.interpreter_semantic
    for _ in range(2):
        for one, two, dtype in (
            (block_of(tl.int8, 4), 3, tl.int8),
            (block_of(tl.int8, 4), 3.0, tl.float32),
            (2, block_of(tl.float16, 4), tl.float16),
            (block_of(tl.int8, 4), block_of(tl.int32, 4), tl.int32),
            (block_of(tl.float16, 4), block_of(tl.float32, 4), tl.float32),
        ):
            made = semantic.mul(one, two, False)
            left, right = (x.handle.data if isinstance(x, tl.tensor) else x for x in (one, two))
            assert made.dtype == dtype
            assert made.handle.data.dtype == interpreter._get_np_dtype(dtype)
            assert (made.handle.data == left * right).all()
        with pytest.raises(ValueError, match="out of range"):
            semantic.add(block_of(tl.int8, 4), 300, False)
        with pytest.raises(ValueError, match="negative scalar"):
            semantic.add(block_of(tl.uint8, 4), -3, False)
        kind = tl.pointer_type(tl.int32)
        pointer = tl.tensor(interpreter.TensorHandle(np.array([1024], dtype="uint64"), kind), kind)
        assert semantic.add(pointer, 2, False).handle.data.item() == 1032
        with pytest.raises(IncompatibleTypeErrorImpl, match="invalid operands"):
            semantic.mul(pointer, 2, False)


@pytest.mark.parametrize("order", [1, -1])
def test_results_have_the_shape_that_they_are_said_to_have(order):
    semantic = interpreter.interpreter_semantic
    scalar = tl.tensor(block_of(tl.int32, 1).handle, tl.int32)
    for operands in ((block_of(tl.int32, 4, 1), block_of(tl.int32, 1, 8)), (block_of(tl.int32, 4, 8), scalar)):
        one, two = operands[::order]
        condition = semantic.less_than(one, two)
        for made in (condition, semantic.sub(one, two, False), semantic.where(condition, one, two)):
            assert made.handle.data.shape == tuple(made.type.shape) == (4, 8)
        for value in (0, 7):
            assert semantic.where(condition, one, value).handle.data.shape == (4, 8)
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.add(block_of(tl.int32, 4, 8), block_of(tl.int32, 8, 4), False)
