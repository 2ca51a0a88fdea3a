"""Decode steps from CUDA graphs: the first step of a shape runs in Python, the next is captured, the rest replay it.

Every call of the model comes by (`hfkvq.caches.base.model_calls`). So every mode of `generate`, and loops of users'
own, have their steps replayed, and no model code is changed. What is no step, or cannot be captured, goes on to the
model as it came.

A graph writes to addresses, so a cache owns its buffers and graphs together. An empty cache takes over those that the
last cache of its kind has left; every other cache makes its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.step import MAX_STEP, Ahead, Allocation, buffer_bytes, copied_runs

from .base import read_switch, warn_once
from .base.capture import RECORDERS, NumbersOnDevice
from .base.model_calls import CACHE_NAMES, CallInterceptor, forward_parameters, inside_call, with_cache
from .base.recorded import recording
from .fused_modules import DEVICES, Fusion
from .layer_state.base import ROLLBACK, unchanged_on_error
from .steps.step_buffer import StepBuffer
from .store import KVStore
from .store.host import pinned


class Recording(NamedTuple):
    """A captured step.

    Attributes:
        graph: runs the step; see `hfkvq.caches.base.capture.CapturedGraph`.
        inputs: tensors that the graph reads, by argument.
        model: whose step it is, weakly.
        fingerprint: of the model when it was captured; see `hfkvq.caches.base.model_calls.CallInterceptor.fingerprint`.
    """

    graph: Any
    inputs: dict[str, Tensor]
    model: weakref.ref[Any]
    fingerprint: Any

    def replay(self, given: dict[str, Tensor], cache: Any) -> Any:
        """One step with these arguments: what the model would return."""
        if given:
            own = [self.inputs[name] for name in given]
            torch._foreach_copy_(own, list(given.values()))  # pyright: ignore[reportPrivateImportUsage]
        return self.graph.replay(cache)


class BufferSet:
    """Buffers of all layers of a cache, and the steps that were captured over them.

    Args:
        states: recurrent ones, of all layers: tensors that steps write into.

    Attributes:
        allocations: of the layers, in their order.
        runs: how often each step has run in Python, or failed to be captured.
        last: thread and stream of the last step.
    """

    def __init__(self, buffers: Sequence[StepBuffer], states: Sequence[Tensor] = ()) -> None:
        self.states = list(states)
        self.allocations = [buffer.allocation for buffer in buffers]
        self.room = buffers[0].room
        self.recordings: dict[Any, Recording] = {}
        self.runs: dict[Any, int] = {}
        self.last: Any = None
        if buffers[0].layer.capacity is None:
            # Buffers are copied whole, and those of a fixed capacity may be nearly empty.
            _fetch_ahead([each for each in self.allocations if each.pages is not None])
        # i32 (B,) in all layers, parts of the buffers.
        self.lengths = [each.state.counters[LENGTH] for each in self.allocations]
        self._visible: tuple[Any, Tensor, bool] | None = None

    def is_of(self, buffers: Sequence[StepBuffer]) -> bool:
        """True if all these layers lie here."""
        return all(own.tensor is each.tensor for own, each in zip(buffers, self.allocations, strict=True))

    def suits(self, keys: Tensor) -> bool:
        """True if empty layers that are about to get keys (B, H, T, D) have room here, and waste little of it."""
        tensor, _, _, plan = self.allocations[0]
        rows, heads, tokens, dim = keys.shape
        alike = plan.rows == rows * plan.fold and plan.heads == heads // plan.fold and plan.key_dim == dim
        alike = alike and plan.dtype == str(keys.dtype) and tensor.device == keys.device
        return alike and tokens < self.room <= 2 * (tokens + 1) + 512 and self.last == _where(keys.device)

    def hides_padding_only(self, mask: Tensor, store: KVStore, edition: int) -> tuple[bool, bool]:
        """True if a mask hides nothing but leading padding, and whether any row has such padding. Asks the device.

        Args:
            mask: (B, L).
            edition: of the first layer, by which what was found before is good.
        """
        known, kind = self._visible, (edition, mask.device)
        if known is None or known[0] != kind:
            # Tokens that have been evicted are before a row's start, as padding is.
            start = (store.counters[START] - store.state.dropped)[:: self.allocations[0].plan.fold].to(mask.device)
            column = torch.arange(self.room, dtype=torch.int32, device=mask.device)
            known = self._visible = (kind, column >= start[:, None], bool((start > 0).any()))
        _, visible, padded = known
        shown = mask if mask.dtype == torch.bool else mask != 0
        return torch.equal(shown, visible[:, : mask.shape[1]]), padded


def _fetch_ahead(offloaded: Sequence[Allocation]) -> None:
    """Gives layers whose pages are offloaded memory on the device, to which captured steps copy them a layer ahead."""
    if len({each.tensor.device for each in offloaded}) != 1:
        # Pages are read in place if no layer is offloaded, or layers lie on several devices.
        return
    device, size = offloaded[0].tensor.device, max(buffer_bytes(each.plan, True) for each in offloaded)
    try:
        with torch.inference_mode(False):
            memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in offloaded[:2]]
            mark = torch.zeros(1, device=device, dtype=torch.float32)
    except torch.OutOfMemoryError:
        # Pages are read in place.
        return
    before = None
    for i, (_, pages, state, plan) in enumerate(offloaded):
        assert pages is not None, "of layers that are offloaded"
        source, target = pinned(pages), memory[i % 2][: pages.numel()]
        state.ahead = Ahead(source, target, copied_runs(state, plan, target), mark, before is None)
        if before is not None:
            before.following = weakref.ref(state.ahead)
        before = state.ahead


class SpareBuffers:
    """Buffers that the last of several caches of one config and preset has left, for the next empty one.

    The caches keep this, so the buffers go with the last cache.

    Attributes:
        left: the buffers; None if no cache has left any.
    """

    def __init__(self, config: Any) -> None:
        self._config = weakref.ref(config)
        self.left: BufferSet | None = None

    @classmethod
    def of(cls, config: Any, kind: str) -> SpareBuffers:
        """The one of all caches of this kind over this config."""
        found = _SPARE.get((id(config), kind))
        if found is None or found._config() is not config:
            found = _SPARE[id(config), kind] = cls(config)
        return found


_SPARE: weakref.WeakValueDictionary[tuple[int, str], SpareBuffers] = weakref.WeakValueDictionary()


def _where(device: torch.device) -> tuple[int, int]:
    """The current thread and stream: buffers pass from one cache to another only within them."""
    return threading.get_ident(), torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


TRIES = 2
"""Captures of a step that may fail before it stays in Python: the first may fail for what it finds unprepared."""

# One thread at a time: graphs share the memory of what they compute in between.
_LOCK = threading.RLock()


def graphs_enabled(graphs: bool | None) -> bool:
    """True if steps are to be captured: as the argument says, or else the variable HFKVQ_GRAPHS, which is 1 or 0."""
    if graphs is None:
        return read_switch("HFKVQ_GRAPHS", True, "steps are captured")
    if not isinstance(graphs, bool):
        raise ValueError(f"graphs: got {graphs!r}, allowed True, False, or None, which asks HFKVQ_GRAPHS.")
    return graphs


class Step(NamedTuple):
    """A call of a model that may be replayed.

    Attributes:
        tokens: new tokens of each row.
        tensors: arguments by name, the mask aside.
        mask: (B, L) or None.
    """

    tokens: int
    tensors: dict[str, Tensor]
    mask: Tensor | None
    rest: dict[str, Any]


class StepGraphs:
    """The graphs of one cache, and the buffers of its layers.

    Args:
        cache: a `MixedKVCache`. Once it is gone its buffers are left to the next one, but not where bytes are counted.

    Attributes:
        fuses: whether modules around attention are fused in captured steps.
        spare: buffers of caches of the same kind that are gone.
        states: recurrent ones, of the cache.
    """

    def __init__(self, cache: Any) -> None:
        self.fuses = read_switch("HFKVQ_FUSION", True, "modules of captured steps are fused")
        self.sync = sync = cache._sync
        leaves, sync.captured = cache.budget is None, True
        # Reason of the last capture that failed.
        self._why = ""
        self._failed: dict[Any, str] = {}
        # The newest graph, whose memory the next one takes: PyTorch sets aside what the last graph of a pool leaves.
        self._newest: Any = None
        self._preset = repr(cache.preset)
        offloaded = [member.layer.offloaded for member in sync.members]
        kind = repr((cache.preset, sync.first.layer.capacity, offloaded))
        self.spare = SpareBuffers.of(cache.config, kind) if leaves else SpareBuffers(cache.config)
        self.states = cache.states
        if sync.first.layer.capacity is None and leaves:
            release = weakref.finalize(cache, StepGraphs.release, self)
            release.atexit = False

    # Buffers of the layers.

    def release(self) -> None:
        """Leaves the buffers of a cache that is gone to the next one."""
        if self.sync.buffers is not None:
            self.spare.left = self.sync.buffers

    def find_room(self, tokens: int) -> BufferSet | None:
        """Buffers with room for so many tokens more; None where layers hold what no buffer has room for."""
        sync = self.sync
        sync.prepare(tokens)
        buffers, found = sync.members, sync.buffers
        need = sync.seen + tokens
        if found is None or need > found.room or not found.is_of(buffers) or not self.states.copy_in(found.states):
            sync.apply_graph_steps()
            # Buffers that have no use any more free their memory for others.
            sync.buffers = found = self.spare.left = None
            found = sync.buffers = self._made(buffers, need)
        if found is not None:
            found.last = _where(buffers[0].layer.device)
        return found

    def _made(self, buffers: list[StepBuffer], need: int) -> BufferSet | None:
        # Caches of fixed capacity have buffers from the first update on, unless an operation on rows has left them.
        grows = buffers[0].layer.capacity is None
        if any(buffer.tensor is None for buffer in buffers) or need > buffers[0].room:
            room = buffers[0].room_for(need) if grows else 0
            try:
                for buffer in buffers:
                    if grows:
                        buffer.make_room(room)
                    else:
                        buffer.bind()
            except torch.OutOfMemoryError:
                if not grows:
                    raise
                for buffer in buffers:
                    buffer.leave()
                warn_once(
                    "There is not enough memory for the buffers of captured steps; this step runs without graphs."
                )
                return None
        lost = any(buffer.tensor is None for buffer in buffers) or len({buffer.room for buffer in buffers}) > 1
        return None if lost else BufferSet(buffers, self.states.tensors())

    # A call of the model.

    def call(
        self, model: Any, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any
    ) -> Any:
        """The model's call: replayed, captured, or as it is."""
        self.states.check()
        step = self._read(model, args, kwargs, cache.attached)
        if isinstance(step, str):
            warn_once(f"{type(model).__name__}: steps are not captured, since {step}; they run without graphs.")
        if isinstance(step, Step):
            with _LOCK:
                done, out = self._run(model, interceptor, cache, step)
            if done:
                return out
        with inside_call(), self._fused_prompt(model, interceptor, args, kwargs, cache):
            if not self.states.layers:
                return model._call_impl(*args, **kwargs)
            before = self.sync.seen
            with self.states.invalidated_on_partial_write(lambda: self.sync.has_passed(before)):
                return model._call_impl(*args, **kwargs)

    def _read(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cache_attached: bool
    ) -> Step | str | None:
        """The step that a call is; why it cannot be captured, or None if it is none."""
        if args:
            kwargs = dict(zip(forward_parameters(type(model)), args, strict=False)) | kwargs
        sync, first = self.sync, self.sync.first.layer
        main = kwargs.get("input_ids")
        main = kwargs.get("inputs_embeds") if main is None else main
        if not isinstance(main, Tensor) or main.dim() < 2 or main.device.type not in RECORDERS:
            return None
        rows, tokens = main.shape[:2]
        states = self.states
        most = 1 if states.layers else MAX_STEP
        if first.store is None or not sync.ready or not 1 <= tokens <= most or rows != first.batch_size:
            return None
        if states.reason is not None:
            return states.reason
        if not cache_attached:
            return None
        if tokens > 1 and any(buffer.most_tokens() < tokens for buffer in sync.members):
            if first.record_past:
                return "a budget of tokens is judged by the query of a step of one token"
            return None
        if model.training:
            return "the model is in training mode; call model.eval()"
        if torch.is_grad_enabled():
            return "gradients are recorded; use torch.no_grad() or torch.inference_mode()"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "somebody captures this call already"
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            return "a mode of PyTorch watches every operation"
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "there are forward hooks for all modules"
        tensors: dict[str, Tensor] = {}
        rest: dict[str, Any] = {}
        for name, x in kwargs.items():
            if name in CACHE_NAMES:
                continue
            if isinstance(x, Tensor):
                tensors[name] = x
            elif x is None or isinstance(x, (bool, int, float, str, torch.dtype)):
                rest[name] = x
            else:
                return f"its argument {name} is a {type(x).__name__}"
        if rest.get("output_attentions") or getattr(model.config, "output_attentions", False):
            return "it returns attention weights"
        for name in ("token_type_ids", "mm_token_type_ids"):
            # Transformers 5.17 says of all tokens so far whether each is text, so every step would have another shape.
            if name in tensors and "position_ids" in tensors:
                tensors[name] = tensors[name][..., -tokens:]
        mask = tensors.pop("attention_mask", None)
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != first.seen + sync.ahead + tokens):
            # Masks of other dimensions have another shape in each step.
            return None
        return Step(tokens, tensors, mask, rest)

    def _run(self, model: Any, interceptor: CallInterceptor, cache: Any, step: Step) -> tuple[bool, Any]:
        sync = self.sync
        shapes = tuple((name, x.shape, x.dtype, x.device) for name, x in step.tensors.items())
        kind = id(model), self.fuses, self._setting(model), tuple(step.rest.items()), shapes
        if kind in self._failed:
            return False, None
        if sync.stale:
            sync.catch_up()
        if cache.budget is not None:
            cache.budget.reserve(cache, step.tokens)
        buffers = self.find_room(step.tokens)
        if buffers is None:
            return False, None
        masked = False
        if step.mask is not None:
            first = sync.first.layer
            padding_alone, padded = buffers.hides_padding_only(step.mask, first.held(), first.edition)
            masked, placed = not padding_alone, "position_ids" in step.tensors
            # A model that is not told positions may work them out from the mask, which is left out or widened here.
            if (masked or padded) and not placed:
                return False, None
            # Layers with states may read a wider mask in another way.
            alone = step.tokens > 1 or any(buffer.trims for buffer in sync.members) or self.states.layers
            if masked and alone:
                return False, None
            if step.mask.shape[0] != first.batch_size:
                return False, None
        tensors = dict(step.tensors)
        if masked and step.mask is not None:
            # Columns that are not there yet are masked.
            tensors["attention_mask"] = torch.nn.functional.pad(step.mask, (0, buffers.room - step.mask.shape[1]))
        # Graphs know where smoothing vectors lie, and keep them.
        smoothing = tuple([buffer.layer.smoothing for buffer in sync.members])
        # Graphs write the newest queries where these lie.
        held = [None if buffer.queries is None else buffer.queries.shown for buffer in sync.members]
        shown = tuple([None if x is None else x.data_ptr() for x in held])
        key = (*kind, masked, smoothing, shown)
        recorded = buffers.recordings.get(key)
        if recorded is not None and recorded.model() is model and recorded.fingerprint == interceptor.fingerprint():
            return True, self._replay(recorded, tensors, cache, step)
        if recorded is not None:
            # The graphs are of a model that has changed since.
            del buffers.recordings[key]
        reason = interceptor.check_hooks()
        if reason is not None:
            self._give_up(model, kind, reason)
            return False, None
        states = self.states
        runs = buffers.runs[key] = buffers.runs.get(key, 0) + 1
        # Where vectors and queries lie is no matter; and a budget has compiled the kernels of its layers' new schemes.
        loaded = (self._preset, *kind, masked)
        # A cache may be given one prompt of a few tokens, which is a step of several, and never another.
        if runs > 1 or (step.tokens == 1 and loaded in interceptor.captured):
            recorded = self._capture(model, interceptor, cache, tensors, step)
            if recorded is not None:
                buffers.recordings[key], self._newest = recorded, recorded.graph
                interceptor.captured.add(loaded)
                return True, self._replay(recorded, tensors, cache, step)
            if runs > TRIES:
                self._give_up(model, kind, self._why)
        try:
            out = self._first(model, interceptor, cache, tensors, step)
            if not states.are_in(buffers.states):
                self._give_up(model, kind, "its layers keep recurrent states in new tensors at each step")
            return True, out
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # The cache is as it was: a forward that cannot do with what a recorded step is given runs without.
            said = str(error).strip().partition("\n")[0]
            self._give_up(model, kind, f"its forward cannot be recorded ({type(error).__name__}: {said})")
            return False, None

    def _setting(self, model: Any) -> Any:
        """Settings that a model's arithmetic depends on beside its arguments."""
        config = getattr(model, "config", None)
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        return (
            stream,
            getattr(config, "output_hidden_states", None),
            torch.is_inference_mode_enabled(),
            *(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu")),
            getattr(config, "_experts_implementation_internal", None),
            getattr(config, "_attn_implementation_internal", None),
        )

    def _give_up(self, model: Any, kind: Any, reason: str) -> None:
        self._failed[kind] = reason
        warn_once(f"{type(model).__name__}: steps are not captured, since {reason}; they run without graphs.")

    def _fused(
        self, model: Any, interceptor: CallInterceptor, step: Step, compares: bool
    ) -> contextlib.AbstractContextManager[None]:
        """The modules around attention, fused while a step of one token a row is recorded, if they are to be."""
        if step.tokens > 1 or self.sync.first.layer.device.type not in DEVICES or not self.fuses:
            return contextlib.nullcontext()
        interceptor.fusion = interceptor.fusion or Fusion()
        return interceptor.fusion.applied(model, compares)

    def _fused_prompt(
        self, model: Any, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any
    ) -> contextlib.AbstractContextManager[None]:
        """The modules around attention, fused in a call of more tokens than steps have."""
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        tokens = 0 if given is None or given.device.type not in DEVICES or given.dim() < 2 else given.shape[1]
        watched = torch.is_grad_enabled() or model.training or torch._C._len_torch_dispatch_stack()
        if given is None or not self.fuses or tokens <= MAX_STEP or watched:
            return contextlib.nullcontext()
        # Kernels of modules before the first attention would be compiled one by one, while they are compared.
        cache.compile_for(model, given.shape[0])
        interceptor.fusion = interceptor.fusion or Fusion()
        return interceptor.fusion.applied(model, True, prompt=True)

    def _first(
        self, model: Any, interceptor: CallInterceptor, cache: Any, tensors: dict[str, Tensor], step: Step
    ) -> Any:
        """A step in Python, over the buffers: what graphs need is compiled and loaded by it."""
        numbers = NumbersOnDevice()

        def run() -> Any:
            with inside_call(), recording(), numbers, self._fused(model, interceptor, step, True):
                return model._call_impl(**tensors, **step.rest, **with_cache(model, cache))

        with self.states.undone_on_error():
            out = self._whole(cache, tensors, step, run)
        interceptor.makes_numbers |= numbers.made
        return out

    def _whole(self, cache: Any, tensors: dict[str, Tensor], step: Step, run: Callable[[], Any]) -> Any:
        """Runs a step and counts it; if it is interrupted, its tokens are in no layer."""
        sync = self.sync
        before = sync.seen
        cache.note_step(tensors.get("input_ids"))
        # The device alone knows, until all is done.
        sync.stale = True
        try:
            out = run()
            sync.ahead += step.tokens
            sync.peak, sync.stale = max(sync.peak, sync.ahead), False
        except BaseException:
            sync.stale = True
            cache.level_pages(before)
            raise
        return out

    def _capture(
        self, model: Any, interceptor: CallInterceptor, cache: Any, tensors: dict[str, Tensor], step: Step
    ) -> Recording | None:
        device = next(iter(tensors.values())).device
        with torch.inference_mode(False), torch.no_grad():
            inputs = {
                name: torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x) for name, x in tensors.items()
            }
        reference, rest = weakref.ref(model), step.rest

        # The mode takes some 2 us at every access to a tensor, of its shape for one.
        numbers = NumbersOnDevice() if interceptor.makes_numbers else contextlib.nullcontext()

        def run(cache: Any) -> Any:
            model = reference()
            with numbers:
                return model._call_impl(**inputs, **rest, **with_cache(model, cache))  # type: ignore[union-attr]

        # Casts of weights that autocast keeps would be gone with its context.
        cached = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            fused = self._fused(model, interceptor, step, False)
            # Python's knowledge of recurrent states stays: the step is not carried out yet.
            with inside_call(), recording(), fused, unchanged_on_error(self.states.layers, always=True):
                held = [buffer.layer.device for buffer in self.sync.members]
                # The device of the input comes first.
                devices = list(dict.fromkeys([device, *held, *(x.device for x in self.states.tensors())]))
                graph = RECORDERS[device.type](devices, run, cache)
        except Exception as error:
            # The replay was not carried out.
            self._why = f"its forward cannot be captured ({type(error).__name__}: {str(error).splitlines()[0]})"
            return None
        finally:
            torch.set_autocast_cache_enabled(cached)
            self.sync.stale = False
        return Recording(graph, inputs, reference, interceptor.fingerprint())

    def _replay(self, recorded: Recording, tensors: dict[str, Tensor], cache: Any, step: Step) -> Any:
        with self.states.invalidated_on_error():
            return self._whole(cache, tensors, step, lambda: recorded.replay(tensors, cache))

    # Tokens come and go.

    def before_prompt(self, keys: Tensor) -> None:
        """Lets an empty cache that is about to be filled take over the spare buffers; they are freed otherwise."""
        # The obstacle may be gone.
        self._failed.clear()
        found, self.spare.left = self.spare.left, None
        if found is not None and self.sync.buffers is None and found.suits(keys):
            for buffer, allocation in zip(self.sync.members, found.allocations, strict=True):
                buffer.take_over(allocation, found.room)
                buffer.forget()
            # The padding noted is that of the deleted cache.
            found._visible = None
            self.sync.buffers = found

    def rollback(self, tokens: int) -> bool:
        """Takes back the newest tokens of graph steps, if nothing of them is sealed; whether it has."""
        sync = self.sync
        buffers, held = sync.buffers, all(buffer.layer.record_past for buffer in sync.members)
        if sync.stale or not held or buffers is None or tokens > sync.ahead or self.states.layers:
            return False
        if not buffers.is_of(sync.members):
            return False
        if sync.peak - sync.ahead + tokens > ROLLBACK:
            return False
        if tokens:
            torch._foreach_sub_(buffers.lengths, tokens)  # pyright: ignore[reportPrivateImportUsage]
            sync.ahead -= tokens
        return True
