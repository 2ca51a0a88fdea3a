"""Recorded steps: their definition, and the test of a running forward.

A recorded step runs once in Python and then again and again without it: as a compiled graph of `torch.compile`, or as
a CUDA graph (see `hfkvq.caches.step_graphs`). So it may use nothing that the host knows of lengths: layers
answer with numbers on the device, masks are of one shape, and attention is one operation a layer over the layer's
buffer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _State(threading.local):
    recording = False


_STATE = _State()


def is_recorded() -> bool:
    """True if the running forward is a recorded step, traced by the compiler or run within `recording`."""
    return torch.compiler.is_compiling() or _STATE.recording


def is_captured() -> bool:
    """True if the running forward is a step for a CUDA graph, which the compiler does not trace."""
    return not torch.compiler.is_compiling() and _STATE.recording


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Forwards of this thread are recorded steps within this context."""
    _STATE.recording = True
    try:
        yield
    finally:
        _STATE.recording = False
