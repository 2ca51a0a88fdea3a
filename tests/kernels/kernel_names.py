"""What Triton names every function of ours by: ``python -m tests.kernels.kernel_names forward backward``.

Without TRITON_INTERPRET; prints JSON, names by order. In one order callees are asked for before what calls them, in the
other after; each has a process of its own, forked before anything is named, since to import takes most of the time.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pkgutil
import sys

from triton.runtime.jit import JITFunction

from hfkvq.kernels import triton as launchers
from hfkvq.kernels.triton.compile import settle_name


def functions() -> dict[str, JITFunction]:
    found = {}
    for module in pkgutil.walk_packages(launchers.__path__, f"{launchers.__name__}."):
        for x in vars(importlib.import_module(module.name)).values():
            if isinstance(x, JITFunction) and x.fn.__module__.startswith(launchers.__name__):
                found[f"{x.fn.__module__}.{x.fn.__name__}"] = x
    return found


FUNCTIONS = functions()


def names(order: str) -> dict[str, str]:
    for name in FUNCTIONS if order == "forward" else reversed(FUNCTIONS):
        settle_name(FUNCTIONS[name])
    return {name: function.cache_key for name, function in FUNCTIONS.items()}


def main() -> None:
    found = {}
    for order in sys.argv[1:]:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found[order] = pool.apply(names, (order,))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
