"""Place: new tokens of requests join what windows hold. The contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import launched


@launched("place:place_triton")
def place(keys: Tensor, values: Tensor, windows: Sequence[Tensor], rows: Tensor, places: Tensor) -> None:
    """Copies a stretch of new tokens of each request into its window, in place.

    Args:
        keys: (n, H, Dk), new tokens of all requests, in the basis of the store.
        values: (n, H, Dv), likewise.
        windows: keys and values (N, H, G, D).
        rows: i32 (R,), the window of each request; the same one for requests without any token only.
        places: i32 (3, R): of each request the first token's row of ``keys``, its slot in the window, and how many
            tokens there are.
    """
    for row, (first, slot, count) in zip(rows.tolist(), places.T.tolist(), strict=True):
        for x, window in zip((keys, values), windows, strict=True):
            window[row, :, slot : slot + count] = x[first : first + count].transpose(0, 1).to(window.dtype)
