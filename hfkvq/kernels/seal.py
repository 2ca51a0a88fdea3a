"""Seal: quantize tokens into their pages. The contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import define, triton_slot
from .pages import PageFormat, Side
from .quantize import quantize_pages


@define("seal", mutates=("parts",))
def _seal(
    parts: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    widths: Tensor | None,
    fmt: str,
    side: str,
) -> None:
    form = PageFormat.parse(fmt)
    page = form.page_size
    step = page if form.axis == "channel" and form.bits < 8 else 1
    due = torch.arange(0, index.shape[1], step, device=index.device) < new[:, None]
    row, block = due.nonzero(as_tuple=True)
    token = count.long()[row] + block * step
    ids = table.long()[row, token // page]
    columns = index.long().unflatten(1, (-1, step))[row, block]
    # (N, H, step, D): only what is due, whatever the other rows do.
    x = source.transpose(1, 2)[row[:, None], columns].transpose(1, 2)
    if step > 1:
        chosen = None if widths is None else widths[row, :, block]
        for part, made in zip(
            parts, quantize_pages(x, form, "keys" if side == "keys" else "values", chosen), strict=True
        ):
            part[ids] = made
        return
    slot = token % page
    for name, part, made in zip(form.names, parts, quantize_pages(x, form, "keys"), strict=True):
        if form.bits == 8 and name == "codes":
            part.view(torch.uint8)[ids, :, slot] = made[:, :, 0].view(torch.uint8)
        elif name != "codes":
            part[ids, :, :, slot] = made[..., 0]
        elif side == "keys" or form.bits == 16:
            part[ids, :, slot] = made[:, :, 0].to(part.dtype)
        else:
            part[ids, :, :, slot] = made[:, :, 0]


@_seal.register_fake
def _(
    parts: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    widths: Tensor | None,
    fmt: str,
    side: str,
) -> None:
    return None


triton_slot("seal", "seal:seal_triton")


def seal(
    parts: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    widths: Tensor | None,
    fmt: PageFormat,
    side: Side,
) -> None:
    """Quantizes tokens of ``source`` into pages: run token ``count[b] + j`` becomes ``source[b, :, index[b, j]]``.

    Rows are independent and may have nothing due; a step launches the same work whatever the counts. Formats per
    channel seal whole pages (``count`` and ``new`` are multiples of G); formats per token may begin and end inside one.

    Args:
        parts: tensors of one side, in the order of ``fmt.names``; written in place.
        table: i32 (B, n), page reserved for each block.
        count: i32 (B,), tokens the run already has. Not changed here, since keys and values both read it.
        new: i32 (B,), tokens to add, at most ``index.shape[1]``.
        source: (B, H, L, D), any float dtype, in the basis of the store.
        index: i32 (B, m), column of ``source`` of each new token; anything beyond ``new``. m is a multiple of G for
            formats per channel.
        widths: u8 (B, H, m/G, D), bits of each channel of each new page, or None (see `quantize_pages`).
        fmt: the page format.
        side: "keys" or "values".
    """
    _seal(list(parts), table, count, new, source, index, widths, fmt.spec, side)
