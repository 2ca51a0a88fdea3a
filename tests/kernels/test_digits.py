"""Integer products stand on where the compiler puts their results: what the interpreter cannot show."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

COMPILE = """
import sys
import torch
from hfkvq.kernels.pages import StoreFormat
from hfkvq.kernels.triton.compile import GPUS, leave_gpu_alone
from hfkvq.kernels.triton.decode import decode_wanted

leave_gpu_alone(GPUS[90])
form = StoreFormat.parse(sys.argv[1])
each = next(decode_wanted(form, 8, 32, 128, 128, torch.bfloat16, torch.device("cuda", 0)))
print(each.kernel.warmup(*each.arguments, grid=(1,), **each.constants).asm["ttgir"])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("store", ["s0;k0;v0;2c128p128/2t128p128", "s0;k128;v0;4t128p128/4t128p128"])
def test_weights_stand_where_digits_want_them(store, tmp_path):
    """Of sixteen tokens lane (g, t) has numbers 2 g and 2 g + 1 of query t, one behind the other in its registers."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE, store], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.linear.*)$", run.stdout, re.MULTILINE))
    found = re.findall(r"movmatrix[^\n]*-> tensor<\d+x4xi16, (#\w+)>", run.stdout)
    assert len(found) == 1
    layout = layouts[found[0]]
    assert "register = [[1, 0], [16, 0]" in layout
    assert "lane = [[0, 1], [0, 2], [2, 0], [4, 0], [8, 0]]" in layout
