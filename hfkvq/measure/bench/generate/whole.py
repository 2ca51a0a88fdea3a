"""``generate`` from end to end, as users call it: warm, with or without a draft; `cold` has first calls."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from ...records import clock
from .cases import Case, Settings
from .decode import Figures, as_ms
from .engines import Engine
from .prompts import random_prompt

WARM_UP = 8
"""New tokens of the call that warms up a cache whose steps record nothing."""


class TokenTimes(BaseStreamer):
    """When tokens came, and how many at a time.

    Attributes:
        times: seconds by the clock.
        counts: tokens of a row.
    """

    def __init__(self) -> None:
        self.times, self.counts = list[float](), list[int]()
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Takes note of tokens that have come; the first are the prompt."""
        if not self._prompt:
            self.times.append(time.perf_counter())
            # Without a draft one of each row, in one dimension; with one several, of the only row there is.
            self.counts.append(value.shape[1] if value.dim() == 2 else 1)
        self._prompt = False

    def end(self) -> None:
        """Nothing is left to do."""


@dataclass
class Call:
    """What a call of ``generate`` took, and gave.

    Attributes:
        start: seconds by the clock.
        end: likewise.
        token_times: of its tokens.
        tokens: (B, N), new ones.
    """

    start: float
    end: float
    token_times: TokenTimes
    tokens: Tensor

    @property
    def seconds(self) -> float:
        """From call to return."""
        return self.end - self.start

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.token_times.times[0] - self.start


@dataclass(frozen=True)
class Draft:
    """What guesses tokens: a smaller model, or else the prompt.

    Attributes:
        tokens: guessed at a time.
        model: of the guesses; None looks them up in what is there already.
    """

    tokens: int
    model: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Sets the model to guess so many, always."""
        if self.tokens < 1:
            raise ValueError(f"draft tokens: got {self.tokens}, allowed 1 or more.")
        if self.model is not None:
            own = self.model.generation_config
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = self.tokens, "constant"
            own.assistant_confidence_threshold = 0.0

    @property
    def lookup(self) -> int | None:
        """Tokens looked up at a time, for a `GenerationConfig`."""
        return self.tokens if self.model is None else None


def _generation(engine: Engine, settings: Settings, tokens: int, draft: Draft | None) -> GenerationConfig:
    given = dict(settings.compile)
    # Without `fullgraph`, as `generate` has it by default: what surrounds the model may ask for a break.
    given.pop("fullgraph", None)
    mode = given.pop("mode", None)
    config = CompileConfig(mode=mode, **given) if engine.compiled else None  # type: ignore[arg-type]
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        # Caches with graphs of their own are left to do as they do.
        disable_compile=not engine.warms_up,
        compile_config=config,
        prompt_lookup_num_tokens=None if draft is None else draft.lookup,
    )


@contextlib.contextmanager
def calls(
    model: Any, engine: Engine, case: Case, tokens: int, settings: Settings, draft: Draft | None = None
) -> Iterator[Callable[[int], Call]]:
    """A function of new tokens that calls ``generate``, each time with the same prompt.

    A cache without capacity is made anew each time, within what is timed; one of fixed capacity is reset, so that its
    graph stays good.

    Args:
        model: the model.
        engine: which cache.
        case: rows, and tokens of the prompt.
        tokens: the most new tokens that will be asked for.
        settings: how the model is compiled, and the seed.
        draft: what guesses tokens, or None.
    """
    ids = random_prompt(model, case, settings.seed)
    mask, held = torch.ones_like(ids), list[Cache]()
    assistant = None if draft is None else draft.model

    def fresh() -> Cache:
        if held:
            held[0].reset()
            return held[0]
        cache = engine.fresh(model, case.context + tokens)
        if engine.fixed:
            held.append(cache)
        return cache

    def call(count: int) -> Call:
        token_times, config = TokenTimes(), _generation(engine, settings, count, draft)
        start = clock(model.device)
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=fresh(),
            generation_config=config,
            streamer=token_times,
            assistant_model=assistant,
        )
        end = clock(model.device)
        if out.shape[1] != case.context + count:
            raise RuntimeError(f"generate stopped after {out.shape[1] - case.context} tokens.")
        return Call(start, end, token_times, out[:, case.context :].cpu())

    with engine.settings(model), torch.no_grad():
        yield call


def describe_tokens(tokens: Tensor) -> Figures:
    """``tokens``, the first row's as text, and ``digest`` of all rows: what tells whether caches answer alike."""
    digest = hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest()
    return {"tokens": " ".join(map(str, tokens[0].tolist())), "digest": digest[:16]}


