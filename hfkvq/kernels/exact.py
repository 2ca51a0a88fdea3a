"""Exact keys: those of a page that queries are expected to look at stay whole beside its codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import call, define, triton_slot


def _halving_sum(x: Tensor) -> Tensor:
    """Sums over the last axis, padded with zeros to a power of two, as ``x[i] + x[i + n/2]`` until one is left.

    Every step is one rounded addition an element, so every device gets the same bits.
    """
    x = torch.nn.functional.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        upper, lower = x.chunk(2, -1)
        x = upper + lower
    return x.squeeze(-1)


def exact_slots(keys: Tensor, count: int, query: Tensor | None) -> Tensor:
    """Slots of the keys that stay whole: those of greatest ``k · q``, the earlier one of equals first.

    Args:
        keys: (..., G, D), whole pages.
        count: n, keys of a page.
        query: f32 (..., D), mean of the queries that are to look at them; None takes the first slots.

    Returns:
        i64 (..., n).
    """
    if query is None:
        return torch.arange(count, device=keys.device).expand(*keys.shape[:-2], count)
    score = _halving_sum(keys.float() * query.unsqueeze(-2))
    # NaN comes last.
    score = torch.where(score == score, score, -torch.inf)
    return score.argsort(dim=-1, descending=True, stable=True)[..., :count]


@define("keep_exact", mutates=("exact", "slots"))
def _keep_exact(
    exact: Tensor,
    slots: Tensor,
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    query: Tensor | None,
    page: int,
) -> None:
    row, block = (torch.arange(0, index.shape[1], page, device=new.device) < new[:, None]).nonzero(as_tuple=True)
    ids = table.long()[row, (count[row] + block * page) // page]
    columns = index.long().unflatten(1, (-1, page))[row, block]
    # (N, H, G, D)
    x = source.transpose(1, 2)[row[:, None], columns].transpose(1, 2)
    chosen = exact_slots(x, slots.shape[2], None if query is None else query[row])
    exact[ids] = x.gather(2, chosen[..., None].expand(-1, -1, -1, x.shape[-1])).to(exact.dtype)
    slots[ids] = chosen.to(slots.dtype)


triton_slot("keep_exact", "exact:keep_exact_triton")


def keep_exact(
    planes: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    query: Tensor | None,
    page: int,
) -> None:
    """Chooses the exact keys of pages that are sealed, and stores them; `seal` does it with the codes.

    Args:
        planes: ``exact`` and ``exact_index`` of `PageFormat`; written in place.
        table: i32 (B, n), page reserved for each block.
        count: i32 (B,), tokens that the run already has, in whole pages.
        new: i32 (B,), tokens to add, a multiple of the page.
        source: (B, H, L, D), any float dtype, in the basis of the store.
        index: i32 (B, m), column of ``source`` of each new token; anything beyond ``new``.
        query: f32 (B, H, D), see `exact_slots`.
        page: G, tokens of a page.
    """
    call(_keep_exact, source, *planes, table, count, new, source, index, query, page)
