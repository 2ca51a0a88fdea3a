"""One decode step after another: the time of a step, and what it needs of the GPU's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hfkvq.caches.cache import MixedKVCache

from ...records import clock
from ..timing import quantiles
from .cases import Case, Settings
from .fill import length
from .meeting import Meeting

Figures = dict[str, Any]
"""What was measured, as it stands in a row of the JSON."""


class Memory:
    """Bytes that tensors take on a GPU, and the most they took; nothing is known of a CPU's."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.known = device, device.type == "cuda"

    def held(self) -> int | None:
        """Bytes of tensors now."""
        return torch.cuda.memory_allocated(self.device) if self.known else None

    def peak(self) -> int | None:
        """Most bytes since the last `start`."""
        return torch.cuda.max_memory_allocated(self.device) if self.known else None

    def reserved(self) -> int | None:
        """Most bytes that PyTorch has taken from the GPU since the last `start`, pools of CUDA graphs included."""
        return torch.cuda.max_memory_reserved(self.device) if self.known else None

    def start(self) -> None:
        """Forgets the peaks."""
        if self.known:
            torch.cuda.reset_peak_memory_stats(self.device)


def time_repeats(run: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        start = clock(device)
        run()
        times.append(clock(device) - start)
    return times


def as_ms(times: list[float], count: int = 1) -> dict[str, float]:
    """Quantiles over repeats in milliseconds, of one of ``count`` equal parts."""
    p20, p50, p80 = (1e3 * seconds / count for seconds in quantiles(times))
    return {"p20": p20, "p50": p50, "p80": p80}


class Decoder:
    """A model, a cache that holds a context, and the newest token of each row.

    Args:
        model: the model.
        cache: filled.
        batch: its rows.
        arguments: of `torch.compile`; None leaves the model as it is.
        seed: of the first tokens.
    """

    def __init__(self, model: Any, cache: Cache, batch: int, arguments: Figures | None, seed: int = 0) -> None:
        # Compiled as `generate` does. Otherwise the model itself is called: caches may see to its steps.
        self.forward = None if arguments is None else torch.compile(model.forward, **arguments)
        self.model = model
        # What `generate` does by asking for mask sizes, which a graph without a mask of its own never does.
        self.between_steps = cache.between_steps if arguments and isinstance(cache, MixedKVCache) else None
        self.cache = cache
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.get_input_embeddings().num_embeddings, (batch, 1), generator=generator)
        self.ids = ids.to(model.device)

    def logits(self) -> Tensor:
        """(B, 1, V) of a step."""
        if self.forward is None:
            return self.model(input_ids=self.ids, past_key_values=self.cache).logits
        if self.between_steps is not None:
            self.between_steps()
        return self.forward(input_ids=self.ids, past_key_values=self.cache, logits_to_keep=1, use_cache=True).logits

    def step(self) -> None:
        """Computes the next token of each row, and makes it the newest; waits for nothing."""
        self.ids.copy_(self.logits()[:, -1].argmax(-1, keepdim=True))

    def check(self) -> None:
        """A step whose logits must be finite.

        Raises:
            RuntimeError: they are not.
        """
        if not bool(torch.isfinite(self.logits()).all()):
            raise RuntimeError("the logits are not finite; what computes them so is not worth timing.")


@torch.no_grad()
def measure_decode(
    model: Any, cache: Cache, case: Case, compiled: bool, settings: Settings, meeting: Meeting | None = None
) -> Figures:
    """Times steps on a filled cache.

    Args:
        model: the model.
        cache: holds ``case.context`` tokens, and has room for ``settings.new_tokens`` more.
        case: rows and tokens.
        compiled: whether to compile the model.
        settings: how long, and how.
        meeting: where other runs are met, or None.

    Returns:
        ``ms`` a step (p20, p50, p80 over repeats), ``tokens_per_s``, ``steps`` and ``repeats``, ``first_step_s`` (with
        what it compiles or records), ``steady_bytes`` (the peak of the timed steps), ``peak_bytes`` (since the caller
        last forgot it: filling and compiling included), and of compiled models ``compile_s`` (the first step),
        ``graphs`` and ``cudagraph_skips``, which ought to be 1 and 0.

    Raises:
        RuntimeError: logits are not finite, or the cache did not grow by a token a step.
    """
    device, memory = model.device, Memory(model.device)
    if compiled:
        from torch._dynamo.utils import counters

        counters.clear()
    decoder = Decoder(model, cache, case.batch, settings.compile if compiled else None, settings.seed)
    start = clock(device)
    decoder.step()
    first = clock(device) - start
    decoder.check()
    quick = settings.warmup // 2
    for _ in range(settings.warmup - 2 - quick):
        decoder.step()
    start = clock(device)
    for _ in range(quick):
        decoder.step()
    steps, repeats = settings.affordable((clock(device) - start) / quick)

    def run() -> None:
        for _ in range(steps):
            decoder.step()

    before = memory.peak()
    with contextlib.nullcontext() if meeting is None else meeting.turn():
        memory.start()
        times = time_repeats(run, repeats, device)
    taken, expected = length(cache), case.context + settings.warmup + steps * repeats
    if taken != expected:
        raise RuntimeError(f"{settings.warmup + steps * repeats} steps were taken, but the cache holds {taken} tokens.")
    ms, steady = as_ms(times, steps), memory.peak()
    figures: Figures = {
        "ms": ms,
        "tokens_per_s": 1e3 * case.batch / ms["p50"],
        "steps": steps,
        "repeats": repeats,
        "first_step_s": first,
        "steady_bytes": steady,
        "peak_bytes": None if before is None or steady is None else max(before, steady),
    }
    if compiled:
        from torch._dynamo.utils import counters

        figures |= {
            "compile_s": first,
            "graphs": counters["stats"]["unique_graphs"],
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        }
    return figures
