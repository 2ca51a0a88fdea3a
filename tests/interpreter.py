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
        _shift_bfloat16()


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
        shape = type.shape if isinstance(type, tl.block_type) else None
        known = wrapped.get(id(shape))
        if known is None:
            make_tensor(self, handle, type)
            # With the shape, so that its id stays its own.
            wrapped[id(shape)] = self.shape, self.numel, shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel, _ = known

    def same_name(self: tl.dtype, other: Any) -> bool:
        return self.name == other.name if type(other) is tl.dtype else equal(self, other)

    def broadcast_unless_equal(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
        one, two = (x.type.shape if isinstance(x.type, tl.block_type) else None for x in (lhs, rhs))
        return (lhs, rhs) if one is two else broadcast(self, lhs, rhs)

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    tl.dtype.__eq__, TritonSemantic.broadcast_impl_value = same_name, broadcast_unless_equal


def _shift_bfloat16() -> None:
    """f32 begins with bf16: between them bits are moved, unless a number is subnormal, which has a way of its own."""
    convert = interpreter._convert_float

    def shift(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        if rounding is None and (source.name, target.name) in (("bf16", "fp32"), ("fp32", "bf16")):
            wide = source.name == "fp32"
            bits = np.ascontiguousarray(data).reshape(data.shape).view(np.uint32 if wide else np.uint16)
            size = bits & (0x7FFFFFFF if wide else 0x7FFF)
            if not ((size != 0) & (size < (1 << 23 if wide else 1 << 7))).any():
                return (bits >> 16).astype(np.uint16) if wide else bits.astype(np.uint32) << 16
        return convert(data, source, target, rounding)

    interpreter._convert_float = shift
