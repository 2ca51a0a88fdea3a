"""What Triton names every function of ours by: ``python -m tests.kernels.kernel_names forward`` or ``backward``.

Without TRITON_INTERPRET; prints JSON. In one order callees are asked for before what calls them, in the other after.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys

from triton.runtime.jit import JITFunction

from hfkvq.kernels import triton as launchers


def main() -> None:
    found = {}
    for module in pkgutil.walk_packages(launchers.__path__, f"{launchers.__name__}."):
        for x in vars(importlib.import_module(module.name)).values():
            if isinstance(x, JITFunction) and x.fn.__module__.startswith(launchers.__name__):
                found[f"{x.fn.__module__}.{x.fn.__name__}"] = x
    names = list(found)
    for name in names if sys.argv[1] == "forward" else reversed(names):
        found[name].cache_key  # noqa: B018
    print(json.dumps({name: found[name].cache_key for name in names}))


if __name__ == "__main__":
    main()
