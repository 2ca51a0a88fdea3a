"""Scores that a model computes itself, not computed: a note of what was done to cached keys, shared by views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .lazy import LazyTensor, dense_of
from .scores import Scores


class _Noted:
    """What is known of scores, and how to compute them; or else the tensor that they have been computed to."""

    __slots__ = ("call", "dense", "scores")

    def __init__(self, scores: Scores | None, call: Any = None, dense: Tensor | None = None) -> None:
        self.scores, self.call, self.dense = scores, call, dense

    def compute(self) -> Tensor:
        """What the model's own functions make of dequantized keys."""
        if self.dense is not None:
            return self.dense
        assert self.scores is not None
        self.scores.check_unchanged()
        func, args, kwargs = self.call
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs))


class _Seen:
    """Scores as they were when a function was given them, whatever is written to them later."""

    __slots__ = ("noted", "sizes")

    def __init__(self, x: LazyScores) -> None:
        self.noted, self.sizes = x._place[0], x.sizes


def _computed(x: Any) -> Any:
    return x.noted.compute().reshape(x.sizes) if isinstance(x, _Seen) else dense_of(x)


class LazyScores(LazyTensor):
    """Scores of queries against cached keys, or their probabilities: (B, Hq, Q, T) or (B*Hq, Q, T), not computed.

    Views share a place, so what is written to one of them all of them show.
    """

    _place: list[_Noted]

    @staticmethod
    def __new__(
        cls, place: list[_Noted], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> LazyScores:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.sizes, made.kind, made._place = shape, dtype, place
        return made

    @classmethod
    def noted(cls, scores: Scores, shape: tuple[int, ...], dtype: torch.dtype, call: Any) -> LazyScores:
        """New scores, and the function that makes them."""
        func, args, kwargs = call
        args = tuple(_Seen(x) if isinstance(x, LazyScores) else x for x in args)
        return cls([_Noted(scores, (func, args, kwargs))], shape, dtype, scores.query.device)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything happens in ``__new__``."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Logical shape; never the data."""
        return f"LazyScores({self.sizes})"

    @property
    def _scores(self) -> Scores | None:
        return self._place[0].scores

    def materialize(self) -> Tensor:
        """What the model's own functions make of dequantized keys."""
        return self._place[0].compute().reshape(self.sizes)

    def settle(self) -> Tensor:
        """Computes the scores; from now on they are a tensor like any other, and so are their views."""
        if self._scores is not None:
            self._place[0] = _Noted(None, dense=self.materialize().clone(memory_format=torch.contiguous_format))
        return self.materialize()

    def write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Computes the scores and lets them be written to."""
        dense = self.settle()
        found = func(
            *(dense if x is self else tree_map(dense_of, x) for x in args),
            **{name: dense if x is self else tree_map(dense_of, x) for name, x in kwargs.items()},
        )
        return self if found is dense else found

    @classmethod
    def compute(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of the scores; where it gives a view of them, they are computed for good: it may be written to."""
        made: list[tuple[LazyScores, Tensor]] = []

        def dense(x: Any) -> Any:
            found = dense_of(x)
            if isinstance(x, LazyScores) and x._scores is not None:
                made.append((x, found))
            return found

        found = func(*tree_map(dense, args), **tree_map(dense, kwargs))
        leaves = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        for x, own in made:
            lies = own.untyped_storage().data_ptr()
            if func in _ITERATES or any(leaf.untyped_storage().data_ptr() == lies for leaf in leaves):
                x.settle()
                return cls.compute(func, args, kwargs)
        return found

    def change(self, func: Any, writes: Any, other: Any) -> LazyScores:
        """What ``x += y`` and its like do: notes it, or writes to what is computed; ``x`` stays the same tensor."""
        handler = type(self).handlers.get(func)
        found = NotImplemented if handler is None or self._scores is None else handler(self, other)
        if not isinstance(found, LazyScores) or found.kind != self.kind:
            return self.write(writes, (self, other), {})
        self._place[0] = found._place[0]
        return self

    def __iadd__(self, other: Any) -> LazyScores:  # type: ignore[override]
        return self.change(Tensor.add, Tensor.add_, other)

    def __isub__(self, other: Any) -> LazyScores:  # type: ignore[override]
        return self.change(Tensor.sub, Tensor.sub_, other)

    def __imul__(self, other: Any) -> LazyScores:  # type: ignore[override]
        return self.change(Tensor.mul, Tensor.mul_, other)

    def __itruediv__(self, other: Any) -> LazyScores:  # type: ignore[override]
        return self.change(Tensor.div, Tensor.div_, other)

    def then(self, call: tuple[Any, Any, Any], dtype: torch.dtype | None = None, **changes: Any) -> LazyScores:
        """The same after one more function."""
        assert self._scores is not None
        return LazyScores.noted(self._scores._replace(**changes), self.sizes, dtype or self.kind, call)


_ITERATES = frozenset({Tensor.__iter__, Tensor.numpy})
"""Functions that give views that are no tensors, or not yet."""
