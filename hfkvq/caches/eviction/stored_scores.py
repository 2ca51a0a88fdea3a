"""Evidence of what a store holds, for schemes that judge tokens by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import ABSENT, LENGTH, START, column_positions, run_count
from hfkvq.kernels.masks import fold_mask
from hfkvq.kernels.pages import Side

from ..schemes.score_inputs import ELEMENTS, Attention, Evidence, Kind
from ..store import SIDES, StoreState
from ..store.columns import gather
from ..store.kvstore import KVStore


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


def token_order(store: KVStore | StoreState, where: Tensor) -> Tensor:
    """Columns of each row's tokens, oldest first: i64 (B*H, n), n the longest row; anything behind a row's end.

    ``where`` is what `positions` says.
    """
    last = torch.iinfo(torch.int32).max
    return torch.where(where > ABSENT, where, last).argsort(1)[:, : store.longest]


def stored_evidence(
    kinds: Collection[Kind], store: KVStore, seen: Observation, where: Tensor, order: Tensor
) -> Iterator[tuple[slice, Evidence]]:
    """Evidence of what is stored, a few folded rows at a time; nothing is computed but what is asked for.

    Keys, values and queries are in the basis of the store, which keeps products and norms.

    Args:
        kinds: see `EvictionScheme.evidence`.
        store: what the layer holds, the queries' own tokens included.
        seen: the queries.
        where: see `positions`.
        order: see `token_order`.

    Yields:
        The rows; their evidence, in which nobody pays a token that no query sees.
    """
    query, real = store.folded(seen.query), seen.real.repeat_interleave(store.fold, 0)
    if kinds:
        query = kernels.hadamard(query.float(), store.format.rotate_keys)
    # A step whose query nobody asks for has none.
    rows, (_, share, queries, _) = store.batch, query.shape
    length, columns = store.counters[LENGTH].long(), order.shape[1]
    tokens: dict[Side, Tensor] = {}
    for side in SIDES:
        if side in kinds:
            own = order
            if side == "values":
                form, tail = store.format, store.windows[3].shape[2]
                own = token_order(store, column_positions(form, store.counters, store.runs, tail, side))
            tokens[side] = gather(store.state, side, own, range(len(store.runs)))[:, 0]
    asks = bool({"attention", "received"} & set(kinds))
    # Where all queries of a long prompt are asked, some of them at a time.
    most = max(1, ELEMENTS // (share * where.shape[1])) if "received" in kinds else queries
    at_once = max(1, ELEMENTS // (share * min(queries, most) * where.shape[1])) if asks else rows
    for first in range(0, rows, at_once):
        own = slice(first, min(first + at_once, rows))
        paid = received = None
        if asks:
            paid, received = _paid(store, seen, query[own], real[own], where[own], order[own], own, most)
        yield (
            own,
            Evidence(
                length=length[own],
                columns=columns,
                scaling=seen.arguments.scaling,
                attention=paid,
                received=received if "received" in kinds else None,
                queries=query[own] if "queries" in kinds else None,
                real=real[own] if "queries" in kinds else None,
                keys=tokens["keys"][own] if "keys" in tokens else None,
                values=tokens["values"][own] if "values" in tokens else None,
            ),
        )


def _paid(
    store: KVStore,
    seen: Observation,
    query: Tensor,
    real: Tensor,
    where: Tensor,
    order: Tensor,
    own: slice,
    most: int,
) -> tuple[Attention | None, Tensor]:
    """Attention of folded rows' queries, ``most`` queries at a time: as it is if at once, and the sum."""
    sinks, queries, total = _folded_sinks(store, seen), query.shape[2], None
    paid = None
    for first in range(0, queries, most):
        last = min(first + most, queries)
        x = _logits(store, seen, query[:, :, first:last], where, order, own, first - queries)
        paid = Attention.of(x, None if sinks is None else sinks[own], real[:, first:last])
        part = paid.mean * paid.count[:, None, None]
        total = part if total is None else total + part
    assert total is not None, "somebody asks"
    return paid if queries <= most else None, total


def _logits(
    store: KVStore, seen: Observation, query: Tensor, where: Tensor, order: Tensor, own: slice, first: int
) -> Tensor:
    """Logits of some queries of folded rows, the first counted from the end, over all tokens: f32 (N, r, Q, n)."""
    count, share, queries, _ = query.shape
    q = query.mul(seen.arguments.scaling).flatten(1, 2)[:, None]
    logits = [q @ store.windows[0][own].float().transpose(-1, -2)]
    for i, (view, (fmt, _)) in enumerate(zip(store.runs, store.format.runs, strict=True)):
        sealed = run_count(store.counters, i, "keys")[own].contiguous()
        logits.append(kernels.qk_pages(q, view.table[own].contiguous(), sealed, view.keys, fmt))
    logits.append(q @ store.windows[2][own].float().transpose(-1, -2))
    x = torch.cat(logits, -1).view(count, share, queries, -1)
    x = x.gather(-1, order[:, None, None].expand(-1, share, queries, -1))
    if seen.arguments.softcap:
        x = torch.tanh(x / seen.arguments.softcap) * seen.arguments.softcap
    place = where.gather(1, order)
    visible = (place > ABSENT)[:, None, None]
    mask = fold_mask(seen.arguments.mask, seen.query.shape[0], store.fold)
    if mask is None:
        newest = store.counters[LENGTH, own, None] + first + torch.arange(queries, device=q.device)
        visible = visible & (place[:, None] <= newest[..., None])[:, None]
    else:
        column = (place + store.counters[START, own, None]).clamp(0, mask.shape[-1] - 1).long()
        shown = (mask if mask.shape[0] == 1 else mask[own]).expand(count, -1, -1, -1)
        if shown.shape[2] > 1:
            shown = shown[:, :, first:][:, :, :queries]
        shown = shown.gather(-1, column[:, None, None].expand(-1, *shown.shape[1:3], -1))
        if mask.is_floating_point():
            x = x + shown
        else:
            visible = visible & shown.bool()
    return x.masked_fill(~visible, -torch.inf)


def _folded_sinks(store: KVStore, seen: Observation) -> Tensor | None:
    """Sinks f32 (B*H, r) of folded rows."""
    if seen.arguments.sinks is None:
        return None
    return seen.arguments.sinks.float().view(store.fold, -1).repeat(store.batch // store.fold, 1)
