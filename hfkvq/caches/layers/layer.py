"""One attention layer of the cache: Transformers' contract on the outside, a `KVStore` on the inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import START, sealed_count
from hfkvq.kernels.dispatch import exact
from hfkvq.kernels.pages import Side

from ..base import warn_once
from ..base.recorded import is_captured, is_recorded
from ..eviction.evictor import Eviction
from ..eviction.forgetting import cut_prompt
from ..eviction.tier_evictor import TierEvictor
from ..eviction.token_evictor import TokenEvictor
from ..layer_state.base import ROLLBACK
from ..layer_state.query_statistics import QueryStatistics
from ..layer_state.smoothing import KeySmoothing, of_keys
from ..layer_state.tags import TokenRecord
from ..layer_state.update import PaddingReader, check_update, is_allocated_for
from ..schemes.arkv import Arkv
from ..schemes.base import Scheme, latent_layout
from ..schemes.eviction import SnapKV
from ..steps.step_buffer import StepBuffer
from ..store import MAX_STEP, KVStore, Padding
from ..store.accounting import contradictions
from ..store.routing import ColumnTags
from . import transactions
from .handle import LazyKV, refuse_gradient


def _dense(side: Side) -> property:
    """Dequantized keys or values (B, H, seen, D), or a first prompt's own; None before the first update."""

    def held(layer: KVLayer) -> Tensor | None:
        layer.catch_up()
        return layer.dense(side) if layer.seen else None

    def refuse(layer: KVLayer, value: Any) -> None:
        if value is not None:
            raise AttributeError(f"{side}: pages cannot be assigned; use update().")

    return property(held, refuse)


