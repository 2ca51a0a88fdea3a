"""A model whose continuous batching keeps compressed pages: Transformers' own engine, with our blocks and attention."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, ContinuousBatchingConfig, PreTrainedConfig, PreTrainedModel

try:
    from transformers.generation.continuous_batching import cache as paged
    from transformers.generation.continuous_batching.cache_allocators import (
        FULL_ATTENTION,
        FullAttentionCacheAllocator,
    )
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import RequestState
except ImportError as error:
    raise ImportError(
        "hfkvq.serving needs the continuous batching of Transformers 5.19 or newer; upgrade transformers."
    ) from error

from hfkvq import kernels
from hfkvq.caches import Scheme, get_scheme
from hfkvq.caches.attention.interface import register
from hfkvq.caches.base.model_config import attention_shape, text_config
from hfkvq.caches.layer_state.smoothing import KeySmoothing, measure, warn_of_noise
from hfkvq.caches.layers.memory import format_bytes
from hfkvq.caches.store.row_lengths import WindowSizes
from hfkvq.sizes import parse_size

from .ladder import LadderPages, Shape, ladder
from .pages import CompressedPages, refusal
from .windows import MOST_SLOTS, USUAL_TOKENS, WindowedPages

ATTENTION = "hfkvq_flash"
"""The attention's name: with "flash" in it the engine makes no masks and reserves nothing for them."""

ENTRY = "init_continuous_batching"
"""The method of models that all ways to the engine begin with."""

KEPT = "_cached_continuous_batching_manager"
"""Attribute of models for the manager that is kept for the next call (``persistent_manager``)."""

MOST_BLOCKS = 128
"""Blocks of a request in batches of steps alone, where the user says nothing; longer requests take the slower way."""

logger = logging.getLogger("hfkvq")

_LOCK = threading.Lock()


def schemes_of(config: PreTrainedConfig, scheme: Scheme) -> tuple[Scheme, ...]:
    """Scheme of each layer of a model."""
    layers = text_config(config).num_hidden_layers
    return tuple(scheme.in_layer(layer, layers).shared for layer in range(layers))


def windowed(config: PreTrainedConfig, scheme: Scheme) -> bool:
    """True if requests of a model have windows beside their blocks, so that there are as many requests as windows."""
    shape = attention_shape(config)
    return shape is not None and any(own.layout(shape[2], shape[2]).windowed for own in schemes_of(config, scheme))


def check(config: PreTrainedConfig, scheme: Scheme) -> None:
    """Raises ValueError if the engine's blocks cannot hold pages of a scheme for a model, with the reason."""
    shape, kinds = attention_shape(config), set(paged.group_layers_by_attn_type(text_config(config)))
    if shape is None or kinds != {FULL_ATTENTION}:
        raise ValueError(
            f"model: got {config.model_type!r} with layers of {', '.join(sorted(kinds))}, allowed models whose layers "
            "all have full attention of one shape; use Transformers' own blocks."
        )
    schemes = schemes_of(config, scheme)
    reason = next((found for found in (refusal(own, shape[2]) for own in schemes) if found), None)
    layouts = [own.layout(shape[2], shape[2]) for own in schemes]
    if len({(WindowSizes.of(layout), layout.keys.formats[0].page_size) for layout in layouts}) > 1:
        reason = reason or "its layers have windows or pages of several sizes"
    if reason:
        raise ValueError(
            f"scheme: got {scheme.name!r}, allowed schemes of one width a side that keep all tokens (saw-int4, "
            f"kitty-pro, best-2.5, kivi-2, kvarn, mixkvq...): {reason}. MixedKVCache with generate takes every scheme."
        )


def usual_tokens(config: PreTrainedConfig, tokens: int | None) -> int:
    """Tokens of a usual request: those asked for, or `USUAL_TOKENS`, but no more than a model has positions."""
    return min(tokens or USUAL_TOKENS, getattr(text_config(config), "max_position_embeddings", None) or USUAL_TOKENS)


