"""Caches of others, measured beside ours: Transformers' own, and methods that are only simulated.

A simulated method holds everything in full precision and only rounds it as the method would, so that its accuracy can
be measured; its bits are computed from its format. It saves no memory and is no cache for use.
"""

from .base import Rival
from .names import RIVALS, find_rival, refuse_rival

__all__ = ["RIVALS", "Rival", "find_rival", "refuse_rival"]
