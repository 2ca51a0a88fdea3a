"""Trellis codes: walks of least error through 256 states, 1 or 2 bits a number. The reference.

A state of 8 bits stands for two numbers (2 bits each) or four (1 bit): two by each product,
``y = (state * multiplier + addend) mod 2^32``, whose halves ``(y & MASK) ^ FLIP`` are f16. A state is the last 4 bits
of the one before and 4 new ones. Sixteen states are a *loop*: the first follows upon the last, so that a loop takes 64
bits and nothing else. QTIP (Tseng et al., arXiv:2406.11235) encodes weights like this, in longer loops, with one number
of such a product: the sum of its halves.

What is encoded has *lanes* with a scale each: the tokens of values, along channels, and the channels of keys, along the
page's tokens. A loop holds the numbers ``s * E + e`` (s < 8) of word e of two neighbouring lanes of each half of all
lanes, of 1-bit codes of each quarter. State s stands for number s of the first half's lanes, state ``8 + s`` for that
of the second half's; the second product is for the second quarter of a half. The words of neighbouring lanes, i16, are
one word of 32 bits: eight states, the first in its highest bits. The state before these is in the lowest bits of the
other half's word.

Loops are encoded by Viterbi's algorithm in two walks: a free one from the second half on finds where the ends meet,
and the second one begins and ends there. What is encoded is f16, so its products with states' numbers are exact in f32,
and costs are rounded where one is added: kernel and reference agree, whether products and sums are fused or not.

Keys have a mean beside their scale, and more bits for the channels that need them: what a walk leaves of these is
walked again, in 2 bits, with a scale that follows from the channel's own (`RATIO`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .groups import F16_MAX, F16_TINY

MULTIPLIER, ADDEND = 0xC0E2D8A5, 0xF2893F07
SECOND_MULTIPLIER, SECOND_ADDEND = 0x6CAD4A27, 0x0F21DDB6
MASK, FLIP = 0x8FFF8FFF, 0x38003800

SPREAD = 0.8761381
"""Root of the mean square of all numbers of states."""

RATIO = 0.625
"""Scale of a channel's second walk, in parts of its own: what a walk of 1 bit leaves of noise."""

FRACTION = 1024
"""Numbers count as so many parts of their lane's largest magnitude, numbers of states as so many parts of 1."""

FARTHEST = 16.0
"""Largest magnitude of a number of keys that is walked, in parts of its scale."""

FAR = 1e30
"""Cost of a walk that begins where it must not."""

ROWS = 2**13
"""Loops that are walked at a time."""


