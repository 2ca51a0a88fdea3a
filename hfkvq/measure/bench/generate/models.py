"""Real architectures with random weights, made on the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hfkvq.caches.scheme import nearest

# Beyond what the checkpoints were trained for: random weights do not mind.
_POSITIONS = 262144

_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": _POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> PreTrainedConfig:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
        **_QWEN,
    )


def _llama31_8b() -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=_POSITIONS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def _qwen3_30b_a3b() -> PreTrainedConfig:
    # 128 experts, 8 a token, are the class's defaults, under a name that differs between releases.
    return Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        norm_topk_prob=True,
        **_QWEN,
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-0.6b": lambda: _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 12288, 36, 32),
    "llama-3.1-8b": _llama31_8b,
    "qwen3-32b": lambda: _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _qwen3_30b_a3b,
}
"""Configs written out, so that nothing is downloaded."""

EXPERTS = ("auto", "batched_mm", "grouped_mm", "eager")


def get_config(model: str, layers: int | None = None) -> PreTrainedConfig:
    """The config of an architecture, a local folder, or a name on the Hub.

    Args:
        model: one of `ARCHITECTURES`, a folder with a config.json, or ``organization/name``.
        layers: keep so many layers; None keeps all.

    Raises:
        ValueError: unknown, not to be read, fewer layers than asked for, or one whose layers have no plain keys and
            values.
    """
    name = model.lower()
    if name in ARCHITECTURES:
        config = ARCHITECTURES[name]()
    elif "/" in model or Path(model).expanduser().is_dir():
        path = Path(model).expanduser()
        if model.startswith((".", "/", "~")) and not path.is_dir():
            raise ValueError(f"model: the folder {model} does not exist.")
        try:
            config = AutoConfig.from_pretrained(str(path) if path.is_dir() else model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"model: the config of {model!r} cannot be read: {error}") from error
    else:
        hint = nearest(name, list(ARCHITECTURES))
        raise ValueError(f"model: got {model!r}, which is unknown; {hint} A folder or a name on the Hub will do too.")
    text = config.get_text_config(decoder=True)
    if layers is not None:
        if not 1 <= layers <= text.num_hidden_layers:
            raise ValueError(f"layers: got {layers}, allowed 1 to {text.num_hidden_layers}, as many as {model} has.")
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    _check(config, text, model)
    return config


def _check(config: PreTrainedConfig, text: PreTrainedConfig, model: str) -> None:
    """Raises ValueError unless every layer has plain keys and values."""
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if config.is_encoder_decoder:
        why = "it has an encoder"
    elif kinds:
        why = f"it has layers of {', '.join(sorted(kinds))}"
    elif getattr(text, "kv_lora_rank", None):
        why = "its attention is latent (MLA)"
    elif getattr(text, "num_kv_shared_layers", 0):
        why = "its layers share keys and values"
    elif getattr(text, "is_heterogeneous", False):
        why = "its layers differ in their heads"
    elif not isinstance(getattr(text, "num_attention_heads", None), int):
        why = "its config names no attention heads"
    else:
        return
    raise ValueError(
        f"model: {model} cannot be measured here, for {why}: caches are filled with random keys and values, one shape "
        "for all layers. Choose a plain decoder, such as Qwen3, Llama or Mixtral."
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's keys and values look like.

    Attributes:
        layers: how many layers.
        heads: query heads.
        kv_heads: KV heads.
        dim: channels of a head.
    """

    layers: int
    heads: int
    kv_heads: int
    dim: int

    @staticmethod
    def of(config: Any) -> Heads:
        """Of a config."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        return Heads(
            text.num_hidden_layers,
            heads,
            getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads,
        )

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.dim * dtype.itemsize


def build(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int, experts: str = "auto") -> Any:
    """A model of random weights that was never anywhere but on the device.

    The architecture's own initialization runs there: norms are what they should be, logits finite.

    Args:
        config: of the model.
        device: where it is made.
        dtype: of weights, keys and values.
        seed: of the weights.
        experts: how a mixture of experts computes them, see `EXPERTS`; "auto" leaves it to Transformers.

    Raises:
        ValueError: ``experts`` given for a model without any.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if experts != "auto":
        if not model._can_set_experts_implementation():
            raise ValueError(f"experts: got {experts!r}, but {type(model).__name__} has no experts; leave it out.")
        model.set_experts_implementation(experts)
    if model.generation_config is not None:
        # `generate` must not stop early.
        model.generation_config.eos_token_id = None
    return model.eval()


def apply_liger(model: Any) -> None:
    """Has Liger-Kernel compute a model's norms, rotary embedding and activations: one launch each in place of several.

    Raises:
        ValueError: it is not installed, or does not know the architecture.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    try:
        liger: Any = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ValueError(f"liger: liger-kernel cannot be imported ({error}); pip install liger-kernel.") from error
    apply = getattr(liger, f"apply_liger_kernel_to_{kind}", None)
    if apply is None:
        raise ValueError(f"liger: this release of liger-kernel has nothing for {kind}; leave it out.")
    # What is fused of a loss would replace the whole forward.
    apply(fused_linear_cross_entropy=False, model=model)


def weight_bytes(model: nn.Module) -> tuple[int, int | None]:
    """Bytes of all weights, and of those that a step of one token reads: None where it depends on the routing.

    A step reads one row a token of an embedding that is not the output's as well.
    """
    total = sum(weight.nbytes for weight in model.parameters())
    text = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    if getattr(text, "num_experts_per_tok", None):
        return total, None
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and head.weight is embedding
    return total, total - (0 if tied else embedding.nbytes)
