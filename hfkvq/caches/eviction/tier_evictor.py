"""Evictor of a layer for a scheme of tiers: kept tokens are whole or in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq.kernels.decode import LENGTH, run_count

from ..base import outside_inference_mode
from ..schemes.arkv import Arkv
from ..schemes.score_inputs import Evidence, evidence_of, prompt_candidates, tier_widths
from ..store import KVStore, StoreState
from ..store.packing import Packed
from ..store.requantize import EVICT, STAY, Requantized, positions, requantize, requantized, run_columns
from ..store.rows import joined, part, used_blocks
from ..store.windows import pages_for
from .evictor import (
    Eviction,
    QueryWindow,
    keep,
    store_choice,
    stored_evidence,
    token_order,
)


class Budget(NamedTuple):
    """Budget of a row's KV head: most tokens, or if not None bytes; and bytes of a token in few bits and whole."""

    tokens: int
    bytes: int | None
    costs: tuple[int, int]

    def check(self, window: int, dtype: torch.dtype) -> None:
        """Raises ValueError if there is no room for more than the window of newest tokens."""
        least = window * self.costs[1]
        if self.bytes is not None and self.bytes <= least:
            raise ValueError(
                f"budget_bytes: got {self.bytes}, allowed more than {least}, which the window of {window} tokens takes "
                f"in each KV head in {dtype}; raise it, or lower window."
            )

    @property
    def most(self) -> tuple[int, int]:
        """Most tokens that fit: all in few bits, and all whole."""
        if self.bytes is None:
            return self.tokens, self.tokens
        low, whole = self.costs
        return self.bytes // low, self.bytes // whole

    def room(self, store: KVStore) -> Tensor:
        """Whole tokens that each row of a store has room for, negative where it has outgrown the budget: i64 (B*H,)."""
        length = store.counters[LENGTH].long()
        if self.bytes is None:
            return self.tokens - length
        low, whole = self.costs
        held = length * whole - run_count(store.counters, 0, "keys").long() * (whole - low)
        return (self.bytes - held).div(whole, rounding_mode="floor")

    def least_room(self, few: list[int], lengths: list[int]) -> int:
        """The least of `room` for rows of these lengths with so many tokens in few bits, which the host knows."""
        if self.bytes is None:
            return self.tokens - max(lengths)
        low, whole = self.costs
        held = [n * whole - narrow * (whole - low) for n, narrow in zip(lengths, few, strict=True)]
        return (self.bytes - max(held)) // whole


