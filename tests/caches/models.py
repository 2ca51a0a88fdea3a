"""Tiny models with random weights, built from their configs: every family of attention that the cache meets."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 128

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    # Large enough that what comes out depends on all that went in.
    "initializer_range": 0.15,
}

SLIDING = {"sliding_window": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}

LATENT_EXPERTS: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT_EXPERTS |= EXPERTS | LATENT

# Name: (class prefix, what differs from BASE; None removes).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    # 16: 64 / 4.
    "qwen2": ("Qwen2", {"head_dim": None}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []} | EXPERTS),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", SLIDING),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
        | SLIDING,
    ),
    "gemma2": (
        "Gemma2",
        {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0} | SLIDING,
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]}
        | SLIDING,
    ),
    "phi3": ("Phi3", {"sliding_window": None, "original_max_position_embeddings": 512, "head_dim": None}),
    "glm4": ("Glm4", {"head_dim": 16}),
    # Makes masks of its own from what it is given, by its dtype.
    "doge": ("Doge", {"head_dim": None}),
    "deepseek-v3": ("DeepseekV3", LATENT_EXPERTS | {"num_nextn_predict_layers": 0}),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        }
        | EXPERTS,
    ),
}

# More models with latent attention, which the suites of all families need not repeat.
LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", LATENT_EXPERTS | {"topk_method": "greedy"}),
    "glm4-moe-lite": ("Glm4MoeLite", LATENT_EXPERTS | {"mlp_layer_types": ["dense", "sparse"]}),
    "minicpm3": ("MiniCPM3", {"head_dim": None, "num_key_value_heads": 4} | LATENT),
    "youtu": ("Youtu", {"head_dim": None, "num_key_value_heads": 4} | LATENT),
}

TEXT_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def config(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    """A fresh config of a family."""
    prefix, own = (FAMILIES | LATENT_FAMILIES)[name]
    values = {key: value for key, value in (BASE | own | changes).items() if not (key == "head_dim" and value is None)}
    return getattr(transformers, TEXT_CONFIGS.get(prefix, f"{prefix}Config"))(**values)


def _fresh(name: str, changes: dict[str, Any], seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    prefix, _ = (FAMILIES | LATENT_FAMILIES)[name]
    model: transformers.PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config(name, **changes))
    for module in model.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(module.sinks, std=1.0)
    return model.eval().float()


def build(name: str, *, attention: str | None = None, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A tiny model in float32 on the CPU; the same weights for the same name and seed.

    Args:
        name: key of `FAMILIES` or `LATENT_FAMILIES`.
        attention: attention implementation, if not the one the model has by itself.
        seed: of the weights.
        **changes: config fields.
    """
    state = torch.random.get_rng_state()
    model = _fresh(name, changes, seed)
    torch.random.set_rng_state(state)
    if attention is None and name == "gemma2":
        # As 5.23 has it by itself; the sdpa of 5.17 drops the softcap.
        attention = "eager"
    if attention is not None:
        model.set_attn_implementation(attention)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def first_layers(model: Any, count: int) -> Any:
    """The model with its first layers alone, which tell caches apart as all of them do."""
    model.model.layers = model.model.layers[:count]
    model.config.layer_types, model.config.num_hidden_layers = model.config.layer_types[:count], count
    return model


def prompt(rows: int, length: int, seed: int = 7) -> torch.Tensor:
    """Token ids (rows, length) without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)
