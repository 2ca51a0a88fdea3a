"""Layer of pages: its parts, and the verbs that attention functions call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import START
from hfkvq.kernels.pages import Side

from ..base.inference_mode import lasting
from ..eviction.evictor import Eviction
from ..eviction.tier_evictor import TierEvictor
from ..eviction.token_evictor import TokenEvictor
from ..layer_state.base import LayerBase, PaddingReader
from ..layer_state.query_statistics import QueryStatistics
from ..layer_state.tags import TokenTags
from ..layer_state.update import push_staged, store_tokens
from ..schemes.base import Scheme
from ..schemes.eviction import TieredEviction
from ..steps.device_steps import DeviceSteps
from ..steps.step_buffer import StepBuffer
from ..store import MAX_STEP
from .forward import attend_in_pieces


def _evictor(layer: LayerBase) -> Eviction[Any]:
    """Evictor for a scheme that evicts, by its kind."""
    return TierEvictor(layer) if isinstance(layer.scheme, TieredEviction) else TokenEvictor(layer)


class PagedLayer(LayerBase):
    """A layer with its parts; `KVLayer` is the same for Transformers.

    Args:
        scheme: the policy.
        reader: finds padding; shared by the layers of a cache.
        capacity: most tokens of a row, or None.
        defer: later layers attend to this layer's handles too (KV sharing), so sealing waits for the next update.
        debug: refuse keys and values that are not finite, or that pages cannot hold.
        recordable: whether steps may be recorded, over a buffer of fixed addresses.
        window: tokens that a query sees; 0 for all. What has fallen out of it makes room for what is sealed.

    Attributes:
        queries: statistics of queries, where the scheme weighs channels by them, else None.
        tags: of tokens, where the scheme reads them, else None.
        eviction: keeps a budget, where the scheme has one, else None.
        buffer: gives the store fixed addresses, where steps may be recorded, else None.
        steps: brings host and device together after such steps; None like the buffer.
    """

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
        super().__init__(scheme, reader, capacity, defer, debug, window)
        needs = scheme.needs
        self.queries = QueryStatistics("history" in needs) if "query" in needs else None
        self.tags = TokenTags() if "tags" in needs else None
        self.eviction = _evictor(self) if scheme.evicts else None
        self.buffer = StepBuffer(self, self.queries, self.eviction) if recordable else None
        self.steps = None if self.buffer is None else DeviceSteps(self, self.buffer, self.eviction)

    # Attention functions call these; see `hfkvq.caches.layers.forward`.

    def step(self, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
        """Begins, attends and finishes at once, over the buffer: (B, Hq, Q, D) to (B, Hq, Q, Dv).

        None where the staged tokens have to go one operation after the other: nothing is done then.
        """
        steps = self.steps
        return steps.run(query, arguments) if steps is not None and steps.takes(query.shape[2], arguments) else None

    def begin(self, mask: Tensor | None, queries: int) -> bool:
        """Prepares one attention call.

        Args:
            mask: the mask the attention was given, or None; shows where padding is.
            queries: number of query rows.

        Returns:
            True if `attend` is to be called: the new tokens are in the store now. False for a prompt: attend to
            `dense` keys and values, which hold the new tokens as they came.
        """
        steps, eviction = self.steps, self.eviction
        self.close()
        asks = eviction is not None and eviction.before_begin()
        pages = push_staged(self, mask, queries)
        if eviction is not None and asks:
            eviction.after_begin()
        if not pages and self.evicted:
            # A prompt on a cache that has evicted tokens: it stays whole until its attention is done.
            store_tokens(self, self.queries, self.tags)
            pages = True
        if steps is not None and self.padding is not None and self.padding.source is not None:
            steps.sync.holes = True
        return pages

    def attend(self, query: Tensor, arguments: AttentionArguments) -> Tensor:
        """Attends to the pages: (B, Hq, Q, D) to (B, Hq, Q, Dv); see `hfkvq.kernels.decode_attention`.

        More than 16 queries only where tokens have been evicted.
        """
        if query.shape[2] > MAX_STEP and self.eviction is not None:
            return attend_in_pieces(self, query, arguments)
        return self.held().attend(self.smoothed_query(query), arguments)

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
        if not self.defer:
            self.settle()

    def settle(self, commit: bool = True) -> None:
        """Does what is left of the last update: staged tokens join the store, and what is due is sealed.

        Args:
            commit: whether what is due of a step is sealed, and a budget kept.
        """
        eviction = self.eviction
        left = self.staged is not None or self.uncommitted or (eviction is not None and eviction.pending is not None)
        if self.store is None or not left:
            return
        self.close()
        try:
            if eviction is None:
                store_tokens(self, self.queries, self.tags, commit)
            elif not commit or not eviction.cut_prompt(self.queries):
                store_tokens(self, self.queries, self.tags, commit)
                if commit:
                    eviction.judge_pending()
        finally:
            # The update is complete; the next step counts the tokens that this one has sealed.
            self.bind()

    def close(self) -> None:
        """Lets the device's counters count what the last recorded step has sealed; asks it nothing."""
        if self.buffer is not None:
            self.buffer.close()

    def bind(self) -> None:
        """Brings what the layer holds to where recorded steps look for it."""
        if self.steps is not None and self.buffer is not None:
            self.steps.note_rows()
            self.buffer.bind()

    def dense(self, side: Side) -> Tensor:
        """Dequantized (B, H, columns, D) in logical order; new tokens as they came, 0 where one was evicted.

        Keys are the model's, of which smoothing has been undone.
        """
        found = self._dense(side)
        if side == "values" or self.smoothing is None:
            return found
        store, start = self.held(), None
        if store.longest:
            # Leading padding has no keys, of every row, or of every head that is a row of its own.
            start = (store.counters[START] - (self.seen - self.columns)).view(self.batch_size, -1)
        return self.smoothing.raw(found, start)

    def _dense(self, side: Side) -> Tensor:
        self.close()
        store = self.held()
        new = None if self.staged is None else self.staged[side == "values"]
        before = self.columns - self.staged_length
        if new is not None and not before:
            return new
        if new is None or self.window:
            old = store.dense(side, before)
            return old if new is None else torch.cat([old, new], 2)
        return store.dense_before(new, side, self.seen)

    def tensors(self) -> list[Tensor]:
        """Small tensors beside the store: statistics, scores, the padding last found, token ids and tags.

        The vectors of smoothing are not among them: they belong to the model, and all its caches share them.
        """
        found = [x for part in (self.queries, self.eviction, self.tags) if part is not None for x in part.tensors()]
        for padding in (self.padding, self.reader.found):
            found += [] if padding is None else [x for x in (padding.lead, padding.source) if x is not None]
        return found

    # Copies.

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        """An independent layer, which shares the scheme.

        What it knows of other layers is of copies.
        """
        if id(self) in memo:
            return memo[id(self)]
        if self.steps is not None:
            self.steps.catch_up()
        new: PagedLayer = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(vars(self))
        if self.store is not None:
            new.store = copy.deepcopy(self.store, memo)
        new.tags, new.queries = copy.deepcopy(self.tags, memo), copy.deepcopy(self.queries, memo)
        new.reader = memo.setdefault(id(self.reader), PaddingReader())  # type: ignore[assignment]
        if self.staged is not None:
            new.staged = (self.staged[0].clone(), self.staged[1].clone())
        if self.eviction is not None:
            new.eviction = self.eviction.copy_for(new, memo)
        if self.buffer is not None and self.steps is not None:
            buffer: StepBuffer = self.buffer.copy_for(new, memo)
            steps: DeviceSteps = self.steps.copy_for(new, memo)
            buffer.queries, buffer.eviction = new.queries, new.eviction
            steps.buffer, steps.eviction = buffer, new.eviction
            new.buffer, new.steps = buffer, steps
        # The group comes last: it copies the other layers.
        if new.eviction is not None:
            new.eviction.group = copy.deepcopy(new.eviction.group, memo)
        if new.buffer is not None:
            new.buffer.sync = copy.deepcopy(new.buffer.sync, memo)
            new.buffer.bind()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with tensors of their own in place of views of the buffer."""
        if self.steps is None:
            return dict(self.__dict__)
        self.steps.catch_up()
        return self.__dict__ | {"store": copy.deepcopy(self.store)}

    @lasting
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of `__getstate__`."""
        vars(self).update(state)
        if self.store is not None and self.store.counters.is_inference():
            # Read in inference mode, where nothing can be written to that is made.
            self.store, self.queries = copy.deepcopy(self.store), copy.deepcopy(self.queries)
            if self.buffer is not None:
                self.buffer.queries = self.queries
        for part in (self.eviction, self.buffer, self.steps):
            if part is not None:
                part.attach(self)
        if self.buffer is not None:
            self.buffer.bind()
