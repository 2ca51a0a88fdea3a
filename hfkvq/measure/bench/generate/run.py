"""One row after another; what fails is a row too, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from hfkvq.kernels import await_kernels

from .cases import Case, Settings
from .decode import Figures, Memory, measure_decode
from .engines import Engine
from .fill import fill
from .meeting import Meeting
from .models import Heads
from .prompts import measure_prefill
from .search import Row
from .turns import Turn, take_turns
from .whole import Draft, measure_assisted, measure_whole


def reason(error: BaseException) -> str:
    """What went wrong, in a line; the compiler's errors say so in their second."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]


def is_full(error: BaseException) -> bool:
    """Whether memory was too small, also where the compiler has wrapped the error in its own."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def sweep(device: torch.device) -> None:
    """Gives back what a line has left: caches, graphs and their pools, compiled code."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(measure: Callable[[], Figures]) -> Figures:
    """What was measured, or what kept it from being so."""
    try:
        return measure()
    # A benchmark over many caches: one that fails, however it does, must not take the others' figures along.
    except Exception as error:
        # Not the error itself: its frames hold the tensors that memory was too small for.
        found: Figures = {"error": reason(error)}
        if is_full(error):
            found["oom"] = True
        if isinstance(error, ImportError):
            found["skipped"] = True
        return found


def start_row(kind: str, engine: Engine, case: Case, **more: Any) -> Row:
    """What a row is of."""
    size = {"batch": case.batch, "context": case.context}
    return {"kind": kind, "engine": engine.name, "mode": engine.mode, **size, **more}


class Bench:
    """A model, and how it is measured.

    Args:
        model: of random weights, see `models.build`.
        settings: how long, and how.
        meeting: where other runs are met, or None.
        draft: a smaller model of the same vocabulary, for assisted decoding.
    """

    def __init__(
        self, model: Any, settings: Settings, meeting: Meeting | None = None, draft: Any | None = None
    ) -> None:
        self.model, self.settings, self.meeting, self.draft = model, settings, meeting, draft
        self.device, self.dtype = model.device, model.dtype
        self.heads = Heads.of(model.config)

    def row(
        self, kind: str, engine: Engine, case: Case, measure: Callable[[], Figures], clean: bool = True, **more: Any
    ) -> Row:
        """A row of what ``measure`` finds, or of what keeps it from that; ``clean`` lets go of compiled code before."""
        if clean:
            sweep(self.device)
        memory = Memory(self.device)
        memory.start()
        before, row = memory.held(), start_row(kind, engine, case, **more)
        row |= attempt(measure)
        if "error" not in row:
            # Steps have looked at the peak in between.
            peak = row.get("peak_bytes", memory.peak())
            above = None if peak is None or before is None else peak - before
            row |= {"peak_bytes": peak, "above_bytes": above, "reserved_bytes": memory.reserved()}
        return row

    @await_kernels()
    def decode(self, engine: Engine, case: Case) -> Row:
        """A decode row: see `measure_decode`; also ``cache_bytes`` and ``fill_peak_bytes``, weights included."""
        with contextlib.nullcontext() if self.meeting is None else self.meeting.line():
            return self.row("decode", engine, case, lambda: self._decode(engine, case))

    def _decode(self, engine: Engine, case: Case) -> Figures:
        memory, settings = Memory(self.device), self.settings
        before = memory.held()
        with engine.cache(self._source(engine), case.context + settings.new_tokens) as cache, self._decoding():
            self._fill(cache, case)
            filled = memory.held()
            figures: Figures = {
                "cache_bytes": None if filled is None or before is None else filled - before,
                "fill_peak_bytes": memory.peak(),
            }
            return figures | measure_decode(self.model, cache, case, engine.compiled, settings, self.meeting)

    def _source(self, engine: Engine) -> Any:
        # Hooks of a model do not run in a compiled step.
        return self.model.config if engine.compiled else self.model

    @torch.no_grad()
    def _fill(self, cache: Cache, case: Case) -> None:
        vocabulary = self.model.get_input_embeddings().num_embeddings
        fill(
            cache,
            self.heads,
            case,
            vocabulary,
            self.device,
            self.dtype,
            self.settings.fill_bytes,
            self.settings.seed,
        )
        gc.collect()

    @await_kernels()
    def turns(self, engines: Sequence[Engine], case: Case) -> list[Row]:
        """Rows of eager steps that were timed in turns: see `take_turns`. All caches are held at a time."""
        sweep(self.device)
        rows: list[Row] = []
        ready: list[Turn] = []
        with self._decoding():
            for engine in engines:
                row = start_row("turns", engine, case)
                made = attempt(lambda engine=engine: {"turn": self._turn(engine, case)})
                if "turn" in made:
                    ready.append(made.pop("turn"))
                rows.append(row | made)
            found = attempt(lambda: dict(take_turns(ready, self.settings.repeats))) if ready else {}
        return [row if "error" in row else row | found.get(row["engine"], found) for row in rows]

    @torch.no_grad()
    def _turn(self, engine: Engine, case: Case) -> Turn:
        with engine.cache(self._source(engine), case.context + self.settings.new_tokens) as cache:
            self._fill(cache, case)
        return Turn(engine, self.model, cache, case, self.settings)

    def _decoding(self) -> Any:
        # As `generate` does: experts are switched to what is fast for few tokens. Older releases have no such thing.
        return getattr(self.model, "_optimize_model_for_decode", contextlib.nullcontext)()

    @await_kernels()
    def prefill(self, engine: Engine, case: Case, chunk: int | None) -> Row:
        """A prefill row: see `measure_prefill`."""
        return self.row(
            "prefill", engine, case, lambda: measure_prefill(self.model, engine, case, chunk, self.settings)
        )

    @await_kernels()
    def whole(self, engine: Engine, case: Case, tokens: int) -> Row:
        """A row of ``generate`` from end to end: see `measure_whole`."""
        return self.row(
            "whole",
            engine,
            case,
            lambda: measure_whole(self.model, engine, case, tokens, self.settings),
            new_tokens=tokens,
        )

    @await_kernels()
    def assisted(self, engine: Engine, case: Case, kind: str, tokens: int, guesses: int) -> Row:
        """A row of ``generate`` with guessed tokens: see `measure_assisted`; of kind "assisted" by the draft model."""
        draft = Draft(guesses, self.draft if kind == "assisted" else None)
        return self.row(
            kind,
            engine,
            case,
            lambda: measure_assisted(self.model, engine, case, tokens, draft, self.settings),
            new_tokens=tokens,
        )


def describe_settings(settings: Settings) -> Figures:
    """Fields by name."""
    return dataclasses.asdict(settings)
