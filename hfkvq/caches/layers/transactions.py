"""Changes of lengths and rows: in all layers of a cache, or in none of them.

What becomes of each layer is worked out first, as another state of its store; nothing that anybody reads is written.
If that fails in any layer, all are what they were: what a store holds is a value, so there is nothing to copy, but the
states before are held until the last layer is done. Then open pages are written, which rows may have shared, what is
due is sealed, and the buffers of recorded steps get what they are to hold.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ..base import outside_inference_mode
from ..layer_state.base import LayerBase, unchanged_on_error

Beside = Sequence[tuple[Any, Callable[[], None]]]
"""Objects that change with the layers, and the operation for each."""


class PagedLayer(LayerBase, Protocol):
    """A `KVLayer`, as changes see it."""

    def before_change(self, commit: bool) -> list[Any]:
        """Does what steps and updates have left; the parts that change with the layer."""
        ...

    def crop_alone(self, tokens: int) -> None:
        """Takes back the newest tokens of this layer."""

    def forget_forward(self) -> None:
        """Forgets an interrupted forward."""

    def take_rows(self, rows: Tensor, change: Callable[[Tensor], None]) -> None:
        """Rows become those of these numbers."""

    def catch_up(self) -> None:
        """Makes sure that the host knows what recorded steps have left on the device."""

    def seal_due(self) -> None:
        """Seals what is due."""


def is_paged(layer: Any) -> TypeGuard[PagedLayer]:
    """True for a layer of ours; others change by the verbs that Transformers gives them."""
    return hasattr(type(layer), "before_change")


def crop(layers: Sequence[Any], tokens_to_remove: Any, beside: Beside = ()) -> None:
    """Takes back the newest tokens; see `KVLayer.crop`."""
    tokens = tokens_of(tokens_to_remove)
    if tokens < 0:
        raise ValueError(
            f"crop: got {-tokens}, allowed 0 or minus the number of tokens to remove from the end, e.g. crop(-3)."
        )
    for layer in _paged(layers):
        layer.catch_up()
        # Cross-attention of a model that was shown no image has none to remove.
        if 0 < layer.seen < tokens:
            raise ValueError(f"crop: got {-tokens}, but only {layer.seen} tokens are cached; nothing was removed.")
    _change(layers, lambda layer: layer.crop_alone(tokens), lambda layer: layer.crop(-tokens), beside, commit=False)


def tokens_of(tokens_to_remove: Any) -> int:
    """Minus the argument of `crop`, as a number.

    Raises:
        ValueError: no whole number.
    """
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

    def own(layer: PagedLayer) -> None:
        layer.crop_alone(ahead[id(layer)])
        layer.forget_forward()

    _change(
        [layer for layer in layers if ahead[id(layer)] > 0],
        own,
        lambda layer: layer.crop(-ahead[id(layer)]),
        beside,
        commit=False,
    )


def untouched(layers: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """Attributes by the layers' numbers, of those whose newest tokens may be more than can be taken back.

    Updates of layers that Transformers makes bind new tensors, so the old ones stay as they are; a window's pages are
    written again.
    """
    found = {}
    for i, layer in enumerate(layers):
        if not is_paged(layer):
            found[i] = dict(vars(layer))
        elif layer.window:
            found[i] = vars(layer) | {"store": copy.deepcopy(layer.store)}
    return found


def reorder(layers: Sequence[Any], rows: Tensor, beside: Beside = ()) -> None:
    """Row b becomes what row ``rows[b]`` was (i64 (B',))."""
    if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(f"reorder_cache: got {rows.dtype} of {tuple(rows.shape)}, allowed indices of rows, i64 (B,).")

    def own(layer: PagedLayer) -> None:
        _check_rows("reorder_cache", rows, 0, layer.batch_size)
        layer.take_rows(rows.to(layer.device), layer.held().reorder)

    _change(layers, own, lambda layer: layer.reorder_cache(rows), beside)


def repeat(layers: Sequence[Any], repeats: int, beside: Beside = ()) -> None:
    """Every row ``repeats`` times; the copies share the pages that are full."""
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"batch_repeat_interleave: got {repeats!r}, allowed a positive number.")

    def own(layer: PagedLayer) -> None:
        rows = torch.arange(layer.batch_size, device=layer.device).repeat_interleave(repeats)
        layer.take_rows(rows, layer.held().reorder)

    _change(layers, own, lambda layer: layer.batch_repeat_interleave(repeats), beside)


def select(layers: Sequence[Any], indices: Tensor, beside: Beside = ()) -> None:
    """Keeps these rows only (indices or a boolean mask)."""

    def own(layer: PagedLayer) -> None:
        if indices.dtype != torch.bool:
            _check_rows("batch_select_indices", indices, -layer.batch_size, layer.batch_size)
        rows = torch.arange(layer.batch_size, device=layer.device)[indices.to(layer.device)]
        _check_rows("batch_select_indices", rows, 0, layer.batch_size)
        layer.take_rows(rows, layer.held().select)

    _change(layers, own, lambda layer: layer.batch_select_indices(indices), beside)


def reset(layers: Sequence[Any], beside: Beside = ()) -> None:
    """Forgets everything, in each layer, whatever fails in others."""
    with contextlib.ExitStack() as stack:
        for _, act in beside:
            stack.callback(act)
        for layer in reversed(layers):
            stack.callback(layer.reset)


def _paged(layers: Sequence[Any]) -> list[PagedLayer]:
    return [layer for layer in layers if is_paged(layer)]


@outside_inference_mode
def _change(
    layers: Sequence[Any],
    own: Callable[[PagedLayer], None],
    stock: Callable[[Any], None],
    beside: Beside = (),
    commit: bool = True,
) -> None:
    """Changes all layers or none.

    Args:
        layers: of a cache.
        own: changes one of ours, that holds something.
        stock: changes one that Transformers has made.
        beside: see there.
        commit: whether what an update has left is sealed before.
    """
    paged = [layer for layer in _paged(layers) if layer.seen]
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
    _finish(paged)


def _finish(layers: Sequence[PagedLayer]) -> None:
    """Carries out what changes have left; a failure leaves every layer as it is to be."""

    def write() -> None:
        for layer in layers:
            layer.held().write_pages()

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.bind)
        try:
            write()
        except BaseException:
            # Begun, so it has to end; what is written twice does no harm.
            write()
            raise
        for layer in layers:
            if layer.uncommitted:
                layer.seal_due()


def _check_rows(verb: str, rows: Tensor, low: int, batch: int) -> None:
    if not rows.numel():
        raise ValueError(f"{verb}: got no rows, allowed at least one; call reset() to forget all.")
    # On other devices this would synchronize.
    if rows.device.type == "cpu" and not bool(((rows >= low) & (rows < batch)).all()):
        raise ValueError(f"{verb}: got rows {rows.tolist()}, but the cache holds {batch}; nothing was changed.")
