"""Schemes that evict: how many tokens stay, which ones, by what evidence, and when the others go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfkvq.kernels.pages import PageFormat, Side

from ..base import warn_once
from .base import Layout, Limits, Scheme, get_scheme, knob
from .score_inputs import Attention, Evidence, Kind

ASKS = "scores that accumulate ask attention in every step"


@dataclass(frozen=True, kw_only=True)
class EvictionScheme(Scheme):
    """A scheme that forgets tokens: in each layer and KV head the best stay, as many as a budget has room for.

    When a prompt is over, and when steps have added `interval` tokens to a full budget, `scores` is shown the
    `evidence` that it asks for. Of every row the first `first` tokens and the newest ``window`` always stay; of the
    others those of highest score, until the row holds `budget` tokens. Of a first prompt the others are never stored;
    later they leave the pages that they were in.

    A scheme that only evicts derives from `TokenEviction`, which holds what stays in the pages of any other scheme, and
    writes `scores` and `evidence`. `TieredEviction` gives what stays bits of its own.

    Attributes:
        alike: whether all KV heads of a layer keep the same tokens, by the mean of their scores; else each its own.
        budget_tokens: most tokens of a row in each KV head of a layer; None for the scheme's own default.
        window: newest tokens that always stay.
    """

    evicts: ClassVar[bool] = True
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
    def evidence(self) -> frozenset[Kind]:
        """Inputs of `scores`; none for schemes that go by position alone. See `Evidence`."""
        return frozenset()

    @property
    def queries(self) -> int:
        """Newest queries of a prompt that are shown, where `evidence` has "attention" or "queries"; a step has one."""
        return self.window

    @property
    def interval(self) -> int | None:
        """Steps trim a row that holds so many tokens more than its budget; None trims at the end of prompts alone."""
        return 1

    @property
    def remembers(self) -> bool:
        """True if scores have a history, see `merge`. Then every step is shown its evidence, if steps trim at all."""
        return False

    def budget(self, given: Tensor, layer: int, layers: int) -> Tensor:
        """Tokens that a row holds after a trim.

        Args:
            given: i64 (...,), tokens that the row has been given so far, those that are gone included.
            layer: index of the layer in the model.

        Returns:
            i64 (...,), which may be less for more tokens given. Tokens that always stay do so whatever it says.
        """
        return torch.full_like(given, self.tokens)

    def room(self, given: Tensor, held: Tensor, layer: int, layers: int, hold: int = 0) -> Tensor:
        """Tokens that a trim leaves: the budget, at least those that always stay, at most those that are there.

        Args:
            held: i64 (...,), tokens that the row holds.
            hold: newest tokens that have to stay, beyond the window.
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
        if isinstance(self.pages, Mapping):
            object.__setattr__(self, "pages", Scheme.from_dict(self.pages))
        if self.page_scheme.evicts:
            raise ValueError(f"pages: got {self.page_scheme.name!r}, which evicts itself; allowed any other scheme.")
        if self.page_scheme.needs & {"tags", "turns"}:
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
        assert not isinstance(self.pages, Mapping), "made a scheme above"
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

    @property
    def needs(self) -> frozenset[str]:
        return self.page_scheme.needs

    def in_layer(self, layer: int, layers: int) -> Scheme:
        """Over the pages that the layer takes."""
        pages = self.page_scheme.in_layer(layer, layers)
        return self if pages == self.page_scheme else replace(self, pages=pages)

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        return self.page_scheme.layout(key_dim, value_dim)

    @property
    def smooths_keys(self) -> bool:
        return self.page_scheme.smooths_keys

    @property
    def channel_rule(self) -> str | None:
        return self.page_scheme.channel_rule

    def step_rule(self, head_dim: int) -> str | None:
        return self.page_scheme.step_rule(head_dim)

    def channel_bits(self, keys: Tensor, q_abs: Tensor | None) -> Tensor | None:
        return self.page_scheme.channel_bits(keys, q_abs)

    def token_bits(self, keys: Tensor, values: Tensor, position: Tensor, tags: Tensor | None = None) -> Tensor | None:
        return self.page_scheme.token_bits(keys, values, position, tags)

    @property
    def untagged_is_wide(self) -> bool:
        return self.page_scheme.untagged_is_wide

    @property
    def reads_tokens(self) -> bool:
        return self.page_scheme.reads_tokens

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
class TieredEviction(EvictionScheme):
    """Kept tokens are whole or in few bits, by their score and by the layer's attention beside other layers'.

    Layouts have two runs, few bits first.

    Attributes:
        budget_bytes: most bytes of a row in each KV head of a layer, in place of ``budget_tokens``.
        low_bits: the tier of few bits: 8 (fp8 e4m3, one scale a token) or 4 (INT4, a scale per 32 channels).
    """

    budget_bytes: int | None = knob(None, low=1)
    low_bits: int = knob(8, choices=(8, 4))

    @staticmethod
    def token_bytes(layout: Layout, key_dim: int, value_dim: int, itemsize: int) -> tuple[int, int]:
        """Bytes of one token of one KV head in few bits and whole: codes, scales and position.

        Args:
            itemsize: bytes of an element of the model's dtype.
        """
        costs = []
        for pair in layout.store.runs:
            cost = 4
            sides: tuple[tuple[PageFormat, Side, int], ...] = (
                (pair[0], "keys", key_dim),
                (pair[1], "values", value_dim),
            )
            for fmt, side, dim in sides:
                for shape, own in fmt.shapes(side, 1, dim).values():
                    size = itemsize if own is None else own.itemsize
                    cost += size * torch.Size(shape).numel() // fmt.page_size
            costs.append(cost)
        return costs[0], costs[1]

    def kept(self, past: Tensor, share: Tensor, costs: tuple[int, int], prompt: Tensor) -> Tensor:
        """Tokens older than the window that a trim keeps.

        Args:
            past: i64 (...,), tokens older than the window.
            share: f32 (...,), the layer's share of whole tokens.
            costs: bytes of a token in few bits and whole, see `token_bytes`.
            prompt: bool (...,), whether a prompt is trimmed: it fills the budget.

        Returns:
            i64 (...,).
        """
        raise NotImplementedError

    def whole(self, kept: Tensor, share: Tensor) -> Tensor:
        """Tokens of those kept that stay whole: i64 (...,)."""
        raise NotImplementedError

    def layer_statistics(self, seen: Attention, past: Tensor) -> Tensor:
        """Statistics of each KV head that make a layer's strength: f32 (N, k); ``past`` as in `Evidence.past`."""
        raise NotImplementedError

    def strength(self, statistics: Tensor) -> Tensor:
        """A layer's strength on each row, from its KV heads' statistics (B, H, k): f32 (B,)."""
        raise NotImplementedError

    def share(self, own: Tensor, most: Tensor) -> Tensor:
        """Share of the kept tokens that stay whole, by the layer's strength and the greatest of all: f32 (B,)."""
        raise NotImplementedError
