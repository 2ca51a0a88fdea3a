"""A kernel that does nothing but ask the rule of what is due."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hfkvq.kernels.triton.step import tokens_due


@triton.jit
def rule_kernel(rows, out, LOCAL, UNIT):
    """A program has a row."""
    i = tl.program_id(0)
    tl.store(out + i, tokens_due(tl.load(rows + 2 * i), tl.load(rows + 2 * i + 1), LOCAL, UNIT))


def due_by_kernel(rows: list[tuple[int, int]], local: int, unit: int) -> list[int]:
    """What the rule says of rows of (rest, sealed), on the device that kernels run on."""
    device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    out = torch.full((len(rows),), -1, dtype=torch.int32, device=device)
    rule_kernel[(len(rows),)](torch.tensor(rows, dtype=torch.int32, device=device), out, LOCAL=local, UNIT=unit)
    return out.tolist()
