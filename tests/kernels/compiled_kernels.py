"""Variants compiled side by side for a GPU that need not be there, and found again.

``python -m tests.kernels.compiled_kernels``, without TRITON_INTERPRET and with an empty TRITON_CACHE_DIR, prints JSON.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import triton
from triton.runtime.jit import JITFunction

from hfkvq.kernels.triton.compile import GPUS, Wanted, compile_all, leave_gpu_alone
from hfkvq.kernels.triton.due import due_kernel
from hfkvq.kernels.triton.hadamard import hadamard_wanted


def compiled() -> int:
    """Kernels in Triton's cache."""
    return len(list(Path(triton.knobs.cache.dir).glob("*/*.cubin")))


def main() -> None:
    leave_gpu_alone(GPUS[90])
    every = [hadamard_wanted(torch.bfloat16, 64), hadamard_wanted(torch.float16, 64)]
    # One twice, and one whose arguments are missing.
    every += [hadamard_wanted(torch.bfloat16, 64), Wanted(due_kernel, (), {})]
    said = []
    for _ in range(2):
        done = compile_all(every, None)
        said.append({"done": [[name, bool(error)] for name, error in done], "compiled": compiled()})
        for each in every:
            assert isinstance(each.kernel, JITFunction)
            each.kernel.device_caches.clear()
    begun = time.perf_counter()
    again = compile_all(every[:1], None)
    print(json.dumps({"said": said, "again": again, "seconds": time.perf_counter() - begun, "compiled": compiled()}))


if __name__ == "__main__":
    main()