def tier_targets(
    policy: Arkv,
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
        newest: newest tokens of a row, which stay as they are.
        scores: f32 (B*H, n), oldest token first.
        share: f32 (B*H,), the layer's share of whole tokens.
        over: bool (B*H,), the rows; others stay as they are.
        prompt: bool (B*H,), rows that have had a prompt just now.
        where, order: what `positions` and `token_order` say.
        final: whether shares are final; until then a prompt keeps as many tokens as the budget could hold in few bits.

    Returns:
        Targets as `requantized` takes them, and i64 (B*H, n): ranks of the tokens that are left, oldest first.
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


class TierEvictor(Eviction):
    """Gives tokens their tiers, by their scores and by the layer's share of whole ones.

    A layer's share is relative to the strongest layer's, which is known when the last layer is done: until then the
    strongest so far stands for it, or, of a first prompt, all stay whole. In this time a layer holds less than twice a
    budget in bytes.

    Attributes:
        budget: of each KV head; known with the first update.
        strength: f32 (B,), by which layers are compared; None before a prompt, or where nobody asks attention.
        provisional: bool (B*H,), rows whose tiers are not final yet; None if there are none.
    """

    by_row, by_head = ("strength",), ("scores", "provisional")
    budget: Budget

    def forget(self) -> None:
        super().forget()
        self.strength: Tensor | None = None
        self.prompts = 0
        self.provisional: Tensor | None = None

    def new_store(self, keys: Tensor, values: Tensor) -> KVStore:
        store, policy = super().new_store(keys, values), self.policy
        costs = policy.token_bytes(store.layout, keys.shape[-1], values.shape[-1], keys.dtype.itemsize)
        self.budget = Budget(policy.tokens, policy.budget_bytes, costs)
        self.budget.check(policy.window, keys.dtype)
        return store

    @property
    def full_at(self) -> int:
        return self.trim_at or 1 + self.budget.most[1]

    @property
    def keeps_query(self) -> bool:
        """Always: a trim is as likely by the next step as by any."""
        return True

    def most_held(self, room: int) -> tuple[int, ...]:
        """See `Eviction.most_held`; all in few bits, and all whole."""
        return self.budget.most

    @property
    def newest(self) -> int:
        """Newest tokens of a row, which stay as they are."""
        return max(self.policy.window, self.layer.hold)

    # A first prompt.

    def cut_prompt(self) -> bool:
        """See `Eviction.cut_prompt`; the host asks the device nothing until the last layer is done."""
        layer, policy, seen = self.layer, self.policy, self.pending
        if seen is None or layer.staged is None or layer.padding is not None or not self.may_be_cut(seen):
            return False
        room = self._room_of_prompt()
        if not room:
            return False
        scores, statistics, (keys, values) = [], [], layer.staged
        given = policy.evidence, policy.queries, seen.query, seen.arguments
        candidates = prompt_candidates(keys, values)
        for _, found in evidence_of(candidates, *given):
            scores.append(policy.scores(found))
            statistics += self._statistics(found)
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
        layer, policy, store, costs = self.layer, self.policy, self.layer.held(), self.budget.costs
        sizes = store.sizes
        newest, unit = max(self.newest, *sizes.local), sizes.unit[0]
        past, alike = layer.seen - newest, sizes.local[0] == sizes.local[1] and sizes.unit[1] == unit
        # Columns are kept of what is sealed, which is to be all but the newest tokens.
        if layer.seen < self.full_at or past <= 0:
            return 0
        if not store.seals_widely or sizes.sink or not alike:
            return 0
        # The number is what the budget could hold in few bits.
        best = int(
            policy.kept(
                torch.tensor([past], dtype=torch.int64, device="cpu"),
                torch.zeros(1, dtype=torch.float32, device="cpu"),
                costs,
                torch.ones(1, dtype=torch.bool, device="cpu"),
            )
        )
        # All whole, they would be many bytes where a whole token takes more than two in few bits.
        budget, held = policy.budget_bytes, (best + newest) * costs[1]
        if not best or (budget is not None and held >= 2 * budget):
            return 0
        return min(-(-best // unit) * unit, past) + newest

    # Judging and trimming.

    def _judge(self, seen: QueryWindow) -> None:
        store, policy, due = self.layer.held(), self.policy, self.layer.seen >= self.full_at
        where = positions(store)
        order = token_order(store, where)
        scores, statistics = torch.empty(order.shape, device=order.device, dtype=torch.float32), []
        for rows, found in stored_evidence(policy, store, seen, where, order):
            scores[rows] = policy.scores(found)
            if seen.prompt is not None:
                statistics += self._statistics(found)
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

    def _statistics(self, found: Evidence) -> list[Tensor]:
        """Attention of some folded rows; None where no scheme asks for it."""
        policy = self.policy
        if "attention" not in policy.evidence:
            return []
        return [policy.layer_statistics(found.attention, found.past(policy.window))]

    def _strength_of(self, statistics: list[Tensor]) -> Tensor | None:
        """f32 (B,) of the statistics of folded rows."""
        if not statistics:
            return None
        return self.policy.strength(torch.cat(statistics).unflatten(0, (self.layer.batch_size, -1)))

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal in layers whose tiers can be assigned together."""
        state = self.layer.held().state
        windows = tuple(window.shape[2] for window in state.windows)
        sizes = state.batch, tuple(state.dims.values()), windows, used_blocks(state)
        return state.device, state.dtype, sizes, self.policy, self.budget, self.newest

    def share(self) -> Tensor:
        """The layer's share of whole tokens in each row, f32 (B*H,), by layers that have met as many prompts."""
        own = self.strength
        alike = [x.strength for x in self.group.members if x.strength is not None and x.prompts == self.prompts]
        if own is None or not alike:
            own = most = torch.ones(self.layer.batch_size, device=self.layer.device, dtype=torch.float32)
        else:
            most = torch.stack([strength.to(own.device) for strength in alike]).amax(0)
        return self.policy.share(own, most).repeat_interleave(self.layer.held().fold)

    def take_tiers(self, done: Requantized | None, rows: slice) -> None:
        """Takes the layer's part of what was made of several layers' rows; None where no token has moved."""
        layer, store = self.layer, self.layer.held()
        if done is None:
            self.trim_at = layer.seen + 1 + max(int(self.budget.room(store).min()), 0)
            return
        held, states = [each[rows] for each in done.held], done.rows[rows]
        blocks = [pages_for(store.format, run, max(each)) for run, each in enumerate(held)]
        own = part(done.state, rows.start, store.batch, blocks)
        store.adopt(own.replace(max(held[-1]), states=frozenset(states)))
        layer.evicted = True
        layer.edition += 1
        room = self.budget.least_room(held[0], [state.length for state in states])
        self.trim_at = layer.seen + 1 + max(room, 0)

    def _trim(self, scores: Tensor, prompt: Tensor, where: Tensor, order: Tensor) -> None:
        """Cuts rows that have outgrown their budget; arguments are those of `tier_targets`."""
        layer, store, policy = self.layer, self.layer.held(), self.policy
        over = self.budget.room(store) < 0
        # Until all layers are done, as many tokens as the budget could hold in few bits.
        final = all(x.prompts == self.prompts for x in self.group.members)
        left = None
        if over.any():
            share = self.share()
            given = policy, self.budget.costs, self.newest, store.state, scores, share
            target, left = tier_targets(*given, over, prompt, where, order, final)
            requantize(store, target, where)
            layer.evicted = True
            layer.edition += 1
            self.provisional = over & prompt if not final else None
        self.scores = None
        if left is not None and not final:
            self._remember(scores.gather(1, left[:, : store.longest]))
        self.trim_at = layer.seen + 1 + max(int(self.budget.room(store).min()), 0)

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
                groups.setdefault(member.kind, []).append(member)
        for alike in groups.values():
            _assign_together(alike)
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
    """Assigns tiers in layers of one `kind`, which all have scores and rows whose tiers are not final."""
    one, state = alike[0], joined([member.layer.held().state for member in alike])
    store, where = one.layer.held(), positions(state)
    order, over = token_order(state, where), torch.cat([x.provisional for x in alike if x.provisional is not None])
    share = torch.cat([member.share() for member in alike])
    # Layers where sealing waits for the next update may hold tokens that have no score yet.
    padded = [pad(x.scores, (0, state.longest), value=torch.inf) for x in alike if x.scores is not None]
    scores = torch.cat([x[:, : state.longest] for x in padded])
    given = one.policy, one.budget.costs, one.newest, state, scores, share
    target, _ = tier_targets(*given, over, over, where, order)
    done, rows = requantized(state, store.layout, store.scheme, target, where), store.batch
    for i, member in enumerate(alike):
        member.take_tiers(done, slice(i * rows, (i + 1) * rows))
