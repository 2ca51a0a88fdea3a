"""Append: the tokens of a step join the windows. The contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .decode import LENGTH
from .dispatch import launched
from .hadamard import hadamard
from .pages import StoreFormat


@launched("append:append_triton")
def _append(
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    rotate_keys: int,
    rotate_values: int,
    rows: Tensor | None = None,
) -> None:
    tokens, device = keys.shape[2], keys.device
    length = counters[LENGTH, :, None]
    if rows is not None:
        length = length - tokens
    where = torch.arange(keys.shape[0], device=device) if rows is None else rows.long()
    at = where[:, None]
    token = length + torch.arange(tokens, device=device)
    # On CPUs, which may be asked, most steps have nothing for the sink.
    past_sink = device.type == "cpu" and bool((length >= windows[0].shape[2]).all())
    for i, (x, block) in enumerate(((keys, rotate_keys), (values, rotate_values))):
        sink, tail = windows[i], windows[i + 2]
        x = hadamard(x, block).to(sink.dtype)
        slot = (token - sink.shape[2]) % tail.shape[2]
        if past_sink:
            tail[at, :, slot] = x.transpose(1, 2)
            continue
        # Slots of consecutive tokens differ, so those that belong in the sink put back what they find.
        held = (token < sink.shape[2])[:, :, None, None]
        tail[at, :, slot] = torch.where(held, tail[at, :, slot], x.transpose(1, 2))
        if sink.shape[2]:
            column = torch.arange(sink.shape[2], device=device) - length
            new = ((column >= 0) & (column < tokens))[:, None, :, None]
            column = column.clamp(0, tokens - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
            sink[where] = torch.where(new, x.gather(2, column), sink[where])
    if rows is None:
        # The count is one operation, and the last, so that a call that fails counts nothing.
        counters[LENGTH].add_(tokens)


def append(
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    store: StoreFormat,
    rows: Tensor | None = None,
) -> None:
    """Appends a few tokens to sink and tail, in place, and counts them: the whole of a step's writing.

    Keys and values are rotated (`hadamard`, rounded once). A row's token x goes to the sink if ``x < sink`` and to slot
    ``(x - sink) mod W`` of the tail otherwise; the first new one has ``x = length``. Nothing is sealed.

    Args:
        keys: (B, H, t, Dk), after RoPE, not rotated, any strides; t at most the shorter tail's W.
        values: (B, H, t, Dv), likewise.
        counters: i32 (2 + 2*runs, B), see `decode_attention`; ``length`` grows by t.
        windows: sink keys (B, H, S, Dk), sink values, tail keys (B, H, W, Dk), tail values; dtype of the keys.
        rows: i32 (B,), the row of the windows that each row has, of any number of them; None where row b has row b.
            Given, ``length`` counts the new tokens already and stays as it is: layers may share the counters.

    Raises:
        ValueError: more tokens than a tail has slots.
    """
    room = min(windows[2].shape[2], windows[3].shape[2])
    if keys.shape[2] > room:
        raise ValueError(f"keys: got {keys.shape[2]} tokens, allowed at most {room}, the slots of the shorter tail.")
    if keys.shape[2]:
        _append(keys, values, counters, windows, store.rotate_keys, store.rotate_values, rows)
