"""Where the layers of a cache lie while its steps are replayed: one buffer a layer, and the graphs captured over them.

A graph writes to addresses, so a capture is good for whichever cache lies there. Caches of one config and preset are a
family. A new cache moves into the buffers that one of its family has left, or takes them over from one that is not in
use, which then gets its tokens back as a copy.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.step import StepPlan, StepState

if TYPE_CHECKING:
    from .graphs import StepGraphs
    from .static import StaticKVLayer


class Lot(NamedTuple):
    """One layer's part of a home."""

    buffer: Tensor
    state: StepState
    plan: StepPlan


class Recording(NamedTuple):
    """A captured step.

    Attributes:
        graph: runs it; see `hfkvq.caches.capture.CapturedGraph`.
        inputs: what the graph reads, by argument.
        model: whose step it is, weakly.
        looks: what the model was like; see `hfkvq.caches.router.Router.looks`.
    """

    graph: Any
    inputs: dict[str, Tensor]
    model: weakref.ref[Any]
    looks: Any

    def replay(self, given: dict[str, Tensor], cache: Any) -> Any:
        """One step with these arguments: what the model would return."""
        if given:
            own = [self.inputs[name] for name in given]
            torch._foreach_copy_(own, list(given.values()))  # pyright: ignore[reportPrivateImportUsage]
        return self.graph.replay(cache)


class Home:
    """Buffers of all layers of a cache, and what was captured over them.

    Attributes:
        lots: of the layers, in their order.
        room: most logical columns.
        recordings: captured steps.
        runs: how often each step has run in Python, or failed to be captured.
        owner: of the cache that lies here, weakly; None if nobody does.
        last: thread and stream of the last one that has.
    """

    def __init__(self, layers: list[StaticKVLayer]) -> None:
        self.lots = [_lot(layer) for layer in layers]
        self.room = layers[0].room
        self.recordings: dict[Any, Recording] = {}
        self.runs: dict[Any, int] = {}
        self.owner: weakref.ref[StepGraphs] | None = None
        self.last: Any = None
        # i32 (B,) in all layers, parts of the buffers.
        self.lengths = [lot.state.counters[LENGTH] for lot in self.lots]
        self._visible: tuple[Any, Tensor, bool] | None = None

    def is_of(self, layers: list[StaticKVLayer]) -> bool:
        """Whether these layers lie here, all of them."""
        return all(layer.buffer is lot.buffer for layer, lot in zip(layers, self.lots, strict=True))

    def has_room(self, need: int) -> bool:
        """Whether so many columns have room here, and do not waste too much of it."""
        return need <= self.room <= 2 * need + 512

    def suits(self, layers: list[StaticKVLayer], need: int) -> bool:
        """Whether layers that hold tokens could lie here."""
        return self.has_room(need) and all(
            layer.device == lot.buffer.device and layer.fits(lot.plan, self.room)
            for layer, lot in zip(layers, self.lots, strict=True)
        )

    def hides_padding_only(self, mask: Tensor, first: StaticKVLayer) -> tuple[bool, bool]:
        """Whether a mask (B, L) hides nothing but leading padding, and whether any row has such padding.

        Asks the device.
        """
        known, kind = self._visible, (first.edition, mask.device)
        if known is None or known[0] != kind:
            store = first.store
            assert store is not None, "asked of layers that hold tokens"
            # Tokens that have been evicted are before a row's start, as padding is.
            start = (store.counters[START] - store.dropped)[:: self.lots[0].plan.fold].to(mask.device)
            column = torch.arange(self.room, dtype=torch.int32, device=mask.device)
            known = self._visible = (kind, column >= start[:, None], bool((start > 0).any()))
        _, visible, padded = known
        shown = mask if mask.dtype == torch.bool else mask != 0
        return torch.equal(shown, visible[:, : mask.shape[1]]), padded


def _lot(layer: StaticKVLayer) -> Lot:
    if layer.buffer is None or layer.state is None or layer.plan is None:
        raise AssertionError("asked of layers that have a buffer")
    return Lot(layer.buffer, layer.state, layer.plan)


class Family:
    """Caches of one config and preset, which may take over each other's homes.

    Attributes:
        members: how many caches there are.
        vacant: the home that the last one to go has left, while there are others.
        homes: those that caches lie in.
    """

    def __init__(self, config: Any) -> None:
        self._config = weakref.ref(config)
        self.members = 0
        self.vacant: Home | None = None
        self.homes: weakref.WeakSet[Home] = weakref.WeakSet()

    @classmethod
    def of(cls, config: Any, kind: Any) -> Family:
        """The family of this kind of caches over this config."""
        key = (id(config), kind)
        found = _FAMILIES.get(key)
        if found is None or found._config() is not config:
            found = _FAMILIES[key] = cls(config)
        return found

    def settle(self, home: Home, owner: StepGraphs) -> None:
        """Notes who lies where."""
        home.owner = weakref.ref(owner)
        # Another owner's padding.
        home._visible = None
        self.homes.add(home)
        if self.vacant is home:
            self.vacant = None

    def vacate(self, home: Home | None) -> None:
        """The cache that lay there is gone; while there are others of its family, the next one may want its home."""
        if home is not None and self.members > 0:
            home.owner = None
            self.homes.discard(home)
            self.vacant = home


_FAMILIES: weakref.WeakValueDictionary[Any, Family] = weakref.WeakValueDictionary()
