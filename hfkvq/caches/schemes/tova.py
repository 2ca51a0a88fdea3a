"""TOVA keeps the tokens that the newest query attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Entry, knob
from .eviction import TokenEviction
from .score_inputs import Evidence, Kind


@dataclass(frozen=True, kw_only=True)
class TOVA(TokenEviction):
    """Evicts the tokens that the newest query attends to least when the cache is full; all heads of a layer together.

    Layout: that of ``pages``. Prompts and steps are trimmed; all KV heads of a layer hold the same tokens.

    Paper: Oren et al., arXiv:2401.06104, section 4: a multi-state RNN whose policy is the attention of the last token,
    averaged over heads.
    Differs from the paper: a row may outgrow its budget by ``trim_every`` tokens before a step trims it (1 is the
    paper's), since a trim is work; a prompt attends to all of itself, and is trimmed when it is over; the newest token
    itself always stays (it does in kvpress).
    Differs from the released code: as above; softmax in f32.

    Attributes:
        budget_tokens: tokens per row and layer; 1024 if unset.
        budget_share: the same as a share of the tokens given.
        window: newest tokens that always stay. Only the newest query ranks tokens, with any window.
        sink_length: first tokens that always stay (0 in the paper).
        trim_every: see `TokenEviction`.
        pages: the scheme in whose pages the kept tokens are stored.
    """

    name = "tova"
    paper = "arXiv:2401.06104"
    place = 84
    alike = True
    presets = {
        "tova": Entry(
            "A fixed budget: keeps the tokens that the newest query attends to.", lists=("fit",), group="eviction"
        )
    }

    window: int = knob(1, low=1, high=4096)
    trim_every: int = knob(64, low=0, high=65536)

    @property
    def evidence(self) -> frozenset[Kind]:
        """Attention of the newest query."""
        return frozenset({"attention"})

    @property
    def queries(self) -> int:
        """One query, the newest."""
        return 1

    def scores(self, evidence: Evidence) -> Tensor:
        """Attention of the newest query, averaged over query heads; the layer averages over KV heads: f32 (N, n)."""
        return evidence.of("attention").mean(1)
