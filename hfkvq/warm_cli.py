"""``hfkvq warm``: compiles a preset's kernels before anybody waits for them."""

from __future__ import annotations

import importlib.util
import re
import time
from enum import Enum
from typing import Annotated

import typer

from hfkvq.terminal import fail, make_console, split

app = typer.Typer()

CURRENT = "current"


class Dtype(str, Enum):
    """Choices of --dtype."""

    bfloat16 = "bfloat16"
    float16 = "float16"


def pick_gpu(name: str) -> int | None:
    """A compute capability times ten; None for the current GPU.

    Raises:
        ValueError: no such GPU, or none at all.
    """
    import torch

    from hfkvq.kernels.compile import GPUS

    known = ", ".join(f"sm_{number}" for number in GPUS)
    if name == CURRENT:
        if not torch.cuda.is_available():
            raise ValueError(f"gpu: got {name!r}, but there is no GPU here; say which one it is for: {known}.")
        return None
    match = re.fullmatch(r"(?:sm_?)?(\d+)", name)
    number = int(match[1]) if match else 0
    if number not in GPUS:
        raise ValueError(f"gpu: got {name!r}, allowed {CURRENT} or {known}.")
    return number


@app.command()
def warm(
    preset: Annotated[str, typer.Option(help="Presets or preset files (.json), comma-separated.")],
    model: Annotated[
        str | None,
        typer.Option(help=r"Model, as in other commands; only its config is read. \[default: the reference model]"),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the model.")] = Dtype.bfloat16,
    gpu: Annotated[
        str, typer.Option(help="GPU to compile for: current, or e.g. sm_90, which need not be in this machine.")
    ] = CURRENT,
) -> None:
    """Compile the kernels of presets in advance, into Triton's cache, so that first calls are fast."""
    import torch

    from hfkvq.caches.compile import layers_of, shapes_of, widths_of
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.kernels.compile import compile_layers
    from hfkvq.measure.models import find_model, read_config

    names = split(preset)
    if not names:
        fail("preset: got none; give the names of presets, separated by commas (`hfkvq schemes` lists them).")
    number = pick_gpu(gpu)
    source = find_model(model)
    config = read_config(source)
    shapes = shapes_of(config)
    if shapes is None:
        fail(f"model: the config of {source.name!r} names no head dim, so it is not known what to compile.")
    chosen = [scheme for name in names for scheme in get_preset(name).schemes]
    schemes = [scheme.in_layer(layer, 100) for scheme in chosen for layer in range(100)]
    layers = layers_of(schemes, shapes, getattr(torch, dtype.value))
    if importlib.util.find_spec("triton") is None:
        fail("triton: it is not installed, so there is nothing to compile; pip install triton (Linux).")
    begun = time.perf_counter()
    device = torch.device("cuda", 0 if number is not None else torch.cuda.current_device())
    around = widths_of(config, shapes[0]) if shapes else None
    done = compile_layers(layers, device, absent=number, around=around and (around, getattr(torch, dtype.value)))
    if not done:
        fail("warm: nothing was compiled: kernels are interpreted (TRITON_INTERPRET=1), or the GPU is AMD's.")
    errors = [f"{name} does not compile: {error}" for name, error in done if error]
    if errors:
        fail(errors[0])
    make_console().print(
        f"{len(done)} kernels for {gpu if number is None else f'sm_{number}'} in {time.perf_counter() - begun:.1f} s. "
        "They are in Triton's cache now.",
        highlight=False,
    )
