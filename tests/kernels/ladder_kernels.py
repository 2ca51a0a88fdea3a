"""What layers launch that go down a ladder, and what is compiled ahead of it, for a GPU that need not be there.

``python -m tests.kernels.ladder_kernels cache|engine``, without TRITON_INTERPRET, prints names of the kernels that a
cache's budget launches, or an engine's, and of those variants among them that were not compiled ahead, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfkvq import MixedKVCache, kernels
from hfkvq.kernels.triton import variants
from hfkvq.kernels.triton.compile import Wanted
from tests.kernels.compile_kernels import BF16
from tests.kernels.launched_kernels import DIM, forget, noting


def feed(model: Any, ids: torch.Tensor, cache: MixedKVCache) -> None:
    with torch.no_grad():
        model(ids, past_key_values=cache)


def of_cache(model: Any, ids: torch.Tensor) -> tuple[Callable[[], object], Callable[[], None]]:
    """Compiles ahead; and goes down by some layers at a time, with steps in between."""
    # The first one measures the model.
    feed(model, ids[:, :5], MixedKVCache(model, memory="64MiB", graphs=False))
    cache = MixedKVCache(model, memory="64MiB", graphs=False)
    budget: Any = cache.budget

    def act() -> None:
        feed(model, ids, cache)
        every = list(budget.down())
        for n in range(7):
            cache._catch_up()
            for layer in cache.compressed_layers:
                layer.settle()
            budget._go(cache, budget._shape(cache, None), every[n * (len(every) - 1) // 6], 1024)
            for _ in range(2):
                feed(model, ids[:, :1], cache)

    return lambda: budget.compile_ladder(cache, torch.zeros(1, 2, 0, DIM, dtype=BF16)), act


def of_engine(model: Any, ids: torch.Tensor) -> tuple[Callable[[], object], Callable[[], None]]:
    """Compiles ahead; and steps down twice, with steps and new prompts behind it."""
    from hfkvq.serving import pages as of_blocks
    from hfkvq.serving import windows
    from tests.serving.test_ladder import Engine

    # Attention of prompts is PyTorch's.
    for module in (of_blocks, windows):
        module.prompt_attention = lambda module, query, *_: query.transpose(1, 2).clone()
    engine = Engine(model, "160MiB", tokens=1024, new=50, max_blocks_per_request=8, max_batch_tokens=1024)

    def work() -> None:
        engine.ask(ids[0, :300].tolist(), ids[0, :20].tolist(), ids[0].tolist(), [7])
        for _ in range(3):
            engine.step()

    def ahead() -> None:
        # An empty engine would begin with 16 bits again.
        work()
        engine.pages.compile_ladder(model.config)

    def act() -> None:
        for _ in range(2):
            assert engine.pages.step_down()
            engine.step()
            work()
        assert engine.pages.rung == 2

    return ahead, act


def main() -> None:
    """Compiles nothing: notes what would be."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=DIM, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(BF16)
    ids = torch.randint(3, 256, (1, 600))
    ahead, act = {"cache": of_cache, "engine": of_engine}[sys.argv[1]](model, ids)
    notes = noting()
    to, make = torch.Tensor.to, torch.tensor
    # There is no other device, nor a stream.
    torch.Tensor.to = lambda self, *args, device=None, **kwargs: to(self, *args, **kwargs) if args or kwargs else self
    torch.tensor = lambda *args, device=None, **kwargs: make(*args, **kwargs)
    torch.cuda.stream = lambda stream: contextlib.nullcontext()

    def warm_up(every: Sequence[Wanted], device: torch.device | None) -> list[Any]:
        for each in every:
            each.kernel.warmup(*each.arguments, grid=(1,), **each.constants)
        return []

    variants.compile_all = warm_up
    with kernels.use_interpreter():
        ahead()
        for thread in threading.enumerate():
            if thread.name == "hfkvq-rungs":
                thread.join()
        variants.compile_all = lambda *_: []
        known, notes.found = notes.found, {}
        forget()
        act()
    found = [name for name, _ in notes.found]
    print(json.dumps({"launched": found, "missing": [name for name, key in notes.found if (name, key) not in known]}))


if __name__ == "__main__":
    main()
