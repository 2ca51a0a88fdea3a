"""`MixedKVCache`: the cache a user passes to ``generate``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from .attention.interface import register
from .attention.mla import pass_over
from .base.capture import RECORDERS
from .base.config_switch import NAME, join, restore, switch
from .base.model_calls import CallInterceptor, intercept, is_inside_call
from .base.model_config import head_dim_of, stock_layers, text_config
from .base.recorded import is_captured, is_recorded
from .base.warn_once import say_once
from .compile import compile_kernels
from .files.saved import SavedCache
from .graphs.step_graphs import StepGraphs, wanted
from .layer_state.group import DeviceSync
from .layer_state.smoothing import layers_that_mix, measure, warn_of_noise
from .layers import transactions
from .layers.build import build_layers, is_attachable, seen_by
from .layers.handle import dense_of
from .layers.layer import KVLayer
from .layers.memory import MemoryReport, described, memory_of
from .schemes.base import Scheme
from .schemes.eviction import EvictionScheme, warn_of_loss
from .schemes.preset import Preset, checked_knobs, get_preset
from .tags.bit_table import config_hash


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def allocate(layers: Iterable[KVLayer], keys: Tensor, values: Tensor) -> None:
    """Allocates every layer of fixed capacity before a graph is recorded."""
    for layer in layers:
        if layer.buffer is not None and layer.buffer.tensor is None:
            if layer.store is None:
                layer.lazy_initialization(keys, values)
            layer.prefetch()
            layer.buffer.bind()


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def update_outside(cache: Any, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """An update of a cache that grows, by a compiled model: plain tensors, since its compiler follows no handles."""
    say_once(
        "A compiled model dequantizes a growing cache in each step, which is correct but slow; make the cache with "
        "max_cache_len, or do not compile the model."
    )
    keys, values = cache.update(keys, values, layer_idx)
    return dense_of(keys), dense_of(values)


DEFAULT_SCHEME = "best-3.4"


class MixedKVCache(SavedCache, Cache):
    """A KV cache that stays compressed; attention is computed on the compressed pages.

    Use it as ``model.generate(**inputs, past_key_values=MixedKVCache(model, "kitty-pro"))``. The scheme decides
    how attention layers are stored in pages, also in layers that combine attention with Mamba. Layers with a sliding
    window use a ring of pages (in 16 bits where the window is short, see `hfkvq.caches.schemes.sliding_window`).
    Recurrent states are not compressed.

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
            (``"kitty:boost_ratio=0.2"``), a `Scheme`, or a `Preset`.
        layers: schemes of single layers, ``{"0-1": "full", "-1": {"boost_ratio": 0.5}}``: a name, a `Scheme`, or
            options of the main scheme, by layers of the decoder (ranges include both ends). Layers that are not
            compressed anyway stay as they are.
        max_cache_len: capacity in tokens per row, padding included. Everything is allocated at the first update, at
            fixed addresses, and more tokens raise. A scheme that evicts only from prompts allocates what its first
            prompt leaves and the rest of the capacity. None: the cache grows as needed.
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

    Raises:
        ValueError: unknown scheme, knob or layer, a head dim that the scheme cannot hold, a model without attention
            layers, or offloading with a scheme that evicts.
    """

    _compiled: Any = None
    """Device for which the layers' kernels have been compiled, and whether for steps of several tokens."""

    def __init__(
        self,
        model_or_config: Any,
        scheme: Preset | Scheme | str | Path = DEFAULT_SCHEME,
        *,
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
        self.preset = get_preset(scheme, layers, **checked_knobs(scheme, knobs))
        text = text_config(config)
        # Configs of encoder-decoders are copies (`get_text_config`), at which no module looks.
        self._crosses = config.is_encoder_decoder or text.is_encoder_decoder
        self._attachable = not self._crosses and is_attachable(text)
        attach, own = attach and self._attachable, attach and not self._attachable
        name = type(config).__name__
        made = build_layers(text, self.preset, max_cache_len, wanted(graphs), attach, debug, name, offloading, own)
        super().__init__(layers=made.layers)
        self._compressed, self._recordable, self._flex = made.compressed, made.sync is not None, False
        self.config, self._capacity, self._debug = text, max_cache_len, debug
        self._count_by(text)
        self._why_not_captured = made.why_not_captured
        self._untouched: dict[int, dict[str, Any]] = {}
        held = {i: made.layers[i] for i in made.compressed}
        mixing = layers_that_mix({i: x.scheme for i, x in held.items() if not x.holds_latents}, head_dim_of(text))
        self._rounding = tuple(i for i, x in held.items() if x.smooths or i in mixing)
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._updated = -1
        self.graphs: StepGraphs | None = None
        if made.sync is not None:
            made.sync.headroom = headroom
        if made.captured and made.sync is not None:
            self.graphs = StepGraphs(self, self.preset, made.sync)
        if attach and made.compressed:  # Masks of other models stay as they are, too: Moshi's do not slide.
            switch(text, self)
        if isinstance(model_or_config, torch.nn.Module):
            self._meet(model_or_config)

    def attach(self, model: torch.nn.Module | None = None) -> None:
        """Shows the cache its model, and switches attention to "hfkvq", as the constructor does with a model.

        A cache made from a config, or loaded with pickle, needs it. Attention is not switched for models that look no
        implementation up (Falcon, for example).

        Args:
            model: the model that is called with this cache; None for the one that the cache knows.

        Raises:
            ValueError: a model of another config than the cache was made for.
        """
        if model is not None:
            self.config = _checked_config(self, model)
        if self._attachable and self._compressed:
            switch(self.config, self)
        model = self._model() if model is None and self._model is not None else model
        if model is not None:
            self._meet(model)

    def _meet(self, model: torch.nn.Module) -> None:
        """Takes note of the model that is called with this cache."""
        self._model = weakref.ref(model)
        if self.graphs is not None:
            intercept(model)
        if self.attached and any(layer.latents for layer in self.compressed_layers):
            pass_over(model, self.config)

    def detach(self) -> None:
        """Restores the config's own attention implementation; the cache goes on working, intercepted."""
        restore(self.config)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stages new tokens of a layer; see `KVLayer.update`.

        A refusal (`ValueError`) in a later layer takes the tokens of the same forward out of the earlier ones again, so
        that no layer is ahead of the others. Only with ``debug=True`` can a layer refuse what an earlier one has taken;
        a page that the refused tokens had filled there is reopened with the values it holds.
        """
        if is_recorded():
            if self._capacity is None and layer_idx in self._compressed and not is_captured():
                return update_outside(self, key_states, value_states, layer_idx)  # pyright: ignore[reportCallIssue]
            if self._is_recordable(layer_idx) and self.layers[layer_idx].buffer.tensor is None:  # type: ignore[union-attr]
                allocate(self.compressed_layers, key_states, value_states)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._why_not_captured is not None and key_states.is_cuda and key_states.shape[2] == 1:
            why, self._why_not_captured = self._why_not_captured, None
            say_once(f"{self.preset.scheme.name}: steps are not captured, since {why}; they run without graphs.")
        if self._crosses and layer_idx == self._updated and len(self.layers) > 1:
            raise _refuse_bare(self)
        if layer_idx == self._first:
            self._check_even()
        if layer_idx == max(self._first, 0):
            self._before_first_layer(key_states)
        try:
            _check_layer(self, layer_idx)
            self._updated = layer_idx
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            # A compiler makes its kernels, and cannot follow handles.
            return tuple(map(dense_of, found)) if self._flex else found
        except ValueError:
            self._updated = -1
            _take_back(self, layer_idx, key_states.shape[2])
            raise

    def _find_smoothing(self) -> None:
        """Gives empty layers the vectors of their model, if it is known; else they take those of their first prompt."""
        layers: dict[int, Any] = {i: self.layers[i] for i in self._rounding}
        if not any(not layer.seen and layer.smoothing is None for layer in layers.values()):
            return
        model = None if self._model is None else self._model()
        found = {} if model is None else measure(model, self.config)
        for i, layer in layers.items():
            if layer.smooths and not layer.seen and layer.smoothing is None:
                layer.smoothing, layer.smooths_by_prompt = None, i not in found
                if i in found:
                    dim = found[i].mean.shape[1]
                    layer.smoothing = found[i].smoothing(layer.scheme.layout(dim, dim))
        if found:
            schemes = {i: layer.scheme for i, layer in layers.items()}
            warn_of_noise(self.preset.scheme.name, schemes, model, self.config)

    def _before_first_layer(self, key_states: torch.Tensor) -> None:
        self._find_smoothing()
        _warn_of_unknown_model(self, key_states.device)
        if isinstance(self.scheme, EvictionScheme) and not seen_by(self.layers[max(self._first, 0)]):
            warn_of_loss(self.scheme, key_states.shape[2], len(self.layers))
        self._flex = self.config._attn_implementation_internal == "flex_attention"
        if self.graphs is not None and self.compressed_layers[0].store is None:
            self.graphs.before_prompt(key_states)
        if key_states.is_cuda and self._compressed:
            kernels = key_states.device, self.compressed_layers[0].record_past
            if self._compiled != kernels:
                self._compiled = kernels
                compile_kernels(self.config, self.compressed_layers, key_states)
        # A model that never asked for mask sizes has updated the recurrent layers before this one already.
        with self.states.spoiled_on_error():
            self._check_capacity(key_states.shape[2])
        if self._debug:
            self.integrity_check()
            self._untouched = transactions.untouched(self.layers)

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
            if self._is_recordable(layer_idx) and not self.attached:
                layer: Any = self.layers[layer_idx]
                layer.steps.sync.catch_up()
                return layer.sizes(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def _is_recordable(self, layer_idx: int) -> bool:
        return self._recordable and layer_idx in self._compressed

    @property
    def attached(self) -> bool:
        """True if attention is "hfkvq"; not for a cache from a pickle before `attach` shows it its model."""
        return self.config._attn_implementation_internal == NAME

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """True if `generate` may compile steps: at a fixed capacity, unless ``graphs`` has them captured."""
        if self.graphs is not None and not torch.compiler.is_compiling():
            return False
        # The compiler of PyTorch 2.11 follows neither `super()` to a property nor `bool`.
        return len(self.layers) > 0 and all(layer.is_compileable for layer in self.layers) and self.attached

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Column of the coming forward's first query; on the device for layers of fixed capacity."""
        if self._is_recordable(layer_idx) and (is_recorded() or self.attached):
            return self.layers[layer_idx].get_query_offset()  # type: ignore[union-attr]
        return super().get_query_offset(layer_idx)

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
        steps = self.compressed_layers[0].steps if self._recordable else None
        return None if steps is None else steps.sync

    def step(self, model: torch.nn.Module, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """One step of the model with this cache, for loops of your own; captured and replayed like those of `generate`.

        ``model(input_ids, past_key_values=cache)`` does the same with the cache's own model.

        Args:
            model: the model.
            input_ids: (B, t), the new tokens.
            **kwargs: further arguments of the model.

        Returns:
            What the model returns; its tensors are the caller's own.
        """
        if self._model is None or self._model() is not model:
            self._meet(model)
        with torch.no_grad():
            return model(input_ids=input_ids, past_key_values=self, use_cache=True, **kwargs)

    @property
    def scheme(self) -> Scheme:
        """The scheme of every layer that has none of its own."""
        return self.preset.scheme

    def memory(self) -> MemoryReport:
        """Exact memory: every tensor that the cache holds is counted (asks the device for the rows' lengths)."""
        self._catch_up()
        return memory_of(self._parts, int(self.get_seq_length()))

    def __repr__(self) -> str:
        """Scheme, tokens and memory in one line."""
        return described(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedKVCache:
        """Independent layers; config and scheme are shared, and full pages where the cache grows."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        join(self.config, new)
        if self.graphs is not None:
            new.graphs = _graphs_of(new)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the config, which belongs to the model."""
        state = {key: value for key, value in self.__dict__.items() if key not in ("config", "_model")}
        return state | {"graphs": self.graphs is not None, "_known_architecture": self.architecture()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a saved cache; an empty stand-in takes the config's place, and `detach` has nothing to undo."""
        self.__dict__.update(state, config=PreTrainedConfig(), _model=None)
        self.graphs = _graphs_of(self) if state["graphs"] else None
        register()


def _checked_config(cache: MixedKVCache, model: torch.nn.Module) -> PreTrainedConfig:
    """Text config of a model that a cache was made for; see `MixedKVCache.attach`."""
    text = text_config(model.config)  # type: ignore[arg-type]
    if config_hash(text) != cache.architecture()["config"]:
        raise ValueError(
            f"model: got a {type(model).__name__} of another config than the cache was made for; make a cache for this "
            "model."
        )
    return text


def _warn_of_unknown_model(cache: MixedKVCache, device: torch.device) -> None:
    """Says once what is lost where the model that calls is not the one that the cache knows."""
    model = None if cache._model is None else cache._model()
    # The user has compiled a model that has another replacement of its call.
    bypassed = model is None or (isinstance(model._compiled_call_impl, CallInterceptor) and not is_inside_call())
    lost = []
    if cache.graphs is not None and device.type in RECORDERS and bypassed:
        lost.append("steps are not captured")
    if model is None and cache.attached and any(layer.latents for layer in cache.compressed_layers):
        lost.append("latents are dequantized in each step")
    if model is None and any(layer.smooths_by_prompt for layer in cache.compressed_layers):
        lost.append("keys are smoothed by the first prompt's")
    if lost:
        name = type(cache).__name__
        say_once(
            f"{name}: the cache does not know the model that calls it, so {' and '.join(lost)}; make it with "
            f"{name}(model, ...), or call cache.attach(model)."
        )


def _refuse_bare(cache: MixedKVCache) -> ValueError:
    """Takes the tokens of this forward out again; the error to raise."""
    cache._updated = -1
    cache.level_pages()
    name = type(cache).__name__
    return ValueError(
        f"past_key_values: got a bare {name}, but cross-attention needs a cache of its own; pass "
        f"EncoderDecoderCache({name}(model, ...), DynamicCache()), both of them from transformers."
    )


def _check_layer(cache: MixedKVCache, layer_idx: int) -> None:
    if layer_idx >= len(cache.layers):
        raise ValueError(
            f"model_or_config: this cache was made for {len(cache.layers)} layers, but got keys of layer "
            f"{layer_idx}; make it from the config of the model that it is used with."
        )


def _take_back(cache: MixedKVCache, layer_idx: int, tokens: int) -> None:
    """Takes tokens that a layer has refused out of the earlier ones."""
    layers = cache.layers
    refused = seen_by(layers[layer_idx]) if layer_idx < len(layers) else cache.get_seq_length() - tokens
    own = [layer for i, layer in enumerate(layers) if i in cache._compressed and i not in cache._untouched]
    transactions.level(own, seen_by, refused or 0)
    for i, state in cache._untouched.items():
        vars(cache.layers[i]).update(state)
    # This comes last: the restored variables include ``spoiled`` of before.
    cache.states.spoil()


def _graphs_of(cache: MixedKVCache) -> StepGraphs:
    """Graphs of its own for a cache that has come from another one."""
    sync = cache._sync
    assert sync is not None, "steps were captured"
    return StepGraphs(cache, cache.preset, sync)
