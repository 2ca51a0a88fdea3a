"""What needs a real prompt: prefill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cases import Case, Settings
from .decode import Figures, as_ms, time_repeats
from .engines import Engine


def random_prompt(model: Any, case: Case, seed: int) -> Tensor:
    """Token ids i64 (B, T) on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    most = model.get_input_embeddings().num_embeddings
    return torch.randint(most, (case.batch, case.context), generator=generator).to(model.device)


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
    more = settings.affordable(times[0])[1] - 1
    times += time_repeats(run, more, model.device)
    ms = as_ms(times)
    tokens = case.batch * case.context
    return {"ms": ms, "tokens_per_s": 1e3 * tokens / ms["p50"], "repeats": len(times)}
