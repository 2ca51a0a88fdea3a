"""Attention over what a store holds or is about to hold, for schemes that rank tokens by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import ABSENT, LENGTH, START, run_count

from .headwise import HeadwiseStore
from .ranking import Attention

ELEMENTS = 1 << 24
"""Probabilities computed at a time: 64 MiB of f32."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The newest queries of an attention call, and what the call was given with them.

    Attributes:
        query: (B, Hq, Q, D), after RoPE, not scaled; their keys are in the store by the time it is looked at.
        real: bool (B, Q), queries that are no padding.
        arguments: of the call, as `kernels.decode_attention` takes them.
        prompt: bool (B,), rows for which the input was a prompt, by which layers are compared; None if for none.
    """

    query: Tensor
    real: Tensor
    arguments: AttentionArguments
    prompt: Tensor | None


def token_order(store: HeadwiseStore, where: Tensor) -> Tensor:
    """Columns of each row's tokens, oldest first: i64 (B*H, n), n the longest row; anything behind a row's end.

    ``where`` is what `positions` says.
    """
    last = torch.iinfo(torch.int32).max
    return torch.where(where > ABSENT, where, last).argsort(1)[:, : store.longest]


def stored_attention(
    store: HeadwiseStore, seen: Observation, where: Tensor, order: Tensor
) -> Iterator[tuple[slice, Attention]]:
    """What the queries pay the tokens of their rows, a few folded rows at a time.

    Args:
        store: what the layer holds, the queries' own tokens included.
        seen: the queries.
        where: see `positions`.
        order: see `token_order`.

    Yields:
        The rows; what is paid them, 0 by a query that does not see a token.
    """
    query = store.folded(seen.query)
    mask = store.folded_mask(seen.arguments.mask, seen.query.shape[1])
    real = seen.real.repeat_interleave(store.fold, 0)
    rows, share, queries, _ = query.shape
    sinks = _folded_sinks(store, seen)
    at_once = max(1, ELEMENTS // (share * queries * where.shape[1]))
    for first in range(0, rows, at_once):
        own = slice(first, first + at_once)
        count = order[own].shape[0]
        q = (
            kernels.hadamard(query[own].float(), store.format.rotate_keys)
            .mul(seen.arguments.scaling)
            .flatten(1, 2)[:, None]
        )
        logits = [q @ store.windows[0][own].float().transpose(-1, -2)]
        for i, (view, (fmt, _)) in enumerate(zip(store.runs, store.format.runs, strict=True)):
            sealed = run_count(store.counters, i, "keys")[own].contiguous()
            logits.append(kernels.qk_pages(q, view.table[own].contiguous(), sealed, view.keys, fmt))
        logits.append(q @ store.windows[2][own].float().transpose(-1, -2))
        x = torch.cat(logits, -1).view(count, share, queries, -1)
        x = x.gather(-1, order[own][:, None, None].expand(-1, share, queries, -1))
        if seen.arguments.softcap:
            x = torch.tanh(x / seen.arguments.softcap) * seen.arguments.softcap
        place = where[own].gather(1, order[own])
        visible = (place > ABSENT)[:, None, None]
        if mask is None:
            newest = store.counters[LENGTH, own, None] - queries + torch.arange(queries, device=q.device)
            visible = visible & (place[:, None] <= newest[..., None])[:, None]
        else:
            column = (place + store.counters[START, own, None]).clamp(0, mask.shape[-1] - 1).long()
            shown = (mask if mask.shape[0] == 1 else mask[own]).expand(count, -1, -1, -1)
            shown = shown.gather(-1, column[:, None, None].expand(-1, *shown.shape[1:3], -1))
            if mask.is_floating_point():
                x = x + shown
            else:
                visible = visible & shown.bool()
        x = x.masked_fill(~visible, -torch.inf)
        yield own, Attention.of(x, None if sinks is None else sinks[own], real[own])


def prompt_attention(keys: Tensor, store: HeadwiseStore, seen: Observation) -> Iterator[tuple[slice, Attention]]:
    """The same of a first prompt without padding, before anything of it is stored.

    Args:
        keys: (B*H, 1, T, D) in the basis of the store; all that the queries see.
        store: whose rows these are.
        seen: the newest queries.

    Yields:
        See `probabilities`.
    """
    query, mask = store.folded(seen.query), store.folded_mask(seen.arguments.mask, seen.query.shape[1])
    real, sinks = seen.real.repeat_interleave(store.fold, 0), _folded_sinks(store, seen)
    rows, share, queries, _ = query.shape
    tokens = keys.shape[2]
    query = kernels.hadamard(query.float(), store.format.rotate_keys).flatten(1, 2)
    later = torch.ones(queries, queries, dtype=torch.bool, device=keys.device).triu(1)
    at_once = max(1, ELEMENTS // (share * queries * tokens))
    for first in range(0, rows, at_once):
        own = slice(first, first + at_once)
        x = torch.bmm(query[own], keys[own, 0].float().mT).mul_(seen.arguments.scaling).unflatten(1, (share, queries))
        if seen.arguments.softcap:
            x = torch.tanh(x / seen.arguments.softcap) * seen.arguments.softcap
        if mask is None:
            x[..., tokens - queries :].masked_fill_(later, -torch.inf)
        else:
            shown = (mask if mask.shape[0] == 1 else mask[own])[..., :tokens]
            x = x + shown if mask.is_floating_point() else x.masked_fill(~shown.bool(), -torch.inf)
        yield own, Attention.of(x, None if sinks is None else sinks[own], real[own])


def _folded_sinks(store: HeadwiseStore, seen: Observation) -> Tensor | None:
    """Sinks f32 (B*H, r) of folded rows."""
    if seen.arguments.sinks is None:
        return None
    return seen.arguments.sinks.float().view(store.fold, -1).repeat(store.batch // store.fold, 1)
