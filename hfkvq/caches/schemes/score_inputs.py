"""Evidence by which schemes that evict judge tokens: its computation from a prompt, and scores and ranks of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments

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


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence of the n tokens of N rows, each of one KV head with r query heads; oldest tokens first.

    Fields that the scheme has not asked for are missing.

    Attributes:
        length: i64 (N,), tokens of each row; entries behind them are arbitrary, but for zeros in probabilities.
        columns: n, at least the longest row's.
        scaling: factor on the logits of attention.
        attention: what the newest queries pay.
        received: f32 (N, r, n), sum of what all queries of a prompt pay, or those of a step.
        queries: (N, r, Q, D), the newest, with their positions in them, in the model's dtype.
        real: bool (N, Q), those of them that are no padding; comes with them.
        keys: (N, n, D), with their positions in them, as the cache holds them or is given them.
        values: (N, n, Dv), likewise.
    """

    length: Tensor
    columns: int
    scaling: float
    attention: Attention | None = None
    received: Tensor | None = None
    queries: Tensor | None = None
    real: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    @cached_property
    def rank(self) -> Tensor:
        """i64 (N, n): place of each token in its row, from 0."""
        return torch.arange(self.columns, device=self.length.device).expand(self.length.shape[0], -1)

    def past(self, window: int) -> Tensor:
        """Mask of tokens older than the newest ``window``: bool (N, n)."""
        return self.rank < (self.length - window)[:, None]

    def of(self, name: str) -> Tensor:
        """A field that was asked for; of "attention" its mean.

        Raises:
            ValueError: it is missing, since `EvictionScheme.evidence` does not name it.
        """
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"evidence: {name!r} is missing; the scheme's `evidence` must name it.")
        return found.mean if isinstance(found, Attention) else found


def keep_columns(scores: Tensor, room: int, first: int, newest: int) -> Tensor:
    """The tokens that stay of rows that are alike, by scores f32 (N, n): i64 (N, room), in order.

    ``room`` is at least the ``first`` and ``newest`` tokens, which always stay, and at most n.
    """
    columns = scores.shape[1]
    rank = torch.arange(columns, device=scores.device)
    always = (rank < first) | (rank >= columns - newest)
    order = scores.masked_fill(always, torch.inf).argsort(dim=1, descending=True, stable=True)
    return order[:, :room].sort(dim=1).values


def keep_mask(scores: Tensor, length: Tensor, room: Tensor, first: int, newest: int) -> Tensor:
    """The tokens that stay of any rows of these lengths (i64 (N,)), ``room`` (i64 (N,)) of each: bool (N, n)."""
    rank = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    held = rank < length[:, None]
    always = (rank < first) | (rank >= (length - newest)[:, None])
    judged = scores.masked_fill(always, torch.inf).masked_fill(~held, -torch.inf)
    order = judged.argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(1, order, rank)
    return held & ((place < room[:, None]) | always)


