"""``hfkvq serve``: an OpenAI-compatible server over compressed pages."""

from __future__ import annotations

import importlib.util
import os
import sys
from enum import Enum
from typing import Annotated, NoReturn

import typer

from hfkvq.terminal import (
    ChatModel,
    Device,
    DType,
    ModelDType,
    fail,
    make_console,
    number_option,
    pick_device,
    tokens_option,
)

app = typer.Typer()

DEFAULT = "best-4.3"
"""The preset where the user names none."""

VLLM_REQUESTS = 256
"""Requests at a time in vLLM, where the user does not say: its own default has too many for windows in 16 bits."""


class Engine(str, Enum):
    """Choices of --engine."""

    transformers = "transformers"
    vllm = "vllm"


@app.command()
def serve(
    model: ChatModel = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help=r"Preset, e.g. saw-int4 (which shares prefixes), also with options. \[default: best-4.3]",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory of the cache, e.g. 6GiB, in place of a preset: 16 bits while there is room; where a "
            "request would have to wait, all go down to 4 bits, then to 2.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    num_blocks: Annotated[
        int | None,
        typer.Option(min=1, help=r"Memory for the cache, in the engine's 16-bit blocks. \[default: what is free]"),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(min=1, help=r"Concurrent requests; others wait. \[default: as many as fit]"),
    ] = None,
    request_tokens: Annotated[
        int | None,
        tokens_option(r"Tokens that a usual request holds, prompt and answer: how many fit. \[default: 4096]"),
    ] = None,
    max_batch_tokens: Annotated[int | None, tokens_option("Tokens of a batch.")] = None,
    max_memory_percent: Annotated[
        float | None, number_option("Share of the GPU's free memory for the cache.", low=0.01, high=1)
    ] = None,
    device: Device = "auto",
    dtype: ModelDType = DType.auto,
    engine: Annotated[Engine, typer.Option(help="Transformers' own server, or vLLM's (0.25).")] = Engine.transformers,
) -> None:
    """Serve a model with an OpenAI-compatible API, streaming, continuous batching and a compressed cache.

    Clients use the model's name as given here. GET /metrics reports users, tokens, bytes and bits.
    """
    if engine is Engine.vllm:
        refused = {
            "--memory": memory,
            "--num-blocks": num_blocks,
            "--request-tokens": request_tokens,
            "--max-memory-percent": max_memory_percent,
            "--device": None if device in ("auto", "cuda") else device,
        }
        for name, value in refused.items():
            if value is not None:
                fail(
                    f"{name}: got {value}, but vLLM has no such option; leave it out, or use vllm serve (docs/vllm.md)."
                )
        requests = VLLM_REQUESTS if max_requests is None else max_requests
        given = {"max-num-seqs": requests, "max-num-batched-tokens": max_batch_tokens, "dtype": dtype.value}
        become_vllm(model, DEFAULT if scheme is None else scheme, {"host": host, "port": port, **given})
    beside = {"--scheme": scheme, "--num-blocks": num_blocks, "--max-memory-percent": max_memory_percent}
    for name, value in beside.items() if memory is not None else ():
        if value is not None:
            fail(f"--memory: got {memory} together with {name} {value}, allowed one of them; leave one out.")
    import torch

    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.models import find_model

    where = pick_device(device)
    kind = None if dtype is DType.auto else getattr(torch, dtype.value)
    found, preset = find_model(model), get_preset(DEFAULT if scheme is None else scheme)
    if preset.layers:
        raise ValueError(f"scheme: got {scheme!r}, whose layers differ; allowed one scheme for all layers.")
    options = {
        "cb_num_blocks": num_blocks,
        "cb_max_batch_tokens": max_batch_tokens,
        "cb_max_memory_percent": max_memory_percent,
    }
    name = model or "reference"
    missing = [package for package in ("fastapi", "openai", "uvicorn") if importlib.util.find_spec(package) is None]
    if missing:
        fail(f"serve: {', '.join(missing)} not installed; pip install 'hfkvq[serve]'.")
    try:
        from hfkvq.serving.server import Server

        own = preset.scheme if memory is None else None
        server = Server(
            found, name, own, where, kind, host=host, port=port, requests=max_requests, request_tokens=request_tokens,
            memory=memory, **options,
        )  # fmt: skip
    except ImportError as error:
        fail(f"serve: {error}; it needs Transformers 5.19 or newer and pip install 'hfkvq[serve]'.")
    except (OSError, ValueError) as error:
        fail(error)
    pages = scheme or (DEFAULT if memory is None else f"{memory} of memory")
    make_console().print(f"{name} at {server.url} with {pages}. Ctrl-C ends it.", highlight=False)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.close()


def become_vllm(model: str | None, scheme: str, options: dict[str, object]) -> NoReturn:
    """Ends this process as vLLM's server of a model, with the plug-in's scheme.

    Args:
        model: the name that clients use.
        options: of vLLM's server, by name; those that are None are left out.
    """
    from hfkvq.caches import get_scheme
    from hfkvq.measure.models import find_model
    from hfkvq.vllm import DTYPE

    if importlib.util.find_spec("vllm") is None:
        fail("engine: vllm is not installed; pip install 'vllm==0.25.*', or leave out --engine.")
    get_scheme(scheme)
    options |= {"served-model-name": model or "reference", "attention-backend": "CUSTOM", "kv-cache-dtype": DTYPE}
    words = [str(word) for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", find_model(model).path, *words]
    os.execve(sys.executable, command, {**os.environ, "HFKVQ_SCHEME": scheme})
