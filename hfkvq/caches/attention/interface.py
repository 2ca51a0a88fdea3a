"""The attention and mask functions that Transformers finds under the name "hfkvq".

Dense keys and values, of prompts and of plain tensors that are none of ours, go to stock sdpa where it has every
argument; else to the modeling file's own eager attention. Causal prompts behind a context get no mask where flash
attention takes them: a mask of Q x T columns would rule out the fastest kernels, and query heads that share keys would
each get a copy of them. Queries are rotated instead of the context.

In a recorded step, attention is one opaque operation a layer. A prompt of a compiled model is taken between the
compiler's graphs. All other calls on handles go to the layer's `forward`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.masks import step_mask
from hfkvq.kernels.step import MAX_STEP, step

from ..base import warn_once
from ..base.config_switch import NAME, implementation_before
from ..base.model_config import TOUCHES_KEYS
from ..base.recorded import is_captured, is_recorded
from ..layer_state.smoothing import note_queries
from ..layers.handle import layer_of
from ..steps.step_buffer import StepBuffer, StepKV
from ..store import SIDES, KVStore
from .mla import absorb_queries, values_from_latents


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


WITHOUT_CUDNN = _WithoutCudnn()


def is_plain(arguments: AttentionArguments, columns: int, dropout: float, given: dict[str, Any]) -> bool:
    """True if a call is causal, aligned to the newest token, and nothing else; ``given`` is what the model adds."""
    if arguments.mask is not None or not arguments.causal or arguments.softcap or dropout:
        return False
    if arguments.sinks is not None or arguments.bias is not None:
        return False
    return not given.get("output_attentions") and (given.get("sliding_window") or columns) >= columns


def flash_takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """True if `lower_right` takes these without a mask: flash attention does, and none of them gets a gradient."""
    if not query.is_cuda or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values))):
        return False
    dim = query.shape[3]
    asked = SDPAParams(query, keys, values, None, 0.0, False, True)
    return values.shape[3] == dim and dim % 8 == 0 and can_use_flash_attention(asked)


def lower_right(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention (B, Hq, Q, D) of the newest Q tokens of dense keys and values (B, H, T, D)."""
    bias = causal_lower_right(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, bias, scale=scaling, enable_gqa=True)  # type: ignore[arg-type]


