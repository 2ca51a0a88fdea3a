"""Padding of a forward, read off its attention mask."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..store import Padding


class PaddingReader:
    """Finds the padding in attention masks, once per mask: all layers of a forward are given the same one."""

    def __init__(self) -> None:
        self._mask: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int, int] | None = None
        self.found: Padding | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddingReader:
        """A fresh reader: it holds nothing worth copying."""
        return PaddingReader()

    def __reduce__(self) -> tuple[type[PaddingReader], tuple[()]]:
        """A fresh reader: masks are not saved."""
        return PaddingReader, ()

    def read(self, mask: Tensor, seen: int, tokens: int, lengths: Tensor) -> Padding | None:
        """Padding among the newest ``tokens`` of ``seen`` columns.

        Args:
            mask: (B or 1, heads or 1, Q or 1, L), True or nonzero where visible, or float and added to logits.
            seen: logical columns, the new ones included.
            tokens: new columns.
            lengths: i32 (B,), tokens that each row has stored before.

        Returns:
            None if no new column is padding. One transfer to the host, for a mask not met before.
        """
        # Tensors of inference mode count no versions; nobody may change them in place either, but within that mode.
        key = (0 if mask.is_inference() else mask._version, seen, tokens)
        if self._mask is not None and self._mask() is mask and self._key == key:
            return self.found
        visible = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
        visible = visible[:, 0]
        if visible.shape[1] == tokens and tokens > 1:
            # A token that is no padding sees itself, whatever else the mask hides.
            valid = visible.diagonal(offset=seen - tokens, dim1=-2, dim2=-1)[:, :tokens]
        else:
            valid = visible[:, -1, seen - tokens : seen]
        valid = valid.to(lengths.device).expand(lengths.shape[0], -1)
        started = (lengths > 0)[:, None] | (valid.cumsum(1) > 0)
        lead = (~started).sum(1, dtype=torch.int32)
        holes = (started & ~valid).any().to(torch.int32).reshape(1)
        *amounts, has_holes = torch.cat([lead, holes]).tolist()
        found = None
        if has_holes or any(amounts):
            source = None
            if has_holes:
                column = torch.arange(tokens, device=valid.device).expand_as(valid)
                before = torch.where(valid, column, -1).cummax(1).values
                first = valid.to(torch.int8).argmax(1, keepdim=True)
                source = torch.where(valid.any(1, keepdim=True), torch.where(before >= 0, before, first), column)
            found = Padding(lead, frozenset(amounts), source)
        self._mask, self._key, self.found = weakref.ref(mask, self._forget), key, found
        return found

    def _forget(self, mask: weakref.ref[Tensor]) -> None:
        # The result is useless without the mask, and would only hold memory.
        if mask is self._mask:
            self._mask = self.found = None
