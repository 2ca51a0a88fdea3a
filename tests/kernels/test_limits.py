"""What kernels take of a multiprocessor: the count itself, and that launchers plan for no more than there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfkvq.kernels.triton.compile import GPUS
from hfkvq.kernels.triton.limits import LIMITS, programs_that_fit

ROOT = Path(__file__).resolve().parents[2]


def rows():
    """What `evals/resources.py` counted."""
    return json.loads((ROOT / "evals" / "results" / "resources.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize(
    ("capability", "registers", "warps", "shared", "programs"),
    [
        # Registers let two warps run on each of the four schedulers, and from 168 on three.
        ((9, 0), 255, 1, 0, 8),
        ((9, 0), 168, 1, 0, 12),
        ((9, 0), 169, 1, 0, 8),
        # A program of eight warps takes two of each scheduler.
        ((9, 0), 255, 8, 0, 1),
        ((9, 0), 129, 8, 0, 1),
        ((9, 0), 128, 8, 0, 2),
        # Shared memory, with the kilobyte that the system takes of each program.
        ((8, 0), 128, 1, 20 << 10, 7),
        ((8, 9), 128, 1, 16 << 10, 5),
        ((8, 9), 128, 1, 8 << 10, 11),
        # More than one program may have; most warps; most programs.
        ((12, 0), 32, 1, 100 << 10, 0),
        ((12, 0), 32, 4, 0, 12),
        ((8, 6), 32, 1, 0, 16),
    ],
)
def test_programs_that_fit(capability, registers, warps, shared, programs):
    assert programs_that_fit(LIMITS[capability], registers, warps, shared) == programs


def test_what_was_counted_fits():
    """Every kernel runs, and splits are made for no more programs of attention than run side by side."""
    found = rows()
    assert {row["gpu"] for row in found} >= {80, 89, 90, 100, 120}
    for row in found:
        gpu = GPUS[row["gpu"]]
        limits = LIMITS[gpu.major, gpu.minor]
        fit = programs_that_fit(limits, row["registers"], row["warps"], row["shared"])
        assert fit == row["programs"] >= 1, row
        assert row.get("planned", 1) <= fit, row
        # Two programs of one warp on each scheduler are what the page loop is made for. 16-bit pages are too large for
        # that, and so are MixKVQ's where there are 100 KB.
        large = row["presets"] == ["full"] or (row["presets"] == ["mixkvq"] and limits.shared == 100 << 10)
        assert row["kernel"] != "decode_kernel" or fit >= (5 if large else 8), row
