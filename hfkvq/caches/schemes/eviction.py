"""Schemes that evict: how many tokens stay, which ones, by what evidence, and when the others go.

First what all have in common, then those that hold what stays in the pages of any other scheme: SnapKV, PyramidKV, H2O,
StreamingLLM, TOVA, Expected Attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base import warn_once
from .base import Entry, Layout, Limits, Scheme, get_scheme, knob
from .score_inputs import Evidence, Kind, expected_attention

ASKS = "scores that accumulate ask attention in every step"


@dataclass(frozen=True, kw_only=True)
class EvictionScheme(Scheme):
    """A scheme that forgets tokens: in each layer and KV head the best stay, as many as a budget has room for.

    When a prompt is over, and when steps have added `interval` tokens to a full budget, `scores` is shown the
    `evidence` that it asks for. Of every row the first `first` tokens and the newest ``window`` always stay; of the
    others those of highest score, until the row holds `budget` tokens. Of a first prompt the others are never stored;
    later they leave the pages that they were in.

    A scheme that only evicts derives from `TokenEviction`, which holds what stays in the pages of any other scheme, and
    writes `scores` and `evidence`. `Arkv` gives what stays bits of its own.

    Attributes:
        evidence: inputs of `scores`; none for schemes that go by position alone. See `Evidence`.
        remembers: whether scores have a history, see `merge`; then every step is shown its evidence, if steps trim.
        alike: whether all KV heads of a layer keep the same tokens, by the mean of their scores; else each its own.
        budget_tokens: most tokens of a row in each KV head of a layer; None for the scheme's own default.
        window: newest tokens that always stay.
    """

    evicts: ClassVar[bool] = True
    evidence: ClassVar[frozenset[Kind]] = frozenset()
    remembers: ClassVar[bool] = False
    alike: ClassVar[bool] = False

    budget_tokens: int | None = knob(None, low=2)
    window: int = knob(32, low=1, high=4096, search=[16, 32, 64])

    @property
    def tokens(self) -> int:
        """Tokens of a row in each KV head, where the budget is a number of tokens."""
        return 1024 if self.budget_tokens is None else self.budget_tokens

    @property
    def first(self) -> int:
        """First tokens of a row that always stay; those that the layout keeps as a sink do anyway."""
        return 0

    @property
    def queries(self) -> int:
        """Newest queries of a prompt that are shown, where `evidence` has "attention" or "queries"; a step has one."""
        return self.window

    @property
    def interval(self) -> int | None:
        """Steps trim a row that holds so many tokens more than its budget; None trims at the end of prompts alone."""
        return 1

    def budget(self, given: Tensor, layer: int, layers: int) -> Tensor:
        """Tokens that a row holds after a trim: i64 (...,), of tokens given so far, i64 (...,), those gone included.

        It may be less for more tokens given. Tokens that always stay do so whatever it says.
        """
        return torch.full_like(given, self.tokens)

    def room(self, given: Tensor, held: Tensor, layer: int, layers: int, hold: int = 0) -> Tensor:
        """Tokens that a trim leaves: the budget, at least those that always stay, at most those ``held``, i64 (...,).

        ``hold`` newest tokens have to stay, beyond the window.
        """
        always = self.first + max(self.window, hold)
        return torch.minimum(self.budget(given, layer, layers).clamp(min=always), held)

    def due_in(self, given: Tensor, held: Tensor, layer: int, layers: int, hold: int = 0) -> Tensor | None:
        """Steps before which no trim is due, one at least: i64 (...,); None where steps are not trimmed.

        Budgets may fall while tokens come, as PyramidKV's do in upper layers. Arguments are those of `room`.
        """
        if self.interval is None:
            return None
        always = self.first + max(self.window, hold)
        most = (self.budget(given, layer, layers).clamp(min=always) + self.interval - held).clamp(min=1)
        ahead = torch.arange(1, int(most.max()) + 1, dtype=torch.int64, device=held.device)
        budgets = self.budget(given[..., None] + ahead, layer, layers).clamp(min=always)
        due = held[..., None] + ahead >= budgets + self.interval
        return torch.where(due.any(-1), torch.minimum(due.to(torch.int8).argmax(-1) + 1, most), most)

    def scores(self, evidence: Evidence) -> Tensor:
        """Score of every token: f32 (N, n). The highest stay; of equal ones the earlier.

        Each row depends on its own evidence alone. Entries of tokens that a row does not have count for nothing, and
        may be anything but NaN.
        """
        raise NotImplementedError(f"{type(self).__name__} scores no tokens.")

    def merge(self, old: Tensor, new: Tensor) -> Tensor:
        """A score that a token had, and that of the newest queries, as one: f32, of any shape.

        Tokens without a history have their new score.
        """
        raise NotImplementedError(f"{type(self).__name__} merges no scores.")

    @property
    def asks_every_step(self) -> bool:
        """True if steps are judged one by one."""
        return self.remembers and self.interval is not None

    def limits(self, key_dim: int, value_dim: int) -> Limits:
        found = super().limits(key_dim, value_dim)
        return found._replace(captured=ASKS) if self.asks_every_step and found.captured is None else found


_WARNED: set[EvictionScheme] = set()
"""Schemes of which `warn_of_loss` has spoken."""


def warn_of_loss(scheme: EvictionScheme, tokens: int, layers: int) -> None:
    """Warns, once for a scheme, where it keeps less than half of a first prompt of so many tokens.

    Budgets in bytes say nothing here.
    """
    if scheme in _WARNED or getattr(scheme, "budget_bytes", None) is not None:
        return
    given = torch.tensor(tokens, device="cpu", dtype=torch.int64)
    kept = int(scheme.room(given, given, layers // 2, layers))
    if 2 * kept < tokens:
        _WARNED.add(scheme)
        warn_once(
            f"{scheme.name}: of this prompt's {tokens} tokens a layer keeps about {kept}, and the others are gone for "
            "good: answers that need them will be wrong. Give it a larger budget_tokens or budget_share, or take a "
            "preset that keeps every token, e.g. 'best-2.5'."
        )


@dataclass(frozen=True, kw_only=True)
class TokenEviction(EvictionScheme):
    """Tokens are kept or evicted; those that are kept are stored as another scheme says.

    Attributes:
        budget_tokens: largest number of tokens per row, KV head and layer; 1024 if there is no other budget.
        budget_share: the same as a share of the tokens that the row was given.
        sink_length: first tokens that always stay.
        trim_every: steps trim a row when it holds this many tokens more than its budget. With 0 only prompts are
            trimmed, and every generated token is kept.
        pages: the scheme that stores the kept tokens: a preset, a `Scheme`, or the description of one. Its sink and
            local window hold the first and the newest of them.
    """

    budget_share: float | None = knob(None, low=0.001, high=1.0)
    sink_length: int = knob(0, low=0, high=4096)
    trim_every: int = knob(0, low=0, high=65536)
    pages: str | Scheme | Mapping[str, Any] = "full"

    def __post_init__(self) -> None:
        """Checks how the knobs go together, and that the pages are those of a scheme that keeps every token."""
        super().__post_init__()
        if self.page_scheme.evicts:
            raise ValueError(f"pages: got {self.page_scheme.name!r}, which evicts itself; allowed any other scheme.")
        if "tags" in self.page_scheme.needs:
            raise ValueError(
                f"pages: got {self.page_scheme.name!r}, which reads tags of tokens; allowed schemes that do without."
            )
        if self.budget_tokens is not None and self.budget_share is not None:
            raise ValueError(
                f"budget_tokens, budget_share: got {self.budget_tokens} and {self.budget_share}, allowed one of them; "
                "set the other to None."
            )
        if self.budget_share is None and self.tokens <= self.window + self.sink_length:
            raise ValueError(
                f"budget_tokens: got {self.tokens}, allowed more than the {self.window + self.sink_length} tokens of "
                "window and sink, which always stay; raise it, or lower window or sink_length."
            )

    @cached_property
    def page_scheme(self) -> Scheme:
        return get_scheme(self.pages)

    @property
    def first(self) -> int:
        return self.sink_length

    @property
    def interval(self) -> int | None:
        return self.trim_every or None

    def budget(self, given: Tensor, layer: int, layers: int) -> Tensor:
        if self.budget_share is None:
            return super().budget(given, layer, layers)
        least = self.window + self.sink_length
        return (self.budget_share * given.double()).floor().long().clamp(min=least)

    # Pages follow the other scheme.

    needs = property(attrgetter("page_scheme.needs"))  # pyright: ignore[reportIncompatibleMethodOverride]
    smooths_keys = property(attrgetter("page_scheme.smooths_keys"))  # pyright: ignore[reportIncompatibleMethodOverride]
    channel_rule = property(attrgetter("page_scheme.channel_rule"))  # pyright: ignore[reportIncompatibleMethodOverride]
    reads_tokens = property(attrgetter("page_scheme.reads_tokens"))  # pyright: ignore[reportIncompatibleMethodOverride]

    def in_layer(self, layer: int, layers: int) -> Scheme:
        """Over the pages that the layer takes."""
        pages = self.page_scheme.in_layer(layer, layers)
        return self if pages == self.page_scheme else replace(self, pages=pages)

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        return self.page_scheme.layout(key_dim, value_dim)

    def step_rule(self, head_dim: int, seen: bool = True) -> str | None:
        return self.page_scheme.step_rule(head_dim, seen)

    def channel_bits(self, keys: Tensor, q_abs: Tensor | None) -> Tensor | None:
        return self.page_scheme.channel_bits(keys, q_abs)

    def token_bits(self, keys: Tensor, values: Tensor, position: Tensor, tags: Tensor | None = None) -> Tensor | None:
        return self.page_scheme.token_bits(keys, values, position, tags)

    def limits(self, key_dim: int, value_dim: int) -> Limits:
        """Limits of the pages' scheme, and those that trims of steps add."""
        found = self.page_scheme.limits(key_dim, value_dim)
        if found.captured is None and self.asks_every_step:
            found = found._replace(captured=ASKS)
        elif found.captured is None and self.interval is not None and "query" in self.needs:
            found = found._replace(captured="queries weigh channels, and trims of steps ask them, too")
        layout = self.layout(key_dim, value_dim)
        shared = any(fmt.whole for side in (layout.keys, layout.values) for fmt in side.formats)
        if shared and self.interval is not None:
            return found._replace(
                requantized="steps trim pages whose tokens share scales; trim_every=0 trims prompts alone"
            )
        return found


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
        window: w, newest tokens, whose queries vote.
        kernel: number of neighbouring scores that are averaged; odd.
        trim_every: see `TokenEviction`; steps trim by the newest query only.
    """

    name = "snapkv"
    paper = "arXiv:2404.14469"
    place = 80
    evidence = frozenset({"attention"})
    presets = {
        "snapkv": Entry(
            "Long prompts: keeps the tokens that the end of the prompt attends to.",
            lists=("fit",),
            group="eviction",
        )
    }

    window: int = knob(64, low=1, high=4096, search=[16, 32, 64])
    kernel: int = knob(5, choices=(1, 3, 5, 7, 9, 11, 13), search=[1, 5, 7, 13])

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores ``avgpool(mean_q A)`` of the tokens before the window, averaged over query heads: f32 (N, n).

        Neighbours are ``kernel`` tokens, the token itself included. Beyond the ends of what is older than the window
        scores count as 0, and there they are 0.
        """
        past, kernel = evidence.past(self.window), self.kernel
        paid = evidence.of("attention").mean(1, keepdim=True) * past[:, None]
        return torch.nn.functional.avg_pool1d(paid, kernel, stride=1, padding=kernel // 2)[:, 0] * past


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
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
        window: α, newest tokens, whose queries vote.
        beta: β, the factor between the mean budget and that of the last layer; larger is steeper.
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
        window: newest tokens that always stay; the paper takes half of the budget.
        trim_every: see `TokenEviction`. If steps are trimmed, each one needs its attention weights and cannot be
            captured; with 0, steps are like any other scheme's.
    """

    name = "h2o"
    paper = "arXiv:2306.14048"
    place = 82
    evidence = frozenset({"received"})
    remembers = True
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

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores ``Σ_q A``, averaged over query heads: f32 (N, n)."""
        return evidence.of("received").mean(1)

    def merge(self, old: Tensor, new: Tensor) -> Tensor:
        """Sum of both."""
        return old + new


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
        window: smallest number of newest tokens; the budget may have room for more.
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
        window: newest tokens that always stay. Only the newest query ranks tokens, with any window.
    """

    name = "tova"
    paper = "arXiv:2401.06104"
    place = 84
    evidence = frozenset({"attention"})
    alike = True
    presets = {
        "tova": Entry(
            "A fixed budget: keeps the tokens that the newest query attends to.", lists=("fit",), group="eviction"
        )
    }

    window: int = knob(1, low=1, high=4096)
    trim_every: int = knob(64, low=0, high=65536)

    @property
    def queries(self) -> int:
        """One query, the newest."""
        return 1

    def scores(self, evidence: Evidence) -> Tensor:
        """Attention of the newest query, averaged over query heads; the layer averages over KV heads: f32 (N, n)."""
        return evidence.of("attention").mean(1)


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
        window: newest tokens that always stay (none in the paper; here one at least).
        recent: number of newest queries from which μ and Σ are computed.
        epsilon: added to expected attention before it is multiplied by the value's norm.
        sink_length: first tokens that always stay, and whose queries do not count.
        trim_every: see `TokenEviction`; steps trim by the newest query only.
    """

    name = "expected-attention"
    paper = "arXiv:2510.00636"
    place = 85
    evidence = frozenset({"queries", "keys", "values"})
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
    def queries(self) -> int:
        """Number of newest queries from which μ and Σ are computed."""
        return self.recent

    def scores(self, evidence: Evidence) -> Tensor:
        """Scores ``(E + ε) |v|`` with E averaged over query heads: f32 (N, n)."""
        query, real = evidence.of("queries").float(), evidence.real
        place = evidence.length[:, None] - torch.arange(query.shape[2], 0, -1, device=query.device)
        weight = (real & (place >= self.sink_length))[:, None, :, None].float()
        count = weight.sum(2, keepdim=True).clamp(min=1)
        mean = (query * weight).sum(2, keepdim=True) / count
        centred = (query - mean) * weight
        expected = expected_attention(mean[:, :, 0], centred.mT @ centred / count, evidence, self.sink_length)
        return (expected.mean(1) + self.epsilon) * evidence.of("values").float().norm(dim=-1)
