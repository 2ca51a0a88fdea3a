"""`MixedKVCache`: the cache a user passes to ``generate``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from hfkvq.bounded import DAMAGE
from hfkvq.version import __version__

from .attention.interface import register
from .attention.mla import patch_expand_kv
from .base import outside_inference_mode, warn_once
from .base.capture import RECORDERS
from .base.config_switch import NAME, add_cache, restore, switch
from .base.model_calls import CallInterceptor, intercept, is_inside_call
from .base.model_config import attention_shape, head_dim_of, hinders_eviction, stock_layers, text_config
from .base.recorded import DeviceSync, is_captured, is_recorded, uneven
from .budget import Budget, parse_memory
from .cache_file import below, packed_layer, read_file, unpack_layer, write_file
from .compile import compile_kernels
from .layer_state.query_statistics import QueryStatistics
from .layer_state.smoothing import layers_that_mix, measure, warn_of_noise
from .layer_state.update import as_stored
from .layers import transactions
from .layers.build import build_layers, is_attachable, seen_by
from .layers.handle import dense_of
from .layers.layer import KVLayer
from .layers.memory import MemoryReport, format_bytes, memory_of
from .layers.recurrent import RecurrentLayer, StatePlaces
from .schemes.base import Scheme
from .schemes.eviction import EvictionScheme, warn_of_loss
from .schemes.preset import Preset, checked_knobs, get_preset
from .step_graphs import StepGraphs, graphs_enabled
from .store.packing import Packed
from .tags.bit_table import config_fields, config_hash, differing

if TYPE_CHECKING:
    from typing_extensions import Self


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def allocate(layers: Iterable[KVLayer], keys: Tensor, values: Tensor) -> None:
    """Allocates every layer of fixed capacity before a graph is recorded."""
    for layer in layers:
        if layer.buffer is not None and layer.buffer.tensor is None:
            if layer.store is None:
                layer.lazy_initialization(keys, values)
            layer.buffer.bind()


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def update_outside(cache: Any, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """An update of a cache that grows, by a compiled model: plain tensors, since its compiler follows no handles."""
    warn_once(
        "A compiled model dequantizes a growing cache in each step, which is correct but slow; make the cache with "
        "max_cache_len, or do not compile the model."
    )
    keys, values = cache.update(keys, values, layer_idx)
    return dense_of(keys), dense_of(values)


DEFAULT_SCHEME = "best-3.4"


class MixedKVCache(Cache):
    """A KV cache that stays compressed; attention is computed on the compressed pages.

    Use it as ``model.generate(**inputs, past_key_values=MixedKVCache(model, "kitty-pro"))``. From Transformers 5.24 on
    that argument is called ``cache``; models take the old name, too, up to 5.39, and ``generate`` up to 6.0.

    The scheme decides
    how attention layers are stored in pages, also in layers that combine attention with Mamba. Layers with a sliding
    window use a ring of pages, in 16 bits where the window is short (see
    `hfkvq.caches.layers.build.scheme_for_window`). Recurrent states are not compressed.

    By default the constructor sets the config's attention implementation to "hfkvq", which attends to the pages. Other
    caches are not affected: on plain tensors it is stock sdpa (or the model's eager where sdpa lacks a feature).
    `detach` undoes it. With ``attach=False``, and for models that look no implementation up (Falcon, GPT-J, Bloom),
    nothing is switched: stock sdpa is intercepted and attends to the pages. Other attention gets dequantized tensors,
    which is correct but slower, and stores left padding, as it shows no mask.

    With ``debug=True``, keys and values that are not finite are refused, and so are those beyond 65504, the range of
    float16, where pages have scales. Otherwise they are left out of every scale and stored as the nearest end of their
    group, so they never change other tokens' pages.

    Args:
        model_or_config: the model, or its config. A cache made from a config does the same, but until `attach` shows it
            the model, steps are not captured, latents are dequantized in each step, and keys are smoothed by the first
            prompt.
        scheme: preset name (see ``list_schemes``) or ``.json`` file of a tuned preset, both also with options
            (``"kitty:boost_ratio=0.2"``), a `Scheme`, or a `Preset`. None: ``"best-3.4"``.
        memory: most bytes that the cache holds, in place of a scheme: a number, a size like ``"6GiB"``, or ``"auto"``,
            nine tenths of what the GPU has free. The cache begins in 16 bits; where the next tokens would pass the
            limit, the keys or values of a layer go down to 4 bits, then to 2, those first whose loss is least
            (`hfkvq.caches.budget`). Everything counts that `memory` counts, and the copies that a step down makes.
            With ``max_cache_len`` the widths are chosen at once, for the whole capacity.
        order: with ``memory``, the order in which layers go down: (layer, "keys" or "values") pairs, or a file that
            `evals/budget.py` wrote. None goes by depth.
        evict: with ``memory``, ``"snapkv"`` lets the cache forget tokens where all layers have gone down and the next
            ones do not fit: in each KV head whole pages, those that the newest 64 queries attend to least, or of a
            first prompt such tokens; never the sink, or the newest 64 tokens. A warning says so when the first token
            goes. None raises an error then.
        layers: schemes of single layers, ``{"0-1": "full", "-1": {"boost_ratio": 0.5}}``: a name, a `Scheme`, or
            options of the main scheme, by layers of the decoder (ranges include both ends). Layers that are not
            compressed anyway stay as they are.
        max_cache_len: capacity in tokens per row, padding included; more tokens raise. Where steps can be recorded,
            everything is allocated at the first update, at fixed addresses. A scheme that evicts only from prompts
            allocates what its first prompt leaves and the rest of the capacity. None: the cache grows as needed.
        graphs: whether decode steps are captured as CUDA graphs on a GPU. The first step after a prompt runs in Python,
            the second is captured (0.1 s), later ones replay it; a growing cache captures again when it outgrows its
            buffers. Steps that cannot be captured run without graphs, and a warning says why, once. None takes the
            environment variable HFKVQ_GRAPHS (1 or 0), or True. Without graphs, steps at a fixed capacity are compiled,
            as with ``StaticCache``. Compiled steps ignore masks: only the prompt's padding stays hidden.
        headroom: share by which buffers of captured steps exceed what a growing cache holds: at least 128 and at most
            4,096 tokens. With 0, and where steps are not captured, buffers are a page ahead.
        offloading: whether pages are kept in the host's memory, where the GPU reads them over the bus; sinks, newest
            tokens and tables stay on the GPU. True: all layers that hold all tokens; a number: that many last ones.
        attach: whether to switch the attention implementation.
        debug: refuse keys and values that are not finite or that pages cannot hold, and check the cache's consistency
            before each forward. Steps are not captured then.
        **knobs: options of the scheme: ``MixedKVCache(model, "kitty", boost_ratio=0.2)``.

    Attributes:
        config: of the model's decoder.
        preset: schemes of all layers; with ``memory``, of what they are now.
        budget: of a cache that was made with ``memory``; None without.
        graphs: of captured steps; None where none are.
        saved_ids: i64 (B, n), token ids that a loaded cache was saved with; None without.

    Raises:
        ValueError: unknown scheme, knob or layer, a head dim that the scheme cannot hold, a model without attention
            layers, offloading with a scheme that evicts, or ``memory`` for a model with sliding windows or latents.
    """

    saved_ids: Tensor | None = None
    _compiled: Any = None
    """Device for which the layers' kernels have been compiled, and whether for steps of several tokens."""

    def __init__(
        self,
        model_or_config: Any,
        scheme: Preset | Scheme | str | Path | None = None,
        *,
        memory: int | str | None = None,
        order: Iterable[tuple[int, str]] | str | Path | None = None,
        evict: str | None = None,
        layers: Mapping[str | int, Any] | None = None,
        max_cache_len: int | None = None,
        graphs: bool | None = None,
        headroom: float = 0.25,
        offloading: bool | int = False,
        attach: bool = True,
        debug: bool = False,
        **knobs: Any,
    ) -> None:
        register()
        config = getattr(model_or_config, "config", model_or_config)
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(
                f"model_or_config: got {type(model_or_config).__name__}, allowed a Transformers model or its config."
            )
        # type(), because True is an int.
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise ValueError(f"max_cache_len: got {max_cache_len!r}, allowed a positive number of tokens or None.")
        if isinstance(headroom, bool) or not isinstance(headroom, (int, float)) or not 0 <= headroom <= 4:
            raise ValueError(f"headroom: got {headroom!r}, allowed a number from 0 to 4, e.g. 0.25.")
        text = text_config(config)
        self.budget = _budget_of(memory, order, evict, max_cache_len, text, device_of(model_or_config))
        if self.budget is not None:
            _take_no_scheme(scheme, layers, knobs, self.budget, attach and not debug, offloading)
            self.preset = self.budget.preset()
        else:
            scheme = DEFAULT_SCHEME if scheme is None else scheme
            self.preset = get_preset(scheme, layers, **checked_knobs(scheme, knobs))
        # Configs of encoder-decoders are copies (`get_text_config`), at which no module looks.
        self._crosses = config.is_encoder_decoder or text.is_encoder_decoder
        self._attachable = not self._crosses and is_attachable(text)
        attach, own = attach and self._attachable, attach and not self._attachable
        captures, name = graphs_enabled(graphs), type(config).__name__
        made = build_layers(text, self.preset, max_cache_len, captures, attach, debug, name, offloading, own)
        super().__init__(layers=made.layers)
        self._compressed, self._recordable, self._flex = made.compressed, made.sync is not None, False
        self.config, self._capacity, self._debug = text, max_cache_len, debug
        if self.budget is not None:
            self._check_for_budget(None if made.sync is not None else "its steps cannot be recorded", name)
        # Cross-attention is given an image's tokens.
        others = set(getattr(text, "cross_attention_layers", None) or ())
        known = [i for i, layer in enumerate(self.layers) if seen_by(layer) is not None and i not in others]
        self._counting, self._first = tuple(known), known[0] if known else -1
        self._why_not_captured = made.why_not_captured
        held = {i: made.layers[i] for i in made.compressed}
        mixing = layers_that_mix({i: x.scheme for i, x in held.items() if not x.holds_latents}, head_dim_of(text))
        self._rounding = tuple(i for i, x in held.items() if x.smooths or i in mixing)
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        self._updated = -1
        if made.sync is not None:
            made.sync.headroom = headroom
        self.graphs = StepGraphs(self) if made.captured else None
        if attach and made.compressed:  # Masks of other models stay as they are, too: Moshi's do not slide.
            switch(text, self)
        if isinstance(model_or_config, torch.nn.Module):
            self._meet(model_or_config)

    @classmethod
    def of_preset(cls, model_or_config: Any, preset: Preset, **options: Any) -> Self:
        """An empty cache of a preset; classes of one scheme take its knobs."""
        made = cls(model_or_config, preset, **options)  # type: ignore[call-arg]
        if made.preset != preset:
            raise ValueError(f"options: got {', '.join(options)}, allowed no knobs: the scheme is {preset.scheme}")
        return made

    def _check_for_budget(self, why: str | None, name: str) -> None:
        """Raises ValueError where bytes cannot be known beforehand; layers count the queries of prompts otherwise."""
        layers = self.compressed_layers
        if why is None and len(layers) < len(self.layers):
            why = "some layers are not held in pages"
        if why is None and any(layer.window or layer.holds_latents or layer.own_attention for layer in layers):
            why = "layers have sliding windows or latents"
        if why is not None or not layers:
            raise ValueError(f"memory: not for {name}, since {why}; choose a scheme, e.g. 'best-3.4'.")
        for layer in layers:
            assert layer.buffer is not None, "steps may be recorded"
            # Keys are weighed by queries as they go down; until then, those of prompts are counted.
            kept = 0 if self.budget is None or self.budget.evict is None else self.budget.evict.window
            layer.queries = layer.buffer.queries = QueryStatistics("query" not in layer.scheme.needs, kept)

    # The model, and the layers.

    def attach(self, model: torch.nn.Module | None = None) -> None:
        """Shows the cache its model, and switches attention to "hfkvq", as the constructor does with a model.

        A cache made from a config needs it. Attention is not switched for models that look no
        implementation up (Falcon, for example). None stands for the model that the cache knows.

        Raises:
            ValueError: a model of another config than the cache was made for.
        """
        if model is not None:
            text = text_config(model.config)  # type: ignore[arg-type]
            if config_hash(text) != self.architecture()["config"]:
                known = differing(config_fields(self.config), config_fields(text))
                raise ValueError(
                    f"model: got a {type(model).__name__} of another config than the cache was made for"
                    f"{known and f', which differs in {known}'}; make a cache for this model."
                )
            self.config = text
        if self._attachable and self._compressed:
            switch(self.config, self)
        model = self._model() if model is None else model
        if model is not None:
            self._meet(model)

    def _meet(self, model: torch.nn.Module) -> None:
        """Takes note of the model that is called with this cache."""
        if getattr(getattr(model, "active_peft_config", None), "peft_type", None) == "PREFIX_TUNING":
            warn_once(
                "PEFT's prefix tuning puts a DynamicCache of its own in this cache's place, so nothing will be "
                "compressed. Adapters of other kinds (LoRA) and prompt tuning use this cache."
            )
        self._model = weakref.ref(model)
        if self.graphs is not None:
            intercept(model)
        if self.attached and any(layer.latents for layer in self.compressed_layers):
            patch_expand_kv(model, self.config)

    def detach(self) -> None:
        """Restores the config's own attention implementation; the cache goes on working, intercepted."""
        restore(self.config)

    @property
    def max_cache_len(self) -> int:
        """Capacity in tokens, or -1, as `get_max_length` says; PEFT asks under this name."""
        return self.get_max_length()

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Dequantized keys and values (B, H, T, D) of each layer, and its window, as DynamicCache gives them."""
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)  # type: ignore[union-attr]

    @property
    def attached(self) -> bool:
        """True if attention is "hfkvq"."""
        return self.config._attn_implementation_internal == NAME

    @property
    def scheme(self) -> Scheme:
        """The scheme of every layer that has none of its own."""
        return self.preset.scheme

    @property
    def compressed_layers(self) -> list[KVLayer]:
        """The layers that are held in pages."""
        return [self.layers[i] for i in self._compressed]  # type: ignore[misc]

    @property
    def _parts(self) -> list[Any]:
        """The layers, and the recurrent states of those with attention beside."""
        return [part for layer in self.layers for part in getattr(layer, "parts", (layer,))]

    @property
    def states(self) -> StatePlaces:
        """Recurrent states of all layers."""
        return StatePlaces([part for part in self._parts if isinstance(part, RecurrentLayer)])

    def memory(self) -> MemoryReport:
        """Exact memory: every tensor that the cache holds is counted (asks the device for the rows' lengths)."""
        self._catch_up()
        return memory_of(self._parts, int(self.get_seq_length()))

    def __repr__(self) -> str:
        used = [layer for layer in self.compressed_layers if layer.store is not None]
        others = "".join(f", {which}: {scheme!r}" for which, scheme in self.preset.layers)
        head = f"{type(self).__name__}({self.scheme!r}{others}, layers={len(self.compressed_layers)}/{len(self.layers)}"
        if not used:
            return f"{head}, empty)"
        memory = self.memory()
        return (
            f"{head}, batch={used[0].batch_size}, seen={self.get_seq_length()}, "
            f"{memory.ratio:.2f}x smaller than bf16, {memory.total_bits:.2f} total bits)"
        )

    # Tokens come.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stages new tokens of a layer; see `KVLayer.update`.

        Only with ``debug=True`` can a layer refuse (`ValueError`) what an earlier one has taken: `level` takes the
        tokens out of the earlier ones again, or call `reset`; until then a forward raises RuntimeError.
        """
        layer = self._paged(layer_idx)
        if layer is not None:
            key_states, value_states = as_stored(layer, key_states, value_states)
        if is_recorded():
            if self._capacity is None and layer is not None and not is_captured():
                return update_outside(self, key_states, value_states, layer_idx)  # pyright: ignore[reportCallIssue]
            if self._recordable and layer is not None and layer.buffer is not None and layer.buffer.tensor is None:
                allocate(self.compressed_layers, key_states, value_states)  # pyright: ignore[reportCallIssue]
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._why_not_captured is not None and key_states.is_cuda and key_states.shape[2] == 1:
            why, self._why_not_captured = self._why_not_captured, None
            warn_once(f"{self.preset.scheme.name}: steps are not captured, since {why}; they run without graphs.")
        if self._crosses and layer_idx == self._updated and len(self.layers) > 1:
            self._updated = -1
            self.level_pages()
            name = type(self).__name__
            raise ValueError(
                f"past_key_values: got a bare {name}, but cross-attention needs a cache of its own; pass "
                f"EncoderDecoderCache({name}(model, ...), DynamicCache()), both of them from transformers."
            )
        if layer_idx == self._first:
            self._check_even()
            if _functorch.peek_interpreter_stack() is not None:
                raise ValueError(
                    "past_key_values: got a forward within torch.func (vmap, grad, jvp, ...), allowed a plain one: "
                    "a compressed cache writes into its own pages. Pass a batch in place of vmap, or use DynamicCache."
                )
        if layer_idx == max(self._first, 0):
            self._before_first_layer(key_states)
        try:
            if layer_idx >= len(self.layers):
                self.level_pages(int(self.get_seq_length()) - key_states.shape[2])
                self.states.invalidate()
                raise ValueError(
                    f"model_or_config: this cache was made for {len(self.layers)} layers, but got keys of layer "
                    f"{layer_idx}; make it from the config of the model that it is used with."
                )
            if self.budget is not None and layer_idx and self.layers[layer_idx - 1].cuts is not None:  # type: ignore[union-attr]
                raise ValueError(
                    "evict: the cache was detached within a first prompt of which some tokens have to go, so attention "
                    "did not show which; nothing was cached. Call cache.attach(model)."
                )
            self._updated = layer_idx
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            # A compiler makes its kernels, and cannot follow handles.
            return tuple(map(dense_of, found)) if self._flex else found
        except ValueError:
            self._updated = -1
            if self._is_cutting:
                self.reset()
            raise

    def _find_smoothing(self) -> None:
        """Gives empty layers the vectors of their model, if it is known; else they take those of their first prompt."""
        layers: dict[int, Any] = {i: self.layers[i] for i in self._rounding}
        model = self._model()
        if self.budget is not None and not self.compressed_layers[0].seen and model is not None:
            # Layers are smoothed once they go down; the model must not be called between its layers.
            measure(model, self.config)
        if not any(not layer.seen and layer.smoothing is None for layer in layers.values()):
            return
        found = {} if model is None else measure(model, self.config)
        for i, layer in layers.items():
            if layer.smooths and not layer.seen and layer.smoothing is None:
                layer.smoothing = found[i].smoothing(layer.scheme) if i in found else None
                layer.smooths_by_prompt = layer.smoothing is None
        if found:
            schemes = {i: layer.scheme for i, layer in layers.items()}
            warn_of_noise(self.preset.scheme.name, schemes, model, self.config)

    def _warn_of_unknown_model(self, device: torch.device) -> None:
        """Says once what is lost where the model that calls is not the one that the cache knows."""
        model = self._model()
        # The user has compiled a model that has another replacement of its call.
        bypassed = model is None or (isinstance(model._compiled_call_impl, CallInterceptor) and not is_inside_call())
        lost = []
        if self.graphs is not None and device.type in RECORDERS and bypassed:
            lost.append("steps are not captured")
        if model is None and self.attached and any(layer.latents for layer in self.compressed_layers):
            lost.append("latents are dequantized in each step")
        if model is None and any(layer.smooths_by_prompt for layer in self.compressed_layers):
            lost.append("keys are smoothed by the first prompt's")
        if lost:
            name = type(self).__name__
            warn_once(
                f"{name}: the cache does not know the model that calls it, so {' and '.join(lost)}; make it with "
                f"{name}(model, ...), or call cache.attach(model)."
            )

    def _before_first_layer(self, key_states: torch.Tensor) -> None:
        self._find_smoothing()
        if self.budget is not None:
            self.budget.reserve(self, key_states.shape[2], key_states)
        self._warn_of_unknown_model(key_states.device)
        if isinstance(self.scheme, EvictionScheme) and not seen_by(self.layers[max(self._first, 0)]):
            warn_of_loss(self.scheme, key_states.shape[2], len(self.layers))
        self._flex = self.config._attn_implementation_internal == "flex_attention"
        if self.graphs is not None and self.compressed_layers[0].store is None:
            self.graphs.before_prompt(key_states)
        self._compile(key_states)
        # A model that never asked for mask sizes has updated the recurrent layers before this one already.
        with self.states.invalidated_on_error():
            self._check_capacity(key_states.shape[2])
        if self._debug:
            self.integrity_check()

    def compile_for(self, model: torch.nn.Module, rows: int) -> None:
        """Compiles on a GPU what the model's layers will launch, as far as the model tells before they do."""
        # Where processes share a model, each has fewer heads; and a budget first looks at the prompt's keys.
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if shared or self.budget is not None or not isinstance(model, PreTrainedModel):
            return
        found = attention_shape(model.config)
        # Under autocast keys have another dtype.
        if found is not None and not torch.is_autocast_enabled(model.device.type):
            self._compile(torch.empty(rows, found[1], 0, found[2], dtype=model.dtype, device=model.device))

    def _compile(self, keys: torch.Tensor) -> None:
        """Compiles on a GPU what layers with keys (B, H, t, D) launch, if that is not done."""
        if not keys.is_cuda or not self._compressed:
            return
        kernels = keys.device, keys.dtype, keys.shape[1], self.compressed_layers[0].record_past
        if self._compiled != kernels:
            self._compiled = kernels
            fused = self.graphs is not None and self.graphs.fuses
            kinds = ((layer.scheme, layer.window) for layer in self.compressed_layers)
            compile_kernels(self.config, kinds, keys, kernels[-1], fused)
            if self.budget is not None and self.graphs is not None:
                self.budget.compile_ladder(self, keys)

    def _check_even(self) -> None:
        """Raises RuntimeError if a forward has not reached the last layer: tokens come layer by layer."""
        self.states.check()
        layers = self.layers
        first, last = seen_by(layers[self._first]), seen_by(layers[self._counting[-1]])
        if first != last:
            raise uneven(first, last)

    def _check_capacity(self, tokens: int) -> None:
        if self._capacity is not None and self._compressed:
            # Stock layers have no capacity, and may come first.
            first = self.compressed_layers[0]
            if first.buffer is not None:
                first.buffer.sync.catch_up()
            first.check_capacity(tokens)

    # Transformers asks.

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset for the mask of the coming forward.

        This is the one thing that Transformers asks the cache outside the graph before a compiled step, so the capacity
        is checked here, and here ARKV's trims run. Whoever calls a compiled ``model.forward`` without `generate` calls
        `between_steps` for it.
        """
        if not is_recorded():
            self._updated = -1
            self._find_smoothing()
            self.between_steps(query_length)
            layer = self._paged(layer_idx) if self._recordable and not self.attached else None
            if layer is not None and layer.buffer is not None:
                layer.buffer.sync.catch_up()
                return layer.sizes(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Column of the coming forward's first query; on the device for layers of fixed capacity."""
        layer = self._paged(layer_idx) if self._recordable and (is_recorded() or self.attached) else None
        if layer is not None:
            return layer.get_query_offset()
        return super().get_query_offset(layer_idx)

    def _paged(self, layer_idx: int) -> KVLayer | None:
        """The layer of pages at an index, or None: by the list, at which compilers make an index a number."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer if isinstance(layer, KVLayer) else None

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """True if `generate` may compile steps: at a fixed capacity, unless ``graphs`` has them captured."""
        if self.graphs is not None and not torch.compiler.is_compiling():
            return False
        # The compiler of PyTorch 2.11 follows neither `super()` to a property nor `bool`.
        return len(self.layers) > 0 and all(layer.is_compileable for layer in self.layers) and self.attached

    def activate_past_recording(self) -> None:
        """Lets the newest tokens be taken back, as assisted decoding does; steps are not compiled from now on.

        Raises:
            ValueError: layers of fixed capacity that Transformers makes hold tokens already; they take none back.
        """
        stock = [i for i, layer in enumerate(self.layers) if hasattr(layer, "max_cache_len")]
        if any(getattr(self.layers[i], "is_initialized", False) for i in stock):
            raise ValueError(
                "max_cache_len: layers of fixed capacity that Transformers makes (chunked attention, shared windows) "
                "cannot take tokens back, as assisted decoding must; make the cache without max_cache_len, or begin "
                "with an empty one."
            )
        if stock:
            fresh = stock_layers(self.config)
            for i in stock:
                self.layers[i] = fresh[i]
        super().activate_past_recording()

    # A budget in bytes.

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the cache was given with ``memory=``; None without. A smaller number takes it down at once.

        Raises:
            ValueError: set to what the cache cannot go down to, or of a cache without a budget. Nothing is changed.
        """
        return None if self.budget is None else self.budget.limit

    @memory_limit.setter
    def memory_limit(self, memory: int | str) -> None:
        if self.budget is None:
            raise ValueError("memory_limit: this cache was made without memory=, so its scheme stays; make another.")
        self.budget.set_limit(self, parse_memory(memory, device_of(self._model())))

    @property
    def evicted(self) -> int:
        """Most tokens of a row that a cache with ``evict=`` has forgotten; 0 of any other cache.

        ``memory().tokens`` has the shares of tokens that are forgotten of any cache.
        """
        return max((layer.gone for layer in self.compressed_layers), default=0)

    @property
    def _is_cutting(self) -> bool:
        """True within a first prompt that a budget has cut, or has to cut, until its last layer is done."""
        return any(layer.cuts is not None for layer in self.compressed_layers)

    # Steps.

    def between_steps(self, tokens: int = 1) -> None:
        """Does what compiled steps leave to the host, before ``tokens`` more come; asks the device only when it must.

        Raises:
            ValueError: the tokens would exceed ``max_cache_len``. Nothing is changed then.
        """
        sync = self._sync
        if sync is not None:
            sync.announce(tokens)
        else:
            self._check_capacity(tokens)

    @property
    def _sync(self) -> DeviceSync | None:
        """Shared bookkeeping of the layers' recorded steps."""
        buffer = self.compressed_layers[0].buffer if self._recordable else None
        return None if buffer is None else buffer.sync

    def _catch_up(self) -> None:
        for layer in self.compressed_layers:
            layer.catch_up()

    def note_step(self, input_ids: Tensor | None) -> None:
        """Takes note of the tokens of a step that is about to be replayed."""

    # Lengths and rows change, in all layers or in none.

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens; see `KVLayer.crop`. Nothing is changed if that cannot be done in any layer."""
        tokens, beside = transactions.tokens_of(tokens_to_remove), self._beside("crop")
        if tokens < 0 or self.graphs is None or not self.graphs.rollback(tokens):
            if self.budget is not None and tokens > 0:
                self.budget.before_change(self, crops=tokens)
            transactions.crop(self._parts, -tokens, beside)
            return
        for _, act in beside:
            act()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # type: ignore[override]
        """Row b becomes what row ``beam_idx[b]`` was (i64 (B',)), or nothing is changed."""
        self._take_rows("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: Any) -> None:
        """Every row ``repeats`` times (one number, or i64 (B,)), or nothing is changed."""
        self._take_rows("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps these rows only (numbers, a slice, or a mask bool (B,)), or nothing is changed."""
        self._take_rows("batch_select_indices", indices)

    def _take_rows(self, verb: str, given: Any) -> None:
        if self.budget is not None and self.get_seq_length():
            rows = transactions.rows_of(verb, given, self.compressed_layers[0].batch_size)
            self.budget.before_change(self, len(rows), verb == "batch_select_indices")
        transactions.take_rows(verb, given, self._parts, lambda rows: self._beside("rows", rows))

    def reset(self) -> None:
        """Forgets everything, whatever has been before; a cache of fixed capacity keeps its allocation."""
        transactions.reset(self.layers, self._beside("reset"))

    def level(self, seen: int | None = None) -> None:
        """Takes tokens out again that an interrupted forward has left in some layers: all beyond ``seen``.

        None for as many as all layers have. A page that these tokens had filled is reopened with the values it holds.

        Raises:
            NotImplementedError: a layer has evicted tokens since, or recurrent states have them. Nothing is changed
                then; call `reset`.
        """
        if self.states.tensors():
            raise NotImplementedError("level: tokens cannot be taken out of recurrent states; call reset().")
        self.level_pages(seen)

    def level_pages(self, seen: int | None = None) -> None:
        """Takes tokens out again as `level` does, whatever recurrent states have."""
        if self._is_cutting:
            # Whole, its tokens would not fit; nothing was there before them.
            return self.reset()
        self._catch_up()
        counting = [self.layers[i] for i in self._counting]
        least = min((seen_by(layer) or 0 for layer in counting), default=0) if seen is None else seen
        transactions.level(counting, seen_by, least, self._beside("crop"))

    def _beside(self, verb: str, given: Any = None) -> transactions.Beside:
        """Further parts that change with the layers when ``verb`` is called."""
        return ()

    def integrity_check(self) -> None:
        """Raises RuntimeError if what the cache holds contradicts itself; asks the device for counters and tables.

        Layers must have seen the same tokens of the same rows, counters be in range and what the host knows of them,
        every token stand in one place, pages that are written to belong to one row, buffers of recorded steps hold what
        the layers do, and bytes be counted. Only a fault of the library, or an interrupt within it, can break that.
        """
        self._catch_up()
        layers = self.compressed_layers
        rows = {layer.batch_size for layer in layers if layer.seen}
        found = [f"layers hold {sorted(rows)} rows"] if len(rows) > 1 else []
        for i, layer in enumerate(layers):
            found += [f"layer {i}: {what}" for what in layer.contradictions()]
        if found:
            raise RuntimeError(f"integrity_check: {'; '.join(found)}. Call reset(), and report this.")
        seen = [seen_by(self.layers[i]) for i in self._counting]
        if len(set(seen)) > 1:
            raise uneven(max(seen), min(seen))  # type: ignore[type-var]

    # Files.

    def save(self, path: str | Path, token_ids: Tensor | None = None) -> None:
        """Writes the cache to a file: compressed bytes, windows, counters and statistics.

        An existing file is replaced only by a complete one. `load` returns a cache that continues as this one does.

        Args:
            path: of the file, ``prompt.safetensors`` for example.
            token_ids: (B, n), what the cache was given; they come back as ``saved_ids``.

        Raises:
            ValueError: token ids of another shape than the cache has, a scheme of your own without a name, or layers
                that cannot be saved: sliding windows of a fixed capacity that stay as Transformers makes them, and
                recurrent states that the model keeps in its own modules (RecurrentGemma).
            RuntimeError: a step was interrupted while it wrote recurrent states.
            OSError: the file cannot be written.
        """
        write_file(path, *self.packed(token_ids))

    def packed(self, token_ids: Tensor | None = None) -> Packed:
        """Contents that `save` writes: a description, plain data, and tensors by name, where they are."""
        self._catch_up()
        self._check_even()
        seen = int(self.get_seq_length())
        if token_ids is not None and (token_ids.dim() != 2 or token_ids.shape[1] != seen):
            raise ValueError(
                f"token_ids: got shape {tuple(token_ids.shape)}, allowed (batch, {seen}), an id for each cached token."
            )
        unnamed = [type(scheme).__name__ for scheme in self.preset.schemes if not scheme.name]
        if unnamed:
            raise ValueError(
                f"scheme: {unnamed[0]} has no name under which a file could be read again; give the class a name "
                "(CONTRIBUTING.md says how)."
            )
        layers, tensors = [], {}
        for i, layer in enumerate(self.layers):
            numbers, held = packed_layer(i, layer, seen)
            layers.append(numbers)
            tensors |= {f"layer{i}.{name}": x for name, x in held.items()}
        beside = self._packed_beside()
        for name, (_, held) in beside.items():
            tensors |= {f"{name}.{key}": x for key, x in held.items()}
        if token_ids is not None:
            tensors["token_ids"] = token_ids
        description = {
            "scheme": self.preset.to_dict(),
            "model": self.architecture() | {"fields": config_fields(self.config)},
            "max_cache_len": self._capacity,
            "tokens": seen,
            "holes": any(layer.buffer is not None and layer.buffer.sync.holes for layer in self.compressed_layers),
            "layers": layers,
            "beside": {name: numbers for name, (numbers, _) in beside.items()},
        }
        return description, tensors

    @classmethod
    def load(
        cls, path: str | Path, model_or_config: Any, *, device: torch.device | str | None = None, **options: Any
    ) -> Self:
        """A cache from a file that `save` wrote.

        Scheme and capacity are the file's. Files of `TriAxialCache` are loaded by that class, with ``tokenizer=``.

        Args:
            path: of the file.
            model_or_config: the model, or its config; its architecture must be that of the cache's model. Weights are
                not compared.
            device: where to load it. None: the model's device, or the CPU if a config is passed.
            **options: of the constructor: ``graphs``, ``headroom``, ``offloading``, ``attach``, ``debug``.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a saved cache, is damaged, or comes from another model or version.
        """
        device = device_of(model_or_config) if device is None else torch.device(device)
        description, tensors = read_file(path, device)
        try:
            preset, capacity = get_preset(description["scheme"]), description["max_cache_len"]
            made = cls.of_preset(model_or_config, preset, max_cache_len=capacity, **options)
            theirs, own = description["model"], made.architecture()
            if theirs["config"] != own["config"]:
                fields = differing(theirs["fields"], config_fields(made.config))
                raise ValueError(
                    f"its config is that of another model (a {theirs['type']}) than this one (a {own['type']})"
                    f"{fields and f', which differs in {fields}'}; compute the prompt again"
                )
            made.unpack(description, tensors, device)
        except torch.OutOfMemoryError:
            raise
        except (*DAMAGE, RuntimeError) as error:
            release, reason = description["written"], str(error).rstrip(".")
            other = "" if release == __version__ else f" (hfkvq {release} wrote it, and this is {__version__})"
            raise ValueError(f"path: {path} cannot be loaded: {reason}{other}.") from error
        return made

    @outside_inference_mode
    def unpack(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Gives an empty cache of the same preset and model what another one has `packed`; it takes tensors over.

        Raises:
            ValueError: it does not fit; damaged data may also raise something else of `hfkvq.bounded.DAMAGE`.
        """
        for i, (layer, numbers) in enumerate(zip(self.layers, description["layers"], strict=True)):
            unpack_layer(i, layer, numbers, below(f"layer{i}", tensors), device)
        rows = {layer.batch_size for layer in self.compressed_layers if layer.store is not None}
        if len({*rows, *(x.shape[0] for x in self.states.tensors())}) > 1:
            raise ValueError(f"recurrent states of other rows than keys and values have, which are {max(rows)}")
        beside = {name: x.cpu() for name, x in tensors.items() if not name.startswith("layer")}
        self._unpack_beside(description["beside"], beside)
        for layer in self.compressed_layers:
            if layer.buffer is not None:
                layer.buffer.sync.holes = description["holes"] is True
            if layer.store is not None:
                layer.bind()
        token_ids = tensors.get("token_ids")
        self.saved_ids = None if token_ids is None else token_ids.cpu()
        try:
            self.integrity_check()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if self.budget is not None:
            size, limit = self.memory().total, self.budget.limit
            if size > limit:
                raise ValueError(
                    f"memory: the cache takes {format_bytes(size)}, but the budget is {format_bytes(limit)}; load it "
                    "with more, and set memory_limit then"
                )

    def _packed_beside(self) -> dict[str, Packed]:
        """Contents of the cache beside its layers, by name."""
        return {}

    def _unpack_beside(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if found:
            raise ValueError("it has tags of tokens; load it with TriAxialCache.load(path, model, tokenizer=tokenizer)")

    def architecture(self) -> dict[str, str]:
        """Type and config of the model."""
        return {"type": self.config.model_type, "config": config_hash(self.config)}

    # Copies.

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedKVCache:
        """Independent layers; config and scheme are shared."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        add_cache(self.config, new)
        new.budget = copy.copy(self.budget)
        if self.graphs is not None:
            new.graphs = StepGraphs(new)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: files are the one way to keep a cache, and nothing in them is unpickled."""
        raise TypeError(f"{type(self).__name__}: caches are not pickled; cache.save(path) and load keep one.")


def _budget_of(
    memory: Any, order: Any, evict: Any, capacity: int | None, text: PreTrainedConfig, device: torch.device
) -> Budget | None:
    """The budget of a cache of a model of this text config; None without ``memory``."""
    why = "without memory=, which says when tokens go" if memory is None else None
    why = "with max_cache_len, whose widths are chosen at once for the whole capacity" if capacity is not None else why
    hinders = None if evict is None else hinders_eviction(text)
    why = f"for {text.model_type}, which {hinders}" if hinders else why
    if evict is not None and why is not None:
        raise ValueError(f"evict: got {evict!r} {why}; leave evict= out, or pass memory= and no max_cache_len.")
    if memory is None and order is not None:
        raise ValueError("order: got one without memory=, which says when layers go down; pass memory='6GiB'.")
    if memory is None:
        return None
    dim = head_dim_of(text)
    if dim is None:
        raise ValueError(f"memory: {text.model_type} has heads of no one dimension; choose a scheme, e.g. 'best-3.4'.")
    return Budget(parse_memory(memory, device), len(stock_layers(text)), dim, order, evict)


def _take_no_scheme(scheme: Any, layers: Any, knobs: Any, budget: Budget, can: bool, offloading: Any) -> None:
    """Has the budget stand where a saved cache's layers do; refuses any other scheme, and what no budget is for."""
    if not can or offloading is not False:
        raise ValueError("memory: not with attach=False, debug=True or offloading: pages must lie in step buffers.")
    if scheme is not None:
        budget.adopt(get_preset(scheme, layers, **checked_knobs(scheme, knobs)).by_layer(budget.layers))
    elif layers is not None or knobs:
        given = ", ".join(["layers"] * (layers is not None) + list(checked_knobs(DEFAULT_SCHEME, knobs)))
        raise ValueError(f"{given}: not with memory=, by which the cache chooses; leave one of them out.")


def device_of(model_or_config: Any) -> torch.device:
    """The model's device, or the CPU for a config."""
    parameters = model_or_config.parameters() if isinstance(model_or_config, torch.nn.Module) else ()
    return next((x.device for x in parameters), torch.device("cpu"))
