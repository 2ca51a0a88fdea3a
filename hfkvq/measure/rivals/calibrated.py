"""What simulated methods that calibrate share: text that is not measured, and what layers make of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..capture import Capture, capture, compressed_layers
from ..texts import KINDS, read_text
from .simulated import LayerFormat, Simulated

ROW = 1024
"""Tokens of a row of calibration text."""


def calibration_rows(tokenizer: Any, tokens: Tensor, count: int, room: int) -> list[list[int]]:
    """Rows of the package's texts, from their ends on, that occur in none of the windows that are measured.

    Args:
        tokenizer: the model's.
        tokens: i64 (W, T), the windows.
        count: tokens wanted.
        room: most tokens of a row.

    Raises:
        ValueError: there is too little text besides the windows.
    """
    size = min(ROW, room)
    windows = [bytes(row.cpu().to(torch.int32).numpy()) for row in tokens]
    texts = [tokenizer(read_text(kind), add_special_tokens=False, verbose=False).input_ids for kind in KINDS]
    found: list[list[int]] = []
    for last in range(0, max(map(len, texts)) - size, size):
        for ids in texts:
            row = ids[len(ids) - last - size : len(ids) - last] if len(ids) >= last + size else []
            # A part of it is enough: windows may end within the row.
            parts = [
                bytes(torch.tensor(row[i : i + 16], dtype=torch.int32).numpy()) for i in range(0, len(row), size // 8)
            ]
            if row and len(found) * size < count and not any(part in window for window in windows for part in parts):
                found.append(row)
    if len(found) * size < min(count, 4 * size):
        raise ValueError("text: nothing is left to calibrate with; measure fewer or shorter windows.")
    return found


@dataclass(frozen=True, kw_only=True)
class Calibrated(Simulated):
    """A method whose layers depend on what the model makes of some text of the package that no window holds.

    Attributes:
        calibration: tokens of calibration text.
    """

    calibration: int = 30_000

    @abstractmethod
    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        """The format of a layer, of what it was given in rows of calibration text."""

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        """See `Simulated.forms`.

        Raises:
            ValueError: no tokenizer, or too little text.
        """
        if tokenizer is None:
            name = type(self).__name__
            raise ValueError(f"tokenizer: got None, but {name} calibrates on text; give the model's tokenizer.")
        text = model.config.get_text_config(decoder=True)
        room = getattr(text, "max_position_embeddings", None) or ROW
        rows, which = calibration_rows(tokenizer, tokens, self.calibration, room), compressed_layers(model)
        captured: list[list[Capture]] = [[] for _ in which]
        for row in rows:
            for kept, one in zip(captured, capture(model, row, which), strict=True):
                query, keys, values = (x.to("cpu", copy=True) for x in (one.query, one.keys, one.values))
                kept.append(Capture(query, keys, values, one.scaling))
        forms = []
        while captured:
            forms.append(self.form(captured.pop(0)))
        return forms
