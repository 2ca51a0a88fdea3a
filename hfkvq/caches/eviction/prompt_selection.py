"""A first prompt beyond its budget: the tokens that stay are chosen before anything is stored.

They are handed to the store as if they were the whole prompt, so any layout takes them, and they are quantized once,
from what the model gave. The host knows how many tokens a row keeps, and asks the device nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments

from ..schemes.eviction import EvictionScheme
from ..schemes.score_inputs import keep_columns, keep_mask, prompt_evidence
from ..store import Padding


class Choice(NamedTuple):
    """Choice of a first prompt's tokens, as `KVStore.extend` takes it.

    Attributes:
        keys: (B, H, n, Dk), each KV head's own tokens, in order.
        values: (B, H, n, Dv), likewise.
        columns: i64 (B*H, n), of the prompt, where these tokens stand.
        scores: f32 (B*H, n), of the same tokens.
        padding: rows that keep fewer than n tokens begin with padding; None where none does.
        shorter: columns by which every row is shorter than the prompt: ``start`` is to be greater by so many.
        evicted: i32 (B,), tokens of each row that are gone.
        rows: what rows may be like: tokens given, and tokens that stay.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor
    scores: Tensor
    padding: Padding | None
    shorter: int
    evicted: Tensor
    rows: frozenset[tuple[int, int]]


def choose(
    scheme: EvictionScheme,
    layer: int,
    layers: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    arguments: AttentionArguments,
    *,
    hold: int = 0,
    padding: Padding | None = None,
) -> Choice | None:
    """The tokens of a first prompt that stay; None where all do, or where padding stands among tokens.

    Where every step is judged, scores are wanted even if all tokens stay.

    Args:
        scheme: the policy.
        layer: index of the layer in the model.
        layers: layers of the model.
        query: (B, Hq, Q, D), after RoPE: all queries, or the newest ``scheme.queries`` where nobody asks for more.
        keys: (B, H, T, Dk), as the model gave them.
        values: (B, H, T, Dv), likewise.
        arguments: see `prompt_evidence`.
        hold: newest tokens that have to stay, beyond the scheme's window.
        padding: of the prompt.
    """
    heads, tokens = keys.shape[1:3]
    if padding is not None and padding.source is not None:
        return None
    lengths = torch.tensor([tokens - lead for lead in ([0] if padding is None else padding.amounts)])
    rooms: list[int] = scheme.room(lengths, lengths, layer, layers, hold).tolist()
    # Rows of padding alone have nothing to choose from.
    if not max(rooms) or (rooms == lengths.tolist() and not scheme.asks_every_step):
        return None
    lead = None if padding is None else padding.lead.to(keys.device).long()
    parts = [
        scheme.scores(found)
        for _, found in prompt_evidence(scheme.evidence, scheme.queries, query, keys, values, arguments, lead)
    ]
    scores, most, newest = shared(scheme, torch.cat(parts), heads), max(rooms), max(scheme.window, hold)
    if lead is None:
        return keep(scores, keys, values, most, scheme.first, newest)
    length = tokens - lead
    room = scheme.room(length, length, layer, layers, hold)
    folded = [x.repeat_interleave(heads) for x in (length, room, lead)]
    stays = keep_mask(scores, folded[0], folded[1], scheme.first, newest)
    # Kept tokens come last, in order; columns before them in shorter rows are padding now.
    rank = stays.to(torch.int8).argsort(dim=1, stable=True)[:, -most:]
    columns = (rank + folded[2][:, None]).clamp(max=tokens - 1)
    after = Padding((most - room).int(), frozenset(most - own for own in rooms), None)
    rows = frozenset(zip(lengths.tolist(), rooms, strict=True))
    evicted = (length - room).int()
    return Choice(
        *_gathered(columns, keys, values), columns, scores.gather(1, rank), after, tokens - most, evicted, rows
    )


def keep(scores: Tensor, keys: Tensor, values: Tensor, room: int, first: int, newest: int) -> Choice:
    """The tokens of highest score of a prompt without padding.

    Args:
        scores: f32 (B*H, T).
        keys: (B, H, T, Dk).
        values: (B, H, T, Dv).
        room: tokens of a row that stay; at least those that always do, at most T.
        first: first tokens that always stay.
        newest: newest tokens that always stay.
    """
    (batch, _, tokens, _), columns = keys.shape, keep_columns(scores, room, first, newest)
    evicted = torch.full((batch,), tokens - room, dtype=torch.int32, device=keys.device)
    sides, rows = _gathered(columns, keys, values), frozenset({(tokens, room)})
    return Choice(*sides, columns, scores.gather(1, columns), None, tokens - room, evicted, rows)


def _gathered(columns: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, n, D) of each head's columns, i64 (B*H, n)."""
    index = columns.view(*keys.shape[:2], -1, 1)
    keys, values = (x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (keys, values))
    return keys, values


def shared(scheme: EvictionScheme, scores: Tensor, heads: int) -> Tensor:
    """Scores (B*H, n) by which heads choose: the mean of all of a row where the scheme says that they are alike."""
    if not scheme.alike:
        return scores
    by_row = scores.unflatten(0, (-1, heads))
    return by_row.mean(1, keepdim=True).expand_as(by_row).flatten(0, 1)
