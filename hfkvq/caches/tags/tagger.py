"""Tags of a prompt, from its token ids: one scan on the CPU, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .axes import PAD, TAGS, age_tags, parse_tag

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class TagState:
    """Where the scan of a growing conversation stands.

    Attributes:
        rows: How far each row of the batch is.
        seen: Columns given so far, padding included.
    """

    rows: tuple[Any, ...] = ()
    seen: int = 0

    def reorder(self, indices: Sequence[int]) -> TagState:
        """The state whose row ``i`` is this one's row ``indices[i]``, as a cache reorders its beams."""
        return TagState(tuple(self.rows[i] for i in indices), self.seen)


@dataclass(frozen=True)
class Extension:
    """What new tokens bring: their own tags, and what becomes of those before.

    Attributes:
        state: Goes into the next call of `Tagger.extend`.
        tags: (B, T) uint8 tags of the new tokens.
        aged: (B,) int64, how many turns began among them: by so many the older tokens aged, see `age_tags`.
        revised_rows: (N,) int64, with ``revised_columns`` (N,) the few older tokens whose role was still open, such as a
            message header that the last call ended in; columns count from the first token of the conversation.
        revised_columns: (N,) int64.
        revised_tags: (N,) uint8, their tags now, already aged.
    """

    state: TagState
    tags: Tensor
    aged: Tensor
    revised_rows: Tensor
    revised_columns: Tensor
    revised_tags: Tensor

    def append_to(self, tags: Tensor) -> Tensor:
        """Tags of the whole conversation: ``tags`` (B, T_old) aged and revised, then those of the new tokens."""
        old = age_tags(tags, self.aged)
        old[self.revised_rows, self.revised_columns] = self.revised_tags
        return torch.cat([old, self.tags], dim=1)


class Tagger:
    """Gives every token of a prompt a tag ``temporal|modal|semantic`` (TriAxialKV, section 3.1)."""

    names: tuple[str, ...] = TAGS

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, chat_format: Any = None) -> Tagger:
        """A tagger for what the tokenizer's chat template writes; without a template all is ``current|text|user``.

        Raises:
            ValueError: No known chat format fits the template.
        """
        return cls()

    def tag(self, input_ids: Ids, attention_mask: Tensor | None = None) -> Tensor:
        """Tags (B, T) uint8 of ``input_ids`` (B, T) or (T,); ``attention_mask`` (B, T) is 0 on padding."""
        return self.extend(None, input_ids, attention_mask).tags

    def extend(self, state: TagState | None, input_ids: Ids, attention_mask: Tensor | None = None) -> Extension:
        """Goes on after ``state`` (None at the beginning); ids and mask are those of the new tokens alone."""
        ids = torch.as_tensor(input_ids)
        ids = ids[None] if ids.ndim == 1 else ids
        tags = torch.full(ids.shape, parse_tag("current|text|user"), dtype=torch.uint8)
        if attention_mask is not None:
            tags[attention_mask.cpu() == 0] = PAD
        none = torch.zeros(0, dtype=torch.int64)
        seen = (state.seen if state else 0) + ids.shape[1]
        aged = torch.zeros(len(ids), dtype=torch.int64)
        return Extension(TagState((None,) * len(ids), seen), tags, aged, none, none, none.to(torch.uint8))
