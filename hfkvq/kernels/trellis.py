"""Trellis codes of values: walks of least error through 256 states, 2 bits a number. The reference.

A state of 8 bits stands for two numbers: ``y = (state * MULTIPLIER + ADDEND) mod 2^32``, and the two halves of
``(y & MASK) ^ FLIP`` are f16. A state is the last 4 bits of the one before and 4 new ones. Sixteen states are a *loop*:
the first follows upon the last, so that a loop of 32 numbers takes 64 bits and nothing else. QTIP (Tseng et al.,
arXiv:2406.11235) encodes weights like this, in longer loops, with one number of such a product: the sum of its halves.

A loop holds two neighbouring tokens of each half of a page, and the eight channels ``s * E + e`` of one word e: state
s of the first half and state ``8 + s`` are channel s of these, and the two numbers of a state are the two tokens. The
words of neighbouring tokens, i16, are one word of 32 bits: eight states, the first in its highest bits. The state
before these is in the lowest bits of the other half's word.

Loops are encoded by Viterbi's algorithm in two walks: a free one from the second half on finds where the ends meet,
and the second one begins and ends there. What is encoded is f16, so its products with states' numbers are exact in f32,
and costs are rounded where one is added: kernel and reference agree, whether products and sums are fused or not.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .groups import F16_MAX, F16_TINY

MULTIPLIER, ADDEND = 0xC0E2D8A5, 0xF2893F07
MASK, FLIP = 0x8FFF8FFF, 0x38003800

SPREAD = 0.8761381
"""Root of the mean square of all numbers of states."""

FRACTION = 1024
"""Values count as so many parts of their token's largest magnitude, numbers of states as so many parts of 1."""

FAR = 1e30
"""Cost of a walk that begins where it must not."""

ROWS = 2**13
"""Loops that are walked at a time."""


@lru_cache(maxsize=8)
def state_numbers(device: torch.device) -> Tensor:
    """Numbers that states stand for: f32 (256, 2)."""
    state = torch.arange(256, dtype=torch.int64, device=device)
    y = ((state * MULTIPLIER + ADDEND) & MASK) ^ FLIP
    return _as_i16(torch.stack([y & 0xFFFF, (y >> 16) & 0xFFFF], 1)).view(torch.float16).float()


def _as_i16(x: Tensor) -> Tensor:
    return torch.where(x > 0x7FFF, x - 0x10000, x).to(torch.int16)


def _cheapest(costs: Tensor) -> Tensor:
    """Least of costs (N, 16, 16) over the upper halves of states: (N, 16), with that half in the last 4 bits."""
    upper = torch.arange(16, dtype=torch.int32, device=costs.device)[:, None]
    return ((costs.view(torch.int32) & -16) | upper).view(torch.float32).amin(1)


def _walked(x: Tensor, place: int, shared: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Least costs of the last states by their lower half, and the upper halves of states by their lower ones.

    Args:
        x: f32 (N, 16, 2), f16 numbers.
        place: the state that comes first.
        shared: i64 (N,), its upper half, or None for any.
    """
    first, second = state_numbers(x.device).view(16, 16, 2).unbind(2)
    squares, minus_twice = first * first + second * second, -2.0 * x

    def with_state(costs: Tensor, state: int) -> Tensor:
        # Squares of x are left out: all states share them.
        x1, x2 = (minus_twice[:, state % 16, j, None, None] for j in (0, 1))
        return costs + x1 * first + x2 * second

    costs, notes = with_state(squares, place), []
    if shared is not None:
        costs = torch.where(torch.arange(16, device=x.device)[:, None] == shared[:, None, None], costs, FAR)
    best = _cheapest(costs)
    for i in range(1, 16):
        notes.append(best.view(torch.int32).long() & 15)
        best = _cheapest(with_state(best[:, :, None] + squares, place + i))
    return best, [*notes, best.view(torch.int32).long() & 15]


def walk(x: Tensor) -> Tensor:
    """Lower halves of the states of loops f32 (N, 16, 2), f16 numbers: i64 (N, 16)."""
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


def _loops(x: Tensor) -> Tensor:
    """Numbers (N, H, G, D) as loops (N, H, G/4, E, 16, 2)."""
    parts = x.unflatten(3, (8, -1)).unflatten(2, (2, -1, 2))
    # (N, H, half, pair, token, step, word)
    return parts.permute(0, 1, 3, 6, 2, 5, 4).flatten(4, 5)


def _states(lower: Tensor) -> Tensor:
    return (lower.roll(1, -1) << 4) | lower


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes i16 (N, H, E, G) and scales f16 (N, H, 1, G) of values f32 (N, H, G, D).

    A scale keeps its token's length along itself, ``x·x̂ = x·x``, in place of the least error: that would make all
    tokens shorter, which does not average out. NaN counts as 0, and what f16 does not hold as the largest magnitude.
    """
    dim = x.shape[-1]
    magnitude = x.abs()
    top = torch.where(magnitude <= F16_MAX, magnitude, 0.0).amax(-1, keepdim=True).clamp(min=F16_TINY)
    x = torch.minimum(torch.maximum(torch.where(torch.isnan(x), 0.0, x), -top), top)
    units = torch.floor(x * (torch.full_like(top, FRACTION) / top) + 0.5)
    squares = units.int().square().sum(-1, keepdim=True, dtype=torch.int32).float()
    deviation = (squares / torch.full_like(squares, dim)).sqrt()
    gain = torch.where(squares > 0, torch.full_like(squares, SPREAD) / deviation, 0.0)
    loops = _loops((units * gain).half().float())
    lower = walk(loops.flatten(0, 3)).view(loops.shape[:-1])
    numbers = torch.floor(state_numbers(x.device) * FRACTION + 0.5).int()[_states(lower)]
    along = (_loops(units.int()) * numbers).unflatten(4, (2, 8)).sum((3, 5), dtype=torch.int32)
    # (N, H, pair, half, token)
    along = along.transpose(2, 3).flatten(2).unsqueeze(-1).float()
    own, kept = deviation * (1 / (FRACTION * SPREAD)), squares / along
    scale = top * torch.where((along > 0) & (kept < own + own), kept, own)
    shifts = torch.arange(28, -4, -4, device=x.device)
    words = (lower.unflatten(-1, (2, 8)) << shifts).sum(-1)
    # (N, H, pair, word, half, token)
    words = torch.stack([words & 0xFFFF, words >> 16], -1)
    codes = _as_i16(words).permute(0, 1, 3, 4, 2, 5).flatten(3)
    return codes.contiguous(), scale.clamp(max=F16_MAX).half().transpose(2, 3).contiguous()


def decode(codes: Tensor) -> Tensor:
    """Numbers f32 (N, H, G, D) of codes i16 (N, H, E, G), to be multiplied by their tokens' scales."""
    # (N, H, E, half, pair, token)
    words = (codes.long() & 0xFFFF).unflatten(3, (2, -1, 2))
    words = words[..., 0] | words[..., 1] << 16
    shifts = torch.arange(28, -4, -4, device=codes.device)
    lower = ((words[..., None] >> shifts) & 15).transpose(3, 4).flatten(4)
    numbers = state_numbers(codes.device)[_states(lower)].unflatten(4, (2, 8))
    # (N, H, word, pair, half, step, token) to (N, H, half, pair, token, step, word)
    return numbers.permute(0, 1, 4, 3, 6, 5, 2).flatten(5).flatten(2, 4)
