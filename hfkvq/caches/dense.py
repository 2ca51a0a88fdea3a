"""Attention over dense keys and values, for prompts of layers of fixed capacity."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 512
"""Queries whose logits are held at a time, where PyTorch's own attention lacks an argument."""


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
) -> Tensor:
    """Attention over dense keys and values (B, H, T, D); no mask means causal, aligned to the newest token."""
    queries, columns = query.shape[2], keys.shape[2]
    gqa = query.shape[1] != keys.shape[1]
    if sinks is None and not softcap:
        if mask is None and queries < columns:
            mask = torch.ones(queries, columns, dtype=torch.bool, device=query.device).tril(columns - queries)
        elif mask is not None and not mask.is_floating_point():
            mask = mask.bool()
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    share = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(share, 1) for x in (keys, values))
    outs = []
    for first in range(0, queries, _CHUNK):
        own = query[:, :, first : first + _CHUNK].float()
        logits = own @ keys.transpose(-1, -2) * scaling
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        count = own.shape[2]
        if mask is None:
            shown = torch.ones(count, columns, dtype=torch.bool, device=query.device)
            logits = logits.masked_fill(~shown.tril(columns - queries + first), -torch.inf)
        else:
            shown = mask if mask.shape[2] == 1 else mask[:, :, first : first + count]
            logits = logits + shown if mask.is_floating_point() else logits.masked_fill(~shown.bool(), -torch.inf)
        if sinks is not None:
            extra = sinks.float().view(1, -1, 1, 1).expand(logits.shape[0], -1, count, 1)
            logits = torch.cat([logits, extra], -1)
        probs = torch.softmax(logits, -1).nan_to_num(0.0)[..., :columns]
        outs.append((probs @ values).to(query.dtype))
    return torch.cat(outs, 2)
