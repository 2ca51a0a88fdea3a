"""Compiled kernels, as no interpreter shows them: where tiles stand in registers, and how much is spilled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

# Programs compile for a GPU that need not be there; `texts` are those of a preset's attention over pages.
BEGIN = """
import json, re, subprocess, sys, tempfile, torch, triton
from pathlib import Path
from hfkvq.caches.compile import LayerShape, layers_of
from hfkvq.caches.schemes.base import get_scheme
from hfkvq.caches.schemes.preset import get_preset
from hfkvq.kernels.compile import normal
from hfkvq.kernels.triton.compile import GPUS, compile_one, leave_gpu_alone
from hfkvq.kernels.triton.seal.launch import seal_wanted
from hfkvq.kernels.triton.variants import wanted

leave_gpu_alone(GPUS[90])
device = torch.device("cuda", 0)

def texts(name, dim):
    schemes = [get_preset(name).scheme.in_layer(0, 4)] * 4
    (plan, heads, rule, _), *_ = layers_of(schemes, [LayerShape(32, 8, dim)], torch.bfloat16)
    for each in wanted(normal(plan), heads, rule, (1,), device):
        if each.kernel.__name__ == "decode_kernel":
            yield compile_one(each).asm["ttgir"]
"""


def printed(program, *arguments, folder):
    """Standard output of a program behind `BEGIN`."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", BEGIN + program, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", ["best-2.5", "trellis-2.5", "best-2.0", "best-1.5"])
def test_blocks_are_turned_where_a_product_has_left_them(name, tmp_path):
    """`tiles.as_operand` turns 8 x 8 blocks within a warp, and trusts that each lane has the rows of an accumulator."""
    said = printed("for text in texts(sys.argv[1], 128):\n    print(text)", name, folder=tmp_path)
    turned = [line for line in said.splitlines() if "movmatrix" in line]
    assert {re.findall(r"tensor<[^>]*(#[^>]*)>", line)[-1] for line in turned} == {"#mma"}


@pytest.mark.parametrize(
    ("name", "dim"),
    [("trellis-2.5", 64), ("trellis-2.5", 128), ("best-2.0", 64), ("best-2.0", 128), ("best-1.5", 128)],
)
def test_page_loop_has_neighbouring_tokens_in_a_register(name, dim, tmp_path):
    """Instructions take two neighbours; another layout would decode other numbers, and only on a GPU."""
    said = printed("for text in texts(sys.argv[1], int(sys.argv[2])):\n    print(text)", name, dim, folder=tmp_path)
    shifted = [line.split("packed_element")[1] for line in said.splitlines() if "shf.r.wrap" in line]
    assert shifted
    for line in shifted:
        assert re.search(r"16x\d+xi16, #ttg.dot_op<\{opIdx = 0, parent = #mma, kWidth = [24]\}>", line), line


SPILLED = """
found, tool = {}, Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
for name in sys.argv[1:]:
    scheme = get_scheme(name)
    fmt, stride = scheme.layout(128, 128).keys.formats[0], (8 * 256 * 128, 256 * 128, 128, 1)
    given = fmt, "keys", (1, 8, 128), stride, torch.bfloat16, device, 128, scheme.channel_rule, True
    (each,) = seal_wanted(*given)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compile_one(each).asm["cubin"])
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found[name] = int(re.search(r"\\bSTACK:(\\d+)", said)[1])
print(json.dumps(found))
"""


def test_fitted_pages_stay_in_registers(tmp_path):
    """Laid out another way, as a release of Triton did it, a page took twenty times as long (docs/history)."""
    names = ["best-2.5", "best-2.8", "best-3.4"]
    spilled = json.loads(printed(SPILLED, *names, folder=tmp_path).splitlines()[-1])
    assert spilled.keys() == set(names)
    assert max(spilled.values()) <= 64
