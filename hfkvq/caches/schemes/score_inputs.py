"""Evidence by which schemes that evict judge tokens: its computation, and scores and ranks of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import ABSENT
from hfkvq.kernels.pages import Side

Kind = Literal["attention", "received", "queries", "keys", "values"]
"""Kinds of `Evidence`, by the name of its field."""

ELEMENTS = 1 << 24
"""Probabilities computed at a time: 64 MiB of f32."""

LEAST = 1e-10
"""Constant that ARKV's released code adds to a probability before the logarithm."""


@dataclass(frozen=True)
class Attention:
    """Attention that queries pay the tokens of their rows, as scores and statistics read it.

    N rows are of one KV head each, which has r query heads; n tokens are in order.

    Attributes:
        mean: f32 (N, r, n), as the next three are, over the real queries.
        squares: sum over them of ``(A - mean)^2``.
        fourths: of ``(A - mean)^4``.
        entropy: ``-Σ A log(A + 1e-10)`` over them.
        count: f32 (N,), real queries.
    """

    mean: Tensor
    squares: Tensor
    fourths: Tensor
    entropy: Tensor
    count: Tensor

    @classmethod
    def of(cls, logits: Tensor, sinks: Tensor | None, real: Tensor) -> Attention:
        """Attention of the real queries.

        Args:
            logits: f32 (N, r, Q, n), -inf where a query does not see a token; one that sees none pays nothing.
            sinks: f32 (N, r), logits that join the denominator only, or None.
            real: bool (N, Q), queries that count.
        """
        columns, x = logits.shape[3], logits
        if sinks is not None:
            x = torch.cat([x, sinks[:, :, None, None].expand(-1, -1, x.shape[2], 1)], -1)
        # Queries that see nothing: NaN.
        probs = torch.softmax(x, -1).nan_to_num(0.0)[..., :columns]
        weight = real[:, None, :, None].to(probs.dtype)
        mean = (probs * weight).sum(2) / weight.sum(2).clamp(min=1)
        entropy = -(probs * (probs + LEAST).log() * weight).sum(2)
        square = ((probs - mean[:, :, None]) * weight).square_()
        return cls(mean, square.sum(2), square.square_().sum(2), entropy, real.sum(1).float())

    @cached_property
    def variance(self) -> Tensor:
        """f32 (N, r, n), over the queries of each head, unbiased; that of a single query is 0."""
        return self.squares / (self.count - 1).clamp(min=1)[:, None, None]

    @property
    def joint_variance(self) -> Tensor:
        """f32 (N, n), over queries and query heads together, unbiased; that of a single one is 0."""
        heads, count = self.mean.shape[1], self.count[:, None]
        between = (self.mean - self.mean.mean(1, keepdim=True)).square().sum(1) * count
        return (self.squares.sum(1) + between) / (heads * count - 1).clamp(min=1)


class Candidates(NamedTuple):
    """Tokens to judge, of rows that are one KV head each (row ``b * H + h``), oldest first.

    Attributes:
        heads: H.
        position: integers (N, n), of each token in its row; `ABSENT` behind a row's end.
        start: i64 (N,), column of attention at which a row's position 0 stands.
        length: i64 (N,), tokens of each row; the newest are the queries' own.
        read: keys or values of some of the rows, (M, n, D), anything behind a row's end.
    """

    heads: int
    position: Tensor
    start: Tensor
    length: Tensor
    read: Callable[[Side, slice], Tensor]


def prompt_candidates(keys: Tensor, values: Tensor, lead: Tensor | None = None) -> Candidates:
    """The tokens of a prompt, (B, H, T, D) on both sides, before anything of it is stored.

    ``lead``: i64 (B,), padding before each row's first token; None for none.
    """
    batch, heads, tokens, _ = keys.shape
    start = torch.zeros(batch, dtype=torch.int64, device=keys.device) if lead is None else lead.long()
    start, rank = start.repeat_interleave(heads), torch.arange(tokens, device=keys.device)
    length = tokens - start

    def read(side: Side, own: slice) -> Tensor:
        x = (keys if side == "keys" else values).flatten(0, 1)[own]
        if lead is None:
            return x
        column = (rank + start[own, None]).clamp(max=tokens - 1)
        return x.gather(1, column[..., None].expand_as(x))

    return Candidates(heads, torch.where(rank < length[:, None], rank, ABSENT), start, length, read)


