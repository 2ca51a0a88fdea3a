"""One attention layer of the cache: Transformers' contract on the outside, a `KVStore` on the inside."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hfkvq.kernels.decode import sealed_count
from hfkvq.kernels.pages import Side
from hfkvq.kernels.step import MAX_STEP, observe
from hfkvq.kernels.step_tensors import Observing

from .handle import LazyKV, handles
from .routing import ColumnTags
from .scheme import Layout, Scheme
from .store import KVStore, Padding
from .store.requantize import requantize_by_tags
from .tokens import TokenRecord

logger = logging.getLogger(__name__)

ROLLBACK = 64
"""Newest tokens that stay unsealed while tokens may be taken back (assisted decoding)."""


@functools.cache
def _warn_without_tags(scheme: str) -> None:
    logger.warning(
        "%s gives tokens their bits by tags, which this cache is not shown, so every token gets the most bits; use "
        "TriAxialCache(model, tokenizer).",
        scheme,
    )


class PaddingReader:
    """Finds the padding in attention masks, once per mask: all layers of a forward are given the same one."""

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int, int] | None = None
        self.found: Padding | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddingReader:
        """A fresh reader: it holds nothing worth copying."""
        return PaddingReader()

    def __reduce__(self) -> tuple[type[PaddingReader], tuple[()]]:
        """A fresh reader: masks are not saved."""
        return PaddingReader, ()

    def read(self, mask: Tensor, seen: int, tokens: int, lengths: Tensor) -> Padding | None:
        """Padding among the newest ``tokens`` of ``seen`` columns.

        Args:
            mask: (B or 1, heads or 1, Q or 1, L), True or nonzero where visible, or float and added to logits.
            seen: logical columns, the new ones included.
            tokens: new columns.
            lengths: i32 (B,), tokens that each row has stored before.

        Returns:
            None if no new column is padding. One transfer to the host, for a mask not met before.
        """
        # Tensors of inference mode count no versions; nobody may change them in place either, but within that mode.
        key = (0 if mask.is_inference() else mask._version, seen, tokens)
        if self._mask is not None and self._mask() is mask and self._key == key:
            return self.found
        visible = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
        visible = visible[:, 0]
        if visible.shape[1] == tokens and tokens > 1:
            # A token that is no padding sees itself, whatever else the mask hides.
            valid = visible.diagonal(offset=seen - tokens, dim1=-2, dim2=-1)[:, :tokens]
        else:
            valid = visible[:, -1, seen - tokens : seen]
        valid = valid.to(lengths.device).expand(lengths.shape[0], -1)
        started = (lengths > 0)[:, None] | (valid.cumsum(1) > 0)
        lead = (~started).sum(1, dtype=torch.int32)
        holes = (started & ~valid).any().to(torch.int32).reshape(1)
        *amounts, has_holes = torch.cat([lead, holes]).tolist()
        found = None
        if has_holes or any(amounts):
            source = None
            if has_holes:
                column = torch.arange(tokens, device=valid.device).expand_as(valid)
                before = torch.where(valid, column, -1).cummax(1).values
                first = valid.to(torch.int8).argmax(1, keepdim=True)
                source = torch.where(valid.any(1, keepdim=True), torch.where(before >= 0, before, first), column)
            found = Padding(lead, frozenset(amounts), source)
        self._mask, self._key, self.found = weakref.ref(mask, self._forget), key, found
        return found

    def _forget(self, mask: weakref.ref[Tensor]) -> None:
        # What was found is of no use without the mask, and would be memory that nobody asked for.
        if mask is self._mask:
            self._mask = self.found = None


class KVLayer(CacheLayerMixin):
    """Cache layer over compressed pages.

    Order of events in a forward: `update` stages the new tokens and returns handles; the attention function calls
    `begin`, then `attend` (or attends to `dense` tensors), then `finish`, which seals. If no attention function that
    knows the handles runs, the next `update` does what is left.

    Args:
        scheme: the policy.
        reader: finds padding; shared by the layers of a cache.
        capacity: most tokens of a row, or None.
        defer: later layers attend to this layer's handles too (KV sharing), so sealing waits for the next update.
        debug: refuse keys and values that are not finite.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = True
    steps_plainly = True
    """Whether `attend` is all that layers of this class want to know of attention."""
    is_croppable = True  # type: ignore[assignment]

    def __init__(
        self,
        scheme: Scheme,
        reader: PaddingReader,
        capacity: int | None = None,
        defer: bool = False,
        debug: bool = False,
    ) -> None:
        self.scheme, self.reader, self.capacity, self.defer, self.debug = scheme, reader, capacity, defer, debug
        self.record_past = False
        # Token ids and their tags, where the scheme wants them: one record for all layers, kept by the cache.
        self.tokens: TokenRecord | None = None
        self.is_initialized = False
        self.edition = 0
        self._forget()

    def _forget(self) -> None:
        self.edition += 1
        self.seen = 0
        self.store: KVStore | None = None
        self.staged: tuple[Tensor, Tensor] | None = None
        self.padding: Padding | None = None
        self.uncommitted = False
        self.query_sum: Tensor | None = None
        self.query_count: Tensor | None = None
        self.new_columns = 0
        # What the last update was like, if it was in order.
        self.accepted: tuple[Any, ...] | None = None

    # What Transformers calls.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for tensors of this shape, dtype and device."""
        layout = self.scheme.layout(key_states.shape[-1], value_states.shape[-1])
        self.store = KVStore(layout, self.scheme, key_states, value_states, self.capacity)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.heads, self.batch_size = key_states.shape[1], key_states.shape[0]
        self.is_initialized = True

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
        self._check(key_states, value_states)
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        if self.store is None or (not self.seen and self._kind(key_states, value_states) != self._kind_held()):
            self.lazy_initialization(key_states, value_states)
        self._settle()
        self._demote()
        self.staged, self.padding = (key_states, value_states), None
        batch, heads, tokens, key_dim = key_states.shape
        self.new_columns = tokens
        self.seen += tokens
        self.edition += 1
        return handles(self, batch, heads, self.seen, key_dim, value_states.shape[3])

    def _check(self, keys: Tensor, values: Tensor) -> None:
        like = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
        if not self.seen or like != self.accepted:
            self._check_kind(keys, values)
        self.check_capacity(keys.shape[2])
        if self.debug and not (keys.isfinite().all() and values.isfinite().all()):
            raise ValueError(
                "update: keys or values hold NaN or infinity; nothing was cached. Look for the layer that made them "
                "(torch.autograd.detect_anomaly, or fp16 overflow: try bfloat16)."
            )
        self.accepted = like

    def _check_kind(self, keys: Tensor, values: Tensor) -> None:
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"update: got keys {tuple(keys.shape)} and values {tuple(values.shape)}, expected (batch, heads, "
                "tokens, dim) on both sides with the same batch, heads and tokens."
            )
        if not keys.is_floating_point():
            raise ValueError(f"update: got keys of {keys.dtype}, allowed floating point.")
        if keys.dtype != values.dtype or keys.device != values.device:
            raise ValueError(
                f"update: keys are {keys.dtype} on {keys.device} but values {values.dtype} on {values.device}; "
                "they must agree."
            )
        # An empty layer takes anything: what it had allocated is for reuse, not a promise.
        if self.store is not None and self.seen:
            *have, dtype, device = self._kind_held()
            *got, new_dtype, new_device = self._kind(keys, values)
            for name, a, b in zip(("batch size", "KV heads", "key dim", "value dim"), have, got, strict=True):
                if a != b:
                    raise ValueError(
                        f"update: got {name} {b}, but this cache was first used with {a}; use a new cache, or call "
                        "reset() first (what it holds is kept until then)."
                    )
            if (dtype, device) != (new_dtype, new_device):
                raise ValueError(
                    f"update: got {new_dtype} on {new_device}, but this cache was first used with {dtype} on "
                    f"{device}; use a new cache, or call reset() first."
                )

    @staticmethod
    def _kind(keys: Tensor, values: Tensor) -> tuple[Any, ...]:
        return (*keys.shape[:2], keys.shape[-1], values.shape[-1], keys.dtype, keys.device)

    def _kind_held(self) -> tuple[Any, ...]:
        dims = self._held().dims
        return self.batch_size, self.heads, dims["keys"], dims["values"], self.dtype, self.device

    def check_capacity(self, tokens: int) -> None:
        """Raises ValueError if ``tokens`` more exceed a fixed capacity."""
        if self.capacity is not None and self.seen + tokens > self.capacity:
            raise ValueError(
                f"max_cache_len: {self.seen} tokens and {tokens} new ones exceed the capacity of {self.capacity}; "
                "make the cache with a larger max_cache_len, or with none so that it grows."
            )

    def get_seq_length(self) -> int:
        """Logical tokens seen, padding included, whatever is still stored."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical length and offset for the mask of the coming forward."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Capacity in tokens, or -1."""
        return -1 if self.capacity is None else self.capacity

    # Transformers 5.17 asks under this name as well.
    get_max_cache_shape = get_max_length

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Dequantized keys (B, H, seen, D), or a first prompt's own; None before the first update."""
        return self.dense("keys") if self.seen else None

    @keys.setter
    def keys(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not None:
            raise AttributeError("keys: pages cannot be assigned; use update().")

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Dequantized values (B, H, seen, D), or a first prompt's own; None before the first update."""
        return self.dense("values") if self.seen else None

    @values.setter
    def values(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not None:
            raise AttributeError("values: pages cannot be assigned; use update().")

    def logical_shape(self, side: Side) -> tuple[int, int, int, int]:
        """(B, H, seen, D) of a side."""
        store = self._held()
        return self.batch_size, self.heads, self.seen, store.dims[side]

    def _held(self) -> KVStore:
        if self.store is None:
            raise RuntimeError("This cache layer is empty: call update() first.")
        return self.store

    def activate_past_recording(self) -> None:
        """From now on the newest tokens stay unsealed long enough to be taken back by `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens.

        Args:
            tokens_to_remove: minus the number of tokens; 0 does nothing but seal what is due.

        Raises:
            ValueError: positive, or more tokens than the layer has seen. Nothing is changed then.
        """
        # Transformers 5.17 passes a tensor.
        tokens = -int(tokens_to_remove)
        if tokens < 0:
            raise ValueError(
                f"crop: got {-tokens}, allowed 0 or minus the number of tokens to remove from the end, e.g. crop(-3)."
            )
        if tokens > self.seen:
            raise ValueError(f"crop: got {-tokens}, but only {self.seen} tokens are cached; nothing was removed.")
        if self.store is None:
            return
        self._settle(commit=False)
        if tokens:
            self.store.crop(tokens, self.seen)
            self.seen -= tokens
            self.edition += 1
        self._commit()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        if self.store is not None:
            self._settle()
            self.store.reorder(beam_idx)
            self._rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times; the copies share the pages that are full."""
        if self.store is not None:
            self._settle()
            rows = torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats)
            self.store.reorder(rows)
            self._rows(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows only (indices or a boolean mask)."""
        if self.store is not None:
            self._settle()
            rows = torch.arange(self.batch_size, device=self.device)[indices.to(self.device)]
            self.store.select(rows)
            self._rows(rows)

    def _rows(self, rows: Tensor) -> None:
        self.batch_size, self.accepted = rows.shape[0], None
        self.edition += 1
        if self.query_sum is not None and self.query_count is not None:
            rows = rows.to(self.query_sum.device)
            self.query_sum, self.query_count = self.query_sum[rows], self.query_count[:, rows]

    def reset(self) -> None:
        """Forgets everything. A cache of fixed capacity keeps its allocation for the next use of the same shape."""
        store = self.store
        self._forget()
        if self.capacity is not None and store is not None:
            store.clear()
            self.store = store
        else:
            self.is_initialized = False

    def offload(self) -> None:
        """Moves everything to the CPU."""
        if self.store is not None:
            self._settle()
            self.store.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Moves everything back."""
        if self.store is not None and self.store.device != self.device:
            self.store.to(self.device, non_blocking=True)

    # What attention functions call.

    @property
    def staged_length(self) -> int:
        """New tokens that are not in the store yet."""
        return 0 if self.staged is None else self.staged[0].shape[2]

    def begin(self, mask: Tensor | None, queries: int) -> bool:
        """Prepares one attention call.

        Args:
            mask: the mask the attention was given, or None; shows where padding is.
            queries: number of query rows.

        Returns:
            True if `attend` is to be called: the new tokens are in the store now. False for a prompt: attend to
            `dense` keys and values, which hold the new tokens as they came.
        """
        store = self._held()
        if self.staged is None:
            return queries <= 16 and not self.waits()
        keys, values = self.staged
        tokens = keys.shape[2]
        # With shared keys and values, a later layer may come without a mask: what was found stays.
        if mask is not None and (tokens > 1 or any(state.length == 0 for state in store.states)):
            self.padding = self.reader.read(mask, self.seen, tokens, store.row_lengths)
        if self._hold():
            store.reserve_tail(self._hold())
        holes = self.padding is not None and self.padding.source is not None
        if store.longest == 0 or not store.fits(tokens) or holes or self.waits():
            return False
        store.push(keys, values, self.padding)
        self.staged, self.uncommitted = None, True
        return True

    def plain_step(self, query: Tensor, scaling: float, softcap: float, mask: Tensor | None = None) -> Tensor | None:
        """`begin`, `attend` and `finish` of one new token a row, without sinks, in one call of the kernels.

        Args:
            query: (B, Hq, 1, D).
            scaling: factor on the logits.
            softcap: 0 for none.
            mask: see `attend`.

        Returns:
            (B, 1, Hq, Dv), as models take it; None where it has to go step by step: nothing is done then.
        """
        store = self.store
        if not self.steps_plainly or store is None or self.staged is None or query.shape[2] != 1:
            return None
        keys, values = self.staged
        if keys.shape[2] != 1 or self.padding is not None or self.record_past:
            return None
        sums, counts, observing = self.query_sum, self.query_count, None
        if "query" in self.scheme.needs and self.new_columns:
            if sums is None or counts is None:
                return None
            observing = Observing(sums, counts)
        # What is observed, or a tag, may have a say in what is sealed.
        seals = not self.defer and sums is None and "tags" not in self.scheme.needs
        done = store.step(query, keys, values, scaling, softcap, mask, seals, observing)
        if done is None:
            return None
        self.staged, self.new_columns = None, 0
        out, due = done
        self.uncommitted = due or self.defer
        if due and not self.defer:
            self._settle()
        return out

    def waits(self) -> bool:
        """Whether kernels of steps are still being compiled: meanwhile a step attends to dense keys and values."""
        return False

    def attend(
        self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends to the pages: (B, Hq, Q, D) to (B, Hq, Q, Dv); see `hfkvq.kernels.decode_attention`."""
        return self._held().attend(query, mask, scaling, softcap, sinks)

    def finish(
        self,
        query: Tensor,
        mask: Tensor | None = None,
        scaling: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """Observes the query (B, Hq, Q, D) if the scheme wants it, then seals what is due.

        The other arguments are those of `attend`, for schemes that observe probabilities.
        """
        # Once for the tokens of an update: with shared keys and values, later layers come here too.
        if "query" in self.scheme.needs and self.new_columns:
            self._observe(query)
        self.new_columns = 0
        if not self.defer:
            self._settle()

    def _observe(self, query: Tensor) -> None:
        if query.shape[2] > self.new_columns:
            # A packed step: query heads of one token stand where tokens are expected (see `handle`).
            query = query.flatten(1, 2)[:, :, None]
        sums, counts = self.query_sum, self.query_count
        if self.padding is None and sums is not None and counts is not None and query.shape[2] <= MAX_STEP:
            observe(query.detach() if query.requires_grad else query, sums, counts)
            return
        # Sums of f32 would depend on where padding stands; these are of few bits each.
        magnitude = query.detach().abs().double()
        batch, _, queries, _ = query.shape
        real = torch.ones(batch, queries, dtype=torch.bool, device=query.device)
        if self.padding is not None:
            # The newest queries may be all there are.
            column = (torch.arange(queries, device=query.device) + self.new_columns - queries).clamp(min=0)
            real = column >= self.padding.lead.to(query.device)[:, None]
            if self.padding.source is not None:
                real = real & (self.padding.source.to(query.device)[:, column] == column)
            magnitude = magnitude * real[:, None, :, None]
        total, count = magnitude.sum(2).unflatten(1, (self.heads, -1)).mean(2), real.sum(1, dtype=torch.int32)
        if sums is None or counts is None:
            # Each head counts for itself, as in a step without the host.
            self.query_sum, self.query_count = total, count.expand(self.heads, -1).contiguous()
        else:
            self.query_sum, self.query_count = sums + total, counts + count

    def _hold(self) -> int:
        return ROLLBACK if self.record_past else 0

    def _query_mean(self) -> Tensor | None:
        if self.query_sum is None or self.query_count is None:
            return None
        count = self.query_count[0, :, None, None]
        # A row that has shown no query since its last seal weighs its channels alike.
        return torch.where(count > 0, self.query_sum / count.clamp(min=1), 1.0).float()

    def _settle(self, commit: bool = True) -> None:
        """Does what is left of the last update: staged tokens join the store, and what is due is sealed."""
        store = self.store
        if store is None:
            return
        if self.staged is not None:
            before = None if self.query_sum is None else sealed_count(store.counters, "keys")
            store.extend(*self.staged, self.padding, self._hold(), self._query_mean(), self._tags())
            # Not earlier: if there was no memory, the tokens are still staged.
            self.staged = self.padding = None
            if before is not None:
                self._forget_queries(before)
        elif self.uncommitted and commit:
            self._commit()
        self.uncommitted = self.uncommitted and not commit

    def _commit(self) -> None:
        store, hold = self.store, self._hold()
        if store is not None and self.query_sum is None and "tags" not in self.scheme.needs:
            store.commit(hold)
        elif store is not None and store.is_due(hold):
            before = None if self.query_sum is None else sealed_count(store.counters, "keys")
            tags = self._tags() if self._is_tagged() else None
            store.commit(hold, self._query_mean(), tags)
            if before is not None:
                self._forget_queries(before)
        self.padding, self.uncommitted = None, False

    def _tags(self) -> ColumnTags | None:
        if "tags" not in self.scheme.needs:
            return None
        if self.tokens is None:
            _warn_without_tags(self.scheme.name)
            return None
        return self.tokens.shared_tags(self._held().device)

    def _is_tagged(self) -> bool:
        """Whether any token in the tail may have a tag."""
        tokens = self.tokens
        return tokens is None or self.seen - max(self._held().ahead().needs) < tokens.tagged

    def _demote(self) -> bool:
        """Gives tokens fewer bits if the prompt that is about to come has made them older, and the scheme wants it.

        Returns:
            Whether any token has moved.
        """
        tags = self._renewed_tags()
        return tags is not None and requantize_by_tags(self._held(), tags)

    def _renewed_tags(self) -> Tensor | None:
        """Tags by which tokens may have to be given fewer bits now."""
        tokens = self.tokens
        if self.store is None or tokens is None or "turns" not in self.scheme.needs:
            return None
        if not self.seen or tokens.renewed != self.seen:
            return None
        return tokens.tags_on(self.store.device)

    def _forget_queries(self, before: Tensor) -> None:
        """Starts over in rows whose keys were sealed: a row's statistics must not depend on its batch mates."""
        if self.query_sum is not None and self.query_count is not None:
            sealed = sealed_count(self._held().counters, "keys") > before
            self.query_sum = self.query_sum.masked_fill(sealed[:, None, None], 0.0)
            self.query_count = self.query_count.masked_fill(sealed, 0)

    def notes(self) -> list[Tensor]:
        """Small tensors beside the store: query statistics, the padding last found, token ids and tags."""
        found = [self.query_sum, self.query_count]
        found += [] if self.tokens is None else self.tokens.tensors()
        for padding in (self.padding, self.reader.found):
            found += [] if padding is None else [padding.lead, padding.source]
        return [tensor for tensor in found if tensor is not None]

    def dense(self, side: Side) -> Tensor:
        """Dequantized (B, H, seen, D) in logical order; newly staged tokens as they came."""
        store = self._held()
        new = None if self.staged is None else self.staged[side == "values"]
        before = self.seen - self.staged_length
        if new is not None and not before:
            return new
        old = store.dense(side, before, self.waits())
        return old if new is None else torch.cat([old, new], 2)

    def materialized(self, side: Side) -> Tensor:
        """`dense` for attention functions that know no handles."""
        return self.dense(side)

    def layout(self) -> Layout:
        """The static layout in use."""
        return self._held().layout

    def __deepcopy__(self, memo: dict[int, Any]) -> KVLayer:
        """Independent tensors, shared scheme."""
        new = copy.copy(self)
        new.store = copy.deepcopy(self.store, memo)
        new.tokens = copy.deepcopy(self.tokens, memo)
        new.reader = memo.setdefault(id(self.reader), PaddingReader())  # type: ignore[assignment]
        if self.staged is not None:
            new.staged = (self.staged[0].clone(), self.staged[1].clone())
        if self.query_sum is not None and self.query_count is not None:
            # Steps add to them in place.
            new.query_sum, new.query_count = self.query_sum.clone(), self.query_count.clone()
        return new
