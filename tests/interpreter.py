"""Triton's interpreter without the work that it repeats: the same results in two thirds of the time."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

KNOWN = all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype"))
"""Whether this Triton's interpreter is one that can be hastened: 3.7 and 3.9 are."""


def hasten() -> None:
    """Makes the interpreter patch the language once a launch, and look each NumPy dtype up once.

    By itself it does the former at every call of a function within a kernel, over patches that are there already and
    that the launch takes back, and the latter through a fresh table of all dtypes. One that is built otherwise is left
    as it is.
    """
    if not KNOWN:
        return
    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    patched: set[int] = set()
    dtypes: dict[str, Any] = {}

    def patch_once(fn: Any) -> Any:
        new = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core} - patched
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
