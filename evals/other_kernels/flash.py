"""FlashAttention 3 and 2, as vLLM packages them."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from evals.kernel_cases import Shape
from evals.other_kernels.peer import Peer, Prepared, imported, page_table, paged

INTERFACE = "vllm.vllm_flash_attn.flash_attn_interface"
PAGES = (128, 256)
NO_PAGES = "no pages"


class _FlashAttention(Peer):
    package = "vllm"
    remedy = "pip install vllm"
    several = True
    version: ClassVar[int]

    def load(self) -> None:
        names = ("flash_attn_varlen_func", "get_scheduler_metadata", f"FA{self.version}_AVAILABLE")
        self._attend, self._metadata, there = imported(INTERFACE, *names)
        if not there:
            (reason,) = imported(INTERFACE, f"FA{self.version}_UNAVAILABLE_REASON")
            raise ImportError(f"FlashAttention {self.version} cannot be loaded: {reason}")

    def variants(self, shape: Shape) -> tuple[str, ...]:
        return tuple(f"pages of {page}" for page in PAGES)

    def prepare(self, shape: Shape, query: Tensor, keys: Tensor, values: Tensor, variant: str) -> Prepared:
        batch, queries, tokens, device = shape.batch, shape.queries, keys.shape[2], query.device
        given = self.cast(query).transpose(1, 2).flatten(0, 1).contiguous()
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        options: dict[str, Any] = {
            "max_seqlen_q": queries,
            "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
            "max_seqlen_k": tokens,
            "softmax_scale": shape.scaling,
            "causal": True,
            "fa_version": self.version,
            **self.scales(shape, device),
        }
        if variant == NO_PAGES:
            cache = tuple(self.cast(x).transpose(1, 2).reshape(-1, *x.shape[1::2]) for x in (keys, values))
            options["cu_seqlens_k"] = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
        else:
            page = int(variant.split()[-1])
            cache = tuple(paged(self.cast(x), page, heads_first=False) for x in (keys, values))
            options |= {"seqused_k": lengths, "block_table": page_table(batch, tokens, page, device)}
            options |= self.scheduled(shape, lengths, options, page, given.dtype)
        # Copies of the cache are the first tensors; the rest is the step's and the same for all layers.
        attend = partial(self._call, given, options, queries)
        return Prepared(cache, attend, sum(x.nbytes for x in cache), partial(self.exact, keys, values))

    def _call(self, query: Tensor, options: dict[str, Any], queries: int, keys: Tensor, values: Tensor) -> Tensor:
        out = self._attend(query, keys, values, **options)
        return out.unflatten(0, (-1, queries)).transpose(1, 2)

    def cast(self, x: Tensor) -> Tensor:
        """In the dtype that the kernel takes."""
        return x

    def exact(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.cast(keys).float(), self.cast(values).float()

    def scales(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        """Factors of fp8 tensors."""
        return {}

    def scheduled(
        self, shape: Shape, lengths: Tensor, options: dict[str, Any], page: int, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Schedule that vLLM works out once a step, for all layers."""
        return {}


class FlashAttention2(_FlashAttention):
    """FlashAttention 2, over bf16 or fp16."""

    name = "vllm-fa2"
    code_bits = (16, 16)
    version = 2


class FlashAttention3(_FlashAttention):
    """FlashAttention 3, over bf16 or fp16."""

    name = "vllm-fa3"
    code_bits = (16, 16)
    version = 3

    def variants(self, shape: Shape) -> tuple[str, ...]:
        """Pages, and rows one after the other, which it can load in larger pieces."""
        return (*super().variants(shape), NO_PAGES)

    def scheduled(
        self, shape: Shape, lengths: Tensor, options: dict[str, Any], page: int, dtype: torch.dtype
    ) -> dict[str, Any]:
        """The tile scheduler's plan."""
        plan = self._metadata(
            batch_size=shape.batch,
            max_seqlen_q=shape.queries,
            max_seqlen_k=options["max_seqlen_k"],
            num_heads_q=shape.heads,
            num_heads_kv=shape.kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=lengths,
            qkv_dtype=dtype,
            cu_seqlens_q=options["cu_seqlens_q"],
            page_size=page,
            causal=True,
            num_splits=0,
        )
        return {"scheduler_metadata": plan}


class FlashAttention3FP8(FlashAttention3):
    """FlashAttention 3 over fp8 keys and values; the query is rounded to fp8 before it is called, as vLLM does."""

    name = "vllm-fa3-fp8"
    code_bits = (8, 8)
    # Query and probabilities are fp8 too: each is off by 2.6 % root mean square.
    tolerance = 0.08

    def cast(self, x: Tensor) -> Tensor:
        """To e4m3; scales are 1, which random normal data needs no other than."""
        return x.to(torch.float8_e4m3fn)

    def scales(self, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        """Ones, by row and KV head."""
        ones = torch.ones((shape.batch, shape.kv_heads), dtype=torch.float32, device=device)
        return {"q_descale": ones, "k_descale": ones, "v_descale": ones}
