"""A first prompt beyond its budget: how many tokens a layer keeps of it, and which tiers they get once all are done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .eviction import TieredEviction
from .ranking import WHOLE, tier_widths
from .scheme import Layout
from .store import StoreState
from .store.moves import EVICT, STAY
from .store.prompt_eviction import Cut, Tiers, takes, tiers_of


class Waiting(NamedTuple):
    """A layer whose first prompt was cut, and that waits for its share.

    Attributes:
        state: of its store, (B*H) rows.
        layout: of the layer.
        cut: what was left of the prompt.
        scheme: of the layer.
        costs: bytes of a token in few bits and whole.
        heads: KV heads.
        scores: f32 (B*H, n), of tokens, oldest first.
        strength: f32 (B,), of the layer; None where nobody asked attention.
    """

    state: StoreState
    layout: Layout
    cut: Cut
    scheme: TieredEviction
    costs: tuple[int, int]
    heads: int
    scores: Tensor
    strength: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers that are equal in this are alike."""
        state, cut = self.state, self.cut
        tail, dims = state.windows[2].shape[2], tuple(state.dims.values())
        return state.device, state.dtype, dims, state.batch, tail, cut.kept, cut.tail, self.scheme, self.costs


def older_that_stay(scheme: TieredEviction, layout: Layout, costs: tuple[int, int], tokens: int, newest: int) -> int:
    """Tokens that a first prompt beyond its budget is cut to, beside the newest; 0 where it has to go the general way.

    Args:
        scheme: of the layer, one that evicts.
        layout: of the layer.
        costs: bytes of a token in few bits and whole.
        tokens: of the prompt.
        newest: tokens that stay as they are.
    """
    past = tokens - newest
    if past <= 0 or scheme.remembers or not takes(layout):
        return 0
    # As many as the budget could hold in few bits.
    best = int(scheme.kept(torch.tensor([past]), torch.zeros(1), costs, torch.ones(1, dtype=torch.bool)))
    # All whole, they would be many bytes where a whole token takes more than two in few bits.
    budget, held = scheme.budget_bytes, (best + newest) * costs[1]
    return 0 if budget is not None and held >= 2 * budget else best


def first_tiers(layers: Sequence[Waiting | None], most: Tensor | None) -> list[Tiers | None]:
    """Tiers of the layers that wait, now that every layer's share is final; None for the others.

    Asks each device once, and makes pages of layers that are alike together: what a layer takes the host by itself is
    waited for, when a prompt's last layer is done.

    Args:
        layers: in the model's order.
        most: f32 (B,), the greatest strength of any layer; None where none has any.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        if layer is not None:
            groups.setdefault(layer.kind, []).append(i)
    found: list[Tiers | None] = [None] * len(layers)
    for members in groups.values():
        alike = [layer for i in members if (layer := layers[i]) is not None]
        for i, tiers in zip(members, _tiers(alike, most), strict=True):
            found[i] = tiers
    return found


def _tiers(layers: Sequence[Waiting], most: Tensor | None) -> list[Tiers]:
    """Of layers that are alike."""
    one, kept = layers[0], layers[0].cut.kept
    scheme = one.scheme
    scores = torch.cat([layer.scores[:, :kept] for layer in layers])
    known = [layer.strength for layer in layers if layer.strength is not None]
    if most is None or len(known) < len(layers):
        own = best = torch.ones(scores.shape[0] // one.heads, device=scores.device)
    else:
        own, best = torch.cat(known), most.to(scores.device).repeat(len(layers))
    share = scheme.share(own, best).repeat_interleave(one.heads)
    past = torch.full((scores.shape[0],), kept, device=scores.device)
    stay = scheme.kept(past, share, one.costs, torch.ones_like(past, dtype=torch.bool))
    is_whole = torch.ones_like(scores, dtype=torch.bool)
    bits = tier_widths(scores, stay, scheme.whole(stay, share), is_whole, scheme.low_bits)
    target = torch.where(bits == WHOLE, STAY, torch.where(bits == scheme.low_bits, 0, EVICT)).to(torch.int8)
    return tiers_of([x.state for x in layers], [x.cut for x in layers], one.layout, scheme, target)
