"""Search spaces: the knobs of a scheme, as Optuna's distributions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.trial import Trial

from hfkvq.caches.schemes.base import Scheme, get_scheme, list_schemes, nearest

Space = dict[str, BaseDistribution]


def space_of(scheme: Scheme, ranges: Mapping[str, Sequence[Any]] | None = None, *, optional: bool = False) -> Space:
    """Search space of a scheme: each knob that names a range to search (``knob(..., search=...)``).

    Args:
        scheme: its other knobs stay as they are.
        ranges: in place of the knobs' own, by knob: ``(low, high)`` of numbers, or a list of choices. If given, these
            knobs alone are searched.
        optional: whether the space may be empty.

    Returns:
        Distributions by knob, in the order of the scheme's fields.

    Raises:
        ValueError: an unknown knob, an empty or reversed range, values that the knob does not allow, or a scheme none
            of whose knobs is searched.
    """
    fields = {field.name: field for field in dataclasses.fields(scheme)}
    for name in ranges or {}:
        if name not in fields:
            raise ValueError(f"space: {scheme.name} has no knob {name!r}; {nearest(name, list(fields))}")
    chosen = dict(ranges or scheme.searched())
    if not chosen and not optional:
        raise ValueError(
            f"space: {scheme.name!r} has no knob that is searched by default; name ranges, e.g. "
            "{'sink_length': [0, 32, 64]}."
        )
    space = {name: _distribution(name, chosen[name], fields[name]) for name in fields if name in chosen}
    for name, distribution in space.items():
        for value in _ends(distribution):
            # Schemes check their own knobs.
            try:
                get_scheme(scheme, **{name: value})
            except ValueError as error:
                raise ValueError(f"space: {error}") from None
    return space


def _distribution(name: str, search: Sequence[Any], field: dataclasses.Field[Any]) -> BaseDistribution:
    if isinstance(search, str) or not isinstance(search, Sequence) or not search:
        raise ValueError(f"space: {name}: got {search!r}, allowed (low, high) or a list of choices.")
    if not isinstance(search, tuple):
        return CategoricalDistribution(list(search))
    if len(search) != 2 or not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in search):
        raise ValueError(f"space: {name}: got {search!r}, allowed (low, high) or a list of choices.")
    low, high = search
    if low > high:
        raise ValueError(f"space: {name}: got {low} to {high}, allowed low <= high.")
    if isinstance(field.default, int) and not isinstance(field.default, bool):
        return IntDistribution(int(low), int(high))
    return FloatDistribution(float(low), float(high))


def _ends(distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    return (distribution.low, distribution.high)


def suggest(trial: Trial, name: str, distribution: BaseDistribution) -> None:
    """Chooses a trial's value of a knob."""
    if isinstance(distribution, CategoricalDistribution):
        trial.suggest_categorical(name, distribution.choices)
    elif isinstance(distribution, IntDistribution):
        trial.suggest_int(name, distribution.low, distribution.high)
    else:
        assert isinstance(distribution, FloatDistribution)
        trial.suggest_float(name, distribution.low, distribution.high)


def describe(space: Space) -> dict[str, Any]:
    """Distributions as plain data, to compare spaces."""
    return {name: json.loads(distribution_to_json(distribution)) for name, distribution in space.items()}


def published(scheme: Scheme, space: Space) -> list[dict[str, Any]]:
    """Values of the searched knobs in the scheme and its presets: the first trials of a search.

    Presets that differ in other knobs as well, or lie outside the space, are left out.
    """
    found = []
    for other in (scheme, *list_schemes().values()):
        if type(other) is not type(scheme):
            continue
        values = {name: getattr(other, name) for name in space}
        if get_scheme(scheme, **values) != other:
            continue
        if all(_fits(space[name], value) for name, value in values.items()) and values not in found:
            found.append(values)
    return found


def _fits(distribution: BaseDistribution, value: Any) -> bool:
    """True if a value is in a distribution."""
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    return isinstance(value, (int, float)) and distribution.low <= value <= distribution.high
