"""One layer's storage: `KVStore`, whose tensors and host's knowledge are one value, `StoreState`."""

from .accounting import StoreBytes
from .kvstore import GROWTH, MAX_STEP, KVStore, Padding
from .sealing import clipped
from .state import SIDES, StoreState

__all__ = ["GROWTH", "MAX_STEP", "SIDES", "KVStore", "Padding", "StoreBytes", "StoreState", "clipped"]
