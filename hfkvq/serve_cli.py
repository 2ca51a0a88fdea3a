"""``hfkvq serve``: an OpenAI-compatible server over compressed pages."""

from __future__ import annotations

import importlib.util
from typing import Annotated

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


@app.command()
def serve(
    model: ChatModel = None,
    scheme: Annotated[
        str, typer.Option(help="Preset, e.g. best-4.3 or saw-int4 (which shares prefixes), also with options.")
    ] = "best-4.3",
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
) -> None:
    """Serve a model with an OpenAI-compatible API, streaming, continuous batching and a compressed cache.

    Clients use the model's name as given here. GET /metrics reports users, tokens, bytes and bits.
    """
    import torch

    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.models import find_model

    where = pick_device(device)
    kind = None if dtype is DType.auto else getattr(torch, dtype.value)
    found, preset = find_model(model), get_preset(scheme)
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

        server = Server(
            found, name, preset.scheme, where, kind, host=host, port=port, requests=max_requests,
            request_tokens=request_tokens, **options,
        )  # fmt: skip
    except ImportError as error:
        fail(f"serve: {error}; it needs Transformers 5.19 or newer and pip install 'hfkvq[serve]'.")
    except (OSError, ValueError) as error:
        fail(error)
    make_console().print(f"{name} at {server.url} with {scheme}. Ctrl-C ends it.", highlight=False)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.close()
