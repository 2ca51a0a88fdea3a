"""Evictor of a layer for a scheme that only evicts: kept tokens lie in the pages of another scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH

from ..base import warn_once
from ..layer_state.base import LayerBase
from ..schemes.eviction import EvictionScheme
from ..schemes.score_inputs import keep_mask
from ..store import MAX_STEP
from ..store.packing import Packed
from ..store.requantize import keep_tokens, positions
from .evictor import EvictingGroup, Eviction, QueryWindow, choose, shared, store_choice, stored_evidence, token_order

NEVER = 1 << 62
"""Tokens that no row will ever have."""

Rows = frozenset[tuple[int, int]]
"""States that rows may be in: tokens given so far, and tokens held."""


class TokenEvictor(Eviction[EvictionScheme]):
    """Keeps the tokens of highest score, each once and for all as the layout has it.

    How many tokens a row has been given and how many it holds follow from its length before, so the host knows when a
    trim is due, and a first prompt that goes beyond its budget is never stored whole: see
    `hfkvq.caches.eviction.evictor`.

    A token that leaves lets older ones move up in the order of columns, so nothing is evicted once columns have a
    meaning of their own: where padding stands among a row's tokens, or attention has a bias for each column.
    """

    def __init__(self, layer: LayerBase) -> None:
        super().__init__(layer)
        self.group = EvictingGroup([self])

    def forget(self) -> None:
        super().forget()
        self._stuck = self._long = False
        # Since tokens have been evicted: rows, and tokens seen then.
        self._rows: Rows = frozenset()
        self._rows_at = 0

    @property
    def full_at(self) -> int:
        return NEVER if self._stuck or not self.trims_steps else self.trim_at

    def most_held(self, room: int) -> tuple[int, ...] | None:
        interval = self.policy.interval
        if interval is None:
            return None
        # Budgets may fall while tokens come.
        given = torch.arange(1, room + 1, dtype=torch.int64, device="cpu")
        left = int(self.policy.room(given, given, *self.place, self.layer.hold).max())
        return (left + interval,) * len(self.layer.held().runs)

    # An attention call.

    def before_begin(self) -> bool:
        self._long = self.layer.new_columns > MAX_STEP
        return super().before_begin()

    def after_begin(self) -> None:
        super().after_begin()
        layer = self.layer
        padding, new = layer.padding, layer.new_columns
        if padding is None:
            return
        if padding.source is not None:
            self._stick("padding stands among its tokens")
        elif layer.evicted:
            # Rows that begin now.
            before = self._rows_at_length(layer.seen - new)
            self._rows = frozenset(
                (given + new - lead, held + new - lead)
                for given, held in before
                for lead in (padding.amounts if held == 0 else (0,))
            )
            self._rows_at = layer.seen

    def note_queries(self, query: Tensor, arguments: AttentionArguments) -> None:
        if arguments.bias is not None:
            self._stick("attention has a bias for each column")
        super().note_queries(query, arguments)

    def _stick(self, why: str) -> None:
        self._stuck = True
        warn_once(f"{self.policy.name}: this cache evicts no more tokens, because {why}; it may exceed its budget.")

    # A first prompt.

    def cut_prompt(self) -> bool:
        """See `Eviction.cut_prompt`; the host waits for nothing."""
        layer, seen = self.layer, self.pending
        if seen is None or layer.staged is None or self._stuck or not self.may_be_cut(seen):
            return False
        given = seen.query, *layer.staged, seen.arguments
        choice = choose(self.policy, *self.place, *given, hold=layer.hold, padding=layer.padding)
        if choice is None:
            return False
        store_choice(layer, choice, self.policy.window)
        self.pending = None
        self._rows, self._rows_at = choice.rows, layer.seen
        if self.asks_every_step:
            scores = choice.scores
            if choice.padding is not None:
                rank = torch.arange(scores.shape[1], device=scores.device)
                lead = choice.padding.lead.long().repeat_interleave(self.layer.held().fold)
                scores = scores.gather(1, (rank + lead[:, None]).clamp(max=scores.shape[1] - 1))
            self._remember(scores)
        self._plan_trim()
        return True

    # The host's knowledge of rows.

    def _rows_at_length(self, seen: int) -> Rows:
        """Rows once ``seen`` tokens had come, of which none has been evicted since the last trim."""
        if not self.layer.evicted:
            more = seen - self.layer.seen
            return frozenset((state.length + more, state.length + more) for state in self.layer.held().states)
        more = seen - self._rows_at
        return frozenset((max(given + more, 0), max(held + more, 0)) for given, held in self._rows)

    def _left(self, given: Tensor, held: Tensor, prompt: Tensor) -> Tensor:
        """Tokens that rows hold after a trim: i64; ``prompt`` (bool) are those that have had a prompt just now."""
        policy = self.policy
        room = policy.room(given, held, *self.place, self.layer.hold)
        due = prompt if policy.interval is None else prompt | (held >= room + policy.interval)
        return torch.where(due, room, held)

    def _plan_trim(self) -> None:
        """Works out when steps have to trim."""
        if self.trims_steps:
            given, held = torch.tensor(sorted(self._rows_at_length(self.layer.seen)), dtype=torch.int64, device="cpu").T
            due = self.policy.due_in(given, held, *self.place, self.layer.hold)
            assert due is not None, "steps are trimmed"
            self.trim_at = self.layer.seen + int(due.min())

    # Judging and trimming.

    def _judge(self, seen: QueryWindow) -> None:
        if self._stuck:
            self.scores = None
            return
        rows, after = self._rows_at_length(self.layer.seen), self._rows_after(seen.prompt is not None)
        trims = rows != after
        if trims or self.asks_every_step:
            where = positions(self.layer.held())
            order = token_order(self.layer.held(), where)
            scores = self._scores(seen, where, order)
            if trims:
                scores = self._trim(scores, seen)
                self._rows, self._rows_at = after, self.layer.seen
            if self.asks_every_step:
                self._remember(scores)
        self._plan_trim()

    def _rows_after(self, prompt: bool) -> Rows:
        """States of rows once they are trimmed; a few tokens, which may be a prompt for some rows, give both."""
        given, held = torch.tensor(sorted(self._rows_at_length(self.layer.seen)), dtype=torch.int64, device="cpu").T
        kinds = ([True] if self._long else [False, True]) if prompt else [False]
        found: list[tuple[int, int]] = []
        for kind in kinds:
            left = self._left(given, held, torch.full_like(held, kind, dtype=torch.bool))
            found += zip(given.tolist(), left.tolist(), strict=True)
        return frozenset(found)

    def _scores(self, seen: QueryWindow, where: Tensor, order: Tensor) -> Tensor:
        """f32 (B*H, n), oldest token first; with their history, if the scheme remembers and a token has one."""
        policy = self.policy
        found = stored_evidence(policy, self.layer.held(), seen, where, order)
        scores = torch.cat([policy.scores(evidence) for _, evidence in found])
        if self.scores is None or not policy.remembers:
            return scores
        old = self.scores[:, : scores.shape[1]]
        old = torch.nn.functional.pad(old, (0, scores.shape[1] - old.shape[1]), value=torch.nan)
        return torch.where(old.isnan(), scores, policy.merge(old, scores))

    def _trim(self, scores: Tensor, seen: QueryWindow) -> Tensor:
        """Evicts what is beyond the budget; scores of what is left. Asks the device once."""
        layer, store, policy = self.layer, self.layer.held(), self.policy
        held = store.counters[LENGTH].long()
        prompt = torch.zeros_like(seen.real[:, 0]) if seen.prompt is None else seen.prompt
        left = self._left(held + store.state.dropped, held, prompt.repeat_interleave(store.fold))
        newest = max(policy.window, layer.hold)
        stays = keep_mask(shared(policy, scores, store.fold), held, left, policy.first, newest)
        if keep_tokens(store, stays, layer.hold, self._weights(seen)):
            layer.evicted = True
            layer.edition += 1
        if not self.asks_every_step:
            return scores
        order = stays.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return scores.gather(1, order[:, : store.longest])

    def _weights(self, seen: QueryWindow) -> Tensor | None:
        """Mean magnitude of the queries shown, by which channels of pages that are made again are weighed."""
        if "query" not in self.policy.needs:
            return None
        query = self.layer.held().folded(seen.query).float().abs().mean(1)
        real = seen.real.repeat_interleave(self.layer.held().fold, 0)[..., None].float()
        return (query * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)

    def pack(self) -> Packed:
        numbers, tensors = super().pack()
        return numbers | {"stuck": self._stuck, "rows": sorted(map(list, self._rows)), "at": self._rows_at}, tensors

    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().unpack(found, tensors)
        self._stuck, self._rows_at = found["stuck"] is True, int(found["at"])
        self._rows = frozenset((int(given), int(held)) for given, held in found["rows"])

    def after_crop(self) -> None:
        super().after_crop()
        if self.layer.evicted:
            self._rows, self._rows_at = self._rows_at_length(self.layer.seen), self.layer.seen
