"""A cache whose operations happen in all of its layers or in none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..layer_state.base import uneven
from . import transactions
from .build import seen_by
from .layer import KVLayer
from .recurrent import RecurrentLayer, StatePlaces


def check_layers(layers: Sequence[KVLayer]) -> None:
    """Raises RuntimeError if what layers hold contradicts itself; see `MixedKVCache.integrity_check`."""
    rows = {layer.batch_size for layer in layers if layer.seen}
    found = [f"layers hold {sorted(rows)} rows"] if len(rows) > 1 else []
    for i, layer in enumerate(layers):
        found += [f"layer {i}: {what}" for what in layer.contradictions()]
    if found:
        raise RuntimeError(f"integrity_check: {'; '.join(found)}. Call reset(), and report this.")


class WholeCache:
    """Operations of a `Cache` over all of its layers.

    Attributes:
        config: of the model's decoder.
        layers: in the model's order.
        graphs: of captured steps; None where none are.
    """

    config: Any
    layers: Any
    graphs: Any
    _capacity: int | None
    _compressed: tuple[int, ...]
    _counting: tuple[int, ...]
    _first: int

    def _count_by(self, config: Any) -> None:
        """Finds the layers that are given every token, by the config of the decoder."""
        # These are given an image's tokens.
        others = set(getattr(config, "cross_attention_layers", None) or ())
        known = [i for i, layer in enumerate(self.layers) if seen_by(layer) is not None and i not in others]
        self._counting, self._first = tuple(known), known[0] if known else -1

    @property
    def compressed_layers(self) -> list[KVLayer]:
        """The layers that are held in pages."""
        return [self.layers[i] for i in self._compressed]  # type: ignore[misc]

    @property
    def _parts(self) -> list[Any]:
        """The layers, and the recurrent states of those with attention beside."""
        return [part for layer in self.layers for part in getattr(layer, "parts", (layer,))]

    @property
    def states(self) -> StatePlaces:
        """Recurrent states of all layers."""
        return StatePlaces([part for part in self._parts if isinstance(part, RecurrentLayer)])

    def _catch_up(self) -> None:
        for layer in self.compressed_layers:
            layer.catch_up()

    def _check_capacity(self, tokens: int) -> None:
        """Raises ValueError if so many more tokens exceed a fixed capacity."""
        if self._capacity is not None and self._compressed:
            # Stock layers have no capacity, and may come first.
            first = self.compressed_layers[0]
            if first.steps is not None:
                first.steps.sync.catch_up()
            first.check_capacity(tokens)

    def _check_even(self) -> None:
        """Raises RuntimeError if a forward has not reached the last layer: tokens come layer by layer."""
        self.states.check()
        layers = self.layers
        first, last = seen_by(layers[self._first]), seen_by(layers[self._counting[-1]])
        if first != last:
            raise uneven(first, last)

    def _beside(self, verb: str, given: Any = None) -> transactions.Beside:
        """Further parts that change with the layers when ``verb`` is called."""
        return ()

    def level(self, seen: int | None = None) -> None:
        """Takes tokens out again that an interrupted forward has left in some layers.

        A page that these tokens had filled is reopened with the values it holds.

        Args:
            seen: tokens to go back to; None for as many as all layers have.

        Raises:
            NotImplementedError: a layer has evicted tokens since, or recurrent states have them. Nothing is changed
                then; call `reset`.
        """
        if self.states.tensors():
            raise NotImplementedError("level: tokens cannot be taken out of recurrent states; call reset().")
        self.level_pages(seen)

    def note_step(self, input_ids: Tensor | None) -> None:
        """Takes note of the tokens of a step that is about to be replayed."""

    def level_pages(self, seen: int | None = None) -> None:
        """Takes tokens out again as `level` does, whatever recurrent states have."""
        self._catch_up()
        counting = [self.layers[i] for i in self._counting]
        least = min((seen_by(layer) or 0 for layer in counting), default=0) if seen is None else seen
        transactions.level(counting, seen_by, least, self._beside("crop"))

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens; see `KVLayer.crop`. Nothing is changed if that cannot be done in any layer."""
        tokens, beside = transactions.tokens_of(tokens_to_remove), self._beside("crop")
        if tokens < 0 or self.graphs is None or not self.graphs.take_back(tokens):
            transactions.crop(self._parts, -tokens, beside)
            return
        for _, act in beside:
            act()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # type: ignore[override]
        """Row b becomes what row ``beam_idx[b]`` was (i64 (B',)), or nothing is changed."""
        transactions.reorder(self._parts, beam_idx, self._beside("reorder_cache", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, or nothing is changed."""
        transactions.repeat(self._parts, repeats, self._beside("batch_repeat_interleave", repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows only (indices or a boolean mask), or nothing is changed."""
        transactions.select(self._parts, indices, self._beside("batch_select_indices", indices))

    def reset(self) -> None:
        """Forgets everything, whatever has been before; a cache of fixed capacity keeps its allocation."""
        transactions.reset(self.layers, self._beside("reset"))

    def integrity_check(self) -> None:
        """Raises RuntimeError if what the cache holds contradicts itself; asks the device for counters and tables.

        Layers must have seen the same tokens of the same rows, counters be in range and what the host knows of them,
        every token stand in one place, pages that are written to belong to one row, buffers of recorded steps hold what
        the layers do, and bytes be counted. Only a fault of the library, or an interrupt within it, can break that.
        """
        self._catch_up()
        check_layers(self.compressed_layers)
        seen = [seen_by(self.layers[i]) for i in self._counting]
        if len(set(seen)) > 1:
            raise uneven(max(seen), min(seen))  # type: ignore[type-var]
