"""Latent attention: models hand latents to the cache, and a step attends to them as they are.

Of the 17 classes of Transformers with latent attention each expands what the cache returns by its ``expand_kv``. Here
that is replaced, by instance, and passes handles on; the attention function then absorbs the matrices of keys into a
step's queries, and those of values into what comes out. Prompts are expanded as the model does it, a layer at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base import warn_once
from ..base.config_switch import NAME, on_restore
from ..layers.handle import LazyKV
from ..steps.step_buffer import StepKV


class _Expansion:
    """`expand_kv` of a module, which passes handles on; copies and pickles of the module have that of its class."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
        module = self._module
        handed = isinstance(kv_nope, StepKV) or (isinstance(kv_nope, LazyKV) and kv_nope.hfkvq_layer.latents)
        if handed and module.config._attn_implementation_internal == NAME:
            return kv_nope, k_rot
        return type(module).expand_kv(module, kv_nope, k_rot)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        """The class's own method: the module that is read has no other yet."""
        return getattr, (self._module, "expand_kv")


def patch_expand_kv(model: torch.nn.Module, config: Any) -> None:
    """Lets a model's modules pass handles on, until the switched config is given its old attention back."""
    for module in model.modules():
        if hasattr(type(module), "expand_kv"):
            vars(module)["expand_kv"] = _Expansion(module)
    known = weakref.ref(model)

    def undo() -> None:
        own = known()
        for module in () if own is None else own.modules():
            vars(module).pop("expand_kv", None)

    on_restore(config, id(model), undo)


def absorb_queries(module: Any, query: Tensor) -> Tensor:
    """Queries (B, Hq, Q, D) as they ask latents: (B, Hq, Q, R + rope), what is left of them behind."""
    size, (batch, heads, queries, _) = module.qk_nope_head_dim, query.shape
    keys = _matrices(module, query)[:, :size]
    own = query[..., :size].transpose(0, 1).reshape(heads, batch * queries, size)
    asked = torch.bmm(own, keys).view(heads, batch, queries, -1).transpose(0, 1)
    return torch.cat([asked, query[..., size:]], -1)


def values_from_latents(module: Any, means: Tensor) -> Tensor:
    """Outputs (B, Hq, Q, Dv) of means of latents (B, Hq, Q, R)."""
    batch, heads, queries, rank = means.shape
    values = _matrices(module, means)[:, module.qk_nope_head_dim :]
    own = means.transpose(0, 1).reshape(heads, batch * queries, rank)
    found = torch.bmm(own, values.mT).view(heads, batch, queries, -1).transpose(0, 1)
    bias = getattr(module.kv_b_proj, "bias", None)
    # A bias of keys adds the same to all logits of a query.
    return found if bias is None else found + bias.view(heads, 1, -1)[..., module.qk_nope_head_dim :]


def _matrices(module: Any, like: Tensor) -> Tensor:
    """(Hq, D + Dv, R): what makes keys without their rotary parts, and values, of a latent, for each head."""
    linear: Any = module.kv_b_proj
    plain = type(linear) is torch.nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks
    # Quantized weights may be tensors of a kind of their own.
    if plain and "forward" not in vars(linear) and type(linear.weight) is torch.nn.Parameter:
        weight = linear.weight
    else:
        warn_once(
            f"{type(module).__name__}: kv_b_proj (a {type(linear).__name__}) is not a plain linear layer, or has "
            "hooks, so its matrix is computed from unit vectors in each step."
        )
        eye = torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device)
        weight = linear(eye)
        bias = getattr(linear, "bias", None)
        weight = (weight if bias is None else weight - bias).T
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[-1])
