"""Groups that share a scale: their range, and scales that are fitted to what is in them. The reference.

A fit clips a group's range at several ratios, refines each by rounds of least squares, and judges all as they would be
stored. What it sums are integers, multiples of a fraction of a step, so that sums are the same in whatever order a
device takes them.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

F16_MAX = 65504.0

F16_TINY = 2.0**-24
"""The smallest f16 that is not 0."""

POWERS = (0, 2, 3, 4)
"""Powers of the error that a fit can sum; 0 fits nothing."""

RATIOS, ROUNDS = 3, 3
"""Number of times that the range is clipped, the first time by nothing, and of candidates for each: itself, and
two rounds of least squares. Six ratios with a round more lose 1 to 2 % less."""

CUT2, CUT4 = 1 / 4, 1 / 16
"""Share of the range by which a ratio is less than the one before, at 2 and at 4 bits."""

FRACTION = 12
"""Bits of a fraction of a step."""

FAR = 4.0
"""Errors count as this many steps at most."""

SMALL = 1 << 20
"""Elements of which candidates are judged together: fewer operations, in three times the memory."""

MOST = 2048
"""Elements of a group that is fitted, at most: sums of code times value stay within 31 bits."""


def error_bits(group_size: int, power: int) -> int:
    """Bits of the fraction in which powers of errors are summed: a sum stays within 30 bits."""
    return 30 - (group_size - 1).bit_length() - 2 * power


class Groups:
    """Groups along one dimension; what is known of each has one element there.

    Elements that are not finite in f16 are left out, so one bad token cannot widen its neighbours' scale.

    Args:
        x: f32, any shape.
        levels: greatest code of each group, 3 or 15.
    """

    def __init__(self, x: Tensor, levels: Tensor | float, dim: int) -> None:
        # From the end: candidates are one more dimension before all.
        dim = dim if dim < 0 else dim - x.dim()
        self.x, self.dim, self.real = x, dim, x.abs() <= F16_MAX
        low = torch.where(self.real, x, torch.inf).amin(dim, keepdim=True)
        high = torch.where(self.real, x, -torch.inf).amax(dim, keepdim=True)
        empty = low > high
        self.low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
        # A tensor: CUDA divides by a Python number by multiplying with its rounded reciprocal.
        self.levels = levels if isinstance(levels, Tensor) else torch.full_like(low, levels)
        self.step = (high - self.low) / self.levels

    def scales(self, fit: int) -> tuple[Tensor, Tensor]:
        """Scale and zero (f16): of the range, or where ``fit`` is not 0, of the least sum of |error|^fit.

        Of candidates that lose alike the first is taken; the very first is the range.
        """
        scale, zero = self.step.clamp(max=F16_MAX).half(), self.low.half()
        if not fit:
            return scale, zero
        cut = self._cuts
        clipped = self._stored(1 - cut, self.levels * (0.5 * cut))
        starts = (torch.cat([first[None], rest]) for first, rest in zip((scale, zero), clipped, strict=True))
        together = RATIOS if self.x.numel() <= SMALL else 1
        parts = zip(*(x.split(together) for x in starts), strict=True)
        found = [self._rounds(scale, zero, fit) for scale, zero in parts]
        lost, scale, zero = (torch.cat(parts) for parts in zip(*found, strict=True))
        # Sums are whole numbers below 2^30: the place in the last bits makes the first of equal ones the least.
        place = torch.arange(len(lost), device=lost.device).view(-1, *[1] * (lost.dim() - 1))
        best = ((lost * 16 + place).amin(0, keepdim=True) % 16).long()
        return scale.gather(0, best)[0], zero.gather(0, best)[0]

    def _rounds(self, scale: Tensor, zero: Tensor, fit: int) -> list[Tensor]:
        """Losses, scales and zeros of all candidates: for each ratio its rounds, one after the other."""
        rounds = []
        for left in reversed(range(ROUNDS)):
            code, slope, base = self._coded(scale, zero)
            rounds.append((self._lost(code, slope, base, fit), scale, zero))
            if left:
                scale, zero = self._stored(*self._fitted(code, slope))
        return [torch.stack(parts, 1).flatten(0, 1) for parts in zip(*rounds, strict=True)]

    def squares(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Sum of squared errors, f32; an error counts as `FAR` steps at most."""
        lost = self._lost(*self._coded(scale, zero), 2).float() * 2.0 ** -error_bits(self.x.shape[self.dim], 2)
        return lost * (self._step * self._step)

    # In steps above the lowest element: u = (x - low) / step. Candidates may lie along a dimension before all others.

    @cached_property
    def _cuts(self) -> Tensor:
        """Shares of itself by which the range is clipped, but for the first ratio, which clips nothing."""
        ratio = torch.arange(1, RATIOS, device=self.x.device).view(-1, *[1] * self.x.dim())
        return ratio * torch.full_like(self.levels, CUT2).masked_fill(self.levels > 3, CUT4)

    @cached_property
    def _step(self) -> Tensor:
        return self.step.clamp(min=F16_TINY)

    @cached_property
    def _per_step(self) -> Tensor:
        return 1.0 / self._step

    @cached_property
    def _units(self) -> Tensor:
        """Elements in steps as multiples of a fraction, f32, 0 where nothing counts."""
        units = torch.floor((self.x - self.low) * self._per_step * 2.0**FRACTION + 0.5)
        return torch.where(self.real, units, 0.0)

    @cached_property
    def _u(self) -> Tensor:
        return self._units * 2.0**-FRACTION

    @cached_property
    def _counts(self) -> Tensor:
        """1 where something counts, else 0."""
        return self.real.float()

    @cached_property
    def _count(self) -> Tensor:
        return self._sum(self._counts)

    @cached_property
    def _sum_u(self) -> Tensor:
        return self._sum(self._units)

    def _sum(self, x: Tensor) -> Tensor:
        """Sum of whole numbers that f32 holds; f64 holds the sum and products of sums exactly."""
        return x.sum(self.dim, keepdim=True, dtype=torch.float64)

    def _stored(self, slope: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero of a slope and a base in steps."""
        zero = self.low + base * self._step
        return (slope * self._step).clamp(max=F16_MAX).half(), zero.clamp(-F16_MAX, F16_MAX).half()

    def _coded(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, and the slope and base that they are made by."""
        slope, base = scale.float() * self._per_step, (zero.float() - self.low) * self._per_step
        inverse = torch.where(slope > 0, 1.0 / slope.clamp(min=F16_TINY), 0.0)
        code = torch.floor((self._u - base) * inverse + 0.5).clamp(min=0.0)
        return torch.minimum(code, self.levels), slope, base

    def _lost(self, code: Tensor, slope: Tensor, base: Tensor, power: int) -> Tensor:
        """Sum of |error|^power, as a whole number."""
        error = (code * slope + base - self._u).abs().clamp(max=FAR)
        raised = error * error
        if power > 2:
            raised = raised * (error if power == 3 else raised)
        return self._sum((raised * (self._counts * 2.0 ** error_bits(self.x.shape[self.dim], power))).trunc())

    def _fitted(self, code: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and base of the least squares of codes; ``slope`` where all are one code."""
        code = code * self._counts
        count, c, cc = self._count, self._sum(code), self._sum(code * code)
        sum_u, cu = self._sum_u, self._sum(code * self._units)
        spread = count * cc - c * c
        fitted = (count * cu - c * sum_u).float() / spread.clamp(min=1).float() * 2.0**-FRACTION
        slope = torch.where(spread > 0, fitted, slope)
        return slope, (sum_u.float() * 2.0**-FRACTION - slope * c.float()) / count.clamp(min=1).float()
