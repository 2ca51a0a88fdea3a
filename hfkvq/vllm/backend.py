"""The attention backend that vLLM 0.25 calls: its configuration, metadata of batches, and one layer's attention."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from hfkvq import kernels
from hfkvq.caches import Scheme, get_scheme

from . import DTYPE
from .pages import PAGE, TAIL, TOGETHER, Call, LayerPages, Prompts, Steps, Varlen, refusal, sdpa
from .smoothing import has_key_biases, vectors_of_layer

HEAD_SIZES = (32, 64, 96, 128, 192, 256)


def scheme_of(config: Any) -> Scheme:
    """The scheme that ``HFKVQ_SCHEME`` names, for all layers of a model.

    Raises:
        ValueError: none is named, it is unknown, or layers differ in it.
    """
    name = os.environ.get("HFKVQ_SCHEME")
    if not name:
        raise ValueError("HFKVQ_SCHEME: got nothing, allowed the name of a scheme: saw-int4, saw-int4-kv or int4.")
    scheme, layers = get_scheme(name), config.model_config.hf_text_config.num_hidden_layers
    own = {scheme.in_layer(layer, layers).shared for layer in range(layers)}
    if len(own) > 1:
        raise ValueError(f"HFKVQ_SCHEME: got {name!r}, whose layers differ, allowed saw-int4, saw-int4-kv and int4.")
    return own.pop()


def reasons(config: Any, head_size: int, kv_cache_dtype: str | None, block_size: int | None) -> list[str]:
    """Everything that keeps vLLM from holding pages of the scheme, in words for its error."""
    found = []
    if kv_cache_dtype != DTYPE:
        found.append(f"kv_cache_dtype: got {kv_cache_dtype!r}, allowed {DTYPE!r}, whose bytes hfkvq's pages fill")
    if block_size is not None and block_size % PAGE:
        found.append(f"block_size: got {block_size}, allowed {PAGE} (leave it out)")
    if head_size not in HEAD_SIZES:
        found.append(f"head_size: got {head_size}, allowed {', '.join(map(str, HEAD_SIZES))}")
    if config.speculative_config is not None:
        found.append("speculative_config: got one, allowed None: steps have one token a request")
    try:
        reason = refusal(scheme_of(config), head_size)
    except ValueError as error:
        return [*found, str(error)]
    if reason:
        name = os.environ["HFKVQ_SCHEME"]
        found.append(f"HFKVQ_SCHEME: got {name!r}, allowed saw-int4, saw-int4-kv and int4: {reason}")
    return found


class Backend(AttentionBackend):
    """Compressed pages in vLLM's blocks: see `LayerPages`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [DTYPE]
    # A token is attended to before it is quantized, so both are one call.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """Name of its member of vLLM's enumeration."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Tokens of a block."""
        return [PAGE]

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        """Attention of one layer."""
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Maker of metadata."""
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = DTYPE
    ) -> tuple[int, ...]:
        """Bytes of blocks; only their number matters, since pages lie in them in an order of their own."""
        return (num_blocks, block_size, num_kv_heads, head_size + 8)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Channels of a head."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """False: connectors copy blocks, and a page's bytes do not lie together."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From 8.0 on."""
        return capability.major >= 8

    @classmethod
    def validate_configuration(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Reasons why the configuration is refused: our own in full words, or vLLM's."""
        own = reasons(get_current_vllm_config(), head_size, kv_cache_dtype, block_size)
        return own or super().validate_configuration(head_size, dtype, kv_cache_dtype, block_size, *args, **kwargs)


@dataclass
class Metadata(AttentionMetadata):
    """A batch: requests with one token first, then those with more.

    Attributes:
        num_actual_tokens: of all requests.
        decodes: requests with one token.
        table: i32 (R, N), blocks of all requests.
        lengths: i32 (R,), tokens of each, the new ones included.
        tails: see `LayerPages`.
        prompts: the requests with more tokens, if there are any.
    """

    num_actual_tokens: int
    decodes: int
    table: Tensor
    lengths: Tensor
    tails: tuple[Tensor, Tensor]
    prompts: Prompts | None = None

    @cached_property
    def _made(self) -> dict[bool, Steps]:
        return {}

    @property
    def steps(self) -> Steps:
        """Rows of the requests with one token; made by the first layer, inside of a graph that is being captured."""
        capturing = self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing not in self._made:
            self._made[capturing] = Steps.of(self.table[: self.decodes], self.lengths[: self.decodes])
        return self._made[capturing]


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes metadata of batches."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
        # Graphs are captured for batches that are padded.
        rows = max(
            vllm_config.scheduler_config.max_num_seqs, *vllm_config.compilation_config.cudagraph_capture_sizes, 1
        )
        shape = (rows, kv_cache_spec.num_kv_heads, TAIL, kv_cache_spec.head_size)
        dtype = vllm_config.model_config.dtype
        self._tails = (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Metadata of a batch; asks the device for nothing."""
        given = common_attn_metadata
        decodes, _, _, _ = split_decodes_and_prefills(given, decode_threshold=1)
        made = Metadata(given.num_actual_tokens, decodes, given.block_table_tensor, given.seq_lens, self._tails)
        if decodes < given.num_reqs:
            starts = given.query_start_loc_cpu[decodes : given.num_reqs + 1].tolist()
            counts = [end - start for start, end in pairwise(starts)]
            known = given.seq_lens_cpu_upper_bound
            # Exact for requests with several tokens.
            lengths = (given.seq_lens if known is None else known)[decodes : given.num_reqs].tolist()
            held = [max(length - count, 0) for length, count in zip(lengths, counts, strict=True)]
            made.prompts = Prompts.of(made.table[decodes : given.num_reqs], held, counts)
        return made


class Attention(AttentionImpl[Metadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = DTYPE,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            **kwargs,
        }
        for name, value in refused.items():
            if isinstance(value, Tensor) or value:
                raise ValueError(f"{name}: got {value!r} in a layer of the model, which hfkvq's pages do not hold.")
        config = get_current_vllm_config()
        scheme = scheme_of(config)
        self._form = scheme.layout(head_size, head_size).store
        self._longest = config.model_config.max_model_len
        self._smooths, self._rotated = scheme.smooths_keys, bool(self._form.rotate_keys)
        biased = has_key_biases(config.model_config.hf_text_config)
        if self._smooths and biased and not os.environ.get("HFKVQ_SMOOTHING"):
            raise ValueError(
                "HFKVQ_SMOOTHING: got nothing, but keys of this model have biases, and 4 bits do not hold them as they "
                "are; run `python -m hfkvq.vllm.smoothing MODEL FILE`, and set it to FILE."
            )
        self._vectors: Tensor | None = None
        self._pages: LayerPages | None = None
        self._bound: tuple[int, ...] = ()
        self._attend: Varlen = _attention_of_prompts(head_size)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch's new tokens, which are stored then.

        Args:
            layer: vLLM's layer.
            query: (n, Hq, D), after RoPE.
            key: (n, H, D), likewise.
            value: (n, H, D).
            kv_cache: u8, the layer's blocks.
            attn_metadata: of the batch; None when vLLM measures how much memory a call takes.
            output: (n, Hq, D) or (n, Hq D), written.
            output_scale: never given.
            output_block_scale: never given.

        Returns:
            ``output``.
        """
        if self._smooths:
            ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            self._vectors = vectors_of_layer(layer.layer_name, self.num_kv_heads, self._rotated, *ranks)
            self._smooths = False
        if attn_metadata is None:
            # Memory of a chunk behind many tokens: all keys and values of its request, one of them twice.
            room = max(self._longest, TOGETHER) * self.num_kv_heads * self.head_size
            query.new_empty(3 * room if query.is_cuda else 0)
            return output.fill_(0)
        count, decodes = attn_metadata.num_actual_tokens, attn_metadata.decodes
        query, key, value = query[:count], key[:count], value[:count]
        out = output.view(-1, self.num_heads, self.head_size)[:count]
        if self._vectors is not None:
            both = kernels.smooth(query[:, :, None], key[:, :, None], self._vectors)
            query, key = (x[:, :, 0] for x in both)
        pages = self._pages_in(kv_cache, attn_metadata.tails)
        prompts, rest = attn_metadata.prompts, slice(decodes, None)
        if decodes:
            pages.store_steps(key[:decodes], value[:decodes], attn_metadata.steps)
        if prompts is not None:
            pages.store_prompts(key[rest], value[rest], prompts)
        if decodes:
            out[:decodes] = pages.attend_steps(query[:decodes], attn_metadata.steps, self.scale)
        if prompts is not None:
            given = query[rest], key[rest], value[rest], prompts, self.scale
            pages.attend_prompts(*given, self._attend, out[rest])
        return output

    def _pages_in(self, data: Tensor, tails: tuple[Tensor, Tensor]) -> LayerPages:
        bound = data.data_ptr(), data.numel(), tails[0].data_ptr()
        if self._pages is None or bound != self._bound:
            if not data.is_contiguous():
                raise ValueError("kv_cache: got blocks of several layers in one, allowed a tensor for each layer.")
            self._bound = bound
            self._pages = LayerPages(self._form, self.num_kv_heads, self.head_size, data.view(torch.uint8), tails)
        return self._pages


def _attention_of_prompts(head_size: int) -> Varlen:
    """The FlashAttention that vLLM brings, where it is there, else PyTorch's attention."""
    if not torch.cuda.is_available():
        return sdpa
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        version = get_flash_attn_version(head_size=head_size)
    except (ImportError, AssertionError):
        return sdpa

    def flash(query: Tensor, keys: Tensor, values: Tensor, call: Call, scaling: float, out: Tensor) -> None:
        flash_attn_varlen_func(
            q=query, k=keys, v=values, out=out, cu_seqlens_q=call.starts_q, cu_seqlens_k=call.starts_k,
            max_seqlen_q=call.longest_q, max_seqlen_k=call.longest_k, softmax_scale=scaling, causal=True,
            fa_version=version,
        )  # fmt: skip

    return flash
