"""Tags of tokens, by which some schemes choose widths, and by which tokens that have aged are quantized again."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from ..store.requantize import requantize_by_tags
from ..store.routing import ColumnTags
from .base import LayerBase
from .token_record import TokenRecord

logger = logging.getLogger(__name__)


@functools.cache
def _warn_without_tags(scheme: str) -> None:
    logger.warning(
        "%s chooses bits by tags, which this cache does not get, so every token has the most bits; use "
        "TriAxialCache(model, tokenizer).",
        scheme,
    )


class TokenTags:
    """Tags of a layer's tokens.

    Attributes:
        record: ids and tags of the cache's tokens, one for all layers; None where nobody shows the cache any.
    """

    def __init__(self) -> None:
        self.record: TokenRecord | None = None

    def of_columns(self, layer: LayerBase) -> ColumnTags | None:
        """The tags of all columns known, which layers share."""
        if self.record is None:
            _warn_without_tags(layer.scheme.name)
            return None
        return self.record.shared_tags(layer.held().device)

    def may_be_due(self, layer: LayerBase) -> bool:
        """True if any token in the tail may have a tag."""
        record = self.record
        return record is None or layer.seen - max(layer.held().forecast().tail_slots) < record.tagged

    def renewed(self, layer: LayerBase) -> Tensor | None:
        """Tags that the prompt about to come has renewed, by which tokens may get fewer bits: u8 (B, n), or None."""
        record = self.record
        if layer.store is None or record is None or "turns" not in layer.scheme.needs:
            return None
        return record.tags_on(layer.store.device) if layer.seen and record.renewed == layer.seen else None

    def requantize(self, layer: LayerBase) -> None:
        """Gives tokens fewer bits if the prompt that is about to come has made them older, and the scheme wants it."""
        tags = self.renewed(layer)
        if tags is None:
            return
        layer.close()
        if requantize_by_tags(layer.held(), tags):
            layer.bind()

    def tensors(self) -> list[Tensor]:
        """Tensors that the record holds."""
        return [] if self.record is None else self.record.tensors()
