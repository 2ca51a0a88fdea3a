"""What a layer does for a scheme of tiers: what stays is whole or in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH

from ..eviction import TieredEviction
from ..evidence import Evidence, prompt_evidence
from ..first_prompt import Waiting, first_tiers, older_that_stay
from ..headwise import HeadwiseStore
from ..observe import Observation, stored_evidence, token_order
from ..store import SIDES
from ..store.columns import positions
from ..store.packing import Packed
from ..store.prompt_eviction import Cut, Tiers, store_best, store_tiers
from .base import LayerBase
from .budget import Budget
from .eviction import EvictingGroup, Eviction
from .queries import QueryStatistics
from .trim import trim


class TierEvictor(Eviction[TieredEviction]):
    """Gives tokens their tiers, by their scores and by the layer's share of whole ones.

    A layer's share is relative to the strongest layer's, which is known when the last layer is done: until then the
    strongest so far stands for it, or, of a first prompt, all stay whole (see `hfkvq.caches.first_prompt`). In this
    time a layer holds less than twice a budget in bytes.

    Attributes:
        budget: of each KV head; known with the first update.
        strength: f32 (B,), by which layers are compared; None before a prompt, or where nobody asks attention.
        prompts: that have come.
        provisional: bool (B*H,), rows whose tiers are not final yet; None if there are none.
        first_cut: what a first prompt was cut to, until tiers are final.
    """

    budget: Budget
    group: TierGroup

    def __init__(self, layer: LayerBase) -> None:
        super().__init__(layer)
        self.group = TierGroup([self])  # pyright: ignore[reportIncompatibleVariableOverride]

    def forget(self) -> None:
        """Forgets all tokens."""
        super().forget()
        self.strength: Tensor | None = None
        self.prompts = 0
        self.provisional: Tensor | None = None
        self.first_cut: Cut | None = None

    def new_store(self, keys: Tensor, values: Tensor) -> HeadwiseStore:
        """See `Eviction.new_store`."""
        store, policy = super().new_store(keys, values), self.policy
        costs = policy.token_bytes(store.layout, keys.shape[-1], values.shape[-1], keys.dtype.itemsize)
        self.budget = Budget(policy.tokens, policy.budget_bytes, costs)
        self.budget.check(policy.window, keys.dtype)
        return store

    @property
    def full_at(self) -> int:
        """See `Eviction.full_at`."""
        return self.trim_at or 1 + self.budget.most[1]

    @property
    def keeps_query(self) -> bool:
        """Always: a trim is as likely by the next step as by any."""
        return True

    def most_held(self, room: int) -> tuple[int, ...]:
        """See `Eviction.most_held`; all in few bits, and all whole."""
        return self.budget.most

    # A first prompt.

    def cut_prompt(self, queries: QueryStatistics | None) -> bool:
        """See `Eviction.cut_prompt`."""
        seen, best = self.pending, 0
        if seen is not None and self.may_be_cut(seen) and self.layer.padding is None:
            best = self._older_that_stay()
        if seen is not None and best:
            self._cut(seen, best)
        return best > 0

    def _older_that_stay(self) -> int:
        """Tokens that a first prompt is cut to, beside the newest; 0 where it has to go the general way."""
        layer, newest = self.layer, max(self.policy.window, self.layer.hold)
        if layer.seen < self.full_at:
            return 0
        return older_that_stay(self.policy, self.store().layout, self.budget.costs, layer.seen, newest)

    def _cut(self, seen: Observation, best: int) -> None:
        """Does of a first prompt what `KVStore.extend` and `judge` would, without asking the device anything."""
        layer, store, policy = self.layer, self.store(), self.policy
        assert layer.staged is not None
        keys, values = (store._rotated(store.folded(x), side) for x, side in zip(layer.staged, SIDES, strict=True))
        rows, tail = keys.shape[0], max(policy.window, layer.hold)
        scores, statistics = torch.empty(rows, layer.seen, device=layer.device), []
        given = seen.query, *layer.staged, seen.arguments
        for own, found in prompt_evidence(policy.evidence, policy.queries, *given):
            scores[own] = policy.scores(found)
            statistics += self._statistics(found)
        strength = self._strength_of(statistics)
        order = scores[:, : layer.seen - tail].argsort(dim=1, descending=True, stable=True)
        chosen = order[:, :best].sort(dim=1).values
        left = torch.cat([scores.gather(1, chosen), scores[:, -tail:]], 1)
        provisional = torch.ones(rows, dtype=torch.bool, device=layer.device)
        first = store_best(store, keys, values, chosen, tail)
        # Not earlier: if there was no memory, the tokens are still staged.
        layer.staged = self.pending = None
        layer.uncommitted, self.strength = False, strength
        self.scores, self.provisional = left, provisional
        layer.evicted = True
        layer.edition += 1
        self.first_cut = first._replace(edition=layer.edition)
        self.prompts += 1
        self.group.report(self.prompts)

    # Judging and trimming.

    def _judge(self, seen: Observation) -> None:
        # Tokens have come since; what a cut left need not be kept for layers that never had their prompt.
        self.first_cut = None
        store, policy, due = self.store(), self.policy, self.layer.seen >= self.full_at
        where = positions(store)
        order = token_order(store, where)
        scores, statistics = torch.empty(order.shape, device=order.device), []
        for rows, found in stored_evidence(policy.evidence, store, seen, where, order):
            scores[rows] = policy.scores(found)
            if seen.prompt is not None:
                statistics += self._statistics(found)
        scores = self._merged(scores)
        if seen.prompt is not None:
            strength = self._strength_of(statistics)
            if strength is not None and self.strength is not None:
                strength = torch.where(seen.prompt, strength, self.strength)
            self.strength = strength
            self.prompts += 1
        if due:
            prompt = torch.zeros_like(seen.real[:, 0]) if seen.prompt is None else seen.prompt
            self._trim(scores, prompt.repeat_interleave(store.fold), None, where, order)
        elif policy.remembers:
            self._remember(scores)
        if seen.prompt is not None:
            self.group.report(self.prompts)

    def _statistics(self, found: Evidence) -> list[Tensor]:
        """Of some folded rows; none where nobody asks attention."""
        policy = self.policy
        return [] if found.attention is None else [policy.layer_statistics(found.attention, found.past(policy.window))]

    def _strength_of(self, statistics: list[Tensor]) -> Tensor | None:
        """f32 (B,) of the statistics of folded rows."""
        if not statistics:
            return None
        return self.policy.strength(torch.cat(statistics).unflatten(0, (self.layer.batch_size, -1)))

    def waiting(self) -> Waiting | None:
        """What the tiers of a first prompt follow from, if this layer has cut one and holds nothing else."""
        cut = self.first_cut
        if cut is None or self.scores is None or self.layer.store is None:
            return None
        store = self.store()
        if not cut.stands(store.state, self.layer.edition):
            return None
        costs, heads = self.budget.costs, self.layer.heads
        return Waiting(store.state, store.layout, cut, self.policy, costs, heads, self.scores, self.strength)

    def assign(self, tiers: Tiers | None = None) -> None:
        """Assigns tiers to what a prompt left, now that every layer's share is final; ``tiers`` if they are known."""
        layer = self.layer
        if tiers is not None and self.first_cut is not None:
            store_tiers(self.store(), tiers)
            layer.edition += 1
            room = self.budget.least_room(tiers.kept[0], tiers.lengths(self.first_cut.tail))
            self.trim_at = layer.seen + 1 + max(room, 0)
        elif self.provisional is not None and self.scores is not None:
            # Where sealing waits for the next update, this layer may have tokens by now that nobody has judged.
            store = self.store()
            since = max(store.longest - self.scores.shape[1], 0)
            where = positions(store)
            scores = torch.nn.functional.pad(self.scores, (0, since), value=torch.inf)
            self._trim(scores, self.provisional, self.provisional, where, token_order(store, where))
        self.provisional = self.first_cut = None
        if not self.policy.remembers:
            self.scores = None
        layer.bind()

    def _trim(self, scores: Tensor, prompt: Tensor, rows: Tensor | None, where: Tensor, order: Tensor) -> None:
        """Cuts rows to their budget: those that have outgrown it, or finally those of ``rows`` (bool (B*H,)).

        ``prompt`` (likewise) are those that have had a prompt just now. ``where`` and ``order`` are what `positions`
        and `token_order` say.
        """
        layer, store, policy = self.layer, self.store(), self.policy
        over = self.budget.room(store) < 0 if rows is None else rows
        # Until all layers are done, as many tokens as the budget could hold in few bits.
        final = rows is not None or all(x.prompts == self.prompts for x in self.group.members)
        left = None
        if over.any():
            past = (store.counters[LENGTH].long() - max(policy.window, layer.hold)).clamp(min=0)
            most, own = self.group.greatest_strength(self.prompts, layer.device), self.strength
            if own is None or most is None:
                most = own = torch.ones(layer.batch_size, device=layer.device)
            share = policy.share(own, most).repeat_interleave(store.fold)
            kept = stay = policy.kept(past, share, self.budget.costs, prompt)
            if not final:
                many = policy.kept(past, torch.zeros_like(share), self.budget.costs, prompt)
                stay = torch.where(prompt, many, kept)
            counts = stay, policy.whole(kept, share)
            left = trim(store, scores, over, past, counts, policy.low_bits, where, order)
            layer.evicted = True
            layer.edition += 1
            self.provisional = over & prompt if not final else None
        self.scores = None
        if policy.remembers or (left is not None and not final):
            self._remember(scores if left is None else scores.gather(1, left[:, : store.longest]))
        self.trim_at = layer.seen + 1 + max(int(self.budget.room(store).min()), 0)

    # Rows and lengths change.

    def pack(self) -> Packed:
        """See `Eviction.pack`."""
        numbers, tensors = super().pack()
        held = {"strength": self.strength, "provisional": self.provisional}
        return numbers | {"prompts": self.prompts}, tensors | {k: x for k, x in held.items() if x is not None}

    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """See `Eviction.unpack`."""
        super().unpack(found, tensors)
        self.prompts = int(found["prompts"])
        self.strength, self.provisional = tensors.get("strength"), tensors.get("provisional")

    def take_rows(self, rows: Tensor) -> None:
        """Row b becomes what row ``rows[b]`` was."""
        super().take_rows(rows)
        if self.strength is not None:
            self.strength = self.strength[rows.to(self.strength.device)]
        if self.provisional is not None:
            self.provisional = self.provisional[self.store().rows_of(rows.to(self.provisional.device))]

    def notes(self) -> tuple[list[Tensor], list[Tensor]]:
        """See `Eviction.notes`."""
        by_row, by_head = super().notes()
        by_row += [] if self.strength is None else [self.strength]
        return by_row, by_head + ([] if self.provisional is None else [self.provisional])


class TierGroup(EvictingGroup[TierEvictor]):
    """Those that compare their strengths."""

    def greatest_strength(self, prompts: int, device: torch.device) -> Tensor | None:
        """Greatest strength of the layers that have met as many prompts: f32 (B,), or None if none has."""
        known = [x.strength.to(device) for x in self.members if x.strength is not None and x.prompts == prompts]
        return torch.stack(known).amax(0) if known else None

    def report(self, prompts: int) -> None:
        """A layer has seen its prompt. After the last one every share is final, and tiers are assigned."""
        members = self.members
        if all(member.prompts == prompts for member in members):
            waiting = [member.waiting() for member in members]
            most = self.greatest_strength(prompts, members[0].layer.device) if any(waiting) else None
            for member, tiers in zip(members, first_tiers(waiting, most), strict=True):
                member.assign(tiers)
