"""What a layer does for a scheme that evicts: ranks tokens by attention, and keeps a budget."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH

from ..first_prompt import Waiting, older_that_stay
from ..headwise import HeadwiseStore
from ..observe import Observation, prompt_attention, stored_attention, token_order
from ..ranking import Attention
from ..scheme import Layout
from ..store import MAX_STEP, SIDES
from ..store.columns import positions
from ..store.prompt_eviction import Cut, Tiers, store_best, store_tiers
from .base import LayerBase, Part
from .budget import Budget
from .group import LayerGroup
from .trim import trim


class EvictingScheme(Protocol):
    """What `Eviction` asks of a scheme that observes attention ("probs"); see `hfkvq.caches.schemes.Arkv`."""

    name: str
    window: int
    low_bits: int
    beta: float
    score: str
    budget_bytes: int | None

    @property
    def tokens(self) -> int: ...

    def layout(self, key_dim: int, value_dim: int) -> Layout: ...

    def token_bytes(self, layout: Layout, key_dim: int, value_dim: int, itemsize: int) -> tuple[int, int]: ...

    def kept(self, past: Tensor, share: Tensor, costs: tuple[int, int], prompt: Tensor) -> Tensor: ...

    def whole(self, kept: Tensor, share: Tensor) -> Tensor: ...

    def token_scores(self, seen: Attention) -> Tensor: ...

    def layer_statistics(self, seen: Attention, past: Tensor) -> Tensor: ...

    def strength(self, statistics: Tensor) -> Tensor: ...

    def share(self, own: Tensor, most: Tensor) -> Tensor: ...


class Eviction(Part):
    """Holds a layer to a budget of tokens, each KV head its own.

    A prompt beyond the budget is cut to its best tokens in each layer as it passes, so only one layer at a time holds
    it whole. A layer's share of whole tokens is relative to the strongest layer's, which is known when the last layer
    is done: until then the strongest so far stands for it, or, of a first prompt, all stay whole (see
    `hfkvq.caches.first_prompt`). In this time a layer holds less than twice a budget in bytes.

    Later input of up to 16 tokens is a step: a trim is due when a row has outgrown its budget, and asks the newest
    queries. Attention functions that know no handles never show their queries; then nothing is evicted.

    Attributes:
        group: the cache's layers that evict.
        budget: of each KV head; known with the first update.
        strength: f32 (B,), by which layers are compared; None before a prompt.
        prompts: that have come.
        pending: queries by which tokens are to be judged once all of them are stored.
        scores: f32 (B*H, n), oldest token first: until tiers are final, or for good where scores accumulate.
        provisional: bool (B*H,), rows whose tiers are not final yet; None if there are none.
        first_cut: what a first prompt was cut to, until tiers are final.
        trim_at: tokens seen at which the next trim is due; 0 where only the budget says.
        arguments: of the newest attention call, without its mask.
    """

    budget: Budget

    def __init__(self, layer: LayerBase) -> None:
        super().__init__(layer)
        self.scheme = cast(EvictingScheme, layer.scheme)
        self.group = LayerGroup([self])
        self.arguments = AttentionArguments(1.0)
        self.forget()

    def forget(self) -> None:
        """Forgets all tokens."""
        self.strength: Tensor | None = None
        self.prompts = self.trim_at = 0
        # Of the running attention call: queries that are no padding (B, n), and rows for which it is a prompt (B,).
        self._real: Tensor | None = None
        self._fresh: Tensor | None = None
        self.pending: Observation | None = None
        self.scores: Tensor | None = None
        self.provisional: Tensor | None = None
        self.first_cut: Cut | None = None

    def new_store(self, keys: Tensor, values: Tensor) -> HeadwiseStore:
        """An empty store for tensors of this shape, dtype and device.

        Raises:
            ValueError: the budget has no room for more than the window.
        """
        dims = keys.shape[-1], values.shape[-1]
        layout = self.scheme.layout(*dims)
        costs = self.scheme.token_bytes(layout, *dims, keys.dtype.itemsize)
        self.budget = Budget(self.scheme.tokens, self.scheme.budget_bytes, costs)
        self.budget.check(self.scheme.window, keys.dtype)
        # A capacity bounds the tokens seen; pages go by the budget, and move.
        return HeadwiseStore(layout, self.layer.scheme, keys, values)

    def store(self) -> HeadwiseStore:
        """The layer's store."""
        store = self.layer.held()
        assert isinstance(store, HeadwiseStore), "made in new_store"
        return store

    @property
    def full_at(self) -> int:
        """Tokens seen at which a row may outgrow its budget."""
        return self.trim_at or 1 + self.budget.most[1]

    # An attention call.

    def lets_step_pass(self) -> bool:
        """Whether a step of one token needs no trim, and its queries nobody."""
        return self.scheme.beta <= 0 and self.layer.seen < self.full_at and bool(self.layer.held().ahead(1).shortest)

    def before_begin(self) -> bool:
        """Notes for which rows the coming call is a prompt; whether its queries are to be kept."""
        layer, store, new = self.layer, self.store(), self.layer.new_columns
        starts = any(state.length == 0 for state in store.states)
        asks = new > MAX_STEP or starts or self.scheme.beta > 0 or layer.seen >= self.full_at
        if not new or not asks:
            return False
        long = torch.full((layer.batch_size,), new > MAX_STEP, dtype=torch.bool, device=layer.device)
        self._fresh = long | (store.row_lengths == 0) if starts or new > MAX_STEP else None
        return True

    def after_begin(self) -> None:
        """Notes which of the queries that are to be kept are no padding."""
        layer = self.layer
        newest = min(self.scheme.window, layer.new_columns)
        column = torch.arange(layer.new_columns - newest, layer.new_columns, device=layer.device)
        self._real = torch.ones(layer.batch_size, newest, dtype=torch.bool, device=layer.device)
        if layer.padding is not None:
            self._real = column >= layer.padding.lead[:, None]
            if layer.padding.source is not None:
                self._real = self._real & (layer.padding.source[:, column] == column)

    def note_queries(self, query: Tensor, arguments: AttentionArguments) -> None:
        """Keeps the newest queries (B, Hq, Q, D) of an attention call, if they are to be asked."""
        self.arguments = arguments._replace(mask=None, bias=None)
        if self._real is not None:
            if self.layer.new_columns == 1 and query.shape[2] > 1:
                # Heads where tokens are expected: see `hfkvq.caches.layers.handle`.
                query = query.reshape(query.shape[0], -1, 1, query.shape[3])
            newest = self._real.shape[1]
            arguments = arguments.biased()
            mask = arguments.mask
            if mask is not None and mask.shape[2] > newest:
                arguments = arguments._replace(mask=mask[:, :, -newest:])
            query = query[:, :, -newest:].detach()
            self.pending = Observation(query, self._real, arguments, self._fresh)
        self._real = self._fresh = None

    # A first prompt.

    def cut_prompt(self) -> bool:
        """Cuts a staged first prompt to its best tokens, if it can be; whether it has."""
        seen = self.pending
        best = 0 if seen is None or self.layer.staged is None else self._older_that_stay(seen)
        if seen is not None and best:
            self._cut(seen, best)
        return best > 0

    def _older_that_stay(self, seen: Observation) -> int:
        """Tokens that a first prompt is cut to, beside the newest; 0 where it is none, or has to go the general way."""
        layer, store, newest = self.layer, self.store(), max(self.scheme.window, self.layer.hold)
        first = store.longest == 0 and layer.padding is None and seen.prompt is not None
        shown = seen.arguments.mask is None or seen.arguments.mask.shape[-1] >= layer.seen
        if not first or not shown or layer.staged_length != layer.seen or layer.seen < self.full_at:
            return 0
        return older_that_stay(self.scheme, store.layout, self.budget.costs, layer.seen, newest)

    def _cut(self, seen: Observation, best: int) -> None:
        """Does of a first prompt what `KVStore.extend` and `judge` would, without asking the device anything."""
        layer, store, scheme = self.layer, self.store(), self.scheme
        assert layer.staged is not None
        keys, values = (store._rotated(store.folded(x), side) for x, side in zip(layer.staged, SIDES, strict=True))
        rows, tail = keys.shape[0], max(scheme.window, layer.hold)
        rank = torch.arange(layer.seen, device=layer.device)
        past = (rank < layer.seen - scheme.window).expand(rows, -1)
        scores, statistics = torch.empty(rows, layer.seen, device=layer.device), []
        for own, paid in prompt_attention(keys, store, seen):
            scores[own] = scheme.token_scores(paid)
            statistics.append(scheme.layer_statistics(paid, past[own]))
        if scheme.score == "recency":
            scores = rank.float().expand(rows, -1)
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

    # Ranking and trimming.

    def judge_pending(self) -> None:
        """Ranks what is stored by the queries that have been kept, and trims what has outgrown its budget."""
        if self.pending is not None:
            seen, self.pending = self.pending, None
            self._judge(seen)

    def judge_step(self, query: Tensor) -> None:
        """The same by the query (B, Hq, 1, D) of a step that the host did not see."""
        real = torch.ones(self.layer.batch_size, 1, dtype=torch.bool, device=self.layer.device)
        self._judge(Observation(query, real, self.arguments, None))

    def _judge(self, seen: Observation) -> None:
        # Tokens have come since; what a cut left need not be kept for layers that never had their prompt.
        self.first_cut = None
        store, scheme, due = self.store(), self.scheme, self.layer.seen >= self.full_at
        where = positions(store)
        order = token_order(store, where)
        rank = torch.arange(order.shape[1], device=order.device)
        past = rank < (store.counters[LENGTH] - scheme.window)[:, None]
        scores, statistics = torch.zeros(order.shape, device=order.device), []
        # Steps that rank by age ask nobody.
        asked = seen.prompt is not None or scheme.score != "recency"
        for rows, paid in stored_attention(store, seen, where, order) if asked else ():
            scores[rows] = scheme.token_scores(paid)
            if seen.prompt is not None:
                statistics.append(scheme.layer_statistics(paid, past[rows]))
        if scheme.beta > 0:
            scores = self._accumulated(scores)
        if scheme.score == "recency":
            scores = rank.float().expand(order.shape)
        if seen.prompt is not None:
            strength = self._strength_of(statistics)
            self.strength = strength if self.strength is None else torch.where(seen.prompt, strength, self.strength)
            self.prompts += 1
        if due:
            prompt = torch.zeros_like(seen.real[:, 0]) if seen.prompt is None else seen.prompt
            self._trim(scores, prompt.repeat_interleave(store.fold), None, where, order)
        elif scheme.beta > 0:
            self._remember(scores)
        if seen.prompt is not None:
            self.group.report(self.prompts)

    def _strength_of(self, statistics: list[Tensor]) -> Tensor:
        """f32 (B,) of the statistics of folded rows."""
        return self.scheme.strength(torch.cat(statistics).unflatten(0, (self.layer.batch_size, -1)))

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
        self.scores = scores.masked_fill(rank >= self.store().counters[LENGTH, :, None], torch.nan)

    def waiting(self) -> Waiting | None:
        """What the tiers of a first prompt follow from, if this layer has cut one and holds nothing else."""
        cut = self.first_cut
        if cut is None or self.scores is None or self.strength is None or self.layer.store is None:
            return None
        store = self.store()
        if not cut.stands(store.state, self.layer.edition):
            return None
        costs, heads = self.budget.costs, self.layer.heads
        return Waiting(store.state, store.layout, cut, self.scheme, costs, heads, self.scores, self.strength)

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
        if not self.scheme.beta:
            self.scores = None
        if layer.buffer is not None:
            layer.buffer.bind()

    def _trim(self, scores: Tensor, prompt: Tensor, rows: Tensor | None, where: Tensor, order: Tensor) -> None:
        """Cuts rows to their budget: those that have outgrown it, or finally those of ``rows`` (bool (B*H,)).

        ``prompt`` (likewise) are those that have had a prompt just now. ``where`` and ``order`` are what `positions`
        and `token_order` say.
        """
        layer, store, scheme = self.layer, self.store(), self.scheme
        over = self.budget.room(store) < 0 if rows is None else rows
        # Until all layers are done, as many tokens as the budget could hold in few bits.
        final = rows is not None or all(x.prompts == self.prompts for x in self.group.members)
        left = None
        if over.any():
            past = (store.counters[LENGTH].long() - max(scheme.window, layer.hold)).clamp(min=0)
            most, own = self.group.greatest_strength(self.prompts, layer.device), self.strength
            if own is None or most is None:
                most = own = torch.ones(layer.batch_size, device=layer.device)
            share = scheme.share(own, most).repeat_interleave(store.fold)
            kept = stay = scheme.kept(past, share, self.budget.costs, prompt)
            if not final:
                many = scheme.kept(past, torch.zeros_like(share), self.budget.costs, prompt)
                stay = torch.where(prompt, many, kept)
            counts = stay, scheme.whole(kept, share)
            left = trim(store, scores, over, past, counts, scheme.low_bits, where, order)
            layer.evicted = True
            layer.edition += 1
            self.provisional = over & prompt if not final else None
        self.scores = None
        if scheme.beta > 0 or (left is not None and not final):
            self._remember(scores if left is None else scores.gather(1, left[:, : store.longest]))
        self.trim_at = layer.seen + 1 + max(int(self.budget.room(store).min()), 0)

    # Rows and lengths change.

    def after_crop(self) -> None:
        """Tokens have been taken back."""
        if self.scores is not None:
            self._remember(self.scores)

    def take_rows(self, rows: Tensor) -> None:
        """Row b becomes what row ``rows[b]`` was."""
        if self.strength is not None:
            self.strength = self.strength[rows.to(self.strength.device)]
        if self.scores is not None:
            self.scores = self.scores[self.store().rows_of(rows.to(self.scores.device))]
        if self.provisional is not None:
            self.provisional = self.provisional[self.store().rows_of(rows.to(self.provisional.device))]

    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [tensor for tensor in (self.strength, self.scores, self.provisional) if tensor is not None]
