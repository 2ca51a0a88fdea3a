"""Trims: widths of a store's tokens, and those that go."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH

from ..schemes.eviction import TieredEviction
from ..schemes.ranking import tier_widths
from ..store import StoreState
from ..store.columns import run_columns
from ..store.moves import EVICT, STAY


def tier_targets(
    policy: TieredEviction,
    costs: tuple[int, int],
    newest: int,
    state: StoreState,
    scores: Tensor,
    share: Tensor,
    over: Tensor,
    prompt: Tensor,
    where: Tensor,
    order: Tensor,
    final: bool = True,
) -> tuple[Tensor, Tensor]:
    """Tiers of the tokens of some rows, by their scores.

    Args:
        policy: says how many tokens stay, and how many of them whole.
        costs: bytes of a token in few bits and whole.
        newest: newest tokens of a row, which stay as they are.
        state: of the store.
        scores: f32 (B*H, n), oldest token first.
        share: f32 (B*H,), the layer's share of whole tokens.
        over: bool (B*H,), the rows; others stay as they are.
        prompt: bool (B*H,), rows that have had a prompt just now.
        where: what `positions` says.
        order: what `token_order` says.
        final: whether shares are final; until then a prompt keeps as many tokens as the budget could hold in few bits.

    Returns:
        Targets as `requantize_by_tiers` takes them, and i64 (B*H, n): ranks of the tokens that are left, oldest first.
    """
    length = state.counters[LENGTH].long()
    past = (length - newest).clamp(min=0)
    kept = stay = policy.kept(past, share, costs, prompt)
    if not final:
        stay = torch.where(prompt, policy.kept(past, torch.zeros_like(share), costs, prompt), kept)
    rank = torch.arange(order.shape[1], device=order.device)
    narrow, tail = run_columns(state)[0], run_columns(state)[-1][0]
    is_whole = (order < narrow[0]) | (order >= narrow[0] + narrow[1])
    judged = rank < past[:, None]
    judged_scores = scores.masked_fill(~judged, -torch.inf)
    bits = tier_widths(judged_scores, stay, policy.whole(kept, share), is_whole, policy.low_bits)
    runs = torch.full(bits.shape, EVICT, dtype=torch.int8, device=bits.device)
    for i, (fmt, _) in enumerate(state.format.runs):
        runs = torch.where(bits == fmt.bits, i, runs)
    runs = torch.where(judged & over[:, None], runs, STAY).to(torch.int8)
    target = torch.full((order.shape[0], tail + state.windows[2].shape[2]), STAY, dtype=torch.int8, device=runs.device)
    target.scatter_(1, order, runs)
    left = ((runs != EVICT) & (rank < length[:, None])).to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return target, left
