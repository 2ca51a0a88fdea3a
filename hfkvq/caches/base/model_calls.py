"""Calls of a model that has met one of our caches: they come by here first, so that a captured step can be replayed.

PyTorch asks a module for a replacement of its call (``_compiled_call_impl``, where ``Module.compile`` puts its own);
ours is a `CallInterceptor`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

CACHE_NAMES = ("cache", "past_key_values")
"""Names of a model's argument for its cache, the second up to Transformers 5.23 and deprecated after it."""


class _Thread(threading.local):
    inside = False


_THREAD = _Thread()


class CallInterceptor:
    """Interceptor of a model's calls: steps of a cache with graphs go to its `StepGraphs`, all others to the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        # The model keeps this.
        self._model = weakref.ref(model)
        self._hooks: list[Any] = []
        self._tensors: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._adapters: list[weakref.ref[Any]] = []
        # Steps that have been captured: all that they launch is loaded.
        self.captured: set[Any] = set()
        # Captured steps make numbers on the device where this is set; see `hfkvq.caches.base.capture.NumbersOnDevice`.
        self.makes_numbers = False
        # Modules that run fused while a step is recorded: a `hfkvq.caches.fused_modules.Fusion`.
        self.fusion: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call: a step of a cache of ours may be replayed, all else goes on."""
        model: Any = self._model()
        if torch.compiler.is_compiling() or _THREAD.inside:
            return model._call_impl(*args, **kwargs)
        name = next((name for name in CACHE_NAMES if kwargs.get(name) is not None), "")
        cache = kwargs.get(name)
        graphs = getattr(cache, "graphs", None)
        return model._call_impl(*args, **kwargs) if graphs is None else graphs.call(model, self, args, kwargs, cache)

    def check_hooks(self) -> str | None:
        """Notes what `fingerprint` watches; says why a hook keeps the model from being captured, or None."""
        model: Any = self._model()
        modules: list[Any] = list(model.modules())
        self._hooks = [x for m in modules for x in (m._forward_hooks, m._forward_pre_hooks)]
        # Code that moves or replaces weights does so to many; adapters are switched all together.
        named = [(held, name) for m in modules for held in (m._parameters, m._buffers) for name in held]
        # A replaced tensor may live on elsewhere, so each is looked up by its name.
        self._tensors = [*named[:: max(1, len(named) // 24)], *named[-1:]]
        self._adapters = [weakref.ref(m) for m in modules if hasattr(m, "merged_adapters")][:2]
        if any(getattr(getattr(m, "_hf_hook", None), "offload", False) for m in modules):
            return "weights are offloaded"
        for hook in (hook for hooks in self._hooks for hook in hooks.values()):
            if not is_known(hook):
                return f"the model has a forward hook ({getattr(hook, '__qualname__', type(hook).__name__)})"
        return None

    def fingerprint(self) -> Any:
        """Changes when a graph of the model is no longer good: by hooks, addresses of weights, adapters at work.

        As far as `check_hooks` has noted them; what a module does by a flag of its own is not seen.
        """
        model: Any = self._model()
        hooks: tuple[Any, ...] = ()
        # Hooks are in some thousand dictionaries, nearly always empty ones.
        if any(self._hooks):
            hooks = tuple(key for own in self._hooks for key, hook in own.items() if not is_known(hook))
        tensors = [held.get(name) for held, name in self._tensors]
        places = tuple([0 if x is None else x.data_ptr() for x in tensors])
        adapters = [getattr(model, "_hf_peft_config_loaded", None), len(getattr(model, "peft_config", None) or ())]
        for ref in self._adapters:
            own = ref()
            # PEFT's layers name their adapters so.
            names = ("active_adapters", "disable_adapters", "merged_adapters")
            adapters += [str(getattr(own, name, None)) for name in names]
        return hooks, hash(places), tuple(adapters)


@contextlib.contextmanager
def inside_call() -> Iterator[None]:
    """Calls of models go to the models themselves, in this thread and context."""
    before, _THREAD.inside = _THREAD.inside, True
    try:
        yield
    finally:
        _THREAD.inside = before


def is_inside_call() -> bool:
    """True if the running call of a model has come by an interceptor already."""
    return _THREAD.inside


def is_known(hook: Any) -> bool:
    """True if a hook does nothing but what its library needs: PyTorch's, Transformers' or ours."""
    while isinstance(hook, partial):
        hook = hook.func
    # Hooks of these do on the device what they do, or nothing in a step.
    return str(getattr(hook, "__module__", "")).startswith(("transformers.", "hfkvq.", "torch.distributed."))


def intercept(model: torch.nn.Module) -> CallInterceptor | None:
    """The model's interceptor, made if there is none; None for a model that its user has compiled."""
    # PEFT's models call the model within them by its forward, and its generate calls that model.
    inner = getattr(model, "get_base_model", None)
    if inner is not None:
        intercept(inner())
    interceptor = model._compiled_call_impl
    if interceptor is None:
        interceptor = CallInterceptor(model)
        model._compiled_call_impl = interceptor
    return interceptor if isinstance(interceptor, CallInterceptor) else None


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as an argument of a model's call or ``generate``, by the name that the model has for it."""
    inner = getattr(model, "get_base_model", None)
    known = forward_parameters(type(model if inner is None else inner()))
    return {next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[-1]): cache}


@functools.cache
def forward_parameters(cls: type) -> tuple[str, ...]:
    """Names of a model class's arguments, in order."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]
