"""Checks of layers' contents against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..store.integrity import contradictions
from .paged import PagedLayer


def check_layers(layers: Sequence[PagedLayer]) -> None:
    """Raises RuntimeError if what layers hold contradicts itself; see `MixedKVCache.integrity_check`."""
    rows = {layer.batch_size for layer in layers if layer.seen}
    found = [f"layers hold {sorted(rows)} rows"] if len(rows) > 1 else []
    for i, layer in enumerate(layers):
        found += [f"layer {i}: {what}" for what in _contradictions(layer)]
    if found:
        raise RuntimeError(f"integrity_check: {'; '.join(found)}. Call reset(), and report this.")


def _contradictions(layer: PagedLayer) -> Iterator[str]:
    store = layer.store
    if store is None:
        if layer.seen:
            yield f"{layer.seen} tokens and no store"
        return
    if layer.buffer is not None:
        layer.buffer.close()
    yield from contradictions(store.state, layer.seen - layer.staged_length)
    fold = getattr(store, "fold", 1)
    if layer.seen and store.batch != layer.batch_size * fold:
        yield f"{layer.batch_size} rows, and {store.batch} in the store"
    for part in () if layer.queries is None else layer.queries.tensors():
        if layer.seen and layer.batch_size not in part.shape[:2]:
            yield f"statistics of queries of shape {tuple(part.shape)} for {layer.batch_size} rows"
    if layer.eviction is not None and layer.seen:
        by_row, by_head = layer.eviction.notes()
        wrong = [x for x in by_row if x.shape[0] != layer.batch_size] + [x for x in by_head if len(x) != store.batch]
        if wrong:
            yield f"notes of an eviction of {wrong[0].shape[0]} rows for {layer.batch_size}"
    if _is_elsewhere(layer):
        yield "the buffer of recorded steps does not hold what the layer does"


def _is_elsewhere(layer: PagedLayer) -> bool:
    """True if there is a buffer, and a settled layer's tensors are not those in it."""
    state = None if layer.buffer is None else layer.buffer.state
    if state is None or layer.store is None or layer.staged is not None or layer.uncommitted:
        return False
    held = [layer.store.counters, *layer.store.windows]
    return any(own is not there for own, there in zip(held, [state.counters, *state.windows], strict=True))
