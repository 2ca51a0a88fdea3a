"""Evictor of a layer for a scheme of tiers: kept tokens are whole or in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq.kernels.decode import LENGTH, run_count

from ..base import outside_inference_mode
from ..schemes.score_inputs import evidence_of, prompt_candidates, tier_widths
from ..store import KVStore, StoreState
from ..store.packing import Packed
from ..store.requantize import EVICT, STAY, positions, requantized, run_columns
from ..store.rows import joined, part, used_blocks
from ..store.windows import pages_for
from .evictor import Eviction, QueryWindow, keep, store_choice, stored_evidence, token_order


class TierEvictor(Eviction):
    """Gives tokens their tiers, by their scores and by the layer's share of whole ones.

    A layer's share is relative to the strongest layer's, which is known when the last layer is done: until then the
    strongest so far stands for it, or, of a first prompt, all stay whole. In this time a layer holds less than twice a
    budget in bytes.

    Attributes:
        costs: bytes of a token in few bits and whole; known with the first update.
        strength: f32 (B,), by which layers are compared; None before a prompt, or where nobody asks attention.
        provisional: bool (B*H,), rows whose tiers are not final yet; None if there are none.
    """

    by_row, by_head = ("strength",), ("scores", "provisional")
    costs: tuple[int, int]

    def forget(self) -> None:
        super().forget()
        self.strength: Tensor | None = None
        self.prompts = 0
        self.provisional: Tensor | None = None

    def new_store(self, keys: Tensor, values: Tensor) -> KVStore:
        store, policy = super().new_store(keys, values), self.policy
        self.costs = policy.token_bytes(store.layout, keys.shape[-1], values.shape[-1], keys.dtype.itemsize)
        return store

    @property
    def full_at(self) -> int:
        return self.trim_at or 1 + self.most_held(0)[1]

    @property
    def keeps_query(self) -> bool:
        """Always: a trim is as likely by the next step as by any."""
        return True

    def most_held(self, room: int) -> tuple[int, ...]:
        """See `Eviction.most_held`; all in few bits, and all whole."""
        tokens, most = self.policy.tokens, self.policy.budget_bytes
        return (tokens, tokens) if most is None else (most // self.costs[0], most // self.costs[1])

    def _room(self, length: Any, few: Any) -> Any:
        """Whole tokens that a row has room for, of which ``few`` are in few bits; negative where it is over its budget.

        Of numbers, or of i64 tensors.
        """
        most, (low, whole) = self.policy.budget_bytes, self.costs
        return self.policy.tokens - length if most is None else (most - length * whole + few * (whole - low)) // whole

    def _rooms(self) -> Tensor:
        """`_room` of each row of the store: i64 (B*H,)."""
        counters = self.layer.held().counters
        return self._room(counters[LENGTH].long(), run_count(counters, 0, "keys").long())

    def _plan_trim(self, room: int) -> None:
        self.trim_at = self.layer.seen + 1 + max(room, 0)

    @property
    def newest(self) -> int:
        """Newest tokens of a row, which stay as they are."""
        return max(self.policy.window, self.layer.hold)

    # A first prompt.

    def _cut(self, seen: QueryWindow, keys: Tensor, values: Tensor) -> bool:
        """See `Eviction.cut_prompt`; the host asks the device nothing until the last layer is done."""
        layer, policy = self.layer, self.policy
        room = 0 if layer.padding is not None else self._room_of_prompt()
        if not room:
            return False
        scores, statistics, candidates = [], [], prompt_candidates(keys, values)
        for _, found in evidence_of(candidates, policy.evidence, policy.queries, seen.query, seen.arguments):
            scores.append(policy.scores(found))
            if policy.evidence:
                statistics.append(policy.layer_statistics(found.attention, found.past(policy.window)))
        strength = self._strength_of(statistics)
        length = candidates.length[:: candidates.heads]
        held, rows = torch.full_like(length, room), frozenset({(layer.seen, room)})
        newest = max(self.newest, *layer.held().sizes.local)
        choice = keep(torch.cat(scores), keys, values, length, held, rows, 0, newest)
        provisional = torch.ones(len(choice.scores), dtype=torch.bool, device=layer.device)
        store_choice(layer, choice, policy.window, keeps_columns=True)
        self.pending = None
        self.strength, self.scores, self.provisional = strength, choice.scores, provisional
        self.prompts += 1
        self._assign_tiers()
        return True

    def _room_of_prompt(self) -> int:
        """Tokens of a row that a first prompt is cut to; 0 where it has to go the general way."""
        layer, policy, store = self.layer, self.policy, self.layer.held()
        sizes = store.sizes
        newest, unit = max(self.newest, *sizes.local), sizes.unit[0]
        past, alike = layer.seen - newest, sizes.local[0] == sizes.local[1] and sizes.unit[1] == unit
        # Columns are kept of what is sealed, which is to be all but the newest tokens.
        if layer.seen < self.full_at or past <= 0:
            return 0
        if not store.seals_widely or sizes.sink or not alike:
            return 0
        # The number is what the budget could hold in few bits.
        best = policy.most_kept(past, self.costs)
        # All whole, they would be many bytes where a whole token takes more than two in few bits.
        budget, held = policy.budget_bytes, (best + newest) * self.costs[1]
        if not best or (budget is not None and held >= 2 * budget):
            return 0
        return min(-(-best // unit) * unit, past) + newest

    # Judging and trimming.

    def _judge(self, seen: QueryWindow) -> None:
        store, policy, due = self.layer.held(), self.policy, self.layer.seen >= self.full_at
        where = positions(store.state)
        order = token_order(store, where)
        scores, statistics = torch.empty(order.shape, device=order.device, dtype=torch.float32), []
        for rows, found in stored_evidence(policy, store, seen, where, order):
            scores[rows] = policy.scores(found)
            if seen.prompt is not None and policy.evidence:
                statistics.append(policy.layer_statistics(found.attention, found.past(policy.window)))
        if seen.prompt is not None:
            strength = self._strength_of(statistics)
            if strength is not None and self.strength is not None:
                strength = torch.where(seen.prompt, strength, self.strength)
            self.strength = strength
            self.prompts += 1
        if due:
            prompt = torch.zeros_like(seen.real[:, 0]) if seen.prompt is None else seen.prompt
            self._trim(scores, prompt.repeat_interleave(store.fold), where, order)
        if seen.prompt is not None:
            self._assign_tiers()

    def _strength_of(self, statistics: list[Tensor]) -> Tensor | None:
        """f32 (B,) of the statistics of folded rows."""
        if not statistics:
            return None
        return self.policy.strength(torch.cat(statistics).unflatten(0, (self.layer.batch_size, -1)))

    def share(self) -> Tensor:
        """The layer's share of whole tokens in each row, f32 (B*H,), by layers that have met as many prompts."""
        own = self.strength
        alike = [x.strength for x in self.group.members if x.strength is not None and x.prompts == self.prompts]
        if own is None or not alike:
            own = most = torch.ones(self.layer.batch_size, device=self.layer.device, dtype=torch.float32)
        else:
            most = torch.stack([strength.to(own.device) for strength in alike]).amax(0)
        return self.policy.share(own, most).repeat_interleave(self.layer.held().fold)

    def targets(
        self,
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
            scores: f32 (B*H, n), oldest token first.
            share: f32 (B*H,), the layer's share of whole tokens.
            over: bool (B*H,), the rows; others stay as they are.
            prompt: bool (B*H,), rows that have had a prompt just now.
            where, order: what `positions` and `token_order` say.
            final: whether shares are final; until then a prompt keeps as many tokens as could be held in few bits.

        Returns:
            Targets as `requantized` takes them, and i64 (B*H, n): ranks of the tokens that are left, oldest first.
        """
        length, policy, costs = state.counters[LENGTH].long(), self.policy, self.costs
        past = (length - self.newest).clamp(min=0)
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
        target = runs.new_full((order.shape[0], tail + state.windows[2].shape[2]), STAY).scatter_(1, order, runs)
        left = ((runs != EVICT) & (rank < length[:, None])).to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return target, left

    def _trim(self, scores: Tensor, prompt: Tensor, where: Tensor, order: Tensor) -> None:
        """Cuts rows that have outgrown their budget; arguments are those of `targets`."""
        layer, store = self.layer, self.layer.held()
        over = self._rooms() < 0
        # Until all layers are done, as many tokens as the budget could hold in few bits.
        final = all(x.prompts == self.prompts for x in self.group.members)
        left = None
        if over.any():
            target, left = self.targets(store.state, scores, self.share(), over, prompt, where, order, final)
            done = requantized(store.state, store.layout, store.scheme, target, where)
            if done is not None:
                store.adopt(done.state)
            layer.evicted = True
            layer.edition += 1
            self.provisional = over & prompt if not final else None
        self.scores = None
        if left is not None and not final:
            self._remember(scores.gather(1, left[:, : store.longest]))
        self._plan_trim(int(self._rooms().min()))

    def _assign_tiers(self) -> None:
        """Assigns tiers to what a prompt left in all layers, once the last one has seen it: shares are final then.

        Layers that are alike are requantized as one store of all their rows, and the host asks the device once: some
        hundred small operations for each layer by itself would be waited for when a prompt is done.
        """
        members: list[TierEvictor] = self.group.members
        if any(member.prompts != self.prompts for member in members):
            return
        groups: dict[tuple[object, ...], list[TierEvictor]] = {}
        for member in members:
            if member.provisional is not None and member.scores is not None:
                state = member.layer.held().state
                windows = tuple(window.shape[2] for window in state.windows)
                sizes = state.batch, tuple(state.dims.values()), windows, used_blocks(state)
                alike = state.device, state.dtype, sizes, member.policy, member.costs, member.newest
                groups.setdefault(alike, []).append(member)
        for together in groups.values():
            _assign_together(together)
        for member in members:
            member.provisional = member.scores = None
            member.layer.bind()

    # Files.

    def pack(self) -> Packed:
        numbers, tensors = super().pack()
        return numbers | {"prompts": self.prompts}, tensors

    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().unpack(found, tensors)
        self.prompts = int(found["prompts"])


@outside_inference_mode
def _assign_together(alike: Sequence[TierEvictor]) -> None:
    """Assigns tiers in layers that are alike, which all have scores and rows whose tiers are not final."""
    one, state = alike[0], joined([member.layer.held().state for member in alike])
    store, where = one.layer.held(), positions(state)
    order, over = token_order(state, where), torch.cat([x.provisional for x in alike if x.provisional is not None])
    share = torch.cat([member.share() for member in alike])
    # Layers where sealing waits for the next update may hold tokens that have no score yet.
    padded = [pad(x.scores, (0, state.longest), value=torch.inf) for x in alike if x.scores is not None]
    scores = torch.cat([x[:, : state.longest] for x in padded])
    target, _ = one.targets(state, scores, share, over, over, where, order)
    done, count = requantized(state, store.layout, store.scheme, target, where), store.batch
    for i, member in enumerate(alike):
        # No token has moved.
        if done is None:
            member._plan_trim(int(member._rooms().min()))
            continue
        layer, store, rows = member.layer, member.layer.held(), slice(i * count, (i + 1) * count)
        held, states = [each[rows] for each in done.held], done.rows[rows]
        blocks = [pages_for(store.format, run, max(each)) for run, each in enumerate(held)]
        own = part(done.state, rows.start, count, blocks)
        store.adopt(own.replace(max(held[-1]), states=frozenset(states)))
        layer.evicted = True
        layer.edition += 1
        member._plan_trim(min(member._room(row.length, few) for row, few in zip(states, held[0], strict=True)))
