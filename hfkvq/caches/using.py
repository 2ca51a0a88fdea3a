"""`use`: a model that makes compressed caches by itself, in `generate` and in forwards, until that is undone."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.configuration_utils import PreTrainedConfig

from .base import warn_once
from .base.config_switch import on_restore, release
from .base.model_calls import CACHE_NAMES, CallInterceptor, forward_parameters, with_cache
from .cache import MixedKVCache
from .schemes.base import Scheme
from .schemes.preset import Preset

ENTRY = "_prepare_cache_for_generation"
"""The method of models by which `generate` makes its cache, once it knows what its user has passed."""

_LOCK = threading.Lock()


class InUse:
    """A model that makes caches of one kind by itself, until `undo`; see `use`.

    Attributes:
        active: until `undo`; of several on one model the newest one is in effect.
    """

    _before: Any = None

    def __init__(self, model: Any, inner: Any, make: Callable[[Any], MixedKVCache]) -> None:
        # The model keeps this.
        self._given, self._inner = weakref.ref(model), weakref.ref(inner)
        self._make, self.active = make, True
        self._spare: Any = None
        self._living: weakref.WeakSet[MixedKVCache] = weakref.WeakSet()
        models = [inner] if inner is model else [inner, model]
        strangers, held = [weakref.ref(each) for each in models if each._compiled_call_impl is None], vars(inner)
        earlier = _owner(held.get(ENTRY))
        self._strangers = strangers if earlier is None or not earlier.active else earlier._strangers
        # Errors of arguments come here, before the model is changed.
        self._config, self._layers = self._new().config, _layers(inner)
        if hasattr(inner, ENTRY):
            # Found before the class's, as the engine's entry is by `hfkvq.serving`.
            self._before, held[ENTRY] = held.get(ENTRY), self._prepare
        self._hooks = [each.register_forward_pre_hook(self._fill, prepend=True, with_kwargs=True) for each in models]

    @property
    def model(self) -> Any:
        """The model; within PEFT's, the wrapper that `use` was given, while that is there."""
        return self._given() or self._inner()

    @property
    def caches(self) -> list[MixedKVCache]:
        """Caches that the model has made and that are still alive: those of running calls, and returned ones."""
        with _LOCK:
            return list(self._living)

    @property
    def kept(self) -> list[Tensor]:
        """Buffers of captured steps that the last cache has left for the next one."""
        left = None if self._spare is None else self._spare.left
        if left is None:
            return []
        parts = [x for each in left.allocations for x in (each.tensor, each.pages)]
        return [x for x in (*parts, *left.states) if x is not None]

    def undo(self) -> None:
        """Makes the model as it was, and frees the buffers that were kept; a second time does nothing.

        Caches that outlive it go on working as those made with ``attach=False``; ``cache.attach(model)`` makes them
        fast again.
        """
        if not self.active:
            return
        self.active, self._spare, inner = False, None, self._inner()
        held = {} if inner is None else vars(inner)
        for hook in self._hooks:
            hook.remove()
        if _owner(held.get(ENTRY)) is self:
            before = self._before
            while (owner := _owner(before)) is not None and not owner.active:
                before = owner._before
            del held[ENTRY]
            held |= {} if before is None else {ENTRY: before}
        strangers = self._strangers

        def leave() -> None:
            # With the interceptor goes what it knows of captured steps.
            for model in (ref() for ref in strangers):
                if model is not None and isinstance(model._compiled_call_impl, CallInterceptor):
                    del model._compiled_call_impl

        switched = release(self._config, self.caches)
        if _owner(held.get(ENTRY)) is not None:
            # The last one undone leaves the model.
            return
        if switched:
            # Other caches need the interceptor for as long as they live.
            on_restore(self._config, id(self), leave)
        else:
            leave()

    def __enter__(self) -> InUse:
        if not self.active:
            raise ValueError("use: got a use that was undone, allowed a new one; call hfkvq.use(model, ...) again.")
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or pickle of the model, which makes its caches as its class does."""
        return {"models": (self.model, self._inner())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._given, self._inner = map(weakref.ref, state["models"])
        self.active = False

    def _new(self) -> MixedKVCache:
        made = self._make(self.model)
        # Kept, so that the buffers that one cache leaves live until the next one is made.
        self._spare = None if made.graphs is None else made.graphs.spare
        with _LOCK:
            self._living.add(made)
        return made

    def _prepare(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """`generate`'s own preparation; a `DynamicCache` that it makes of its own accord is replaced."""
        before, model = self._before, self._inner()
        while (owner := _owner(before)) is not None:
            before = owner._before
        prepare = getattr(type(model), ENTRY).__get__(model) if before is None else before
        passed = {name: model_kwargs.get(name) for name in CACHE_NAMES}
        found = prepare(generation_config, model_kwargs, *args, **kwargs)
        # A draft that leaves its model at an earlier layer has a cache of fewer layers.
        if not self.active or generation_config.cache_implementation is not None or self._layers != _layers(model):
            return found
        for name, own in passed.items():
            made = model_kwargs.get(name)
            if made is own:
                continue
            if type(made) is DynamicCache:
                model_kwargs[name] = self._new()
            elif type(made) is EncoderDecoderCache:
                model_kwargs[name] = EncoderDecoderCache(self._new(), made.cross_attention_cache)
            if generation_config.is_assistant:
                # Drafts are taken back.
                model_kwargs[name].activate_past_recording()
        return found

    def _fill(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives a forward with ``use_cache=True`` and without a cache an empty one."""
        if not self.active or kwargs.get("use_cache") is not True or model.training or torch.compiler.is_compiling():
            return None
        placed = forward_parameters(type(model))[: len(args)]
        if any(name in placed or kwargs.get(name) is not None for name in CACHE_NAMES):
            return None
        if torch.is_grad_enabled():
            warn_once(
                "use: a forward that records gradients gets Transformers' own cache; call the model within "
                "torch.no_grad() or torch.inference_mode()."
            )
            return None
        made = self._new()
        crosses = model.config.is_encoder_decoder
        return args, kwargs | with_cache(model, EncoderDecoderCache(made, DynamicCache()) if crosses else made)


def _owner(method: Any) -> InUse | None:
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, InUse) else None


def _layers(model: Any) -> int | None:
    return getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)


def use(
    model: Any,
    scheme: Preset | Scheme | str | Path | type[MixedKVCache] | None = None,
    **options: Any,
) -> InUse:
    """Has every call of a model's ``generate`` make a `MixedKVCache`, without ``past_key_values`` in the user's code.

        with hfkvq.use(model, "best-3.4"):
            pipeline("text-generation", model=model, tokenizer=tokenizer)(text)

    Pipelines, agents and lm-eval's model ``hf`` call ``generate``, too. Each call gets an empty cache, also in several
    threads. So does a forward ``model(ids, use_cache=True)`` in evaluation mode and without gradients, whose output has
    the cache; forwards that do not say ``use_cache=True`` are left alone, since most of them throw their cache away.
    The user's own ``past_key_values``, ``use_cache=False`` and ``cache_implementation`` prevail.

    The buffers that a call's captured steps have used are kept for the next call, which then need not capture them
    again: until then, or `InUse.undo`, as many bytes are held as the last cache took (none without captured steps, or
    with ``max_cache_len``). A call that they do not suit, or of another thread, frees them first.

    Args:
        model: a Transformers model, also within PEFT's.
        scheme: as `MixedKVCache` takes it; or a cache class, e.g. `TriAxialCache` with ``tokenizer=``. None: the
            default of `MixedKVCache`.
        **options: further arguments of `MixedKVCache`, or of the class.

    Returns:
        What undoes it again: a context manager, or call ``undo()``. Of several on one model the newest is in effect.

    Raises:
        ValueError: no model, or one without such a cache; and see `MixedKVCache`. Nothing is changed then.
    """
    # A wrapper by torch.compile generates with the model within it.
    model = getattr(model, "_orig_mod", model)
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, torch.nn.Module) or not isinstance(getattr(inner, "config", None), PreTrainedConfig):
        held = ", e.g. its .model" if isinstance(getattr(model, "model", None), torch.nn.Module) else ""
        raise ValueError(f"model: got {type(model).__name__}, allowed a Transformers model{held}.")
    kind: Any = type(inner)
    fits = bool(set(CACHE_NAMES) & set(forward_parameters(kind)))
    if hasattr(kind, ENTRY):
        makes = inspect.signature(getattr(kind, ENTRY)).parameters
        fits = fits and "model_kwargs" in makes and kind._supports_default_dynamic_cache()
    if not fits:
        raise ValueError(
            f"model: got {kind.__name__}, which keeps no keys and values in a cache that can be replaced; "
            "allowed models that generate with DynamicCache."
        )
    if isinstance(scheme, type) and issubclass(scheme, MixedKVCache):
        return InUse(model, inner, partial(scheme, **options))
    given = () if scheme is None else (scheme,)
    return InUse(model, inner, lambda model: MixedKVCache(model, *given, **options))
