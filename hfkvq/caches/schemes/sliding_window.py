"""Schemes of layers whose queries see a window of the newest tokens."""

from __future__ import annotations

from .base import Scheme
from .full import Full

PAYS = 4
"""Least ratio of a window's tokens to a scheme's own unquantized tokens, for its pages to pay."""

PAGE = 32
"""Tokens of a window's 16-bit pages at the most: a ring of large ones would hold much more than the window."""


def in_window(scheme: Scheme, window: int, dims: tuple[int, int]) -> Scheme:
    """Scheme of a layer with a window: the cache's where that pays, or else 16-bit pages.

    16-bit pages take windows that are short beside what the scheme keeps unquantized anyway, and schemes that choose
    among all tokens of a row: those that evict, and those that give tokens widths of their own.

    Args:
        scheme: of the layer.
        window: tokens that a query sees.
        dims: of keys and values.
    """
    if isinstance(scheme, Full):
        return Full(page_size=min(PAGE, scheme.page_size))
    if not scheme.evicts and not scheme.latents and not scheme.needs & {"tags", "turns"}:
        layout = scheme.layout(*dims)
        if len(layout.keys.formats) == 1 and window >= PAYS * layout.own_tokens():
            return scheme
    return Full(page_size=PAGE)
