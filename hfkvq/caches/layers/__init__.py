"""One attention layer of the cache, and the parts that it is made of.

`KVLayer` is what Transformers sees. It holds a store and, as the scheme and the cache want them: `QueryStatistics`, an
`Eviction` (keeps a budget: `TokenEvictor` or `TierEvictor`), and a `StepBuffer` (steps at fixed addresses, without the
host). What layers of a cache know together is a `Group` (of those that evict) and a `DeviceSync` (of those whose steps
are recorded). Lengths and rows change in all layers of a cache or in none, in `transactions`.
"""

from ..layer_state.update import PaddingReader as PaddingReader
from .layer import KVLayer as KVLayer
from .recurrent import HybridLayer as HybridLayer
from .recurrent import RecurrentLayer as RecurrentLayer
