"""Presets as the classes of their schemes declare them: knobs, who each is for, and the lists that it stands in."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LISTS = ("demo", "kld", "bench kernels", "fit")
"""Commands that show presets, by the name of the list that each shows unless it is told otherwise."""

GROUPS = ("scheme", "eviction", "control", "baseline")
"""Role of a preset in a comparison: a scheme, one that evicts tokens and holds what stays in any other scheme's pages,
the lossless control, or a baseline that is expected to lose."""


@dataclass(frozen=True)
class Entry:
    """A preset as the class of its scheme declares it, under its name in ``presets``.

    Attributes:
        purpose: one sentence: who it is for.
        knobs: what differs from the scheme's defaults.
        lists: which of `LISTS` it stands in.
        group: which of `GROUPS` it is of.
    """

    purpose: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    group: str = "scheme"

    def __post_init__(self) -> None:
        """Checks lists and group."""
        for name in self.lists:
            if name not in LISTS:
                raise ValueError(f"lists: got {name!r}, which is unknown; {nearest(name, list(LISTS))}")
        if self.group not in GROUPS:
            raise ValueError(f"group: got {self.group!r}, allowed {', '.join(map(repr, GROUPS))}.")


_PRESETS: dict[str, tuple[type[Any], Entry]] = {}


def nearest(name: str, known: list[str]) -> str:
    """A sentence naming the nearest known names, then all of them."""
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def register(scheme: type[Any]) -> None:
    """Takes the name of a `Scheme`, which stands for its defaults, and its presets; a name can be taken once.

    Raises:
        ValueError: a name is another scheme's. Then nothing is taken.
    """
    # Inherited presets are the base's, and left out.
    declared = vars(scheme).get("presets", {})
    entries = {
        name: each if isinstance(each, Entry) else Entry(knobs=each)
        for name, each in ({scheme.name: Entry()} | dict(declared)).items()
    }
    for name in entries:
        owner = _PRESETS.get(name)
        # A class that is defined again, in a notebook for example, takes its own place.
        if owner is not None and owner[0].__qualname__ != scheme.__qualname__:
            raise ValueError(f"preset: {name!r} is taken by {owner[0].__name__}; choose another name.")
    _PRESETS.update({name: (scheme, entry) for name, entry in entries.items()})


def presets() -> list[str]:
    """The name of every preset, in the order in which they were registered."""
    return list(_PRESETS)


def entry_of(name: str) -> tuple[type[Any], Entry]:
    """The class and the declaration of a preset; of "snapkv+kitty-pro" those of "snapkv" over pages of "kitty-pro".

    Raises:
        ValueError: an unknown preset; the nearest names are shown.
    """
    name, plus, pages = name.partition("+") if isinstance(name, str) else (name, "", "")
    if plus:
        cls, entry = entry_of(name)
        return cls, replace(entry, knobs={**entry.knobs, "pages": pages}, lists=())
    if not isinstance(name, str) or name not in _PRESETS:
        raise ValueError(
            f"scheme: got {name!r}, which is unknown; {nearest(name, presets())} Options follow the name: "
            "'kitty:boost_ratio=0.2'."
        )
    return _PRESETS[name]


def in_order() -> Iterator[str]:
    """The name of every preset, in the order in which lists and tables show them: by ``Scheme.place``."""
    return iter(sorted(_PRESETS, key=lambda name: _PRESETS[name][0].place))


def listed(name: str) -> tuple[str, ...]:
    """The presets of one of `LISTS`.

    Raises:
        ValueError: there is no such list.
    """
    if name not in LISTS:
        raise ValueError(f"lists: got {name!r}, which is unknown; {nearest(name, list(LISTS))}")
    return tuple(preset for preset in in_order() if name in _PRESETS[preset][1].lists)