class KVLayer(CacheLayerMixin):
    """Cache layer over compressed pages.

    Order of events: `update` stages the new tokens and returns handles. An attention function that knows these calls
    `forward`, which takes a step at once over the layer's buffer, where it can be; else it calls `begin`, then `attend`
    (or attends to `dense` tensors), then `finish`, which seals. If no such function runs, the next `update` does what
    is left.

    Args:
        reader: finds padding; shared by the layers of a cache.
        capacity: most tokens of a row, or None.
        defer: later layers attend to this layer's handles too (KV sharing), so sealing waits for the next update.
        debug: refuse keys and values that are not finite, or that pages cannot hold.
        recordable: whether steps may be recorded, over a buffer of fixed addresses.
        window: tokens that a query sees; 0 for all. What has fallen out of it makes room for what is sealed.

    Attributes:
        store: keys and values; None before the first update.
        seen: logical tokens given, padding included, whatever is still stored. Steps that were replayed are not counted
            until the layer is told of them.
        staged: keys (B, H, t, Dk), smoothed, and values (B, H, t, Dv) of the last update that are not in the store yet.
        uncommitted: whether something that is in the store may be due to be sealed.
        new_columns: tokens of an update whose queries have not been shown yet.
        newest: tokens of the last update, until they are taken back or graphs have run on.
        evicted: whether tokens of the middle are gone, so that `dense` has zeros in their place.
        gone: columns seen that pages have no room for any longer, since a budget in bytes has let their tokens go.
        cuts: scheme by which a first prompt is cut that does not fit into a budget in bytes; None where it fits.
        differentiated: whether the last update's queries, keys or values would have got a gradient; see
            `refuse_gradient`.
        record_past: whether the newest tokens stay unsealed, so that they can be taken back.
        latents: whether keys are latents and values their rotary parts, which a step attends to as they are.
        holds_latents: whether they are such, however a step attends to them.
        own_attention: the model's type, where the model looks no attention implementation up; else empty.
        edition: grows whenever the layer changes, by which handles know whether they are good.
        offloaded: whether pages lie in the host's memory.
        smoothing: by which keys are smoothed as they come, and queries as they attend; None where keys stay as they
            are. Whatever the layer holds is smoothed. Its cache gives it to an empty layer.
        smooths_by_prompt: whether a first prompt gives it, since the cache's model does not.
        queries: statistics of queries, where the scheme weighs channels by them, else None.
        reads_tags: whether the scheme reads tags of tokens.
        record: ids and tags of the cache's tokens, one for all layers; None where nothing shows the cache any.
        eviction: keeps a budget, where the scheme has one, else None.
        buffer: gives the store fixed addresses, where steps may be recorded, and brings host and device together after
            such steps; else None.
    """

    supports_early_init = True
    is_croppable = True  # type: ignore[assignment]

    keys, values = _dense("keys"), _dense("values")  # type: ignore[assignment]

    dtype: torch.dtype
    device: torch.device
    heads: int
    batch_size: int
    latents: bool = False
    holds_latents = smooths_by_prompt = False
    own_attention = ""
    cuts: SnapKV | None

    def __init__(
        self,
        scheme: Scheme,
        reader: PaddingReader,
        capacity: int | None = None,
        defer: bool = False,
        debug: bool = False,
        recordable: bool = False,
        window: int = 0,
    ) -> None:
        self.scheme, self.reader, self.capacity, self.defer, self.debug = scheme, reader, capacity, defer, debug
        self.window = window
        self.record_past = self.offloaded = False
        self.edition = 0
        self._forget()
        needs = scheme.needs
        self.queries = QueryStatistics("history" in needs) if "query" in needs else None
        self.reads_tags = "tags" in needs
        self.record: TokenRecord | None = None
        self.eviction: Eviction | None = None
        if scheme.evicts:
            self.eviction = TierEvictor(self) if isinstance(scheme, Arkv) else TokenEvictor(self)
        self.buffer = StepBuffer(self, self.queries, self.eviction) if recordable else None

    def _forget(self) -> None:
        self.is_initialized = False
        self.edition += 1
        self.seen = self.new_columns = self.newest = 0
        self.store: KVStore | None = None
        self.staged = None
        self.padding: Padding | None = None
        self.gone, self.cuts = 0, None
        self.uncommitted = self.evicted = self.differentiated = self._keeps_logits = False
        self.smoothing: KeySmoothing | None = None
        # Shapes, dtypes and devices of the last update, if it was in order.
        self.accepted: tuple[Any, ...] | None = None

    # Questions.

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        """True if queries see a window of the newest tokens; masks of such layers are made apart from the others'."""
        return self.window > 0

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """True if `torch.compile` can take steps: at a fixed capacity, unless tokens may be taken back, or are padding.

        Tokens may be taken back in assisted decoding; padding within rows needs masks. Steps over latents are captured.
        """
        buffer = self.buffer
        if buffer is None or self.capacity is None or self.latents:
            return False
        return not self.record_past and not buffer.sync.holes

    @property
    def parts(self) -> list[Any]:
        """Parts that change together with lengths and rows."""
        return [self]

    @property
    def smooths(self) -> bool:
        """True if the layer is to have `smoothing`; latents are keys and values at once, and go without."""
        return self.scheme.smooths_keys and not self.holds_latents

    @property
    def staged(self) -> tuple[Tensor, Tensor] | None:
        """New tokens that are not in the store yet, keys smoothed: at the first question, or with a step's queries."""
        if self._plain and self._staged is not None and self.smoothing is not None:
            self.staged = self.smoothing.keys(self._staged[0]), self._staged[1]
        return self._staged

    @staged.setter
    def staged(self, tokens: tuple[Tensor, Tensor] | None) -> None:
        self._staged, self._plain = tokens, False

    @property
    def staged_length(self) -> int:
        """New tokens that are not in the store yet."""
        return 0 if self._staged is None else self._staged[0].shape[2]

    @property
    def columns(self) -> int:
        """Logical columns that handles have: those that any query of the last update sees."""
        before = self.seen - self.newest
        return self.newest + (min(before, self.window - 1) if self.window else before)

    @property
    def hold(self) -> int:
        """Newest tokens that stay unsealed, beyond what the layout says."""
        return ROLLBACK if self.record_past else 0

    def held(self) -> KVStore:
        """The store.

        Raises:
            RuntimeError: there is none yet.
        """
        if self.store is None:
            raise RuntimeError("This cache layer is empty: call update() first.")
        return self.store

    def check_capacity(self, tokens: int) -> None:
        """Raises ValueError if ``tokens`` more exceed a fixed capacity."""
        if self.capacity is not None and self.seen + tokens > self.capacity:
            # Each step of such a generation gives one token more than the last one, to any cache.
            again = tokens == self.newest + 1 > 2
            larger = "make the cache with a larger max_cache_len, or with none so that it grows"
            shorter = "with use_cache=False, generate gives it the whole text in each step: leave that out"
            raise ValueError(
                f"max_cache_len: {self.seen} tokens and {tokens} new ones exceed the capacity of {self.capacity}; "
                f"{shorter if again else larger}."
            )

    def get_max_length(self) -> int:
        """Capacity in tokens, or -1."""
        return -1 if self.capacity is None else self.capacity

    # Transformers 5.17 asks under this name as well.
    get_max_cache_shape = get_max_length

    def get_seq_length(self) -> Any:
        """Logical tokens seen, padding included, whatever is still stored.

        A number on the device in a recorded step, and where the host does not know it.
        """
        return self.seen if self.buffer is None else self.buffer.length(self.seen)

    def get_query_offset(self) -> Any:
        """Column of the coming forward's first query: i64 (1,) on the device where steps need no mask.

        Where they do, a number, on the device (without axes) in a compiled step.
        """
        buffer = self.buffer
        if buffer is not None:
            if buffer.need_no_mask() or is_captured():
                return buffer.seen_on_device()
            if buffer.is_recorded:
                return buffer.seen_on_device()[0]
            buffer.sync.catch_up()
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical length and offset for the mask of the coming forward; the capacity's where steps must look alike."""
        buffer = self.buffer
        if buffer is not None:
            if buffer.is_recorded or (query_length == 1 and buffer.need_no_mask()):
                return buffer.room, 0
            buffer.sync.catch_up()
        return self.sizes(query_length)

    def sizes(self, queries: int) -> tuple[int, int]:
        """Length and offset of what so many coming queries see, in logical columns."""
        held = min(self.seen, self.window - 1) if self.window else self.seen
        return held + queries, self.seen - held

    def dense(self, side: Side) -> Tensor:
        """Dequantized (B, H, columns, D) in logical order; new tokens as they came, 0 where one was evicted.

        Keys are the model's, of which smoothing has been undone.
        """
        self.close()
        store, columns = self.held(), self.columns
        new = None if self.staged is None else self.staged[side == "values"]
        before = columns - self.staged_length
        if new is not None and not before:
            found = new
        elif new is None or self.window:
            found = store.dense(side, before)
            found = found if new is None else torch.cat([found, new], 2)
        else:
            found = store.dense_before(new, side, self.seen)
        if side == "values" or self.smoothing is None:
            return found
        start = None
        if store.longest:
            # Leading padding has no keys, of every row, or of every head that is a row of its own.
            start = (store.counters[START] - (self.seen - columns)).view(self.batch_size, -1)
        return self.smoothing.raw(found, start)

    def tensors(self) -> list[Tensor]:
        """Small tensors beside the store: statistics, scores, the padding last found, token ids and tags.

        The vectors of smoothing are not among them: they belong to the model, and all its caches share them.
        """
        found = [x for part in (self.queries, self.eviction, self.record) if part is not None for x in part.tensors()]
        for padding in (self.padding, self.reader.found):
            found += [] if padding is None else [x for x in (padding.lead, padding.source) if x is not None]
        return found

    def contradictions(self) -> Iterator[str]:
        """Faults of what the layer holds, in words; asks the device. See `MixedKVCache.integrity_check`."""
        store, buffer = self.store, self.buffer
        if store is None:
            if self.seen:
                yield f"{self.seen} tokens and no store"
            return
        self.close()
        yield from contradictions(store.state, self.seen - self.staged_length)
        if self.seen and store.batch != self.batch_size * store.fold:
            yield f"{self.batch_size} rows, and {store.batch} in the store"
        for part in () if self.queries is None else self.queries.tensors():
            if self.seen and self.batch_size not in part.shape[:2]:
                yield f"statistics of queries of shape {tuple(part.shape)} for {self.batch_size} rows"
        if self.eviction is not None and self.seen:
            by_row, by_head = self.eviction.notes()
            wrong = [x for x in by_row if x.shape[0] != self.batch_size] + [x for x in by_head if len(x) != store.batch]
            if wrong:
                yield f"notes of an eviction of {wrong[0].shape[0]} rows for {self.batch_size}"
        if buffer is not None and buffer.state is not None and self.staged is None and not self.uncommitted:
            pairs = zip((store.counters, *store.windows), (buffer.state.counters, *buffer.state.windows), strict=True)
            if any(own is not there for own, there in pairs):
                yield "the buffer of recorded steps does not hold what the layer does"

    # Tokens come.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for tensors of this shape, dtype and device."""
        if self.eviction is not None:
            self.store = self.eviction.new_store(key_states, value_states)
        else:
            layout = self.scheme.layout(key_states.shape[-1], value_states.shape[-1])
            if self.latents:
                layout = latent_layout(self.scheme, key_states.shape[-1], value_states.shape[-1]) or layout
            layout = layout.in_window(self.window) if self.window else layout
            self.store = KVStore(layout, self.scheme, key_states, value_states, self.offloaded)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.heads, self.batch_size = key_states.shape[1], key_states.shape[0]
        self.is_initialized = True
        if self.buffer is not None:
            self.buffer.start()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[LazyKV, LazyKV]:  # type: ignore[override]
        """Stages new keys (B, H, t, Dk), after RoPE, and values (B, H, t, Dv); handles to all that the layer holds.

        Handles are of logical shape (B, H, columns, Dk) and (B, H, columns, Dv): of all tokens or those in the window.

        Raises:
            ValueError: shape, dtype or device differ from the first update's, the capacity is exceeded, or, in debug
                mode, an entry is not finite; or tokens are to be evicted by queries that attention did not show.
                Nothing is changed then.
        """
        if self.buffer is not None:
            if is_recorded():
                return self.buffer.record(key_states, value_states)  # type: ignore[return-value]
            self.buffer.before_update(key_states.shape[2])
        check_update(self, key_states, value_states)
        if self.smooths and not self.seen:
            _, heads, _, dim = key_states.shape
            fits = self.smoothing is not None and self.smoothing.vectors.shape[1:] == (heads, dim)
            if not fits and (self.smooths_by_prompt or self.smoothing is not None):
                self.smoothing = of_keys(key_states)
            if self.smoothing is not None:
                self.smoothing = self.smoothing.to(key_states.device)
        self.differentiated = key_states.requires_grad or value_states.requires_grad
        if self.differentiated:
            key_states, value_states = key_states.detach(), value_states.detach()
        batch, heads, tokens, key_dim = key_states.shape
        unseen = self.new_columns and self.store is not None
        if unseen and self.eviction is not None and self.own_attention:
            raise ValueError(
                f"scheme: {self.scheme.name!r} evicts tokens by the queries that attention shows, but this model's own "
                f"attention ({self.own_attention}) shows none; choose a scheme that keeps every token, e.g. "
                "'kitty-pro'."
            )
        if not is_allocated_for(self, key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        self.settle()
        self.staged, self.padding = (key_states, value_states), None
        self._plain = self.smoothing is not None
        self.new_columns = self.newest = tokens
        self.seen += tokens
        self.edition += 1
        if unseen and self.eviction is not None:
            warn_once(
                f"{self.scheme.name}: the cache did not see the queries, so nothing can be evicted and the budget is "
                "exceeded; use the 'hfkvq' attention (attach=True) or sdpa."
            )
        shape = batch, heads, self.columns
        return LazyKV(self, "keys", (*shape, key_dim)), LazyKV(self, "values", (*shape, value_states.shape[3]))

    # An attention call.

    def forward(
        self,
        query: Tensor,
        arguments: AttentionArguments,
        dense: Callable[[], Tensor],
        padding_mask: Tensor | None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attention of an update's queries over all that the layer holds then: new tokens join it, due ones are sealed.

        Attention functions, handles and prompts of compiled models come by here.

        Args:
            query: (B, Hq, Q, D), after RoPE.
            arguments: of the call; without a mask it is causal.
            dense: attends to `KVLayer.dense` keys and values, (B, Hq, Q, Dv); asked where pages cannot be attended, as
                of a prompt. It adds the bias itself.
            padding_mask: the mask that the model was given, in which padding is looked for.
            after: what becomes of what pages give, where that is not yet what ``dense`` gives (latents); None for
                nothing.

        Returns:
            (B, Hq, Q, Dv).
        """
        if query.requires_grad:
            self.differentiated, query = True, query.detach()
        if arguments.softcap or arguments.sinks is not None:
            self._keep_logits()
        if self.queries is not None:
            self.queries.note(query, self.new_columns, arguments)
        out, pages = None if self.buffer is None else self.buffer.run(query, arguments), True
        if out is None:
            pages = self.begin(padding_mask, query.shape[2])
            out = self.attend(query, arguments.biased()) if pages else dense()
            self.finish(query, arguments)
        out = after(out) if pages and after is not None else out
        return refuse_gradient(self, out) if self.differentiated else out

    @exact
    def begin(self, mask: Tensor | None, queries: int) -> bool:
        """Prepares one attention call, whose mask, if there is one, shows where padding is.

        Returns:
            True if `attend` is to be called: the new tokens are in the store now. False for a prompt: attend to
            `dense` keys and values, which hold the new tokens as they came.
        """
        buffer, eviction = self.buffer, self.eviction
        self.close()
        asks = eviction is not None and eviction.before_begin()
        pages = self._push_staged(mask, queries)
        if eviction is not None and asks:
            eviction.after_begin()
        if not pages and self.evicted:
            # A prompt on a cache that has evicted tokens: it stays whole until its attention is done.
            self.store_staged()
            pages = True
        if buffer is not None and self.padding is not None and self.padding.source is not None:
            buffer.sync.holes = True
        return pages

    @exact
    def attend(self, query: Tensor, arguments: AttentionArguments) -> Tensor:
        """Attends to the pages: (B, Hq, Q, D) to (B, Hq, Q, Dv); see `hfkvq.kernels.decode_attention`.

        More than 16 queries only where tokens have been evicted: a few at a time, since steps' kernels take no more.
        """
        queries, mask, outs = query.shape[2], arguments.mask, []
        if queries <= MAX_STEP or not self.evicted:
            return self.held().attend(self.smoothed_query(query), arguments)
        for first in range(0, queries, MAX_STEP):
            own = slice(first, min(first + MAX_STEP, queries))
            if mask is None:
                newest = torch.arange(own.start, own.stop, device=query.device) + self.seen - queries
                shown = (torch.arange(self.seen, device=query.device) <= newest[:, None])[None, None]
            else:
                shown = mask if mask.shape[2] == 1 else mask[:, :, own]
            outs.append(self.attend(query[:, :, own], arguments._replace(mask=shown)))
        return torch.cat(outs, 2)

    @exact
    def finish(self, query: Tensor, arguments: AttentionArguments) -> None:
        """Observes the query (B, Hq, Q, D) if the scheme wants it, then seals what is due."""
        if self.eviction is not None or self.queries is not None:
            query = self.smoothed_query(query)
        if self.eviction is not None:
            if self.buffer is not None and self.new_columns == query.shape[2]:
                self.buffer.queries_per_head = query.shape[1] // self.heads
            self.eviction.note_queries(query, arguments)
        # Tokens of an update are stored once: with shared keys and values, later layers come here too.
        if self.queries is not None and self.new_columns:
            keys = self.held().layout.keys
            waiting = keys.local + keys.unit + self.hold
            self.queries.observe(query, self.new_columns, self.heads, self.padding, waiting)
        self.new_columns = 0
        if self.cuts is not None:
            cut_prompt(self, self.cuts, query, arguments)
            self.cuts = None
        if not self.defer:
            self.settle()

    def smoothed_query(self, query: Tensor) -> Tensor:
        """Queries (B, Hq, Q, D) as they attend to what the layer holds."""
        return query if self.smoothing is None else self.smoothing.queries(query)

    def smoothed_step(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, Hq, Q, D) of a step, and its staged keys and values, smoothed in one launch."""
        assert self._staged is not None, "asked before"
        if self._plain and self.smoothing is not None:
            query, keys = kernels.smooth(query, self._staged[0], self.smoothing.vectors)
            self.staged = keys, self._staged[1]
            return query, *self._staged
        return self.smoothed_query(query), *self._staged

    def _keep_logits(self) -> None:
        """Lets logits be those of the model, before anything but a first prompt's tokens has been smoothed.

        For attention with a softcap or sinks, which is not blind to a number that is added to all logits of a query.
        """
        own, known = self.smoothing, self._keeps_logits
        # A budget may have keys smoothed later.
        self._keeps_logits = True
        if own is None or known:
            return
        staged = None if self._plain else self._staged
        # This asks the device.
        if not own.vectors[0].any():
            return
        if self.store is not None and self.store.longest:
            raise RuntimeError(
                "smooth_keys: this layer's keys have been centred, and attention now has a softcap or sinks, which it "
                "did not have before; begin with an empty cache, made with smooth_keys=False."
            )
        self.smoothing = own.centred_at_zero()
        if staged is not None:
            self.staged = self.smoothing.keys(own.raw(staged[0])), staged[1]

    # Staged tokens join the store, and what is due is sealed.

    @exact
    def settle(self, commit: bool = True) -> None:
        """Does what is left of the last update: staged tokens join the store, and what is due is sealed.

        Not ``commit``: what is due of a step stays, and no budget is kept.
        """
        eviction = self.eviction
        left = self._staged is not None or self.uncommitted or (eviction is not None and eviction.pending is not None)
        if self.store is None or not left:
            return
        if self.cuts is not None and self.staged is not None:
            raise RuntimeError(
                "evict: attention has not shown by which queries this first prompt is to be cut, since it was "
                "interrupted, or the cache was detached meanwhile; call reset() before this cache is used again."
            )
        self.close()
        try:
            if eviction is None:
                self.store_staged(commit)
            elif not commit or not eviction.cut_prompt():
                self.store_staged(commit)
                if commit:
                    eviction.judge_pending()
        finally:
            # The update is complete; the next step counts the tokens that this one has sealed.
            self.bind()

    def _push_staged(self, mask: Tensor | None, queries: int) -> bool:
        """Lets staged tokens of a step join the store before attention; see `begin`."""
        store = self.held()
        staged = self.staged
        if staged is None:
            return queries <= MAX_STEP
        keys, values = staged
        tokens = keys.shape[2]
        # With shared keys and values, a later layer may come without a mask: what was found stays.
        if mask is not None and (tokens > 1 or any(state.length == 0 for state in store.states)):
            self.padding = self.reader.read(mask, self.columns, tokens, store.row_lengths)
        store.reserve_tail(self.hold)
        if store.longest == 0 or not store.fits(tokens) or self.padding is not None:
            return False
        store.push(keys, values)
        self.staged, self.uncommitted = None, True
        return True

    def store_staged(self, commit: bool = True) -> None:
        """Lets staged tokens join the store as a prompt does; or, with ``commit``, seals what is due of a step."""
        staged = self.staged
        if staged is not None:

            def extend(mean: Tensor | None, tags: Any) -> None:
                self.held().extend(*staged, self.padding, self.hold, mean, tags)
                # Staged tokens are dropped here and no earlier: if memory runs out, they are still staged.
                self.staged = self.padding = None

            self._seal(extend, self._tags() if self.reads_tags else None)
            if self.window:
                # Tokens that only these queries saw are gone.
                self.newest = 0
        elif self.uncommitted and commit:
            self.seal_due()
        self.uncommitted = self.uncommitted and not commit

    def seal_due(self) -> None:
        """Seals what is due; asks the device nothing where nothing is."""
        store = self.held()
        if any(store.forecast(hold=self.hold).due):
            found = self._tags() if self.reads_tags and self.may_seal_tagged() else None
            self._seal(partial(store.commit, self.hold), found)
        self.padding, self.uncommitted = None, False

    def _tags(self) -> ColumnTags | None:
        """The tags of all columns known, which layers share."""
        if self.record is None:
            warn_once(
                f"{self.scheme.name} chooses bits by tags, which this cache does not get, so every token has the most "
                "bits; use TriAxialCache(model, tokenizer)."
            )
            return None
        return self.record.shared_tags(self.device)

    def may_seal_tagged(self) -> bool:
        """True if any token in the tail may have a tag."""
        return self.record is None or self.seen - max(self.held().forecast().tail_slots) < self.record.tagged

    def _seal(self, seal: Callable[..., object], tags: Any) -> None:
        """Seals with the mean of the queries, of which those forget the past whose keys have been sealed."""
        store, queries = self.held(), self.queries
        has_sums = queries is not None and queries.sums is not None
        before = sealed_count(store.counters, "keys") if has_sums else None
        seal(None if queries is None else queries.mean(), tags)
        if before is not None and queries is not None:
            queries.forget_sealed(store, before)

    # Recorded steps.

    def catch_up(self) -> None:
        """Makes sure that the host knows what recorded steps have left on the device."""
        if self.buffer is not None:
            self.buffer.catch_up()

    def close(self) -> None:
        """Lets the device's counters count what the last recorded step has sealed; asks it nothing."""
        if self.buffer is not None:
            self.buffer.close()

    def bind(self) -> None:
        """Brings what the layer holds to where recorded steps look for it."""
        if self.buffer is not None:
            self.buffer.note_rows()
            self.buffer.bind()

    # Lengths and rows change.

    def activate_past_recording(self) -> None:
        """From now on the newest tokens stay unsealed long enough to be taken back by `crop`."""
        self.catch_up()
        self.record_past = True
        self.bind()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens, whose number is given with a minus; 0 does nothing but seal what is due.

        Raises:
            ValueError: positive, no whole number, or more tokens than the layer has seen. Nothing is changed then.
            NotImplementedError: older tokens of a layer that has evicted some. Nothing is changed then.
        """
        transactions.crop(self.parts, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        transactions.take_rows("reorder_cache", beam_idx, self.parts)

    def batch_repeat_interleave(self, repeats: Any) -> None:
        transactions.take_rows("batch_repeat_interleave", repeats, self.parts)

    def batch_select_indices(self, indices: Any) -> None:
        transactions.take_rows("batch_select_indices", indices, self.parts)

    def before_change(self, commit: bool) -> list[Any]:
        """Does what steps and updates have left, before a change of lengths or rows; the parts that change with it."""
        self.catch_up()
        if commit and self.eviction is not None and self.defer:
            # Layers that wait with sealing do what is due before the rows of any of them move.
            for member in self.eviction.group.members:
                member.layer.settle()
        self.settle(commit)
        return [part for part in (self.store, self.queries, self.eviction) if part is not None]

    def crop_alone(self, tokens: int) -> None:
        """Takes back the newest tokens of this layer; what is due is sealed later."""
        if tokens:
            self.held().crop(tokens, self.seen)
            self.seen, self.newest = self.seen - tokens, 0
            self.edition += 1
        self.uncommitted = True
        if self.eviction is not None:
            self.eviction.after_crop()

    def take_rows(self, rows: Tensor, change: Callable[[Tensor], None]) -> None:
        """Rows become those of these numbers (i64 (B',)), in the store by a verb of its own."""
        change(rows)
        self.batch_size, self.accepted = rows.shape[0], None
        self.edition += 1
        for part in (self.queries, self.eviction):
            if part is not None:
                part.take_rows(rows)

    def reset(self) -> None:
        """Forgets everything, whatever has been before.

        Every buffer stays, and of a cache of fixed capacity what a store has in it, for the next use of the same shape.
        """
        store, buffer = self.store, self.buffer
        if buffer is not None:
            buffer.sync.forget()
        self._forget()
        for part in (self.queries, self.eviction):
            if part is not None:
                part.forget()
        try:
            if buffer is not None:
                buffer.forget()
                if self.capacity is not None and store is not None:
                    store.clear()
                    self.store, self.is_initialized = store, True
                    buffer.bind()
        except BaseException:
            # Without an allocation, then.
            self.store, self.is_initialized = None, False
            if buffer is not None:
                buffer.drop()
            raise

    # Copies.

    def __deepcopy__(self, memo: dict[int, Any]) -> KVLayer:
        """An independent layer, which shares the scheme; what it knows of other layers is of copies."""
        if id(self) in memo:
            return memo[id(self)]
        self.catch_up()
        new: KVLayer = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(vars(self))
        if self.store is not None:
            new.store = copy.deepcopy(self.store, memo)
        new.record, new.queries = copy.deepcopy(self.record, memo), copy.deepcopy(self.queries, memo)
        # Readers hold nothing worth copying.
        new.reader = memo.setdefault(id(self.reader), PaddingReader())  # type: ignore[assignment]
        if self.staged is not None:
            new.staged = (self.staged[0].clone(), self.staged[1].clone())
        if self.eviction is not None:
            new.eviction = self.eviction.copy_for(new, memo)
        if self.buffer is not None:
            new.buffer = self.buffer.copy_for(new, memo)
            new.buffer.queries, new.buffer.eviction = new.queries, new.eviction
        # The group comes last: it copies the other layers.
        if new.eviction is not None:
            new.eviction.group = copy.deepcopy(new.eviction.group, memo)
        if new.buffer is not None:
            new.buffer.sync = copy.deepcopy(new.buffer.sync, memo)
            new.buffer.bind()
        return new
