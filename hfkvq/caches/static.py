"""Layers whose steps need no host: one buffer at one address, which recorded steps write to.

With a fixed capacity the buffer is made at the first update. A layer that grows has none until a step is recorded (see
`hfkvq.caches.graphs`), and another one whenever its tokens need more room. Prompts, and whatever else is no ordinary
step, go the way of every layer, over the same tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels import warm
from hfkvq.kernels.decode import LENGTH, RUNS, START
from hfkvq.kernels.step import MAX_STEP, StepPlan, StepState, buffer_bytes, carve, run_step, seen, settle

from .capture import RECORDERS
from .clock import Clock
from .cut import Tiers
from .dense import dense_attention
from .evict import EvictingLayer
from .layer import KVLayer
from .observe import Observation
from .recorded import is_captured, is_recorded
from .router import is_inside
from .scheme import Scheme
from .states import RowState
from .store import SIDES, KVStore
from .traced import LAYERS, StepKV


def why_not(scheme: Scheme, key_dim: int, value_dim: int) -> str | None:
    """Why steps of a scheme cannot do without the host; None where they can."""
    return scheme.limits(key_dim, value_dim).captured


def why_several_launches(scheme: Scheme, key_dim: int, value_dim: int) -> str | None:
    """Why a step that no graph replays seals in several launches; None where one kernel does all of it."""
    return scheme.limits(key_dim, value_dim).fused


def static_class(scheme: Scheme) -> type[StaticKVLayer]:
    """The class of layer of fixed capacity that a scheme works in."""
    return StaticEvictingLayer if "probs" in scheme.needs else StaticKVLayer


class StaticKVLayer(KVLayer):
    """`KVLayer` whose steps can be recorded.

    Attributes:
        room: most logical columns that the buffer has room for; the capacity, where there is one.
        several: whether a compiled step may have several tokens.
        trims: whether the host has work between steps, and so must be told of them.
    """

    several = True
    trims = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.buffer: Tensor | None = None
        self.state: StepState | None = None
        self.plan: StepPlan | None = None
        self.spec = ""
        # Whether the device has sealed tokens that its counters do not count yet.
        self.open = False
        self.share = 1
        super().__init__(*args, **kwargs)
        self.room = self.capacity or 0
        self.leads = True
        self.clock = Clock([self])

    @property
    def steps_plainly(self) -> bool:  # type: ignore[override]
        """Whether an eager step goes as that of any layer: before there is a buffer, and once its kernels are there."""
        return self.buffer is None and not self.clock.waits

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `torch.compile` can take steps: at a fixed capacity, unless tokens may be taken back, or are padding.

        Tokens may be taken back in assisted decoding; padding within rows needs masks.
        """
        return self.capacity is not None and not self.record_past and not self.clock.holes

    # The buffer.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for tensors of this shape, dtype and device."""
        self._initialize(key_states, value_states)
        self._come_home(key_states.shape[2])

    def _initialize(self, keys: Tensor, values: Tensor) -> None:
        layout = self.scheme.layout(keys.shape[-1], values.shape[-1])
        self.store = KVStore(layout, self.scheme, keys, values)
        self.dtype, self.device = keys.dtype, keys.device
        self.heads, self.batch_size = keys.shape[1], keys.shape[0]
        self.is_initialized = True
        for side in SIDES if self.device.type in RECORDERS else ():
            # As long as in a buffer, while nothing is there that would have to move.
            self.store.grow_tail(side, self.store.tail_limit[side], True)

    def _come_home(self, tokens: int) -> None:
        """Takes the buffer that an empty layer still has, if it is of the shape that is wanted now.

        What the coming prompt of so many tokens and its steps launch is compiled meanwhile.
        """
        if (
            self.capacity is None
            and self.buffer is not None
            and (self.buffer.device != self.device or self._make_plan() != self.plan)
        ):
            self.leave()
        self.home()
        self._warm(tokens)

    def _warm(self, tokens: int) -> None:
        """Begins to compile what this layer, and others of its scheme, will launch."""
        kind = self.scheme, self.record_past
        if self.device.type != "cuda" or kind in self.clock.warmed:
            return
        self.clock.warmed.append(kind)
        before, self.room = self.room, self.room or tokens + MAX_STEP
        try:
            plan = self._make_plan()
        finally:
            self.room = before
        if plan is not None:
            query_heads = self._fold() * self._held().heads * self.share
            done = warm.start(plan, query_heads, self.device, self.scheme.channel_rule, self.record_past)
            if done is not None and self.clock.captured:
                self.clock.wait_for(done)

    def waits(self) -> bool:
        """See `KVLayer.waits`."""
        return self.clock.waits

    def _blocks(self) -> tuple[int, ...] | None:
        """Pages of a row in each run; None while the store holds more than that."""
        store = self._held()
        if self.capacity is None and len(store.runs) > 1:
            return self._blocks_ahead(self.room)
        rest = max(self.room - store.layout.sink, 0)
        return tuple(
            max(-(-rest // keys.page_size), view.table.shape[1])
            for view, (keys, _) in zip(store.runs, store.format.runs, strict=True)
        )

    def _blocks_ahead(self, most: int) -> tuple[int, ...]:
        """Pages of a row in several runs of a layer that grows: steps seal into the last one only, up to ``most``."""
        store = self._held()
        have = [view.table.shape[1] for view in store.runs]
        if self.plan is not None and all(a <= b for a, b in zip(have, self.plan.blocks, strict=True)):
            # Those of the buffer, until it has no room.
            return self.plan.blocks
        held = min(store.state.wide_most + max(self.room - self.seen, 0), most)
        return (*have[:-1], max(have[-1], -(-held // store.format.runs[-1][0].page_size)))

    def _make_plan(self) -> StepPlan | None:
        store, blocks, hold = self._held(), self._blocks(), self._hold()
        if blocks is None:
            return None
        if hold:
            store.reserve_tail(hold)
        for side in SIDES:
            # While nothing is there, nothing has to move.
            store.grow_tail(side, store.tail_limit[side], store.longest == 0)
        keys, values = store.layout.keys, store.layout.values
        rule = self.scheme.step_rule(store.dims["keys"]) if keys.formats[-1].raised else None
        return StepPlan(
            store.format.spec,
            store.batch,
            store.heads,
            store.dims["keys"],
            store.dims["values"],
            str(store.dtype),
            blocks,
            (store.windows[2].shape[2], store.windows[3].shape[2]),
            (max(keys.local, hold), max(values.local, hold)),
            (keys.unit, values.unit),
            self.room,
            rule or "",
            self._asks(),
            self._fold(),
            self._fold() * store.heads * self.share if self._asks() == "keep" else 0,
            (keys.balance, values.balance),
        )

    def fits(self, plan: StepPlan, room: int) -> bool:
        """Whether what is stored could lie in a buffer of this plan, for so many logical columns."""
        before = self.plan, self.room
        self.plan, self.room = plan, room
        try:
            return self._make_plan() == plan
        finally:
            self.plan, self.room = before

    def takes_several(self) -> int:
        """Most tokens of a recorded step: where tags have a say in what is sealed, only generated ones have none."""
        return 1 if "tags" in self.scheme.needs and not self.record_past else MAX_STEP

    def _asks(self) -> str:
        return "sum" if "query" in self.scheme.needs else ""

    def _fold(self) -> int:
        return 1

    def home(self) -> None:
        """Brings what the store holds into the buffer, wherever an operation has left it; makes the buffer if need be.

        A buffer of another shape has another address: graphs are then recorded anew. A layer that grows has a buffer
        from its first recorded step on only: see `make_room`.
        """
        store = self.store
        if store is None or not self.room:
            return
        plan = self._make_plan()
        if plan is None:
            return
        old = self.state
        fresh = plan != self.plan or self.buffer is None or self.buffer.device != store.device
        if fresh:
            # Zeros: see `PageFormat.allocate`.
            with torch.inference_mode(False):
                # Or no step outside of inference mode could write there.
                buffer = torch.zeros(buffer_bytes(plan), dtype=torch.uint8, device=store.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(buffer)
            self.buffer, self.plan, self.spec = buffer, plan, plan.spec
            with torch.inference_mode(False):
                self.state = carve(buffer, plan)
            LAYERS[buffer.data_ptr()] = self
            self.clock.home = None
            for part in (self.state.new, self.state.sealed, self.state.flag, self.state.sums, self.state.counts):
                part.zero_()
            self.state.weight.zero_()
            if old is not None and old.query.shape == self.state.query.shape and old.query.device == store.device:
                self.state.query.copy_(old.query)
            else:
                self.state.query.zero_()
        assert self.state is not None, "made with the buffer"
        _adopt(store, self.state, plan)
        self._tell_queries()

    def _tell_queries(self) -> None:
        state = self.state
        if state is None or not state.sums.numel():
            return
        if self.query_sum is None or self.query_count is None:
            state.sums.zero_()
            state.counts.zero_()
        else:
            state.sums.copy_(self.query_sum)
            state.counts.copy_(self.query_count)

    def make_room(self, room: int) -> None:
        """Moves into a buffer for so many logical columns, which may be the first one."""
        self.close()
        before = self.room, self.plan
        self.room, self.plan = room, None
        try:
            self.home()
        except BaseException:
            # Out of memory, most likely: the layer stays where it is.
            self.room, self.plan = before
            raise

    def leave(self) -> None:
        """Takes what is stored out of the buffer, and grows like any layer until a step is recorded again."""
        if self.state is not None and self.store is not None:
            self.close()
            self.store = copy.deepcopy(self.store)
        self.buffer = self.state = self.plan = None
        self.room, self.clock.home = self.capacity or 0, None

    def take(self, buffer: Tensor, state: StepState, plan: StepPlan, room: int) -> None:
        """Takes over a buffer, for what is about to be stored; nothing of its last owner's steps is left pending."""
        for part in (state.new, state.sealed, state.flag, state.sums, state.counts, state.weight, state.query):
            part.zero_()
        self.buffer, self.state, self.plan, self.spec, self.room = buffer, state, plan, plan.spec, room
        LAYERS[buffer.data_ptr()] = self

    def move_in(self, buffer: Tensor, state: StepState, plan: StepPlan, room: int) -> None:
        """Takes over a buffer that no layer uses, and brings there what is stored; see `hfkvq.caches.homes`."""
        store = self._held()
        self.take(buffer, state, plan, room)
        for side in SIDES:
            store.grow_tail(side, plan.tails[side == "values"])
        _adopt(store, state, plan)
        self._tell_queries()

    # Steps that the host does not see.

    def note_steps(self, tokens: int, peak: int) -> None:
        """Takes note of graph steps: ``tokens`` have come, ``peak`` before some were taken back."""
        store = self._held()
        then = store.ahead(peak, self._hold()).sealed
        if peak > tokens:
            then = frozenset(state._replace(length=state.length - (peak - tokens)) for state in then)
        store.replace(states=then)
        self.seen += tokens
        self.edition += 1
        self.open = True

    def close(self) -> None:
        """Lets the device's counters count what the last step has sealed; asks it nothing."""
        if self.state is not None and self.open:
            settle(self.state)
            self.open = False
            if self.state.sums.numel():
                self.query_sum, self.query_count = self.state.sums.clone(), self.state.counts.clone()

    def told(self) -> list[Tensor]:
        """What the host asks for: i32, flat."""
        assert self.state is not None, "asked of layers that have one"
        return [self.state.counters.flatten(), self.state.flag]

    def learn(self, numbers: list[int]) -> bool:
        """Takes the answer; whether tokens were lost."""
        store, state = self._held(), self.state
        assert state is not None, "asked of layers that have one"
        *counters, flag = numbers
        rows = [counters[i * store.batch : (i + 1) * store.batch] for i in range(len(counters) // store.batch)]
        keys = [sum(column) for column in zip(*rows[RUNS::2], strict=True)]
        values = [sum(column) for column in zip(*rows[RUNS + 1 :: 2], strict=True)]
        store.replace(states=frozenset(RowState(*state) for state in zip(rows[LENGTH], keys, values, strict=True)))
        self.seen = rows[START][0] + rows[LENGTH][0]
        self.edition += 1
        self._note_rows()
        if flag:
            state.flag.zero_()
        return bool(flag)

    def has_more_to_do(self) -> bool:
        """Whether anything is left of the last update."""
        return self.staged is not None or self.uncommitted

    def finish_update(self) -> None:
        """Does what is left of an update whose attention never called `finish`."""
        if self.has_more_to_do():
            self._settle()

    def spare_bytes(self) -> int:
        """Bytes of the buffer that are not the store's: what steps need for themselves."""
        if self.buffer is None or self.state is None:
            return 0
        state = self.state
        return self.buffer.nbytes - sum(x.nbytes for x in (state.counters, *state.windows, *state.flat_runs()))

    def _note_rows(self) -> None:
        if self.leads and self.store is not None:
            self.clock.ready = all(state.length for state in self.store.states)

    def wants_host(self, bound: int) -> bool:
        """Whether something is due, between steps, once ``bound`` tokens have been seen."""
        return False

    def between_steps(self) -> None:
        """Does what compiled steps have left to do."""

    def _host(self) -> None:
        """Makes sure that the host knows what the device holds."""
        self.clock.catch_up()
        self.close()

    # What Transformers calls.

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `KVLayer.update`. In a recorded step, what is returned is known to "hfkvq" attention alone."""
        if is_recorded():
            if self.leads:
                self.clock.stale = True
            return StepKV(self, key_states, value_states), StepKV(self, key_states, value_states)
        if self.leads and not is_inside():
            self.clock.look()
        self.clock.catch_up()
        if self.capacity is None and self.buffer is not None and self.seen + key_states.shape[2] > self.room:
            self.leave()
        return super().update(key_states, value_states, *args, **kwargs)

    def _seen_on_device(self) -> Tensor:
        """Logical tokens seen, on the device: i64 (1,). Stock static layers have a number without axes there."""
        assert self.buffer is not None
        assert self.plan is not None
        return seen(self.buffer, self.plan.rows)

    def get_seq_length(self) -> Any:
        """Logical tokens seen; a number on the device in a recorded step, and where the host does not know it."""
        if self.buffer is not None and (is_recorded() or self.clock.stale):
            return self._seen_on_device()
        return super().get_seq_length() + self.clock.ahead

    def plain_steps(self) -> bool:
        """Whether steps need no mask: nothing that is stored is padding, and every row has something stored."""
        if self.capacity is None or self.buffer is None or self.clock.waits:
            # Dense keys and values have padding among them.
            return False
        return self.clock.ready and not self.clock.holes

    def get_query_offset(self) -> Any:
        """Column of the coming forward's first query: i64 (1,) on the device where steps need no mask.

        Where they do, a number, on the device (without axes) in a compiled step.
        """
        if self.plain_steps() or is_captured():
            return self._seen_on_device()
        if is_recorded() and self.buffer is not None:
            return self._seen_on_device()[0]
        self.clock.catch_up()
        return super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical length and offset for the mask of the coming forward; the capacity's where steps must look alike."""
        recorded = self.buffer is not None and is_recorded()
        if recorded or (query_length == 1 and self.plain_steps()):
            return self.room, 0
        self.clock.catch_up()
        return super().get_mask_sizes(query_length)

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `KVLayer.keys`."""
        self._host()
        return self.dense("keys") if self.seen else None

    @keys.setter
    def keys(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        KVLayer.keys.fset(self, value)  # type: ignore[attr-defined]

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `KVLayer.values`."""
        self._host()
        return self.dense("values") if self.seen else None

    @values.setter
    def values(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        KVLayer.values.fset(self, value)  # type: ignore[attr-defined]

    def crop(self, tokens_to_remove: int) -> None:
        """See `KVLayer.crop`."""
        self._host()
        super().crop(tokens_to_remove)
        self.home()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `KVLayer.reorder_cache`."""
        self._host()
        super().reorder_cache(beam_idx)
        self.home()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `KVLayer.batch_repeat_interleave`."""
        self._host()
        super().batch_repeat_interleave(repeats)
        self.home()

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `KVLayer.batch_select_indices`."""
        self._host()
        super().batch_select_indices(indices)
        self.home()

    def activate_past_recording(self) -> None:
        """See `KVLayer.activate_past_recording`."""
        self._host()
        if not self.record_past:
            super().activate_past_recording()
            # Tails are longer from now on.
            self.home()
            if self.store is not None:
                self._warm(self.seen)

    def reset(self) -> None:
        """Forgets everything; buffer and address stay."""
        self.clock.stale, self.clock.steps, self.open = False, 0, False
        self.clock.ready = self.clock.holes = False
        self.clock.ahead = self.clock.peak = 0
        if self.state is not None:
            for part in (self.state.new, self.state.sealed, self.state.flag, self.state.sums, self.state.counts):
                part.zero_()
        super().reset()
        self.home()

    def offload(self) -> None:
        """See `KVLayer.offload`."""
        self._host()
        super().offload()
        self.buffer = self.state = self.plan = None
        self.room, self.clock.home = self.capacity or 0, None

    def prefetch(self) -> None:
        """See `KVLayer.prefetch`."""
        super().prefetch()
        if self.store is not None and self.buffer is None and self.store.device == self.device:
            self.home()

    # What attention functions call.

    def takes_step(self, queries: int, mask: Tensor | None) -> bool:
        """Whether the staged tokens can go through `step_now`."""
        if self.staged is None or self.state is None or self.clock.waits:
            return False
        tokens = self.staged[0].shape[2]
        if tokens > self.takes_several():
            return False
        started = all(state.length for state in self._held().states)
        return tokens == queries <= MAX_STEP and started and (mask is None or tokens == 1)

    def step_now(
        self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        """The staged tokens' whole step, as a compiled one would take it: (B, Hq, Q, Dv)."""
        store, state, plan = self._held(), self.state, self.plan
        assert self.staged is not None
        assert state is not None
        assert plan is not None
        keys, values = self.staged
        self.staged, self.new_columns, self.open = None, 0, True
        then = store.ahead(keys.shape[2], self._hold())
        try:
            out = run_step(query, keys, values, mask, sinks, state, plan, scaling, softcap, any(then.due))
        except BaseException:
            # The tokens may be stored or not; the device knows.
            self.clock.stale = True
            raise
        store.replace(states=then.sealed)
        return out

    def attend_prompt(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        scaling: float,
        softcap: float,
        causal: bool,
    ) -> Tensor:
        """Takes a prompt as an eager forward would: (B, Hq, Q, Dv). ``mask`` may have the capacity's columns."""
        self.update(keys, values)
        queries = query.shape[2]
        if mask is not None:
            mask = mask[..., : self.seen]
        elif not causal:
            mask = torch.ones(1, 1, 1, self.seen, dtype=torch.bool, device=query.device)
        if self.begin(mask, queries):
            out = self.attend(query, mask, scaling, softcap, sinks)
        else:
            out = dense_attention(query, self.dense("keys"), self.dense("values"), mask, sinks, scaling, softcap)
        self.finish(query, mask, scaling, softcap, sinks)
        return out.contiguous()

    def begin(self, mask: Tensor | None, queries: int) -> bool:
        """See `KVLayer.begin`."""
        self.close()
        pages = super().begin(mask, queries)
        if self.padding is not None and self.padding.source is not None:
            self.clock.holes = True
        return pages

    def _settle(self, commit: bool = True) -> None:
        # Nothing is left of a step, and what it has sealed the next one counts.
        if not self.has_more_to_do():
            return
        self.close()
        super()._settle(commit)
        self.home()
        self._note_rows()

    def _demote(self) -> bool:
        if self._renewed_tags() is None:
            return False
        self.close()
        moved = super()._demote()
        if moved:
            self.home()
        return moved

    def dense(self, side: Any) -> Tensor:
        """See `KVLayer.dense`."""
        self.close()
        return super().dense(side)

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticKVLayer:
        """Independent tensors in a buffer of their own, shared scheme."""
        if id(self) in memo:
            return memo[id(self)]
        self._host()
        new = super().__deepcopy__(memo)
        assert isinstance(new, StaticKVLayer), "a copy of this one"
        memo[id(self)] = new
        new.buffer = new.state = new.plan = None
        new.room = self.capacity or 0
        new.clock = copy.deepcopy(self.clock, memo)
        new.home()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with tensors of their own in place of views of the buffer."""
        self._host()
        empty = {"buffer": None, "state": None, "plan": None, "room": self.capacity or 0}
        return self.__dict__ | empty | {"store": copy.deepcopy(self.store)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of `__getstate__`."""
        for name, value in state.items():
            setattr(self, name, value)
        self.home()


class StaticEvictingLayer(StaticKVLayer, EvictingLayer):
    """`EvictingLayer` with a buffer for its budget; trims run between steps, when a row may have outgrown it."""

    # Of several, the first might be the ones to ask.
    several = False
    trims = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: tuple[float, float, Tensor | None] = (1.0, 0.0, None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `EvictingLayer.lazy_initialization`."""
        EvictingLayer.lazy_initialization(self, key_states, value_states)
        self._come_home(key_states.shape[2])

    def _asks(self) -> str:
        return "keep"

    def _fold(self) -> int:
        return self._held().fold

    def _blocks(self) -> tuple[int, ...] | None:
        store, scheme = self._held(), self.scheme
        budget = scheme.budget_bytes
        # A trim is due as soon as a row holds more; steps of up to so many tokens may pass before.
        slack = 2 * MAX_STEP
        whole = scheme.tokens if budget is None else budget // self.costs[1]
        low = scheme.tokens if budget is None else budget // self.costs[0]
        page = store.format.runs[0][0].page_size
        most = [-(-min(tokens + slack, self.room) // page) for tokens in (low, whole)]
        have = [view.table.shape[1] for view in store.runs]
        if self.capacity is None:
            # A budget that is not used up is not paid for.
            return self._blocks_ahead(most[-1] * page)
        if any(a > b for a, b in zip(have, most, strict=True)):
            return None
        return tuple(most)

    def finish(
        self,
        query: Tensor,
        mask: Tensor | None = None,
        scaling: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        """See `EvictingLayer.finish`."""
        if self.new_columns == query.shape[2]:
            self.share = query.shape[1] // self.heads
        self.asked = (query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
        super().finish(query, mask, scaling, softcap, sinks)

    def has_more_to_do(self) -> bool:
        """See `StaticKVLayer.has_more_to_do`: a prompt's tokens may be stored, and not be judged yet."""
        return super().has_more_to_do() or self.pending is not None

    def takes_several(self) -> int:
        """See `StaticKVLayer.takes_several`: a trim judges by one query."""
        return 1

    def takes_step(self, queries: int, mask: Tensor | None) -> bool:
        """Never: a trim may be due, and the host is here."""
        return False

    def assign(self, tiers: Tiers | None = None) -> None:
        """See `EvictingLayer.assign`."""
        super().assign(tiers)
        self.home()

    def wants_host(self, bound: int) -> bool:
        """See `StaticKVLayer.wants_host`."""
        return self.state is not None and bound > self._trim_at()

    def between_steps(self) -> None:
        """Trims rows that have outgrown their budget, by the newest query."""
        state = self.state
        if state is None or self.seen < self._trim_at():
            return
        scaling, softcap, sinks = self.asked
        real = torch.ones(self.batch_size, 1, dtype=torch.bool, device=self.device)
        self._judge(Observation(state.query.clone(), real, None, scaling, softcap, sinks, None))
        self.home()


def _adopt(store: KVStore, state: StepState, plan: StepPlan) -> None:
    """Copies a store's tensors into a buffer's, where they are not those already, and gives the store the latter."""
    if store.counters is not state.counters:
        state.counters.copy_(store.counters)
        store.replace(counters=state.counters)
    for at, (own, new) in enumerate(zip(store.windows, state.windows, strict=True)):
        if own is not new:
            new.copy_(own)
            store.replace(windows=[*store.windows[:at], new, *store.windows[at + 1 :]])
    for i, (own, new) in enumerate(zip(store.runs, state.runs, strict=True)):
        blocks, have = plan.blocks[i], own.table.shape[1]
        pairs = list(zip((*own.keys, *own.values), (*new.keys, *new.values), strict=True))
        if all(a is b for a, b in pairs):
            if own.table is not new.table:
                new.table.copy_(own.table)
        else:
            every = torch.arange(plan.rows * blocks, dtype=torch.int32, device=store.device)
            new.table.copy_(every.view(plan.rows, blocks))
            target, source = new.table[:, :have].flatten().long(), own.table.flatten().long()
            for old, part in pairs:
                raw, held = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (part, old))
                raw[target] = held[source]
        if own.pos is not None and new.pos is not None and own.pos is not new.pos:
            new.pos[:, : own.pos.shape[1]].copy_(own.pos)
        store.replace(runs=[*store.runs[:i], new, *store.runs[i + 1 :]])
