"""Decode attention of every preset against bf16 SDPA, on one GPU: microseconds from the call to the merged output.

    PYTHONPATH=. python evals/bench/decode_attention.py --json evals/results/decode-attention.json

Both sides are captured in CUDA graphs, so that what is timed is the GPU's work and not Python's. Heads: 32 query, 8 KV,
128 channels. Random data; medians.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench_cudagraph

from hfkvq import get_scheme
from hfkvq.caches.store import KVStore

SHAPES = ((1, 8192), (32, 8192), (1, 131072), (32, 32768))
HEADS, SHARE, DIM = 8, 4, 128
SCHEMES = {
    "2-bit, no windows": ("kitty", {"boost_ratio": 0.0, "sink_length": 0, "local_length": 0}),
    "kitty": ("kitty", {}),
    "kitty-pro": ("kitty-pro", {}),
    "saw-int4": ("saw-int4", {}),
    "int4": ("int4", {}),
    "kivi-2": ("kivi-2", {}),
    "kivi-4": ("kivi-4", {}),
    "full": ("full", {}),
}


def baselines(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, float]:
    """Microseconds of PyTorch's attention by backend."""
    times = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def attend(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        attend()
        times[backend.name.removesuffix("_ATTENTION").lower()] = 1e3 * do_bench_cudagraph(attend, rep=30)
    return times


def main() -> None:
    """Measures all shapes and presets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="what was measured, for the record")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for batch, tokens in SHAPES:
        query = torch.randn(batch, HEADS * SHARE, 1, DIM, device="cuda", dtype=torch.bfloat16)
        keys = torch.randn(batch, HEADS, tokens, DIM, device="cuda", dtype=torch.bfloat16)
        values = torch.randn_like(keys)
        bf16 = baselines(query, keys, values)
        best = min(bf16.values())
        print(
            f"batch {batch} x {tokens} tokens: bf16 {', '.join(f'{n} {t:.1f} us' for n, t in bf16.items())}", flush=True
        )
        for name, (preset, knobs) in SCHEMES.items():
            scheme = get_scheme(preset, **knobs)
            store = KVStore(scheme.layout(DIM, DIM), scheme, keys, values)
            store.extend(keys, values)

            def attend(store: KVStore = store, query: Tensor = query) -> Tensor:
                return store.attend(query, None, 1 / math.sqrt(DIM))

            attend()
            time = 1e3 * do_bench_cudagraph(attend, rep=30)
            held = store.nbytes().total
            print(f"  {name:18} {time:8.1f} us  {best / time:5.2f}x  {held / time / 1e6:5.2f} TB/s", flush=True)
            row = {"batch": batch, "tokens": tokens, "name": name, "scheme": scheme.to_dict(), "us": time}
            rows.append({**row, "bytes": held, "bf16_us": bf16, "speedup": best / time})
            del store, attend
        del keys, values
        torch.cuda.empty_cache()
    if arguments.json:
        versions = {name: version(name) for name in ("torch", "triton", "transformers")}
        record = {
            "gpu": torch.cuda.get_device_name(),
            "commit": arguments.commit,
            "versions": {"python": platform.python_version(), **versions},
            "heads": {"query": HEADS * SHARE, "kv": HEADS, "dim": DIM},
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
