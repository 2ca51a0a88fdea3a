"""The three axes of a tag, ``temporal|modal|semantic``, and how tags are numbered."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import product

import torch
from torch import Tensor

# Axes of TriAxialKV, section 3.1 and Table 1.
TEMPORAL = ("older", "turn_m2", "turn_m1", "current")
MODAL = ("text", "image")
SEMANTIC = ("inst", "user", "assistant", "reasoning", "tool_call", "obs", "delim")

# Kinds of tokens: modal and semantic together, in any turn.
KINDS = len(MODAL) * len(SEMANTIC)

TAGS = (*("|".join(axes) for axes in product(TEMPORAL, MODAL, SEMANTIC)), "pad")
"""Names by number: tag ``k`` is ``TAGS[k]``. Fifty-six tags of the three axes, then ``pad``."""

PAD = len(TAGS) - 1
"""Number of the tag of padding, which lies on no axis."""

_NUMBERS = {name: number for number, name in enumerate(TAGS)}


def tag_number(temporal: str, modal: str, semantic: str) -> int:
    """Number of the tag ``temporal|modal|semantic``.

    Raises:
        ValueError: A value does not lie on its axis.
    """
    return parse_tag(f"{temporal}|{modal}|{semantic}")


def parse_tag(name: str) -> int:
    """Number of a tag given by name, e.g. ``parse_tag("older|text|obs") == 5``; ``parse_tag("pad") == PAD``.

    Raises:
        ValueError: There is no such tag.
    """
    number = _NUMBERS.get(name.replace(" ", ""))
    if number is None:
        near = get_close_matches(name, TAGS, n=1)
        raise ValueError(
            f"tag: got {name!r}, allowed 'pad' or temporal|modal|semantic with temporal in {', '.join(TEMPORAL)}; "
            f"modal in {', '.join(MODAL)}; semantic in {', '.join(SEMANTIC)}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    return number


def tag_axes(number: int) -> tuple[str, str, str] | None:
    """``(temporal, modal, semantic)`` of a tag; None for `PAD`.

    Raises:
        ValueError: There is no tag of that number.
    """
    if not 0 <= number < len(TAGS):
        raise ValueError(f"tag: got number {number}, allowed 0 to {PAD}.")
    if number == PAD:
        return None
    temporal, modal, semantic = TAGS[number].split("|")
    return temporal, modal, semantic


def age_tags(tags: Tensor, turns: int | Tensor) -> Tensor:
    """Tags one step older for each turn that has begun, ``older ← turn_m2 ← turn_m1 ← current``; `PAD` stays.

    Args:
        tags: (B, T) or (T,) tag numbers, uint8.
        turns: Number of turns that began since: one, or (B,) of any integer type for tags of (B, T).

    Returns:
        Tensor: New tags, of the shape and dtype of ``tags``.
    """
    steps = torch.as_tensor(turns, device=tags.device).long().clamp(0, len(TEMPORAL))
    if steps.ndim == 1:
        steps = steps[:, None]
    wide = tags.long()
    temporal = (wide // KINDS - steps).clamp_min(0)
    return torch.where(wide == PAD, wide, temporal * KINDS + wide % KINDS).to(tags.dtype)
