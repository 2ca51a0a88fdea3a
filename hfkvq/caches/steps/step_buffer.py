"""The buffer of a layer's steps: one tensor at one address, in which everything that the layer holds lies.

Steps over it are recorded, so that the host does not see them, or the same operations launched from Python.

With a fixed capacity the buffer is made at the first update. A layer that grows has none until its first step, and
another one whenever its tokens need more room. Prompts, and whatever else is no ordinary step, go the way of every
layer, over the same tensors. A buffer's sizes are its `StepPlan`, which `make_plan` works out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.dispatch import exact
from hfkvq.kernels.step import (
    MAX_STEP,
    Allocation,
    StepPlan,
    StepState,
    buffer_bytes,
    run_step,
    seen,
    settle,
    views_of_buffer,
)

from ..base import outside_inference_mode, warn_once
from ..base.capture import RECORDERS
from ..base.recorded import DeviceSync, is_captured, is_recorded
from ..eviction.evictor import Eviction
from ..layer_state.base import Part
from ..layer_state.query_statistics import QueryStatistics
from ..schemes.base import Layout, Scheme
from ..store import SIDES, KVStore
from ..store.host import empty
from ..store.row_lengths import row_states
from ..store.windows import in_buffer


def make_plan(
    layer: Any, room: int, before: StepPlan | None, eviction: Eviction | None, queries_per_head: int
) -> StepPlan | None:
    """The plan of a buffer that what a layer holds can lie in; None while the store holds more than that.

    Args:
        layer: with a store, of which tails are made as long as they may become in such a buffer.
        before: of the buffer that there is.
        eviction: of a layer that evicts.
        queries_per_head: query heads of a KV head.
    """
    store, hold = layer.held(), layer.hold
    # Staged tokens have been seen, and are to join the store.
    new = room - layer.seen + layer.staged_length
    most = None if eviction is None else eviction.most_held(room)
    if most is not None:
        # A trim is due as soon as a row holds more; steps of up to so many tokens may pass before.
        page, slack = store.format.runs[0][0].page_size, 2 * MAX_STEP
        blocks = tuple(-(-min(tokens + slack, room) // page) for tokens in most)
        if layer.capacity is None:
            # A budget that is not used up is not paid for.
            blocks = _blocks_ahead(store, new, blocks[-1] * page, before)
        elif any(view.table.shape[1] > count for view, count in zip(store.runs, blocks, strict=True)):
            return None
    elif eviction is not None or len(store.runs) > 1:
        # Prompt-only eviction, or several runs: current pages, plus room for all remaining columns, which may all go to
        # the last run. At a fixed capacity narrow tokens have the room that prompts need.
        blocks = _blocks_ahead(store, new, room, before, layer.capacity is not None)
    else:
        rest = max(room - layer.gone - store.layout.sink, 0)
        blocks = tuple(
            max(-(-rest // keys.page_size), view.table.shape[1])
            for view, (keys, _) in zip(store.runs, store.format.runs, strict=True)
        )
    store.reserve_tail(hold)
    for side in SIDES:
        # Tails need no more slots than the buffer has columns. While nothing is there, nothing has to move.
        slots = min(store.tail_limit[side], max(room - layer.gone - store.layout.sink, MAX_STEP))
        store.grow_tail(side, slots, store.longest == 0)
    shape = store.batch, store.heads, store.dims["keys"], store.dims["values"], str(store.dtype)
    tails = store.windows[2].shape[2], store.windows[3].shape[2]
    plan = plan_of_layout(layer.scheme, store.layout, shape, blocks, tails, room, hold)
    plan = replace(plan, store=store.format.spec, fold=store.fold, offloaded=layer.offloaded)
    if eviction is None or not eviction.keeps_query:
        return plan
    return replace(plan, query="keep", query_heads=store.fold * store.heads * queries_per_head)


def plan_of_layout(
    scheme: Scheme,
    layout: Layout,
    shape: tuple[int, int, int, int, str],
    blocks: tuple[int, ...],
    tails: tuple[int, int],
    capacity: int,
    hold: int = 0,
) -> StepPlan:
    """Plan of steps over what a layout describes.

    Args:
        shape: rows, KV heads, channels of keys and of values, and dtype.
        hold: newest tokens that stay unsealed, beyond what the layout says.
    """
    keys, values = layout.keys, layout.values
    rule, query = sealing_rules(scheme, layout, shape[2])
    local, unit = (max(keys.local, hold), max(values.local, hold)), (keys.unit, values.unit)
    balance = keys.balance, values.balance
    return StepPlan(layout.store.spec, *shape, blocks, tails, local, unit, capacity, rule, query, balance=balance)


def sealing_rules(scheme: Scheme, layout: Layout, key_dim: int) -> tuple[str, str]:
    """``rule`` and ``query`` of `StepPlan`, as a scheme that keeps all tokens has them."""
    needs = scheme.needs
    rule = scheme.step_rule(key_dim) if layout.keys.formats[-1].raised else None
    summed = "total" if "history" in needs else "sum"
    return rule or "", summed if "query" in needs else ""


def _blocks_ahead(store: KVStore, new: int, most: int, before: StepPlan | None, fixed: bool = False) -> tuple[int, ...]:
    """Pages of a row with so many new tokens, ``most`` tokens at the most: steps seal into the last run only.

    With a fixed capacity, room that the last run need not have goes to the others when these need more.
    """
    have, page = [view.table.shape[1] for view in store.runs], store.format.runs[-1][0].page_size
    held = min(store.state.wide_most + max(new, 0), most)
    # Sizes of the buffer hold until it has no room; after a reset, rows of one run may come to hold more.
    if (
        before is not None
        and all(a <= b for a, b in zip(have, before.blocks, strict=True))
        and (not store.longest or held <= before.blocks[-1] * page)
    ):
        return before.blocks
    last = -(-held // page)
    return (*have[:-1], last if fixed and not store.format.ordered else max(have[-1], last))


LEAST_HEADROOM = 128
"""Fewest tokens by which a captured buffer is ahead of need, so that no short context is captured at every page."""

MOST_HEADROOM = 4096
"""Most tokens by which a buffer is ahead: so many steps take half a minute, and capturing a fraction of a second."""


def room_ahead(buffers: Sequence[StepBuffer], need: int, headroom: float, captured: bool) -> int:
    """Logical columns that buffers of a cache that grows are made for when so many need a place.

    Buffers are ahead by a share of what is held: of a long prompt that was evicted to a small budget, that is little.

    Args:
        headroom: the share where steps are captured, since a buffer that moves is captured again; 0 for one page.
        captured: whether they are. Else a buffer is one page ahead, and is copied once a page.
    """
    stores = [(buffer, buffer.layer.store) for buffer in buffers if buffer.layer.store is not None]
    if not captured or not headroom:
        return need + max(formats[0].page_size for _, store in stores for formats in store.format.runs)
    held = [store.longest for buffer, store in stores if buffer.evicts_prompts_alone]
    share = int(max(held, default=need) * headroom)
    return need + max(LEAST_HEADROOM, min(share, MOST_HEADROOM))


class StepKV(NamedTuple):
    """Result of `KVLayer.update` in a recorded step: the layer's buffer and the new tokens; no tensor."""

    buffer: StepBuffer
    keys: Tensor
    values: Tensor


