"""Which ways of sealing a layout and a scheme allow."""

from __future__ import annotations

from ..scheme import Layout, Scheme


def seals_plainly(layout: Layout, scheme: Scheme) -> bool:
    """Whether sealing takes nothing but the tokens and, perhaps, a rule."""
    store = layout.store
    plain = all(
        side.clip >= 1.0 and not fmt.normed and (not fmt.raised or scheme.channel_rule)
        for side, fmt in zip((layout.keys, layout.values), store.runs[0], strict=True)
    )
    return plain and store.ordered


def seals_widely(layout: Layout, scheme: Scheme) -> bool:
    """Whether tokens without a tag go to the last of several runs, and nothing else has to be known of them."""
    plain = all(
        side.clip >= 1.0 and not fmt.normed and not fmt.raised and not fmt.whole
        for side, fmt in zip((layout.keys, layout.values), layout.store.runs[-1], strict=True)
    )
    return plain and scheme.untagged_is_wide
