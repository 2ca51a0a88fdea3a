"""The attention and mask functions that Transformers finds under the name "hfkvq".

In a recorded step, attention is one opaque operation a layer.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import AttentionInterface

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.masks import step_mask
from hfkvq.kernels.step import MAX_STEP, step

from ..base.config_switch import NAME
from ..base.model_config import TOUCHES_KEYS
from ..base.recorded import is_captured, is_recorded
from ..layer_state.base import LayerBase
from ..layer_state.smoothing import note_queries
from ..layers.handle import layer_of
from ..steps.device_steps import StepKV
from ..steps.step_buffer import OWNERS
from .dense import WITHOUT_CUDNN, attend_layer, dense_attention, is_plain
from .mla import absorb_queries, expand_latents, values_from_latents

# Older releases have no such tag, and no graphs in parts either.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


@torch.library.custom_op("hfkvq::prompt", mutates_args=("buffer",), tags=_TAGS)
def _prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    buffer: Tensor,
    scaling: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    owner = OWNERS.get(buffer.data_ptr())
    if owner is None:
        raise RuntimeError("hfkvq::prompt: this buffer belongs to no cache layer; pass the layer's own.")
    return _attend_prompt(owner.layer, q, k, v, AttentionArguments(scaling, mask, softcap, sinks, None, causal))


@_prompt.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[-1]))


def _attend_prompt(
    layer: LayerBase, query: Tensor, keys: Tensor, values: Tensor, arguments: AttentionArguments
) -> Tensor:
    """Takes a prompt as an eager forward would: (B, Hq, Q, Dv). A mask may have the capacity's columns."""
    layer.update(keys, values)
    if arguments.mask is not None:
        arguments = arguments._replace(mask=arguments.mask[..., layer.seen - layer.columns : layer.seen])

    def dense() -> Tensor:
        found, _ = dense_attention(None, query, layer.dense("keys"), layer.dense("values"), arguments)
        return found.transpose(1, 2)

    return layer.forward(query, arguments.explicit(query, layer.columns), dense, arguments.mask).contiguous()


