"""The attention backend that vLLM 0.25 calls: its configuration, metadata of batches, and one layer's attention."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
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
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hfkvq import kernels
from hfkvq.caches import Scheme, get_scheme
from hfkvq.caches.steps.step_buffer import sealing_rules
from hfkvq.kernels.compile import compile_prompts
from hfkvq.kernels.norms import Balance
from hfkvq.kernels.pages import StoreFormat

from . import DTYPE
from .pages import (
    PAGE,
    TAIL,
    TOGETHER,
    Call,
    LayerPages,
    Prompts,
    Steps,
    Varlen,
    bytes_of_page,
    refusal,
    sdpa,
)
from .smoothing import has_key_biases, vectors_of_layer
from .windows import PlacedPrompts, Slots, WindowPages, WindowPrompts

HEAD_SIZES = (32, 64, 96, 128, 192, 256)


def layer_number(name: str) -> int:
    """Number of a layer of vLLM, which its name has in it."""
    return int(re.findall(r"\.(\d+)\.", name)[0])


def schemes_of(config: Any) -> list[Scheme]:
    """The scheme of each layer of a model, as ``HFKVQ_SCHEME`` names it.

    Raises:
        ValueError: none is named, or it is unknown.
    """
    name = os.environ.get("HFKVQ_SCHEME")
    if not name:
        raise ValueError("HFKVQ_SCHEME: got nothing, allowed the name of a scheme, for example saw-int4 or best-2.5.")
    scheme, layers = get_scheme(name), config.model_config.hf_text_config.num_hidden_layers
    return [scheme.in_layer(layer, layers).shared for layer in range(layers)]


def reasons(config: Any, head_size: int, kv_cache_dtype: str | None, block_size: int | None) -> list[str]:
    """Everything that keeps vLLM from holding pages of the scheme, in words for its error."""
    found = []
    if kv_cache_dtype != DTYPE:
        found.append(f"kv_cache_dtype: got {kv_cache_dtype!r}, allowed {DTYPE!r}, which stands for hfkvq's pages")
    if block_size is not None and block_size % PAGE:
        found.append(f"block_size: got {block_size}, allowed {PAGE} (leave it out)")
    if head_size not in HEAD_SIZES:
        found.append(f"head_size: got {head_size}, allowed {', '.join(map(str, HEAD_SIZES))}")
    if config.speculative_config is not None:
        found.append("speculative_config: got one, allowed None: steps have one token a request")
    try:
        schemes = dict.fromkeys(schemes_of(config))
    except ValueError as error:
        return [*found, str(error)]
    name = os.environ["HFKVQ_SCHEME"]
    for reason in dict.fromkeys(refusal(scheme, head_size) for scheme in schemes):
        if reason:
            found.append(f"HFKVQ_SCHEME: got {name!r}, allowed saw-int4, best-2.5 and others: {reason}")
    if any(scheme.layout(head_size, head_size).windowed for scheme in schemes):
        parallel = config.parallel_config
        for option in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(parallel, option) > 1:
                found.append(f"{option}: got {getattr(parallel, option)}, allowed 1 with {name}")
        if getattr(parallel, "use_ubatching", False):
            found.append(f"enable_dbo: got True, allowed False with {name}: a batch is to come whole")
    return found


def form_of(scheme: Scheme, head_size: int) -> tuple[StoreFormat, str, str, tuple[Balance, Balance]]:
    """Format of a layer, rule of its raised channels, what it asks of queries, and how normed pages are balanced."""
    layout = scheme.layout(head_size, head_size)
    form, balances = layout.store, (layout.keys.balance, layout.values.balance)
    if not layout.windowed:
        return form, "", "", balances
    return replace(form, sink=PAGE), *sealing_rules(scheme, layout, head_size), balances


@dataclass(frozen=True, kw_only=True)
class PagesSpec(FullAttentionSpec):
    """Spec of a layer's blocks for vLLM: pages, of ``page_bytes`` each."""

    page_bytes: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a block."""
        return self.page_bytes

    real_page_size_bytes = page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Spec of several layers. Raises AssertionError if they differ."""
        assert all(spec == specs[0] for spec in specs), "layers of one group have the same pages"
        return specs[0]


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
        return (num_blocks, -1)

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
        tails: see `LayerPages`; None where there are slots.
        bounds: see `Steps`; likewise.
        slots: of windows; None where there are none.
        prompts: the requests with more tokens, if there are any.
        windows: what their windows need to know; None without slots.
        restores: whether a request may come with a prefix that others have stored.
    """

    num_actual_tokens: int
    decodes: int
    table: Tensor
    lengths: Tensor
    tails: tuple[Tensor, Tensor] | None = None
    bounds: Tensor | None = None
    slots: Slots | None = None
    prompts: Prompts | None = None
    windows: WindowPrompts | None = None
    restores: bool = True

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Makes something in the first layer, inside of a graph that is being captured, and hands it to the others."""
        key = name, self.capturing
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def capturing(self) -> bool:
        """True while a graph is being captured."""
        return self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()

    @property
    def steps(self) -> Steps:
        """Rows of the requests with one token."""

        def make() -> Steps:
            assert self.bounds is not None
            lengths = self.lengths[: self.decodes]
            return Steps(self.table[: self.decodes], lengths, (lengths + self.bounds[0]).maximum(self.bounds[1]))

        return self.once("steps", make)

    @property
    def claimed(self) -> kernels.Claimed:
        """Slots of all requests, and what follows for those with one token."""

        def make() -> kernels.Claimed:
            assert self.slots is not None
            past, sealed = None, None
            if self.windows is not None:
                past = (self.lengths[: self.decodes] - 1).clamp(min=0)
                past = torch.cat([past, self.windows.rows.requests[1]])
                sealed = self.windows.sealed
            return kernels.claim(self.table, self.lengths, self.slots.tensors, PAGE, self.decodes, past, sealed)

        return self.once("claimed", make)

    @property
    def placed_prompts(self) -> PlacedPrompts:
        """The requests with more tokens, which have slots."""
        windows, slots = self.windows, self.claimed.found[0, self.decodes :]
        assert windows is not None
        return self.once("placed_prompts", lambda: windows.placed(slots))


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes metadata of batches."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
        self._heads, head_size = kv_cache_spec.num_kv_heads, kv_cache_spec.head_size
        scheme = schemes_of(vllm_config)[layer_number(layer_names[0])]
        self._slots, self._tails, self._bounds = None, None, None
        if device.type == "cuda":
            # Kernels of prompts are compiled now, so that the first requests need not wait for them.
            form, rule, asked, balances = form_of(scheme, head_size)
            own, slots = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
            sizes = own.get_num_attention_heads(vllm_config.parallel_config), self._heads, head_size
            compile_prompts(form, sizes, own.dtype, device, rule, bool(asked), balances, slots)
        if scheme.layout(head_size, head_size).windowed:
            self._slots = Slots(vllm_config.scheduler_config.max_num_seqs, device)
            return
        # Graphs are captured for batches that are padded.
        rows = max(
            vllm_config.scheduler_config.max_num_seqs, *vllm_config.compilation_config.cudagraph_capture_sizes, 1
        )
        shape, dtype = (rows, self._heads, TAIL, head_size), vllm_config.model_config.dtype
        self._bounds = Steps.bounds(device)
        self._tails = (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Metadata of a batch; asks the device for nothing.

        Formats with slots share it: a batch is one object for all of a model's layers, and slots are claimed once.
        """
        given = common_attn_metadata
        if self._slots is None:
            return self._build(given)
        made = vars(given).get("hfkvq")
        if made is None:
            made = vars(given)["hfkvq"] = self._build(given)
        return made

    def _build(self, given: Any) -> Metadata:
        decodes, _, _, _ = split_decodes_and_prefills(given, decode_threshold=1)
        rows = slice(given.num_reqs)
        made = Metadata(
            given.num_actual_tokens, decodes, given.block_table_tensor[rows], given.seq_lens[rows],
            self._tails, self._bounds, self._slots,
        )  # fmt: skip
        known = given.seq_lens_cpu_upper_bound
        if decodes < given.num_reqs:
            starts = given.query_start_loc_cpu[decodes : given.num_reqs + 1].tolist()
            counts = [end - start for start, end in pairwise(starts)]
            # Exact for requests with several tokens.
            lengths = (given.seq_lens if known is None else known)[decodes : given.num_reqs].tolist()
            held = [max(length - count, 0) for length, count in zip(lengths, counts, strict=True)]
            made.prompts = Prompts.of(made.table[decodes:], held, counts, whole=self._slots is not None)
        if self._slots is not None:
            self._slots.check()
            if made.prompts is not None:
                made.windows = WindowPrompts.of(made.prompts, self._heads, self._slots.count)
            if known is not None:
                # Exact where requests have one token, too, since there is no speculation.
                held = (known[: given.num_reqs] - given.query_start_loc_cpu[: given.num_reqs + 1].diff()).tolist()
                made.restores = any(count > 0 and count % PAGE == 0 for count in held)
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
        self._config = config = get_current_vllm_config()
        self._schemes = schemes_of(config)
        smooths, biased = any(s.smooths_keys for s in self._schemes), has_key_biases(config.model_config.hf_text_config)
        if smooths and biased and not os.environ.get("HFKVQ_SMOOTHING"):
            raise ValueError(
                "HFKVQ_SMOOTHING: got nothing, but keys of this model have biases, and 4 bits do not hold them as they "
                "are; run `python -m hfkvq.vllm.smoothing MODEL FILE`, and set it to FILE."
            )
        self._longest = config.model_config.max_model_len
        self._form: StoreFormat | None = None
        self._vectors: Tensor | None = None
        self._windows: tuple[Tensor, Tensor] | None = None
        self._sums: tuple[Tensor, Tensor] | None = None
        self._pages: LayerPages | None = None
        self._bound: tuple[int, ...] = ()
        self._attend: Varlen = _attention_of_prompts(head_size)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Takes the layer's scheme, and tells vLLM through the layer how many bytes its blocks have.

        Version 0.25 asks the layer, and no backend.
        """
        for name, layer in self._config.compilation_config.static_forward_context.items():
            if getattr(layer, "impl", None) is self:
                self.begin(name)
                layer.get_kv_cache_spec = partial(self._spec, layer.get_kv_cache_spec)

    def _spec(self, ask: Callable[[Any], Any], config: Any) -> PagesSpec:
        assert self._form is not None
        found = ask(config)
        own = {field.name: getattr(found, field.name) for field in fields(found)}
        size = bytes_of_page(self._form, self.num_kv_heads, self.head_size)
        return PagesSpec(**own, page_bytes=size * (found.block_size // PAGE))

    def begin(self, name: str) -> None:
        """Takes the scheme of a layer of this name, and room for its windows, which vLLM counts as it does weights.

        Raises:
            ValueError: windows take too much of the device's memory.
        """
        scheme = self._schemes[layer_number(name)]
        self._form, self._rule, asked, self._balance = form_of(scheme, self.head_size)
        if scheme.smooths_keys:
            ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            rotated = bool(self._form.rotate_keys)
            self._vectors = vectors_of_layer(layer_number(name), self.num_kv_heads, rotated, *ranks)
        if not scheme.layout(self.head_size, self.head_size).windowed:
            return
        dtype, slots = self._config.model_config.dtype, self._config.scheduler_config.max_num_seqs
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        shape = (2 * slots + 2, self.num_kv_heads, PAGE, self.head_size)
        if device.type == "cuda":
            taken, room = 2 * torch.Size(shape).numel() * dtype.itemsize * len(self._schemes), torch.cuda.mem_get_info()
            if taken > room[1] // 4:
                raise ValueError(
                    f"max_num_seqs: got {slots}, whose first and newest tokens take {taken >> 20} MiB in 16 bits, "
                    f"allowed at most {int(slots * room[1] / 4 / taken)}; pass --max-num-seqs."
                )
        self._windows = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        if asked:
            sums = torch.zeros((slots + 1, *shape[1::2]), dtype=torch.float64, device=device)
            self._sums = sums, torch.zeros((shape[1], slots + 1), dtype=torch.int32, device=device)

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
            output_scale, output_block_scale: never given.

        Returns:
            ``output``.
        """
        if self._form is None:
            self.begin(layer.layer_name)
        if attn_metadata is None:
            # Memory of what new tokens attend to, and of queries and keys that are smoothed, and all that is rotated.
            room = 2 * max(self._longest, TOGETHER) * self.num_kv_heads * self.head_size
            query.new_empty(room + query.numel() + 3 * key.numel() if query.is_cuda else 0)
            return output.fill_(0)
        count, batch = attn_metadata.num_actual_tokens, attn_metadata
        query, key, value = query[:count], key[:count], value[:count]
        out = output.view(-1, self.num_heads, self.head_size)[:count]
        if self._vectors is not None:
            both = kernels.smooth(query[:, :, None], key[:, :, None], self._vectors)
            query, key = (x[:, :, 0] for x in both)
        pages, steps, rest = self._pages_in(kv_cache, batch), slice(batch.decodes), slice(batch.decodes, None)
        # All tokens of a batch are stored before any is attended to: a request may look at what another stores.
        if isinstance(pages, WindowPages):
            if batch.decodes:
                restores = batch.prompts is None and (batch.capturing or batch.restores)
                own = batch.claimed, batch.table[steps], restores
                pages.take_step(query[steps], key[steps], value[steps], *own)
            if batch.windows is not None:
                pages.take_prompts(query[rest], key[rest], value[rest], batch.placed_prompts)
                if batch.restores:
                    pages.restore(batch.table, batch.claimed)
            if batch.decodes:
                pages.attend_step(query[steps], batch.claimed, self.scale, out[steps])
        else:
            if batch.decodes:
                pages.store_steps(key[steps], value[steps], batch.steps)
            if batch.prompts is not None:
                pages.store_prompts(key[rest], value[rest], batch.prompts)
            if batch.decodes:
                pages.attend_steps(query[steps], batch.steps, self.scale, out[steps])
        if batch.prompts is not None:
            given = query[rest], key[rest], value[rest], batch.prompts, self.scale
            pages.attend_prompts(*given, self._attend, out[rest])
            if isinstance(pages, WindowPages):
                pages.finish_prompts()
        return output

    def _pages_in(self, data: Tensor, batch: Metadata) -> LayerPages:
        tails = batch.tails if self._windows is None else self._windows
        assert self._form is not None
        assert tails is not None
        bound = data.data_ptr(), data.numel(), tails[0].data_ptr()
        if self._pages is None or bound != self._bound:
            if not data.is_contiguous():
                raise ValueError("kv_cache: got blocks of several layers in one, allowed a tensor for each layer.")
            self._bound = bound
            given = self._form, self.num_kv_heads, self.head_size, data.view(torch.uint8), tails
            if self._windows is None:
                self._pages = LayerPages(*given)
            else:
                self._pages = WindowPages(*given, self._rule, self._balance, self._sums)
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
