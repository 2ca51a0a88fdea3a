"""Models of published shapes with random weights, made on the device: for scripts that time whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

POSITIONS = 262144
"""More positions than the checkpoints were trained for: random weights do not mind."""

QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> PreTrainedConfig:
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, tie_word_embeddings=tied, **QWEN,
    )  # fmt: skip


SHAPES = {
    "qwen3-0.6b": lambda: qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": lambda: qwen3(4096, 12288, 36, 32),
    "qwen3-32b": lambda: qwen3(5120, 25600, 64, 64),
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=POSITIONS, rope_parameters=LLAMA_ROPE,
    ),
    # 128 experts, 8 a token, are the class's defaults, under a name that differs between releases.
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, norm_topk_prob=True, **QWEN,
    ),
}  # fmt: skip
"""Configs written out, so that nothing is downloaded."""


def get_config(model: str, layers: int | None = None) -> Any:
    """The config of one of `SHAPES`, a folder or a name on the Hub; with fewer layers if asked for."""
    if model in SHAPES:
        config = SHAPES[model]()
    elif "/" in model or Path(model).is_dir():
        config = AutoConfig.from_pretrained(model)
    else:
        raise ValueError(f"model: got {model!r}, allowed {', '.join(SHAPES)}, a folder or a name on the Hub.")
    text = config.get_text_config(decoder=True)
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    return config


def build(config: Any, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model with the architecture's own initialization: norms are what they should be, logits finite."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if model.generation_config is not None:
        # `generate` must not stop early.
        model.generation_config.eos_token_id = None
    return model.eval()
