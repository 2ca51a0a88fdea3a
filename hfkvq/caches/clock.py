"""What the layers of a cache whose steps can be recorded know together: which tokens the host has not counted yet."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hfkvq.kernels.triton.ahead import Beside

    from .homes import Home
    from .scheme import Scheme
    from .static import StaticKVLayer


class Clock:
    """What the host knows of steps that did not pass through Python.

    Steps of CUDA graphs are counted here and told to the layers only when one of them is asked for more than its
    length. Of steps that `torch.compile` runs, the host knows nothing but that there were some: then the device is
    asked.

    Attributes:
        stale: whether the host must ask the device how long rows are.
        steps: tokens announced since then, by which rows are longer at the most.
        ahead: tokens of graph steps that the layers have not been told of.
        peak: the most that ``ahead`` has been; what was taken back since may have been sealed for.
        ready: whether every row has a token that is no padding; from then on a step needs no mask.
        holes: whether columns within a row are padding, which are stored: from then on every step needs one.
        home: buffers of all layers and the graphs that were captured over them, or None.
        warmed: schemes whose kernels are being compiled, or are there; and whether for steps of several tokens.
        compiling: those that are on their way.
        waits: whether the running forward does without them, and so attends to dense keys and values.
        captured: whether steps are captured, so that they go without kernels that are not there yet.
    """

    def __init__(self, layers: list[StaticKVLayer]) -> None:
        # Weakly: layers keep their clock, and nothing may keep a layer whose cache is gone.
        self._layers = [weakref.ref(layer) for layer in layers]
        self.stale, self.steps, self.ready, self.holes = False, 0, False, False
        self.ahead = self.peak = 0
        self.home: Home | None = None
        self.warmed: list[tuple[Scheme, bool]] = []
        self.compiling: list[Beside] = []
        self.waits = self.captured = False
        for i, layer in enumerate(layers):
            layer.clock, layer.leads = self, i == 0

    @property
    def layers(self) -> list[StaticKVLayer]:
        """In the model's order."""
        found = [ref() for ref in self._layers]
        return [layer for layer in found if layer is not None]

    @property
    def seen(self) -> int:
        """Logical tokens of every layer; right unless ``stale``."""
        return self.layers[0].seen + self.ahead

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        """Of the same layers' copies, which have no buffers yet."""
        new = memo[id(self)] = copy.copy(self)
        new.home = None
        new.compiling, new.waits, new.warmed = list(self.compiling), self.waits, list(self.warmed)
        new._layers = [weakref.ref(copy.deepcopy(layer, memo)) for layer in self.layers]
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything but graphs; references that can be saved."""
        return self.__dict__ | {"home": None, "compiling": [], "waits": False, "warmed": [], "_layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of `__getstate__`."""
        self.__dict__.update(state, _layers=[weakref.ref(layer) for layer in state["_layers"]])

    def wait_for(self, kernels: Beside) -> None:
        """Forwards do without these kernels until they are there; the running one does in any case."""
        if not kernels.is_done():
            self.compiling.append(kernels)
            self.waits = True

    def look(self) -> None:
        """Sees, before a forward, whether kernels are there: within one, nothing changes."""
        if self.compiling:
            self.compiling = [kernels for kernels in self.compiling if not kernels.is_ready()]
            self.waits = bool(self.compiling)

    def count(self, tokens: int) -> None:
        """Notes a graph step of so many tokens."""
        self.ahead += tokens
        self.peak = max(self.peak, self.ahead)

    def settle(self) -> None:
        """Tells the layers of graph steps; asks the device nothing."""
        if self.peak:
            ahead, peak = self.ahead, self.peak
            self.ahead = self.peak = 0
            layers = self.layers
            for layer in layers:
                layer.note_steps(ahead, peak)
            # What the last of them has left to the host.
            for layer in layers:
                layer.between_steps()

    def catch_up(self) -> None:
        """Lets the layers know how long rows are, and does what steps have left to do.

        Where the host has not counted the steps, one transfer a device.

        Raises:
            ValueError: tokens of these steps found no room and were not stored.
        """
        if not self.stale:
            self.settle()
            return
        self.stale, self.steps = False, 0
        self.ahead = self.peak = 0
        held = [layer for layer in self.layers if layer.state is not None]
        by_device: dict[torch.device, list[StaticKVLayer]] = {}
        for layer in held:
            by_device.setdefault(layer.device, []).append(layer)
        lost = False
        for layers in by_device.values():
            for layer in layers:
                layer.open = True
                layer.close()
            parts = [part for layer in layers for part in layer.told()]
            numbers = torch.cat(parts).tolist()
            for layer in layers:
                size = sum(part.numel() for part in layer.told())
                lost = layer.learn(numbers[:size]) or lost
                numbers = numbers[size:]
        for layer in held:
            layer.between_steps()
        if lost:
            first = held[0]
            where = f"max_cache_len: compiled steps went on beyond the capacity of {first.capacity} tokens"
            remedy = "Make the cache with a larger max_cache_len."
            if first.capacity is None or first.seen < first.capacity:
                where = "budget: compiled steps went on beyond the room for a budget"
                remedy = "Call the cache's between_steps() before each step, as generate does."
            raise ValueError(f"{where}; the cache holds {first.seen}, and what came later was not stored. {remedy}")

    def announce(self, tokens: int) -> None:
        """A forward of so many tokens is about to come, as far as the host can know.

        Raises:
            ValueError: it would exceed the capacity. Nothing is changed then.
        """
        layers = self.layers
        first = layers[0]
        if not self.stale:
            self.settle()
            first.check_capacity(tokens)
            for layer in layers:
                layer.finish_update()
            self.steps = tokens
            return
        self.steps += tokens
        bound = first.seen + self.steps
        if (first.capacity is not None and bound > first.capacity) or any(layer.wants_host(bound) for layer in layers):
            self.catch_up()
            first.check_capacity(tokens)
            # What has been asked for is what the coming step will make stale again.
            self.stale, self.steps = True, tokens

    def prepare(self, tokens: int) -> None:
        """Makes ready for a graph step of so many tokens: what an update or the budget has left to do.

        Raises:
            ValueError: it would exceed the capacity. Nothing is changed then.
        """
        layers = self.layers
        if self.stale:
            self.catch_up()
        layers[0].check_capacity(self.ahead + tokens)
        if not self.ahead:
            for layer in layers:
                layer.finish_update()
        bound = layers[0].seen + self.ahead + tokens
        if any(layer.wants_host(bound) for layer in layers):
            self.settle()
            for layer in layers:
                layer.between_steps()
