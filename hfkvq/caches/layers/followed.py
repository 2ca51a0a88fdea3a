"""Attention that a model computes itself, followed step by step and done over the pages at its end.

Classes like GPT-J's or Bloom's look no attention implementation up: they multiply queries with keys, add masks, take
the softmax and multiply with values. Handles of such a model's cache keep a note of what is done to them in place of
doing it; the last product is then attention as the kernels know it. Whatever a class does beside that, its own
functions are called on dequantized tensors, in the order noted: right, only slower. No class of Transformers is named
here, and none is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..callers import asked_for_probabilities
from ..traced import recorded_attention
from .base import LayerBase
from .forward import attend
from .handle import LazyKV, handles
from .lazy import LazyTensor
from .noted import LazyScores
from .scores import Scores, arguments_of, versions
from .steps import StepKV

ADDS_ZEROS = frozenset({"gpt_neox_japanese"})
"""Model types that give ``baddbmm`` a tensor of zeros to add to."""

HIDDEN_BELOW = -1e4
"""What takes this or less in place of a score is hidden: its probability is 0 in any dtype."""


def follow(layer: LayerBase, model_type: str) -> None:
    """Lets a layer's handles follow the attention of a model of this type."""
    layer.follows = model_type


RECORDABLE = frozenset({"bloom", "codegen", "gpt_neox_japanese", "gptj", "mpt"})
"""Model types whose steps can be recorded: they ask the host nothing, and the room for keys may be their number."""

COUNTS_KEYS = frozenset({"mpt"})
"""Of these, those that ask how many tokens there are as a number, to cut a bias to the keys that they are given."""

MASK_SIZES_BIAS = frozenset({"bloom"})
"""Of these, those whose bias is made from the padding mask: recorded steps show one of ones, with all columns."""


def recorded_handles(layer: LayerBase, step: StepKV, room: int) -> tuple[LazyKV, LazyKV]:
    """What an update returns in a recorded step: handles with columns for all that there is room for."""
    batch, heads, _, key_dim = step.keys.shape
    found = handles(layer, batch, heads, room, key_dim, step.values.shape[3])
    for each in found:
        each.step = step
    return found


def refuse_unseen(layer: LayerBase) -> ValueError:
    """What to say where tokens are to be evicted, and attention could not be followed."""
    return ValueError(
        f"scheme: {layer.scheme.name!r} evicts tokens by the queries that attention shows, but the own attention of "
        f"this model ({layer.follows}) could not be followed, or was asked for its probabilities (output_attentions); "
        "choose a scheme that keeps every token, e.g. 'kitty-pro'."
    )


def _scores_of(x: Any, probabilities: bool = False) -> Scores | None:
    """What is known of scores, or of probabilities; None of anything else."""
    scores = x._scores if isinstance(x, LazyScores) else None
    return scores if scores is not None and scores.probabilities == probabilities else None


# Products of queries with keys.


def _product(func: Any, query: Any, keys: Any) -> Any:
    return _begin((func, (query, keys), {}), query, keys, 1.0, None)


