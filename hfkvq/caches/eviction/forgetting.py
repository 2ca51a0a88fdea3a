"""Tokens that a cache with a budget in bytes forgets: whole pages of a layer, and tokens of a first prompt.

Pages that stay keep their bits, in order: nothing is quantized once more, however often a cache forgets. Each KV head
chooses for itself, and each of a row lets as many go, so that the layer's layout stays what it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, run_count
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.step import StepPlan

from ..layer_state.query_statistics import QueryStatistics
from ..schemes.eviction import SnapKV
from ..store import StoreState
from ..store.relaid import Kept, Reader, pages_at_a_time
from ..store.row_lengths import RowState
from .evictor import choose, store_choice


def page_size(state: StoreState) -> int:
    """Tokens of a page of a state's only run."""
    return state.format.runs[0][0].page_size


def pages_to_spare(row: RowState, state: StoreState, newest: int) -> int:
    """Pages of a row that may go: those that are full on both sides, and have none of the newest tokens."""
    return max(min(row.keys, row.values, row.length - state.sizes.sink - newest), 0) // page_size(state)


def score_bytes(plan: StepPlan) -> int:
    """Most bytes that `page_scores` allocates beside `relaid.relaid_scratch`: logits of pages, in four copies."""
    return 16 * plan.rows * plan.heads * plan.key_dim * (plan.blocks[0] + 2)


def page_scores(layer: Any, queries: QueryStatistics) -> Tensor:
    """Attention that the newest queries pay each page, the sum over queries and query heads: f32 (B, H, n).

    SnapKV's votes of an observation window, with a page in place of pooled neighbours. Keys are dequantized a few pages
    at a time.
    """
    state = layer.held().state
    rows, heads, sink, page = state.batch, state.heads, state.sizes.sink, page_size(state)
    behind = max(state.longest - sink, 0)
    blocks, tail = -(-behind // page), state.windows[2].shape[2]
    mass = torch.zeros(rows, heads, blocks, device=state.device, dtype=torch.float32)
    if queries.shown is None:
        # No query has come since the cache was read from a file: the oldest pages score as the others, and go first.
        return mass
    length, reader = state.counters[LENGTH, :, None], Reader(state, "keys", None)
    query = hadamard(layer.smoothed_query(queries.shown).float(), state.format.rotate_keys)
    query = query.unflatten(1, (heads, -1))
    shape, known = query.shape[2:4], query.abs().sum((1, 2, 4)) > 0
    position = length - shape[1] + torch.arange(shape[1], device=state.device)
    # Queries of padding stand before a row's first token.
    position = torch.where(known, position, -1)[:, None, None].expand(-1, -1, *shape).flatten(2)
    query, chunk = query.flatten(2, 3), pages_at_a_time(blocks, page, tail)

    def logits(keys: Tensor, asking: Tensor, at: Tensor, first: int) -> Tensor:
        """Logits of tokens that stand from a row's token ``first`` on: f32 (B, H, q, m)."""
        x = (asking @ keys.float().mT).mul_(queries.scaling)
        if queries.softcap:
            x = torch.tanh(x / queries.softcap).mul_(queries.softcap)
        there = torch.arange(first, first + keys.shape[2], device=x.device)
        return x.masked_fill_(there > at[..., None], -torch.inf)

    # Logits of so many queries as keys have channels are no larger than the keys.
    most = query.shape[3]
    for asking, at in zip(query.split(most, 2), position.split(most, 2), strict=True):
        found = [logits(state.windows[0], asking, at, 0).logsumexp(-1, keepdim=True)] if sink else []
        for block in range(0, blocks, chunk):
            count = min(chunk, blocks - block)
            keys = reader.pages(length.new_full((rows, 1), block, dtype=torch.long), count)
            x = logits(keys, asking, at, sink + block * page)
            found.append(x.unflatten(-1, (count, page)).logsumexp(-1))
        paid = torch.cat(found, -1)
        paid = (paid - paid.logsumexp(-1, keepdim=True)).exp_().nan_to_num_(0.0)
        mass += paid.sum(2)[..., -blocks:]
    return mass


def kept_pages(layer: Any, queries: QueryStatistics, most: int, newest: int) -> Kept:
    """The pages that stay so that no row holds more than ``most`` tokens: in each KV head those of highest score.

    Sink, ``newest`` tokens and pages that are not full always stay. The host asks the device nothing. The layer is
    settled, and of one run of pages.
    """
    state = layer.held().state
    sink, page, scores = state.sizes.sink, page_size(state), page_scores(layer, queries)
    length = state.counters[LENGTH].long()
    full = torch.minimum(run_count(state.counters, 0, "keys"), run_count(state.counters, 0, "values"))
    full = torch.minimum(full, length - sink - newest).clamp(min=0) // page
    go = (length - most).clamp(min=0).add_(page - 1) // page
    block = torch.arange(scores.shape[2], device=state.device).expand_as(scores)
    order = scores.masked_fill(block >= full[:, None, None], torch.inf).argsort(dim=-1, stable=True)
    goes = torch.empty_like(order).scatter_(2, order, block) < go[:, None, None]
    states, settled = set(), 0
    for row in state.states:
        gone = -(-max(row.length - most, 0) // page) * page
        assert gone <= pages_to_spare(row, state, newest) * page, "asked before"
        states.add(RowState(*(tokens - gone for tokens in row)))
        settled = max(settled, layer.seen - row.length + sink + pages_to_spare(row, state, newest) * page)
    return Kept(goes.to(torch.int8).argsort(dim=-1, stable=True), go * page, frozenset(states), settled)


def cut_prompt(layer: Any, scheme: SnapKV, query: Tensor, arguments: AttentionArguments) -> None:
    """Lets the best tokens of a staged first prompt join the store, as SnapKV has it, and no others.

    The layer holds nothing else. Queries (B, Hq, Q, D) are smoothed as the staged keys are.

    Raises:
        ValueError: padding stands among tokens. All layers are empty then, as they were before this prompt.
    """
    if layer.padding is not None and layer.padding.source is not None:
        for member in layer.buffer.sync.members:
            member.layer.reset()
        raise ValueError(
            "evict: got a first prompt that does not fit, with padding within rows, where no token can be forgotten; "
            "nothing was cached. Pad on the left, or give the cache more (cache.memory_limit = ...)."
        )
    # A first prompt waits until its attention is done.
    keys, values = layer.staged
    given = query[:, :, -scheme.window :], keys, values, arguments.biased()
    choice = choose(scheme, 0, 1, *given, hold=layer.hold, padding=layer.padding)
    # Without a choice, rows are so much shorter than the prompt that all of them fit.
    if choice is not None:
        store_choice(layer, choice, scheme.window)
        layer.bind()
