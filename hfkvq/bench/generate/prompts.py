"""What needs a real prompt: prefill, and ``generate`` from end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig
from transformers.cache_utils import Cache

from .cases import Case, Settings
from .decode import Figures, as_ms, now, time_repeats
from .engines import Engine


def random_prompt(model: Any, case: Case, seed: int) -> Tensor:
    """Token ids i64 (B, T) on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    most = model.get_input_embeddings().num_embeddings
    return torch.randint(most, (case.batch, case.context), generator=generator).to(model.device)


def _affordable(settings: Settings, seconds: float) -> int:
    return settings.affordable(seconds)[1]


@torch.no_grad()
def measure_prefill(model: Any, engine: Engine, case: Case, chunk: int | None, settings: Settings) -> Figures:
    """Times the forward of a prompt into a fresh cache, as `generate` runs it: never compiled, last logits alone.

    Args:
        model: the model.
        engine: which cache; a new one each time.
        case: rows and tokens.
        chunk: tokens of a forward; None takes the prompt whole.
        settings: how long.

    Returns:
        ``ms``, ``tokens_per_s`` (of the prompt), ``repeats``.
    """
    ids = random_prompt(model, case, settings.seed)

    def run() -> None:
        with engine.cache(model, case.context) as cache:
            for piece in ids.split(chunk or case.context, 1):
                model(input_ids=piece, past_key_values=cache, logits_to_keep=1, use_cache=True)

    # The first compiles kernels, the second says what one costs.
    run()
    times = time_repeats(run, 1, model.device)
    more = _affordable(settings, times[0]) - 1
    times += time_repeats(run, more, model.device)
    ms = as_ms(times)
    tokens = case.batch * case.context
    return {"ms": ms, "tokens_per_s": 1e3 * tokens / ms["p50"], "repeats": len(times)}


def _generation(engine: Engine, settings: Settings, tokens: int) -> GenerationConfig:
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
        disable_compile=not engine.compiled,
        compile_config=config,
    )


@torch.no_grad()
def measure_whole(model: Any, engine: Engine, case: Case, tokens: int, settings: Settings) -> Figures:
    """Times ``model.generate`` with its own overhead, prefill included.

    Args:
        model: the model.
        engine: which cache; one of fixed capacity is reset between runs, so that its graph stays good.
        case: rows, and tokens of the prompt.
        tokens: new tokens a row, 2 or more.
        settings: how long, and how.

    Returns:
        ``ms`` and ``tokens_per_s`` of the whole, ``ms_prefill`` (of `generate` for a single token), ``ms_step`` (the
        difference, a step), ``new_tokens`` and ``repeats``.

    Raises:
        RuntimeError: `generate` stopped early.
    """
    ids = random_prompt(model, case, settings.seed)
    mask = torch.ones_like(ids)
    long, short = (_generation(engine, settings, count) for count in (tokens, 1))
    with engine.cache(model, case.context + tokens) as held:

        def fresh() -> Cache:
            if not engine.fixed:
                return engine.make(model, case.context + tokens)
            held.reset()
            return held

        def generate(config: GenerationConfig) -> Callable[[], None]:
            def run() -> None:
                out = model.generate(ids, attention_mask=mask, past_key_values=fresh(), generation_config=config)
                if out.shape[1] != case.context + (config.max_new_tokens or 0):
                    raise RuntimeError(f"generate stopped after {out.shape[1] - case.context} tokens.")

            return run

        start = now(model.device)
        generate(long)()
        first = now(model.device) - start
        # Compiles, captures and, the second time, replays.
        seconds = time_repeats(generate(long), 1, model.device)[0]
        repeats = _affordable(settings, seconds)
        whole = as_ms(time_repeats(generate(long), repeats, model.device))
        prompt = as_ms(time_repeats(generate(short), repeats, model.device))
    return {
        "ms": whole,
        "tokens_per_s": 1e3 * case.batch * tokens / whole["p50"],
        "ms_prefill": prompt,
        "ms_step": (whole["p50"] - prompt["p50"]) / (tokens - 1),
        "first_s": first,
        "new_tokens": tokens,
        "repeats": repeats,
    }
