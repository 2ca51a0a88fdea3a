"""Launch parameters by GPU and format: looked up, never searched for while somebody waits for a token.

Later layers win: the defaults, the table by class of GPU, the file that ``hfkvq bench tune`` saved on this machine,
and `override`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
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
    # of a turn of the page loop, 0 for what suits the format.
    "decode": {"programs_per_sm": 8, "stages": 5, "max_registers": 0, "step": 0},
    # Integer products, of codes of so many bits. Of 2 bits they want three programs on each part of a multiprocessor:
    # with two they wait longer than f16 products.
    "digits-2": {"programs_per_sm": 12, "stages": 5, "max_registers": 168, "step": 0},
    "digits-4": {"programs_per_sm": 8, "stages": 5, "max_registers": 0, "step": 0},
    # Of latents programs have so many warps; programs_per_sm counts those of eight.
    "latent": {"programs_per_sm": 1, "stages": 5, "max_registers": 0, "step": 0, "warps": 8},
}

LEAST: Knobs = {"programs_per_sm": 1, "stages": 1, "max_registers": 0, "step": 0, "warps": 1}
"""Smallest legal value of every knob."""

# By (major, minor) of the compute capability, or by major alone; what is not listed takes the defaults, which fit the
# 228 KB of shared memory a multiprocessor that 9.0 and 10.x have. Shared memory bounds stages times the programs that
# registers let in (65,536 of them everywhere: eight warps at 255 each), and bandwidth a multiprocessor says how much
# has to be in flight at all. These rows are reasoned, not measured; `hfkvq bench tune` measures.
CLASSES: Mapping[str, Mapping[tuple[int, ...], Knobs]] = {
    "decode": {
        # A100: 164 KB; half the bytes in flight that an H200 needs.
        (8, 0): {"stages": 3},
        # A10, A40, RTX 30; L4, L40, RTX 40: 100 KB and a third or less of those bytes; 48 warps at the most.
        (8, 6): {"stages": 3},
        (8, 9): {"stages": 3},
        # RTX 50, RTX PRO 6000, GB10: 100 KB, 48 warps.
        (12,): {"stages": 3},
    },
}

# The interpreter runs one program after the other.
_INTERPRETER: Mapping[str, Knobs] = {
    "decode": {"programs_per_sm": 4, "stages": 1},
    "digits-2": {"programs_per_sm": 4, "stages": 1},
    "digits-4": {"programs_per_sm": 4, "stages": 1},
    "latent": {"programs_per_sm": 4, "stages": 1},
}

_OVERRIDES: list[tuple[str, str | None, Knobs]] = []
_WATCHERS: list[set[tuple[str, str]]] = []
_EDITION = [0]


def key_of(keys: PageFormat, values: PageFormat, head_dim: int, columns: int) -> str:
    """Name of a kernel variant, e.g. ``"2c128/2t128,D128,N8"``.

    Page size and raised channels are left out: the same loop serves them.
    """
    pair = "/".join(f"{fmt.bits}{fmt.axis[0]}{fmt.group_size}" for fmt in (keys, values))
    return f"{pair},D{head_dim},N{columns}"


def lookup(device: torch.device, kernel: str, key: str) -> Knobs:
    """Launch parameters of a kernel variant on a device. Cached; asks the driver once and the GPU never."""
    for seen in _WATCHERS:
        seen.add((kernel, key))
    return _merged(device, kernel, key)


def edition() -> int:
    """Number of the answers that `lookup` gives now: who keeps what it made of them asks again when it moves."""
    return _EDITION[0]


def _renew() -> None:
    _merged.cache_clear()
    _EDITION[0] += 1


@lru_cache(maxsize=1024)
def _merged(device: torch.device, kernel: str, key: str) -> Knobs:
    if kernel not in DEFAULTS:
        raise ValueError(f"kernel: got {kernel!r}, known {', '.join(DEFAULTS)}.")
    knobs = dict(DEFAULTS[kernel])
    if device.type == "cuda":
        name, capability = _gpu(device)
        classes = CLASSES.get(kernel, {})
        knobs |= classes.get(capability[:1], {})
        knobs |= classes.get(capability, {})
        knobs |= _saved(tuning_file()).get(gpu_key(name), {}).get(kernel, {}).get(key, {})
    else:
        knobs |= _INTERPRETER.get(kernel, {})
    for own_kernel, own_key, own in _OVERRIDES:
        if own_kernel == kernel and own_key in (None, key):
            knobs |= own
    return MappingProxyType(knobs)


def _gpu(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Name and compute capability."""
    found = properties(device)
    return found.name, (found.major, found.minor)


