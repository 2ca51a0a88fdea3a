"""The few classes of vLLM that the backend derives from or calls, for machines without vLLM."""

import sys
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class CGSupport(Enum):
    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class AttentionType:
    DECODER = "decoder"


class Backend:
    @classmethod
    def validate_configuration(cls, *args, **kwargs):
        return []


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What vLLM asks a layer for."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.uint8


class Impl(Generic[T]):
    pass


class Builder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.vllm_config = kv_cache_spec, vllm_config

    def _init_reorder_batch_threshold(self, threshold, supports_spec_as_decode):
        self.reorder_batch_threshold = threshold

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


def split(given, decode_threshold):
    """Numbers of requests and tokens in steps and in prompts; steps come first."""
    starts = given.query_start_loc_cpu.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    steps = next((i for i, count in enumerate(counts) if count > decode_threshold), len(counts))
    return steps, len(counts) - steps, starts[steps], starts[-1] - starts[steps]


def install(monkeypatch, version="0.25.0"):
    """Puts the stand-in where vLLM would be imported from; returns what was registered, by member."""
    registered = {}
    contents = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config": lambda: None},
        "vllm.distributed": {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": Backend,
            "AttentionCGSupport": CGSupport,
            "AttentionImpl": Impl,
            "AttentionMetadata": object,
            "AttentionMetadataBuilder": Builder,
            "AttentionType": AttentionType,
            "CommonAttentionMetadata": SimpleNamespace,
        },
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": Spec},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.utils": {"split_decodes_and_prefills": split},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": Enum("AttentionBackendEnum", ["CUSTOM"]),
            "register_backend": lambda member, path: registered.update({member.name: path}),
        },
    }
    for name, own in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(own)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hfkvq.vllm.backend", raising=False)
    return registered
