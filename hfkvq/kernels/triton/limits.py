"""Limits of a multiprocessor by compute capability: CUDA C++ Programming Guide, "Technical Specifications"."""

from __future__ import annotations

from typing import NamedTuple

REGISTERS = 65536
"""32-bit registers of a multiprocessor, of every GPU from compute capability 8.0 on; a quarter is of each scheduler."""

RESERVED = 1024
"""Bytes of shared memory that the system takes of each program."""


class Limits(NamedTuple):
    """Limits of a multiprocessor.

    Attributes:
        shared: bytes of shared memory.
        most_shared: those of it that one program may have.
        warps: most warps at a time.
        programs: most programs at a time.
    """

    shared: int
    most_shared: int
    warps: int
    programs: int


LIMITS = {
    (8, 0): Limits(164 << 10, 163 << 10, 64, 32),
    (8, 6): Limits(100 << 10, 99 << 10, 48, 16),
    (8, 9): Limits(100 << 10, 99 << 10, 48, 24),
    (9, 0): Limits(228 << 10, 227 << 10, 64, 32),
    (10, 0): Limits(228 << 10, 227 << 10, 64, 32),
    (12, 0): Limits(100 << 10, 99 << 10, 48, 24),
}
"""Limits by compute capability."""


def programs_that_fit(limits: Limits, registers: int, warps: int, shared: int) -> int:
    """Programs of so many registers a thread, warps and bytes of shared memory that run on a multiprocessor at a time.

    Registers are given out by 256 to each warp, and a scheduler has a quarter of warps and registers.
    """
    if shared > limits.most_shared:
        return 0
    # 255 registers at most, in multiples of 8.
    of_warp = -(-registers // 8) * 8 * 32
    by_registers = 4 * (REGISTERS // 4 // of_warp) // warps
    by_shared = limits.shared // (shared + RESERVED)
    return min(by_registers, by_shared, limits.warps // warps, limits.programs)
