"""Resources of kernels, without a GPU: registers, spilled bytes, shared memory, programs at a time.

    PYTHONPATH=. python evals/resources.py [--gpus 80,89,90,100,120] [--presets kitty-pro,saw-int4]

Kernels are compiled by Triton and its own ptxas (ptxas-blackwell from sm_100 on), and their binaries are read by its
cuobjdump. Writes evals/results/resources.json. Nothing is launched, so nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from hfkvq.caches.compile import LayerShape, layer_plan
from hfkvq.caches.schemes.base import get_scheme
from hfkvq.kernels.compile import SEVERAL, normal
from hfkvq.kernels.pages import SIDES, StoreFormat
from hfkvq.kernels.triton.compile import GPUS, Wanted, compile_one, leave_gpu_alone
from hfkvq.kernels.triton.decode_plan import programs_planned
from hfkvq.kernels.triton.gather import run_wanted
from hfkvq.kernels.triton.limits import LIMITS, programs_that_fit
from hfkvq.kernels.triton.variants import wanted

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results" / "resources.json"

HEADS, KV_HEADS, DIM = 32, 8, 128
PRESETS = ("kitty-pro", "saw-int4", "kivi-2", "mixkvq", "triaxial", "kvarn", "full")
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# These are compiled for each preset; the rest is small.
KERNELS = {
    "decode_kernel": "attention",
    "merge_kernel": "merge",
    "seal_channel_kernel": "seal, by channel",
    "seal_token_kernel": "seal, by token",
    "page_norms_kernel": "balance",
    "advance_kernel": "append",
    "gather_pages_kernel": "dequantize",
}

Row = dict[str, Any]


def every(preset: str, device: torch.device) -> Iterator[tuple[StoreFormat, Wanted]]:
    """Launches of a layer of Qwen3-8B's shape, for one query and for sixteen, and what dequantizes its pages."""
    scheme = get_scheme(preset)
    plan = normal(layer_plan(scheme, LayerShape(HEADS, KV_HEADS, DIM), torch.bfloat16))
    for each in wanted(plan, HEADS, plan.rule or None, SEVERAL, device):
        yield plan.format, each
    for formats in plan.format.runs:
        for fmt, side in zip(formats, SIDES, strict=True):
            yield plan.format, run_wanted(fmt, side, KV_HEADS, DIM, torch.bfloat16, device, False)


def resources(compiled: Any) -> Row:
    """Registers of a thread, bytes of local memory that they spill to, and bytes of shared memory of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [str(TOOL), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK")}
    # The kernel's code adds the same in all and counted with the launch.
    return {
        "registers": found["REG"],
        "spilled": found["STACK"],
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
    }


def work(number: int, presets: Sequence[str]) -> tuple[list[Row], Row]:
    """Rows of one GPU and its limits: compiles in a process of its own, which can launch nothing."""
    gpu = GPUS[number]
    leave_gpu_alone(gpu)
    device, limits = torch.device("cuda", 0), LIMITS[gpu.major, gpu.minor]
    rows, seen = [], {}
    for preset in presets:
        for form, each in every(preset, device):
            name = each.kernel.__name__
            if name not in KERNELS:
                continue
            compiled = compile_one(each)
            if compiled.hash in seen:
                seen[compiled.hash]["presets"] = [*dict.fromkeys([*seen[compiled.hash]["presets"], preset])]
                continue
            row: Row = {"gpu": number, "kernel": name, "presets": [preset], "variant": variant(each)}
            row |= resources(compiled)
            row["programs"] = programs_that_fit(limits, row["registers"], row["warps"], row["shared"])
            row["fits"] = row["programs"] > 0
            if name == "decode_kernel":
                shape = each.constants["SHAPE"]
                row["planned"] = programs_planned(form, DIM, DIM, shape.BM, device)
            seen[compiled.hash] = row
            rows.append(row)
    return rows, limits._asdict()


def variant(each: Wanted) -> str:
    """Key that tells a kernel's variants apart."""
    names = ("SEVERAL", "BM", "BITS", "GROUP", "PER_CHANNEL", "ROTATE", "TOKEN_MAJOR", "BS", "BD")
    constants = dict(each.constants)
    for own in each.constants.values():
        constants |= own._asdict() if hasattr(own, "_asdict") else {}
    said = [f"{name}={constants[name]}" for name in names if name in constants]
    return ", ".join(said)


def table(record: Row) -> list[str]:
    """The table in the documentation: attention of one query and of sixteen, and what is worst of the rest."""
    numbers = sorted(record["gpus"], key=int)
    lines = ["| kernel | " + " | ".join(f"sm_{number}" for number in numbers) + " |", "|---|" + "---|" * len(numbers)]

    def add(title: str, rows: Sequence[Row]) -> None:
        cells = []
        for number in map(int, numbers):
            own = [row for row in rows if row["gpu"] == number]
            worst = min(own, key=lambda row: (row["programs"] * row["warps"], -row["registers"], -row["spilled"]))
            spilled = f" ({worst['spilled']})" if worst["spilled"] else ""
            warps = f" x {worst['warps']}" if worst["warps"] > 1 else ""
            cells.append(f"{worst['registers']}{spilled}, {worst['shared'] / 1024:.1f}, {worst['programs']}{warps}")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    for several, words in (("SEVERAL=False", ""), ("SEVERAL=True, BM=16", ", 16 queries")):
        for preset in record["presets"]:
            own = [row for row in record["rows"] if row["kernel"] == "decode_kernel" and preset in row["presets"]]
            add(f"attention, `{preset}`{words}", [row for row in own if row["variant"].startswith(several)])
    for name, title in list(KERNELS.items())[1:]:
        if own := [row for row in record["rows"] if row["kernel"] == name]:
            add(title, own)
    return lines


def main() -> None:
    """Compiles, one process for each GPU, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="80,89,90,100,120", help="compute capabilities times ten")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    presets, rows, limits = given.presets.split(","), [], {}
    for number in map(int, given.gpus.split(",")):
        # Errors there are raised here.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            own, limits[str(number)] = process.submit(work, number, presets).result()
        rows += own
        print(f"sm_{number}: {len(own)} kernels, {sum(not row['fits'] for row in own)} do not fit", flush=True)
    record = {
        "kind": "evals/resources.py",
        "versions": {"triton": version("triton"), "torch": version("torch")},
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"},
        "presets": presets,
        "gpus": limits,
        "rows": rows,
    }
    # A kernel a line.
    text = json.dumps({**record, "rows": []}, indent=1).removesuffix('"rows": []\n}')
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    given.json.write_text(f'{text}"rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
