"""Headers of records: date, versions, device; and the clock that they are made with."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import hfkvq

PACKAGES = ("torch", "transformers", "triton", "accelerate", "safetensors", "lm-eval", "optuna", "liger-kernel")
"""Packages whose versions a bug report has."""

BASELINE = "DynamicCache"
"""Transformers' own cache, which all others are compared with."""


def now() -> str:
    """Date and time, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of Python, of packages (None where one is not installed), and of this library."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"hfkvq": hfkvq.__version__}


def commit() -> str | None:
    """Commit of the checkout that this library runs from, with "-dirty" behind it if files were changed; else None."""
    root = Path(hfkvq.__file__).resolve().parents[1]
    # An installed package may lie in somebody else's checkout.
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device: torch.device) -> str:
    """Name of the hardware."""
    if device.type != "cuda":
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name(device)


def clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def environment() -> dict[str, str]:
    """Versions, GPUs and settings, by what they are of."""
    found = versions(*PACKAGES)
    source = commit()
    # A package is named by its version; its folder stays private.
    said = {"hfkvq": f"{hfkvq.__version__}, {f'checkout at {source}' if source else 'package'}"}
    said |= {"python": str(found["python"]), "platform": platform.platform()}
    said |= {name: found[name] or "not installed" for name in PACKAGES}
    said["cpu"] = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    said["CUDA of torch"] = torch.version.cuda or "none"
    if not torch.cuda.is_available():
        said["GPU"] = "none"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        room = about.total_memory / 2**30
        said[f"GPU {index}"] = f"{about.name}, {room:.0f} GiB, compute capability {about.major}.{about.minor}"
    return said
