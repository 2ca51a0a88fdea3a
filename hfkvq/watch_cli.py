"""``hfkvq watch``: a chat, or a server, with a live picture of what its cache holds."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from hfkvq.progress import stoppable
from hfkvq.terminal import Device, DType, ModelDType, fail, make_console, pick_device

app = typer.Typer()


@app.command()
def watch(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model, as in other commands, or the address of a running hfkvq serve: http://localhost:8000. "
            r"\[default: the reference model]",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="Preset, also with options or as a file.")] = "best-3.4",
    prompt: Annotated[
        str | None, typer.Option(help=r"One prompt. \[default: a chat, a line of standard input at a time]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 256,
    device: Device = "auto",
    dtype: ModelDType = DType.auto,
) -> None:
    """Show users, tokens, bytes and bits by layer of a cache while a model answers, or of a server while it runs."""
    from hfkvq.measure.watching import watch as look_on

    console = make_console()
    if model is not None and model.startswith(("http://", "https://")):
        with stoppable("the server goes on."), look_on(model, console) as moments:
            last = -1.0
            while moments[-1].seconds > last:
                last = moments[-1].seconds
                time.sleep(15)
        fail(f"model: {model} does not answer any more.")

    import torch
    from transformers.utils import logging

    import hfkvq
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.models import find_model, load_model, load_tokenizer

    logging.disable_progress_bar()
    source, chosen, where = find_model(model), get_preset(preset), pick_device(device)
    loaded = load_model(source, where, None if dtype is DType.auto else getattr(torch, dtype.value))
    tokenizer: Any = load_tokenizer(source)
    turns: list[dict[str, str]] = []
    with stoppable("the chat is not kept."), hfkvq.use(loaded, chosen) as used:
        for text in [prompt] if prompt is not None else sys.stdin:
            turns.append({"role": "user", "content": text.rstrip("\n")})
            if tokenizer.chat_template:
                text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).to(where)
            with look_on(used, console):
                out = loaded.generate(**inputs, max_new_tokens=max_new_tokens)
            said = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            turns.append({"role": "assistant", "content": said})
            console.print(said, markup=False, highlight=False)
