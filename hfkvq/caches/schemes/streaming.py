"""StreamingLLM keeps the first tokens and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Entry, knob
from .eviction import TokenEviction
from .score_inputs import Evidence


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(TokenEviction):
    """Keeps a window over the newest tokens, and the first few tokens (the attention sink).

    Layout: that of ``pages``. Prompts and steps are trimmed; all KV heads hold the same tokens, without scores.

    Paper: Xiao et al., arXiv:2309.17453, section 3.2: four initial tokens and a rolling window.
    Differs from the paper: keys keep the positions that they came with (there positions are those within the cache), so
    a model runs no further than its own context; a row may outgrow its budget by ``trim_every`` tokens before a step
    trims it (1 is the paper's); a prompt attends to all of itself, and is trimmed when it is over.
    Differs from the released code: as above.

    Attributes:
        budget_tokens: tokens per row, including the first ones; 1024 if unset.
        budget_share: the same as a share of the tokens given.
        window: smallest number of newest tokens; the budget may have room for more.
        sink_length: first tokens that always stay.
        trim_every: see `TokenEviction`.
        pages: the scheme in whose pages the kept tokens are stored.
    """

    name = "streaming-llm"
    paper = "arXiv:2309.17453"
    place = 83
    alike = True
    presets = {
        "streaming-llm": Entry(
            "Endless text: keeps the attention sink (the first four tokens) and the newest tokens.",
            lists=("fit",),
            group="eviction",
        )
    }

    window: int = knob(1, low=1, high=4096)
    sink_length: int = knob(4, low=0, high=4096, search=[0, 4, 16])
    trim_every: int = knob(64, low=0, high=65536)

    def scores(self, evidence: Evidence) -> Tensor:
        """Ranks by age, the newest best: f32 (N, n)."""
        return evidence.rank.float()