class StepBuffer(Part):
    """Gives what a layer holds fixed addresses, runs steps there, and counts those that the host did not see.

    Attributes:
        eviction: of the layer; None where it keeps all tokens.
        tensor: u8, the buffer; None while the layer grows as any does.
        pages: u8, memory of pages that are offloaded; None where they lie in the buffer.
        room: most logical columns that it has room for; the capacity, where there is one.
        open: whether the device has sealed tokens that its counters do not count yet.
        sync: what the cache's layers know together of steps.
        leads: whether the layer is the first of its cache, which answers for all.
    """

    sync: DeviceSync
    leads: bool

    def __init__(self, layer: Any, queries: QueryStatistics | None, eviction: Eviction | None) -> None:
        super().__init__(layer)
        self.queries, self.eviction = queries, eviction
        self.queries_per_head = 1
        self._release()
        self.room = layer.capacity or 0
        DeviceSync([self])

    def _release(self) -> None:
        self.tensor: Tensor | None = None
        self.pages: Tensor | None = None
        self.state: StepState | None = None
        self.plan: StepPlan | None = None
        self.spec = ""
        self.open = False

    @property
    def evicts_prompts_alone(self) -> bool:
        """True if tokens of prompts are evicted, and all stay that are generated."""
        return self.eviction is not None and not self.eviction.trims_steps

    def forget(self) -> None:
        """Forgets what steps have left in the buffer, which stays."""
        self.open = False
        state = self.state
        if state is not None:
            for part in (state.new, state.sealed, state.flag, state.sums, state.counts, state.weight, state.query):
                part.zero_()

    def start(self) -> None:
        """Takes the buffer that an empty layer still has, if it is of the shape that is wanted now."""
        layer = self.layer
        store = layer.held()
        for side in SIDES if self.replays and self.eviction is None else ():
            # Tails are made as long as in a buffer while nothing is there that would have to move.
            store.grow_tail(side, store.tail_limit[side], True)
        if (
            layer.capacity is None
            and self.tensor is not None
            and (self.tensor.device != layer.device or self._plan_for(self.room, self.plan) != self.plan)
        ):
            self.leave()
        # The room of a fixed capacity may follow from what prompts leave: how many tokens, or in which runs.
        follows = self.evicts_prompts_alone or (self.eviction is None and len(store.runs) > 1)
        if layer.capacity is None or not follows:
            self.bind()

    def _plan_for(self, room: int, before: StepPlan | None) -> StepPlan | None:
        return make_plan(self.layer, room, before, self.eviction, self.queries_per_head)

    def bind(self) -> None:
        """Brings what the store holds into the buffer, wherever an operation has left it; makes the buffer if need be.

        A buffer of another shape has another address: graphs are then recorded anew. A layer that grows has a buffer
        from its first recorded step on only: see `make_room`. If anything fails, there is none.
        """
        layer, store = self.layer, self.layer.store
        if store is None or not self.room:
            return
        try:
            plan = self._plan_for(self.room, self.plan)
            if plan is None:
                # A stale buffer would be read by the next recorded step.
                self.drop()
                return
            if layer.capacity is None and self.plan not in (None, plan):
                # It had room for something else: the next recorded step makes a buffer for what is there.
                self.leave()
                return
            if plan != self.plan or self.tensor is None or self.tensor.device != store.device:
                self._allocate(plan, store.device)
            assert self.state is not None, "made with the buffer"
            store.adopt(in_buffer(store.state, self.state, plan.blocks))
            self._write_queries()
        except BaseException:
            # Out of memory, most likely. What the store holds is whole, wherever it lies.
            self.drop()
            raise

    def _allocate(self, plan: StepPlan, device: torch.device) -> None:
        old = self.state
        # Zeros: see `PageFormat.allocate`.
        with torch.inference_mode(False):
            # Inference tensors could not be written by steps outside of inference mode.
            tensor = torch.zeros(buffer_bytes(plan), dtype=torch.uint8, device=device)
        pages = empty(buffer_bytes(plan, True), device).zero_() if plan.offloaded else None
        if not torch.compiler.is_compiling():
            for x in (tensor, pages):
                if x is not None:
                    torch._dynamo.mark_static_address(x)
        self.tensor, self.pages, self.plan, self.spec = tensor, pages, plan, plan.spec
        with torch.inference_mode(False):
            self.state = state = views_of_buffer(tensor, plan, pages)
        self.sync.buffers = None
        if old is not None and old.query.shape == state.query.shape and old.query.device == device:
            state.query.copy_(old.query)

    def _write_queries(self) -> None:
        state, queries = self.state, self.queries
        if state is None or not state.sums.numel():
            return
        if queries is None or queries.sums is None or queries.counts is None:
            state.sums.zero_()
            state.counts.zero_()
        else:
            state.sums.copy_(queries.sums.view_as(state.sums))
            # Counts are by head first; rows of the store may be heads.
            state.counts.copy_(
                queries.counts.view_as(state.counts) if self._fold == 1 else queries.counts.T.reshape(1, -1)
            )

    @property
    def replays(self) -> bool:
        """True if steps over the buffer are captured and replayed."""
        return self.sync.captured and self.layer.device.type in RECORDERS

    def room_for(self, need: int) -> int:
        """See `room_ahead`; the same for all layers of a step where steps are captured."""
        sync = self.sync
        if not self.replays:
            return room_ahead([self], need, sync.headroom, False)
        if need != sync.room[0]:
            sync.room = need, room_ahead(sync.members, need, sync.headroom, True)
        return sync.room[1]

    def find_room(self, need: int) -> bool:
        """True if there is room for so many logical columns; the buffer of a layer that grows is made, if need be."""
        if self.tensor is not None and need <= self.room:
            return True
        if self.layer.capacity is not None:
            return False
        try:
            self.make_room(self.room_for(need))
        except torch.OutOfMemoryError:
            warn_once("There is not enough memory for the buffers of steps; they go one operation after the other.")
        return self.tensor is not None

    def make_room(self, room: int) -> None:
        """Moves into a buffer for so many logical columns, which may be the first one."""
        self.close()
        self.room, self.plan = room, None
        self.bind()

    def leave(self) -> None:
        """Takes what is stored out of the buffer, and grows like any layer until a step is recorded again."""
        layer = self.layer
        if self.state is not None and layer.store is not None:
            self.close()
            layer.store = copy.deepcopy(layer.store)
        self.drop()

    def memory(self) -> list[Tensor]:
        """Memory of the device that the buffer takes."""
        state = self.state
        if self.tensor is None or state is None:
            return []
        return [self.tensor] if state.ahead is None else [self.tensor, state.ahead.target]

    def drop(self) -> None:
        """Forgets the buffer, in which nothing lies any longer."""
        self._release()
        self.room, self.sync.buffers = self.layer.capacity or 0, None

    @property
    def allocation(self) -> Allocation:
        """The buffer with its views and layout."""
        if self.tensor is None or self.state is None or self.plan is None:
            raise AssertionError("asked of a layer that has a buffer")
        return Allocation(self.tensor, self.pages, self.state, self.plan)

    def take_over(self, allocation: Allocation, room: int) -> None:
        """Takes over a buffer in which no step is pending, or that of a layer that is gone: see `forget`."""
        self.tensor, self.pages, self.state, self.plan = allocation
        self.spec, self.room = allocation.plan.spec, room

    def close(self) -> None:
        """Lets the device's counters count what the last step has sealed; asks it nothing."""
        if self.state is not None and self.plan is not None and self.open:
            settle(self.state, self.plan)
            self.open = False
            if self.queries is not None and self.state.sums.numel():
                self._read_queries(self.state, self.queries)

    @outside_inference_mode
    def _read_queries(self, state: StepState, queries: QueryStatistics) -> None:
        sums, counts, fold = state.sums.clone(), state.counts.clone(), self._fold
        queries.sums = sums.view(-1, self.layer.heads, sums.shape[2])
        queries.counts = counts if fold == 1 else counts.view(-1, fold).T.contiguous()

    @property
    def _fold(self) -> int:
        return 1 if self.plan is None else self.plan.fold

    @property
    def is_recorded(self) -> bool:
        """True if the running forward is a recorded step; one of a compiled model needs a fixed capacity."""
        bound = self.state is not None
        return bound and (is_captured() or (self.layer.capacity is not None and is_recorded()))

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
        self.open = True

    def device_counts(self) -> list[Tensor]:
        """Counters that the host reads after steps that it has not counted: i32, flat."""
        self.open = True
        self.close()
        state = self.allocation.state
        return [state.counters.flatten(), state.flag]

    def learn(self, numbers: list[int]) -> bool:
        """Takes the answer; whether tokens were lost."""
        layer, state = self.layer, self.allocation.state
        store = layer.held()
        *counters, flag = numbers
        rows = [counters[i * store.batch : (i + 1) * store.batch] for i in range(len(counters) // store.batch)]
        store.note_states(row_states(rows), foreseen=False)
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
        self.close()

    def before_update(self, tokens: int) -> None:
        """Makes ready for so many tokens in Python."""
        layer = self.layer
        self.sync.catch_up()
        if layer.capacity is None and tokens > MAX_STEP and layer.seen + tokens > self.room:
            # A prompt grows the pages; the step behind it makes another buffer.
            self.leave()

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
        state, eviction = self.state, self.eviction
        if eviction is None or state is None or self.layer.seen < eviction.full_at:
            return
        # Tokens that the last step sealed are in pages.
        self.close()
        eviction.judge_step(state.query.clone())
        self.bind()

    # Lengths and masks.

    def seen_on_device(self) -> Tensor:
        """Logical tokens seen, on the device: i64 (1,). Stock static layers have a number without axes there."""
        tensor, _, _, plan = self.allocation
        return seen(tensor, plan.rows)

    def length(self, seen: int) -> Any:
        """Tokens seen, ``seen`` of which the layer knows; on the device where the host does not know all."""
        if self.is_recorded or (self.state is not None and self.sync.stale):
            return self.seen_on_device()
        return seen + self.sync.ahead

    def need_no_mask(self) -> bool:
        """True if steps need no mask: nothing that is stored is padding, and every row has something stored."""
        if self.layer.capacity is None or self.tensor is None:
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
        if not all(state.length for state in layer.held().states) or not self.find_room(layer.seen):
            return False
        if tokens > 1 and (arguments.mask is not None or not arguments.causal):
            return False
        eviction = self.eviction
        return eviction is None or (not eviction.asks_every_step and layer.seen < eviction.full_at)

    @exact
    def run(self, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
        """The staged tokens' whole step, as a recorded one would take it: (B, Hq, Q, D) to (B, Hq, Q, Dv).

        None where they have to go one operation after the other: nothing is done then.
        """
        if not self.takes(query.shape[2], arguments):
            return None
        layer, (_, _, state, plan) = self.layer, self.allocation
        store = layer.held()
        query, keys, values = layer.smoothed_step(query)
        then, self.open = store.forecast(keys.shape[2], layer.hold), True
        try:
            out = run_step(query, keys, values, arguments.biased(), state, plan, any(then.due))
        except BaseException:
            if int(state.counters[LENGTH].max()) > store.longest:
                # The tokens are stored, and what was due with them may not be sealed.
                state.new.zero_()
                store.note_states(then.appended, foreseen=False)
                layer.staged, layer.new_columns, layer.uncommitted = None, 0, True
            raise
        store.note_states(then.sealed)
        layer.staged, layer.new_columns = None, 0
        return out

    def copy_for(self, layer: Any, memo: dict[int, Any]) -> Any:
        """A copy for the copy of its layer, without the buffer."""
        new = super().copy_for(layer, memo)
        new._release()
        new.room = layer.capacity or 0
        return new
