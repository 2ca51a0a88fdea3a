"""Every family of decoders that Transformers has, tiny: its config class with small sizes, and random weights."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 128
MOST_PARAMETERS = 40_000_000

# Auto classes take the first mapping that knows a family.
KINDS = {
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "vision-language": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}

# BERT and its like attend both ways unless told to decode. Some do so here, too, under a name of their own.
BOTH_WAYS = ", both ways"
ENCODERS = ("bert", "bert-generation", "electra", "rembert", "roberta", "roformer")

# Values by the name of a field, wherever it stands; only fields that the config class has are set.
_VALUES: dict[int, str] = {
    64: (
        "hidden_size n_embd d_model embed_dim hidden_dim dim projection_dim out_hidden_size intermediate_size "
        "n_inner d_ff ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ffn_embed_dim text_hidden_size "
        "output_hidden_size word_embed_proj_dim embedding_size image_embed_dim mlp_dim "
        "dense_intermediate_size output_dim intermediate_size_mlp adapter_intermediate_dim lru_width "
        "attention_hidden_size d_inner shared_intermediate_size decoder_hidden_size vision_hidden_size "
        "qformer_hidden_size encoder_hidden_size ff_dim d_embed mm_hidden_size projector_hidden_size "
        "proj_hidden_size audio_hidden_size query_dim cross_attention_hidden_size n_embed"
    ),
    32: (
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size head_dim "
        "d_kv d_head attention_head_dim global_head_dim moe_ffn_hidden_size moe_hidden_size expert_dim "
        "expert_intermediate_size q_lora_rank kv_lora_rank hidden_size_per_layer_input attention_head_size "
        "shared_expert_hidden_size kv_channels router_hidden_dim moe_latent_size"
    ),
    16: (
        "qk_nope_head_dim v_head_dim mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim "
        "mamba_d_state ssm_state_size state_size sliding_window attention_chunk_size "
        "local_attention_window_size mamba_dt_rank index_head_dim chunk_size mamba_chunk_size num_mel_bins "
        "attention_window_size window_size conv_L_cache linear_head_dim"
    ),
    8: ("qk_rope_head_dim mamba_n_heads mamba_num_heads n_mamba_heads"),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_experts n_routed_experts num_local_experts moe_num_experts index_n_heads linear_num_value_heads "
        "num_attention_groups num_global_attention_heads num_query_tokens num_latents num_routed_experts "
        "n_codebooks linear_num_heads"
    ),
    2: (
        "num_key_value_heads n_head_kv num_kv_heads num_layers n_layer n_layers encoder_layers decoder_layers "
        "num_decoder_layers num_encoder_layers num_hidden_layers num_experts_per_tok num_experts_per_token "
        "moe_topk moe_k moe_top_k top_k_experts n_group depth linear_num_key_heads topk_method_n "
        "mamba_n_groups n_groups mamba_expand num_global_key_value_heads spatial_merge_size vision_layers "
        "text_layers perceiver_layers"
    ),
    1: (
        "topk_group first_k_dense_replace n_shared_experts num_shared_experts moe_layer_start_index "
        "decoder_sparse_step num_dense_layers first_dense_layers"
    ),
    0: ("num_nextn_predict_layers num_mtp_layers pad_token_id mtp_num_hidden_layers"),
    512: (
        "max_position_embeddings n_positions max_source_positions max_target_positions "
        "original_max_position_embeddings max_seq_len max_seq_length n_ctx seq_length"
    ),
    VOCABULARY: ("vocab_size vocab_size_per_layer_input text_vocab_size decoder_vocab_size padded_vocab_size"),
    28: ("image_size img_size"),
    14: ("patch_size"),
}
_SMALL = {name: value for value, names in _VALUES.items() for name in names.split()}
_SMALL |= {"bos_token_id": 1, "decoder_start_token_id": 1, "initializer_range": 0.15, "init_std": 0.15}
_SMALL |= {"initializer_factor": 3.0, "tie_word_embeddings": False}

_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
_AXES = [
    {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}}}
    for section in ([2, 3, 3], [2, 1, 1], [4, 6, 6])
]

_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 32}
_INDEXER |= {"indexer_compress_ratio": 4}

# Values that only some families need, by place in their config.
_OWN: dict[str, dict[str, Any]] = {
    name: fields
    for names, fields in (
        ("bamba", {"attn_layer_indices": [1]}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
        ("codegen gptj", {"rotary_dim": 8}),
        ("helium", {"head_dim": 16}),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
        ("dots1", {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
        ("deepseek_v2", {"num_experts_per_tok": 2}),
        ("deepseek_ocr2", {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}}),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention"]}),
        ("glm5_next", {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0}}),
        ("cohere_compass_text", {"rope_parameters": _ROPES}),
        ("cohere_compass", {"text_config": {"rope_parameters": _ROPES}}),
        ("gemma3n_text", {"num_kv_shared_layers": 0}),
        ("gemma4 gemma4_unified", {"text_config": {"global_head_dim": 64, "num_kv_shared_layers": 0}}),
        ("gemma4_text gemma4_unified_text", {"global_head_dim": 64, "num_kv_shared_layers": 0}),
        ("longcat_flash", {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "head_dim": 8}),
        ("glm46v glm4v glm_ocr glmga qwen2_vl qwen2_5_vl hunyuan_vl", _AXES[0]),
        ("glm4v_moe", _AXES[1]),
        ("paddleocr_vl", _AXES[2]),
        ("nemotron", {"num_key_value_heads": 2}),
        ("falcon_h1", {"mamba_d_ssm": 64, "mamba_d_head": 8, "mamba_n_heads": 8}),
        ("recurrent_gemma", {"block_types": ["attention", "recurrent"]}),
        ("step3p7", {"text_config": {"sliding_window": 16}}),
        ("chameleon", {"vocabulary_map": {"<image>": 3}}),
        ("qwen3_asr", {"eos_token_id": 2}),
        ("fun_asr_nano", {"adaptor_config": {"intermediate_size": 16}}),
        ("qwen4_exp_text", _INDEXER),
        ("qwen4_exp", {"text_config": _INDEXER}),
        ("moonshine_streaming", {"num_key_value_heads": 4}),
        ("nemotron_h_omni", {"vision_config": {"video_temporal_patch_size": 2}}),
        ("qwen2_5_omni_thinker", {"vision_start_token_id": 4} | _AXES[0]),
        ("qwen3_omni_moe_thinker", {"vision_start_token_id": 4}),
        ("kimi_linear", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("zaya", {"num_experts_per_tok": 1}),
        ("zamba", {"attention_hidden_size": 128}),
        ("molmo2", {"vision_config": {"image_size": [28, 28]}, "adapter_config": {"vision_feature_layer": [1, 0]}}),
    )
    for name in names.split()
}


def families() -> dict[str, str]:
    """Kind of each family, by its ``model_type``; ``encoder`` are decoders once more, see `ENCODERS`."""
    found = {name + BOTH_WAYS: "encoder" for name in ENCODERS}
    for kind, names in KINDS.items():
        for name in names:
            found.setdefault(name, kind)
    return found


def model_class(name: str) -> type[PreTrainedModel]:
    """The class that generates text, of a family."""
    import transformers

    name = name.removesuffix(BOTH_WAYS)
    names = KINDS[families()[name]][name]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def small_config(name: str, **changes: Any) -> PreTrainedConfig:
    """A config of a family with small sizes throughout.

    Args:
        name: ``model_type``, or key of `families`.
        **changes: fields, wherever they stand.
    """
    decodes = {"is_decoder": True} if families()[name] == "decoder" else {}
    default: PreTrainedConfig = CONFIG_MAPPING[name.removesuffix(BOTH_WAYS)]()
    expected: Any = model_class(name).config_class
    text = default.get_text_config(decoder=True)
    if not isinstance(default, expected) and isinstance(text, expected):
        default = text
    return _shrunk(default, _SMALL | decodes | changes, copy.deepcopy(_OWN.get(name, {})))


def _shrunk(default: PreTrainedConfig, small: dict[str, Any], own: dict[str, Any]) -> PreTrainedConfig:
    # Fields that differ by layer cannot be had as an attribute.
    default.allow_global_per_layer_attribute_access = True
    known = {key: getattr(default, key, None) for key in default.to_dict()}
    given: dict[str, Any] = {}
    for key, value in known.items():
        if isinstance(value, PreTrainedConfig):
            given[key] = _shrunk(value, small, own.get(key, {})).to_dict()
        elif key in small and (value is not None or key.endswith(("_id", "_factor"))):
            given[key] = small[key]
    given |= {key: value for key, value in _layers(default, known, small).items() if key not in given or key in known}
    if "eos_token_id" in known:
        given["eos_token_id"] = None
    if "kv_lora_rank" in known and "num_key_value_heads" in given:
        # Latent attention has as many heads of keys as of queries.
        given["num_key_value_heads"] = small["num_attention_heads"]
    if "head_dim" in known and known["head_dim"] is None and "hidden_size" in given:
        given["head_dim"] = small["hidden_size"] // small["num_attention_heads"]
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        head = given.get("head_dim", small["hidden_size"] // small["num_attention_heads"])
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        section = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
        given["rope_parameters"] = {**rope, "mrope_section": section}
    given |= {key: value for key, value in own.items() if not isinstance(known.get(key), PreTrainedConfig)}
    cls = type(default)
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls.__init__).parameters.values()):
        given = {key: value for key, value in given.items() if key in inspect.signature(cls.__init__).parameters}
    config = cls(**given)
    for key in own.keys() - known.keys():
        setattr(config, key, own[key])
    return config


def _layers(default: PreTrainedConfig, known: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """A layer of each kind, and two at least."""
    found: dict[str, Any] = {}
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = known.get(key)
        if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
            found[key] = kinds
    if not found:
        return {}
    first = [i for kinds in found.values() for i in {kind: kinds.index(kind) for kind in kinds}.values()]
    count = "num_hidden_layers" if "num_hidden_layers" in known else "n_layer" if "n_layer" in known else "num_layers"
    chosen = sorted({*first, 0, *([1] if len(set(first)) < 2 else [])})
    return {count: len(chosen)} | {key: [kinds[i] for i in chosen] for key, kinds in found.items()}


def build(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model in float32 on the CPU; the same weights for the same name and seed.

    Raises:
        ValueError: it is not tiny: its config has sizes that are set nowhere here.
    """
    config, cls = small_config(name, **changes), model_class(name)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{name}: {count / 1e6:.0f} M parameters, allowed {MOST_PARAMETERS / 1e6:.0f} M.")
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = cls._from_config(small_config(name, **changes)).eval().float()
    for module in model.modules():
        for own in module._parameters.values():
            if own is not None and not own.isfinite().all():
                torch.nn.init.normal_(own, std=0.15)
    torch.random.set_rng_state(state)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, decoder_start_token_id=1)
    return model
