"""The files of a prefix store: written whole, read whole or not at all, the least recently used removed first.

Nothing refers to a file that is older than itself: whoever uses a prompt's files touches its end with the oldest time,
then its pages from last to first. So the least recently used file is always one that no other needs, of whatever
prompts share it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from .cache_file import CPU, PART, Digests, read_file, write_file

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_TICK = 1000
"""Nanoseconds between the times of two files of a prompt."""

_LEFT_BEHIND = 24 * 3600
"""Seconds after which a file that is still being written has no writer any more."""


class Missing(Exception):
    """A file is not there, or is no longer good."""


def names_in(folder: Path) -> list[str]:
    """The names of a folder's files, without their suffix; none of one that does not exist."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        return [x.name.removesuffix(SUFFIX) for x in found if x.name.endswith(SUFFIX)]
    return []


def path_of(folder: Path, name: str) -> Path:
    """Header of a file."""
    return folder / f"{name}{SUFFIX}"


def write(
    path: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor], digests: Digests | None = None
) -> int:
    """Writes a file, whose description then says its name; returns its bytes. See `write_file`.

    Raises:
        OSError: there is no room for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_file(path, {**description, "name": path.name}, tensors, digests)


def read(path: Path, device: torch.device = CPU) -> tuple[Any, dict[str, Tensor]]:
    """Description and tensors of a file.

    Raises:
        Missing: it is not there, or was damaged; then it is removed, and a warning says so.
    """
    with _or_missing(path):
        description, tensors = read_file(path, device)
        if description.get("name") != path.name:
            raise ValueError(f"path: {path} was another file ({description.get('name')}).")
    return description, tensors


@contextlib.contextmanager
def _or_missing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Missing from None
    except ValueError as error:
        if isinstance(error.__context__, OSError):
            # Another process has removed it in between, or it cannot be read now, which does not make it bad.
            logger.info("a file of the prefix store cannot be read: %s", error)
        else:
            discard(path, error)
        raise Missing from None


def discard(path: Path, why: Exception | str) -> None:
    """Removes a file that is no good, and warns of it."""
    logger.warning("a prefix store's file was unusable and has been removed; its tokens are computed again: %s", why)
    with contextlib.suppress(OSError):
        path.unlink()


def touch(paths: Iterable[Path]) -> None:
    """Files are in use, those that others need first in the list; what is not there, or not ours, stays so."""
    now = time.time_ns()
    for i, path in enumerate(paths):
        with contextlib.suppress(OSError):
            used = now - i * _TICK
            os.utime(path, ns=(used, used))


def shrink(root: Path, max_bytes: int) -> None:
    """Removes the least recently used files until those of all models and schemes take ``max_bytes`` at the most."""
    # One process at a time, or each removes as much as one should.
    with FileLock(root / ".lock"):
        found = sorted(_files(root))
        total = sum(size for _, size, _ in found)
        for used, size, path in found:
            left_behind = path.name.endswith(PART)
            if total <= max_bytes and not left_behind:
                continue
            if left_behind and used > time.time_ns() - _LEFT_BEHIND * 10**9:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns != used:
                    continue
                path.unlink()
            total -= size


def total_bytes(root: Path) -> int:
    """Bytes of all files."""
    return sum(size for _, size, _ in _files(root))


def _files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Time of last use, bytes and path of each file."""
    for path in root.glob("*/*/*"):
        with contextlib.suppress(FileNotFoundError):
            state = path.stat()
            yield state.st_mtime_ns, state.st_size, path
