"""One attention layer of the cache: Transformers' contract on the outside, a `KVStore` on the inside."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.pages import Side

from ..recorded import is_captured, is_recorded
from ..scheme import Scheme
from ..store import MAX_STEP, KVStore
from .base import LayerBase
from .buffer import StepBuffer
from .eviction import Eviction
from .handle import LazyKV, handles
from .incoming import check_update, is_allocated_for, push_staged, seal_due, store_tokens
from .padding import PaddingReader
from .queries import QueryStatistics
from .steps import DeviceSteps
from .tags import TokenTags


class _Dense:
    """Dequantized keys or values (B, H, seen, D), or a first prompt's own; None before the first update."""

    def __init__(self, side: Side) -> None:
        self.side: Side = side

    def __get__(self, layer: KVLayer | None, owner: type | None = None) -> Any:
        if layer is None:
            return self
        if layer.steps is not None:
            layer.steps.catch_up()
        return layer.dense(self.side) if layer.seen else None

    def __set__(self, layer: KVLayer, value: Any) -> None:
        if value is not None:
            raise AttributeError(f"{self.side}: pages cannot be assigned; use update().")


@contextlib.contextmanager
def _in_place(layer: KVLayer) -> Iterator[None]:
    """The host knows what the device holds, and what it makes of that is where steps look for it."""
    if layer.steps is not None:
        layer.steps.catch_up()
    yield
    if layer.buffer is not None:
        layer.buffer.bind()


