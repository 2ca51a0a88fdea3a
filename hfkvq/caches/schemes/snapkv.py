"""SnapKV keeps the tokens that a prompt's last queries attend to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Entry, knob
from .eviction import TokenEviction
from .score_inputs import Evidence, Kind, window_scores


@dataclass(frozen=True, kw_only=True)
class SnapKV(TokenEviction):
    """Keeps the tokens of a prompt that its last queries attend to, and their neighbours; each KV head its own.

    Layout: that of ``pages``, "full" or any other scheme's. Generated tokens stay.

    Paper: Li et al., arXiv:2404.14469, section 4: the votes of an observation window, pooled, then the best and the
    window itself; `scores`.
    Differs from the paper: query heads of a KV head vote together; the window is 64 tokens and pooling is the mean of
    5, as in the released code (Figure 6 and the appendix try others, and the maximum); a budget may be a share.
    Differs from the released code: softmax in f32; scores of padded rows are those of the rows alone.

    Attributes:
        budget_tokens: largest number of tokens per row and KV head after a prompt, the window included; 1024 if unset.
        budget_share: the same as a share of the prompt.
        window: w, newest tokens, whose queries vote.
        kernel: number of neighbouring scores that are averaged; odd.
        sink_length: first tokens that always stay (0 in the paper).
        trim_every: see `TokenEviction`; steps trim by the newest query only.
        pages: the scheme in whose pages the kept tokens are stored.
    """

    name = "snapkv"
    paper = "arXiv:2404.14469"
    place = 80
    presets = {
        "snapkv": Entry(
            "Long prompts: keeps the tokens that the end of the prompt attends to.",
            lists=("fit",),
            group="eviction",
        )
    }

    window: int = knob(64, low=1, high=4096, search=[16, 32, 64])
    kernel: int = knob(5, choices=(1, 3, 5, 7, 9, 11, 13), search=[1, 5, 7, 13])

    @property
    def evidence(self) -> frozenset[Kind]:
        """Attention of the window's queries."""
        return frozenset({"attention"})

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores ``avgpool(mean_q A)`` of the tokens before the window, averaged over query heads: f32 (N, n)."""
        return window_scores(evidence, self.window, self.kernel)
