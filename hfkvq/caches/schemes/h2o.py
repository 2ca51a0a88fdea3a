"""H2O keeps the tokens that have received most attention so far."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Entry, knob
from .eviction import TokenEviction
from .score_inputs import Evidence, Kind


@dataclass(frozen=True, kw_only=True)
class H2O(TokenEviction):
    """Keeps the newest tokens, and older ones that all queries together have attended to most.

    Layout: that of ``pages``. Prompts and steps are trimmed; each KV head has its own tokens.

    Paper: Zhang et al., arXiv:2306.14048, Algorithm 1: the score of a token is the attention that it has received,
    summed over all queries since it came (`scores`, `merge`); half of the budget is for the newest tokens.
    Differs from the paper: query heads of a KV head are averaged; a row may outgrow its budget by ``trim_every`` tokens
    before a step trims it (1 is the paper's), since a trim is work; a prompt attends to all of itself, and is trimmed
    when it is over.
    Differs from the released code: softmax in f32; padding neither pays nor receives attention.

    Attributes:
        budget_tokens: tokens per row and KV head; 1024 if unset.
        budget_share: the same as a share of the tokens given (the released code's way).
        window: newest tokens that always stay; the paper takes half of the budget.
        sink_length: first tokens that always stay (0 in the paper).
        trim_every: see `TokenEviction`. If steps are trimmed, each one needs its attention weights and cannot be
            captured; with 0, steps are like any other scheme's.
        pages: the scheme in whose pages the kept tokens are stored.
    """

    name = "h2o"
    paper = "arXiv:2306.14048"
    place = 82
    presets = {
        "h2o": Entry(
            "A fixed budget: keeps the tokens with the most attention so far. Computes scores in every step.",
            lists=("fit",),
            group="eviction",
        ),
        "h2o-prompt": Entry("H2O that evicts from prompts only.", {"trim_every": 0}, group="eviction"),
    }

    window: int = knob(512, low=1, high=65536)
    trim_every: int = knob(64, low=0, high=65536)

    @property
    def evidence(self) -> frozenset[Kind]:
        """Attention of all queries."""
        return frozenset({"received"})

    @property
    def remembers(self) -> bool:
        """True, since attention adds up."""
        return True

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores ``Σ_q A``, averaged over query heads: f32 (N, n)."""
        return evidence.of("received").mean(1)

    def merge(self, old: Tensor, new: Tensor) -> Tensor:
        """Sum of both."""
        return old + new
