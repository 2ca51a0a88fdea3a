"""Caches of popular models by name, computed from their published shapes: a table of docs/choosing.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig, MistralConfig, Qwen2Config

from evals.charts import is_own
from evals.model_steps import SHAPES as OTHERS
from evals.real_docs import ladder
from evals.shapes import POSITIONS, SHAPES
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.measure.tables import markdown_table
from hfkvq.tuning.fit import cache_bytes

TOKENS = (32768, 131072)


def dense(kind: Any, layers: int, heads: int, kv_heads: int, dim: int = 128, **more: Any) -> Callable[[], Any]:
    """A config whose caches are those of the published one; only what they depend on is given."""
    return lambda: kind(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
        hidden_size=heads * dim, max_position_embeddings=POSITIONS, **more,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "Qwen2.5-1.5B, Qwen2.5-Coder-1.5B": dense(Qwen2Config, 28, 12, 2),
    "Qwen2.5-7B": dense(Qwen2Config, 28, 28, 4),
    "Qwen2.5-32B": dense(Qwen2Config, 64, 40, 8),
    "Qwen3-0.6B": SHAPES["qwen3-0.6b"],
    "Qwen3-8B": SHAPES["qwen3-8b"],
    "Qwen3-32B": SHAPES["qwen3-32b"],
    "Qwen3-30B-A3B": SHAPES["qwen3-30b-a3b"],
    "Llama-3.2-3B": dense(LlamaConfig, 28, 24, 8),
    "Llama-3.1-8B": SHAPES["llama-3.1-8b"],
    "Llama-3.3-70B": dense(LlamaConfig, 80, 64, 8),
    "Gemma-3-12B": OTHERS["gemma3-12b"],
    "Gemma-3-27B": dense(Gemma3TextConfig, 62, 32, 16, sliding_window=1024),
    "gpt-oss-20b": OTHERS["gpt-oss-20b"],
    "gpt-oss-120b": lambda: GptOssConfig(num_hidden_layers=36),
    "Mistral-7B-v0.3": dense(MistralConfig, 32, 32, 8, sliding_window=None),
    "Mistral-Nemo-12B, Mistral-Small-24B": dense(MistralConfig, 40, 32, 8, sliding_window=None),
}
MEASURED = ("Qwen2.5-1.5B, Qwen2.5-Coder-1.5B",)
"""Rows of which a model's loss was measured (docs/results.md)."""


def table() -> str:
    """A row for each model: our own widest preset, the default, and our own narrowest."""
    own, lines = [name for name in ladder() if is_own(name)], []
    chosen = (own[0], DEFAULT_SCHEME, own[-1])
    for name, make in MODELS.items():
        config, cells = make(), []
        windows = sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ())
        whole = config.num_hidden_layers - windows
        a_token = 2 * 2 * whole * config.num_key_value_heads * config.head_dim / 1024
        for tokens in TOKENS:
            sizes = [cache_bytes(config, preset, tokens, chunk=2048) for preset in (None, *chosen)]
            cells += [f"{size / 2**30:.2f}" for size in sizes]
        layers = f"{whole}" + (f", {windows} with windows" if windows else "")
        lines.append((name, layers, f"{a_token:,.0f}", *cells, "measured" if name in MEASURED else "by rule"))
    shown = [f"{size}: {name}" for size in ("32k", "128k") for name in ("bf16", *(f"`{each}`" for each in chosen))]
    return markdown_table(("model", "layers", "KiB a token", *shown, "loss"), lines)
