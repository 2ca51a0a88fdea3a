"""Launch parameters by GPU and format: measured before and looked up, never searched during generation.

Later layers win: the defaults, what is shipped for a kind of GPU and for a GPU (`SHIPPED`), the file that
`evals/kernel_tuning.py` saved on this machine, and the candidates that it tries.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import torch

from hfkvq.bounded import load_json

from ..pages import PageFormat
from ._lib import properties

logger = logging.getLogger(__name__)

Knobs = Mapping[str, int]

DEFAULTS: Mapping[str, Knobs] = {
    # programs_per_sm: programs of one warp that run on a multiprocessor at a time (registers allow two on each of its
    # four parts). stages: loads in flight. max_registers: limit a thread, 0 leaves it to the compiler. step: tokens
    # of a turn of the page loop, 0 for what suits the format. loose: tokens of a block of what no page holds, which are
    # in shared memory in 16 bits: 32, or 16 where there is little of it.
    "decode": {"programs_per_sm": 8, "stages": 5, "max_registers": 0, "step": 0, "loose": 32},
    # Integer products of codes of so many bits. Those of 2 bits need three programs on each part of a multiprocessor:
    # with two they wait longer than f16 products.
    "digits-2": {"programs_per_sm": 12, "stages": 5, "max_registers": 168, "step": 0, "loose": 32},
    "digits-4": {"programs_per_sm": 8, "stages": 5, "max_registers": 0, "step": 0, "loose": 32},
    # Programs over latents have so many warps; programs_per_sm counts those of eight. stages: half as many steps are in
    # flight, since words wait for the number of their page; with 4 none is.
    "latent": {"programs_per_sm": 1, "stages": 5, "max_registers": 0, "step": 0, "warps": 8},
}

LEAST: Knobs = {"programs_per_sm": 1, "stages": 1, "max_registers": 0, "step": 0, "loose": 16, "warps": 1}
"""Smallest legal value of every knob."""

MOST: Knobs = {"loose": 32}
"""Greatest legal value, where there is one."""

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
_INTERPRETER: Mapping[str, Knobs] = {
    "decode": {"programs_per_sm": 4, "stages": 1},
    "digits-2": {"programs_per_sm": 4, "stages": 1},
    "digits-4": {"programs_per_sm": 4, "stages": 1},
    "latent": {"programs_per_sm": 4, "stages": 1},
}

ANSWERS: dict[tuple[torch.device, str, str], Knobs] = {}
"""Answers of `lookup` by device, kernel and key since the last `renew`."""

_TRIED: dict[tuple[str, str], Knobs] = {}
_EDITION = [0]


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


def edition() -> int:
    """Number of the answers that `lookup` gives now: a plan made of them is made again when it moves."""
    return _EDITION[0]


def renew() -> None:
    """Forgets the answers of `lookup`."""
    ANSWERS.clear()
    _EDITION[0] += 1


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
        name, capability = _gpu(device)
        for which in (f"{capability[0]}", f"{capability[0]}.{capability[1]}", name):
            own = _shipped().get(which, {}).get(kernel, {})
            knobs |= {**own.get(ANY, {}), **own.get(key, {})}
        knobs |= _saved(tuning_file()).get(gpu_key(name), {}).get(kernel, {}).get(key, {})
    else:
        knobs |= _INTERPRETER.get(kernel, {})
    return knobs | _TRIED.get((kernel, key), {})


def _gpu(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Name and compute capability."""
    found = properties(device)
    return found.name, (found.major, found.minor)


def gpu_key(name: str) -> str:
    """Key of a GPU in the tuning file, with the version of Triton, which may generate other code."""
    return f"{name}, Triton {version('triton')}"


def tuning_file() -> Path | None:
    """Path of the tuning file: ``$HFKVQ_TUNING``, else ``hfkvq/tuning.json`` in the user's cache folder.

    None if there is no home to look in.
    """
    if named := os.environ.get("HFKVQ_TUNING"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "hfkvq" / "tuning.json"
    except RuntimeError:
        return None


def reload() -> None:
    """Reads the tuning file anew at the next `lookup`."""
    _saved.cache_clear()
    renew()


def _problem(kernel: str, knobs: object) -> str | None:
    """Problem of a kernel's knobs in words, or None."""
    if not isinstance(knobs, dict):
        return f"{kernel}: got {knobs!r}, expected knobs by name."
    for name, value in knobs.items():
        if name not in DEFAULTS[kernel]:
            return f"{kernel}: knob {name!r} is unknown; known {', '.join(DEFAULTS[kernel])}."
        most = MOST.get(name, math.inf)
        if not isinstance(value, int) or isinstance(value, bool) or not LEAST[name] <= value <= most:
            until = f" to {most}" if name in MOST else ""
            return f"{kernel}: {name}: got {value!r}, allowed whole numbers from {LEAST[name]}{until}."
        if name == "loose" and value & (value - 1):
            return f"{kernel}: {name}: got {value!r}, allowed 16 or 32."
    return None


def _parse(path: Path) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """A tuning file: {GPU and Triton: {kernel: {key: {knob: value}}}}. Raises ValueError if it is something else."""
    data = load_json(path)
    if not isinstance(data, dict):
        raise ValueError("it holds no object.")
    for gpu, kernels in data.items():
        if not isinstance(kernels, dict):
            raise ValueError(f"{gpu}: expected kernels by name.")
        for kernel, keys in kernels.items():
            if kernel not in DEFAULTS or not isinstance(keys, dict):
                raise ValueError(f"{gpu}: kernel {kernel!r} is unknown, or holds no keys.")
            for knobs in keys.values():
                if problem := _problem(kernel, knobs):
                    raise ValueError(problem)
    return data


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, Mapping[str, Mapping[str, Knobs]]]:
    return _parse(SHIPPED)


@lru_cache(maxsize=1)
def _saved(path: Path | None) -> Mapping[str, Mapping[str, Mapping[str, Knobs]]]:
    try:
        return _parse(path) if path is not None and path.exists() else {}
    except (OSError, ValueError) as error:
        # Attention goes on without a file that cannot be used: tuning makes it faster, not right.
        logger.warning("The tuning file %s is ignored: %s Delete it, or set HFKVQ_TUNING to another.", path, error)
        return {}
