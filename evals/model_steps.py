"""Decode steps of models that are no plain decoders, ours beside `DynamicCache`: latents, windows, hybrids, ALiBi.

    PYTHONPATH=. python evals/model_steps.py [--rows gemma3-12b:12@131072=kitty-pro+saw-int4,...] [--json FILE]

Models have published shapes and random weights. A row is SHAPE[:LAYERS]@TOKENS=PRESET+PRESET: the context is a
random prompt, in chunks of 4,096 tokens (in the figures that are committed random keys and values, but for latents and
Mamba). Then single steps are timed, once graphs are captured. `DynamicCache`, whose steps are eager, is first, without
cuDNN's attention, which plans anew for every length. Written for each cache: milliseconds a step (20th, 50th and 80th
percentile), bytes of the cache, bits per element by `memory()`, whether steps were captured, and what remained
uncompressed.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DynamicCache,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    PreTrainedConfig,
)

from evals.generate import Decoder, quantiles
from evals.shapes import POSITIONS, build
from hfkvq import MixedKVCache
from hfkvq.caches import get_scheme
from hfkvq.caches.base.model_config import latent_dims
from hfkvq.measure.presets import page_bits
from hfkvq.measure.records import clock, commit, device_name, now, versions
from hfkvq.measure.tables import markdown_table
from hfkvq.tuning.fit import cache_bytes
from hfkvq.tuning.fit.model import outline_of

RESULTS = Path(__file__).parent / "results/model-steps-h200.json"
HEAD = (
    "shape, layers", "tokens", "cache", "a step", "`DynamicCache`", "times faster", "held", "bits: pages", "all",
    "with room", "with room now",
)  # fmt: skip

CHUNK = 4096
WARM_UP = 12
"""Steps before the timed ones, at least."""
LONGEST_WARM_UP = 40.0
"""Seconds in which kernels must have been compiled and steps captured."""
DEFAULT = (
    "deepseek-v2-lite@32768=latent-4+latent-8+full,gemma3-12b:12@131072=kitty-pro+saw-int4,"
    "gpt-oss-20b:12@131072=kitty-pro+saw-int4,falcon-h1-7b:11@32768=kitty-pro"
)


def deepseek_v2_lite() -> PreTrainedConfig:
    """16 billion parameters, latents of 512 + 64."""
    return DeepseekV2Config(
        hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        first_k_dense_replace=1, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6,
        n_shared_experts=2, max_position_embeddings=POSITIONS,
    )  # fmt: skip


def gemma3_12b() -> PreTrainedConfig:
    """Five layers with windows of 1,024 to one of full attention; heads of 256."""
    return Gemma3TextConfig(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, sliding_window=1024, max_position_embeddings=POSITIONS,
    )  # fmt: skip


def gpt_oss_20b() -> PreTrainedConfig:
    """Windows of 128 in every other layer, attention sinks, 32 experts; heads of 64."""
    return GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def falcon_h1_7b() -> PreTrainedConfig:
    """Attention and Mamba in every layer."""
    return FalconH1Config(
        vocab_size=130048, hidden_size=3072, intermediate_size=12288, num_hidden_layers=44, num_attention_heads=12,
        num_key_value_heads=2, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256,
        max_position_embeddings=POSITIONS,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek-v2-lite": deepseek_v2_lite,
    "gemma3-12b": gemma3_12b,
    "gpt-oss-20b": gpt_oss_20b,
    "falcon-h1-7b": falcon_h1_7b,
}


def config_of(shape: str, layers: int | None) -> PreTrainedConfig:
    """A shape's config, with fewer layers if asked for."""
    config = SHAPES[shape]()
    if layers is not None:
        config.num_hidden_layers = layers
        if "layer_types" in vars(config):
            config.layer_types = config.layer_types[:layers]
    return config


def captured(cache: Any) -> bool:
    """True if a step of a cache of ours was captured as a CUDA graph."""
    buffers = None if cache.graphs is None else cache.graphs.sync.buffers
    return bool(buffers is not None and buffers.recordings)


