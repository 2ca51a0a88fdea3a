"""Pages of one layer in bytes that an engine owns: steps, prompts, and chunks behind them, over its block tables.

Tokens are quantized one by one, so a page depends on nothing but its own tokens: requests share it, and a page that is
not full needs nothing beside it. As in a cache of `generate`, a token is attended to before it is quantized, in its
step or its chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfkvq import kernels
from hfkvq.caches import Scheme
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.norms import BALANCE, Balance
from hfkvq.kernels.pages import SIDES, StoreFormat

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
        lengths: i32 (R,), tokens of each, the new one included; 0 of rows that pad the batch.
        counters: i32 (4, R), as `kernels.decode_attention` wants them.
    """

    table: Tensor
    lengths: Tensor
    counters: Tensor

    @staticmethod
    def bounds(device: torch.device) -> Tensor:
        """Numbers that are added to lengths to have counters, and the least counters: i32 (2, 4, 1)."""
        numbers = [[-(2**30), 0, -1, -1], [0, 1, 0, 0]]
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")[:, :, None].to(device)


def sent(parts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Lists of numbers as i32 tensors of a device, which are sent together, and not waited for."""
    flat: list[int] = []
    begins = []
    for part in parts:
        begins.append(len(flat))
        # Kernels have variants for addresses that are multiples of 16 bytes.
        flat += [*part, *[0] * (-len(part) % 4)]
    host = torch.tensor(flat, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    data = host.to(device, non_blocking=True)
    return [data[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)]


class Call(NamedTuple):
    """Requests whose new tokens attend in one call.

    Attributes:
        rows: of the requests.
        tokens: columns of their new tokens.
        starts_q: i32 (n + 1,), where the new tokens of each begin.
        starts_k: i32 (n + 1,), where all of them do.
        units: i32 (2, U), blocks of the requests, as `kernels.gather_requests` wants them.
        longest_q: new tokens of a request, at most.
        longest_k: all of them.
        all_tokens: of all requests; 0 where none has any before the new ones.
    """

    rows: range
    tokens: slice
    starts_q: Tensor
    starts_k: Tensor
    units: Tensor
    longest_q: int
    longest_k: int
    all_tokens: int


class Writes(NamedTuple):
    """New tokens by the blocks that they are stored in, as `kernels.seal_side` wants them.

    Attributes:
        table: i32 (P, 1), the blocks.
        past: i32 (P,), tokens of a block that are there already.
        new: i32 (P,), tokens that come.
        columns: i32 (P, `PAGE`), where they stand among the tokens of all requests.
    """

    table: Tensor
    past: Tensor
    new: Tensor
    columns: Tensor

    @classmethod
    def of(cls, table: Tensor, place: Tensor, past: Tensor, new: Tensor, first: Tensor) -> Writes:
        """From places in the flat table, and each block's first new token, i32 (P,) all."""
        page = torch.arange(PAGE, dtype=torch.int32, device=table.device)
        return cls(table.reshape(-1).index_select(0, place)[:, None], past, new, first[:, None] + page)


class Prompts(NamedTuple):
    """Rows of prompts, or of chunks of them, the same in all layers.

    Attributes:
        table: i32 (R, N), blocks of each request.
        requests: i32 (4, R), as `kernels.gather_requests` wants them, each within its call.
        held: tokens that the blocks of each request hold.
        counts: tokens that come.
        starts: where the new tokens of each begin, and the end.
        calls: of attention.
        writes: all new tokens, or whole blocks of them.
    """

    table: Tensor
    requests: Tensor
    held: list[int]
    counts: list[int]
    starts: list[int]
    calls: list[Call]
    writes: Writes

    @classmethod
    def of(cls, table: Tensor, held: Sequence[int], counts: Sequence[int], whole: bool = False) -> Prompts:
        """From what the host knows; sends it to the device once, and asks for nothing.

        Args:
            table: i32 (R, N).
            held: tokens that each request has in blocks.
            counts: new ones, one request after another.
            whole: whether only blocks that are full of new tokens are written.
        """
        starts = [0, *accumulate(counts)]
        totals = [past + count for past, count in zip(held, counts, strict=True)]
        groups, begins, parts = cls._together(held, totals), [], []
        for rows in groups:
            begin = [0, *accumulate(totals[row] for row in rows)]
            begins += begin[:-1]
            some = any(held[row] for row in rows)
            units = [(row, i) for row in rows for i in range(-(-totals[row] // PAGE))] if some else []
            query = [starts[row] - starts[rows.start] for row in (*rows, rows.stop)]
            parts += [query, begin, [row for row, _ in units] + [i for _, i in units]]
        written = cls._written(table.shape[1], held, totals, starts, whole)
        data = sent([[*begins, *held, *totals, *starts[:-1]], *written, *parts], table.device)
        calls = []
        for i, rows in enumerate(groups):
            query, key, units = data[5 + 3 * i : 8 + 3 * i]
            longest = max(counts[row] for row in rows), max(totals[row] for row in rows)
            tokens, size = slice(starts[rows.start], starts[rows.stop]), sum(totals[row] for row in rows)
            calls.append(Call(rows, tokens, query, key, units.view(2, -1), *longest, size if len(units) else 0))
        own = Writes.of(table, *data[1:5])
        return cls(table, data[0].view(4, -1), list(held), list(counts), starts, calls, own)

    @staticmethod
    def _together(held: Sequence[int], totals: Sequence[int]) -> list[range]:
        """Requests in turn: as many as have nothing in blocks, or all of whose tokens are few."""
        found: list[range] = []
        first, size, some = 0, 0, False
        for row, (past, total) in enumerate(zip(held, totals, strict=True)):
            if row > first and (some or past) and size + total > TOGETHER:
                found.append(range(first, row))
                first, size, some = row, 0, False
            size, some = size + total, some or past > 0
        return [*found, range(first, len(held))]

    @staticmethod
    def _written(
        width: int, held: Sequence[int], totals: Sequence[int], starts: Sequence[int], whole: bool
    ) -> list[list[int]]:
        """Place in the flat table of each block that is written, tokens there, tokens that come, and their first."""
        found: list[list[int]] = [[], [], [], []]
        for row, (past, total) in enumerate(zip(held, totals, strict=True)):
            first, last = (-(-past // PAGE), total // PAGE) if whole else (past // PAGE, -(-total // PAGE))
            for i in range(first, last):
                begin = max(i * PAGE, past)
                own = row * width + i, begin - i * PAGE, min(total, (i + 1) * PAGE) - begin, starts[row] + begin - past
                for numbers, number in zip(found, own, strict=True):
                    numbers.append(number)
        return found


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

    rule = ""
    balance: Sequence[Balance] = (BALANCE, BALANCE)

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
        new = key[:, :, None], value[:, :, None], rows.lengths
        kernels.take_token(*new, self.tails, self.parts, rows.table, self.form)

    def attend_steps(self, query: Tensor, rows: Steps, scaling: float, out: Tensor) -> None:
        """Attention of one token of each request to its blocks, and to itself as it is: (R, Hq, D), into (R, Hq, D)."""
        tails, (keys, values) = [tail[: query.shape[0]] for tail in self.tails], self.parts
        windows, runs = [*(tail[:, :, :0] for tail in tails), *tails], [rows.table, *keys, *values]
        # Queries were there before tokens were stored.
        kernels.decode_attention(
            query[:, :, None], rows.counters, windows, runs, None, None, scaling, 0.0, self.form, True,
            out=out[:, :, None],
        )  # fmt: skip

    def store_prompts(self, key: Tensor, value: Tensor, rows: Prompts) -> None:
        """Stores the new tokens (n, H, D) of requests, one after another, quantized in their blocks."""
        count = len(rows.writes.new)
        sources = [x.transpose(0, 1).expand(count, -1, -1, -1) for x in self._rotated(key, value)]
        self._seal(rows.writes, sources)

    def _rotated(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Keys and values (n, H, D) in the basis of the store."""
        return [hadamard(key, self.form.rotate_keys), hadamard(value, self.form.rotate_values)]

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
                # Held tokens, dequantized, then the new ones.
                run = [rows.table, *self.parts[0], *self.parts[1]]
                given = call.units, rows.requests, run, self._held(), call.all_tokens, self.form
                keys, values = kernels.gather_requests(key, value, *given)
            attend(query[own], keys, values, call, scaling, out[own])

    def _held(self) -> Sequence[Tensor]:
        """Windows of the requests of a batch, as `kernels.gather_requests` wants them."""
        return ()

    def _seal(self, writes: Writes, sources: Sequence[Tensor], weight: Tensor | None = None) -> None:
        """Seals tokens (P, H, L, D) of both sides; ``weight``: f32 (P, H, D), by which channels of keys are raised."""
        table, past, new, columns = writes
        for at, parts in enumerate(self.parts):
            rest = self.form.runs[0][at], SIDES[at], self.rule, (weight, None)[at], self.balance[at]
            kernels.seal_side(parts, table, past, new, sources[at], columns, *rest)