class Evidence:
    """Evidence of the n tokens of N rows, each of one KV head with r query heads; oldest tokens first.

    Nothing is computed before it is asked for.

    Attributes:
        length: i64 (N,), tokens of each row; entries behind them are arbitrary, but for zeros in probabilities.
        columns: n, at least the longest row's.
        scaling: factor on the logits of attention.
    """

    def __init__(
        self,
        candidates: Candidates,
        own: slice,
        kinds: Collection[Kind],
        newest: int,
        query: Tensor,
        real: Tensor,
        arguments: AttentionArguments,
    ) -> None:
        self._candidates, self._own, self._kinds, self._newest = candidates, own, kinds, newest
        self._query, self._real = query, real
        self.scaling, mask, self._softcap, sinks, *_ = arguments
        heads, position, *of_rows, _ = candidates
        self._position, self.columns = position[own], position.shape[1]
        self._start, self.length = (x[own] for x in of_rows)
        rows = torch.arange(own.start, own.stop, device=position.device)
        self._row, self._head = rows // heads, rows % heads
        self._mask = mask if mask is None or mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))
        # f32 (N, r).
        self._sinks = None if sinks is None else sinks.float().view(heads, -1)[self._head]

    def of(self, name: Kind) -> Tensor:
        """One of the properties that are called so; of "attention" its mean.

        Raises:
            ValueError: `EvictionScheme.evidence` does not name it.
        """
        if name not in self._kinds:
            raise ValueError(f"evidence: {name!r} is missing; the scheme's `evidence` must name it.")
        found = getattr(self, name)
        return found.mean if isinstance(found, Attention) else found

    @cached_property
    def rank(self) -> Tensor:
        """i64 (N, n): place of each token in its row, from 0."""
        return torch.arange(self.columns, device=self.length.device).expand(self.length.shape[0], -1)

    def past(self, window: int) -> Tensor:
        """Mask of tokens older than the newest ``window``: bool (N, n)."""
        return self.rank < (self.length - window)[:, None]

    @cached_property
    def keys(self) -> Tensor:
        """(N, n, D), with their positions in them, as the cache holds them or is given them."""
        return self._candidates.read("keys", self._own)

    @cached_property
    def values(self) -> Tensor:
        """(N, n, Dv), likewise."""
        return self._candidates.read("values", self._own)

    @property
    def queries(self) -> Tensor:
        """(N, r, Q, D), the newest, with their positions in them, in the basis of the keys."""
        return self._query[:, :, -self._newest :]

    @property
    def real(self) -> Tensor:
        """Mask of the newest queries that are no padding: bool (N, Q)."""
        return self._real[:, -self._newest :]

    @cached_property
    def attention(self) -> Attention:
        """Attention that the newest queries pay."""
        queries = self._query.shape[2]
        return self._paid(max(queries - self._newest, 0), queries, self.columns)

    @cached_property
    def received(self) -> Tensor:
        """Sum of the attention that all queries of a prompt pay, or those of a step: f32 (N, r, n)."""
        count, r, queries, _ = self._query.shape
        total = torch.zeros(count, r, self.columns, device=self._query.device, dtype=torch.float32)
        at_once = max(1, ELEMENTS // (count * r * self.columns))
        for first in range(0, queries, at_once):
            last = min(first + at_once, queries)
            # Later tokens are not seen yet, where no mask says otherwise.
            seen = self.columns - queries + last if self._mask is None else self.columns
            paid = self._paid(first, last, seen)
            total[..., :seen] += paid.mean * paid.count[:, None, None]
        return total

    def _paid(self, first: int, last: int, columns: int) -> Attention:
        """Attention of queries ``first`` to ``last`` to the first ``columns`` tokens; the others are not seen."""
        position, queries = self._position[:, :columns], self._query.shape[2]
        q = self._query[:, :, first:last].float()
        x = (q.flatten(1, 2) @ self.keys[:, :columns].float().mT).mul_(self.scaling).unflatten(1, q.shape[1:3])
        if self._softcap:
            x = torch.tanh(x / self._softcap) * self._softcap
        hidden = (position == ABSENT)[:, None, None]
        if self._mask is None:
            newest = self.length[:, None] + torch.arange(first - queries, last - queries, device=x.device)
            hidden = hidden | (position[:, None] > newest[..., None])[:, None]
        else:
            shown = self._shown(self._mask, position, first - queries, last - first)
            x, hidden = (x + shown, hidden) if shown.is_floating_point() else (x, hidden | ~shown.bool())
        return Attention.of(x.masked_fill_(hidden, -torch.inf), self._sinks, self._real[:, first:last])

    def _shown(self, mask: Tensor, position: Tensor, first: int, count: int) -> Tensor:
        """The mask of ``count`` queries, the first counted from the end, and of tokens: (N, r or 1, Q or 1, n)."""
        mask = mask if mask.shape[-2] == 1 else mask[..., first:, :][..., :count, :]
        row = self._row if mask.shape[0] > 1 else torch.zeros_like(self._row)
        mask = mask[row, self._head] if mask.dim() == 5 else mask[row]
        column = (position + self._start[:, None]).clamp(0, mask.shape[-1] - 1).long()
        return mask.gather(3, column[:, None, None].expand(-1, *mask.shape[1:3], -1))


def evidence_of(
    candidates: Candidates,
    kinds: Collection[Kind],
    newest: int,
    query: Tensor,
    arguments: AttentionArguments,
    real: Tensor | None = None,
) -> Iterator[tuple[slice, Evidence]]:
    """Evidence of tokens, some rows at a time, and which rows.

    Args:
        kinds: `EvictionScheme.evidence`.
        newest: `EvictionScheme.queries`.
        query: (B, Hq, Q, D), the newest queries or, for "received", all that have come; of no rows where none is asked.
        arguments: of the attention call, whose mask is of the columns up to the newest.
        real: bool (B, Q), queries that are no padding; None where padding stands before rows alone.
    """
    (rows, columns), (_, _, queries, dim) = candidates.position.shape, query.shape
    if real is None:
        # The newest query is of the newest token.
        real = candidates.length[:: candidates.heads, None] >= torch.arange(queries, 0, -1, device=query.device)
    query, real = query.unflatten(1, (candidates.heads, -1)).flatten(0, 1), real.repeat_interleave(candidates.heads, 0)
    # Probabilities of the newest queries, or keys.
    most = max(query.shape[1] * min(newest, queries), dim)
    at_once = max(1, ELEMENTS // (columns * most)) if kinds else rows
    for first in range(0, rows, at_once):
        own = slice(first, min(first + at_once, rows))
        yield own, Evidence(candidates, own, kinds, newest, query[own], real[own], arguments)


def keep_mask(scores: Tensor, length: Tensor, room: Tensor, first: int, newest: int) -> Tensor:
    """The tokens that stay of any rows of these lengths (i64 (N,)), ``room`` (i64 (N,)) of each: bool (N, n)."""
    rank = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    held = rank < length[:, None]
    always = (rank < first) | (rank >= (length - newest)[:, None])
    judged = scores.masked_fill(always, torch.inf).masked_fill(~held, -torch.inf)
    order = judged.argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(1, order, rank)
    return held & ((place < room[:, None]) | always)


WHOLE = 16
"""Width of a token in the model's own dtype; 0 is a token to evict."""


def token_scores(seen: Attention, past: Tensor, gamma: float, joint: bool = False) -> Tensor:
    """ARKV eq. (9): ``S_k = mean_{h,q} A + γ var A``, averaged over five neighbours.

    Neighbours are past tokens of past tokens (`Evidence.past`), and of the window those of the window: what lies on the
    other side, or beyond a row's ends, counts as 0. ``joint`` takes the variance over queries and query heads together,
    as the equation has it; else over the queries of each head, and then their mean, as the released code has it.
    """
    score = (seen.mean + gamma * (seen.joint_variance[:, None] if joint else seen.variance)).mean(1, keepdim=True)
    sides = torch.cat([score * past[:, None], score * ~past[:, None]], 1)
    mixed = torch.nn.functional.avg_pool1d(sides, 5, stride=1, padding=2)
    return torch.where(past, mixed[:, 0], mixed[:, 1])


def expected_attention(mean: Tensor, covariance: Tensor, evidence: Evidence, first: int) -> Tensor:
    """Expected Attention's: softmax over the keys of ``s μ·k + s² kᵀΣk / 2``, s the factor on logits.

    That is the logarithm of the mean of ``exp(s q·k)`` over normal queries q, of each query head: μ f32 (N, r, D), Σ
    f32 (N, r, D, D). The first tokens are left out, with 0.
    """
    keys, scale = evidence.of("keys").float(), evidence.scaling
    logits = (mean @ keys.mT) * scale + (keys[:, None] @ covariance * keys[:, None]).sum(-1) * (scale * scale / 2)
    judged = (evidence.rank >= first) & evidence.past(0)
    return torch.softmax(logits.masked_fill(~judged[:, None], -torch.inf), -1).nan_to_num(0.0)


def tier_widths(scores: Tensor, kept: Tensor, whole: Tensor, is_whole: Tensor, low_bits: int) -> Tensor:
    """ARKV eq. (10): of the tokens of highest score, the first ``whole`` stay whole, the rest of ``kept`` get few bits.

    Args:
        scores: f32 (N, n), -inf where there is no token to judge. Of equal scores the earlier token comes first.
        kept: i64 (N,), b; ``whole`` is B_o.
        is_whole: bool (N, n), tokens that are whole so far; only they can be whole hereafter.

    Returns:
        u8 (N, n): 16, ``low_bits`` or 0.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    stays = (rank < kept[:, None]) & (scores > -torch.inf)
    best = (stays & is_whole).gather(1, order)
    first = torch.zeros_like(best).scatter_(1, order, best & (best.cumsum(1) <= whole[:, None]))
    return torch.where(first, WHOLE, torch.where(stays, low_bits, 0)).to(torch.uint8)
