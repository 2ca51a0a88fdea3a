"""Launch parameters by GPU and format: measured before and looked up, never searched during generation.

Later layers win: the defaults, what is shipped for a kind of GPU and for a GPU (`SHIPPED`), and the candidates that
`evals/kernel_tuning.py` tries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch

from ..pages import PageFormat
from ._lib import properties

Knobs = Mapping[str, int]

DEFAULTS: Mapping[str, Knobs] = {
    # programs_per_sm: programs of one warp that run on a multiprocessor at a time (registers allow two on each of its
    # four parts). stages: loads in flight. step: tokens
    # of a turn of the page loop, 0 for what suits the format. loose: tokens of a block of what no page holds, which are
    # in shared memory in 16 bits: 32, or 16 where there is little of it.
    "decode": {"programs_per_sm": 8, "stages": 5, "step": 0, "loose": 32},
    # Programs over latents have so many warps; programs_per_sm counts those of eight. stages: half as many steps are in
    # flight, since words wait for the number of their page; with 4 none is.
    "latent": {"programs_per_sm": 1, "stages": 5, "step": 0, "warps": 8},
}

ANY = "*"
"""Key that stands for every key in `SHIPPED`."""

SHIPPED = Path(__file__).with_name("parameters.json")
"""Parameters that come with the package: {GPU: {kernel: {key: knobs}}}, "*" for all keys.

A GPU is a major compute capability ("12"), a capability ("8.9") or a name ("NVIDIA H200"), the later winning; the
defaults fit the 228 KB of shared memory a multiprocessor that 9.0 and 10.x have. Rows of capabilities are reasoned
from what `evals/resources.py` counts, not measured: shared memory bounds stages times the programs that registers let
in, and bandwidth a multiprocessor says how much has to be in flight at all, of which an A100 (8.0, 164 KB) needs half
of what an H200 does, and others with 100 KB a third or less. Those of latents on 9.0 were measured on an H200
(evals/results/latents-h200.json). Rows of names were found by `evals/kernel_tuning.py`, see
`evals/parameters.py`.
"""

# Programs run one after the other in the interpreter.
_INTERPRETER: Knobs = {"programs_per_sm": 4, "stages": 1}

ANSWERS: dict[tuple[torch.device, str, str], Knobs] = {}
"""Answers of `lookup` by device, kernel and key since the last `renew`."""

FORGET: list[Callable[[], None]] = []
"""Functions that forget plans made of these answers. Launches that a buffer keeps stay as they are."""

_TRIED: dict[tuple[str, str], Knobs] = {}


def key_of(keys: PageFormat, values: PageFormat, head_dim: int, columns: int) -> str:
    """Name of a kernel variant, e.g. ``"2c128/2t128,D128,N8"``.

    Page size and raised channels are left out: the same loop serves them.
    """
    pair = "/".join(f"{fmt.bits}{fmt.axis[0]}{fmt.group_size}{'t' * fmt.trellis}" for fmt in (keys, values))
    return f"{pair},D{head_dim},N{columns}"


def lookup(device: torch.device, kernel: str, key: str) -> Knobs:
    """Launch parameters of a kernel variant on a device. Cached; asks the driver once and the GPU never."""
    found = ANSWERS.get((device, kernel, key))
    if found is None:
        found = ANSWERS[device, kernel, key] = MappingProxyType(_merged(device, kernel, key))
    return found


def renew() -> None:
    """Forgets the answers of `lookup`, and plans made of them."""
    ANSWERS.clear()
    for forget in FORGET:
        forget()


def try_out(kernel: str, key: str, knobs: Knobs | None) -> None:
    """Puts a candidate of a search in force for a kernel variant; None takes it back."""
    _TRIED.pop((kernel, key), None)
    if knobs is not None:
        _TRIED[kernel, key] = dict(knobs)
    renew()


def _merged(device: torch.device, kernel: str, key: str) -> dict[str, int]:
    if kernel not in DEFAULTS:
        raise ValueError(f"kernel: got {kernel!r}, known {', '.join(DEFAULTS)}.")
    knobs = dict(DEFAULTS[kernel])
    if device.type == "cuda":
        gpu = properties(device)
        for which in (f"{gpu.major}", f"{gpu.major}.{gpu.minor}", gpu.name):
            own = _shipped().get(which, {}).get(kernel, {})
            knobs |= {**own.get(ANY, {}), **own.get(key, {})}
    else:
        knobs |= _INTERPRETER
    return knobs | _TRIED.get((kernel, key), {})


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, Mapping[str, Mapping[str, Knobs]]]:
    return json.loads(SHIPPED.read_text(encoding="utf-8"))
