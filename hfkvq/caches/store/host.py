"""Pages in the host's memory, which kernels read and write where they lie.

A GPU reaches pinned memory by its address, so pages there are CUDA tensors like any others, to kernels and to PyTorch:
captured steps have their fixed addresses, and what is sealed is written there at once. Each byte crosses the bus when
it is read, or when a captured step copies it a layer ahead (`hfkvq.kernels.step.Ahead`).
"""

from __future__ import annotations

import weakref
from dataclasses import replace as replaced

import torch
from torch import Tensor

from hfkvq.kernels.pages import RunView

from ..base import outside_inference_mode

_MARK = "hfkvq_block"
"""Attribute of a storage that lies in the host's memory: its `_Block`, which it keeps."""


class _Block:
    """Memory of the host, pinned for a GPU, for as long as any tensor lies there."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        try:
            self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        except RuntimeError as error:
            raise torch.OutOfMemoryError(f"offloading: {size / 2**30:.2f} GiB cannot be pinned: {error}") from error
        if is_cuda:
            stream = torch.cuda.current_stream(device)
            byte = torch.empty(1, dtype=torch.uint8, device=device)
            end = weakref.finalize(self, _hand_back, self.bytes, byte, stream)
            end.atexit = False


_WAITING: list[Tensor] = []
"""Blocks that went while a graph was captured, which takes no copy."""


def _hand_back(block: Tensor, byte: Tensor, stream: torch.cuda.Stream) -> None:
    """Lets PyTorch reuse pinned memory only when the GPU is done there: it waits for copies, and knows no others.

    On the stream on which the block was made, whoever lets go of it.
    """
    if torch.cuda.is_current_stream_capturing():
        _WAITING.append(block)
        return
    with torch.cuda.stream(stream):
        byte.copy_(block[:1], non_blocking=True)
        while _WAITING:
            byte.copy_(_WAITING.pop()[:1], non_blocking=True)


@outside_inference_mode
def empty(size: int, device: torch.device) -> Tensor:
    """So many bytes of the host's memory: u8 (size,), a tensor of the device.

    Raises:
        torch.OutOfMemoryError: the host has not so much memory that can be pinned.
    """
    found = torch.empty(0, dtype=torch.uint8, device=device)
    if not size:
        return found
    block = _Block(size, device)
    # Unlike an import by DLPack or an array interface, this asks no driver which device pinned memory belongs to.
    storage = torch._C._construct_storage_from_data_pointer(  # pyright: ignore[reportAttributeAccessIssue]
        block.bytes.data_ptr(), device, size
    )
    setattr(storage, _MARK, block)
    return found.set_(storage)


def is_hosted(x: Tensor) -> bool:
    """True if a tensor lies in memory from `empty`."""
    return hasattr(x.untyped_storage(), _MARK)


def pinned(x: Tensor) -> Tensor:
    """Memory from `empty`, as a tensor of the host: u8 (size,)."""
    return getattr(x.untyped_storage(), _MARK).bytes


def hosted(view: RunView) -> RunView:
    """A run whose pages lie in the host's memory."""
    parts = [*view.keys, *view.values]
    for i, part in enumerate(parts):
        if part.numel() and not is_hosted(part):
            found = empty(part.nbytes, part.device)
            pinned(found).copy_(part.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            parts[i] = found.view(part.dtype).view(part.shape)
    return replaced(view, keys=parts[: len(view.keys)], values=parts[len(view.keys) :])
