"""Blocks of Transformers' paged cache that hold a scheme's pages, and attention over them.

The engine keeps one tensor of bytes for all layers, gives blocks of it to requests, and tells each layer which blocks a
batch reads and writes. Here a block's bytes are our page formats'. Tokens are quantized one by one, as schemes by
token do, so a page depends on nothing but its own tokens: requests can share it, and a block that is not full needs
nothing beside it. As in a cache of our own, a token is attended to before it is quantized, in its step or its chunk.
Schemes whose tokens wait in 16 bits have `hfkvq.serving.windows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from hfkvq import kernels
from hfkvq.caches import Scheme
from hfkvq.caches.attention.interface import WITHOUT_CUDNN, dense_attention, flash_takes, lower_right
from hfkvq.caches.layer_state.smoothing import KeySmoothing
from hfkvq.caches.store.state import as_bytes
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.hadamard import hadamard, saturated
from hfkvq.kernels.pages import SIDES, PageFormat

ALIGNED = 128
"""Bytes of a page are a multiple of this, so that a sector of the engine is one block."""

LONG, STEP = 4096, 1024
"""Tokens of first prompts that cuDNN may take, and a multiple of which they have there."""

TAIL = 16
"""Slots of a row's tail, as kernels want them: one holds the token of a step."""


def refusal(scheme: Scheme, head_dim: int) -> str | None:
    """Why pages of a scheme cannot be the engine's, if they cannot."""
    if scheme.evicts:
        return "it forgets tokens, and the engine's blocks belong to tokens"
    if len(scheme.layout(head_dim, head_dim).keys.formats) > 1:
        return "its tokens have several widths, and an engine's block is of one"
    captured = scheme.limits(head_dim, head_dim).captured
    return None if captured is None else f"steps run without the host here, and {captured}"