def attend_layer(layer: Any, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
    """Attention of a prompt that a layer has been given, behind what it holds; of `is_plain` calls: (B, Hq, Q, D).

    None where there is nothing before, or where it has to go another way.
    """
    new, tokens = layer.staged, layer.staged_length
    before = layer.columns - tokens
    if new is None or not before or tokens <= MAX_STEP or query.shape[2] != tokens:
        return None
    if layer.window or layer.latents or layer.evicted or not flash_takes(query, *new):
        return None
    if layer.buffer is not None:
        layer.buffer.close()
    return attend_store(layer.held(), layer.smoothed_query(query), new, before, arguments.scaling)


def attend_store(store: KVStore, query: Tensor, new: tuple[Tensor, Tensor], columns: int, scaling: float) -> Tensor:
    """Attention of the newest tokens over a store's ``columns``, which are dequantized for it, and themselves.

    ``query`` (B, Hq, Q, D) is of the newest Q tokens; their keys and values (B, H, Q, D) are not rotated.
    """
    form, total = store.format, columns + query.shape[2]
    keys, values = (store.dense_before(x, side, total, back=False) for side, x in zip(SIDES, new, strict=True))
    out = lower_right(kernels.hadamard(query, form.rotate_keys), keys, values, scaling)
    return kernels.hadamard(out, form.rotate_values)


def dense_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    arguments: AttentionArguments,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over dense keys and values, as the model would do it without us.

    Args:
        module: the attention module.
        query: (B, Hq, Q, D), after RoPE; keys and values are (B, H, T, D) and (B, H, T, Dv).
        arguments: of the call; no mask that is causal is aligned to the newest token.
        **kwargs: of the call, as the model gave them.

    Returns:
        (B, Q, Hq, Dv), and the probabilities where the model's own attention gives them.
    """
    queries, columns, mask, scaling = query.shape[2], keys.shape[2], arguments.mask, arguments.scaling
    stock = not arguments.softcap and arguments.sinks is None and not kwargs.get("output_attentions")
    if mask is None and arguments.causal and queries > 1 and (queries < columns or not stock):
        if is_plain(arguments, columns, dropout, kwargs) and flash_takes(query, keys, values):
            return lower_right(query, keys, values, scaling).transpose(1, 2), None
        # Without a mask stock sdpa would align the triangle to the upper left.
        mask = torch.ones(queries, columns, dtype=torch.bool, device=query.device).tril(columns - queries)[None, None]
        window = kwargs.get("sliding_window")
        if window:
            mask = mask.triu(columns - queries - window + 1)
    if mask is not None and not mask.is_floating_point() and mask.dtype != torch.bool:
        mask = mask.bool()
    if stock:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, keys, values, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if mask is not None and mask.dtype == torch.bool:
        shape, lowest = torch.broadcast_shapes(mask.shape, (1, 1, queries, columns)), torch.finfo(query.dtype).min
        mask = torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~mask, lowest)
    return eager(module, query, keys, values, mask, dropout=dropout, scaling=scaling, **kwargs)


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def prompt_outside(
    module: torch.nn.Module,
    query: Tensor,
    buffer: StepBuffer,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    more: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention of a prompt in a compiled model: taken as by an eager forward, between the compiler's graphs."""
    layer = buffer.layer
    key, value = layer.update(keys, values)
    # A mask may have the capacity's columns.
    mask = None if mask is None else mask[..., layer.seen - layer.columns : layer.seen]
    return hfkvq_attention(module, query, key, value, mask, **more)


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
        query: (B, Hq, Q, D), after RoPE.
        key: handle or tensor (B, H, T, D); a handle of latents (B, 1, T, R), see `hfkvq.caches.attention.mla`.
        value: handle or tensor (B, H, T, Dv); of latents, handle of their rotary parts.
        attention_mask: what `hfkvq_mask` returned, or the user's own 4D mask.
        scaling: factor on the logits; 1/sqrt(D) if None.
        **kwargs: ``softcap``, ``s_aux`` or ``sinks``, ``position_bias`` are honoured.

    Returns:
        (B, Q, Hq, Dv) and None.
    """
    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    softcap = kwargs.get("softcap") or 0.0
    arguments = AttentionArguments(scaling, attention_mask, softcap, sinks, kwargs.get("position_bias"), causal)
    layer: Any = key.buffer.layer if isinstance(key, StepKV) else layer_of(key, value)
    if layer is None:
        note_queries(module, query, key.shape[1], bool(arguments.softcap) or sinks is not None)
        return dense_attention(module, query, key, value, arguments, dropout, **kwargs)
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        _refuse_weights(module)
    # Autocast may cast what is stored, and not what asks for it.
    query = query.to(layer.dtype)
    if isinstance(key, StepKV):
        # A step takes any mask that can be broadcast.
        arguments = (arguments.explicit(query, 1) if query.shape[2] <= MAX_STEP else arguments).biased()
        # Steps have one query, or up to 16 without a mask, once every row has tokens: a row's first tokens may be
        # padding, and so may any of several, if there is a mask. With padding within rows, generate makes no masks
        # outside the graph, which is when trims run.
        buffer, queries = key.buffer, query.shape[2]
        few = queries == 1 or (not buffer.trims and arguments.mask is None and queries <= MAX_STEP)
        if not few or not buffer.sync.ready or (buffer.trims and buffer.sync.holes):
            if is_captured():
                raise RuntimeError(
                    "A CUDA graph cannot take this step: it is a prompt, or one whose mask hides new tokens."
                )
            given = key.keys, key.values, attention_mask, kwargs | {"dropout": dropout, "scaling": scaling}
            return prompt_outside(module, query, buffer, *given)  # pyright: ignore[reportCallIssue]
    latents = layer.latents
    asked, after = query, None
    if latents:
        asked = absorb_queries(module, query) if query.shape[2] <= MAX_STEP else query
        after = partial(values_from_latents, module)

    def dense() -> Tensor:
        if is_plain(arguments, layer.columns, dropout, kwargs):
            found = attend_layer(layer, query, arguments)
            if found is not None:
                return found
        keys, values = key.materialize(), value.materialize()  # type: ignore[attr-defined]
        if latents:
            keys, values = type(module).expand_kv(module, keys, values)  # type: ignore[attr-defined]
        with WITHOUT_CUDNN if query.shape[2] <= MAX_STEP else contextlib.nullcontext():
            found, _ = dense_attention(module, query, keys, values, arguments, dropout, **kwargs)
        return found.transpose(1, 2)

    if isinstance(key, StepKV):
        buffer, keys, mask = key.buffer, key.keys, arguments.mask
        assert buffer.tensor is not None, "initialized before"
        if buffer.queries is not None:
            buffer.queries.note(asked, keys.shape[2], arguments)
        if layer.smoothing is not None:
            asked, keys = kernels.smooth(asked, keys, layer.smoothing.vectors)
        # One opaque operation.
        out = step(asked, keys, key.values, mask, sinks, buffer.tensor, buffer.pages, scaling, softcap, buffer.spec)
        out = out if after is None else after(out)
    else:
        if not arguments.causal:
            arguments = arguments.explicit(query, key.shape[2])
        out = layer.forward(asked, arguments, dense, attention_mask, after)
    return out.transpose(1, 2).contiguous(), None


def _refuse_weights(module: torch.nn.Module) -> None:
    """Tells a user who asks for attention weights that pages give none, by an error where the model would give them."""
    remedy = "with attn_implementation='eager' and a cache made with attach=False, the model's own attention gives them"
    if implementation_before(module.config) == "eager":
        raise ValueError(
            f"output_attentions: got True, but attention over compressed pages gives no weights; {remedy}. Call "
            "reset() before this cache is used again."
        )
    warn_once(f"output_attentions: attention over compressed pages gives no weights, as sdpa gives none; {remedy}.")


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
        plain = _is_plain_mask(mask_function)
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
        config = kwargs.get("config")
        # PaliGemma's modules are not causal. Models that add to their masks say so (``allow_is_causal_skip``), but Doge
        # with newer releases only.
        adds = (
            getattr(config, "use_bidirectional_attention", False) or getattr(config, "model_type", None) in TOUCHES_KEYS
        )
        plain = allow_is_causal_skip and not adds and mask_function is causal_mask_function
        # A prompt's queries, and the newest columns theirs; of a step nobody asks the device.
        plain = plain and not is_recorded() and not isinstance(q_offset, Tensor) and q_length > MAX_STEP
        if plain and q_offset + q_length == kv_offset + kv_length:
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


_WINDOW = sliding_window_causal_mask_function(1)


def _codes(mask_function: Any) -> list[Any]:
    """Code objects of a mask function and of the functions that it joins."""
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    joined = next((each for each in cells if isinstance(each, tuple)), ())
    return [getattr(each, "__code__", each) for each in (mask_function, *joined)]


def _is_plain_mask(mask_function: Any) -> bool:
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
    return fits and _is_plain_mask(mask_function)


def register() -> None:
    """Adds one key to each of Transformers' two tables; changes no other."""
    AttentionInterface.register(NAME, hfkvq_attention)
    AttentionMaskInterface.register(NAME, hfkvq_mask)
