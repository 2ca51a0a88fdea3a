"""Triton's interpreter without the work that it repeats: the same results in a fraction of the time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KNOWN = all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype"))
"""Whether this Triton's interpreter is one that can be hastened: 3.7 and 3.9 are."""


def hasten() -> None:
    """Makes the interpreter remember what it has found; one that is built otherwise is left as it is."""
    if KNOWN:
        _patch_once()
        _leave_overflow_alone()
        _remember_shapes()
        _remember_types()
        _call_directly()
    _round_to_bfloat16()


def _patch_once() -> None:
    """The language is patched once a launch, and each NumPy dtype is looked up once.

    By itself the interpreter does the former at every call of a function within a kernel, over patches that are there
    already and that the launch takes back, and the latter through a fresh table of all dtypes.
    """
    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    patched: set[int] = set()
    # By the globals, which are kept so that their id stays theirs.
    languages: dict[int, tuple[dict[str, Any], set[int]]] = {}
    dtypes: dict[str, Any] = {}

    def patch_once(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in languages:
            languages[id(names)] = names, {id(x) for x in names.values() if x is tl or x is tl.core}
        new = languages[id(names)][1] - patched
        if not new:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            patched.difference_update(new)

        scope.restore = restore_and_forget
        patched.update(new)
        return scope

    def look_up_once(dtype: Any) -> Any:
        # Not every type can be hashed, but their names tell them apart.
        if dtype.name not in dtypes:
            dtypes[dtype.name] = look_up(dtype)
        return dtypes[dtype.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, look_up_once


def _leave_overflow_alone() -> None:
    """Integers are not computed again in 64 bits: what that finds is an assertion, of which `debug` is the switch."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_shapes() -> None:
    """Shapes are checked and wrapped once, and blocks of one shape are not held against each other, axis by axis."""
    sizes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    equal, broadcast = tl.dtype.__eq__, TritonSemantic.broadcast_impl_value

    def block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        plain = tuple([x.value if type(x) is tl.constexpr else x for x in shape])
        known = sizes.get(plain)
        if known is None:
            make_type(self, element_ty, shape)
            sizes[plain] = self.shape, self.numel, f"<{self.shape}, "
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = known
            self.name = f"{text}{element_ty}>"

    wrapped: dict[int, tuple[Any, ...]] = {}

    def tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            shape = type.shape if isinstance(type, tl.block_type) else None
            known = wrapped.get(id(shape))
            if known is None:
                make_tensor(self, handle, type)
                # With the shape, so that its id stays its own.
                known = wrapped[id(shape)] = self.shape, self.numel, shape
            known = type._of_tensors = known[0], known[1], type.scalar
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known

    def same_name(self: tl.dtype, other: Any) -> bool:
        return self.name == other.name if type(other) is tl.dtype else equal(self, other)

    def broadcast_unless_equal(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
        one, two = (x.type.shape if isinstance(x.type, tl.block_type) else None for x in (lhs, rhs))
        return (lhs, rhs) if one is two else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    tl.dtype.__eq__, TritonSemantic.broadcast_impl_value = same_name, broadcast_unless_equal


def _remember_types() -> None:
    """What becomes of two operands' types is found once, and NumPy brings their data to one shape as it computes.

    By itself the interpreter finds the types anew for each operation, converts numbers twice, and copies a scalar to
    every place of the block that it is added to.
    """
    check, common = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    types: dict[tuple[Any, ...], Any] = {}
    shapes: dict[tuple[int, int], tuple[Any, ...]] = {}
    blocks: dict[tuple[str, int], tuple[tl.block_type, Any]] = {}
    scalars: dict[tuple[type, Any, str], tl.tensor] = {}
    arrays = {f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
    arrays |= {"int1": np.dtype(bool)} | {f"fp{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)}
    numbers, whole = (int, float, bool), tl.block_type

    def block(element: tl.dtype, shape: Any) -> tl.block_type:
        if type(element) is not tl.dtype:
            return tl.block_type(element, shape)
        known = blocks.get((element.name, id(shape)))
        if known is None:
            # With the shape, so that its id stays its own.
            known = blocks[element.name, id(shape)] = tl.block_type(element, shape), shape
        return known[0]

    def scalar(self: TritonSemantic, value: Any, dtype: tl.dtype) -> tl.tensor:
        key = type(value), value, dtype.name
        known = scalars.get(key)
        if known is None:
            array = arrays.get(dtype.name) if type(value) in numbers else None
            if array is None:
                return common(self, value, dtype)
            known = scalars[key] = tl.tensor(interpreter.TensorHandle(np.array([value or 0], array), dtype), dtype)
        return known

    def converted(self: TritonSemantic, x: tl.tensor, dtype: tl.dtype) -> tl.tensor:
        return x if x.dtype is dtype or x.dtype.name == dtype.name else self.cast(x, dtype)

    def of_one_shape(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        """Both are said to have it; the data of one at least has it only once they are computed with."""
        one, two = lhs.type, rhs.type
        one, two = one.shape if type(one) is whole else None, two.shape if type(two) is whole else None
        if one is two:
            return lhs, rhs
        known = shapes.get((id(one), id(two)))
        if known is None:
            made = self.broadcast_impl_value(lhs, rhs)
            # With both, so that their ids stay their own.
            shapes[id(one), id(two)] = made[0].type.shape, one, two
            return made
        shape = known[0]
        if one is not shape:
            lhs = tl.tensor(lhs.handle, block(lhs.dtype, shape))
        if two is not shape:
            rhs = tl.tensor(rhs.handle, block(rhs.dtype, shape))
        return lhs, rhs

    def operands(
        self: TritonSemantic,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:
        flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        one, two = type(lhs), type(rhs)
        # A tensor by its type, a number by its own and its value, which may be out of range.
        key = (
            lhs.dtype.name if one is tl.tensor else (one, lhs),
            rhs.dtype.name if two is tl.tensor else (two, rhs),
            flags,
        )
        known = types.get(key)
        if known is None:
            made = check(self, lhs, rhs, *flags)
            if all(kind is tl.tensor or kind in numbers for kind in (one, two)):
                types[key] = made[0].dtype, made[1].dtype
            return made
        lhs = scalar(self, lhs, known[0]) if one is not tl.tensor else converted(self, lhs, known[0])
        rhs = scalar(self, rhs, known[1]) if two is not tl.tensor else converted(self, rhs, known[1])
        return of_one_shape(self, lhs, rhs)

    tl.block_type.with_element_ty = lambda self, scalar_ty: block(scalar_ty, self.shape)
    TritonSemantic.scalar_constant, TritonSemantic.binary_op_type_checking_impl = scalar, operands


def _call_directly() -> None:
    """Short ways through what is called for every value."""
    core, builder = tl.core, interpreter.InterpreterBuilder
    unwrap, around = core._unwrap_if_constexpr, core.builtin(lambda: None).__code__
    integers, floats = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES), frozenset(tl.dtype.FP_TYPES)
    plain = frozenset({tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, bool, float, str, type(None)})
    new_axis = [(*[slice(None)] * axis, None) for axis in range(8)]

    def fits(data: np.ndarray, dtype: tl.dtype) -> bool:
        size = data.itemsize
        return size == 1 or type(dtype) is tl.pointer_type or size * 8 <= dtype.primitive_bitwidth

    def handle(self: Any, data: np.ndarray, dtype: tl.dtype, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits(data, dtype):
            self.__post_init__()

    def unwrapped(x: Any) -> Any:
        kind = type(x)
        return x.value if kind is tl.constexpr else x if kind in plain else unwrap(x)

    def patch(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        # What is around a builtin looks for `_semantic` only, which is given here.
        inside = member.__wrapped__ if getattr(member, "__code__", None) is around else member
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inside(*args, **kwargs)

        scope.set_attr(obj, name, call)

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        return interpreter.TensorHandle(arg.data[new_axis[axis]], arg.dtype.scalar)

    interpreter._validate_np_data_size, interpreter.TensorHandle.__init__ = fits, handle
    interpreter._patch_attr, builder.create_expand_dims = patch, expand_dims
    core._unwrap_if_constexpr = unwrapped
    tl.dtype.is_int = lambda self: self.name in integers
    tl.dtype.is_floating = lambda self: self.name in floats


def _round_to_bfloat16() -> None:
    """f32 begins with bf16, to which it is rounded as GPUs round it, half to even; the interpreter cuts bits off."""
    convert = interpreter._convert_float

    def moved(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        if rounding is not None or (source.name, target.name) not in (("bf16", "fp32"), ("fp32", "bf16")):
            return convert(data, source, target, rounding)
        wide = source.name == "fp32"
        bits = np.ascontiguousarray(data).reshape(data.shape).view(np.uint32 if wide else np.uint16).astype(np.uint32)
        if not wide:
            return bits << 16
        # NaNs stay NaNs.
        odd = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(odd, bits >> 16 | 0x40, (bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)

    interpreter._convert_float = moved
