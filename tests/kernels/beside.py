"""Kernels are looked for, compiled by another process, and found: for a GPU that need not be there.

``python -m tests.kernels.beside PRESET``, without TRITON_INTERPRET and with an empty TRITON_CACHE_DIR, prints JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from triton.runtime import driver

from hfkvq.caches.make import LayerShape, layer_plan
from hfkvq.caches.scheme import get_scheme
from hfkvq.kernels import dispatch, warm
from hfkvq.kernels.triton import ahead
from hfkvq.kernels.triton._lib import stand_in
from hfkvq.kernels.triton.warm import GPUS, wanted
from hfkvq.kernels.triton.worker import Absent, Order, compile_elsewhere

DEVICE = torch.device("cpu")


def main() -> None:
    gpu, scheme = GPUS[90], get_scheme(sys.argv[1])
    stand_in(gpu)
    driver.set_active(Absent(gpu))
    plan = warm.normal(layer_plan(scheme, LayerShape(32, 8, 128), torch.bfloat16))
    order = Order(plan, 32, scheme.channel_rule, (1,))
    names, said, done = [], {}, []

    def compile_them() -> None:
        said["while"] = [beside.is_ready(), beside.lacks("seal"), beside.lacks("dequantized"), len(dispatch.compiling)]
        done.extend(compile_elsewhere(lambda: [order], gpu))

    def every() -> list[ahead.Wanted]:
        found = wanted(*order, torch.device("cuda", 0))
        names.extend(each.kernel.__name__ for each in found)
        return found

    beside = ahead.Beside(every, compile_them, DEVICE)
    beside.start()
    beside._done.wait()
    said["after"] = [beside.is_ready(), beside.lacks("seal"), beside.lacks("dequantized"), len(dispatch.compiling)]
    said["errors"] = [each.error for each in done if each.error]
    said["wanted"], said["compiled"] = sorted(set(names)), sorted({each.name for each in done})
    said["found"] = [ahead.find(each) for each in wanted(*order, torch.device("cuda", 0))]
    again = ahead.Beside(every, lambda: done.clear(), DEVICE).start()
    said["again"] = [again.is_ready(), bool(done), again.lacks("seal")]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
