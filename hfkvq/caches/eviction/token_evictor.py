"""Evictor of a layer for a scheme that only evicts: kept tokens lie in the pages of another scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH

from ..base import warn_once
from ..schemes.score_inputs import keep_mask
from ..store.packing import Packed
from ..store.requantize import keep_tokens, positions
from .evictor import Eviction, QueryWindow, choose, shared, store_choice, stored_evidence, token_order

NEVER = 1 << 62
"""Tokens that no row will ever have."""


class TokenEvictor(Eviction):
    """Keeps the tokens of highest score, each once and for all as the layout has it.

    The host works out at each prompt and trim when the next trim is due, and a first prompt that goes beyond its budget
    is never stored whole: see `hfkvq.caches.eviction.evictor`.

    A token that leaves lets older ones move up in the order of columns, so nothing is evicted once columns have a
    meaning of their own: where padding stands among a row's tokens, or attention has a bias for each column.
    """

    def forget(self) -> None:
        super().forget()
        self._stuck = False

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

    def after_begin(self) -> None:
        super().after_begin()
        padding = self.layer.padding
        if padding is not None and padding.source is not None:
            self._stick("padding stands among its tokens")

    def note_queries(self, query: Tensor, arguments: AttentionArguments) -> None:
        if arguments.bias is not None:
            self._stick("attention has a bias for each column")
        super().note_queries(query, arguments)

    def _stick(self, why: str) -> None:
        self._stuck = True
        warn_once(f"{self.policy.name}: this cache evicts no more tokens, because {why}; it may exceed its budget.")

    # A first prompt.

    def _cut(self, seen: QueryWindow, keys: Tensor, values: Tensor) -> bool:
        """See `Eviction.cut_prompt`; the host waits for nothing."""
        layer, given = self.layer, (seen.query, keys, values, seen.arguments)
        choice = None
        if not self._stuck:
            choice = choose(self.policy, *self.place, *given, hold=layer.hold, padding=layer.padding)
        if choice is None:
            return False
        store_choice(layer, choice, self.policy.window)
        self.pending = None
        if self.asks_every_step:
            scores = choice.scores
            if choice.padding is not None:
                rank = torch.arange(scores.shape[1], device=scores.device)
                lead = choice.padding.lead.long().repeat_interleave(self.layer.held().fold)
                scores = scores.gather(1, (rank + lead[:, None]).clamp(max=scores.shape[1] - 1))
            self._remember(scores)
        self._plan_trim(*torch.tensor(sorted(choice.rows), dtype=torch.int64, device="cpu").T)
        return True

    # When steps trim.

    def _lengths(self) -> tuple[Tensor, Tensor]:
        """Tokens that rows have been given, and that they hold: i64. Asks the device once some are gone."""
        store = self.layer.held()
        if not self.layer.evicted:
            held = torch.tensor([state.length for state in store.states], dtype=torch.int64, device="cpu")
            return held, held
        held = store.counters[LENGTH].long()
        given, held = torch.stack([held + store.state.dropped, held]).cpu()
        return given, held

    def _plan_trim(self, given: Tensor, held: Tensor) -> None:
        """Works out when steps have to trim; arguments are those of `EvictionScheme.room`, on the host."""
        due = self.policy.due_in(given, held, *self.place, self.layer.hold)
        self.trim_at = 0 if due is None else self.layer.seen + int(due.min())

    # Judging and trimming.

    def _judge(self, seen: QueryWindow) -> None:
        if self._stuck:
            self.scores = None
            return
        trims, prompt = self.layer.seen >= self.full_at, seen.prompt is not None
        if prompt or not self.trim_at:
            given, held = self._lengths()
            trims = bool((held > self.policy.room(given, held, *self.place, self.layer.hold)).any())
        if trims or self.asks_every_step:
            where = positions(self.layer.held().state)
            order = token_order(self.layer.held(), where)
            scores = self._scores(seen, where, order)
            scores = self._trim(scores, seen) if trims else scores
            if self.asks_every_step:
                self._remember(scores)
        if self.trims_steps and (trims or prompt or not self.trim_at):
            self._plan_trim(*self._lengths())

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
        room = policy.room(held + store.state.dropped, held, *self.place, layer.hold)
        due = prompt.repeat_interleave(store.fold)
        due = due if policy.interval is None else due | (held >= room + policy.interval)
        left = torch.where(due, room, held)
        weights = None
        if "query" in policy.needs:
            # Channels of pages that are made again are weighed by the queries shown.
            query = store.folded(seen.query).float().abs().mean(1)
            real = seen.real.repeat_interleave(store.fold, 0)[..., None].float()
            weights = (query * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        newest = max(policy.window, layer.hold)
        stays = keep_mask(shared(policy, scores, store.fold), held, left, policy.first, newest)
        if keep_tokens(store, stays, layer.hold, weights):
            layer.evicted = True
            layer.edition += 1
        if not self.asks_every_step:
            return scores
        order = stays.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return scores.gather(1, order[:, : store.longest])

    def pack(self) -> Packed:
        numbers, tensors = super().pack()
        return numbers | {"stuck": self._stuck}, tensors

    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().unpack(found, tensors)
        self._stuck = found["stuck"] is True
