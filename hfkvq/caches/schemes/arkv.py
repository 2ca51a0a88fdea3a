"""ARKV keeps a token in 16 bits, keeps it in few bits, or evicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hfkvq.kernels.pages import SIDES, PageFormat

from .base import Entry, Layout, SideLayout, knob
from .eviction import EvictionScheme
from .score_inputs import WHOLE, Attention, Evidence, Kind, token_scores

SEAL_UNIT = 16
"""Tokens that leave the tail together, for fewer seals; values do not depend on it, since these tokens stay whole."""


@dataclass(frozen=True, kw_only=True)
class Arkv(EvictionScheme):
    """Budget of tokens per layer and KV head: the best stay whole, the next in few bits, the others are evicted.

    Layout: two runs, few bits first. The newest ``window`` tokens always stay, whole. Older ones are ranked by the
    attention that the newest queries pay them, each KV head for itself, when a row outgrows its budget. How many of
    those that stay are whole is the layer's own share ρ, measured on the prompt.

    Paper: Lei and Ilager, arXiv:2603.08727. Eqs. (3) to (5) are `layer_statistics`, (6) and (7) `strength` and
    `share`, (9) is `score_inputs.token_scores`, (8) and (10) are `kept`, `whole` and `score_inputs.tier_widths`.
    Differs from the paper: B_o is ρ of the tokens kept (eq. 8 counts tokens that Algorithm 1 evicts); the variance in
    eq. (9) is not squared; rows of a batch and their padding are told apart; precision that is lost is not bought back,
    so a token in few bits stays so and its place goes to the next whole one; optional budget in bytes, INT4 tier.
    Differs from the released code: attention reads the quantized tokens (there they are lost with the next token); the
    window is subtracted once; scales are per token and KV head; a prompt's tokens get their tiers when its last layer
    is done, not a step later; a step of several tokens never keeps more than a prompt would.

    Attributes:
        budget_tokens: C, largest number of tokens per row, KV head and layer; 1024 if both budgets are None.
        budget_bytes: the same in bytes of keys, values, scales and positions, so that few bits make room for more
            tokens. Partly filled pages, tables and unused slots of the tail add a few pages per KV head.
        window: W, newest tokens that always stay in full precision, and whose queries rank a prompt's tokens.
        alpha: α, share of the older tokens that a trim keeps; the smaller, the fewer trims.
        gamma: γ, weight of the variance over queries in a token's score.
        tau_entropy: τ1, root of the entropy in a layer's strength.
        tau_variance: τ2, the same for the variance.
        tau_kurtosis: τ3, the same for the kurtosis.
        stats: statistics, and variance in eq. (9): those of the released code, for which γ and τ were
            tuned, or those of the paper's equations. Both use the window's attention to older tokens (eq. 2).
        tiers: kept tokens that stay in full precision: "mixed" some, "origin" all (ρ = 1, only eviction), "quant" none
            (ρ = 0).
        score: ranking of tokens: by "attention", or by "recency" (the newest stay; a baseline).
        low_bits: width of the low tier: 8 (fp8 e4m3, one scale per token) or 4 (INT4, one scale per 32 channels).
    """

    name = "arkv"
    paper = "arXiv:2603.08727"
    place = 60
    presets = {
        "arkv": Entry(
            "A fixed budget per KV head: tokens stay whole, are quantized or evicted, by the attention they receive.",
            lists=("fit",),
        ),
        "arkv-origin": Entry(
            "ARKV's baseline: eviction only, with all kept tokens in 16 bits.", {"tiers": "origin"}, group="baseline"
        ),
        "arkv-quant": Entry("ARKV with all kept tokens in fp8: more tokens in the same bytes.", {"tiers": "quant"}),
        "arkv-window": Entry(
            "ARKV's baseline: a sliding window over the newest tokens.",
            {"tiers": "origin", "score": "recency"},
            group="baseline",
        ),
    }

    budget_bytes: int | None = knob(None, low=1)
    low_bits: int = knob(8, choices=(8, 4))
    alpha: float = knob(0.75, low=0.0, high=1.0, search=(0.05, 1.0))
    # Defaults of the released code, found by search on the code's statistics.
    gamma: float = knob(263.8108280337562, low=0.0, search=(1.0, 1000.0))
    tau_entropy: float = knob(7.774380648611771, low=1e-3, search=(1.0, 20.0))
    tau_variance: float = knob(5.407015096778621, low=1e-3, search=(1.0, 20.0))
    tau_kurtosis: float = knob(5.527702582901318, low=1e-3, search=(1.0, 20.0))
    stats: str = knob("code", choices=("code", "paper"))
    tiers: str = knob("mixed", choices=("mixed", "origin", "quant"))
    score: str = knob("attention", choices=("attention", "recency"))
    page_size: int = knob(32, low=8, high=1024)
    smooth_keys: bool = knob(True, choices=(False, True))

    def __post_init__(self) -> None:
        """Checks how the knobs go together."""
        super().__post_init__()
        if self.alpha == 0:
            raise ValueError("alpha: got 0, allowed more than 0 up to 1; use arkv-window to keep no older token.")
        if self.budget_tokens is not None and self.budget_bytes is not None:
            raise ValueError(
                f"budget_tokens, budget_bytes: got {self.budget_tokens} and {self.budget_bytes}, allowed one of them; "
                "set the other to None."
            )
        if self.budget_bytes is None and self.tokens <= self.window:
            raise ValueError(
                f"budget_tokens: got {self.tokens}, allowed more than the window of {self.window} tokens, which always "
                "stay; raise it, or lower window."
            )

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """A run of few bits and a whole one, both per token; the window stays in the tail."""

        def side(dim: int) -> SideLayout:
            group = dim if self.low_bits == 8 or dim % 32 else 32
            low = PageFormat(self.low_bits, "token", group, self.page_size)
            return SideLayout((low, PageFormat(WHOLE, "token", 1, self.page_size)), self.window, SEAL_UNIT)

        layout = Layout(side(key_dim), side(value_dim))
        self.token_bytes(layout, key_dim, value_dim, 2)
        return layout

    def token_bytes(self, layout: Layout, key_dim: int, value_dim: int, itemsize: int) -> tuple[int, int]:
        """Bytes of one token of one KV head in few bits and whole: codes, scales and position.

        ``itemsize`` is of the model's dtype. A budget in bytes without room for more than the window raises ValueError.
        """
        costs = [4, 4]
        for i, pair in enumerate(layout.store.runs):
            for fmt, side, dim in zip(pair, SIDES, (key_dim, value_dim), strict=True):
                for shape, own in fmt.shapes(side, 1, dim).values():
                    size = itemsize if own is None else own.itemsize
                    costs[i] += size * math.prod(shape) // fmt.page_size
        low, whole = costs
        if self.budget_bytes is not None and self.budget_bytes <= self.window * whole:
            raise ValueError(
                f"budget_bytes: got {self.budget_bytes}, allowed more than {self.window * whole}, which the window of "
                f"{self.window} tokens takes in each KV head in {8 * itemsize} bits; raise it, or lower window."
            )
        return low, whole

    @property
    def rounds_keys(self) -> bool:
        """True unless all tokens stay whole."""
        return self.tiers != "origin"

    @property
    def smooths_keys(self) -> bool:
        """Knob ``smooth_keys``, unless all tokens stay whole."""
        return self.smooth_keys and self.rounds_keys

    def kept(self, past: Tensor, share: Tensor, costs: tuple[int, int], prompt: Tensor) -> Tensor:
        """Number of older tokens that a trim keeps: b = floor(α * past) (eq. 10), at most the room in the budget.

        Args:
            past: i64 (...,), tokens older than the window.
            share: f32 (...,), the layer's share of whole tokens.
            costs: bytes of a token in few bits and whole, see `token_bytes`.
            prompt: bool (...,), whether a prompt is trimmed: it fills the budget.

        Returns:
            i64 (...,).
        """
        if self.budget_bytes is None:
            room = torch.full_like(past, self.tokens - self.window)
            base = past
        else:
            low, whole = costs
            each = share.double() * whole + (1 - share.double()) * low
            # Room for one token less: counts of whole tokens are rounded.
            left = self.budget_bytes - self.window * whole - (whole - low)
            room = (left / each).floor().long().clamp(min=0)
            base = torch.minimum(room, past)
        step = (self.alpha * base.double()).floor().long()
        return torch.minimum(torch.where(prompt, room, step), torch.minimum(room, past))

    def most_kept(self, past: int, costs: tuple[int, int]) -> int:
        """Number of a prompt's older tokens that stay if all of them get few bits; arguments are those of `kept`."""
        old = torch.tensor(past, dtype=torch.int64, device="cpu")
        return int(self.kept(old, torch.zeros_like(old), costs, torch.ones_like(old, dtype=torch.bool)))

    def whole(self, kept: Tensor, share: Tensor) -> Tensor:
        """Number of kept tokens that stay whole: B_o = round(ρ b), half up: i64 (...,)."""
        return (share.double() * kept + 0.5).floor().long()

    @property
    def evidence(self) -> frozenset[Kind]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Attention, unless tokens are ranked by age and tiers are fixed."""
        return frozenset() if self.score == "recency" and self.tiers != "mixed" else frozenset({"attention"})

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores by eq. (9), or by age: f32 (N, n)."""
        if self.score == "recency":
            return evidence.rank.float()
        return token_scores(evidence.attention, evidence.past(self.window), self.gamma, self.stats == "paper")

    def layer_statistics(self, seen: Attention, past: Tensor) -> Tensor:
        """Entropy, variance and kurtosis of each KV head by ``stats``: f32 (N, 3); ``past`` is as in `Evidence.past`.

        "code": ``-Σ A log(A + 1e-10)``, ``Σ var_q A`` and ``Σ m4 / max(m2, 1e-8)²``, sums over a KV head's query heads,
        queries and past keys. "paper": eqs. (3) to (5), of ``p_k = Σ_{h,q} A / Z`` over the past keys.
        """
        if self.stats == "code":
            count = seen.count.clamp(min=1)[:, None, None]
            kurtosis = (seen.fourths / count) / (seen.squares / count).clamp(min=1e-8).square()
            each = torch.stack([seen.entropy, seen.variance, kurtosis], 1)
            return (each * past[:, None, None]).sum((2, 3))
        # Sums over queries; Z takes their number out again.
        p = seen.mean.sum(1) * seen.count[:, None] * past
        p = p / p.sum(1, keepdim=True).clamp(min=1e-30)
        keys = past.sum(1, keepdim=True).clamp(min=1)
        centred = (p - p.sum(1, keepdim=True) / keys) * past
        second, fourth = (centred.pow(n).sum(1) / keys[:, 0] for n in (2, 4))
        # Flat attention: 0 / 0.
        kurtosis = torch.where(second > 0, fourth / second.square().clamp(min=1e-38), 0.0)
        return torch.stack([-torch.special.xlogy(p, p).sum(1), second, kurtosis], 1)

    def strength(self, statistics: Tensor) -> Tensor:
        """Strength of a layer (eq. 6), ``o = E^(1/τ1) V^(1/τ2) κ^(1/τ3)`` of each row: f32 (B,) from (B, H, 3)."""
        joined = (statistics.sum(1) if self.stats == "code" else statistics.mean(1)).clamp(min=0).double()
        roots = (1 / self.tau_entropy, 1 / self.tau_variance, 1 / self.tau_kurtosis)
        return torch.stack([joined[:, i] ** root for i, root in enumerate(roots)]).prod(0).float()

    def share(self, own: Tensor, most: Tensor) -> Tensor:
        """Share ``ρ = o / max o`` over the layers (eq. 7), 1 where all are 0; 1 or 0 where the tiers are fixed."""
        if self.tiers != "mixed":
            return torch.full_like(own, float(self.tiers == "origin"))
        return torch.where(most > 0, own / most, 1.0)
