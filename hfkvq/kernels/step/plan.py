"""Plan of a layer's step buffer: its parts, and when tokens are sealed, known before there is a tensor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

from ..norms import BALANCE, Balance
from ..pages import StoreFormat
from ..windows import most_due

MAX_STEP = 16
"""Most tokens of a step, which join the tail before attention; longer input is a prompt."""


@dataclass(frozen=True)
class StepPlan:
    """Static description of a layer's buffer, and of when its tokens are sealed.

    Attributes:
        store: name of the store's format (`StoreFormat.spec`).
        rows: B, rows of the store; heads that hold tokens of their own are rows.
        heads: H, KV heads of a row.
        dtype: of the windows, as ``str(torch.dtype)``.
        blocks: pages of a row, for each run.
        tails: slots of the tail of keys and of values.
        local: newest tokens that stay unsealed, of keys and of values.
        unit: tokens sealed together, likewise.
        capacity: most logical columns.
        rule: rule by which raised channels are chosen, see `kernels.channel_widths`; "" where there are none.
        query: "sum" keeps the sum of queries' magnitudes since the last seal, by which ``rule`` weighs channels;
            "total" that of all queries; "keep" the newest queries; "" nothing.
        fold: KV heads of the model that are rows of their own, or 1.
        query_heads: Hq of the model, where ``query`` is "keep".
        balance: how `page_norms` balances pages of keys and of values.
        offloaded: whether pages lie in memory of their own.
    """

    store: str
    rows: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    blocks: tuple[int, ...]
    tails: tuple[int, int]
    local: tuple[int, int]
    unit: tuple[int, int]
    capacity: int
    rule: str = ""
    query: str = ""
    fold: int = 1
    query_heads: int = 0
    balance: tuple[Balance, Balance] = (BALANCE, BALANCE)
    offloaded: bool = False

    @cached_property
    def spec(self) -> str:
        """Reversible name; the step takes it as its static argument."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(spec: str) -> StepPlan:
        """Inverse of `spec`."""
        found: dict[str, Any] = json.loads(spec)
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in found.items()}
        fields["balance"] = tuple(Balance(*x) for x in fields["balance"])
        return StepPlan(**fields)

    @cached_property
    def format(self) -> StoreFormat:
        """The store's format."""
        return StoreFormat.parse(self.store)

    @property
    def sums_queries(self) -> bool:
        """True where magnitudes of queries are summed, by which ``rule`` weighs channels."""
        return self.query in ("sum", "total")

    def due(self, side: int, tokens: int) -> int:
        """Most tokens of a side that are due after a step of so many, where nothing was due before."""
        return most_due(tokens, self.unit[side])
