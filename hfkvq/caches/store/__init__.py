"""One layer's storage.

- `state`: all that changes, tensors and what the host knows of them, as one value with one ``replace``.
- `kvstore`: `KVStore`, its verbs.
- `windows`: tokens come into sink and tail. `sealing`: they leave the tail, or a prompt, for pages.
- `cropping`: the newest are taken back. `rows`: rows are reordered, shared and dropped.
- `reading`: dense tensors. `accounting`: bytes and bits.
"""

from .accounting import StoreBytes
from .growth import GROWTH, MAX_STEP
from .kvstore import KVStore
from .sealing import clipped
from .state import SIDES, StoreState
from .view import StoreView
from .windows import Padding

__all__ = ["GROWTH", "MAX_STEP", "SIDES", "KVStore", "Padding", "StoreBytes", "StoreState", "StoreView", "clipped"]
