"""The GPU that is measured."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from hfkvq.terminal import fail

# torch is imported inside, so that a command's help comes at once.
if TYPE_CHECKING:
    import torch


def bench_device() -> torch.device:
    """The current GPU; ends the command where there is none."""
    import torch

    if not torch.cuda.is_available():
        fail(
            f"bench: PyTorch {torch.__version__} sees no CUDA device. Timing needs an NVIDIA GPU (compute capability "
            "8.0 or newer), a CUDA build of PyTorch, and Triton. `hfkvq demo` and `hfkvq kld` run on a CPU."
        )
    if importlib.util.find_spec("triton") is None:
        fail("bench: Triton is not installed; pip install triton.")
    return torch.device("cuda", torch.cuda.current_device())
