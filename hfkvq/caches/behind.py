"""Causal attention of a prompt's tokens behind a context, by PyTorch's own kernels and without a mask.

A mask of Q x T columns would rule out the fastest kernels, and query heads that share keys would each get a copy of
them. Flash attention aligns its causal mask to the newest token, so one call is enough. Behind long contexts cuDNN is
faster, but it aligns to the first token: there attention to the context, which every query sees whole, and causal
attention to the prompt's own tokens are computed apart and joined. Queries are rotated instead of the context.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments

from .once import say_once
from .store import MAX_STEP, SIDES, KVStore

PAYS = 1 << 31
"""Queries of all rows and heads times tokens of the context from which on cuDNN is asked for the context.

On an H200 it takes half of flash attention's time, but some 50 ms of planning for each length, which all layers share.
"""

PART = 1024
"""Queries that the context is attended with at a time: as fast as all at once, in less memory, and with one plan."""

LOST = 1 << 36
"""Queries times tokens of one length, summed over calls, from which on cuDNN takes it below `PAYS`, too.

By then flash attention has cost more than a plan would have: with 36 layers and 1k behind 32k, within the second
prompt. So chunks of equal length get a plan, and a length that never comes again pays for none.
"""

MOST_LENGTHS = 4096
"""Lengths that are remembered."""

_done: dict[tuple[Any, ...], int] = {}
"""Sum of queries (of all rows and heads) times tokens of the context by shape, dtype and device; the oldest first."""

_LOCK = threading.Lock()
"""Guards changes to `_done`, since a server may have several threads."""

Pair = tuple[Tensor, Tensor]
"""Keys (B, H, T, D) and values (B, H, T, D)."""


def is_plain(arguments: AttentionArguments, columns: int, dropout: float, given: dict[str, Any]) -> bool:
    """Whether a call is causal, aligned to the newest token, and nothing else; ``given`` is what the model adds."""
    if arguments.mask is not None or not arguments.causal or arguments.softcap or dropout:
        return False
    names = ("softcap", "s_aux", "sinks", "position_bias")
    if arguments.sinks is not None or arguments.bias is not None or any(given.get(name) is not None for name in names):
        return False
    return not given.get("output_attentions") and (given.get("sliding_window") or columns) >= columns


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_behind` takes these: as flash attention does, and of tensors that get no gradient."""
    if not query.is_cuda or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values))):
        return False
    dim = query.shape[3]
    return values.shape[3] == dim and dim % 8 == 0 and can_use_flash_attention(_asked(query, keys, values))


