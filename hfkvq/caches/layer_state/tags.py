"""Tags of tokens, by which some schemes choose widths."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import outside_inference_mode
from ..schemes.base import UNTAGGED
from ..store.routing import ColumnTags

if TYPE_CHECKING:
    from ..tags import Tagger


_UNKNOWN = -1
"""Id of columns whose token nobody showed."""


def room_for_columns(have: int, end: int) -> int:
    """Columns to allocate for ``end`` columns where there is room for ``have``: so many more that steps seldom ask."""
    return have if end <= have else max(end, have + have // 4) + 256


class TokenRecord:
    """Ids and tags of a cache's logical columns, padding included.

    A prompt is tagged when it comes, by the ids of the whole conversation (`tag_prompt`). Generated tokens have no tag,
    only their ids are noted (`note_step`), without asking the device anything: the tags of the next prompt depend on
    all that came before. `expect` notes a conversation ahead of the forwards that bring it.

    Args:
        tagger: makes tags of token ids.
        layers: how many layers ask for the tags of a prompt, one after the other.
    """

    def __init__(self, tagger: Tagger, layers: int = 1) -> None:
        self.tagger, self.layers = tagger, layers
        # Tags that layers share while a forward passes them, and the number of layers that have taken them.
        self._shared: dict[torch.device, ColumnTags] = {}
        self._taken = 0
        self.clear()

    def clear(self) -> None:
        self.length = 0
        # No column from here on has a tag.
        self.tagged = 0
        # Columns before this one were shown ahead of their forward (`expect`), which must bring the same ids.
        self.expected = 0
        self.ids: Tensor | None = None
        self.tags: Tensor | None = None
        self._unshare()

    def tensors(self) -> list[Tensor]:
        """Tensors of the record: i32 ids and u8 tags, each (B, room), and those that layers share."""
        held = [tensor for tensor in (self.ids, self.tags) if tensor is not None]
        for shared in self._shared.values():
            held += shared.tensors()
            # Shared codes on the device of the tags are counted with them.
            held += [shared.codes] if self.tags is None or shared.codes.device != self.tags.device else []
        return held

    def shared_tags(self, device: torch.device) -> ColumnTags | None:
        """The tags of all columns known, one object for all layers: kept until each has asked, or tags are others."""
        if self.tags is not None and self.length and device not in self._shared:
            self._shared[device] = ColumnTags(self.tags[:, : self.length].to(device))
        found = self._shared.get(device)
        self._taken += 1
        if self._taken >= self.layers:
            # The last layer has it to itself.
            self._unshare()
        return found

    def _unshare(self) -> None:
        self._shared, self._taken = {}, 0

    def tag_prompt(self, ids: Tensor, mask: Tensor | None, seen: int) -> None:
        """Tags ids (B, t) behind the ``seen`` columns that are cached; these keep their tags.

        Args:
            mask: (B, seen + t), 0 at padding, or None.

        Raises:
            ValueError: other ids than were expected by `expect`. Nothing is changed then.
        """
        if not seen:
            self.begin(ids.shape[0])
        have = max(min(self.expected, seen + ids.shape[1]) - seen, 0)
        if have:
            assert self.ids is not None
            if not torch.equal(self.ids[:, seen : seen + have].cpu(), ids[:, :have].to("cpu", torch.int32)):
                raise ValueError(
                    f"input_ids: the tokens from column {seen} on differ from those shown to see(); show it the ids "
                    "of the whole conversation again, as they are given to the model."
                )
        if self.expected >= seen + ids.shape[1]:
            return
        if self.length < seen:
            # Ids of cached tokens are unknown; new tokens are tagged by the marks among them.
            self.write(ids.new_full((ids.shape[0], seen - self.length), _UNKNOWN), None, self.length)
        before = ids.new_empty(ids.shape[0], 0) if self.ids is None else self.ids[:, :seen]
        whole = torch.cat([before.to("cpu", torch.int64), ids.to("cpu", torch.int64)], 1)
        if mask is not None and (mask.dim() != 2 or mask.shape != whole.shape):
            mask = None
        tags = self.tagger.tag(torch.where(whole == _UNKNOWN, 0, whole), None if mask is None else mask.to("cpu"))
        self.write(ids, tags[:, seen:], seen)

    def begin(self, rows: int) -> None:
        """Resets the record for ``rows`` rows, before the first token: leftovers of a failed forward go.

        Raises:
            ValueError: ``rows`` is no multiple of the rows that were expected. Nothing is changed then.
        """
        if not self.expected:
            self.clear()
        elif self.ids is not None and self.ids.shape[0] != rows:
            if rows % self.ids.shape[0]:
                raise ValueError(
                    f"input_ids: got {rows} rows, but see() got {self.ids.shape[0]}; show it what the model gets."
                )
            # `generate` repeats rows so for beams and for several answers to a prompt.
            own = torch.arange(self.ids.shape[0], device=self.ids.device)
            self.take_rows(own.repeat_interleave(rows // len(own)))

    def expect(self, ids: Tensor, mask: Tensor | None, seen: int) -> None:
        """Notes and tags a conversation (B, n) ahead of its forward, with its mask: the tokens that come must be these.

        Raises:
            ValueError: the columns that are cached had other ids. Nothing is changed then.
        """
        known = min(self.length, seen)
        if known:
            assert self.ids is not None
            shown, held = ids[:, :known].to("cpu", torch.int32), self.ids[:, :known].cpu()
            same = (held == shown) | (held == _UNKNOWN)
            # Padding may be any token.
            same = same if mask is None else same | (mask[:, :known].cpu() == 0)
            if not bool(same.all()):
                column = int((~same).any(0).int().argmax())
                raise ValueError(
                    f"input_ids: the token in column {column} differs from the one that is cached there; show the "
                    "conversation as the cache has it, or call reset() first."
                )
            self.ids[:, :known] = torch.where(held == _UNKNOWN, shown, held).to(self.ids.device)
        if not known:
            self.clear()
        self.expected = 0
        if known < seen:
            self.write(ids[:, known:seen], None, known)
        self.tag_prompt(ids[:, seen:], mask, seen)
        self.expected = ids.shape[1]

    def note_step(self, ids: Tensor, seen: int) -> None:
        """Records generated tokens (B, t) behind ``seen`` columns, without tags."""
        if self.expected < seen + ids.shape[1] and self.length >= seen:
            self.write(ids, None, seen)

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, object]) -> TokenRecord:
        new = copy.copy(self)
        # Tags that layers share are of the forward that runs.
        new._shared, new._taken = {}, 0
        new.ids, new.tags = (None if x is None else x.clone() for x in (self.ids, self.tags))
        return new

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Ids and tags, for a file; without those that are only expected."""
        if self.ids is None or self.tags is None:
            return {"tagged": 0}, {}
        held = {"ids": self.ids[:, : self.length], "tags": self.tags[:, : self.length]}
        return {"tagged": min(self.tagged, self.length)}, held

    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes what `pack` gave; nothing has been noted so far."""
        if "ids" in tensors:
            self.write(tensors["ids"], tensors["tags"], 0)
        self.tagged = int(found["tagged"])

    @outside_inference_mode
    def write(self, ids: Tensor, tags: Tensor | None, start: int) -> None:
        end = start + ids.shape[1]
        have = 0 if self.ids is None else self.ids.shape[1]
        if self.ids is None or self.tags is None or have < end:
            room = room_for_columns(have, end)
            grown = torch.zeros(ids.shape[0], room, dtype=torch.int32, device=ids.device)
            grown_tags = torch.full_like(grown, UNTAGGED, dtype=torch.uint8)
            if self.ids is not None and self.tags is not None:
                grown[:, :have], grown_tags[:, :have] = self.ids, self.tags
            self.ids, self.tags = grown, grown_tags
        self.ids[:, start:end] = ids
        if tags is None:
            self.tags[:, start:end] = UNTAGGED
        else:
            self.tags[:, start:end] = tags.to(self.tags.device)
            self.tagged = max(self.tagged, end)
        self.length = end
        self._unshare()

    def crop(self, seen: int) -> None:
        """Keeps the first ``seen`` columns."""
        self.length, self.expected = min(self.length, seen), min(self.expected, seen)
        self._unshare()

    @outside_inference_mode
    def take_rows(self, index: Tensor) -> None:
        """Row b becomes what row ``index[b]`` was."""
        if self.ids is not None and self.tags is not None:
            index = index.to(self.ids.device)
            self.ids, self.tags = self.ids[index], self.tags[index]
            self._unshare()
