"""Changes of lengths and rows: in all layers of a cache, or in none of them.

What becomes of each layer is worked out first, as another state of its store; nothing that anybody reads is written.
If that fails in any layer, all are what they were: what a store holds is a value, so there is nothing to copy, but the
states before are held until the last layer is done. Then open pages are written, which rows may have shared, what is
due is sealed, and the buffers of recorded steps get what they are to hold.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import outside_inference_mode
from ..layer_state.base import unchanged_on_error

Beside = Sequence[tuple[Any, Callable[[], None]]]
"""Objects that change with the layers, and the operation for each."""


def is_paged(layer: Any) -> bool:
    """True for a `KVLayer`; others change by the verbs that Transformers gives them."""
    return hasattr(type(layer), "before_change")


def crop(layers: Sequence[Any], tokens_to_remove: Any, beside: Beside = ()) -> None:
    """Takes back the newest tokens; see `KVLayer.crop`."""
    tokens = tokens_of(tokens_to_remove)
    if tokens < 0:
        raise ValueError(
            f"crop: got {-tokens}, allowed 0 or minus the number of tokens to remove from the end, e.g. crop(-3)."
        )
    for layer in filter(is_paged, layers):
        layer.catch_up()
        # Cross-attention of a model that was shown no image has none to remove.
        if 0 < layer.seen < tokens:
            raise ValueError(f"crop: got {-tokens}, but only {layer.seen} tokens are cached; nothing was removed.")
    _change(layers, lambda layer: layer.crop_alone(tokens), lambda layer: layer.crop(-tokens), beside, commit=False)


def tokens_of(tokens_to_remove: Any) -> int:
    """Minus the argument of `crop`, as a number."""
    try:
        # Transformers 5.17 passes a tensor.
        return -operator.index(tokens_to_remove)
    except TypeError:
        raise ValueError(
            f"crop: got {tokens_to_remove!r}, allowed 0 or minus the number of tokens to remove, a whole number."
        ) from None


def level(layers: Sequence[Any], seen: Callable[[Any], int | None], least: int, beside: Beside = ()) -> None:
    """Takes back what layers have seen (as ``seen`` says, None if that means nothing) beyond ``least`` tokens."""
    ahead = {id(layer): (seen(layer) or 0) - least for layer in layers}

    def own(layer: Any) -> None:
        layer.crop_alone(ahead[id(layer)])
        # Masks and queries of an interrupted forward are of no use any longer.
        layer.new_columns = 0
        if layer.eviction is not None:
            layer.eviction.pending = None

    _change(
        [layer for layer in layers if ahead[id(layer)] > 0],
        own,
        lambda layer: layer.crop(-ahead[id(layer)]),
        beside,
        commit=False,
    )


def take_rows(
    verb: str, given: Any, layers: Sequence[Any], beside: Callable[[Tensor], Beside] = lambda rows: ()
) -> None:
    """Row b becomes what another row was, by the rule of ``verb``; see `rows_of`."""
    batch = next((found for found in map(_batch_of, layers) if found), 0)
    rows = rows_of(verb, given, batch)
    if not batch:
        return

    def own(layer: Any) -> None:
        store = layer.held()
        change = store.select if verb == "batch_select_indices" else store.reorder
        layer.take_rows(rows.to(layer.device), change)

    _change(layers, own, lambda layer: layer.reorder_cache(rows), beside(rows))


def _batch_of(layer: Any) -> int:
    """Rows that a layer holds tokens of, 0 of an empty one."""
    if is_paged(layer):
        return layer.batch_size if layer.seen else 0
    if hasattr(layer, "rows"):
        return layer.rows or 0
    keys = getattr(layer, "keys", None)
    return keys.shape[0] if isinstance(keys, Tensor) and keys.numel() else 0


_ROWS = {
    "reorder_cache": "numbers of rows, i64 (B,)",
    "batch_select_indices": "numbers of rows as a sequence, slice or i64 (B,), or a mask of all rows, bool (B,)",
    "batch_repeat_interleave": "a positive number, or one for each row, i64 (B,)",
}
"""Arguments of the verbs, for errors."""


def rows_of(verb: str, given: Any, batch: int) -> Tensor:
    """Numbers i64 (B',) of the rows that a cache of ``batch`` rows is to hold.

    Args:
        verb: "reorder_cache" and "batch_select_indices" take numbers of rows, the latter counted from the end, too, and
            as a slice or mask; "batch_repeat_interleave" takes how often each row comes: one number, or one per row.
        given: number, slice, sequence, array or tensor, as DynamicCache takes it.

    Raises:
        ValueError: anything else, no row at all, or a row that does not exist.
    """
    repeats, selects = verb == "batch_repeat_interleave", verb == "batch_select_indices"
    found: Any = given
    try:
        if selects and (given is ... or isinstance(given, slice)):
            found = range(batch)[slice(None) if given is ... else given]
        elif repeats and not isinstance(given, bool):
            # Tensors of several numbers have no index.
            with contextlib.suppress(TypeError):
                times = operator.index(given)
                found = [times] * (batch or 1) if times > 0 else None
        if not isinstance(found, Tensor):
            found = torch.as_tensor(found.tolist() if hasattr(found, "tolist") else list(found), device="cpu")
        rows = found.cpu() if repeats or selects else found
        is_mask = selects and rows.dtype in (torch.bool, torch.uint8)
        plain = is_mask or not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
        if rows.dim() != 1 or not plain:
            raise TypeError
        if not batch:
            # An empty cache has no rows that could change.
            return rows
        every, rows = torch.arange(batch, device="cpu"), rows.bool() if is_mask else rows.long()
        if repeats:
            rows = every.repeat_interleave(rows)
        elif rows.device.type == "cpu":
            # On other devices this would synchronize. Rows are counted from the end in selections alone.
            rows = (every if selects or bool((rows >= 0).all()) else every[:0])[rows]
    except (TypeError, ValueError, IndexError, RuntimeError):
        shown = f"{given.dtype} {given.tolist()}" if isinstance(given, Tensor) else repr(given)
        raise ValueError(
            f"{verb}: got {shown}, but the cache holds {batch} rows; allowed {_ROWS[verb]}; nothing was changed."
        ) from None
    if not rows.numel():
        raise ValueError(f"{verb}: got no rows, allowed at least one; call reset() to forget all.")
    return rows


def reset(layers: Sequence[Any], beside: Beside = ()) -> None:
    """Forgets everything, in each layer, whatever fails in others."""
    with contextlib.ExitStack() as stack:
        for _, act in beside:
            stack.callback(act)
        for layer in reversed(layers):
            stack.callback(layer.reset)


@outside_inference_mode
def _change(
    layers: Sequence[Any],
    own: Callable[[Any], None],
    stock: Callable[[Any], None],
    beside: Beside = (),
    commit: bool = True,
) -> None:
    """Changes all layers or none; ``commit`` seals before what an update has left."""
    paged = [layer for layer in layers if is_paged(layer) and layer.seen]
    parts = [*layers, *(each for each, _ in beside)]
    for layer in paged:
        parts += layer.before_change(commit)
    with unchanged_on_error(parts):
        for layer in layers:
            if not is_paged(layer):
                stock(layer)
            elif layer.seen:
                own(layer)
        for _, act in beside:
            act()
    # A failure from here on leaves every layer as it is to be.
    with contextlib.ExitStack() as stack:
        for layer in paged:
            stack.callback(layer.bind)
        try:
            for layer in paged:
                layer.held().write_pages()
        except BaseException:
            # Begun, so it has to end; what is written twice does no harm.
            for layer in paged:
                layer.held().write_pages()
            raise
        for layer in paged:
            if layer.uncommitted:
                layer.seal_due()
