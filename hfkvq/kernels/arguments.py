"""Arguments of an attention call beside queries, keys and values, as one value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionArguments(NamedTuple):
    """Arguments of an attention call beside queries, keys and values.

    Attributes:
        mask: (B or 1, Hq or 1, Q or 1, L), True or nonzero where visible, or float and added to the logits; None is
            what ``causal`` says.
        softcap: bound of the logits, 0 for none.
        sinks: (Hq,), logits of a token that is not there, or None.
        bias: (B or 1, Hq or 1, Q, L), added to the logits, or None.
        causal: what no mask means: causal, aligned to the newest token, or that everything is visible.
    """

    scaling: float
    mask: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = True

    def explicit(self, query: Tensor, columns: int) -> AttentionArguments:
        """The same for those who take no mask as causal: with a mask where everything is visible."""
        if self.mask is not None or self.causal or query.shape[2] == 1:
            return self
        return self._replace(mask=torch.ones(1, 1, 1, columns, dtype=torch.bool, device=query.device))

    def biased(self) -> AttentionArguments:
        """The same for those who know no bias: with the bias as a part of an additive mask."""
        if self.bias is None:
            return self
        bias, mask = self.bias, self.mask
        if mask is None and self.causal and bias.shape[2] > 1:
            queries, columns = bias.shape[2:]
            mask = torch.ones(queries, columns, dtype=torch.bool, device=bias.device).tril(columns - queries)
        if mask is None:
            added = bias
        elif mask.is_floating_point():
            added = bias + mask
        else:
            added = bias.masked_fill(~mask.bool(), torch.finfo(bias.dtype).min)
        return self._replace(mask=added, bias=None)
