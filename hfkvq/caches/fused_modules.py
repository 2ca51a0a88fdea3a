"""Modules around attention in few launches: norms, linear layers, gated MLPs, rotary embedding.

While a step is recorded, which then repeats what was launched, and in prompts, modules whose results are those of
`hfkvq.kernels.fused` run by these kernels; at all other times, and for all other calls, they are the model's own. The
first prompt, and the step in Python that goes before a capture, show which they are: each kind of module is computed
both ways there, on the newest token of what it is given.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn

from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.fused import ACTIVATIONS, LAYERS, NORMS, gated_linear, linears, rms_norm, rotary

logger = logging.getLogger(__name__)

DEVICES = {"cuda"}
"""Types of devices on which modules are fused."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Forward = Callable[..., Any]


class Fusion:
    """Kinds of one model's modules that kernels compute alike.

    Attributes:
        found: indices of kernels' forms by kind of module; None for kinds that no kernel computes alike.
        checked: norms and MLPs that have been computed both ways, and whether their kind's kernel gives what they give.
        groups: linear layers that have been called one after the other with one input, by each of them.
    """

    def __init__(self) -> None:
        self.found: dict[Any, int | None] = {}
        self.checked: dict[nn.Module, bool] = {}
        self.groups: dict[nn.Linear, tuple[nn.Linear, ...]] = {}
        self._compares = False
        # Input of the last linear layers, its copy, and these.
        self._last: tuple[Tensor, Tensor, list[nn.Linear]] | None = None
        # Input of a group and results for those that have not been called yet.
        self._ready: tuple[Tensor, dict[nn.Linear, Tensor]] | None = None

    @contextlib.contextmanager
    def applied(self, model: nn.Module, compares: bool, prompt: bool = False) -> Iterator[None]:
        """Runs the model's modules fused within it, in this thread, and leaves them as they were.

        Args:
            compares: whether kinds that are not known yet are computed both ways, which asks the device; otherwise
                they run as they are.
            prompt: whether linear layers get many rows, and stay PyTorch's.
        """
        self._compares = compares
        thread, replaced = threading.get_ident(), []
        try:
            for module in model.modules():
                forward = None if prompt and type(module) is nn.Linear else self._forward_of(module)
                if forward is not None:
                    replaced.append((module, vars(module).get("forward")))
                    vars(module)["forward"] = _in_thread(module, forward, thread)
            yield
        finally:
            for module, before in replaced:
                if before is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = before
            self._last = self._ready = None

    def _forward_of(self, module: nn.Module) -> Forward | None:
        """Function in place of a class's forward, which takes the module first; None where the module runs as it is."""
        own = type(module).forward
        if not isinstance(own, types.FunctionType) or not _is_own(module):
            return None
        if _is_norm(module):
            return self._norm
        if type(module) is nn.Linear:
            return self._linear if all(_is_dense(p) for p in module.parameters()) else None
        if (layers := _linears(module)) is not None:
            return partial(self._mlp, layers=layers)
        names = [name for name in own.__code__.co_names if name.startswith("apply_") and "rotary" in name]
        plain = {name: own.__globals__.get(name) for name in names}
        fused = {name: partial(self._rotary, x) for name, x in plain.items() if isinstance(x, types.FunctionType)}
        # Rotary embedding is a function that attention finds in its file: here a copy of its forward finds another.
        return _with_globals(own, fused) if fused else None

    def _form(
        self,
        kind: Any,
        plain: Forward,
        fused: Sequence[Forward],
        in_torch: Sequence[Forward],
        module: nn.Module | None = None,
    ) -> int | None:
        """Index of the form that gives what ``plain`` does, up to rounding; None for no form, or for not known yet.

        PyTorch computes all forms, and the kernel, which is compiled for it, the nearest. Modules of a kind may differ
        by a flag, so each ``module`` is computed both ways once.
        """
        if self._compares and (kind not in self.found or (module is not None and module not in self.checked)):
            expected = plain()
            if kind not in self.found:
                errors = [_error(expected, form()) for form in in_torch]
                nearest = errors.index(min(errors))
                self.found[kind] = nearest if max(errors[nearest], _attempt(expected, fused[nearest])) <= 1 else None
            form = self.found[kind]
            if module is not None:
                self.checked[module] = form is not None and _attempt(expected, fused[form]) <= 1
        return self.found.get(kind) if module is None or self.checked.get(module) else None

    def _norm(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        plain = partial(type(module).forward, module, *args, **kwargs)
        if len(args) != 1 or kwargs or not _is_plain_tensor(args[0]):
            return plain()
        x, weight = args[0], module.weight
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float) or not _belongs(x, weight) or x.shape[-1] != weight.numel():
            return plain()
        kind, few = (type(module), eps, x.dtype, x.shape[-1]), _newest(x)
        fused, in_torch = (
            [partial(run, few, weight, eps, i) for i in range(len(NORMS))] for run in (rms_norm, reference("rms_norm"))
        )
        form = self._form(kind, partial(type(module).forward, module, few), fused, in_torch, module)
        return plain() if form is None else rms_norm(x, weight, eps, form)

    def _mlp(self, module: Any, *args: Any, layers: tuple[nn.Linear, ...], **kwargs: Any) -> Any:
        plain = partial(type(module).forward, module, *args, **kwargs)
        if len(args) != 1 or kwargs or not all(_belongs(args[0], each.weight) for each in layers):
            return plain()

        *first, down = layers
        weights = [x.weight for x in first]

        def compute(x: Tensor, product: Forward, activation: int) -> Tensor:
            gate, up = weights if len(weights) == 2 else weights[0].chunk(2)
            return down(product(x, gate, up, activation))

        kind, few = (type(module), *[x.weight.shape for x in layers], args[0].dtype), _newest(args[0])
        fused, in_torch = (
            [partial(compute, few, product, i) for i in range(len(ACTIVATIONS))]
            for product in (gated_linear, reference("gated_linear"))
        )
        form = self._form(kind, partial(type(module).forward, module, few), fused, in_torch, module)
        return plain() if form is None else compute(args[0], gated_linear, form)

    def _linear(self, module: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        plain = partial(type(module).forward, module, *args, **kwargs)
        if len(args) != 1 or kwargs or not _belongs(args[0], module.weight):
            return plain()
        x = args[0]
        if self._compares:
            self._note(module, x)
            kind = _kind(module, x)
            self._form(kind, plain, [lambda: _products(x, (module,))[0]], [plain])
            return plain()
        if self._ready is not None and self._ready[0] is x and module in self._ready[1]:
            return self._ready[1].pop(module)
        group = self.groups.get(module, (module,))
        if any(self.found.get(_kind(each, x)) is None for each in group):
            return plain()
        own, *others = _products(x, group[group.index(module) :])
        self._ready = x, dict(zip(group[group.index(module) + 1 :], others, strict=True))
        return own

    def _note(self, module: nn.Linear, x: Tensor) -> None:
        """Notes linear layers that get one input, which is the same at all their calls."""
        last = self._last
        alike = last is not None and last[0] is x and len(last[2]) < LAYERS
        if alike and last is not None:
            # One launch can compute them over the same input.
            one = last[2][0]
            alike = one.in_features == module.in_features and _belongs(one.weight.data, module.weight)
            alike = alike and (one.bias is None) == (module.bias is None)
        if last is None or not alike or module in last[2] or not torch.equal(x, last[1]):
            self._last = last = x, x.clone(), []
        last[2].append(module)
        self.groups |= dict.fromkeys(last[2], tuple(last[2]))

    def _rotary(self, function: Forward, *args: Any, **kwargs: Any) -> Any:
        plain = partial(function, *args, **kwargs)
        if len(args) != 4 or kwargs or not all(map(_is_plain_tensor, args)):
            return plain()
        q, k, cos, _ = args
        whole = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.dtype == q.dtype == k.dtype
        if not whole or not q.shape[-1] == k.shape[-1] == cos.shape[-1] or cos.shape[0] not in (1, q.shape[0]):
            return plain()
        kind = function, q.dtype, q.shape[1], k.shape[1], q.shape[-1]
        few = q[:, :, -1:], k[:, :, -1:], *(x[:, -1:] for x in args[2:])
        own, in_torch = partial(rotary, *few), partial(reference("rotary"), *few)
        form = self._form(kind, partial(function, *few), [own], [in_torch])
        return plain() if form is None else rotary(*args)


def _in_thread(module: nn.Module, forward: Forward, thread: int) -> Forward:
    """A module's forward in one thread; in others it is the module's own.

    Modules of a model that is spread over devices move inputs to theirs first, as accelerate's hook does.
    """
    own, hook = module.forward, vars(module).get("_hf_hook")

    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return own(*args, **kwargs)
        if hook is None:
            return forward(module, *args, **kwargs)
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return hook.post_forward(module, forward(module, *args, **kwargs))

    return run


def _error(expected: Any, found: Any) -> float:
    """Distance of results, in the rounding that is allowed; infinite for others in kind."""
    if isinstance(expected, tuple):
        return max(_error(one, other) for one, other in zip(expected, found, strict=True))
    if not _is_plain_tensor(expected) or expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf
    wide = expected.float()
    allowed = max(torch.finfo(expected.dtype).eps, 1e-6) * wide.norm()
    # NaN, and results of zeros, which say nothing, are no agreement.
    error = float((found.float() - wide).norm() / allowed)
    return error if error == error else math.inf


def _attempt(expected: Any, compute: Forward) -> float:
    """Distance of a kernel's result; infinite where the kernel cannot be compiled or launched on this GPU."""
    try:
        return _error(expected, compute())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.info("A fused kernel failed, so modules run as they are: %s", error)
        return math.inf


def _newest(x: Tensor) -> Tensor:
    """Newest token of each row, where there are several, of (B, T, ..., D)."""
    return x[:, -1:] if x.dim() > 2 and x.shape[1] > 1 else x


def _kind(module: nn.Linear, x: Tensor) -> Any:
    """Kind of a linear layer and its input's rows: all that its kernel depends on."""
    return type(module), module.weight.shape, module.bias is None, x.shape[:-1], x.dtype


def _products(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Results of linear layers over one input."""
    biases = [] if layers[0].bias is None else [each.bias for each in layers]
    return linears(x, [each.weight for each in layers], biases)


def _is_norm(module: nn.Module) -> bool:
    """True for a module of one vector that is written in Python: PyTorch's own norms are fused."""
    own = list(module.named_parameters(recurse=False))
    if len(own) != 1 or next(module.children(), None) is not None or type(module).__module__.startswith("torch."):
        return False
    name, weight = own[0]
    return name == "weight" and weight.dim() == 1 and _is_dense(weight)


def _linears(module: nn.Module) -> tuple[nn.Linear, ...] | None:
    """Linear layers of a gated MLP by the names that all such models have; None for other modules."""
    for names in (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")):
        found = [getattr(module, name, None) for name in names]
        if all(type(x) is nn.Linear and _is_own(x) and not _has_hooks(x) for x in found):
            inner = [x for x in module.modules() if x is not module and x not in found]
            dense = all(_is_dense(p) for x in found for p in x.parameters(recurse=False))  # type: ignore[union-attr]
            dense = dense and all(x.bias is None for x in found[:-1])  # type: ignore[union-attr]
            # The activation is between them, and nothing that has weights, or hooks, of its own.
            if dense and not any(_has_hooks(x) or next(x.parameters(), None) is not None for x in inner):
                return tuple(found)  # type: ignore[arg-type]
    return None


def _is_dense(x: Any) -> bool:
    """True for a parameter that is neither quantized nor spread over devices."""
    return type(x) is nn.Parameter and type(x.data) is Tensor and x.dtype in _DTYPES


def _is_plain_tensor(x: Any) -> bool:
    return type(x) is Tensor and x.dtype in _DTYPES


def _belongs(x: Any, weight: Tensor) -> bool:
    """True for a plain tensor that a kernel can multiply by the weight: dtype and device are the same."""
    return _is_plain_tensor(x) and x.dtype == weight.dtype and x.device == weight.device


def _is_own(module: nn.Module) -> bool:
    """False where another library, or the user's ``compile``, has replaced the module's forward.

    accelerate's replacement, which moves inputs to the module's device and then calls the forward, is none.
    """
    if module._compiled_call_impl is not None:
        return False
    replaced = vars(module).get("forward")
    if replaced is None:
        return True
    hook, own = vars(module).get("_hf_hook"), vars(module).get("_old_forward")
    moves = type(hook) is AlignDevicesHook and not hook.offload
    theirs = getattr(getattr(replaced, "func", None), "__module__", None) == AlignDevicesHook.__module__
    return moves and theirs and getattr(own, "__func__", None) is type(module).forward


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _with_globals(function: types.FunctionType, names: dict[str, Any]) -> Forward:
    """A function that finds other objects by these global names."""
    places = function.__globals__ | names
    found = types.FunctionType(
        function.__code__, places, function.__name__, function.__defaults__, function.__closure__
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found