def prompt_evidence(
    kinds: Collection[Kind],
    newest: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    arguments: AttentionArguments,
    lead: Tensor | None = None,
) -> Iterator[tuple[slice, Evidence]]:
    """Evidence of a first prompt, before anything of it is stored; nothing is asked of the device.

    Args:
        kinds: `EvictionScheme.evidence`.
        newest: `EvictionScheme.queries`.
        query: (B, Hq, Q, D), the newest queries or, for "received", those of all T tokens.
        keys: (B, H, T, D), not rotated.
        arguments: of the attention call, whose mask is of all T tokens.
        lead: i64 (B,), padding before each row's first token; None for none.

    Yields:
        Folded rows, ``b * H + h``, a few at a time; their evidence, whose tokens are columns ``lead`` and up.
    """
    batch, heads, tokens, _ = keys.shape
    queries, r = query.shape[2], query.shape[1] // heads
    last = queries - min(newest, queries)
    start = torch.zeros(batch, dtype=torch.int64, device=keys.device) if lead is None else lead.long()
    # A row of keys at a time where all queries are asked.
    width = queries if "received" in kinds else max(queries - last, keys.shape[3])
    at_once = max(1, ELEMENTS // (r * tokens * width))
    for first in range(0, batch * heads, at_once):
        own = slice(first, min(first + at_once, batch * heads))
        part = _Prompt(query, keys, arguments, start, lead is not None, own)
        yield (
            own,
            Evidence(
                length=tokens - part.lead,
                columns=tokens,
                scaling=arguments.scaling,
                attention=part.attention(last) if "attention" in kinds else None,
                received=part.received() if "received" in kinds else None,
                queries=part.query[:, :, last:] if "queries" in kinds else None,
                real=part.real(last, queries) if "queries" in kinds else None,
                keys=part.keys if "keys" in kinds else None,
                values=part.in_order(values.flatten(0, 1)[own]) if "values" in kinds else None,
            ),
        )


class _Prompt:
    """A few folded rows of a first prompt; arguments as those of `prompt_evidence`."""

    def __init__(
        self,
        query: Tensor,
        keys: Tensor,
        arguments: AttentionArguments,
        lead: Tensor,
        padded: bool,
        own: slice,
    ) -> None:
        heads, self.tokens = keys.shape[1:3]
        self.scaling, mask, self.softcap, sinks, *_ = arguments
        self.padded = padded
        self.query = query.unflatten(1, (heads, -1)).flatten(0, 1)[own]
        rows = torch.arange(own.start, own.stop, device=keys.device)
        self.row, self.head = rows // heads, rows % heads
        self.lead = lead[self.row]
        # Behind a row's end, its last token again.
        column = torch.arange(self.tokens, device=keys.device) + self.lead[:, None]
        self.column = column.clamp(max=self.tokens - 1)
        self.keys = self.in_order(keys.flatten(0, 1)[own])
        self.mask = mask if mask is None or mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))
        self.sinks = None if sinks is None else sinks.float().view(heads, -1)[self.head]

    def in_order(self, x: Tensor) -> Tensor:
        """Columns (N, T, D) as tokens, each row's first at 0."""
        return x.gather(1, self.column[..., None].expand_as(x)) if self.padded else x

    def real(self, first: int, last: int) -> Tensor:
        """Mask of the queries ``first`` to ``last`` that are no padding: bool (N, Q)."""
        offset = self.tokens - self.query.shape[2]
        return torch.arange(first + offset, last + offset, device=self.lead.device) >= self.lead[:, None]

    def logits(self, first: int, last: int, columns: int) -> Tensor:
        """Logits of queries ``first`` to ``last`` and the first ``columns`` tokens: f32 (N, r, Q, n)."""
        x = self.query[:, :, first:last].float()
        x = (x.flatten(1, 2) @ self.keys[:, :columns].float().mT).mul_(self.scaling)
        x = x.unflatten(1, (self.query.shape[1], last - first))
        if self.softcap:
            x = torch.tanh(x / self.softcap) * self.softcap
        rank, offset = torch.arange(columns, device=x.device), self.tokens - self.query.shape[2]
        if self.mask is None:
            newest = torch.arange(first + offset, last + offset, device=x.device) - self.lead[:, None]
            return x.masked_fill_((rank > newest[..., None])[:, None], -torch.inf)
        shown = self._shown(first - self.query.shape[2], last - first, columns)
        x = x + shown if shown.is_floating_point() else x.masked_fill_(~shown.bool(), -torch.inf)
        return x.masked_fill_((rank >= self.tokens - self.lead[:, None])[:, None, None], -torch.inf)

    def _shown(self, first: int, count: int, columns: int) -> Tensor:
        """The mask of ``count`` queries, the first counted from the end: (N or 1, r or 1, Q or 1, n)."""
        assert self.mask is not None, "somebody asked"
        mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., first:, :][..., :count, :]
        row = self.row if mask.shape[0] > 1 else torch.zeros_like(self.row)
        if mask.dim() == 5:
            mask = mask[row, self.head]
        elif self.mask.shape[0] > 1 or self.padded:
            mask = mask[row]
        if not self.padded:
            return mask[..., :columns]
        return mask.gather(3, self.column[:, None, None, :columns].expand(*mask.shape[:3], -1))

    def attention(self, first: int) -> Attention:
        """Attention of the queries from ``first`` on."""
        last = self.query.shape[2]
        return Attention.of(self.logits(first, last, self.tokens), self.sinks, self.real(first, last))

    def received(self) -> Tensor:
        """Sum over all queries, a few at a time: f32 (N, r, n)."""
        count, r, queries, _ = self.query.shape
        total = torch.zeros(count, r, self.tokens, device=self.query.device, dtype=torch.float32)
        at_once = max(1, ELEMENTS // (count * r * self.tokens))
        for first in range(0, queries, at_once):
            last = min(first + at_once, queries)
            # Later tokens are not seen yet, where no mask says otherwise.
            columns = self.tokens - queries + last if self.mask is None else self.tokens
            paid = Attention.of(self.logits(first, last, columns), self.sinks, self.real(first, last))
            total[..., :columns] += paid.mean * paid.count[:, None, None]
        return total


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


def window_scores(evidence: Evidence, window: int, kernel: int) -> Tensor:
    """SnapKV's: what the newest queries pay each token older than the window, averaged over queries, heads, neighbours.

    Neighbours are ``kernel`` tokens, the token itself included. Beyond the ends of what is older than the window scores
    count as 0, and there they are 0.
    """
    past = evidence.past(window)
    paid = evidence.of("attention").mean(1, keepdim=True) * past[:, None]
    return torch.nn.functional.avg_pool1d(paid, kernel, stride=1, padding=kernel // 2)[:, 0] * past


def expected_attention(mean: Tensor, covariance: Tensor, evidence: Evidence, first: int) -> Tensor:
    """Expected Attention's: softmax over the keys of ``s μ·k + s² kᵀΣk / 2``, s the factor on logits.

    That is the logarithm of the mean of ``exp(s q·k)`` over normal queries q, of each query head: μ f32 (N, r, D), Σ
    f32 (N, r, D, D). The first tokens are left out, with 0.
    """
    keys, scale = evidence.of("keys").float(), evidence.scaling
    logits = (mean @ keys.mT) * scale + (keys[:, None] @ covariance * keys[:, None]).sum(-1) * (scale * scale / 2)
    judged = (evidence.rank >= first) & evidence.past(0)
    return torch.softmax(logits.masked_fill(~judged[:, None], -torch.inf), -1).nan_to_num(0.0)


def code_statistics(seen: Attention, past: Tensor) -> Tensor:
    """Statistics of ARKV's released code: ``-Σ A log(A + 1e-10)``, ``Σ var_q A`` and ``Σ m4 / max(m2, 1e-8)²``.

    Sums over a KV head's query heads, queries and past keys (`Evidence.past`), to be summed over KV heads: f32 (N, 3).
    """
    count = seen.count.clamp(min=1)[:, None, None]
    kurtosis = (seen.fourths / count) / (seen.squares / count).clamp(min=1e-8).square()
    each = torch.stack([seen.entropy, seen.variance, kurtosis], 1)
    return (each * past[:, None, None]).sum((2, 3))


def paper_statistics(seen: Attention, past: Tensor) -> Tensor:
    """ARKV eqs. (3) to (5): entropy, variance and kurtosis of ``p_k = Σ_{h,q} A / Z`` over the past keys.

    To be averaged over KV heads: f32 (N, 3).
    """
    # Sums over queries; Z takes their number out again.
    p = seen.mean.sum(1) * seen.count[:, None] * past
    p = p / p.sum(1, keepdim=True).clamp(min=1e-30)
    keys = past.sum(1, keepdim=True).clamp(min=1)
    centred = (p - p.sum(1, keepdim=True) / keys) * past
    second, fourth = (centred.pow(n).sum(1) / keys[:, 0] for n in (2, 4))
    # Flat attention: 0 / 0.
    kurtosis = torch.where(second > 0, fourth / second.square().clamp(min=1e-38), 0.0)
    return torch.stack([-torch.special.xlogy(p, p).sum(1), second, kurtosis], 1)


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
