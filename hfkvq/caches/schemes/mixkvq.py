"""MixKVQ gives key channels one of three widths, by the effect of their error on the queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hfkvq.kernels.groups import POWERS
from hfkvq.kernels.pages import RAISED_STEP, PageFormat
from hfkvq.kernels.seal import range_rule

from .base import Entry, Layout, Scheme, SideLayout, knob


def _tuned(model: str, tau_bf16: float, tau_int4: float, most_bf16: float, most_int4: float) -> Entry:
    knobs: dict[str, str | float] = {"select": "thresholds", "tau_bf16": tau_bf16, "tau_int4": tau_int4}
    return Entry(
        f"MixKVQ with the paper's thresholds for {model}.", knobs | {"most_bf16": most_bf16, "most_int4": most_int4}
    )


@dataclass(frozen=True, kw_only=True)
class MixKVQ(Scheme):
    """2-bit KV cache in which the key channels whose error the queries would see most get 4 or 16 bits.

    Layout: the first ``sink_length`` tokens stay whole; the others are sealed ``page_size`` tokens at a time, keys per
    channel and ``group_size`` tokens, values in 2 bits per token and ``group_size`` channels. Every page of a KV head
    has a capacity (*room*) for raised key channels: shares ``most_bf16`` and ``most_int4`` of the D channels, rounded
    up to multiples of eight. Unused room takes memory too:
    eight channels of 128 cost one bit per element of keys at 16 bits, an eighth at 4 bits. With the default room keys
    take 4.52 bits, values 3, at D = 128, scales and indices included; ``code_bits`` of a cache takes the room as used,
    ``used_bits`` does not, and ``key_bits`` is equation 17.
    Room at 4 bits buys more: on the reference model, no room at 16 and half the channels at 4 bits (3.52 bits in all)
    lost a third of the default's loss (at 3.76).

    Paper: Zhang et al., arXiv:2512.19206. I of eq. (6) is ``q_abs``, which the layer averages over the queries since
    the last seal and the query heads of a KV head; eqs. (7) and (8) are the rule "range" of `kernels.channel_widths`;
    section 4.2's three tiers are `step_rule`; appendix D.1's buffer of R tokens is `layout`.
    Differs from the paper: room is bounded, and does not follow thresholds by itself; `hfkvq.tuning.fit_room`
    measures the room that thresholds need. Channels above a bound go down a tier, the most salient stay; of equal ones
    the lower channel stays. ``select="fractions"`` has no thresholds. The paper gives no units of its thresholds:
    see ``salience``. All queries of a first prompt count, for each of its pages. B of eq. (7) is 2.
    Attention that does not show its queries gets ``error_only`` with ``fractions``, and a warning.
    Differs from the released code: none is released.

    Attributes:
        select: "thresholds" raises channels above ``tau_bf16`` or ``tau_int4``; "fractions" fills the room with the
            most salient channels of each page and head, except those of salience 0. It is the default because
            thresholds are specific to a model (the paper's raise almost nothing in the reference model), and because
            unused room takes memory, too.
        salience: definition of A. "raw_logit": I * S / sqrt(D), about the error of a logit in nats, so that one pair of
            thresholds can serve several models. "raw": I * S. "error_only": S, the paper's ablation (Table 6).
        accumulate: I averages all queries so far, like the running accumulator of appendix D.2, which is never
            reset. By default it averages those since the last seal, the "current window" of section 4.2.
        tau_bf16: channels with A above this get 16 bits; checked first. The paper searches 0.1 to 2.
        tau_int4: other channels with A above this get 4 bits. From ``tau_bf16`` on, that tier holds only channels
            without room at 16 bits, as in the paper's pairs for R1-Qwen-14B and 32B.
        most_bf16: room at 16 bits (the model's own dtype), as a share of the channels.
        most_int4: room at 4 bits, as a share of the channels.
        group_size: G, tokens (keys) or channels (values) that share a scale; values take the largest divisor of their
            head dim up to this.
        page_size: R, tokens sealed together, and window over which queries are averaged; a multiple of G.
    """

    name = "mixkvq"
    paper = "arXiv:2512.19206"
    place = 30
    presets = {
        "mixkvq": Entry(
            "Key channels in 2, 4 or 16 bits, by quantization error and queries. Tune it for your model.",
            lists=("kld", "fit"),
        ),
        "mixkvq-fractions": Entry("Another name for mixkvq.", {"select": "fractions"}),
        "mixkvq-error-only": Entry(
            "MixKVQ by quantization error alone, for attention that does not expose its queries.",
            {"salience": "error_only"},
        ),
        # Thresholds of appendix C; the room is chosen by the paper's bits of key codes: 2.7, 3.4, 2.3 and 2.3.
        "mixkvq-r1-llama-8b": _tuned("R1-Llama-8B", 1.44, 0.79, 0.0625, 0.125),
        "mixkvq-r1-qwen-7b": _tuned("R1-Qwen-7B", 0.63, 0.41, 0.125, 0.125),
        "mixkvq-r1-qwen-14b": _tuned("R1-Qwen-14B", 1.52, 1.60, 0.0625, 0.0625),
        "mixkvq-r1-qwen-32b": _tuned("R1-Qwen-32B", 1.85, 1.58, 0.0625, 0.0625),
    }

    select: str = knob("fractions", choices=("fractions", "thresholds"))
    salience: str = knob("raw_logit", choices=("raw_logit", "raw", "error_only"), search=["raw_logit", "error_only"])
    accumulate: bool = knob(False, choices=(False, True))
    tau_bf16: float = knob(1.44, low=0.0, high=100.0, search=(0.1, 2.0))
    tau_int4: float = knob(0.79, low=0.0, high=100.0, search=(0.1, 2.0))
    most_bf16: float = knob(0.0625, low=0.0, high=1.0, search=[0.0, 0.0625, 0.125])
    most_int4: float = knob(0.25, low=0.0, high=1.0, search=[0.0, 0.0625, 0.125, 0.25, 0.375, 0.5])
    group_size: int = knob(32, low=8, high=1024, search=[32, 64, 128])
    sink_length: int = knob(32, low=0, high=1024, search=[0, 16, 32, 64])
    page_size: int = knob(128, low=8, high=1024)
    fit: int = knob(0, choices=POWERS, search=list(POWERS))
    fit_values: int = knob(0, choices=POWERS, search=[0, 4])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_bf16 + self.most_int4 > 1:
            raise ValueError(
                f"most_bf16, most_int4: got {self.most_bf16} and {self.most_int4}, allowed shares of the channels that "
                "are 1 or less together."
            )
        # Page formats check R and G.
        PageFormat(2, "channel", self.group_size, self.page_size)

    def searched(self) -> dict[str, tuple[float, float] | list[Any]]:
        """Ranges to search: thresholds, or the room if fractions fill it."""
        unused = ("tau_bf16", "tau_int4") if self.select == "fractions" else ("most_bf16", "most_int4", "salience")
        return {name: search for name, search in super().searched().items() if name not in unused}

    @property
    def needs(self) -> frozenset[str]:
        """Queries, unless only the error counts."""
        if self.salience == "error_only":
            return frozenset()
        return frozenset({"query", "history"}) if self.accumulate else frozenset({"query"})

    def room(self, head_dim: int) -> tuple[int, int]:
        """Room of a page, in channels at 16 and at 4 bits: multiples of eight, at most all channels."""

        def channels(share: float, left: int) -> int:
            # Products within a rounding error of a multiple of eight are that multiple.
            return min(math.ceil(share * head_dim / RAISED_STEP - 1e-6) * RAISED_STEP, left)

        wide = channels(self.most_bf16, head_dim)
        return wide, channels(self.most_int4, head_dim - wide)

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Sink, 2-bit pages with raised key channels; both sides are sealed R tokens at a time (appendix D.1)."""
        wide, middle = self.room(key_dim)
        raised = tuple((width, count) for width, count in ((4, middle), (16, wide)) if count)
        group = next(g for g in range(min(self.group_size, value_dim), 0, -1) if value_dim % g == 0)
        keys = PageFormat(2, "channel", self.group_size, self.page_size, raised, fit=self.fit)
        values = PageFormat(2, "token", group, self.page_size, fit=self.fit_values)
        return Layout(
            SideLayout((keys,), unit=self.page_size), SideLayout((values,), unit=self.page_size), self.sink_length
        )

    def step_rule(self, head_dim: int, seen: bool = True) -> str | None:
        """Rule of section 4.2: 16 bits where ``A > tau_bf16``, else 4 where ``A > tau_int4``; as room allows.

        Where attention shows no query, A is S, and ``select`` "fractions".
        """
        if self.select == "fractions" or (not seen and self.needs):
            return range_rule()
        return self.threshold_rule(head_dim, self.tau_bf16, min(self.tau_bf16, self.tau_int4))

    def threshold_rule(self, head_dim: int, over16: float, over4: float) -> str:
        """Rule that raises channels by thresholds on A (eq. 8), in the units of ``salience``."""
        return range_rule(over16, over4, math.sqrt(head_dim) if self.salience == "raw_logit" else 1.0)
