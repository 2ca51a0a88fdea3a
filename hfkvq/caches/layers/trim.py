"""One trim of a store: how many bits each token goes on with, and which go."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH

from ..headwise import HeadwiseStore
from ..ranking import tier_widths
from ..store.columns import run_columns
from ..store.moves import EVICT, STAY
from ..store.requantize import requantize_by_tiers


def trim(
    store: HeadwiseStore,
    scores: Tensor,
    over: Tensor,
    past: Tensor,
    counts: tuple[Tensor, Tensor],
    low_bits: int,
    where: Tensor,
    order: Tensor,
) -> Tensor:
    """Gives the tokens of some rows their tiers, by score, and evicts the others.

    Args:
        store: whose tokens these are.
        scores: f32 (B*H, n), oldest token first.
        over: bool (B*H,), the rows.
        past: i64 (B*H,), older tokens of each row, which are judged; the others stay.
        counts: i64 (B*H,), of them, tokens that stay, and those that stay whole.
        low_bits: width of the others that stay.
        where: what `positions` says.
        order: what `token_order` says.

    Returns:
        i64 (B*H, n): ranks before the trim of the tokens that are left, oldest first.
    """
    length = store.counters[LENGTH].long()
    rank = torch.arange(order.shape[1], device=order.device)
    stay, whole = counts
    narrow, tail = run_columns(store)[0], run_columns(store)[-1][0]
    is_whole = (order < narrow[0]) | (order >= narrow[0] + narrow[1])
    judged = rank < past[:, None]
    bits = tier_widths(scores.masked_fill(~judged, -torch.inf), stay, whole, is_whole, low_bits)
    runs = torch.full(bits.shape, EVICT, dtype=torch.int8, device=bits.device)
    for i, (fmt, _) in enumerate(store.format.runs):
        runs = torch.where(bits == fmt.bits, i, runs)
    runs = torch.where(judged & over[:, None], runs, STAY).to(torch.int8)
    target = torch.full((order.shape[0], tail + store.windows[2].shape[2]), STAY, dtype=torch.int8, device=runs.device)
    target.scatter_(1, order, runs)
    requantize_by_tiers(store, target, where)
    return ((runs != EVICT) & (rank < length[:, None])).to(torch.int8).argsort(dim=1, descending=True, stable=True)