def checked(
    config: PreTrainedConfig,
    scheme: str | Scheme | None,
    memory: Any,
    dtype: torch.dtype,
    requests: int | None,
    tokens: int | None,
    ranks: int = 1,
    **knobs: Any,
) -> tuple[tuple[Scheme, ...], int | None]:
    """Schemes that requests of a model step down by, and bytes of the budget; one scheme and None without a budget.

    Raises:
        ValueError: an unknown scheme or knob, or one that does not suit the model; no size; a scheme or knobs beside a
            budget, or a budget without place for a usual request, which each of the ``ranks`` of a split model has.
    """
    if memory is None:
        own = get_scheme("best-4.3" if scheme is None else scheme, **knobs)
        check(config, own)
        return (own,), None
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise ValueError(f"memory: got {memory!r}, allowed bytes or a size like '6GiB'.")
    if scheme is not None or knobs:
        raise ValueError(
            f"memory: got {memory!r} together with {', '.join(knobs) if scheme is None else f'scheme {scheme!r}'}, "
            "allowed one of them, since the budget chooses the pages; leave one out."
        )
    rungs, size = ladder(), parse_size(memory, "memory")
    for each in rungs:
        check(config, each)
    shape = attention_shape(config)
    assert shape is not None, "see `check`"
    schemes = tuple(schemes_of(config, each) for each in rungs)
    heads, usual = max(1, shape[1] // ranks), usual_tokens(config, tokens)
    Shape(schemes, heads, shape[2], dtype, requests or MOST_SLOTS, usual).checked(size)
    return rungs, size


def spread_short_requests(scheduler: Any) -> None:
    """From now on, sequences of a request with one token to compute are requests of their own.

    The engine computes all of a prompt but its last token, copies the request, and gives each sequence that token. If
    there is no other one to compute, since the prompt has no more or shares what stands before, the batch is without a
    token; and one that is empty ends the engine, for everybody.
    """
    schedule = scheduler._schedule_request

    def schedule_or_spread(state: Any, tokens: list[int], *args: Any, **kwargs: Any) -> None:
        if len(tokens) == 1 and state.num_children:
            count, state.num_children = state.num_children, 0
            for i in range(count):
                child = state.create_equivalent_initial_request()
                child.request_id = f"{state.request_id}__child#{i}"
                scheduler.add_waiting_request(child)
        schedule(state, tokens, *args, **kwargs)

    scheduler._schedule_request = schedule_or_spread


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: see `CompressedPages.attend`."""
    pages = None if cache is None else cache.layer_to_allocator[module.layer_idx]
    if not isinstance(pages, CompressedPages):
        raise TypeError(
            f"{ATTENTION}: got {type(cache).__name__} for a cache, allowed that of a model with hfkvq.serving.enable; "
            "call generate_batch, or disable() first."
        )
    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    smoothing = pages.smoothing.get(module.layer_idx)
    if smoothing is not None:
        # Whatever comes next, prompts included, is smoothed.
        query, key = kernels.smooth(query, key, smoothing.vectors)
    return pages.attend(module, query, key, value, scaling, kwargs), None


AttentionInterface.register(ATTENTION, attend)


def _handed_on(
    cache: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """An engine's cache as attention's argument: models of Transformers 5.24 update it, and pass attention none."""
    kwargs["cache"] = cache
    return key_states, value_states


class CompressedManager(ContinuousBatchingManager):
    """Transformers' manager, whose cache has pages of a scheme, or with ``memory`` of the rungs of a ladder."""

    def __init__(
        self, rungs: tuple[Scheme, ...], requests: int | None, tokens: int | None, memory: int | None, **given: Any
    ) -> None:
        self.memory, self.wanted = memory, (rungs, requests, tokens, memory)
        self.name = rungs[0].name if memory is None else "memory"
        hints = given["workload_hints"]
        if tokens is None and hints is not None:
            # The most of any request: one that is long shall not cost many short ones their windows.
            tokens = min(hints.max_prompt_length + hints.max_generated_length, USUAL_TOKENS)
        self.usual = usual_tokens(given["model"].config, tokens)
        # Arguments of logits processors by request, for callers that cannot pass them to `add_request`.
        self.sampling: dict[str, dict[str, Any]] = {}
        # Graphs of equal batches are captured once for each value: logits processors may differ by step.
        self.graph_variant: Callable[[], Any] = lambda: None
        # Whether this thread adds several requests at once, who shall not fail together.
        self._several = threading.local()
        config = copy.deepcopy(given["continuous_batching_config"])
        if config.max_requests_per_batch is None:
            config.max_requests_per_batch = requests
        self.rungs = tuple(schemes_of(given["model"].config, scheme) for scheme in rungs)
        self.windowed = windowed(given["model"].config, rungs[0])
        self.asked = config.max_requests_per_batch
        page = rungs[0].layout(64, 64).store.runs[0][0].page_size
        if memory is not None:
            # The engine's own bytes are none of the pool's.
            config.num_blocks = 1
        elif config.num_blocks is not None:
            # Blocks in 16 bits as the user counts them: the same bytes.
            config.num_blocks = max(1, config.num_blocks * config.page_size // page)
        config.page_size = page
        blocks, graphs = config.max_blocks_per_request, config.use_cuda_graph
        # The engine has block tables and graphs for attention that it knows. Ours has both, for steps.
        config.max_blocks_per_request = 0
        super().__init__(**given | {"continuous_batching_config": config})
        own, length = self.continuous_batching_config, getattr(self.model.config, "max_position_embeddings", None)
        cuda = self.model.device.type == "cuda"
        if blocks is None:
            # Without kernels all of a table would be read, however little is in it.
            blocks = min(MOST_BLOCKS, -(-(length or MOST_BLOCKS * config.page_size) // config.page_size)) if cuda else 0
        # A request's slot of windows stands behind its blocks.
        own.max_blocks_per_request = blocks + 1 if blocks and self.windowed else blocks
        steps = graphs[1] if isinstance(graphs, tuple) else graphs
        own.use_cuda_graph = (False, steps is not False and cuda)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Sets our attention, and remembers what to set back."""
        del auto_switch_to_flash
        if model.config._attn_implementation != ATTENTION:
            self._original_attn_impl = model.config._attn_implementation
            for config in {id(c): c for c in (model.config, text_config(model.config))}.values():
                config._attn_implementation_internal = ATTENTION

    def start(self) -> None:
        """Starts the engine. Its blocks are made before, so that requests can be told what there is room for."""
        if self.batch_processor is None and not self.is_running():
            self.batch_processor = self._create_batch_processor()
        super().start()

    def stop(self, block: bool = True, timeout: float | None = None, *args: Any, **kwargs: Any) -> None:
        """Stops the engine, as the engine's does; of a model that has been disabled meanwhile it is not kept."""
        super().stop(block, timeout, *args, **kwargs)
        held = vars(self.model)
        if ENTRY not in held and held.get(KEPT) is self:
            del held[KEPT]

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Adds a request, as the engine's does; one that no pool could ever hold is refused, and the others go on.

        Raises:
            ValueError: prompt and answer are longer than all blocks, or the prompt is empty.
        """
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        # One of several ranks takes requests.
        if self.batch_processor is not None and getattr(self, "is_tp_driver", True):
            error, room = None, self.room()
            if not len(input_ids):
                # A batch without a token would end the engine for everybody.
                error = ValueError("request: got a prompt without tokens, allowed one token or more.")
            elif len(input_ids) + (new or 1) > room:
                error = ValueError(
                    f"request: got {len(input_ids)} tokens and {new} new ones, allowed {room} together, since all "
                    "blocks hold no more; shorten it, or give the engine more num_blocks, or memory."
                )
            if error is not None:
                if request_id is None or not getattr(self._several, "now", False):
                    raise error
                names = [f"{request_id}__child#{i}" for i in range(self.num_return_sequences - 1)]
                for name in (*names, request_id):
                    self.output_router.fail_and_deliver(RequestState(name, list(input_ids)), error)
                return request_id
        kwargs |= self.sampling.pop(request_id or "", {})
        return super().add_request(input_ids, request_id, max_new_tokens, *args, **kwargs)

    def room(self) -> int:
        """Tokens that all blocks hold, in the narrowest pages."""
        assert self.batch_processor is not None
        pages = self.batch_processor.cache.cache_allocators[FULL_ATTENTION]
        assert isinstance(pages, CompressedPages)
        return pages.most_tokens

    def add_requests(self, *args: Any, **kwargs: Any) -> list[str]:
        """Adds requests, as the engine's does; the result of one that no pool could ever hold is the reason."""
        self._several.now = True
        try:
            return super().add_requests(*args, **kwargs)
        finally:
            self._several.now = False

    def _create_batch_processor(self) -> Any:
        known = self.batch_processor is not None
        processor = super()._create_batch_processor() if known else self._make_batch_processor()
        if self.model.device.type == "cuda":
            # The engine clears its inputs on this stream, when they are made and when its thread begins, and copies
            # those of the first batch on another one, which does not wait: they might be cleared again.
            torch.cuda.current_stream(self.model.device).synchronize()
        return processor

    def _make_batch_processor(self) -> Any:
        config = self.continuous_batching_config
        kind = WindowedPages if self.windowed else CompressedPages
        own = {"schemes": self.rungs[0], "config": config}
        own |= {"asked": self.asked, "usual": self.usual} if self.windowed else {}
        if self.memory is not None:
            kind, own = LadderPages, own | {"rungs": self.rungs, "memory": self.memory}
        named: Any = type(kind.__name__, (kind,), own)
        with _allocator(named):
            processor = super()._create_batch_processor()
        spread_short_requests(processor.scheduler)
        processor.cache.update = partial(_handed_on, processor.cache)  # type: ignore[method-assign]
        io: Any = processor.inputs_and_outputs
        for each in [pair.device_io for pair in io.io_pairs] if hasattr(io, "io_pairs") else [io]:
            each._get_graph_key = lambda key=each._get_graph_key: (*key(), self.graph_variant())
        for pages in processor.cache.cache_allocators.values():
            assert isinstance(pages, CompressedPages)
            pages.settle(processor)
            smoothings = [self._smoothing(schemes) for schemes in self.rungs]
            pages.smoothing = smoothings[0]
            if isinstance(pages, LadderPages):
                pages.smoothings = smoothings
                pages.compile_ladder(self.model.config)
            size = pages.num_blocks * pages.bytes_per_block / 2**20
            logger.info(
                "%s: blocks for %d tokens in %.1f MiB, %.2f bits per element with every byte counted.",
                self.name, pages.num_blocks * pages.tokens_per_page, size, pages.bits,
            )  # fmt: skip
            if pages.window_room:
                logger.info(
                    "%s: windows of %d requests in %.1f MiB; prefixes are not shared, since what waits in 16 bits is a "
                    "request's own.", self.name, config.max_requests_per_batch, pages.window_room / 2**20,
                )  # fmt: skip
        return processor

    def _smoothing(self, schemes: tuple[Scheme, ...]) -> dict[int, KeySmoothing]:
        """The vectors of the layers whose keys are smoothed."""
        wanted = [layer for layer, scheme in enumerate(schemes) if scheme.smooths_keys]
        found = measure(self.model, text_config(self.model.config)) if wanted else {}
        if wanted and not found:
            logger.warning(
                "%s: the key channels of this model could not be measured, so they are not smoothed, and answers may "
                "be wrong (see `hfkvq doctor`); the scheme 'best-4.3' does without.", self.name,
            )  # fmt: skip
        warn_of_noise(self.name, dict(enumerate(schemes)), self.model, text_config(self.model.config))
        return {
            layer: found[layer].smoothing(schemes[layer]).to(self.model.device) for layer in wanted if layer in found
        }


class _Chosen(FullAttentionCacheAllocator):
    """Makes blocks of the class that this thread has chosen, the engine's own in every other thread."""

    own = threading.local()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return getattr(cls.own, "kind", FullAttentionCacheAllocator)(*args, **kwargs)


@contextmanager
def _allocator(kind: type[CompressedPages]) -> Iterator[None]:
    """Within it, full attention's blocks are of this kind: the engine looks them up by the layer's type."""
    with _LOCK:
        known = paged.ATTN_TYPE_TO_ALLOCATOR
        stock = known[FULL_ATTENTION]
        known[FULL_ATTENTION], _Chosen.own.kind = _Chosen, kind
        try:
            yield
        finally:
            known[FULL_ATTENTION] = stock
            del _Chosen.own.kind


class Usage(NamedTuple):
    """Memory of an engine at a moment.

    Attributes:
        requests: that it works on.
        tokens: of these, prompts and answers.
        bytes: of the blocks that they have, each counted once, and of those kept for prompts that come again; and of
            their windows.
        room: bytes of all blocks and windows.
        bits: an element of keys and values, every byte of a page counted; with windows every byte of what is held.
    """

    requests: int
    tokens: int
    bytes: int
    room: int
    bits: float


class Serving(AbstractContextManager["Serving"]):
    """A model whose `generate_batch` and `init_continuous_batching` hold compressed pages, until `disable`.

    Another one of the same model takes its place, for good.

    Attributes:
        rungs: the scheme; with ``memory`` all that requests step down by, the widest first.
        requests: at a time, where the engine's config says nothing.
        memory: most bytes that the blocks take; None where the engine's config counts them.
        manager: the last that was made, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rungs: tuple[Scheme, ...],
        requests: int | None = None,
        request_tokens: int | None = None,
        memory: int | None = None,
    ) -> None:
        self.model, self.rungs, self.memory = model, rungs, memory
        self.requests, self.request_tokens = requests, request_tokens
        self.manager: CompressedManager | None = None
        # Found before the class's: the engine's entry points are methods of the model.
        vars(model)[ENTRY] = self._init

    def disable(self) -> None:
        """Makes the model as it was. A manager that runs goes on until it is stopped; one that was kept is dropped."""
        held = vars(self.model)
        if getattr(held.get(ENTRY), "__self__", None) is self:
            del held[ENTRY]
        manager, kept = self.manager, held.get(KEPT)
        # The engine would go on with it, whatever is asked.
        if isinstance(kept, CompressedManager) and not kept.is_running():
            del held[KEPT]
            kept.destroy()
        # One that could not start was never stopped, which is when managers give attention back.
        if manager is not None and not manager.is_running() and manager._original_attn_impl is not None:
            self.model.set_attn_implementation(manager._original_attn_impl)
            manager._original_attn_impl = None

    def __exit__(self, *error: object) -> None:
        self.disable()

    def usage(self) -> Usage:
        """Memory of the engine now; 0 of everything before it runs."""
        processor = None if self.manager is None else self.manager.batch_processor
        if processor is None:
            return Usage(0, 0, 0, 0, 0.0)
        pages = processor.cache.cache_allocators[FULL_ATTENTION]
        assert isinstance(pages, CompressedPages)
        # The engine's thread goes on meanwhile.
        active = list(processor.scheduler.active_requests.values())
        blocks = {block for table in list(pages.block_table.values()) for block in list(table)}
        held = len(blocks | set(pages.ledger.cached_blocks)) * pages.bytes_per_block + pages.window_bytes
        tokens = sum(state.current_len() for state in active)
        room = pages.num_blocks * pages.bytes_per_block + pages.window_room
        elements = 2 * tokens * pages.num_key_value_heads * pages.head_dim * pages.pages_per_block
        bits = 8 * held / elements if pages.window_room and tokens else pages.bits
        return Usage(len(active), tokens, held, room, bits)

    @torch.no_grad()
    def _init(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> ContinuousBatchingManager:
        """`model.init_continuous_batching`, whose manager is ours."""
        model = self.model
        given: Any = continuous_batching_config or ContinuousBatchingConfig()
        for name in ("num_blocks", "max_memory_percent") if self.memory is not None else ():
            if getattr(given, name) is not None:
                raise ValueError(
                    f"{name}: got {getattr(given, name)} together with memory={format_bytes(self.memory or 0)}, "
                    "allowed one of them, since both say how much the blocks take; leave one out."
                )
        own = (self.rungs, self.requests, self.request_tokens, self.memory)
        cached = getattr(model, KEPT, None)
        if isinstance(cached, CompressedManager) and cached.wanted == own:
            cached.switch_to_cb_friendly_attn(model)
            self.manager = cached
            return cached
        generation: Any = model.generation_config if generation_config is None else generation_config
        if generation.eos_token_id is None:
            generation.eos_token_id = -1
        if given.cpu_offload_space:
            raise ValueError(
                f"cpu_offload_space: got {given.cpu_offload_space}, allowed 0: compressed blocks lie in several "
                "places. Give more num_blocks instead; they are small."
            )
        self.manager = CompressedManager(
            *own,
            model=model,
            generation_config=generation,
            continuous_batching_config=given,
            workload_hints=workload_hints,
        )
        return self.manager


def enable(
    model: PreTrainedModel,
    scheme: str | Scheme | None = None,
    *,
    requests: int | None = None,
    request_tokens: int | None = None,
    memory: int | str | None = None,
    **knobs: Any,
) -> Serving:
    """Continuous batching over compressed pages: `model.generate_batch` and all that rests on it.

        with hfkvq.serving.enable(model, "best-4.3"):
            model.generate_batch(inputs, generation_config=...)

    Args:
        model: a causal language model; all layers have full attention.
        scheme: a preset that keeps all tokens in one width a side: ``saw-int4``, ``kitty-pro``, ``best-2.5``,
            ``kivi-2``, ``kvarn``, ``mixkvq``... Requests share prefixes with ``saw-int4`` and ``int4``, which keep no
            tokens in 16 bits here. None: ``best-4.3``.
        requests: most requests at a time, where ``max_requests_per_batch`` of the engine's config is None. Each has
            room for the tokens that its scheme keeps in 16 bits, if it keeps any. None: as many as there is memory
            for with ``request_tokens`` each.
        request_tokens: that a usual request holds, prompt and answer. None: 4,096, or fewer where ``generate_batch``
            is given nothing longer.
        memory: most bytes that blocks and windows take, in place of a scheme: a number, or a size like ``"6GiB"``. All
            requests begin in 16 bits. Where one would have to wait, they step down together, to 4 bits (``best-4.3``)
            and to 2 (``best-2.5``), within these bytes (`hfkvq.serving.ladder`); then requests wait as ever. When none
            is left, the next ones begin in 16 bits again. Prefixes are not shared.

    Returns:
        What disables it again: a context manager, or call ``disable()``.

    Raises:
        ValueError: a scheme whose pages cannot be the engine's, or a model with other layers, with the reason; a
            ``memory`` in which no request of ``request_tokens`` fits, more than the GPU has free, or with a scheme.
    """
    for name, value in (("requests", requests), ("request_tokens", request_tokens)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}: got {value!r}, allowed 1 or more, or None.")
    ranks = getattr(getattr(model, "_device_mesh", None), "size", lambda: 1)()
    rungs, size = checked(model.config, scheme, memory, model.dtype, requests, request_tokens, ranks, **knobs)
    if size is not None and model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        if size > free:
            raise ValueError(
                f"memory: got {format_bytes(size)}, allowed {format_bytes(free)}, which {model.device} has free beside "
                "the weights, and what attention computes needs some of it; give less."
            )
    # Models are measured by our attention, which no cache may have registered yet.
    register()
    return Serving(model, rungs, requests, request_tokens, size)
