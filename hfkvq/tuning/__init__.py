"""Tables, knobs and layers from data: sensitivities of tags, bits under a budget, searches with Optuna."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocation import allocate, make_table, sweep
    from .calibration import calibrate
    from .conversations import Conversation, load_conversations, parse_conversation
    from .layerwise import LayerPlan, tune_layers
    from .objectives import LmEvalTasks, TextKLD
    from .room import fit_room, measure_room
    from .score import Score
    from .sensitivity import Sensitivity
    from .study import TuningStudy, load_study, tune

# Names are loaded at their first use: commands import this package for their help, and Optuna and SciPy come with the
# extra ``hfkvq[tune]``. No name may be a module's, too: once imported, the module would replace it.
_HOMES = {
    **dict.fromkeys(("allocate", "make_table", "sweep"), "allocation"),
    "calibrate": "calibration",
    **dict.fromkeys(("Conversation", "load_conversations", "parse_conversation"), "conversations"),
    **dict.fromkeys(("LayerPlan", "tune_layers"), "layerwise"),
    **dict.fromkeys(("LmEvalTasks", "TextKLD"), "objectives"),
    **dict.fromkeys(("fit_room", "measure_room"), "room"),
    "Score": "score",
    "Sensitivity": "sensitivity",
    **dict.fromkeys(("load_study", "tune"), "study"),
    "TuningStudy": "study",
}

__all__ = [
    "Conversation",
    "LayerPlan",
    "LmEvalTasks",
    "Score",
    "Sensitivity",
    "TextKLD",
    "TuningStudy",
    "allocate",
    "calibrate",
    "fit_room",
    "load_conversations",
    "load_study",
    "make_table",
    "measure_room",
    "parse_conversation",
    "sweep",
    "tune",
    "tune_layers",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name}: {error.name} is not installed; pip install 'hfkvq[tune]'.") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
