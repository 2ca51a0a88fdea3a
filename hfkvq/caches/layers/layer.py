"""One attention layer of the cache: Transformers' contract on the outside, a `KVStore` on the inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hfkvq.kernels.pages import Side

from ..base.recorded import is_captured, is_recorded
from ..layer_state.smoothing import of_keys
from ..layer_state.update import check_update, is_allocated_for
from ..schemes.base import latent_layout
from ..store import KVStore
from . import transactions
from .handle import LazyKV, handles
from .paged import PagedLayer


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


class KVLayer(PagedLayer, CacheLayerMixin):
    """Cache layer over compressed pages.

    Order of events in a forward: `update` stages the new tokens and returns handles; `forward.attend` calls `begin`,
    then `attend` (or attends to `dense` tensors), then `finish`, which seals. If no attention function that knows the
    handles runs, the next `update` does what is left.

    """

    supports_early_init = True
    is_croppable = True  # type: ignore[assignment]

    keys = _Dense("keys")  # type: ignore[assignment]
    values = _Dense("values")  # type: ignore[assignment]

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        """True if queries see a window of the newest tokens; masks of such layers are made apart from the others'."""
        return self.window > 0

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """True if `torch.compile` can take steps: at a fixed capacity, unless tokens may be taken back, or are padding.

        Tokens may be taken back in assisted decoding; padding within rows needs masks. Steps over latents are captured.
        """
        steps = self.steps
        if steps is None or self.capacity is None or self.latents:
            return False
        return not self.record_past and not steps.sync.holes

    @property
    def parts(self) -> list[Any]:
        """Parts that change together with lengths and rows."""
        return [self]

    # Transformers calls these.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for tensors of this shape, dtype and device."""
        if self.eviction is not None:
            self.store = self.eviction.new_store(key_states, value_states)
        else:
            layout = self.scheme.layout(key_states.shape[-1], value_states.shape[-1])
            if self.latents:
                layout = latent_layout(self.scheme, key_states.shape[-1], value_states.shape[-1]) or layout
            layout = layout.in_window(self.window) if self.window else layout
            capacity = self.capacity if self.buffer is None else None
            self.store = KVStore(layout, self.scheme, key_states, value_states, capacity, self.offloaded)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.heads, self.batch_size = key_states.shape[1], key_states.shape[0]
        self.is_initialized = True
        if self.buffer is not None:
            self.buffer.start()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[LazyKV, LazyKV]:  # type: ignore[override]
        """Stages new tokens and returns handles to everything the layer holds.

        Args:
            key_states: (B, H, t, Dk), after RoPE.
            value_states: (B, H, t, Dv).
            *args: ignored.
            **kwargs: ignored.

        Returns:
            Handles of logical shape (B, H, columns, Dk) and (B, H, columns, Dv), of all tokens or those in the window.

        Raises:
            ValueError: shape, dtype or device differ from the first update's, the capacity is exceeded, or, in debug
                mode, an entry is not finite; or tokens are to be evicted by queries that attention did not show.
                Nothing is changed then.
        """
        if self.steps is not None:
            if is_recorded():
                return self.steps.record(key_states, value_states)  # type: ignore[return-value]
            self.steps.before_update(key_states.shape[2])
        check_update(self, key_states, value_states)
        if self.smooths and not self.seen:
            _, heads, _, dim = key_states.shape
            fits = self.smoothing is not None and self.smoothing.vectors.shape[1:] == (heads, dim)
            if not fits and (self.smooths_by_prompt or self.smoothing is not None):
                self.smoothing = of_keys(key_states)
        self.differentiated = key_states.requires_grad or value_states.requires_grad
        if self.differentiated:
            key_states, value_states = key_states.detach(), value_states.detach()
        if self.smoothing is not None:
            key_states = self.smoothing.keys(key_states)
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
        if self.tags is not None:
            self.tags.requantize(self)
        self.staged, self.padding = (key_states, value_states), None
        batch, heads, tokens, key_dim = key_states.shape
        self.new_columns = self.newest = tokens
        self.seen += tokens
        self.edition += 1
        if unseen and self.eviction is not None:
            self.eviction.group.warn_unseen(self.scheme.name)
        return handles(self, batch, heads, self.columns, key_dim, value_states.shape[3])

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
            if steps.is_recorded:
                return steps.seen_on_device()[0]
            steps.sync.catch_up()
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical length and offset for the mask of the coming forward; the capacity's where steps must look alike."""
        steps = self.steps
        if steps is not None:
            if steps.is_recorded or (query_length == 1 and steps.need_no_mask()):
                return steps.buffer.room, 0
            steps.sync.catch_up()
        return self.sizes(query_length)

    def activate_past_recording(self) -> None:
        """From now on the newest tokens stay unsealed long enough to be taken back by `crop`."""
        if self.steps is not None:
            self.steps.catch_up()
        self.record_past = True
        self.bind()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens.

        Args:
            tokens_to_remove: minus the number of tokens; 0 does nothing but seal what is due.

        Raises:
            ValueError: positive, no whole number, or more tokens than the layer has seen. Nothing is changed then.
            NotImplementedError: older tokens of a layer that has evicted some. Nothing is changed then.
        """
        transactions.crop(self.parts, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        transactions.reorder(self.parts, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times; the copies share the pages that are full."""
        transactions.repeat(self.parts, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows only (indices or a boolean mask)."""
        transactions.select(self.parts, indices)

    def reset(self) -> None:
        """Forgets everything, whatever has been before.

        A cache of fixed capacity keeps its allocation for the next use of the same shape, and every buffer stays.
        """
        store, buffer = self.store, self.buffer
        if self.steps is not None:
            self.steps.sync.forget()
        self.forget()
        self.is_initialized = False
        for part in (self.queries, self.eviction):
            if part is not None:
                part.forget()
        try:
            if buffer is not None:
                buffer.forget()
            if self.capacity is not None and store is not None:
                store.clear()
                self.store, self.is_initialized = store, True
                self.bind()
        except BaseException:
            # Without an allocation, then.
            self.store, self.is_initialized = None, False
            if buffer is not None:
                buffer.drop()
            raise

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
