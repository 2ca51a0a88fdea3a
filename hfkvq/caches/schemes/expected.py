"""Expected Attention keeps the tokens that future queries are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Entry, knob
from .eviction import TokenEviction
from .score_inputs import Evidence, Kind, expected_attention


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(TokenEviction):
    """Keeps the tokens that future queries are expected to attend to, if they are normal like the newest ones.

    Layout: that of ``pages``. Generated tokens stay; each KV head has its own tokens.

    Paper: Devoto et al., arXiv:2510.00636, section 3: ``E[exp(q·k/√d)] = exp(μ·k/√d + kᵀΣk/2d)`` for normal queries,
    times the norm of the value; `score_inputs.expected_attention`.
    Differs from the paper: μ and Σ are of the newest ``recent`` queries as attention saw them, positions included. The
    paper takes all queries, without positions, and turns μ and Σ by the mean rotation of the 512 positions to come. So
    future queries are here taken to have the positions of the newest, and the variance by positions is part of Σ.
    Differs from the released code: as above; scores of padded rows are those of the rows alone.

    Attributes:
        budget_tokens: largest number of tokens per row and KV head after a prompt; 1024 if unset.
        budget_share: the same as a share of the prompt.
        window: newest tokens that always stay (none in the paper; here one at least).
        recent: number of newest queries from which μ and Σ are computed.
        epsilon: added to expected attention before it is multiplied by the value's norm.
        sink_length: first tokens that always stay, and whose queries do not count.
        trim_every: see `TokenEviction`; steps trim by the newest query only.
        pages: the scheme in whose pages the kept tokens are stored.
    """

    name = "expected-attention"
    paper = "arXiv:2510.00636"
    place = 85
    presets = {
        "expected-attention": Entry(
            "Long prompts before the question is known: keeps what future queries are expected to attend to.",
            lists=("fit",),
            group="eviction",
        )
    }

    window: int = knob(1, low=1, high=4096)
    recent: int = knob(512, low=2, high=65536, search=[128, 512, 2048])
    epsilon: float = knob(0.0, low=0.0, high=1.0, search=[0.0, 0.01, 0.1])
    sink_length: int = knob(4, low=0, high=4096)

    @property
    def evidence(self) -> frozenset[Kind]:
        """Newest queries, keys and values."""
        return frozenset({"queries", "keys", "values"})

    @property
    def queries(self) -> int:
        """Number of newest queries from which μ and Σ are computed."""
        return self.recent

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores ``(E + ε) |v|`` with E averaged over query heads: f32 (N, n)."""
        query, real = evidence.of("queries").float(), evidence.of("real")
        place = evidence.length[:, None] - torch.arange(query.shape[2], 0, -1, device=query.device)
        weight = (real & (place >= self.sink_length))[:, None, :, None].float()
        count = weight.sum(2, keepdim=True).clamp(min=1)
        mean = (query * weight).sum(2, keepdim=True) / count
        centred = (query - mean) * weight
        expected = expected_attention(mean[:, :, 0], centred.mT @ centred / count, evidence, self.sink_length)
        return (expected.mean(1) + self.epsilon) * evidence.of("values").float().norm(dim=-1)
