"""Placeholders of images and videos among a model's tokens: their ids, and whether a processor has expanded them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
