"""One layer's storage: `sink | runs of pages | tail`. See `KVStore` for what it promises.

There are four routes from a token to the bytes of a page:

1. A prompt. `KVStore.extend` seals straight from the new tokens, so that a prompt is never copied into
   a tail that would have to hold all of it. Of a prompt beyond a budget only the tokens that stay come here.
2. A step. New tokens join the tail, and what has left the local window is sealed from there: by
   `hfkvq.kernels.step.run_step` over the layer's buffer, with a graph or without, or by `KVStore.push` and
   `KVStore.commit` where a step cannot run over a buffer (see `hfkvq.caches.steps.step_buffer.StepBuffer.takes`).
3. A requantization. Stored tokens change their run or are forgotten (`requantize.requantized`): tokens that stay keep
   their bits, others are quantized from what is stored of them. Tiers of a first prompt are assigned by one, for all
   layers together (`rows.joined`), since the host must not wait for the device within a prompt.
4. A budget's step down. A side's tokens are dequantized a few pages at a time and sealed in another format, into a
   buffer of its own (`relaid.relaid`), by `kvstore.write_pages`. Where a budget forgets pages, the others are copied as
   they are.

Serving seals blocks of its own engine by the same two functions: `kvstore.write_pages`, where a prompt goes through a
store or all requests step down (`hfkvq.serving.ladder`), and else `kernels.seal_side`, which the former ends in, as
steps do.
"""

from hfkvq.kernels.step import MAX_STEP as MAX_STEP

from .kvstore import KVStore as KVStore
from .state import SIDES as SIDES
from .state import StoreState as StoreState
from .windows import Padding as Padding
from .windows import Ragged as Ragged