def _timed(call: Callable[[int], Call], engine: Engine, tokens: int, settings: Settings) -> tuple[Figures, list[Call]]:
    """What the first call took, where it tells of more than a small one, and the calls that are timed."""
    if engine.warms_up:
        # Compiles and records.
        first: Figures = {"first_s": call(tokens).seconds}
    else:
        first = {}
        call(min(WARM_UP, tokens))
    done = [call(tokens)]
    repeats = settings.affordable(done[0].seconds)[1]
    if engine.warms_up and repeats > 1:
        # What was left to be compiled or recorded, it did.
        done.clear()
    done += [call(tokens) for _ in range(repeats - len(done))]
    return first, done


def _summary(done: list[Call], case: Case, tokens: int) -> Figures:
    ms = as_ms([call.seconds for call in done])
    prompt = as_ms([call.first for call in done])
    # From the first token on: with a draft there may be several by then.
    later = tokens - done[0].token_times.counts[0]
    return {
        "ms": ms,
        "tokens_per_s": 1e3 * case.batch * tokens / ms["p50"],
        "ms_prefill": prompt,
        "ms_step": (ms["p50"] - prompt["p50"]) / max(later, 1),
        "repeats": len(done),
        **describe_tokens(done[-1].tokens),
    }


def measure_whole(model: Any, engine: Engine, case: Case, tokens: int, settings: Settings) -> Figures:
    """Times ``model.generate`` with its own overhead, prefill included.

    Args:
        model: the model.
        engine: which cache.
        case: rows, and tokens of the prompt.
        tokens: new tokens a row, 2 or more.
        settings: how long, and how.

    Returns:
        ``ms`` and ``tokens_per_s`` of the whole, ``ms_prefill`` (until the first token), ``ms_step`` (the rest, a
        token), ``ms_token`` (p20, p50, p80 of the time between two tokens, over all repeats), ``repeats``, what
        `describe_tokens` says, and where steps are compiled or recorded ``first_s``, of the first call in this process.

    Raises:
        RuntimeError: `generate` stopped early.
    """
    with calls(model, engine, case, tokens, settings) as call:
        first, done = _timed(call, engine, tokens, settings)
    gaps = [after - before for each in done for before, after in itertools.pairwise(each.token_times.times)]
    return {**_summary(done, case, tokens), "ms_token": as_ms(gaps), **first}


def measure_assisted(model: Any, engine: Engine, case: Case, tokens: int, draft: Draft, settings: Settings) -> Figures:
    """Times ``model.generate`` with guessed tokens, which the model takes or not; greedy, so it says what it would.

    Args:
        model: the model.
        engine: which cache; the draft has a `DynamicCache` of its own.
        case: one row, and tokens of the prompt.
        tokens: new tokens, 2 or more.
        draft: what guesses.
        settings: how long, and how.

    Returns:
        As `measure_whole`, without ``ms_token``; and ``forwards`` of the model, ``ms_forward`` (p20, p50, p80 of the
        time between two, guessing included), ``accepted`` (guesses taken a forward, on average), ``draft_tokens``.
    """
    with calls(model, engine, case, tokens, settings, draft) as call:
        first, done = _timed(call, engine, tokens, settings)
    gaps = [after - before for each in done for before, after in itertools.pairwise(each.token_times.times)]
    counts = done[-1].token_times.counts
    return {
        **_summary(done, case, tokens),
        "forwards": len(counts),
        "accepted": sum(counts) / len(counts) - 1,
        "ms_forward": as_ms(gaps) if gaps else None,
        "draft_tokens": draft.tokens,
        **first,
    }
