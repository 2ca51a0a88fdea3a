"""Tags of a prompt, from its token ids: one scan on the CPU, no model. Placeholders of images among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .axes import KINDS, PAD, TAGS, TEMPORAL, age_tags, parse_tag
from .formats import ChatFormat, find_format, get_format
from .scan import Grammar, Place, Scan

_KINDS = ("image", "video")


def placeholders(source: Any, kinds: Iterable[str] = _KINDS) -> list[int]:
    """Ids of images and of video frames in a model's prompts, as its config or processor says."""
    names = [f"{kind}_token_{what}" for kind in kinds for what in ("id", "index")]
    found = {getattr(source, name, None) for name in names}
    return sorted(x for x in found if isinstance(x, int))


@dataclass(frozen=True)
class ImageTokens:
    """Tokens of images and videos in a model's prompts.

    A chat template writes one placeholder for an image, and a processor repeats it for each feature of the image.
    Without the processor, a single token would be tagged as the image, and the features would have no place.

    Attributes:
        ids: of placeholders.
        merged: patches of a token, along one side; None if the model's images do not come as a grid of patches.
        each: tokens of an image, None if images take different numbers of them.
        frames: of a video, that share tokens.
    """

    ids: tuple[int, ...]
    merged: int | None
    each: int | None
    frames: int = 1

    @classmethod
    def of(cls, config: Any) -> ImageTokens:
        """Tokens as a model's config describes them."""
        vision = getattr(config, "vision_config", None)
        merged, frames = getattr(vision, "spatial_merge_size", None), getattr(vision, "temporal_merge_size", None)
        numbers = [getattr(config, name, None) for name in ("mm_tokens_per_image", "image_seq_length")]
        each = next((x for x in numbers if isinstance(x, int)), None)
        merged = merged if isinstance(merged, int) else None
        return cls(tuple(placeholders(config)), merged, each, frames if isinstance(frames, int) else 1)

    def check(self, input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
        """Raises if placeholders were not expanded.

        Args:
            input_ids: (B, t) token ids.
            inputs: the model's other inputs, as its processor made them: pixels, or features of its vision tower.
                Other entries are passed over.

        Raises:
            ValueError: there are fewer placeholders than features, and at most one for each image.
        """
        counted = list(self._counts(inputs)) if self.ids else []
        shown, wanted = sum(n for n, _ in counted), sum(n for _, n in counted)
        if not wanted:
            return
        found = sum(int((input_ids == token).sum()) for token in self.ids)
        # Placeholders of more than one an image were expanded; the model checks their number.
        if found < wanted and found <= shown:
            raise ValueError(
                f"input_ids: got {found} placeholders (token {' or '.join(map(str, self.ids))}), but the images and "
                f"videos that are shown, {shown}, need {wanted}: they were not expanded. Make ids and pixels "
                "together with the model's processor: processor(text=..., images=...), or "
                "processor.apply_chat_template(messages, tokenize=True, return_dict=True)."
            )

    def _counts(self, inputs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """(Images, tokens they take), as far as inputs tell."""
        encoded = inputs.get("mm_encoder_outputs")
        if isinstance(encoded, Mapping):
            # Features by image, which `generate` makes ahead of the first forward.
            for kind in _KINDS:
                features = getattr(encoded.get(kind), "pooler_output", None)
                parts = list(features) if isinstance(features, (Tensor, tuple, list)) else []
                yield len(parts), sum(part.numel() // part.shape[-1] for part in parts)
        kinds = (("pixel_values", "image_grid_thw", 1), ("pixel_values_videos", "video_grid_thw", self.frames))
        for pixels, grid, frames in kinds:
            patches = inputs.get(grid)
            # Steps may be given a grid without pixels.
            if self.merged and inputs.get(pixels) is not None and isinstance(patches, Tensor):
                yield patches.shape[0], int((patches.prod(-1) // (self.merged**2 * frames)).sum())
        images = inputs.get("pixel_values")
        if self.each and isinstance(images, Tensor) and images.dim() == 4:
            yield images.shape[0], images.shape[0] * self.each


Ids = Tensor | Sequence[int] | Sequence[Sequence[int]]

_CURRENT = len(TEMPORAL) - 1


class Row(NamedTuple):
    """State of a row: the settled part of its scan, and the few tokens after it.

    Attributes:
        place: State of the scan behind the settled tokens.
        ids: (N,) int64 tokens given after that place.
        columns: (N,) int64, the columns of these tokens.
        started: False while the row has only padding.
    """

    place: Place = Place()
    ids: np.ndarray = np.zeros(0, dtype=np.int64)
    columns: np.ndarray = np.zeros(0, dtype=np.int64)
    started: bool = False


@dataclass(frozen=True)
class TagState:
    """State of the scan of a growing conversation. It is never changed, so one may go on from it twice.

    Attributes:
        rows: State of each row of the batch.
        seen: Columns given so far, padding included.
    """

    rows: tuple[Row, ...]
    seen: int = 0

    def reorder(self, indices: Sequence[int]) -> TagState:
        """State whose row ``i`` is this one's row ``indices[i]``, as a cache reorders its beams."""
        return TagState(tuple(self.rows[i] for i in indices), self.seen)


@dataclass(frozen=True)
class Extension:
    """Tags of new tokens, and changes of the tags before them.

    Attributes:
        state: Argument of the next call of `Tagger.extend`.
        tags: (B, T) uint8 tags of the new tokens.
        aged: (B,) int64, turns that began among them, by which the older tokens age, see `age_tags`.
        revised_rows: (N,) int64, rows of older tokens whose tag is another now. They are few: their role was still
            open, as with a message header at the end of the last call.
        revised_columns: (N,) int64, their columns, counted from the first token of the conversation.
        revised_tags: (N,) uint8, their tags now; they must not be aged again.
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
    """Gives every token of a prompt a tag ``temporal|modal|semantic`` (TriAxialKV, section 3.1 and Table 1).

    A turn runs from one user message up to the next; the last is ``current``, those before it ``turn_m1``, ``turn_m2``
    and ``older``. Tokens before the first turn are ``older``, so that the tags of a shared system prompt never
    change. Tool results never begin a turn, under any role. An answer before any user message
    begins one: its question was cut off. A header at the end of the ids whose message may still turn out to be a tool
    result belongs to the turn before it.

    Roles give ``inst``, ``user``, ``assistant`` and ``obs``; brackets give ``reasoning`` and ``tool_call``. Markers,
    headers, the newlines right after them and the white space between messages are ``delim``. Text outside any message,
    such as a prompt that begins in the middle of one, is ``inst``. Placeholders of images and of video frames are
    ``image``, with the semantic of the message they stand in: those that the format names, and those of the model's
    config.

    Limits of the ids: markers that a user types are markers if the tokenizer makes them so. Inside a user's or
    the system's message this is harmless for brackets, which count in an assistant's message only, but ends of messages
    and headers count everywhere, and so does ``<tool_response>`` at the beginning of a user's message. Formats without
    a system role (Gemma, Llama 3 with tools, Mistral before v7) write instructions into a user message, where they are
    ``user``. Bare JSON calls (Llama 3) are known by their first key alone.

    Args:
        grammar: Markers in token ids; None for no chat format: all is ``current|text|user``, and
            ``current|image|user`` at placeholders.
        pad_id: Token that counts as padding at the left where no attention mask is given.
        bos_id: Token that begins a text. Where it is the padding token too, the last at the left is no padding.
        images: Placeholders of images, used without a grammar.
    """

    names: tuple[str, ...] = TAGS

    def __init__(
        self,
        grammar: Grammar | None,
        pad_id: int | None = None,
        bos_id: int | None = None,
        images: Iterable[int] = (),
    ) -> None:
        self.grammar = grammar
        self.pad_id, self.bos_id = pad_id, bos_id
        self.images = tuple(images)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, chat_format: ChatFormat | str | None = None, config: Any = None) -> Tagger:
        """Tagger of a tokenizer's chat template; without a template, all tags are ``current|text|user``.

        Args:
            tokenizer: A Transformers tokenizer, or a processor that holds one.
            chat_format: Format, or its name in `FORMATS`, in place of the one that the template is recognized as.
            config: Config of the model, which names the placeholders of images and videos (``image_token_id``); a
                processor names them too.

        Raises:
            ValueError: No known format fits the chat template, or none has that name.
        """
        processor, template = tokenizer, getattr(tokenizer, "chat_template", None)
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        template = template or getattr(tokenizer, "chat_template", None)
        if isinstance(chat_format, str):
            chat_format = get_format(chat_format)
        if chat_format is None and template:
            # Templates of some tokenizers are several by name, e.g. one for tools.
            text = template if isinstance(template, str) else "\n".join(template.values())
            chat_format = find_format(text, tokenizer.get_added_vocab())
        # Processors give the unknown token's id for a placeholder that their tokenizer does not have.
        named = set(placeholders(processor)) - {getattr(tokenizer, "unk_token_id", None)}
        images = sorted({*placeholders(config), *named})
        grammar = None if chat_format is None else Grammar(tokenizer, chat_format, images)
        return cls(grammar, tokenizer.pad_token_id, tokenizer.bos_token_id, images)

    def tag(self, input_ids: Ids, attention_mask: Tensor | Sequence[Any] | None = None) -> Tensor:
        """Tags of a batch of prompts.

        Args:
            input_ids: (B, T) or (T,) token ids, on any device.
            attention_mask: (B, T) or (T,), 0 at padding. Without it, `pad_id` at the left of a row is padding.

        Returns:
            Tensor: (B, T) uint8 tag numbers on the CPU, see `TAGS`.

        Raises:
            ValueError: Ids are no integers, or shapes do not fit.
        """
        return self.extend(None, input_ids, attention_mask).tags

    def extend(
        self, state: TagState | None, input_ids: Ids, attention_mask: Tensor | Sequence[Any] | None = None
    ) -> Extension:
        """Tags the next tokens of a conversation; ``append_to`` of the result equals `tag` of all ids at once.

        Args:
            state: State of the last extension; None at the beginning.
            input_ids: (B, T) or (T,) ids of the new tokens alone.
            attention_mask: (B, T) or (T,), of the new tokens alone.

        Raises:
            ValueError: Ids are no integers, or shapes do not fit.
        """
        ids = _array("input_ids", input_ids)
        if ids.dtype.kind not in "iu" and ids.size:
            raise ValueError(f"input_ids: got {ids.dtype}, allowed integers.")
        ids = ids.astype(np.int64)
        mask = None if attention_mask is None else _array("attention_mask", attention_mask) != 0
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"attention_mask: got shape {mask.shape}, allowed that of input_ids, {ids.shape}.")
        if state is None:
            state = TagState((Row(),) * len(ids))
        if len(state.rows) != len(ids):
            raise ValueError(f"input_ids: got {len(ids)} rows, but the state has {len(state.rows)}.")
        tags = np.full(ids.shape, PAD, dtype=np.uint8)
        rows, aged = [], []
        # Empty arrays come first, for a batch of no rows.
        revised = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8))]
        for i, row in enumerate(state.rows):
            real = self._real(ids[i], row.started) if mask is None else mask[i]
            (new,) = np.nonzero(real)
            old_count = len(row.ids)
            given = np.concatenate([row.ids, ids[i, new]])
            columns = np.concatenate([row.columns, state.seen + new])
            place, made, settled = self._tag_row(row.place, given)
            tags[i, new] = made[old_count:]
            rows.append(Row(place, given[settled:], columns[settled:], row.started or len(new) > 0))
            aged.append(place.turns - row.place.turns)
            revised.append((np.full(old_count, i), columns[:old_count], made[:old_count]))
        of_rows, of_columns, of_tags = (np.concatenate(parts) for parts in zip(*revised, strict=True))
        return Extension(
            TagState(tuple(rows), state.seen + ids.shape[1]),
            torch.from_numpy(tags),
            torch.tensor(aged, dtype=torch.int64, device="cpu"),
            torch.from_numpy(of_rows),
            torch.from_numpy(of_columns),
            torch.from_numpy(of_tags),
        )

    def _real(self, ids: np.ndarray, started: bool) -> np.ndarray:
        """Real tokens (T,), told from padding without a mask."""
        real = np.ones(len(ids), dtype=bool)
        if started or self.pad_id is None:
            return real
        others = np.flatnonzero(ids != self.pad_id)
        count = int(others[0]) if len(others) else len(ids)
        if count and self.bos_id == self.pad_id:
            count -= 1
        real[:count] = False
        return real

    def _tag_row(self, place: Place, ids: np.ndarray) -> tuple[Place, np.ndarray, int]:
        """State of the scan behind the settled tokens, tags (T,), and the number of settled tokens."""
        if self.grammar is None:
            image, text = (parse_tag(f"current|{modal}|user") for modal in ("image", "text"))
            return place, np.where(np.isin(ids, self.images), image, text).astype(np.uint8), len(ids)
        scan = Scan(self.grammar, place, ids)
        turns = place.turns + np.searchsorted(np.array(scan.beginnings, dtype=np.int64), np.arange(len(ids)), "right")
        last = place.turns + len(scan.beginnings)
        temporal = np.where(turns == 0, 0, np.maximum(_CURRENT - (last - turns), 0))
        return scan.settled_place, (temporal * KINDS + scan.kinds).astype(np.uint8), scan.settled


def _array(name: str, given: Any) -> np.ndarray:
    """(B, T) array of a tensor or of sequences."""
    if isinstance(given, Tensor):
        array = given.detach().cpu().numpy()
    else:
        rows = [given] if not len(given) or np.ndim(given[0]) == 0 else list(given)
        lengths = sorted({len(row) for row in rows})
        if len(lengths) != 1:
            raise ValueError(f"{name}: got rows of {lengths} tokens; pad them to one length.")
        array = np.array(rows)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2:
        raise ValueError(f"{name}: got shape {array.shape}, allowed (B, T) or (T,).")
    return array
