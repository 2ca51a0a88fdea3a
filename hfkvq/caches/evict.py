"""The layer of schemes that evict: ranks tokens by attention, and keeps a budget."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, run_count

from .first_prompt import Waiting, older_that_stay
from .headwise import HeadwiseStore
from .layer import KVLayer
from .observe import Observation, prompt_attention, stored_attention, token_order
from .peers import Peers
from .ranking import tier_widths
from .scheme import Scheme
from .store import MAX_STEP, SIDES
from .store.columns import positions, run_columns
from .store.moves import EVICT, STAY
from .store.prompt_eviction import Cut, Tiers, store_best, store_tiers
from .store.requantize import requantize_by_tiers

logger = logging.getLogger(__name__)


def layer_class(scheme: Scheme) -> type[KVLayer]:
    """The class of layer that a scheme works in."""
    return EvictingLayer if "probs" in scheme.needs else KVLayer


class EvictingLayer(KVLayer):
    """Cache layer that holds a budget of tokens, each KV head its own.

    A prompt beyond the budget is cut to its best tokens in each layer as it passes, so only one layer at a time holds
    it whole. A layer's share of whole tokens is relative to the strongest layer's, which is known when the last layer
    is done: until then the strongest so far stands for it, or, of a first prompt, all stay whole (see
    `hfkvq.caches.first_prompt`). In this time a layer holds less than twice a budget in bytes.

    Later input of up to 16 tokens is a step: a trim is due when a row has outgrown its budget, and asks the newest
    queries. Attention functions that know no handles never show their queries; then nothing is evicted.

    The scheme has, beside what `Scheme` says: ``window``, ``low_bits``, ``beta``, ``score``, ``budget_bytes``,
    ``tokens``, ``token_bytes``, ``kept``, ``whole``, ``token_scores``, ``layer_statistics``, ``strength``
    and ``share``; see `hfkvq.caches.schemes.Arkv`.
    """

    scheme: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.peers = Peers([self])

    def _forget(self) -> None:
        super()._forget()
        self.evicted = False
        self.strength: Tensor | None = None
        self.prompts = 0
        self.real: Tensor | None = None
        self.fresh: Tensor | None = None
        self.pending: Observation | None = None
        # f32 (B*H, n), oldest token first: until tiers are assigned, or for good where scores accumulate.
        self.scores: Tensor | None = None
        self.cut: Tensor | None = None
        # Of a first prompt, until tiers are assigned.
        self.first: Cut | None = None
        self.trim_at = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for tensors of this shape, dtype and device."""
        scheme, dims = self.scheme, (key_states.shape[-1], value_states.shape[-1])
        layout = scheme.layout(*dims)
        costs = scheme.token_bytes(layout, *dims, key_states.dtype.itemsize)
        if scheme.budget_bytes is not None and scheme.budget_bytes <= scheme.window * costs[1]:
            raise ValueError(
                f"budget_bytes: got {scheme.budget_bytes}, allowed more than {scheme.window * costs[1]}, which the "
                f"window of {scheme.window} tokens takes in each KV head in {key_states.dtype}; raise it, or lower "
                "window."
            )
        # A capacity bounds the tokens seen; pages go by the budget, and move.
        self.store = HeadwiseStore(layout, scheme, key_states, value_states)
        self.dtype, self.device, self.costs = key_states.dtype, key_states.device, costs
        self.heads, self.batch_size = key_states.shape[1], key_states.shape[0]
        self.is_initialized = True

    def _held(self) -> HeadwiseStore:
        store = super()._held()
        assert isinstance(store, HeadwiseStore), "made in lazy_initialization"
        return store

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `KVLayer.update`."""
        unseen = self.new_columns and self.store is not None
        handles = super().update(key_states, value_states, *args, **kwargs)
        if unseen and not self.peers.warned:
            self.peers.warned = True
            logger.warning(
                "%s: attention did not show its queries, so nothing can be evicted and the budget is not kept; use the "
                "'hfkvq' attention (attach=True) or sdpa.",
                self.scheme.name,
            )
        return handles

    # What attention functions call.

    def begin(self, mask: Tensor | None, queries: int) -> bool:
        """See `KVLayer.begin`. A prompt on a cache that has evicted tokens is attended in pages too."""
        store, new = self._held(), self.new_columns
        starts = any(state.length == 0 for state in store.states)
        asks = new > MAX_STEP or starts or self.scheme.beta > 0 or self.seen >= self._trim_at()
        if new and asks:
            long = torch.full((self.batch_size,), new > MAX_STEP, dtype=torch.bool, device=self.device)
            self.fresh = long | (store.row_lengths == 0) if starts or new > MAX_STEP else None
        fits = super().begin(mask, queries)
        if new and asks:
            newest = min(self.scheme.window, self.new_columns)
            column = torch.arange(self.new_columns - newest, self.new_columns, device=self.device)
            self.real = torch.ones(self.batch_size, newest, dtype=torch.bool, device=self.device)
            if self.padding is not None:
                self.real = column >= self.padding.lead[:, None]
                if self.padding.source is not None:
                    self.real = self.real & (self.padding.source[:, column] == column)
        if not fits and self.evicted:
            # They stay whole until their attention is done.
            super()._settle()
            return True
        return fits

    def plain_step(self, query: Tensor, scaling: float, softcap: float, mask: Tensor | None = None) -> Tensor | None:
        """See `KVLayer.plain_step`; None where a trim may be due, or the query's scores are to be remembered."""
        if self.scheme.beta > 0 or self.seen >= self._trim_at() or not self._held().ahead(1).shortest:
            return None
        return super().plain_step(query, scaling, softcap, mask)

    def attend(
        self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """See `KVLayer.attend`; any number of queries."""
        queries = query.shape[2]
        if queries <= MAX_STEP:
            return super().attend(query, mask, scaling, softcap, sinks)
        outs = []
        for first in range(0, queries, MAX_STEP):
            own = slice(first, min(first + MAX_STEP, queries))
            if mask is None:
                newest = torch.arange(own.start, own.stop, device=query.device) + self.seen - queries
                shown = torch.arange(self.seen, device=query.device) <= newest[:, None]
                shown = shown[None, None]
            else:
                shown = mask if mask.shape[2] == 1 else mask[:, :, own]
            outs.append(super().attend(query[:, :, own], shown, scaling, softcap, sinks))
        return torch.cat(outs, 2)

    def finish(
        self,
        query: Tensor,
        mask: Tensor | None = None,
        scaling: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """Keeps the newest queries if they are to be asked; see `KVLayer.finish`."""
        if self.real is not None:
            if self.new_columns == 1 and query.shape[2] > 1:
                # Heads where tokens are expected: see `handle`.
                query = query.reshape(query.shape[0], -1, 1, query.shape[3])
            newest = self.real.shape[1]
            if mask is not None and mask.shape[2] > newest:
                mask = mask[:, :, -newest:]
            factor = query.shape[-1] ** -0.5 if scaling is None else scaling
            query = query[:, :, -newest:].detach()
            self.pending = Observation(query, self.real, mask, factor, softcap, sinks, self.fresh)
        self.real = self.fresh = None
        super().finish(query)

    def _settle(self, commit: bool = True) -> None:
        if commit and self.pending is not None and self.staged is not None:
            best = self._older_that_stay(self.pending)
            if best:
                self._cut(self.pending, best)
                return
        super()._settle(commit)
        if commit and self.pending is not None:
            seen, self.pending = self.pending, None
            self._judge(seen)

    # Ranking and trimming.

    def _trim_at(self) -> int:
        """Tokens seen at which a row may outgrow its budget."""
        if self.trim_at:
            return self.trim_at
        budget = self.scheme.budget_bytes
        return 1 + (self.scheme.tokens if budget is None else budget // self.costs[1])

    def _older_that_stay(self, seen: Observation) -> int:
        """Tokens that a first prompt is cut to, beside the newest; 0 where it is none, or has to go the general way."""
        store, newest = self._held(), max(self.scheme.window, self._hold())
        first = store.longest == 0 and self.padding is None and seen.prompt is not None
        shown = seen.mask is None or seen.mask.shape[-1] >= self.seen
        if not first or not shown or self.staged_length != self.seen or self.seen < self._trim_at():
            return 0
        return older_that_stay(self.scheme, store.layout, self.costs, self.seen, newest)

    def _cut(self, seen: Observation, best: int) -> None:
        """Does of a first prompt what `KVStore.extend` and `_judge` would, without asking the device anything."""
        assert self.staged is not None
        assert seen.prompt is not None
        store, scheme = self._held(), self.scheme
        keys, values = (store._rotated(store.folded(x), side) for x, side in zip(self.staged, SIDES, strict=True))
        rows, tail = keys.shape[0], max(scheme.window, self._hold())
        rank = torch.arange(self.seen, device=self.device)
        past = (rank < self.seen - scheme.window).expand(rows, -1)
        scores, statistics = torch.empty(rows, self.seen, device=self.device), []
        for own, paid in prompt_attention(keys, store, seen):
            scores[own] = scheme.token_scores(paid)
            statistics.append(scheme.layer_statistics(paid, past[own]))
        if scheme.score == "recency":
            scores = rank.float().expand(rows, -1)
        strength = scheme.strength(torch.cat(statistics).unflatten(0, (self.batch_size, -1)))
        order = scores[:, : self.seen - tail].argsort(dim=1, descending=True, stable=True)
        chosen = order[:, :best].sort(dim=1).values
        left = torch.cat([scores.gather(1, chosen), scores[:, -tail:]], 1)
        cut = torch.ones(rows, dtype=torch.bool, device=self.device)
        first = store_best(store, keys, values, chosen, tail)
        # Not earlier: if there was no memory, the tokens are still staged.
        self.staged = self.pending = None
        self.uncommitted, self.strength = False, strength
        self.scores, self.cut = left, cut
        self.evicted = True
        self.edition += 1
        self.first = first._replace(edition=self.edition)
        self.prompts += 1
        self.peers.report(self.prompts)

    def _judge(self, seen: Observation) -> None:
        # Tokens have come since; what a cut left need not be kept for layers that never had their prompt.
        self.first = None
        store, due = self._held(), self.seen >= self._trim_at()
        where = positions(store)
        order = token_order(store, where)
        rank = torch.arange(order.shape[1], device=order.device)
        past = rank < (store.counters[LENGTH] - self.scheme.window)[:, None]
        scores, statistics = torch.zeros(order.shape, device=order.device), []
        # Steps that rank by age ask nobody.
        asked = seen.prompt is not None or self.scheme.score != "recency"
        for rows, paid in stored_attention(store, seen, where, order) if asked else ():
            scores[rows] = self.scheme.token_scores(paid)
            if seen.prompt is not None:
                statistics.append(self.scheme.layer_statistics(paid, past[rows]))
        if self.scheme.beta > 0:
            scores = self._accumulated(scores)
        if self.scheme.score == "recency":
            scores = rank.float().expand(order.shape)
        if seen.prompt is not None:
            strength = self.scheme.strength(torch.cat(statistics).unflatten(0, (self.batch_size, -1)))
            self.strength = strength if self.strength is None else torch.where(seen.prompt, strength, self.strength)
            self.prompts += 1
        if due:
            prompt = torch.zeros_like(seen.real[:, 0]) if seen.prompt is None else seen.prompt
            self._trim(scores, prompt.repeat_interleave(store.fold), None, where, order)
        elif self.scheme.beta > 0:
            self._remember(scores)
        if seen.prompt is not None:
            self.peers.report(self.prompts)

    def _accumulated(self, scores: Tensor) -> Tensor:
        """Scores with their history; a token without one counts as it is."""
        if self.scores is None:
            return scores
        old = self.scores[:, : scores.shape[1]]
        old = torch.nn.functional.pad(old, (0, scores.shape[1] - old.shape[1]), value=torch.nan)
        beta = self.scheme.beta
        return torch.where(old.isnan(), scores, beta * old + (1 - beta) * scores)

    def _remember(self, scores: Tensor) -> None:
        """Keeps scores, NaN behind a row's last token: what comes there has no history."""
        rank = torch.arange(scores.shape[1], device=scores.device)
        self.scores = scores.masked_fill(rank >= self._held().counters[LENGTH, :, None], torch.nan)

    def waiting(self) -> Waiting | None:
        """What the tiers of a first prompt follow from, if this layer has cut one and holds nothing else."""
        store, cut = self.store, self.first
        if store is None or cut is None or self.scores is None or self.strength is None:
            return None
        if not cut.stands(store.state, self.edition):
            return None
        return Waiting(store.state, store.layout, cut, self.scheme, self.costs, self.heads, self.scores, self.strength)

    def assign(self, tiers: Tiers | None = None) -> None:
        """Assigns tiers to what a prompt left, now that every layer's share is final; ``tiers`` if they are known."""
        if tiers is not None and self.first is not None:
            store_tiers(self._held(), tiers)
            self.edition += 1
            self.trim_at = self.seen + 1 + max(self._least_room(tiers, self.first.tail), 0)
        elif self.cut is not None and self.scores is not None:
            # Where sealing waits for the next update, this layer may have tokens by now that nobody has judged.
            since = max(self._held().longest - self.scores.shape[1], 0)
            where = positions(self._held())
            scores = torch.nn.functional.pad(self.scores, (0, since), value=torch.inf)
            self._trim(scores, self.cut, self.cut, where, token_order(self._held(), where))
        self.cut = self.first = None
        if not self.scheme.beta:
            self.scores = None

    def _trim(self, scores: Tensor, prompt: Tensor, rows: Tensor | None, where: Tensor, order: Tensor) -> None:
        """Cuts rows to their budget: those that have outgrown it, or finally those of ``rows`` (bool (B*H,)).

        ``prompt`` (likewise) are those that have had a prompt just now. ``where`` and ``order`` are what `positions`
        and `token_order` say.
        """
        store, scheme = self._held(), self.scheme
        length = store.counters[LENGTH].long()
        over = self._room() < 0 if rows is None else rows
        if not over.any():
            self.trim_at = self.seen + 1 + max(int(self._room().min()), 0)
            self.scores = None
            if scheme.beta > 0:
                self._remember(scores)
            return
        share = self._share().repeat_interleave(store.fold)
        rank = torch.arange(order.shape[1], device=order.device)
        past = (length - max(scheme.window, self._hold())).clamp(min=0)
        # Until all layers are done, as many tokens as the budget could hold in few bits.
        final = rows is not None or all(x.prompts == self.prompts for x in self.peers.layers)
        kept = scheme.kept(past, share, self.costs, prompt)
        stay = kept
        if not final:
            stay = torch.where(prompt, scheme.kept(past, torch.zeros_like(share), self.costs, prompt), kept)
        narrow, tail = run_columns(store)[0], run_columns(store)[-1][0]
        is_whole = (order < narrow[0]) | (order >= narrow[0] + narrow[1])
        judged = rank < past[:, None]
        bits = tier_widths(
            scores.masked_fill(~judged, -torch.inf), stay, scheme.whole(kept, share), is_whole, scheme.low_bits
        )
        runs = torch.full(bits.shape, EVICT, dtype=torch.int8, device=bits.device)
        for i, (fmt, _) in enumerate(store.format.runs):
            runs = torch.where(bits == fmt.bits, i, runs)
        runs = torch.where(judged & over[:, None], runs, STAY).to(torch.int8)
        target = torch.full(
            (order.shape[0], tail + store.windows[2].shape[2]), STAY, dtype=torch.int8, device=runs.device
        )
        target.scatter_(1, order, runs)
        requantize_by_tiers(store, target, where)
        self.evicted = True
        self.edition += 1
        # What is left of the scores, oldest first again.
        left = ((runs != EVICT) & (rank < length[:, None])).to(torch.int8).argsort(dim=1, descending=True, stable=True)
        self.scores = None
        if scheme.beta > 0 or not final:
            self._remember(scores.gather(1, left[:, : store.longest]))
        self.cut = over & prompt if not final else None
        self.trim_at = self.seen + 1 + max(int(self._room().min()), 0)

    def _share(self) -> Tensor:
        """ρ of each of the layer's rows: f32 (B,)."""
        most = self.peers.greatest(self.prompts, self.device)
        if self.strength is None or most is None:
            most = own = torch.ones(self.batch_size, device=self.device)
        else:
            own = self.strength
        return self.scheme.share(own, most)

    def _room(self) -> Tensor:
        """Whole tokens that each folded row has room for, negative where it has outgrown its budget: i64 (B*H,)."""
        store = self._held()
        length = store.counters[LENGTH].long()
        if self.scheme.budget_bytes is None:
            return self.scheme.tokens - length
        low, whole = self.costs
        held = length * whole - run_count(store.counters, 0, "keys").long() * (whole - low)
        return (self.scheme.budget_bytes - held).div(whole, rounding_mode="floor")

    def _least_room(self, tiers: Tiers, tail: int) -> int:
        """The least of `_room` once tokens have these tiers, which the host knows."""
        longest, budget, (low, whole) = tiers.lengths(tail), self.scheme.budget_bytes, self.costs
        if budget is None:
            return self.scheme.tokens - max(longest)
        held = [n * whole - few * (whole - low) for n, few in zip(longest, tiers.kept[0], strict=True)]
        return (budget - max(held)) // whole

    # Rows and lengths change.

    def crop(self, tokens_to_remove: int) -> None:
        """See `KVLayer.crop`; only tokens that no trim has looked at.

        Raises:
            NotImplementedError: older tokens of a cache that has evicted some; nothing is changed then.
        """
        super().crop(tokens_to_remove)
        if self.scores is not None and self.store is not None:
            self._remember(self.scores)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `KVLayer.reorder_cache`."""
        self._settle_all()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `KVLayer.batch_repeat_interleave`."""
        self._settle_all()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `KVLayer.batch_select_indices`."""
        self._settle_all()
        super().batch_select_indices(indices)

    def _settle_all(self) -> None:
        """Layers that wait with sealing compare their strengths before the rows of any of them move."""
        if self.defer:
            for layer in self.peers.layers:
                layer._settle()

    def _rows(self, rows: Tensor) -> None:
        super()._rows(rows)
        if self.strength is not None:
            self.strength = self.strength[rows.to(self.strength.device)]
        if self.scores is not None:
            self.scores = self.scores[self._held().rows_of(rows.to(self.scores.device))]
        if self.cut is not None:
            self.cut = self.cut[self._held().rows_of(rows.to(self.cut.device))]

    def notes(self) -> list[Tensor]:
        """See `KVLayer.notes`."""
        return [*super().notes(), *(x for x in (self.strength, self.scores, self.cut) if x is not None)]

    def materialized(self, side: Any) -> Tensor:
        """See `KVLayer.materialized`.

        Raises:
            RuntimeError: tokens have been evicted; zeros in their place would draw attention.
        """
        if self.evicted:
            raise RuntimeError(
                f"{self.scheme.name}: tokens have been evicted, so this cache can be attended to by the 'hfkvq' "
                "attention (attach=True) and by sdpa only."
            )
        return super().materialized(side)

    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingLayer:
        """Independent tensors, shared scheme, and peers that are copies too."""
        new = super().__deepcopy__(memo)
        memo[id(self)] = new
        new.peers = copy.deepcopy(self.peers, memo)  # type: ignore[attr-defined]
        return new  # type: ignore[return-value]
