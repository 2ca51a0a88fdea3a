"""Headers of records: date, versions, device; and the clock that they are made with."""

from __future__ import annotations

import math
import platform
import subprocess
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import hfkvq

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
