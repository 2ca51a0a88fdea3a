"""Compiles what seals fitted pages for a GPU that need not be there; prints bytes that a thread spills, as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton

from hfkvq.caches import get_scheme
from hfkvq.kernels.triton.compile import GPUS, compile_one, leave_gpu_alone
from hfkvq.kernels.triton.seal.launch import seal_wanted

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def main() -> None:
    """Of each preset named."""
    leave_gpu_alone(GPUS[90])
    found = {}
    for name in sys.argv[1:]:
        scheme = get_scheme(name)
        fmt, shape = scheme.layout(128, 128).keys.formats[0], (1, 8, 128)
        stride, device = (8 * 256 * 128, 256 * 128, 128, 1), torch.device("cuda", 0)
        (each,) = seal_wanted(fmt, "keys", shape, stride, torch.bfloat16, device, 128, scheme.channel_rule, True)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compile_one(each).asm["cubin"])
            said = subprocess.run(
                [str(TOOL), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            )
        found[name] = int(re.search(r"\bSTACK:(\d+)", said.stdout)[1])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
