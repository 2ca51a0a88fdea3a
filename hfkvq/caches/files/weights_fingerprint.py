"""Fingerprint of a model among others of its architecture: its weights and its active adapters."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

_SAMPLES = 64


def weights_hash(model: torch.nn.Module) -> str:
    """64 hex digits of all weights, the same on every device, and of the adapters of PEFT that are active.

    Every weight is read once. Those that are offloaded count by their names and shapes.
    """
    whole = hashlib.sha256()
    for name, x in model.state_dict().items():
        if isinstance(x, Tensor):
            # A process of a model that is split over GPUs has a part of it, and a cache of its own.
            local: Tensor = getattr(x, "to_local", lambda x=x: x)()
            whole.update(f"{name} {local.dtype} {tuple(local.shape)} {_sums(local)}".encode())
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, (list, tuple, str)) and hasattr(module, "scaling"):
            state = [name, active, getattr(module, "disable_adapters", False), module.scaling]
            whole.update(json.dumps(state, default=str).encode())
    return whole.hexdigest()


def _sums(x: Tensor) -> list[int]:
    """Sum of a tensor's bits, which any change of it changes, and a few of them, which tell their order."""
    if x.device.type == "meta" or x.is_sparse or not x.numel():
        return []
    flat = x.detach().contiguous().flatten()
    if flat.data_ptr() % 8:
        flat = flat.clone()
    bits = flat.view(torch.uint8)
    words = bits.numel() // 8
    # Integers, so that the order of adding changes nothing; eight bytes at a time, which is as fast as memory.
    total = bits[: 8 * words].view(torch.int64).sum() + bits[8 * words :].sum()
    some = bits[:: max(1, bits.numel() // _SAMPLES)][:_SAMPLES].long()
    return torch.cat([total[None], some]).tolist()