class KVLayer(LayerBase, CacheLayerMixin):
    """Cache layer over compressed pages.

    Order of events in a forward: `update` stages the new tokens and returns handles; `forward.attend` calls `begin`,
    then `attend` (or attends to `dense` tensors), then `finish`, which seals. If no attention function that knows the
    handles runs, the next `update` does what is left.

    Args:
        scheme: the policy.
        reader: finds padding; shared by the layers of a cache.
        capacity: most tokens of a row, or None.
        defer: later layers attend to this layer's handles too (KV sharing), so sealing waits for the next update.
        debug: refuse keys and values that are not finite.
        recordable: whether steps may be recorded, over a buffer of fixed addresses.

    Attributes:
        queries: statistics of queries, where the scheme weighs channels by them, else None.
        tags: of tokens, where the scheme reads them, else None.
        eviction: keeps a budget, where the scheme has one, else None.
        buffer: gives the store fixed addresses, where steps may be recorded, else None.
        steps: brings host and device together after such steps; None like the buffer.
    """

    is_sliding = False
    supports_early_init = True
    fuses_steps = True
    """Whether a step may be one call of the kernels, in place of `begin`, `attend` and `finish`."""
    is_croppable = True  # type: ignore[assignment]

    keys = _Dense("keys")  # type: ignore[assignment]
    values = _Dense("values")  # type: ignore[assignment]

    # Parts may ask less of it.
    buffer: StepBuffer | None  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        scheme: Scheme,
        reader: PaddingReader,
        capacity: int | None = None,
        defer: bool = False,
        debug: bool = False,
        recordable: bool = False,
    ) -> None:
        super().__init__(scheme, reader, capacity, defer, debug)
        needs = scheme.needs
        self.queries = QueryStatistics() if "query" in needs else None
        self.tags = TokenTags() if "tags" in needs else None
        self.eviction = Eviction(self) if "probs" in needs else None
        self.buffer = StepBuffer(self, self.queries, self.eviction) if recordable else None
        self.steps = None if self.buffer is None else DeviceSteps(self, self.buffer, self.eviction)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `torch.compile` can take steps: at a fixed capacity, unless tokens may be taken back, or are padding.

        Tokens may be taken back in assisted decoding; padding within rows needs masks.
        """
        steps = self.steps
        return steps is not None and self.capacity is not None and not self.record_past and not steps.sync.holes

    # What Transformers calls.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for tensors of this shape, dtype and device."""
        if self.eviction is not None:
            self.store = self.eviction.new_store(key_states, value_states)
        else:
            layout = self.scheme.layout(key_states.shape[-1], value_states.shape[-1])
            capacity = self.capacity if self.buffer is None else None
            self.store = KVStore(layout, self.scheme, key_states, value_states, capacity)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.heads, self.batch_size = key_states.shape[1], key_states.shape[0]
        self.is_initialized = True
        if self.buffer is not None:
            self.buffer.start(key_states.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[LazyKV, LazyKV]:  # type: ignore[override]
        """Stages new tokens and returns handles to everything the layer holds.

        Args:
            key_states: (B, H, t, Dk), after RoPE.
            value_states: (B, H, t, Dv).
            *args: ignored.
            **kwargs: ignored.

        Returns:
            Handles of logical shape (B, H, seen, Dk) and (B, H, seen, Dv).

        Raises:
            ValueError: shape, dtype or device differ from the first update's, the capacity is exceeded, or, in debug
                mode, an entry is not finite. Nothing is changed then.
        """
        if self.steps is not None:
            if is_recorded():
                return self.steps.record(key_states, value_states)  # type: ignore[return-value]
            self.steps.before_update(key_states.shape[2])
        check_update(self, key_states, value_states)
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        unseen = self.new_columns and self.store is not None
        if not is_allocated_for(self, key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        self.settle()
        if self.tags is not None:
            self.tags.requantize(self)
        self.staged, self.padding = (key_states, value_states), None
        batch, heads, tokens, key_dim = key_states.shape
        self.new_columns = tokens
        self.seen += tokens
        self.edition += 1
        if unseen and self.eviction is not None:
            self.eviction.warn_unseen()
        return handles(self, batch, heads, self.seen, key_dim, value_states.shape[3])

    def get_seq_length(self) -> Any:
        """Logical tokens seen, padding included, whatever is still stored.

        A number on the device in a recorded step, and where the host does not know it.
        """
        return self.seen if self.steps is None else self.steps.length(self.seen)

    def get_query_offset(self) -> Any:
        """Column of the coming forward's first query: i64 (1,) on the device where steps need no mask.

        Where they do, a number, on the device (without axes) in a compiled step.
        """
        steps = self.steps
        if steps is not None:
            if steps.need_no_mask() or is_captured():
                return steps.seen_on_device()
            if is_recorded() and steps.buffer.tensor is not None:
                return steps.seen_on_device()[0]
            steps.sync.catch_up()
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical length and offset for the mask of the coming forward; the capacity's where steps must look alike."""
        steps = self.steps
        if steps is not None:
            recorded = steps.buffer.tensor is not None and is_recorded()
            if recorded or (query_length == 1 and steps.need_no_mask()):
                return steps.buffer.room, 0
            steps.sync.catch_up()
        return self.seen + query_length, 0

    def activate_past_recording(self) -> None:
        """From now on the newest tokens stay unsealed long enough to be taken back by `crop`."""
        with _in_place(self):
            changes, self.record_past = not self.record_past, True
        if changes and self.buffer is not None and self.store is not None:
            # Tails are longer from now on.
            self.buffer.warm(self.seen)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens.

        Args:
            tokens_to_remove: minus the number of tokens; 0 does nothing but seal what is due.

        Raises:
            ValueError: positive, or more tokens than the layer has seen. Nothing is changed then.
            NotImplementedError: older tokens of a layer that has evicted some. Nothing is changed then.
        """
        with _in_place(self):
            # Transformers 5.17 passes a tensor.
            tokens = -int(tokens_to_remove)
            if tokens < 0:
                raise ValueError(
                    f"crop: got {-tokens}, allowed 0 or minus the number of tokens to remove from the end, e.g. "
                    "crop(-3)."
                )
            if tokens > self.seen:
                raise ValueError(f"crop: got {-tokens}, but only {self.seen} tokens are cached; nothing was removed.")
            if self.store is None:
                return
            self.settle(commit=False)
            if tokens:
                self.store.crop(tokens, self.seen)
                self.seen -= tokens
                self.edition += 1
            seal_due(self, self.queries, self.tags)
            if self.eviction is not None:
                self.eviction.after_crop()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        self._change_rows(lambda rows: beam_idx, lambda store, rows: store.reorder(rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times; the copies share the pages that are full."""
        self._change_rows(lambda rows: rows.repeat_interleave(repeats), lambda store, rows: store.reorder(rows))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows only (indices or a boolean mask)."""
        self._change_rows(lambda rows: rows[indices.to(self.device)], lambda store, rows: store.select(rows))

    def _change_rows(self, choose: Callable[[Tensor], Tensor], change: Callable[[KVStore, Tensor], None]) -> None:
        """Rows become those that ``choose`` makes of all rows' numbers (i64 (B,)); ``change`` does it to the store."""
        with _in_place(self):
            if self.eviction is not None and self.defer:
                self.eviction.group.settle()
            if self.store is None:
                return
            self.settle()
            rows = choose(torch.arange(self.batch_size, device=self.device))
            change(self.store, rows)
            self.batch_size, self.accepted = rows.shape[0], None
            self.edition += 1
            for part in (self.queries, self.eviction):
                if part is not None:
                    part.take_rows(rows)

    def reset(self) -> None:
        """Forgets everything.

        A cache of fixed capacity keeps its allocation for the next use of the same shape, and every buffer stays.
        """
        store = self.store
        if self.steps is not None and self.buffer is not None:
            self.steps.sync.forget()
            self.buffer.forget()
        self.forget()
        for part in (self.queries, self.eviction):
            if part is not None:
                part.forget()
        if self.capacity is not None and store is not None:
            store.clear()
            self.store = store
            if self.buffer is not None:
                self.buffer.bind()
        else:
            self.is_initialized = False

    def offload(self) -> None:
        """Moves everything to the CPU."""
        if self.steps is not None:
            self.steps.catch_up()
        if self.store is not None:
            self.settle()
            self.store.to("cpu", non_blocking=True)
        if self.buffer is not None:
            self.buffer.drop()

    def prefetch(self) -> None:
        """Moves everything back."""
        if self.store is not None and self.store.device != self.device:
            self.store.to(self.device, non_blocking=True)
        if self.buffer is not None and self.buffer.tensor is None:
            self.buffer.bind()

    # What attention functions call; see `hfkvq.caches.layers.forward`.

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
        if steps is not None:
            steps.buffer.close()
        asks = eviction is not None and eviction.before_begin()
        pages = push_staged(self, mask, queries, steps is not None and steps.sync.waits)
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
            return self.eviction.attend(query, arguments)
        return self.held().attend(query, arguments.mask, arguments.scaling, arguments.softcap, arguments.sinks)

    def finish(self, query: Tensor, arguments: AttentionArguments) -> None:
        """Observes the query (B, Hq, Q, D) if the scheme wants it, then seals what is due."""
        if self.eviction is not None:
            if self.buffer is not None and self.new_columns == query.shape[2]:
                self.buffer.queries_per_head = query.shape[1] // self.heads
            self.eviction.note_queries(query, arguments)
        # Once for the tokens of an update: with shared keys and values, later layers come here too.
        if self.queries is not None and self.new_columns:
            self.queries.observe(query, self.new_columns, self.heads, self.padding)
        self.new_columns = 0
        if not self.defer:
            self.settle()

    def settle(self, commit: bool = True) -> None:
        """Does what is left of the last update: staged tokens join the store, and what is due is sealed.

        Args:
            commit: whether what is due of a step is sealed, and a budget kept.
        """
        eviction, buffer = self.eviction, self.buffer
        left = self.staged is not None or self.uncommitted or (eviction is not None and eviction.pending is not None)
        if self.store is None or not left:
            return
        if buffer is not None:
            buffer.close()
        if eviction is None:
            store_tokens(self, self.queries, self.tags, commit)
        elif not commit or not eviction.cut_prompt():
            store_tokens(self, self.queries, self.tags, commit)
            if commit:
                eviction.judge_pending()
        if buffer is not None and self.steps is not None:
            # Nothing is left of a step, and what it has sealed the next one counts.
            buffer.bind()
            self.steps.note_rows()

    def dense(self, side: Side) -> Tensor:
        """Dequantized (B, H, seen, D) in logical order; newly staged tokens as they came, 0 where one was evicted."""
        if self.buffer is not None:
            self.buffer.close()
        store = self.held()
        new = None if self.staged is None else self.staged[side == "values"]
        before = self.seen - self.staged_length
        if new is not None and not before:
            return new
        old = store.dense(side, before, self.steps is not None and self.steps.sync.waits)
        return old if new is None else torch.cat([old, new], 2)

    def tensors(self) -> list[Tensor]:
        """Small tensors beside the store: statistics, scores, the padding last found, token ids and tags."""
        found = [x for part in (self.queries, self.eviction, self.tags) if part is not None for x in part.tensors()]
        for padding in (self.padding, self.reader.found):
            found += [] if padding is None else [x for x in (padding.lead, padding.source) if x is not None]
        return found

    # Copies.

    def __deepcopy__(self, memo: dict[int, Any]) -> KVLayer:
        """Independent tensors, in a buffer of their own; shared scheme. What it knows of other layers is of copies."""
        if id(self) in memo:
            return memo[id(self)]
        if self.steps is not None:
            self.steps.catch_up()
        new: KVLayer = object.__new__(type(self))
        memo[id(self)] = new
        vars(new).update(vars(self))
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
        # Last: with the group, the other layers are copied.
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of `__getstate__`."""
        vars(self).update(state)
        for part in (self.eviction, self.buffer, self.steps):
            if part is not None:
                part.attach(self)
        if self.buffer is not None:
            self.buffer.bind()
