"""Seal: quantize tokens into their pages. The contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import Keep, launched
from .groups import F16_MAX, Groups
from .norms import BALANCE, Balance, page_norms, tree_sum
from .pages import PageFormat, Side
from .quantize import quantize_pages
from .trellis import centre, own_scale

RULES = ("k_abs", "range", "error")
"""Rules by which sealing itself can choose the raised channels; `range_rule` has parameters."""

SCORE_MAX = 1e18
"""Scores of ranges end here, so that their squares stay finite in f32."""


def range_rule(over16: float = 0.0, over4: float = 0.0, divisor: float = 1.0) -> str:
    """The rule "range" with thresholds: channels above ``over16`` get 16 bits, else 4 above ``over4``, as room allows.

    Args:
        over16: least score, exclusive, of a channel at 16 bits.
        over4: of one at 4 bits.
        divisor: what scores are divided by.
    """
    return f"range:{over16!r}:{over4!r}:{divisor!r}"


class Rule(NamedTuple):
    """A rule and its parameters: see `range_rule`."""

    name: str
    over16: float = 0.0
    over4: float = 0.0
    divisor: float = 1.0


def parse_rule(choose: str) -> Rule:
    """Rule that a text names; raises ValueError where it is unknown."""
    name, *numbers = choose.split(":")
    try:
        if name in RULES and not numbers:
            return Rule(name)
        if name == "range" and len(numbers) == 3:
            return Rule(name, *map(float, numbers))
    except ValueError:
        pass
    known = ", ".join(map(repr, RULES))
    raise ValueError(f"choose: got {choose!r}, allowed None, {known} or what range_rule returns.")


def channel_widths(keys: Tensor, fmt: PageFormat, choose: str, q_abs: Tensor | None = None) -> Tensor:
    """Widths by a rule: in every page and head, the channels of greatest score get the widest widths.

    A score is the sum of |K| over the page's tokens ("k_abs", Kitty's equation 2), times ``q_abs``, in f32; or the
    squared error that the channel would have at the page's own width, fitted as the format says, times ``q_abs``
    squared ("error"). A score that is not positive, or NaN, is 0. Scores count without the last ``ceil(log2 D)`` bits
    of their mantissa, and of equal ones the lower channel comes first: a strict order, the same everywhere.

    Or the range over the page's tokens that are finite in f16, over three (MixKVQ's equation 7), times ``q_abs``
    ("range"): to the last bit, and only channels above thresholds rise, see `range_rule`; those that find no room at 16
    bits come first at 4.

    Args:
        keys: (B, H, n, G, D), any float dtype: n whole pages.
        fmt: the page format, whose ``raised`` says how many channels get which width.
        choose: one of `RULES`, or what `range_rule` returns.
        q_abs: f32 (B, H, D), factor of each channel's score, or None.

    Returns:
        u8 (B, H, n, D).
    """
    rule = parse_rule(choose)
    name = rule.name
    if name == "range":
        return _widths_of_ranges(keys, fmt, q_abs, rule)
    x, head_dim = keys.float(), keys.shape[-1]
    if name == "error" and fmt.trellis:
        # A walk loses of a channel in proportion to the square of its scale.
        score = own_scale(centre(x.transpose(-2, -1).flatten(1, 2))[0]).float().square()
        score = score.unflatten(1, keys.shape[1:3]).squeeze(-1)
    elif name == "error":
        groups = Groups(x.unflatten(-2, (-1, fmt.group_size)), float(2**fmt.bits - 1), -2)
        score = tree_sum(groups.squares(*groups.scales(fmt.fit)).squeeze(-2), -2).squeeze(-2)
    else:
        score = tree_sum(x.abs(), -2).squeeze(-2)
    if q_abs is not None:
        weight = q_abs.float()[:, :, None]
        score = score * weight * weight if name == "error" else score * weight
    score = torch.where(score > 0, score, 0.0)
    last = (1 << (head_dim - 1).bit_length()) - 1
    channel = torch.arange(head_dim, dtype=torch.int32, device=keys.device)
    # Floats that are not negative are ordered as their bits are.
    order = ((score.view(torch.int32) & ~last) | (last - channel)).argsort(-1, descending=True)
    widths = torch.full_like(score, fmt.bits, dtype=torch.uint8)
    at = 0
    for width, count in sorted(fmt.raised, reverse=True):
        widths.scatter_(-1, order[..., at : at + count], width)
        at += count
    return widths


def _widths_of_ranges(keys: Tensor, fmt: PageFormat, q_abs: Tensor | None, rule: Rule) -> Tensor:
    finite = keys.abs() <= F16_MAX
    low = torch.where(finite, keys, torch.inf).amin(-2).float()
    high = torch.where(finite, keys, -torch.inf).amax(-2).float()
    score = (high - low).clamp(min=0.0)
    # The divisor is a tensor: CUDA divides by a number by multiplying with its rounded reciprocal.
    score = score / torch.full_like(score, 3.0)
    if q_abs is not None:
        score = score * q_abs.float()[:, :, None]
    score = torch.where(score > 0, score, 0.0).clamp(max=SCORE_MAX)
    score = score / torch.full_like(score, rule.divisor)
    # Stable, so that of equal channels the lower one comes first.
    order = score.argsort(dim=-1, descending=True, stable=True)
    ranked, place = score.gather(-1, order), torch.arange(keys.shape[-1], device=keys.device)
    full = (ranked > rule.over16) & (place < fmt.raised_count(16))
    some = (ranked > rule.over4) & (place < full.sum(-1, keepdim=True) + fmt.raised_count(4))
    bits = torch.where(full, 16, torch.where(some, 4, fmt.bits)).to(torch.uint8)
    return torch.empty_like(bits).scatter_(-1, order, bits)


@launched("seal:seal_triton")
def _seal(
    source: Tensor,
    index: Tensor,
    parts: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    form: PageFormat,
    side: Side,
    choose: str,
    q_abs: Tensor | None,
    widths: Tensor | None,
    norm: Tensor | None,
    keep: Keep | None = None,
) -> None:
    page = form.page_size
    step = page if form.whole else 1
    due = torch.arange(0, index.shape[1], step, device=index.device) < new[:, None]
    row, block = due.nonzero(as_tuple=True)
    if not len(row):
        return
    token = count.long()[row] + block * step
    ids = table.long()[row, token // page]
    columns = index.long().unflatten(1, (-1, step))[row, block]
    # (N, H, step, D): only what is due, whatever the other rows do.
    x = source.transpose(1, 2)[row[:, None], columns].transpose(1, 2)
    if step > 1:
        chosen = None if widths is None else widths[row, :, block]
        if choose and form.raised:
            weight = None if q_abs is None else q_abs[row]
            chosen = channel_widths(x[:, :, None], form, choose, weight)[:, :, 0]
        own = None if norm is None else norm[row, :, block]
        made = quantize_pages(x, form, side, chosen, own)
        for part, new_part in zip(parts, made, strict=True):
            # Channels that stay whole come in float32 from pages that are made again.
            part[ids] = new_part.to(part.dtype)
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


def seal_side(
    parts: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    fmt: PageFormat,
    side: Side,
    rule: str | None = None,
    query: Tensor | None = None,
    balance: Balance = BALANCE,
    widths: Tensor | None = None,
    keep: Keep | None = None,
) -> None:
    """Quantizes tokens of ``source`` into pages: run token ``count[b] + j`` becomes ``source[b, :, index[b, j]]``.

    All of the library's pages are written here: normed ones are balanced before, and channels raised. Rows are
    independent and may have nothing due; a step launches the same work whatever the counts. Formats per channel and
    normed ones seal whole pages (``count`` and ``new`` are multiples of G); others may begin and end inside one.

    Args:
        parts: tensors of one side, in the order of ``fmt.names``; written in place.
        table: i32 (B, n), page reserved for each block.
        count: i32 (B,), tokens the run already has. Not changed here, since keys and values both read it.
        new: i32 (B,), tokens to add, at most ``index.shape[1]``.
        source: (B, H, L, D), any float dtype, in the basis of the store.
        index: i32 (B, m), column of ``source`` of each new token; anything beyond ``new``. m is a multiple of G where
            whole pages are sealed.
        rule: rule by which raised channels are chosen, see `channel_widths`; "" or None for none. Formats without
            raised channels ignore it.
        query: f32 (B, H, D), mean magnitudes of queries, which weigh channels under ``rule``; None for keys alone.
        balance: how normed pages are balanced, see `page_norms`.
        widths: u8 (B, H, m/G, D), bits of each channel of each new page, instead of a rule (see `quantize_pages`).
        keep: see `dispatch.Keep`; a call that takes nothing.

    Raises:
        ValueError: an unknown rule, or a rule and widths.
    """
    rule = rule if rule and fmt.raised else ""
    if rule:
        parse_rule(rule)
        if widths is not None:
            raise ValueError("rule: got a rule and widths; pass one of them.")
    norm = page_norms(source, index, fmt.axis, fmt.page_size, balance, new) if fmt.normed else None
    weight = query if rule else None
    _seal(source, index, parts, table, count, new, fmt, side, rule, weight, widths, norm, keep)
