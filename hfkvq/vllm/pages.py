"""Pages of one layer in bytes that an engine owns: steps, prompts, and chunks behind them, over its block tables.

Tokens are quantized one by one, so a page depends on nothing but its own tokens: requests share it, and a page that is
not full needs nothing beside it. As in a cache of `generate`, a token is attended to before it is quantized, in its
step or its chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfkvq import kernels
from hfkvq.caches import Scheme
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.pages import SIDES, StoreFormat
from hfkvq.kernels.step.ops import branches

PAGE = 128
"""Tokens of a page, and of the engine's blocks."""

TAIL = 16
"""Slots of a row's tail, as kernels want them: one holds the token of a step."""

TOGETHER = 32768
"""Tokens of keys that are dequantized at a time, unless one request has more."""


def refusal(scheme: Scheme, head_dim: int) -> str | None:
    """Why an engine's blocks cannot be pages of a scheme, if they cannot."""
    if scheme.evicts:
        return "it forgets tokens, and the engine's blocks belong to tokens"
    if scheme.quantizes_first:
        return "it wants prompts to attend to what is stored (quantize_first), and here they attend to themselves whole"
    if scheme.needs - {"query"}:
        return f"it asks for more than keys and queries of a page ({', '.join(sorted(scheme.needs))})"
    layout = scheme.layout(head_dim, head_dim)
    formats = [fmt for side in (layout.keys, layout.values) for fmt in side.formats]
    if layout.latent or layout.window or len(formats) > 2:
        return "its tokens have several widths, or it is for latents"
    if any(fmt.page_size != PAGE for fmt in formats):
        return f"its pages hold other than {PAGE} tokens"
    if any(fmt.bits >= 8 or fmt.raised_count(16) for fmt in formats):
        return "its pages have more than 4 bits a channel"
    captured = scheme.limits(head_dim, head_dim).captured
    return None if captured is None else f"steps run without the host here, and {captured}"


def has_windows(scheme: Scheme, head_dim: int) -> bool:
    """True if tokens of a scheme wait in 16 bits, or its pages are sealed whole."""
    layout = scheme.layout(head_dim, head_dim)
    sides = (layout.keys, layout.values)
    return bool(layout.sink) or any(side.local or side.unit > 1 or side.formats[0].whole for side in sides)


def bytes_of_page(form: StoreFormat, heads: int, head_dim: int) -> int:
    """Bytes of a page of keys and values, every scale counted."""
    return sum(size for _, _, size in _tensors(form, heads, head_dim))


def _tensors(form: StoreFormat, heads: int, head_dim: int) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
    """Shape, dtype and bytes of each tensor of a page: of keys, then of values."""
    found = []
    for fmt, side in zip(form.runs[0], SIDES, strict=True):
        for shape, own in fmt.shapes(side, heads, head_dim).values():
            kind = own or torch.bfloat16
            found.append((shape, kind, torch.Size(shape).numel() * kind.itemsize))
    return found


class Steps(NamedTuple):
    """Rows of one token each, the same in all layers.

    Attributes:
        table: i32 (R, N), blocks of each request.
        past: i32 (R,), tokens that its blocks hold.
        new: i32 (R,), 1, and 0 of rows that pad the batch.
        columns: i32 (R, 1), place of each token in its row's tail.
        counters: i32 (4, R), as `kernels.decode_attention` wants them.
        tails: i32 (R,), the tail of each row.
    """

    table: Tensor
    past: Tensor
    new: Tensor
    columns: Tensor
    counters: Tensor
    tails: Tensor

    @classmethod
    def of(cls, table: Tensor, lengths: Tensor) -> Steps:
        """From the tokens of each request, i32 (R,), the one that comes included; a graph can hold it."""
        past, new = (lengths - 1).clamp(min=0), lengths.clamp(max=1)
        counters = torch.stack([torch.zeros_like(past), past + 1, past, past])
        tails = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return cls(table, past, new, (past % TAIL)[:, None], counters, tails)


class Call(NamedTuple):
    """Requests whose new tokens attend in one call.

    Attributes:
        rows: of the requests.
        tokens: columns of their new tokens.
        starts_q: i32 (n + 1,), where the new tokens of each begin.
        starts_k: i32 (n + 1,), where all of them do.
        longest_q: new tokens of a request, at most.
        longest_k: all of them.
        all_tokens: of all requests; 0 where none has any before the new ones.
    """

    rows: range
    tokens: slice
    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    all_tokens: int