def attend_layer(layer: Any, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
    """Attention of a prompt that a layer has been given, behind what it holds; of `is_plain` calls.

    Args:
        layer: of the cache, that has been updated and has begun.
        query: (B, Hq, Q, D), after RoPE.
        arguments: of the call.

    Returns:
        (B, Hq, Q, D); None where there is nothing before, or where it has to go another way.
    """
    new, tokens = layer.staged, layer.staged_length
    before = layer.columns - tokens
    if new is None or not before or tokens <= MAX_STEP or query.shape[2] != tokens:
        return None
    if layer.window or layer.latents or layer.evicted or not takes(query, *new):
        return None
    if layer.buffer is not None:
        layer.buffer.close()
    query = layer.smoothed_query(query)
    return attend_store(layer.held(), query, new, before, arguments.scaling)


def attend_store(store: KVStore, query: Tensor, new: Pair, columns: int, scaling: float) -> Tensor:
    """Attention of the newest tokens over a store's ``columns``, which are dequantized for it, and themselves.

    Args:
        store: of the tokens before.
        query: (B, Hq, Q, D), of the newest Q tokens.
        new: of the Q tokens, not rotated.
        columns: tokens before.
        scaling: factor on the logits.

    Returns:
        (B, Hq, Q, D).
    """
    form = store.format
    if parts := parts_of(query, new, columns):
        keys, values = (store.dense(side, columns, back=False) for side in SIDES)
        return attend_apart(query, (keys, values), new, scaling, parts, form.rotate_keys, form.rotate_values)
    # In one tensor: one call, one output, and nothing to join.
    total = columns + query.shape[2]
    keys, values = (store.dense_before(x, side, total, back=False) for side, x in zip(SIDES, new, strict=True))
    out, _ = flash(kernels.hadamard(query, form.rotate_keys), keys, values, scaling, True)
    return kernels.hadamard(out, form.rotate_values, back=True)


def attend_behind(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention (B, Hq, Q, D) of the newest Q tokens of dense keys and values (B, H, T, D)."""
    columns = keys.shape[2] - query.shape[2]
    past, new = zip(*(x.tensor_split([columns], 2) for x in (keys, values)), strict=True)
    if parts := parts_of(query, new, columns):
        return attend_apart(query, past, new, scaling, parts)
    return flash(query, keys, values, scaling, True)[0]


def parts_of(query: Tensor, new: Pair, columns: int) -> list[tuple[slice, bool]]:
    """The queries in parts, and whether cuDNN attends to the ``columns`` before; none where it never does."""
    tokens = query.shape[2]
    parts = []
    for first in range(0, tokens, PART):
        some = query[:, :, first : first + PART]
        alike = tokens // PART if some.shape[2] == PART else 1
        parts.append((slice(first, first + PART), pays(some, new[0], columns, alike) and likes_cudnn(some, *new)))
    return parts if any(asks for _, asks in parts) else []


def attend_apart(
    query: Tensor,
    past: Pair,
    new: Pair,
    scaling: float,
    parts: list[tuple[slice, bool]],
    rotate_keys: int = 0,
    rotate_values: int = 0,
) -> Tensor:
    """Attention of the newest tokens over a context, which they all see, and themselves, causally; joined.

    Args:
        query: (B, Hq, Q, D), of the newest Q tokens.
        past: of T tokens before them, rotated.
        new: of the Q tokens, not rotated.
        scaling: factor on the logits.
        parts: of the queries, see `parts_of`.
        rotate_keys: rotation of the past keys, see `kernels.hadamard`; 0 for none.
        rotate_values: likewise of the past values.

    Returns:
        (B, Hq, Q, D).
    """
    out, sums = flash(query, *new, scaling, True)
    for part, asks in parts:
        turned, found = kernels.hadamard(query[:, :, part], rotate_keys), None
        if asks:
            # Strides belong to a plan, and a part's are the whole's.
            found = cudnn_or_none(turned.contiguous(), *past, scaling)
        more, more_sums = flash(turned, *past, scaling, False) if found is None else found
        more = kernels.hadamard(more, rotate_values, back=True)
        kernels.join(out[:, :, part], sums[:, :, part].contiguous(), more, more_sums)
    return out


def pays(query: Tensor, keys: Tensor, columns: int, alike: int = 1) -> bool:
    """Whether cuDNN's plan for this length pays, or has been made before; counts this call.

    Args:
        query: (B, Hq, Q, D).
        keys: (B, H, *, D), like those of the context.
        columns: tokens of the context.
        alike: calls of this length that a layer makes.
    """
    work = query.shape[:3].numel() * columns
    if work * alike >= PAYS:
        return True
    # Each device has plans of its own.
    length = (query.shape, keys.shape[1], columns, keys.dtype, keys.device)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        # No plan can be made during capture. The call before made one if it began at `LOST` or above.
        return _done.get(length, 0) - work >= LOST
    with _LOCK:
        done = _done.pop(length, 0)
        if len(_done) >= MOST_LENGTHS:
            del _done[next(iter(_done))]
        _done[length] = done + work
    return done >= LOST


def forget() -> None:
    """Lengths that were asked for: each is new again."""
    _done.clear()


def _asked(query: Tensor, keys: Tensor, values: Tensor) -> SDPAParams:
    return SDPAParams(query, keys, values, None, 0.0, False, True)


def likes_cudnn(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether cuDNN is the faster one: where PyTorch prefers it, too."""
    major, _ = torch.cuda.get_device_capability(query.device)
    return major in (9, 10) and can_use_cudnn_attention(_asked(query, keys, values))


def cudnn_or_none(query: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool = False) -> Pair | None:
    """Attention (B, Hq, Q, D) and log-sum-exps (B, Hq, Q) in f32, by cuDNN; ``causal`` is aligned to the upper left.

    None where cuDNN has no plan after all, which PyTorch does not know before it asks.
    """
    try:
        return _cudnn(query, keys, values, scaling, causal)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        say_once("cuDNN has no plan for long prompts here; flash attention takes them, more slowly.")
        return None


# PyTorch's public function does not give the log-sum-exps.


def _cudnn(query: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> Pair:
    ask = torch.ops.aten._scaled_dot_product_cudnn_attention
    found = ask(query, keys, values, None, True, 0.0, causal, scale=scaling)
    return found[0], found[1].reshape(query.shape[:3])


def flash(query: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> Pair:
    """Attention (B, Hq, Q, D) and log-sum-exps (B, Hq, Q) in f32; ``causal`` is aligned to the newest token."""
    ask = torch.ops.aten._scaled_dot_product_flash_attention
    found = ask(query, keys, values, 0.0, causal, scale=scaling)
    return found[0], found[1].reshape(query.shape[:3])
