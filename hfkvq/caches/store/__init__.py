"""One layer's storage: `KVStore`, whose tensors and host's knowledge are one value, `StoreState`."""

from .kvstore import GROWTH, MAX_STEP, SIDES, KVStore, Padding, StoreBytes, clipped
from .state import StoreState

__all__ = ["GROWTH", "MAX_STEP", "SIDES", "KVStore", "Padding", "StoreBytes", "StoreState", "clipped"]
