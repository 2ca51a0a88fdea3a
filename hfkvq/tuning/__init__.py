"""Tuning on data: knobs within a budget, and the room that MixKVQ's thresholds need.

Searches with Optuna, which comes with the extra ``hfkvq[tune]``, are in `hfkvq.tuning.study`.
"""

from .objectives import LmEvalTasks, Score, TextKLD
from .room import fit_room, measure_room

__all__ = ["LmEvalTasks", "Score", "TextKLD", "fit_room", "measure_room"]
