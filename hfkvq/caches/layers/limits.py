"""What a scheme gives up by a choice of its own: recorded steps, or sealing in one kernel."""

from __future__ import annotations

from hfkvq.kernels.step import MAX_STEP

from ..scheme import Scheme
from ..store.rules import seals_plainly, seals_widely


def why_not(scheme: Scheme, key_dim: int, value_dim: int) -> str | None:
    """Why steps of a scheme cannot do without the host; None where they can."""
    layout = scheme.layout(key_dim, value_dim)
    if min(layout.keys.clip, layout.values.clip) < 1:
        return "clipped values are sorted by the host"
    if layout.keys.formats[-1].raised and scheme.step_rule(key_dim) is None:
        return "this choice of raised channels is no rule that the sealing kernel knows"
    if len(layout.keys.formats) > 1 and type(scheme).token_bits is not Scheme.token_bits:
        most = (layout.keys.unit - 1 + MAX_STEP) // layout.keys.unit * layout.keys.unit
        if any(not fmt.whole or fmt.page_size <= most for fmt in layout.keys.formats[:-1]):
            return "tokens that a step seals may belong in several runs"
    if getattr(scheme, "beta", 0.0) > 0:
        return "scores that accumulate ask attention in every step"
    return None


def why_several_launches(scheme: Scheme, key_dim: int, value_dim: int) -> str | None:
    """Why a step that no graph replays seals in several launches; None where one kernel does all of it."""
    layout = scheme.layout(key_dim, value_dim)
    # Generated tokens go to the last of several runs, if that needs no look at them.
    keys, values = layout.store.runs[-1]
    ordered = layout.store.ordered
    if seals_plainly(layout, scheme) if ordered else seals_widely(layout, scheme):
        return "queries weigh the channels" if ordered and "query" in scheme.needs else None
    if min(layout.keys.clip, layout.values.clip) < 1:
        return "clipped values are sorted first"
    if keys.normed or values.normed:
        return "pages have factors"
    return "the scheme itself says which channels are raised" if ordered else "tokens have widths of their own"