def tensors_of(fmt: PageFormat, side: Any, heads: int, head_dim: int, dtype: torch.dtype) -> list[tuple[Any, Any, int]]:
    """Shape, dtype and bytes of each tensor of a page."""
    found = []
    for shape, own in fmt.shapes(side, heads, head_dim).values():
        kind = own or dtype
        # Whatever comes behind it can be read 16 bytes at a time.
        found.append((shape, kind, -(-torch.Size(shape).numel() * kind.itemsize // 16) * 16))
    return found


def page_bytes(scheme: Scheme, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a layer's page, keys and values, every scale counted."""
    formats = zip(scheme.layout(head_dim, head_dim).store.runs[0], SIDES, strict=True)
    return sum(size for fmt, side in formats for *_, size in tensors_of(fmt, side, heads, head_dim, dtype))


def typed(data: Tensor, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """A tensor that lies at the beginning of bytes."""
    return data[: torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)


class Columns(NamedTuple):
    """The requests of a batch that have new tokens, one after another.

    A row may have none: padding.

    Attributes:
        first: column of its first new token.
        at: where its blocks begin in the engine's list.
        new: tokens.
        held: tokens before them.
    """

    first: tuple[int, ...]
    at: tuple[int, ...]
    blocks: tuple[int, ...]
    new: tuple[int, ...]
    held: tuple[int, ...]

    @classmethod
    def of(cls, starts_q: list[int], starts_k: list[int], blocks_for: Callable[[int], int]) -> Columns | None:
        """From where the new tokens of each request begin, and all of them; None without a new token."""
        rows, at = [], 0
        for (q, end_q), (k, end_k) in zip(pairwise(starts_q), pairwise(starts_k), strict=False):
            count = blocks_for(end_k - k) if end_k > k else 0
            if end_q > q:
                rows.append((q, at, count, end_q - q, end_k - k - (end_q - q)))
            at += count
        return cls(*zip(*rows, strict=True)) if rows else None

    def table(self, numbers: Tensor, width: int) -> Tensor:
        """A row of the engine's list for each request, (R, width); behind its blocks the last one again."""
        found = [[at + min(j, count - 1) for j in range(width)] for at, count in zip(self.at, self.blocks, strict=True)]
        return numbers[torch.tensor(found, dtype=torch.int64, device="cpu").to(numbers.device)]


class Rows(NamedTuple):
    """Rows of a batch, the same in all layers.

    Attributes:
        table: i32 (R, N), blocks of each request.
        past: i32 (R,), tokens that its blocks hold.
        new: i32 (R,), tokens that come.
        columns: i32 (R, n), where they stand among the tokens of the batch, or in a step in the rows' tails.
        counters: i32 (4, R), as `kernels.decode_attention` wants them, if all requests have one token.
        lengths: tokens held and tokens to come of each request, known to the host; None in a step.
        steps: rows with one token and something held, of such a list.
        tails: i32 (n,), the tail of each row with one token.
    """

    table: Tensor
    past: Tensor
    new: Tensor
    columns: Tensor
    counters: Tensor
    lengths: list[tuple[int, int]] | None = None
    steps: Tensor | None = None
    tails: Tensor | None = None


class CompressedPages(FullAttentionCacheAllocator):
    """Blocks of one scheme's pages, for layers with full attention; `pages_of` gives it the scheme.

    Attributes:
        forms: formats of pages, by layer.
        smoothing: of layers whose keys are smoothed; by it queries and keys come smoothed to `attend`.
    """

    schemes: tuple[Scheme, ...]
    config: ClassVar[Any]
    smoothing: Mapping[int, KeySmoothing] = MappingProxyType({})
    supports_block_sharing = True
    window_bytes = 0
    """Bytes that requests hold beside their blocks."""
    window_room = 0
    """The most that they can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Tokens of the indices that the engine makes: a block is as many as a page has, in every layer.
        self.block_physical_stride = self.tokens_per_page
        self._parts: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._rows: Rows | None = None
        self.lay_out()

    def lay_out(self) -> None:
        """Takes the layouts of the layers' schemes."""
        own = zip(self.layer_indices, self.schemes, strict=True)
        self.layouts = {layer: scheme.layout(self.head_dim, self.head_dim) for layer, scheme in own}
        self.forms = {layer: layout.store for layer, layout in self.layouts.items()}

    @classmethod
    def get_bytes_per_page(
        cls, num_key_value_heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int
    ) -> int:
        """Bytes of a page of keys and values, every scale counted, and what alignment adds: the mean of all layers."""
        sizes = [page_bytes(scheme, num_key_value_heads, head_dim, cache_dtype) for scheme in cls.schemes]
        return -(-sum(sizes) // (len(cls.schemes) * ALIGNED)) * ALIGNED

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Takes the engine's bytes: a layer after the other, and of a layer each tensor of all its pages in a row.

        So kernels read them like those of a cache of our own. The engine itself never looks into a block.
        """
        self.bytes_per_sector = bytes_per_sector
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        blocks = cache_tensor.numel() // self.bytes_per_block
        for layer in self.layer_indices:
            self._parts[layer], cache_tensor = self._page_views(layer, cache_tensor, blocks)
        self._tails: list[Tensor] = []

    def _page_views(self, layer: int, data: Tensor, blocks: int) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
        """Tensors of a layer's pages, keys and values, at the beginning of bytes; and the bytes behind them."""
        made = []
        for fmt, side in zip(self.forms[layer].runs[0], SIDES, strict=True):
            parts = []
            for shape, kind, size in tensors_of(fmt, side, self.num_key_value_heads, self.head_dim, self.cache_dtype):
                parts.append(typed(data, (blocks, *shape), kind))
                data = data[blocks * size :]
            made.append(parts)
        return (made[0], made[1]), data

    def settle(self, processor: Any) -> None:
        """Makes ready what waits for the engine's processor to be there; before anything is recorded."""
        # Room for every request's newest token, 16 bits each. The engine says how many where the user does not.
        shape = (self.config.max_requests_per_batch or 1, self.num_key_value_heads, TAIL, self.head_dim)
        self._tails = [torch.zeros(shape, dtype=self.cache_dtype, device=processor.cache.device) for _ in SIDES]

    @property
    def most_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.tokens_per_page

    @property
    def bits(self) -> float:
        """Bits per element of keys and values, every byte of a page counted."""
        return 8 * self.bytes_per_block / (2 * self.num_key_value_heads * self.head_dim * self.tokens_per_block)

    # Batches with prompts are told a number for each block, which the engine hands on as it is. Lists of each
    # token's place, which the engine would make, are 350,000 numbers long for 43 requests of 8,192 tokens.

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a request with so many tokens."""
        return -(-tokens // self.tokens_per_page)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """A number for each block of a request."""
        tokens = past_length + query_length
        found = self._named_blocks(request_id)[: self.blocks_for(tokens)] if tokens else []
        assert not tokens or len(found) == self.blocks_for(tokens), "blocks of tokens that a batch has"
        return found

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The same, where the engine hands on nothing else: if no request of a batch has any tokens yet."""
        return [] if past_length else self.get_read_indices(request_id, past_length, query_length)

    def _named_blocks(self, request_id: str) -> list[int]:
        return self.block_table[request_id]

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copies blocks in all layers, for requests that fork."""
        device = self.cache_tensor.device
        source, dest = (
            torch.tensor(ids, device=device, dtype=torch.int64) for ids in (source_block_ids, dest_block_ids)
        )
        for part in [as_bytes(part) for sides in self._parts.values() for parts in sides for part in parts]:
            part[dest] = part[source]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, given: dict[str, Any]
    ) -> Tensor:
        """Attention of a batch's new tokens, which are stored then.

        Args:
            query: (1, Hq, n, D), of all requests one after another, after RoPE.
            key: (1, H, n, D).
            scaling: of the logits.

        Returns:
            (1, n, Hq, D).
        """
        layer = module.layer_idx
        if layer == self.layer_indices[0] or self._rows is None:
            self._rows = self._step_rows(given, query) if given["block_table"] is not None else self._batch_rows(given)
        rows = self._rows
        if rows is None:
            return query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
        arguments, form, count = arguments_of(scaling, given), self.forms[layer], rows.past.shape[0]
        if rows.lengths is None:
            # Every token is a request: rows of one token.
            q, k, v = (x.transpose(0, 2) for x in (query, key, value))
            out = self._step(layer, q, k, v, rows, arguments)
            out, sources = out.transpose(0, 2).transpose(1, 2), [tail[:count] for tail in self._tails]
        else:
            out = self._batch(layer, module, query, key, value, rows, arguments)
            rotations = (key, form.rotate_keys), (value, form.rotate_values)
            sources = [hadamard(x, rotation).expand(count, -1, -1, -1) for x, rotation in rotations]
        # Keys and values go where their tokens' blocks are, and requests that pad the batch have none.
        for parts, fmt, side, source in zip(self._parts[layer], form.runs[0], SIDES, sources, strict=True):
            kernels.seal_side(parts, rows.table, rows.past, rows.new, source, rows.columns, fmt, side)
        return out

    def _step_rows(self, given: dict[str, Any], query: Tensor) -> Rows:
        """Rows of a batch in which every request has one token; asks no device, so that a graph can hold it."""
        count = query.shape[2]
        ends = given["cu_seq_lens_k"][self.layer_type][: count + 1]
        lengths = (ends[1:] - ends[:-1]).to(torch.int32)
        past, new = (lengths - 1).clamp(min=0), lengths.clamp(max=1)
        table = given["block_table"][self.index].clamp(min=0)
        counters = torch.stack([torch.zeros_like(past), past + 1, past, past])
        tails = torch.arange(count, dtype=torch.int32, device=past.device)
        return Rows(table, past, new, (past % TAIL)[:, None], counters, tails=tails)

    def _batch_rows(self, given: dict[str, Any]) -> Rows | None:
        """Rows of a batch with prompts, or parts of them: asks the device once for lengths. None without a token."""
        columns, device = self._columns(given), given["cu_seq_lens_q"].device
        if columns is None:
            return None
        held, news, longest = columns.held, columns.new, max(columns.new)
        table = columns.table(self._numbers(given), max(columns.blocks)).to(torch.int32)
        past, new, start = torch.tensor([held, news, columns.first], dtype=torch.int32, device="cpu").to(device)
        index = start[:, None] + torch.arange(longest, dtype=torch.int32, device=device)
        index = torch.minimum(index, start[:, None] + new[:, None] - 1)
        counters = torch.stack([torch.zeros_like(past), past + new, past, past])
        lengths = list(zip(held, news, strict=True))
        steps = [i for i, (past_, new_) in enumerate(lengths) if past_ and new_ == 1]
        at = torch.tensor(steps, dtype=torch.int64, device="cpu").to(device) if steps else None
        tails = torch.arange(len(steps), dtype=torch.int32, device=device)
        return Rows(table, past, new, index, counters, lengths, at, tails)

    def _columns(self, given: dict[str, Any]) -> Columns | None:
        """See there; asks the device."""
        starts, starts_k = given["cu_seq_lens_q"].tolist(), given["cu_seq_lens_k"][self.layer_type].tolist()
        return Columns.of(starts, starts_k, self.blocks_for)

    def _numbers(self, given: dict[str, Any]) -> Tensor:
        """Answers of `get_read_indices` for all requests: the engine hands them on if any has tokens already."""
        read = given["read_index"][self.index]
        return read if read.numel() else given["write_index"][self.index]

    def _step(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows, arguments: AttentionArguments
    ) -> Tensor:
        """Attention of one token of each request, (R, Hq, 1, D), over its blocks and itself, which joins its tail."""
        tails = [tail[: query.shape[0]] for tail in self._tails]
        windows, (keys, values) = [*(tail[:, :, :0] for tail in tails), *tails], self._parts[layer]
        kernels.append(key, value, rows.counters, windows, self.forms[layer], rows.tails)
        return kernels.decode_attention(
            query, rows.counters, windows, [rows.table, *keys, *values], None, arguments.sinks, arguments.scaling,
            arguments.softcap, self.forms[layer],
        )  # fmt: skip

    def _batch(
        self,
        layer: int,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows,
        arguments: AttentionArguments,
    ) -> Tensor:
        """Attention of requests of which some have many new tokens, (1, n, Hq, D): each over its own, dequantized."""
        out = query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
        if rows.steps is not None:
            at = rows.columns[rows.steps, 0].long()
            own = rows._replace(table=rows.table[rows.steps], counters=rows.counters[:, rows.steps])
            q, k, v = (x[:, :, at].transpose(0, 2) for x in (query, key, value))
            out[0, at] = self._step(layer, q, k, v, own, arguments)[:, :, 0]
        assert rows.lengths is not None
        start = 0
        for row, (past, count) in enumerate(rows.lengths):
            own = slice(start, start + count)
            start += count
            if past and count == 1:
                continue
            sides = [x[:, :, own] for x in (key, value)]
            if past:
                sides = [torch.cat([self._dense(layer, at, rows.table[row], past), x], 2) for at, x in enumerate(sides)]
            out[:, own] = prompt_attention(module, query[:, :, own], sides[0], sides[1], arguments)
        return out

    def _dense(self, layer: int, at: int, table: Tensor, tokens: int) -> Tensor:
        """Tokens in a request's blocks, (1, H, tokens, D)."""
        side, form = SIDES[at], self.forms[layer]
        fmt = form.runs[0][at]
        ids = table[: -(-tokens // self.tokens_per_page)].long()
        parts = [as_bytes(part)[ids].view(part.dtype) for part in self._parts[layer][at]]
        dense = kernels.dequantize_pages(parts, fmt, side, self.head_dim).float()
        dense = dense.transpose(0, 1).flatten(1, 2)[None, :, :tokens]
        rotation = form.rotate_values if at else form.rotate_keys
        return saturated(hadamard(dense, rotation), self.cache_dtype)


def arguments_of(scaling: float, given: dict[str, Any]) -> AttentionArguments:
    """Arguments of the engine's attention call, as kernels take them."""
    return AttentionArguments(scaling, softcap=given.get("softcap") or 0.0, sinks=given.get("s_aux"))


def prompt_attention(module: Any, query: Tensor, keys: Tensor, values: Tensor, arguments: AttentionArguments) -> Tensor:
    """Causal attention of a request's newest tokens.

    PyTorch's first choice is cuDNN, which plans anew for every shape and stride: some 45 ms on an H200, as long as all
    of a prompt of 1,000 tokens takes. So cuDNN is kept for long first prompts, which are padded, so that there are few
    shapes.

    Args:
        query: (1, Hq, Q, D), of the newest Q tokens, after RoPE.
        keys: (1, H, T, D), of all.
        arguments: of the call, without a mask.

    Returns:
        (1, Q, Hq, D).
    """
    tokens = query.shape[2]
    if arguments.softcap or arguments.sinks is not None or not flash_takes(query, keys, values):
        return dense_attention(module, query, keys, values, arguments)[0]
    asked = SDPAParams(query, keys, values, None, 0.0, True, True)
    if LONG <= tokens == keys.shape[2] and can_use_cudnn_attention(asked):
        q, k, v = (_padded(x, -(-tokens // STEP) * STEP) for x in (query, keys, values))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=arguments.scaling, enable_gqa=True)
    else:
        with WITHOUT_CUDNN:
            out = lower_right(query, keys, values, arguments.scaling)
    return out[:, :, :tokens].transpose(1, 2)


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With zeros behind it, which no token before them attends to; its strides depend on ``tokens`` alone."""
    found = x.new_empty((1, tokens, x.shape[1], x.shape[3]))
    found[:, : x.shape[2]] = x.transpose(1, 2)
    found[:, x.shape[2] :] = 0
    return found.transpose(1, 2)