class Prompts(NamedTuple):
    """Rows of prompts, or of chunks of them, the same in all layers.

    Attributes:
        table: i32 (R, N), blocks of each request.
        past: i32 (R,), tokens that its blocks hold.
        new: i32 (R,), tokens that come.
        columns: i32 (R, n), where they stand among the tokens of all; n is a multiple of a page.
        counters: i32 (R, 4, 1), as `kernels.gather_rows` wants those of each request, without the new tokens.
        held: ``past`` as the host knows it.
        counts: ``new``, likewise.
        calls: of attention.
    """

    table: Tensor
    past: Tensor
    new: Tensor
    columns: Tensor
    counters: Tensor
    held: list[int]
    counts: list[int]
    calls: list[Call]

    @classmethod
    def of(cls, table: Tensor, held: Sequence[int], counts: Sequence[int]) -> Prompts:
        """From what the host knows: tokens that each request has in blocks, and new ones, one request after another."""
        device = table.device
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        past, new, start = torch.tensor([held, counts, starts[:-1]], dtype=torch.int32, device="cpu").to(device)
        # Whole pages, so that few widths have variants of a kernel to be compiled.
        width = -(-max(counts) // PAGE) * PAGE
        index = start[:, None] + torch.arange(width, dtype=torch.int32, device=device)
        index = torch.minimum(index, (start + new - 1).clamp(min=0)[:, None])
        calls = [cls._call(rows, held, counts, starts, device) for rows in cls._together(held, counts)]
        counters = torch.stack([torch.zeros_like(past), past, past, past], 1)[:, :, None]
        return cls(table, past, new, index, counters, list(held), list(counts), calls)

    @staticmethod
    def _together(held: Sequence[int], counts: Sequence[int]) -> list[range]:
        """Requests in turn: as many as have nothing in blocks, or all of whose tokens are few."""
        found: list[range] = []
        first, size = 0, 0
        for row, (past, count) in enumerate(zip(held, counts, strict=True)):
            other = row > first and (bool(past) != bool(held[first]))
            if other or (past and row > first and size + past + count > TOGETHER):
                found.append(range(first, row))
                first, size = row, 0
            size += past + count
        return [*found, range(first, len(held))]

    @staticmethod
    def _call(rows: range, held: Sequence[int], counts: Sequence[int], starts: list[int], device: torch.device) -> Call:
        starts_q, starts_k = [0], [0]
        for row in rows:
            starts_q.append(starts_q[-1] + counts[row])
            starts_k.append(starts_k[-1] + counts[row] + held[row])
        some = any(held[row] for row in rows)
        both = torch.tensor([starts_q, starts_k], dtype=torch.int32, device="cpu").to(device)
        longest_q, longest_k = max(counts[row] for row in rows), max(counts[row] + held[row] for row in rows)
        tokens = slice(starts[rows.start], starts[rows.stop])
        return Call(rows, tokens, both[0], both[1], longest_q, longest_k, starts_k[-1] if some else 0)


Varlen = Callable[[Tensor, Tensor, Tensor, Call, float, Tensor], None]
"""Causal attention of queries (n, Hq, D) to keys and values (m, H, D) of several requests, into (n, Hq, D)."""


def sdpa(query: Tensor, keys: Tensor, values: Tensor, call: Call, scaling: float, out: Tensor) -> None:
    """`Varlen` by PyTorch, a request at a time; asks the device for lengths."""
    starts_q, starts_k = call.starts_q.tolist(), call.starts_k.tolist()
    for i in range(len(call.rows)):
        (q0, q1), (k0, k1) = starts_q[i : i + 2], starts_k[i : i + 2]
        if q0 == q1:
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], keys[k0:k1], values[k0:k1]))
        last = torch.arange(k1 - k0 - (q1 - q0), k1 - k0, device=q.device)[:, None]
        seen = torch.arange(k1 - k0, device=q.device) <= last
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
        out[q0:q1] = found[0].transpose(0, 1)


