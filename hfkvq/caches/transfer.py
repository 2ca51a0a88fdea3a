"""Bytes of files to where they are needed, by several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 2**22
"""Bytes that are read and hashed at a time: few, to pin little memory, and enough to hide calls of Python."""

THREADS = min(os.cpu_count() or 1, 8)
"""More of them wait for each other's calls."""


def in_groups(call: Callable[[T], R], groups: Iterable[Iterable[T]], device: torch.device) -> Iterator[list[R]]:
    """What a call makes of each item, group by group, by several threads on the caller's stream of the device.

    They work on a group while the caller makes the next one, and uses what came of the one before. The first exception
    is raised; items that no thread has begun with are left out then.
    """
    stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def one(item: T) -> R:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            return call(item)

    pool = ThreadPoolExecutor(THREADS)
    try:
        before = None
        for group in groups:
            now = [pool.submit(one, item) for item in group]
            if before is not None:
                yield [each.result() for each in before]
            before = now
        if before is not None:
            yield [each.result() for each in before]
    finally:
        pool.shutdown(cancel_futures=True)


def side_by_side(call: Callable[[T], R], items: Iterable[T], device: torch.device) -> list[R]:
    """What a call makes of each item: one group of `in_groups`."""
    return next(in_groups(call, [items], device))


class Reader:
    """Fills tensors from files; for several threads.

    To a GPU bytes go through a little pinned memory: a part is read and hashed while the one before travels, and no
    memory of the file's size has to be pinned or faulted in.

    Args:
        device: where tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._staging: SimpleQueue[list[tuple[Tensor, Any]]] = SimpleQueue()
        if device.type == "cuda":
            pinned = torch.empty(THREADS, 2, CHUNK, dtype=torch.uint8, pin_memory=True)
            for pair in pinned.unbind():
                self._staging.put([(half, torch.cuda.Event()) for half in pair.unbind()])

    def fill(self, out: Tensor, file: int, at: int, digest: Any) -> None:
        """Reads as many bytes as a tensor has.

        Args:
            out: contiguous, on the device.
            file: descriptor.
            at: where they begin in the file.
            digest: of hashlib, which is given the bytes too.

        Raises:
            OSError: there are no so many, or they cannot be read.
        """
        data = out.view(-1).view(torch.uint8)
        if self.device.type == "cuda":
            staging = self._staging.get()
            try:
                for i, part in enumerate(data.split(CHUNK)):
                    half, travelled = staging[i % 2]
                    travelled.synchronize()
                    _read(file, at + i * CHUNK, half[: part.numel()], digest)
                    part.copy_(half[: part.numel()], non_blocking=True)
                    travelled.record(torch.cuda.current_stream(self.device))
            finally:
                self._staging.put(staging)
            return
        host = data if data.is_cpu else torch.empty_like(data, device="cpu")
        for i, part in enumerate(host.split(CHUNK)):
            _read(file, at + i * CHUNK, part, digest)
        if host is not data:
            data.copy_(host)


def _read(file: int, at: int, out: Tensor, digest: Any) -> None:
    """Reads and hashes one part: u8 (n,), on the CPU."""
    view, done = out.numpy().data, 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], at + done)
        if not count:
            raise OSError("it ends too early")
        done += count
    digest.update(view)
