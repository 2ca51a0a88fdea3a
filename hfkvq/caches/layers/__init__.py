"""One attention layer of the cache, and the parts that it is made of.

`KVLayer` is what Transformers sees. It holds a store and, as the scheme and the cache want them: `QueryStatistics`,
`TokenTags`, an `Eviction` (keeps a budget: `TokenEvictor` or `TierEvictor`), and a `StepBuffer` (steps at fixed
addresses, without the host). Parts know their layer as a `LayerBase`; what layers of a cache know together is an
`EvictingGroup` (of those that evict) and a `DeviceSync` (of those whose steps are recorded). Lengths and rows change in
all layers of a cache or in none, in `transactions`.
"""

from ..base.recorded import DeviceSync
from ..eviction.evictor import EvictingGroup, Eviction
from ..layer_state.base import ROLLBACK
from ..layer_state.update import PaddingReader
from .layer import KVLayer
from .recurrent import HybridLayer, RecurrentLayer

__all__ = [
    "ROLLBACK",
    "DeviceSync",
    "EvictingGroup",
    "Eviction",
    "HybridLayer",
    "KVLayer",
    "PaddingReader",
    "RecurrentLayer",
]
