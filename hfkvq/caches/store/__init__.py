"""One layer's storage: `KVStore`, whose tensors and host's knowledge are one value, `StoreState`."""

from .accounting import StoreBytes
from .kvstore import GROWTH, MAX_STEP, KVStore
from .sealing import clipped
from .state import SIDES, StoreState
from .windows import Padding

__all__ = ["GROWTH", "MAX_STEP", "SIDES", "KVStore", "Padding", "StoreBytes", "StoreState", "clipped"]
