"""What is known of scores that a model computes itself, and the attention call that they amount to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments

from ..store import MAX_STEP
from .base import LayerBase
from .handle import LazyKV

SHOWS_PADDING = frozenset({"git"})
"""Model types that hide padding in a prompt and show some of it to later tokens, so that it has to be kept."""

_MADE = "hfkvq_made"


def versions(*tensors: Tensor) -> tuple[tuple[Tensor, int], ...]:
    """Tensors, and how often each has been written to; those of inference mode do not say."""
    return tuple((x, 0 if x.is_inference() else x._version) for x in tensors)


class Scores(NamedTuple):
    """What is known of scores, or of probabilities.

    Attributes:
        keys: handle of the keys.
        query: (B, Hq, Q, D).
        scaling: factor on the products.
        added: tensors (B or 1, Hq or 1, Q or 1, T) that are added then, and factors of theirs.
        hidden: bool tensors of such shapes, and whether they are True where a token is hidden, or where it is not.
        probabilities: whether the softmax has been taken.
        bounded: whether scores are at least something that hides.
        versions: of the tensors that are noted.
    """

    keys: LazyKV
    query: Tensor
    scaling: float
    added: tuple[tuple[Tensor, float], ...] = ()
    hidden: tuple[tuple[Tensor, bool], ...] = ()
    probabilities: bool = False
    bounded: bool = False
    versions: tuple[tuple[Tensor, int], ...] = ()

    def check_unchanged(self) -> None:
        """Raises RuntimeError if a tensor that was noted has been written to since."""
        if any(versions(x)[0][1] != version for x, version in self.versions):
            raise RuntimeError(
                "A query, mask or bias was changed in place while attention that was given it is still followed; work "
                "on a copy (x.clone()), or make the cache with attach=False."
            )


def arguments_of(layer: LayerBase, known: Scores) -> tuple[AttentionArguments, Tensor | None]:
    """Arguments of the call, and the mask in which padding is looked for."""
    masks = [(x, factor) for x, factor in known.added if x.shape[1] == 1]
    biases = [(x, factor) for x, factor in known.added if x.shape[1] > 1]
    shown = [_shown(x) if where_true else x for x, where_true in known.hidden if x.shape[1] == 1]
    padding_mask = masks[0][0] if masks else shown[0] if shown else None
    padding_mask = None if layer.follows in SHOWS_PADDING else padding_mask
    mask, bias = _sum(masks), _sum(biases)
    if bias is not None and layer.scheme.evicts:
        raise _refuse_bias(layer)
    for x, where_true in known.hidden:
        if mask is None:
            mask = _shown(x) if where_true else x
        elif mask.is_floating_point():
            mask = mask.masked_fill(x if where_true else ~x, torch.finfo(mask.dtype).min)
        else:
            mask = mask & (~x if where_true else x)
    arguments = AttentionArguments(known.scaling, mask, bias=bias, causal=False)
    if bias is not None:
        arguments = arguments._replace(bias=bias)
        if mask is not None and known.query.shape[2] <= MAX_STEP:
            # All layers of a step have the same.
            arguments = arguments._replace(mask=_made(mask, (bias,), lambda: arguments.biased().mask), bias=None)
    return arguments, padding_mask


def _sum(parts: list[tuple[Tensor, float]]) -> Tensor | None:
    """The sum of tensors times factors; a single one is made once for all layers."""
    if not parts:
        return None
    (first, factor), *more = parts
    total = first if factor == 1 else _made(first, (factor,), lambda: first * factor)
    for x, own in more:
        total = total + x * own
    return total


def _shown(hidden: Tensor) -> Tensor:
    """True where a mask is False, made once for all layers."""
    return _made(hidden, ("shown",), lambda: ~hidden)


def _made(holder: Tensor, of: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What ``make`` makes of a mask and other tensors, kept with the mask: all layers of a forward are given the same.

    Models may make new views of the same tensors in each layer, so tensors count as the same by where they lie.
    """

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version

    own, others = place(holder), tuple(map(place, of))
    found = getattr(holder, _MADE, None)
    if found is None or found[:2] != (own, others):
        # The others are kept, that nothing else comes to lie where they are.
        found = own, others, of, make()
        setattr(holder, _MADE, found)
    return found[3]


def _refuse_bias(layer: LayerBase) -> ValueError:
    return ValueError(
        f"scheme: {layer.scheme.name!r} evicts tokens, but the own attention of this model ({layer.follows}) adds a "
        "bias for each head and column, where tokens move up; choose a scheme that keeps every token, e.g. 'kitty-pro'."
    )
