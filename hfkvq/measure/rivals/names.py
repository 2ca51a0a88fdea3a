"""Rivals by their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hfkvq.caches.scheme import nearest

from .base import Rival
from .fp4 import FP4
from .omni_scaled import OmniScaled
from .oscar import Oscar
from .saw_calibrated import SawHessian, SawKMeans
from .stock import QUANTIZED
from .turboquant import TurboQuant

PREFIX = "simulated-"

RIVALS: dict[str, Rival] = {
    **QUANTIZED,
    f"{PREFIX}fp4": FP4(),
    f"{PREFIX}oscar": Oscar(),
    f"{PREFIX}oscar-omni": OmniScaled(),
    f"{PREFIX}saw-hessian": SawHessian(),
    f"{PREFIX}saw-kmeans": SawKMeans(),
    f"{PREFIX}turboquant-4": TurboQuant(key_bits=4, value_bits=4),
    f"{PREFIX}turboquant-3": TurboQuant(key_bits=3, value_bits=3),
}
"""What `hfkvq kld` takes beside presets; the names of simulated ones say so."""


def find_rival(name: str, knobs: Mapping[str, Any]) -> Rival:
    """A rival with some of its settings changed.

    Raises:
        ValueError: unknown name or knob, or a value of another type.
    """
    if name not in RIVALS:
        raise ValueError(f"schemes: got {name!r}, which is unknown; {nearest(name, list(RIVALS))}")
    rival = RIVALS[name]
    known = {} if name in QUANTIZED else {field.name: getattr(rival, field.name) for field in dataclasses.fields(rival)}
    for knob, value in knobs.items():
        if knob not in known:
            raise ValueError(f"schemes: {name}'s knob {knob!r} is unknown; {nearest(knob, list(known))}")
        if isinstance(value, bool) or not isinstance(value, (int, type(known[knob]))) or value < 0:
            wanted = type(known[knob]).__name__
            raise ValueError(f"{knob}: got {value!r}, allowed {wanted} of 0 or more.")
    return dataclasses.replace(rival, **knobs)


def refuse_rival(name: str) -> None:
    """Raises ValueError if a name is a rival's where only our own schemes are taken."""
    if name not in RIVALS:
        return
    if RIVALS[name].simulated:
        raise ValueError(
            f"schemes: {name} is simulated: it holds everything in full precision, so that only its accuracy can be "
            "measured, by hfkvq kld."
        )
    raise ValueError(
        f"schemes: {name} is a cache of Transformers; hfkvq kld --schemes and hfkvq bench generate --engines take it."
    )