class LayerPages:
    """Pages of one layer.

    They lie in the engine's bytes as kernels read those of a cache of our own: each tensor of all pages in a row. The
    engine itself never looks into a block.

    Args:
        form: the layer's format.
        heads: KV heads.
        head_dim: their channels.
        data: u8, contiguous, for a whole number of pages.
        tails: keys and values (R, H, `TAIL`, D) of the newest token of each row of a step; layers may share them.
    """

    def __init__(
        self, form: StoreFormat, heads: int, head_dim: int, data: Tensor, tails: tuple[Tensor, Tensor]
    ) -> None:
        self.form, self.tails = form, tails
        tensors = _tensors(form, heads, head_dim)
        pages, at = data.numel() // sum(size for *_, size in tensors), 0
        parts, flat = [], data.view(-1)
        for shape, kind, size in tensors:
            parts.append(flat[at : at + pages * size].view(kind).view(pages, *shape))
            at += pages * size
        count = len(form.runs[0][0].names)
        self.parts = parts[:count], parts[count:]

    def store_steps(self, key: Tensor, value: Tensor, rows: Steps) -> None:
        """Stores one token of each request: in its row's tail, to which this step attends, and quantized in its block.

        Args:
            key: (R, H, D), after RoPE.
            value: (R, H, D).
            rows: of the batch.
        """
        tails = [tail[: key.shape[0]] for tail in self.tails]
        windows = [*(tail[:, :, :0] for tail in tails), *tails]
        kernels.append(key[:, :, None], value[:, :, None], rows.counters, windows, self.form, rows.tails)
        self._seal(rows.table, rows.past, rows.new, rows.columns, tails)

    def attend_steps(self, query: Tensor, rows: Steps, scaling: float) -> Tensor:
        """Attention (R, Hq, D) of one token of each request, (R, Hq, D), to its blocks, and to itself as it is."""
        tails, (keys, values) = [tail[: query.shape[0]] for tail in self.tails], self.parts
        windows, runs = [*(tail[:, :, :0] for tail in tails), *tails], [rows.table, *keys, *values]
        query = query[:, :, None]
        return kernels.decode_attention(query, rows.counters, windows, runs, None, None, scaling, 0.0, self.form)[
            :, :, 0
        ]

    def store_prompts(self, key: Tensor, value: Tensor, rows: Prompts) -> None:
        """Stores the new tokens (n, H, D) of requests, one after another, quantized in their blocks."""
        rotations = (key, self.form.rotate_keys), (value, self.form.rotate_values)
        count = len(rows.counts)
        sources = [hadamard(x, rotation).transpose(0, 1).expand(count, -1, -1, -1) for x, rotation in rotations]
        self._seal(rows.table, rows.past, rows.new, rows.columns, sources)

    def attend_prompts(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Prompts, scaling: float, attend: Varlen, out: Tensor
    ) -> None:
        """Attention of the new tokens of requests to what their blocks held, and to themselves as they are.

        Args:
            query: (n, Hq, D), after RoPE, of all requests one after another.
            key: (n, H, D), likewise.
            value: (n, H, D).
            rows: of the batch.
            scaling: of the logits.
            attend: causal attention.
            out: (n, Hq, D), written.
        """
        for call in rows.calls:
            own = call.tokens
            keys, values = key[own], value[own]
            if call.all_tokens:
                keys, values = (self._joined(at, x, rows, call) for at, x in enumerate((keys, values)))
            attend(query[own], keys, values, call, scaling, out[own])

    def _joined(self, at: int, x: Tensor, rows: Prompts, call: Call) -> Tensor:
        """Keys or values (m, H, D) of requests: what their blocks hold, then the new ones (n, H, D)."""
        found = x.new_empty((call.all_tokens, *x.shape[1:]))
        taken = filled = 0
        for row in call.rows:
            held, count = rows.held[row], rows.counts[row]
            if held:
                found[filled : filled + held] = self._held(at, rows, row)
            filled += held
            found[filled : filled + count] = x[taken : taken + count]
            filled, taken = filled + count, taken + count
        return found

    def _held(self, at: int, rows: Prompts, row: int) -> Tensor:
        """Keys or values (m, H, D) that a request has in blocks."""
        return self.dense(at, rows.table[row], rows.counters[row], rows.held[row])

    def dense(self, at: int, table: Tensor, counters: Tensor, tokens: int) -> Tensor:
        """Keys (``at`` 0) or values (1) in a request's blocks, (tokens, H, D), dequantized and rotated back."""
        keys, values = self.parts
        windows = [*(tail[:1, :, :0] for tail in self.tails), *(tail[:1] for tail in self.tails)]
        blocks = table[None, : -(-tokens // PAGE)].contiguous()
        runs = [blocks, *keys, *values]
        return kernels.gather_rows(counters, windows, runs, tokens, self.form, SIDES[at])[0].transpose(0, 1)

    def _seal(self, table: Tensor, past: Tensor, new: Tensor, columns: Tensor, sources: Sequence[Any]) -> None:
        def seal(at: int) -> None:
            fmt, side = self.form.runs[0][at], SIDES[at]
            kernels.seal_side(self.parts[at], table, past, new, sources[at], columns, fmt, side)

        self._side_by_side(table, seal)

    @staticmethod
    def _side_by_side(table: Tensor, seal: Callable[[int], None]) -> None:
        """Seals keys (0) and values (1), in a graph at the same time."""
        sides = [contextlib.nullcontext(), *map(torch.cuda.stream, branches(table, 1)), contextlib.nullcontext()]
        for at in (0, 1):
            with sides[at]:
                seal(at)
        if len(sides) > 2:
            torch.cuda.current_stream(table.device).wait_stream(sides[1].stream)
