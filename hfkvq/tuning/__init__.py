"""Tables, knobs and layers from data: sensitivities of tags, bits under a budget, room, and schemes of single layers.

Searches with Optuna, which comes with the extra ``hfkvq[tune]``, are in `hfkvq.tuning.study`.
"""

from .allocation import Sensitivity, allocate, make_table, sweep
from .calibration import calibrate
from .conversations import Conversation, load_conversations, parse_conversation
from .layerwise import LayerPlan, tune_layers
from .objectives import LmEvalTasks, TextKLD
from .room import fit_room, measure_room
from .score import Score

__all__ = [
    "Conversation",
    "LayerPlan",
    "LmEvalTasks",
    "Score",
    "Sensitivity",
    "TextKLD",
    "allocate",
    "calibrate",
    "fit_room",
    "load_conversations",
    "make_table",
    "measure_room",
    "parse_conversation",
    "sweep",
    "tune_layers",
]
