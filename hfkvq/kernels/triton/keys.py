"""Names of kernels in Triton's cache that are the same in every process.

A name is a hash of a kernel's source, of the functions that it calls, and of the constants that all of them read.
Triton 3.6 and 3.7 take over a callee's constants before they look for them: those of a callee that nobody has asked for
yet are left out, and the name depends on what a process has compiled before. So one process does not find what another
one has compiled. Triton 3.9 looks for them first, as is done here.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import jit

_OURS = __name__.rpartition(".")[0]


def look_into_callees_first() -> None:
    """Has Triton look for a callee's constants first, where the callee is ours."""
    finder: Any = getattr(jit, "DependenciesFinder", None)
    take = getattr(finder, "_update_hash", None)
    # Where it is made otherwise, `tests/kernels/test_warm.py` says whether names are the same.
    if take is None or hasattr(take, "hfkvq"):
        return

    # All of Triton's kernels come by here, others' too: what another release gives is passed on as it is.
    def take_after_looking(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(getattr(func, "fn", None), "__module__", "")).startswith(_OURS):
            func.cache_key  # noqa: B018
        return take(self, func, *args, **kwargs)

    take_after_looking.hfkvq = True  # type: ignore[attr-defined]
    finder._update_hash = take_after_looking