@lru_cache(maxsize=8)
def state_numbers(device: torch.device, bits: int = 2) -> Tensor:
    """Numbers that states stand for: f32 (256, 4 / bits)."""
    state, found = torch.arange(256, dtype=torch.int64, device=device), []
    for multiplier, addend in ((MULTIPLIER, ADDEND), (SECOND_MULTIPLIER, SECOND_ADDEND))[: 2 // bits]:
        y = ((state * multiplier + addend) & MASK) ^ FLIP
        found += [y & 0xFFFF, (y >> 16) & 0xFFFF]
    return as_i16(torch.stack(found, 1)).view(torch.float16).float()


def as_i16(x: Tensor) -> Tensor:
    """Words from 0 to 0xffff as i16, those above 0x7fff negative: the bit pattern is what counts."""
    return torch.where(x > 0x7FFF, x - 0x10000, x).to(torch.int16)


def _cheapest(costs: Tensor) -> Tensor:
    """Least of costs (N, 16, 16) over the upper halves of states: (N, 16), with that half in the last 4 bits."""
    upper = torch.arange(16, dtype=torch.int32, device=costs.device)[:, None]
    return ((costs.view(torch.int32) & -16) | upper).view(torch.float32).amin(1)


def _walked(x: Tensor, place: int, shared: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Least costs of the last states by their lower half, and the upper halves of states by their lower ones.

    Args:
        x: f32 (N, 16, 2 or 4), f16 numbers.
        place: the state that comes first.
        shared: i64 (N,), its upper half, or None for any.
    """
    tables = state_numbers(x.device, 4 // x.shape[2]).reshape(16, 16, -1).unbind(2)
    squares, minus_twice = tables[0] * tables[0], -2.0 * x
    for table in tables[1:]:
        squares = squares + table * table

    def with_state(costs: Tensor, state: int) -> Tensor:
        # Squares of x are left out: all states share them.
        for j, table in enumerate(tables):
            costs = costs + minus_twice[:, state % 16, j, None, None] * table
        return costs

    costs, notes = with_state(squares, place), []
    if shared is not None:
        costs = torch.where(torch.arange(16, device=x.device)[:, None] == shared[:, None, None], costs, FAR)
    best = _cheapest(costs)
    for i in range(1, 16):
        notes.append(best.view(torch.int32).long() & 15)
        best = _cheapest(with_state(best[:, :, None] + squares, place + i))
    return best, [*notes, best.view(torch.int32).long() & 15]


def walk(x: Tensor) -> Tensor:
    """Lower halves of the states of loops f32 (N, 16, 2 or 4), f16 numbers: i64 (N, 16)."""
    if len(x) > ROWS:
        return torch.cat([walk(part) for part in x.split(ROWS)])
    costs, notes = _walked(x, 8, None)
    lowest = torch.where(costs == costs.amin(1, keepdim=True), torch.arange(16, device=x.device), 16)
    own = lowest.amin(1)
    for note in notes[:7:-1]:
        own = note.gather(1, own[:, None])[:, 0]
    _, notes = _walked(x, 0, own)
    found = [own]
    for note in notes[:0:-1]:
        found.append(note.gather(1, found[-1][:, None])[:, 0])
    return torch.stack(found[::-1], 1)


def _loops(x: Tensor, bits: int) -> Tensor:
    """Numbers (N, H, lane, number) as loops (N, H, pair, E, 16, 4 / bits)."""
    parts = x.unflatten(3, (8, -1)).unflatten(2, (2, 2 // bits, -1, 2))
    # (N, H, half, quarter, pair, lane, step, word)
    return parts.permute(0, 1, 4, 7, 2, 6, 3, 5).flatten(6).flatten(4, 5)


def _states(lower: Tensor) -> Tensor:
    return (lower.roll(1, -1) << 4) | lower


def _packed(lower: Tensor) -> Tensor:
    """Codes i16 (N, H, E, lanes * bits / 2) of the lower halves of states i64 (N, H, pair, E, 16)."""
    shifts = torch.arange(28, -4, -4, device=lower.device)
    words = (lower.unflatten(-1, (2, 8)) << shifts).sum(-1)
    # (N, H, pair, word, half, lane)
    words = torch.stack([words & 0xFFFF, words >> 16], -1)
    return as_i16(words).permute(0, 1, 3, 4, 2, 5).flatten(3).contiguous()


def _measured(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers in parts of their lane's largest magnitude, that magnitude, their squares summed, and the deviation.

    NaN counts as 0, and what f16 does not hold as the largest magnitude.
    """
    magnitude = x.abs()
    top = torch.where(magnitude <= F16_MAX, magnitude, 0.0).amax(-1, keepdim=True).clamp(min=F16_TINY)
    x = torch.minimum(torch.maximum(torch.where(torch.isnan(x), 0.0, x), -top), top)
    units = torch.floor(x * (torch.full_like(top, FRACTION) / top) + 0.5)
    squares = units.int().square().sum(-1, keepdim=True, dtype=torch.int32).float()
    return units, top, squares, (squares / torch.full_like(squares, x.shape[-1])).sqrt()


def encode(x: Tensor, bits: int = 2) -> tuple[Tensor, Tensor]:
    """Codes i16 (N, H, D / 8, G * bits / 2) and scales f16 (N, H, 1, G) of values f32 (N, H, G, D).

    A scale keeps its token's length along itself, ``x·x̂ = x·x``, in place of the least error: that would make all
    tokens shorter, which does not average out.
    """
    units, top, squares, deviation = _measured(x)
    gain = torch.where(squares > 0, torch.full_like(squares, SPREAD) / deviation, 0.0)
    loops = _loops((units * gain).half().float(), bits)
    lower = walk(loops.flatten(0, 3)).view(loops.shape[:-1])
    numbers = torch.floor(state_numbers(x.device, bits) * FRACTION + 0.5).int()[_states(lower)]
    along = (_loops(units.int(), bits) * numbers).unflatten(4, (2, 8)).sum((3, 5), dtype=torch.int32)
    # (N, H, pair, half, quarter and lane)
    along = along.unflatten(4, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(2).unsqueeze(-1).float()
    own, kept = deviation * (1 / (FRACTION * SPREAD)), squares / along
    scale = top * torch.where((along > 0) & (kept < own + own), kept, own)
    return _packed(lower), scale.clamp(max=F16_MAX).half().transpose(2, 3).contiguous()


def centre(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lanes f32 (N, H, G, D) less their mean, and that mean, f16 (N, H, G, 1)."""
    units, top, _, _ = _measured(x)
    total = units.int().sum(-1, keepdim=True, dtype=torch.int32).float()
    zero = (top * (total / torch.full_like(total, FRACTION * x.shape[-1]))).half()
    return x - zero.float(), zero


def own_scale(x: Tensor) -> Tensor:
    """Scales f16 (N, H, G, 1) that lanes f32 (N, H, G, D) have by their deviation."""
    _, top, _, deviation = _measured(x)
    return (top * (deviation * (1 / (FRACTION * SPREAD)))).clamp(max=F16_MAX).half()


def encode_with(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes i16 (N, H, D / 8, G * bits / 2) of numbers f32 (N, H, G, D) whose lanes have scales f32 (N, H, G, 1)."""
    given = torch.where(scale > 0, torch.full_like(scale, 1.0) / scale, 0.0)
    x = x * given
    loops = _loops(torch.where(torch.isnan(x), 0.0, x).clamp(-FARTHEST, FARTHEST).half().float(), bits)
    return _packed(walk(loops.flatten(0, 3)).view(loops.shape[:-1]))


def decode(codes: Tensor, bits: int = 2) -> Tensor:
    """Numbers f32 (N, H, G, D) of codes i16 (N, H, D / 8, G * bits / 2), to be multiplied by their lanes' scales."""
    # (N, H, E, half, pair, lane)
    words = (codes.long() & 0xFFFF).unflatten(3, (2, -1, 2))
    words = words[..., 0] | words[..., 1] << 16
    shifts = torch.arange(28, -4, -4, device=codes.device)
    lower = ((words[..., None] >> shifts) & 15).transpose(3, 4).flatten(4)
    numbers = state_numbers(codes.device, bits)[_states(lower)].unflatten(4, (2, 8)).unflatten(6, (-1, 2))
    # (N, H, word, pair, half, step, quarter, lane) to (N, H, half, quarter, pair, lane, step, word)
    return numbers.permute(0, 1, 4, 6, 3, 7, 5, 2).flatten(6).flatten(2, 5)