def _sum_and_product(func: Any, given: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    call = func, (given, batch1, batch2), {"beta": beta, "alpha": alpha}
    return _begin(call, batch1, batch2, float(alpha), (given, float(beta)))


def _begin(call: Any, query: Any, keys: Any, scaling: float, added: tuple[Any, float] | None) -> Any:
    if not isinstance(keys, LazyKV) or isinstance(query, LazyTensor) or keys.side != "keys":
        return NotImplemented
    if keys.form not in ("bhds", "nds") or query.shape[:-2] != keys.sizes[:-2]:
        return NotImplemented
    layer = keys.hfkvq_layer
    four = query if query.dim() == 4 else query.unflatten(0, (layer.batch_size, -1))
    shape = *query.shape[:-1], keys.sizes[-1]
    begun = LazyScores.noted(Scores(keys, four, scaling, versions=versions(query)), shape, query.dtype, call)
    if added is None or not added[1] or layer.follows in ADDS_ZEROS:
        return begun
    wide = _wide(begun, added[0])
    return (
        NotImplemented if wide is None else begun.then(call, added=((wide, added[1]),), versions=versions(query, wide))
    )


def _wide(scores: LazyScores, x: Any) -> Tensor | None:
    """A tensor that is combined with scores as (B or 1, Hq or 1, Q or 1, T); None if it does not fit."""
    known = scores._scores
    if known is None or not isinstance(x, Tensor) or isinstance(x, LazyTensor) or not 1 <= x.dim() <= len(scores.sizes):
        return None
    batch, heads, queries, _ = known.query.shape
    if len(scores.sizes) == 3 and x.dim() == 3 and x.shape[0] != 1:
        if x.shape[0] != batch * heads:
            return None
        x = x.unflatten(0, (batch, heads))
    while x.dim() < 4:
        x = x[None]
    sizes = batch, heads, queries
    fits = all(own in (1, size) for own, size in zip(x.shape, sizes, strict=False))
    return x if fits and x.shape[-1] == scores.sizes[-1] else None


# What is done to scores.


def _added(func: Any, x: Any, y: Any, *, alpha: float = 1) -> Any:
    scores, other = (x, y) if isinstance(x, LazyScores) else (y, x)
    known, wide = _scores_of(scores), None if alpha != 1 else _wide(scores, other)
    if known is None or wide is None or not wide.is_floating_point() or (known.hidden and wide.shape[1] > 1):
        # What a bias is added to after it was hidden might be seen again.
        return NotImplemented
    dtype = torch.promote_types(scores.kind, wide.dtype)
    return scores.then(
        (func, (x, y), {}), dtype, added=(*known.added, (wide, 1.0)), versions=known.versions + versions(wide)
    )


def _number(x: Any) -> float | None:
    """A factor that the host knows; None of anything else."""
    if isinstance(x, Tensor) and x.dim() == 0 and x.device.type == "cpu" and not isinstance(x, LazyTensor):
        x = x.item()
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x else None


def _scaled(func: Any, x: Any, y: Any, divides: bool) -> Any:
    scores, other = (x, y) if isinstance(x, LazyScores) or divides else (y, x)
    known, factor = _scores_of(scores), _number(other)
    if known is None or factor is None or known.hidden or known.bounded:
        return NotImplemented
    factor = 1 / factor if divides else factor
    added = tuple((each, own * factor) for each, own in known.added)
    return scores.then((func, (x, y), {}), scaling=known.scaling * factor, added=added)


def _multiplied(func: Any, x: Any, y: Any) -> Any:
    return _scaled(func, x, y, False)


def _divided(func: Any, x: Any, y: Any) -> Any:
    return _scaled(func, x, y, True)


def _hides(known: Scores, value: Any, does: str) -> bool:
    """Whether a value in place of a score hides its token; asks the device for it once for each place of a layer."""
    if isinstance(value, Tensor):
        if value.dim() or isinstance(value, LazyTensor):
            return False
        layer, place = known.keys._layer, (does, len(known.hidden), known.bounded)
        if value.device.type != "cpu" and place in layer.hides_by_tensor:
            return True
        hides = value.item() <= HIDDEN_BELOW
        if hides and value.device.type != "cpu":
            layer.hides_by_tensor |= {place}
        return hides
    return isinstance(value, (int, float)) and value <= HIDDEN_BELOW


def _filled(func: Any, x: Any, mask: Any, value: Any) -> Any:
    return _hidden((func, (x, mask, value), {}), x, mask, value, True)


def _chosen(func: Any, condition: Any, x: Any, y: Any) -> Any:
    return _hidden((func, (condition, x, y), {}), x, condition, y, False)


def _hidden(call: Any, x: Any, mask: Any, value: Any, where_true: bool) -> Any:
    known = _scores_of(x)
    wide = None if known is None else _wide(x, mask)
    if known is None or wide is None or wide.dtype != torch.bool or not _hides(known, value, "fill"):
        return NotImplemented
    return x.then(call, hidden=(*known.hidden, (wide, where_true)), versions=known.versions + versions(wide))


def _bounded(func: Any, x: Any, y: Any) -> Any:
    """Scores that are at least something that hides anyway."""
    known = _scores_of(x)
    if known is None or not isinstance(y, Tensor) or not _hides(known, y, "bound"):
        return NotImplemented
    return x.then((func, (x, y), {}), bounded=True)


def _softmax(func: Any, x: Any, dim: int | None = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None) -> Any:
    known = _scores_of(x)
    if func is not F.softmax and isinstance(_stacklevel, torch.dtype):
        dtype = _stacklevel
    # Who is to see probabilities needs all of them.
    if known is None or dim not in (-1, len(x.sizes) - 1) or asked_for_probabilities():
        return NotImplemented
    return x.then((func, (x, dim), {"dtype": dtype}), dtype, probabilities=True)


def _dropout(func: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return x if isinstance(x, LazyScores) and (not training or p == 0) else NotImplemented


def _same(func: Any, x: Any) -> Any:
    return x


def _converted(func: Any, x: Any, dtype: Any = None, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype", dtype) if func is not Tensor.float else torch.float32
    if isinstance(dtype, Tensor) and func is Tensor.type_as:
        dtype = dtype.dtype
    if not isinstance(x, LazyScores) or x._scores is None or not isinstance(dtype, torch.dtype):
        return NotImplemented
    if not dtype.is_floating_point or kwargs.get("device") is not None or kwargs.get("copy"):
        return NotImplemented
    return x if dtype == x.kind else x.then((Tensor.to, (x, dtype), {}), dtype)


def _viewed(func: Any, x: Any, *shape: Any) -> Any:
    """Batch and heads in one, or apart."""
    known = x._scores if isinstance(x, LazyScores) else None
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, torch.dtype)) else shape
    if known is None or not all(isinstance(size, int) for size in sizes) or list(sizes).count(-1) > 1:
        return NotImplemented
    batch, heads, queries, columns = *known.query.shape[:3], x.sizes[-1]
    for whole in ((batch, heads, queries, columns), (batch * heads, queries, columns)):
        if len(whole) == len(sizes) and all(a in (-1, b) for a, b in zip(sizes, whole, strict=True)):
            return LazyScores(x._place, whole, x.kind, known.query.device)
    return NotImplemented


# The product with values: attention.


def _finished(func: Any, x: Any, values: Any) -> Any:
    known = _scores_of(x, True)
    if known is None or not isinstance(values, LazyKV) or values.side != "values":
        return NotImplemented
    known.check_unchanged()
    layer, flat = values.hfkvq_layer, len(x.sizes) == 3
    if known.keys.hfkvq_layer is not layer or values.form != ("nsd" if flat else "bhsd"):
        return NotImplemented
    if values.sizes[:-2] != x.sizes[:-2]:
        return NotImplemented

    def dense() -> Tensor:
        found = func(x.materialize(), values.materialize())
        return found.unflatten(0, (layer.batch_size, -1)) if flat else found

    query = known.query.to(layer.dtype)
    arguments, padding_mask = arguments_of(layer, known)
    if values.step is None:
        out = attend(layer, query, arguments.explicit(query, values.sizes[-2]), dense, padding_mask)
    else:
        out = recorded_attention(values.step, query, arguments)
    out = out.to(values.kind).contiguous()
    return out.flatten(0, 1) if flat else out


def _with(handler: Callable[..., Any], *functions: Any) -> dict[Any, Callable[..., Any]]:
    """A handler for functions that come with which of them is meant."""
    return {func: partial(handler, func) for func in functions}


_PRODUCTS = torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm
LazyKV.handlers |= _with(_product, *_PRODUCTS) | _with(_sum_and_product, torch.baddbmm, Tensor.baddbmm)
LazyScores.handlers = (
    _with(_finished, *_PRODUCTS)
    | _with(_added, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
    | _with(_multiplied, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
    | _with(_divided, torch.div, Tensor.div, Tensor.__truediv__)
    | _with(_filled, torch.masked_fill, Tensor.masked_fill)
    | _with(_chosen, torch.where)
    | _with(_bounded, torch.max, torch.maximum)
    | _with(_softmax, F.softmax, torch.softmax, Tensor.softmax)
    | _with(_dropout, F.dropout)
    | _with(_same, Tensor.contiguous, Tensor.detach)
    | _with(_converted, Tensor.to, Tensor.float, Tensor.type_as)
    | _with(_viewed, Tensor.view, Tensor.reshape, torch.reshape)
)