def recorded_attention(new: StepKV, query: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attention in a recorded step: one opaque operation, (B, Hq, Q, D) to (B, Hq, Q, Dv).

    One query is a step, and so are up to 16 without a mask, once every row has tokens. Else it is a prompt, whose
    operation does what an eager prompt does, outside CUDA graphs.
    """
    steps, queries = new.steps, query.shape[2]
    buffer, sync = steps.buffer, steps.sync
    assert buffer.tensor is not None, "initialized before"
    if queries <= MAX_STEP:
        # A step takes any mask that can be broadcast.
        arguments = arguments.explicit(query, 1)
    scaling, mask, softcap, sinks, _, causal = arguments.biased()
    # The first tokens of a row may be padding; and so may any of several, if there is a mask.
    several = not steps.trims and mask is None and queries <= MAX_STEP
    # With padding within rows, generate makes no masks outside the graph, which is when trims run.
    unwatched = steps.trims and sync.holes
    if sync.ready and (queries == 1 or several) and not unwatched:
        memory = buffer.tensor, buffer.pages
        keys, smoothing = new.keys, steps.layer.smoothing
        if smoothing is not None:
            query, keys = smoothing.both(query, keys)
        return step(query, keys, new.values, mask, sinks, *memory, scaling, softcap, buffer.spec)
    if is_captured():
        raise RuntimeError("A CUDA graph cannot take this step: it is a prompt, or one whose mask hides new tokens.")
    return _prompt(query, new.keys, new.values, mask, sinks, buffer.tensor, scaling, softcap, causal)


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
        key: handle or tensor (B, H, T, D); a handle of latents (B, 1, T, R), see `hfkvq.caches.attention.mla`.
        value: handle or tensor (B, H, T, Dv); of latents, handle of their rotary parts.
        attention_mask: what `hfkvq_mask` returned, or the user's own 4D mask.
        dropout: for plain tensors.
        scaling: factor on the logits; 1/sqrt(D) if None.
        **kwargs: ``softcap``, ``s_aux`` or ``sinks``, ``position_bias`` are honoured.

    Returns:
        (B, Q, Hq, Dv) and None.
    """
    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    arguments = AttentionArguments(
        scaling,
        attention_mask,
        kwargs.get("softcap") or 0.0,
        sinks,
        kwargs.get("position_bias"),
        _causal(module, kwargs),
    )
    layer: Any = key.steps.layer if isinstance(key, StepKV) else layer_of(key, value)
    if layer is None:
        note_queries(module, query, key.shape[1], bool(arguments.softcap) or sinks is not None)
        return dense_attention(module, query, key, value, arguments, dropout, **kwargs)
    latents, tiles = layer.latents, key.tiles  # type: ignore[attr-defined]
    asked = absorb_queries(module, query) if latents and query.shape[2] <= MAX_STEP else _in_rows(query, tiles)
    after = partial(values_from_latents, module) if latents else partial(_in_tiles, tiles=tiles)

    def dense() -> Tensor:
        if tiles == 1 and is_plain(arguments, layer.columns, dropout, kwargs):
            found = attend_layer(layer, query, arguments)
            if found is not None:
                return found
        keys, values = key.materialize(), value.materialize()  # type: ignore[attr-defined]
        if latents:
            keys, values = expand_latents(module, keys, values)
        with WITHOUT_CUDNN if query.shape[2] <= MAX_STEP else contextlib.nullcontext():
            found, _ = dense_attention(module, query, keys, values, arguments, dropout, **kwargs)
        return found.transpose(1, 2)

    if isinstance(key, StepKV):
        out = after(recorded_attention(key, asked, arguments))
    else:
        out = layer.forward(asked, arguments.explicit(query, key.shape[2]), dense, attention_mask, after)
    return out.transpose(1, 2).contiguous(), None


def _in_rows(query: Tensor, tiles: int) -> Tensor:
    """Queries (B, Hq, Q, D) of heads that come ``tiles`` times one after another, those of each KV head in a row."""
    return query if tiles == 1 else query.unflatten(1, (tiles, -1)).transpose(1, 2).flatten(1, 2)


def _in_tiles(x: Tensor, tiles: int) -> Tensor:
    """The inverse, of what attention gives."""
    return x if tiles == 1 else x.unflatten(1, (-1, tiles)).transpose(1, 2).flatten(1, 2)


def _causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Causality of a call without a mask, as stock sdpa reads it."""
    asked = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


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
    """The mask of sdpa, with four changes.

    A plain causal decode step, also of a window, gets the 2D padding mask, copied once for all layers: stock code asks
    the device whether it is all ones, a synchronization in every step. And None always means causal, aligned to the
    newest token: a plain prompt behind a cache, of which nothing is padding, gets it in place of a mask of its tokens
    times all columns, and other queries on a longer cache do not. A plain step of a cache of fixed capacity gets None.
    """
    if isinstance(q_offset, Tensor) and q_offset.dim() == 1:
        # Ours, of fixed capacity. Leading padding is not stored, so plain steps, which must look alike, need no mask.
        plain = _is_plain(mask_function)
        if plain and q_length == 1 and attention_mask is not None and is_captured():
            # A step that is being captured is shown a mask only where it hides more than leading padding.
            return attention_mask[:, None, None, kv_offset : kv_offset + kv_length]
        if plain and (q_length == 1 or (attention_mask is None and is_recorded())):
            return None
        if not is_recorded() and q_length > 1:
            q_offset = kv_offset + kv_length - q_length
    elif q_length == 1 and _sees_all(mask_function, kv_length, kv_offset, q_offset, kwargs.get("local_size")):
        if attention_mask is None:
            return None
        columns = attention_mask[:, kv_offset : kv_offset + kv_length]
        if columns.shape[1] == kv_length:
            return columns[:, None, None, :] if torch.compiler.is_compiling() else step_mask(columns)
    if q_length > 1 and kv_length != q_length:
        plain = allow_is_causal_skip and not _needs_masks(kwargs.get("config"))
        plain = plain and mask_function is causal_mask_function
        if plain and _is_newest(q_length, kv_length, q_offset, kv_offset):
            columns = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
            # The device is asked once a forward, as stock code does for a first prompt.
            if columns is None or (columns.shape[1] == kv_length and bool(columns.all())):
                return None
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


def _needs_masks(config: Any) -> bool:
    """True if none is not causal, or is not taken: PaliGemma's modules are not causal, and Doge adds to its masks.

    Models that add to theirs say so (``allow_is_causal_skip``), but Doge with newer releases only.
    """
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    return bool(bidirectional) or getattr(config, "model_type", None) in TOUCHES_KEYS


def _is_newest(q_length: int, kv_length: int, q_offset: Any, kv_offset: int) -> bool:
    """True if these are a prompt's queries, and the newest columns theirs; of a step nobody asks the device."""
    if is_recorded() or isinstance(q_offset, Tensor) or q_length <= MAX_STEP:
        return False
    return q_offset + q_length == kv_offset + kv_length


_WINDOW = sliding_window_causal_mask_function(1)


def _codes(mask_function: Any) -> list[Any]:
    """Code objects of a mask function and of the functions that it joins."""
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    joined = next((each for each in cells if isinstance(each, tuple)), ())
    return [getattr(each, "__code__", each) for each in (mask_function, *joined)]


def _is_plain(mask_function: Any) -> bool:
    """True if a mask is causal, or that of a window, and nothing else; layers of ours know their windows."""
    if mask_function is causal_mask_function:
        return True
    # Compilers do not follow closures; what they trace gets a mask.
    return not torch.compiler.is_compiling() and _codes(mask_function) == _codes(_WINDOW)


def _sees_all(mask_function: Any, kv_length: int, kv_offset: int, q_offset: Any, window: int | None) -> bool:
    """True if the one query sees all columns but padding."""
    if isinstance(q_offset, Tensor):
        return False
    if mask_function is causal_mask_function:
        return True
    fits = window is not None and kv_length <= window and kv_offset + kv_length == q_offset + 1
    return fits and _is_plain(mask_function)


def register() -> None:
    """Adds one key to each of Transformers' two tables; changes no other."""
    AttentionInterface.register(NAME, hfkvq_attention)
    AttentionMaskInterface.register(NAME, hfkvq_mask)
