"""PyramidKV keeps SnapKV's tokens, more of them in lower layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Entry, knob
from .eviction import TokenEviction
from .score_inputs import Evidence, Kind, window_scores


@dataclass(frozen=True, kw_only=True)
class PyramidKV(TokenEviction):
    """SnapKV's choice of tokens, with budgets that fall evenly from the first layer to the last.

    Layout: that of ``pages``. Generated tokens stay.

    Paper: Cai et al., arXiv:2406.02069, section 3.2: budgets are an arithmetic sequence over the layers whose mean is
    the budget, and whose least is a part 1/β of it; `budget`. Scores are SnapKV's.
    Differs from the paper: budgets count the window, so that their mean is the budget; where the least would not hold
    window and sink, or a prompt is too short for the pyramid, every layer has the mean (kvpress does both). So budgets
    of upper layers fall where more tokens come, and with `trim_every` their tokens go then.
    Differs from the released code: as above; budgets are rounded to the nearest token, half to even.

    Attributes:
        budget_tokens: tokens per row and KV head after a prompt, on average over layers; 1024 if unset.
        budget_share: the same as a share of the prompt.
        window: α, newest tokens, whose queries vote.
        beta: β, the factor between the mean budget and that of the last layer; larger is steeper.
        kernel: number of neighbouring scores that are averaged; odd.
        sink_length: first tokens that always stay (0 in the paper).
        trim_every: see `TokenEviction`; steps trim by the newest query only.
        pages: the scheme in whose pages the kept tokens are stored.
    """

    name = "pyramidkv"
    paper = "arXiv:2406.02069"
    place = 81
    presets = {"pyramidkv": Entry("SnapKV with larger budgets in the lower layers.", lists=("fit",), group="eviction")}

    window: int = knob(8, low=1, high=4096, search=[8, 32, 64])
    beta: int = knob(20, low=1, high=1000, search=[2, 5, 10, 20])
    kernel: int = knob(5, choices=(1, 3, 5, 7, 9, 11, 13))

    def budget(self, given: Tensor, layer: int, layers: int) -> Tensor:
        """Budget ``b_l = b_0 - l (b_0 - b_{m-1}) / (m - 1)`` with ``b_{m-1} = b / β``; b_0 at most the older tokens."""
        mean = super().budget(given, layer, layers)
        older, even = (given - self.window).double(), mean.double()
        least = even / self.beta
        most = 2 * even - least
        least = torch.where(most >= older, 2 * even - older, least)
        most = torch.minimum(most, older)
        falls = (given >= most) & (most >= least) & (least >= self.window + self.sink_length)
        return torch.where(falls, (most - layer * (most - least) / max(layers - 1, 1)).round().long(), mean)

    @property
    def evidence(self) -> frozenset[Kind]:
        """Attention of the window's queries."""
        return frozenset({"attention"})

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores of SnapKV: f32 (N, n)."""
        return window_scores(evidence, self.window, self.kernel)
