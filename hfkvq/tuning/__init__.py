"""Tables, knobs and layers from data: sensitivities of tags, bits under a budget, searches with Optuna."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .allocate import allocate, make_table, sweep
from .calibrate import calibrate
from .conversations import Conversation, load_conversations, parse_conversation
from .room import fit_room, measure_room
from .sensitivity import Sensitivity

if TYPE_CHECKING:
    from .layer_plan import LayerPlan
    from .layerwise import tune_layers
    from .objectives import Custom, LmEvalTasks, ReferenceTasks, TextKLD, Timed
    from .score import Score
    from .study import load_study, tune
    from .trials import TuningStudy

# Optuna and SciPy come with the extra ``hfkvq[tune]``, and are loaded when one of these is asked for.
_LATER = {
    "LayerPlan": "layer_plan",
    "tune_layers": "layerwise",
    **dict.fromkeys(("Custom", "LmEvalTasks", "ReferenceTasks", "TextKLD", "Timed"), "objectives"),
    "Score": "score",
    **dict.fromkeys(("load_study", "tune"), "study"),
    "TuningStudy": "trials",
}

__all__ = [
    "Conversation",
    "Custom",
    "LayerPlan",
    "LmEvalTasks",
    "ReferenceTasks",
    "Score",
    "Sensitivity",
    "TextKLD",
    "Timed",
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
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name}: {error.name} is not installed; pip install 'hfkvq[tune]'.") from error
