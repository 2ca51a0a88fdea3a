"""Interface of a layer for its parts, handles and the forward: its state, and the verbs of an attention call."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.pages import Side

from ..schemes.base import Scheme
from ..store import KVStore, Padding
from .smoothing import KeySmoothing


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
        # The result is useless without the mask, and would only hold memory.
        if mask is self._mask:
            self._mask = self.found = None


ROLLBACK = 64
"""Newest tokens that stay unsealed while tokens may be taken back (assisted decoding)."""


def uneven(first: int | None, last: int | None) -> RuntimeError:
    """Error text for layers of a cache that hold different tokens."""
    return RuntimeError(
        f"The cache's first layer has seen {first} tokens and its last one {last}: a forward was interrupted, or the "
        "cache was made for a model with more layers. Call reset() to begin again, or level() to take back what came "
        "since the last forward that reached every layer."
    )


@contextlib.contextmanager
def unchanged_on_error(things: Sequence[Any]) -> Iterator[None]:
    """If anything fails, all attributes of these are what they were; what is written in place is not."""
    # Linear attention keeps its states in dicts.
    saved = [{name: dict(x) if type(x) is dict else x for name, x in vars(each).items()} for each in things]
    try:
        yield
    except BaseException:
        for each, was in zip(things, saved, strict=True):
            vars(each).clear()
            vars(each).update(was)
        raise


class LayerBase:
    """State of a layer, and what its parts may ask of it.

    Attributes:
        store: keys and values; None before the first update.
        seen: logical tokens given, padding included, whatever is still stored. Steps that were replayed are not counted
            until the layer is told of them.
        staged: (B, H, t, Dk) and (B, H, t, Dv), tokens of the last update that are not in the store yet.
        padding: among them.
        uncommitted: whether something that is in the store may be due to be sealed.
        new_columns: tokens of an update whose queries have not been shown yet.
        evicted: whether tokens of the middle are gone, so that `dense` has zeros in their place.
        differentiated: whether the last update's keys or values would have got a gradient; see `gradient`.
        record_past: whether the newest tokens stay unsealed, so that they can be taken back.
        latents: whether keys are latents and values their rotary parts, which a step attends to as they are.
        holds_latents: whether they are such, however a step attends to them.
        own_attention: the model's type, where the model looks no attention implementation up; else empty.
        edition: grows whenever the layer changes, by which handles know whether they are good.
        offloaded: whether pages lie in the host's memory.
        window: tokens that a query sees; 0 for all.
        newest: tokens of the last update, until they are taken back or graphs have run on.
        smoothing: by which keys are smoothed as they come, and queries as they attend; None where keys stay as they
            are. Whatever the layer holds, `staged` included, is smoothed. Its cache gives it to an empty layer.
        smooths_by_prompt: whether a first prompt gives it, since the cache's model does not.
    """

    dtype: torch.dtype
    device: torch.device
    heads: int
    batch_size: int
    latents = holds_latents = smooths_by_prompt = False
    own_attention = ""

    def __init__(
        self, scheme: Scheme, reader: PaddingReader, capacity: int | None, defer: bool, debug: bool, window: int = 0
    ) -> None:
        self.window = window
        self.scheme, self.reader, self.capacity, self.defer, self.debug = scheme, reader, capacity, defer, debug
        self.record_past = self.is_initialized = self.offloaded = False
        self.edition = 0
        self.forget()

    def forget(self) -> None:
        """Forgets all tokens."""
        self.edition += 1
        self.seen = self.new_columns = self.newest = 0
        self.store: KVStore | None = None
        self.staged: tuple[Tensor, Tensor] | None = None
        self.padding: Padding | None = None
        self.uncommitted = self.evicted = self.differentiated = self.keeps_logits = False
        self.smoothing: KeySmoothing | None = None
        # Shapes, dtypes and devices of the last update, if it was in order.
        self.accepted: tuple[Any, ...] | None = None

    @property
    def smooths(self) -> bool:
        """True if the layer is to have `smoothing`; latents are keys and values at once, and go without."""
        return self.scheme.smooths_keys and not self.holds_latents

    def smoothed_query(self, query: Tensor) -> Tensor:
        """Queries (B, Hq, Q, D) as they attend to what the layer holds."""
        return query if self.smoothing is None else self.smoothing.queries(query)

    def keep_logits(self) -> None:
        """Lets logits be those of the model, before anything but a first prompt's tokens has been smoothed.

        For attention with a softcap or sinks, which is not blind to a number that is added to all logits of a query.
        """
        own = self.smoothing
        if own is None or self.keeps_logits:
            return
        self.keeps_logits = True
        if not own.shifts:
            return
        if self.store is not None and self.store.longest:
            raise RuntimeError(
                "smooth_keys: this layer's keys have been centred, and attention now has a softcap or sinks, which it "
                "did not have before; begin with an empty cache, made with smooth_keys=False."
            )
        self.smoothing = own.centred_at_zero()
        if self.staged is not None:
            keys, values = self.staged
            self.staged = self.smoothing.keys(own.raw(keys)), values

    def held(self) -> KVStore:
        """The store.

        Raises:
            RuntimeError: there is none yet.
        """
        if self.store is None:
            raise RuntimeError("This cache layer is empty: call update() first.")
        return self.store

    @property
    def staged_length(self) -> int:
        """New tokens that are not in the store yet."""
        return 0 if self.staged is None else self.staged[0].shape[2]

    @property
    def columns(self) -> int:
        """Logical columns that handles have: those that any query of the last update sees."""
        before = self.seen - self.newest
        return self.newest + (min(before, self.window - 1) if self.window else before)

    def sizes(self, queries: int) -> tuple[int, int]:
        """Length and offset of what so many coming queries see, in logical columns."""
        held = min(self.seen, self.window - 1) if self.window else self.seen
        return held + queries, self.seen - held

    @property
    def hold(self) -> int:
        """Newest tokens that stay unsealed, beyond what the layout says."""
        return ROLLBACK if self.record_past else 0

    def logical_shape(self, side: Side) -> tuple[int, int, int, int]:
        """(B, H, columns, D) of a side."""
        return self.batch_size, self.heads, self.columns, self.held().dims[side]

    def check_capacity(self, tokens: int) -> None:
        """Raises ValueError if ``tokens`` more exceed a fixed capacity."""
        if self.capacity is not None and self.seen + tokens > self.capacity:
            raise ValueError(
                f"max_cache_len: {self.seen} tokens and {tokens} new ones exceed the capacity of {self.capacity}; "
                "make the cache with a larger max_cache_len, or with none so that it grows."
            )

    def get_max_length(self) -> int:
        """Capacity in tokens, or -1."""
        return -1 if self.capacity is None else self.capacity

    # Transformers 5.17 asks under this name as well.
    get_max_cache_shape = get_max_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stages new tokens; see `KVLayer.update`."""
        raise NotImplementedError

    def step(self, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
        """The whole step of the staged tokens, or None; see `KVLayer.step`."""
        return None

    def begin(self, mask: Tensor | None, queries: int) -> bool:
        """Prepares one attention call; see `KVLayer.begin`."""
        raise NotImplementedError

    def attend(self, query: Tensor, arguments: AttentionArguments) -> Tensor:
        """Attends to the pages; see `KVLayer.attend`."""
        raise NotImplementedError

    def finish(self, query: Tensor, arguments: AttentionArguments) -> None:
        """Ends an attention call; see `KVLayer.finish`."""
        raise NotImplementedError

    def settle(self, commit: bool = True) -> None:
        """Does what is left of the last update; see `KVLayer.settle`."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets the counters count what the last step has sealed; see `KVLayer.close`."""
        raise NotImplementedError

    def bind(self) -> None:
        """Brings what the layer holds to where recorded steps look for it; see `KVLayer.bind`."""
        raise NotImplementedError

    def dense(self, side: Side) -> Tensor:
        """Dequantized keys or values; see `KVLayer.dense`."""
        raise NotImplementedError

    def check_complete(self) -> None:
        """Raises RuntimeError if tokens have been evicted: zeros in their place would draw attention."""
        if self.evicted:
            raise RuntimeError(
                f"{self.scheme.name}: tokens have been evicted, so only the 'hfkvq' attention (attach=True) "
                "and sdpa can attend to this cache."
            )


class Part:
    """A part of a layer that knows its layer weakly: nothing may keep a layer whose cache is gone."""

    def __init__(self, layer: LayerBase) -> None:
        self._layer = weakref.ref(layer)

    @property
    def layer(self) -> LayerBase:
        """Layer that this part belongs to."""
        layer = self._layer()
        assert layer is not None, "a part is held by its layer"
        return layer

    def attach(self, layer: LayerBase) -> None:
        """Makes it this layer's part, after a copy or from a file."""
        self._layer = weakref.ref(layer)

    def copy_for(self, layer: LayerBase, memo: dict[int, Any]) -> Any:
        """A copy for the copy of its layer, which shares everything with it but what the layer replaces."""
        new = memo[id(self)] = copy.copy(self)
        new.attach(layer)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The part of the layer's copy."""
        copy.deepcopy(self.layer, memo)
        return memo[id(self)]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the layer, which attaches its parts again."""
        return {name: value for name, value in self.__dict__.items() if name != "_layer"}