def gpu_key(name: str) -> str:
    """What the tuning file files a GPU's findings under: another Triton may generate other code."""
    return f"{name}, Triton {version('triton')}"


@contextlib.contextmanager
def override(kernel: str, key: str | None, **knobs: int) -> Iterator[None]:
    """Within this context `lookup` answers with these knobs for one key, or for all of them (None)."""
    if kernel not in DEFAULTS:
        raise ValueError(f"kernel: got {kernel!r}, known {', '.join(DEFAULTS)}.")
    if problem := _problem(kernel, knobs):
        raise ValueError(problem)
    entry = (kernel, key, knobs)
    _OVERRIDES.append(entry)
    _renew()
    try:
        yield
    finally:
        # By identity: equal entries may be nested.
        del _OVERRIDES[next(i for i, other in enumerate(_OVERRIDES) if other is entry)]
        _renew()


@contextlib.contextmanager
def watch() -> Iterator[set[tuple[str, str]]]:
    """Collects the (kernel, key) pairs that are looked up within this context."""
    seen: set[tuple[str, str]] = set()
    _WATCHERS.append(seen)
    # What is kept would not be looked up.
    _renew()
    try:
        yield seen
    finally:
        del _WATCHERS[next(i for i, other in enumerate(_WATCHERS) if other is seen)]


# The file of this machine.


def tuning_file() -> Path | None:
    """Where tuned parameters lie: ``$HFKVQ_TUNING``, else ``hfkvq/tuning.json`` in the user's cache folder.

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
    _renew()


def _problem(kernel: str, knobs: object) -> str | None:
    """What is wrong with a kernel's knobs, or None."""
    if not isinstance(knobs, dict):
        return f"{kernel}: got {knobs!r}, expected knobs by name."
    for name, value in knobs.items():
        if name not in DEFAULTS[kernel]:
            return f"{kernel}: knob {name!r} is unknown; known {', '.join(DEFAULTS[kernel])}."
        if not isinstance(value, int) or isinstance(value, bool) or value < LEAST[name]:
            return f"{kernel}: {name}: got {value!r}, allowed whole numbers from {LEAST[name]}."
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
def _saved(path: Path | None) -> Mapping[str, Mapping[str, Mapping[str, Knobs]]]:
    try:
        return _parse(path) if path is not None and path.exists() else {}
    except (OSError, ValueError) as error:
        # Tuning makes attention faster, not right: a file that cannot be used must not stop it.
        logger.warning(
            "The tuning file %s is ignored: %s Delete it, or run `hfkvq bench tune` anew elsewhere.", path, error
        )
        return {}


def save(device: torch.device, found: Mapping[str, Mapping[str, Knobs]]) -> Path:
    """Adds {kernel: {key: knobs}} of this GPU to the tuning file; other entries stay.

    Raises:
        ValueError: the file that is there is no tuning file, or there is no folder to put one in.
    """
    path = tuning_file()
    if path is None:
        raise ValueError("tuning file: there is no home folder; set HFKVQ_TUNING to a file name.")
    try:
        data = _parse(path) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"tuning file: {path} is something else ({error}) Move it, or set HFKVQ_TUNING.") from error
    own = data.setdefault(gpu_key(_gpu(device)[0]), {})
    for kernel, keys in found.items():
        own.setdefault(kernel, {}).update({key: dict(knobs) for key, knobs in keys.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be reading: it sees the old file or the new one.
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(json.dumps(data, indent=2, sort_keys=True) + "\n")
    os.replace(file.name, path)
    reload()
    return path
