"""The attention and mask functions that Transformers finds under the name "hfkvq"."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hfkvq.kernels.masks import has_room, step_mask

from .handle import layer_of
from .recorded import is_captured, is_recorded
from .static import StaticKVLayer
from .store import MAX_STEP
from .traced import StepKV, traced_attention

NAME = "hfkvq"
"""Contains none of the words Transformers reads a meaning into ("flash", "sdpa", "flex_attention", "/", "paged|")."""


def hfkvq_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attends to the pages behind handles; to plain tensors as the model would without us.

    Args:
        module: the attention module.
        query: (B, Hq, Q, D), after RoPE.
        key: handle or tensor (B, H, T, D).
        value: handle or tensor (B, H, T, Dv).
        attention_mask: what `hfkvq_mask` returned, or the user's own 4D mask.
        dropout: for plain tensors.
        scaling: factor on the logits; 1/sqrt(D) if None.
        **kwargs: ``softcap``, ``s_aux`` or ``sinks``, ``position_bias`` are honoured.

    Returns:
        (B, Q, Hq, Dv) and None.
    """
    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if isinstance(key, StepKV):
        return _traced(module, query, key, attention_mask, scaling, kwargs), None
    layer = layer_of(key, value)
    if layer is None:
        return _plain(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if layer.steps_plainly:
        # Other masks differ from step to step.
        plain = attention_mask is None or has_room(attention_mask)
        if plain and kwargs.get("position_bias") is None and _sinks(kwargs) is None:
            out = layer.plain_step(query, scaling, kwargs.get("softcap") or 0.0, attention_mask)
            if out is not None:
                return out, None
    elif isinstance(layer, StaticKVLayer) and layer.takes_step(query.shape[2], attention_mask):
        bias, sinks = kwargs.get("position_bias"), _sinks(kwargs)
        mask = attention_mask if bias is None else _added(bias, attention_mask)
        out = layer.step_now(query, mask, scaling, kwargs.get("softcap") or 0.0, sinks)
        return out.transpose(1, 2).contiguous(), None
    pages = layer.begin(attention_mask, query.shape[2])
    mask = attention_mask
    if mask is None and query.shape[2] > 1 and not _causal(module, kwargs):
        mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=query.device)
    bias = kwargs.get("position_bias")
    # A prompt's own attention adds the bias itself.
    if bias is not None and (pages or "probs" in layer.scheme.needs):
        mask = _added(bias, mask)
    sinks = _sinks(kwargs)
    softcap = kwargs.get("softcap") or 0.0
    if pages:
        out = layer.attend(query, mask, scaling, softcap, sinks).transpose(1, 2).contiguous()
    else:
        keys, values = key.materialize(), value.materialize()  # type: ignore[union-attr]
        with _WITHOUT_CUDNN if query.shape[2] <= MAX_STEP else contextlib.nullcontext():
            out, _ = _plain(module, query, keys, values, attention_mask, dropout, scaling, **kwargs)
    layer.finish(query, mask, scaling, softcap, sinks)
    return out, None


class _WithoutCudnn:
    """A context in which PyTorch's attention goes without cuDNN, in whichever threads are in it.

    cuDNN plans anew for every length, which takes longer than a whole step.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._enabled = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._enabled)


_WITHOUT_CUDNN = _WithoutCudnn()


def _traced(
    module: torch.nn.Module,
    query: Tensor,
    key: StepKV,
    mask: Tensor | None,
    scaling: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention while a graph is recorded: (B, Q, Hq, Dv)."""
    causal = _causal(module, kwargs)
    if mask is None and 1 < query.shape[2] <= MAX_STEP and not causal:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
    bias = kwargs.get("position_bias")
    mask = mask if bias is None else _added(bias, mask)
    out = traced_attention(key, query, mask, scaling, kwargs.get("softcap") or 0.0, _sinks(kwargs), causal)
    return out.transpose(1, 2).contiguous()


def _sinks(kwargs: dict[str, Any]) -> Tensor | None:
    return kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")


def _causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """What no mask means, as stock sdpa reads it."""
    asked = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def _added(bias: Tensor, mask: Tensor | None) -> Tensor:
    """A position bias as part of an additive mask."""
    if mask is None:
        return bias
    if mask.is_floating_point():
        return bias + mask
    return bias.masked_fill(~mask.bool(), torch.finfo(bias.dtype).min)


def _plain(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stock attention on plain tensors: sdpa, or the modeling file's own eager where sdpa lacks an argument."""
    queries, columns = query.shape[2], key.shape[2]
    if mask is None and 1 < queries < columns and _causal(module, kwargs):
        # Without a mask stock sdpa would align the triangle to the upper left.
        mask = torch.ones(queries, columns, dtype=torch.bool, device=query.device).tril(columns - queries)
        window = kwargs.get("sliding_window")
        if window:
            mask = mask.triu(columns - queries - window + 1)
        mask = mask[None, None]
    if mask is not None and not mask.is_floating_point() and mask.dtype != torch.bool:
        mask = mask.bool()
    special = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks"))
    if not special and not kwargs.get("output_attentions"):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if mask is None and queries > 1 and _causal(module, kwargs):
        mask = torch.ones(queries, columns, dtype=torch.bool, device=query.device).tril(columns - queries)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        shape, lowest = torch.broadcast_shapes(mask.shape, (1, 1, queries, columns)), torch.finfo(query.dtype).min
        mask = torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~mask, lowest)
    return eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)


def hfkvq_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of sdpa, with three changes.

    A plain causal decode step gets the 2D padding mask, copied once for all layers: stock code asks the device whether
    it is all ones, a synchronization in every step. And None is never returned for several queries on a longer cache,
    so that None always means causal, aligned to the newest token. A plain step of a cache of fixed capacity gets None.
    """
    if isinstance(q_offset, Tensor) and q_offset.dim() == 1:
        # Ours, of fixed capacity. Leading padding is not stored, so plain steps, which must look alike, need no mask.
        plain = mask_function is causal_mask_function
        if plain and q_length == 1 and attention_mask is not None and is_captured():
            # A step that is being captured is shown a mask only where it hides more than leading padding.
            return attention_mask[:, None, None, kv_offset : kv_offset + kv_length]
        if plain and (q_length == 1 or (attention_mask is None and is_recorded())):
            return None
        if not is_recorded() and q_length > 1:
            q_offset = kv_offset + kv_length - q_length
    elif q_length == 1 and mask_function is causal_mask_function and not isinstance(q_offset, Tensor):
        if attention_mask is None:
            return None
        columns = attention_mask[:, kv_offset : kv_offset + kv_length]
        if columns.shape[1] == kv_length:
            return columns[:, None, None, :] if torch.compiler.is_compiling() else step_mask(columns)
    if q_length > 1 and kv_length != q_length:
        allow_is_causal_skip = False
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def register() -> None:
    """Adds one key to each of Transformers' two tables; changes no other."""
    AttentionInterface.register(NAME, hfkvq_attention)
    AttentionMaskInterface.register(NAME, hfkvq_mask)