def steps(model: Any, cache: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Times single steps."""
    decoder, graphs = Decoder(model, cache, 1), getattr(cache, "graphs", None)
    begin = time.perf_counter()
    first, warm = decoder.timed(1), 1
    # Kernels compile in other processes meanwhile, and steps are captured when they are there.
    while warm < WARM_UP or (
        graphs is not None
        and model.device.type == "cuda"
        and not captured(cache)
        and time.perf_counter() - begin < LONGEST_WARM_UP
    ):
        decoder.step()
        warm += 1
    ready = time.perf_counter() - begin
    if not bool(torch.isfinite(decoder.step()).all()):
        raise RuntimeError("the logits are not finite; such steps are not worth timing.")
    fit = max(1, int(args.seconds / args.repeats / (decoder.timed(4) / 4)))
    count = min(args.steps, fit)
    times = [decoder.timed(count) for _ in range(args.repeats)]
    ms = quantiles(times, count)
    return {"ms": ms, "steps": count, "repeats": args.repeats, "first_step_s": first, "ready_s": ready}


@torch.no_grad()
def measure(model: Any, preset: str | None, ids: torch.Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a cache; ``preset`` None is `DynamicCache`."""
    found: dict[str, Any] = {"cache": preset or "DynamicCache"}
    cuda = ids.device.type == "cuda"
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        cache = DynamicCache(config=model.config) if preset is None else MixedKVCache(model, preset)
        start = clock(ids.device)
        for part in ids.split(CHUNK, 1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        found["prompt_s"] = clock(ids.device) - start
        found |= steps(model, cache, args)
        if preset is not None:
            memory = cache.memory()
            found |= {"bytes": memory.total, "bits": 8 * (memory.total - memory.states) / max(memory.elements, 1)}
            found |= {"states": memory.states, "stock": memory.stock, "report": str(memory)}
            found["captured"] = captured(cache) if cuda else None
        else:
            layers = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
            storages = [x.untyped_storage() for x in layers]
            found["bytes"] = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:600]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return found


def parse(text: str) -> list[tuple[str, int | None, int, list[str]]]:
    """Rows as typed.

    Raises:
        ValueError: a shape is unknown.
    """
    rows = []
    for each in text.split(","):
        left, presets = each.split("=")
        shape, tokens = left.split("@")
        name, _, layers = shape.partition(":")
        if name not in SHAPES:
            raise ValueError(f"rows: shape {name!r} is unknown; allowed {', '.join(SHAPES)}.")
        rows.append((name, int(layers) if layers else None, int(tokens), presets.split("+")))
    return rows


def paged(row: dict[str, Any]) -> float:
    """Bits per element of full pages of the row's scheme, scales included, in layers that see all tokens."""
    config = config_of(row["shape"], row["layers"])
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dims = latent_dims(config) or (dim, dim)
    layout = get_scheme(row["cache"]).layout(*dims)
    sides = zip((layout.keys, layout.values), ("keys", "values"), dims, strict=True)
    return sum(dim * page_bits(side.formats[0], name, dim) for side, name, dim in sides) / sum(dims)


def ahead(row: dict[str, Any]) -> float:
    """Bits per element of the room that buffers of captured steps have for tokens to come."""
    amount, unit = re.search(r"of these reserved +(\S+) (\S+)", row["report"]).groups()
    held = float(amount) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    return row["bits"] * held / (row["bytes"] - row["states"])


def planned(row: dict[str, Any]) -> int:
    """Bytes that `hfkvq fit` computes for the row's cache, as it would be on a GPU today."""
    config = config_of(row["shape"], row["layers"])
    config.dtype = torch.bfloat16
    layers = outline_of(config).layers
    windows = sum(layer.window * layer.heads * (layer.key_dim + layer.value_dim) for layer in layers)
    each = sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in layers if not layer.window)
    # The record has the elements of the tokens that timed steps added.
    seen = round((8 * (row["bytes"] - row["states"]) / row["bits"] - windows) / each)
    # `saw-int4` kept no tokens whole then.
    bare = ":sink_length=0" if row["cache"].startswith("saw-int4") else ""
    return cache_bytes(config, row["cache"] + bare, seen, generated=seen - row["tokens"], graphs=True)


def table() -> str:
    """The rows in Markdown."""
    lines, base = [], 0.0
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        if row["cache"] == "DynamicCache":
            base = row["ms"]["p50"]
            continue
        lines.append(
            (
                f"{row['shape']}, {row['layers']}",
                f"{row['tokens'] // 1024}k",
                f"`{row['cache']}`",
                f"{row['ms']['p50']:.2f} ms",
                f"{base:.1f} ms",
                f"{row['times_faster']:.1f}x",
                f"{row['bytes'] / 2**20:,.0f} MiB",
                f"{paged(row):.2f}",
                f"{row['bits'] - ahead(row):.2f}",
                f"{row['bits']:.2f}",
                f"{row['bits'] * (planned(row) - row['states']) / (row['bytes'] - row['states']):.2f}",
            )
        )
    return markdown_table(HEAD, lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=DEFAULT)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="most for the timed steps of a row")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = parse(args.rows)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {
        "kind": "model steps",
        "gpu": device_name(device),
        "versions": versions(),
        "commit": commit(),
        "date": now(),
        "rows": [],
    }
    for shape, layers, tokens, presets in rows:
        config = config_of(shape, layers)
        model = build(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, tokens), generator=generator).to(device)
        base = None
        for preset in (None, *presets):
            row = {"shape": shape, "layers": config.num_hidden_layers, "tokens": tokens}
            row |= measure(model, preset, ids, args)
            if "ms" in row:
                base = row["ms"]["p50"] if preset is None else base
                row["times_faster"] = base / row["ms"]["p50"] if base else None
            record["rows"].append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "report"}), flush=True)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        del model
        gc.collect()


if __name__ == "__main__":
    main()
