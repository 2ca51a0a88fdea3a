"""Steps over a buffer: recorded ones, which the host does not see, and the same operations launched from Python."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.dispatch import exact
from hfkvq.kernels.step import MAX_STEP, run_step, seen

from ..base.recorded import DeviceSync, is_captured, is_recorded
from ..eviction.evictor import Eviction
from ..layer_state.base import LayerBase, Part
from ..store.row_lengths import row_states
from .step_buffer import StepBuffer


class StepKV:
    """Result of `KVLayer.update` in a recorded step: the layer's steps and the new tokens; no tensor.

    ``tiles`` is how many times its heads are said to come, one after another.
    """

    def __init__(self, steps: DeviceSteps, keys: Tensor, values: Tensor, tiles: int = 1) -> None:
        self.steps, self.keys, self.values, self.tiles = steps, keys, values, tiles

    def repeat(self, *sizes: int) -> StepKV:
        """Heads as often as the second size says, one after another, as JetMoe has them; see `LazyKV.tiles`."""
        if len(sizes) != 4 or sizes[0] != 1 or sizes[2:] != (1, 1):
            raise RuntimeError(f"A recorded step can repeat heads only, and was asked for {sizes}.")
        return StepKV(self.steps, self.keys, self.values, self.tiles * sizes[1])


class DeviceSteps(Part):
    """Host's record of a layer's steps on the device, and its synchronization with the device.

    Attributes:
        eviction: of the layer; None where it keeps all tokens.
        leads: whether the layer is the first of its cache, which answers for all.
    """

    leads: bool

    def __init__(self, layer: LayerBase, buffer: StepBuffer, eviction: Eviction[Any] | None) -> None:
        super().__init__(layer)
        self.buffer, self.eviction = buffer, eviction
        DeviceSync([self])

    @property
    def sync(self) -> DeviceSync:
        return self.buffer.sync

    @property
    def is_bound(self) -> bool:
        """True if there is a buffer now."""
        return self.buffer.state is not None

    @property
    def is_recorded(self) -> bool:
        """True if the running forward is a recorded step; one of a compiled model needs a fixed capacity."""
        return self.is_bound and (is_captured() or (self.layer.capacity is not None and is_recorded()))

    # Steps that the host does not see.

    def record(self, keys: Tensor, values: Tensor) -> tuple[StepKV, StepKV]:
        """An update in a recorded step; what is returned is known to "hfkvq" attention alone."""
        if self.leads:
            self.sync.stale = True
        return StepKV(self, keys, values), StepKV(self, keys, values)

    def note_steps(self, tokens: int, peak: int) -> None:
        """Takes note of graph steps: ``tokens`` have come, ``peak`` before some were taken back."""
        layer = self.layer
        store = layer.held()
        then = store.forecast(peak, layer.hold).sealed
        if peak > tokens:
            then = frozenset(state._replace(length=state.length - (peak - tokens)) for state in then)
        store.note_states(then)
        layer.seen += tokens
        layer.newest = 0
        layer.edition += 1
        self.buffer.open = True

    def device_counts(self) -> list[Tensor]:
        """Counters that the host reads after steps that it has not counted: i32, flat."""
        self.buffer.open = True
        self.buffer.close()
        state = self.buffer.state
        assert state is not None, "asked of layers that have one"
        return [state.counters.flatten(), state.flag]

    def learn(self, numbers: list[int]) -> bool:
        """Takes the answer; whether tokens were lost."""
        layer, state = self.layer, self.buffer.state
        assert state is not None, "asked of layers that have one"
        store = layer.held()
        *counters, flag = numbers
        rows = [counters[i * store.batch : (i + 1) * store.batch] for i in range(len(counters) // store.batch)]
        store.note_states(row_states(rows))
        layer.seen, layer.newest = rows[START][0] + rows[LENGTH][0], 0
        layer.edition += 1
        self.note_rows()
        if flag:
            state.flag.zero_()
        return bool(flag)

    def note_rows(self) -> None:
        """Tells whether every row has a token that is no padding."""
        store = self.layer.store
        if self.leads and store is not None:
            self.sync.ready = all(state.length for state in store.states)

    def catch_up(self) -> None:
        """Makes sure that the host knows what the device holds."""
        self.sync.catch_up()
        self.buffer.close()

    def before_update(self, tokens: int) -> None:
        """Makes ready for so many tokens in Python."""
        layer, buffer, sync = self.layer, self.buffer, self.buffer.sync
        sync.catch_up()
        if layer.capacity is None and tokens > MAX_STEP and layer.seen + tokens > buffer.room:
            # A prompt grows the pages; the step behind it makes another buffer.
            buffer.leave()

    # Work of the host between steps: trims.

    @property
    def trims(self) -> bool:
        """True if the host has tokens to evict between steps; else steps may have several tokens."""
        return self.eviction is not None and self.eviction.trims_steps

    def wants_host(self, bound: int) -> bool:
        """True if something is due, between steps, once ``bound`` tokens have been seen."""
        return self.eviction is not None and self.layer.store is not None and bound > self.eviction.full_at

    @exact
    def between_steps(self) -> None:
        """Trims rows that have outgrown their budget, by the newest query."""
        state, eviction = self.buffer.state, self.eviction
        if eviction is None or state is None or self.layer.seen < eviction.full_at:
            return
        # Tokens that the last step sealed are in pages.
        self.buffer.close()
        eviction.judge_step(state.query.clone())
        self.buffer.bind()

    # Lengths and masks.

    def seen_on_device(self) -> Tensor:
        """Logical tokens seen, on the device: i64 (1,). Stock static layers have a number without axes there."""
        buffer = self.buffer
        assert buffer.tensor is not None
        assert buffer.plan is not None
        return seen(buffer.tensor, buffer.plan.rows)

    def length(self, seen: int) -> Any:
        """Tokens seen, ``seen`` of which the layer knows; on the device where the host does not know all."""
        if self.is_recorded or (self.is_bound and self.sync.stale):
            return self.seen_on_device()
        return seen + self.sync.ahead

    def need_no_mask(self) -> bool:
        """True if steps need no mask: nothing that is stored is padding, and every row has something stored."""
        if self.layer.capacity is None or self.buffer.tensor is None:
            return False
        return self.sync.ready and not self.sync.holes

    def most_tokens(self) -> int:
        """Most tokens of a recorded step.

        Where tags have a say in what is sealed, only generated ones have none. A trim judges by one query.
        """
        layer = self.layer
        if self.trims:
            return 1
        return 1 if "tags" in layer.scheme.needs and not layer.record_past else MAX_STEP

    # A step in Python over the buffer.

    def takes(self, queries: int, arguments: AttentionArguments) -> bool:
        """True if the staged tokens can go through `run`; a layer that grows makes room for them in its buffer.

        Else they go one operation after the other: tokens of rows that hold nothing yet, which may be padding, several
        tokens with a mask of their own, steps after which a trim is due, and any step while there is no memory for a
        buffer.
        """
        layer, tokens = self.layer, self.layer.staged_length
        if not 0 < tokens == queries <= self.most_tokens():
            return False
        # A row's first tokens may be padding. Room is found whether or not a trim is due.
        if not layer.held().forecast().shortest or not self.buffer.find_room(layer.seen):
            return False
        if tokens > 1 and (arguments.mask is not None or not arguments.causal):
            return False
        return self.eviction is None or self.eviction.lets_step_pass()

    @exact
    def run(self, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
        """The staged tokens' whole step, as a recorded one would take it: (B, Hq, Q, D) to (B, Hq, Q, Dv).

        None where they have to go one operation after the other: nothing is done then.
        """
        if not self.takes(query.shape[2], arguments):
            return None
        layer, buffer = self.layer, self.buffer
        store, state, plan = layer.held(), buffer.state, buffer.plan
        assert state is not None
        assert plan is not None
        query, keys, values = layer.staged_step(query)
        then, buffer.open = store.forecast(keys.shape[2], layer.hold), True
        try:
            out = run_step(query, keys, values, arguments.biased(), state, plan, any(then.due))
        except BaseException:
            if int(state.counters[LENGTH].max()) > store.longest:
                # The tokens are stored, and what was due with them may not be sealed.
                state.new.zero_()
                store.note_states(then.appended)
                layer.staged, layer.new_columns, layer.uncommitted = None, 0, True
            raise
        store.note_states(then.sealed)
        layer.staged, layer.new_columns = None, 0
        return out
