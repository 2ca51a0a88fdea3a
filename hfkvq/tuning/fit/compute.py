"""Plans of caches from a model's name and sizes as typed, for `hfkvq fit` and `hfkvq recommend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from hfkvq.caches.base.model_config import latent_dims, text_config
from hfkvq.caches.layers.memory import format_bytes
from hfkvq.caches.schemes.base import get_scheme, latent_layout, list_schemes, listed
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.measure.models import find_model, read_config
from hfkvq.measure.models.outline import Outline, checkpoint_bytes, positions_of
from hfkvq.measure.presets import widest_first
from hfkvq.measure.tables import new_table
from hfkvq.sizes import parse_size
from hfkvq.terminal import split

from .layer import Arrival
from .model import PEAK, Plan, Weights, outline_of, peak, plan, weights_of

STOCK = ("bf16", "none")
"""Names of Transformers' own cache."""


@dataclass(frozen=True)
class Computed:
    """Plans of caches on a model and a GPU.

    Attributes:
        about: model, memory and lengths, as plain values.
        weights: bytes of its weights.
        presets: by name; None is Transformers' own cache.
        plans: of the presets, in their order.
        most: longest context that was looked for.
    """

    about: dict[str, Any]
    found: Outline
    weights: Weights
    presets: dict[str, Preset | None]
    plans: list[Plan]
    most: int | None

    @property
    def latents(self) -> bool:
        """True if the model's attention is over latents."""
        return latent_dims(text_config(self.found.config)) is not None


def compute(
    model: str | None,
    gpu_memory: str,
    *,
    context: int | None = None,
    batch: int = 1,
    generated: int = 0,
    prefill_chunk: int = 2048,
    schemes: str | None = None,
    dtype: torch.dtype | None = None,
    overhead: str = "1GiB",
    beyond: bool = False,
    default: Sequence[str] | None = None,
) -> Computed:
    """Bytes of every cache, and the largest batch and context, by the options of `hfkvq fit`.

    Args:
        context: tokens of a row; None takes 32k, or all that the model has.
        prefill_chunk: tokens of a piece of the prompt; 0 is a prompt in one piece.
        schemes: names, with commas; None takes the stock cache, and those of ``default`` that can hold the heads.
        dtype: of weights and cache; None is the checkpoint's.
        default: names, of which latents are offered those that attend to them as they are stored; None for a preset
            or two of each scheme.

    Raises:
        ValueError: no such model, a size that makes no sense, weights that do not fit, or a preset that does not suit
            the model.
    """
    if 0 < prefill_chunk <= 16:
        raise ValueError(f"prefill-chunk: got {prefill_chunk}, allowed more than 16 tokens, or 0 for one piece.")
    for name in split(schemes):
        if name not in STOCK:
            get_preset(name)
    source = find_model(model)
    memory = parse_size(gpu_memory, "gpu-memory")
    spare = 0 if overhead.strip() == "0" else parse_size(overhead, "overhead")
    found = outline_of(read_config(source))
    room = positions_of(found.config)
    tokens = min(32768, room or 32768) if context is None else context
    if room and tokens > room and not beyond:
        raise ValueError(
            f"context: got {tokens}, but the model has {room} positions; use --context {room}, or --beyond if you will "
            "load it with RoPE scaling (rope_parameters in its config), as its model card may say."
        )
    if generated > tokens:
        raise ValueError(f"generated: got {generated}, allowed no more than the context of {tokens} tokens.")
    kind = dtype or found.dtype
    weights = weights_of(found, kind, checkpoint_bytes(source.path))
    if weights.total + spare >= memory:
        raise ValueError(
            f"gpu-memory: got {format_bytes(memory)}, but the weights take {format_bytes(weights.total)} "
            f"({weights.source}) and --overhead {format_bytes(spare)}: "
            f"{format_bytes(weights.total + spare - memory)} too much before any cache. Use a quantized "
            "checkpoint, a smaller model, or more memory."
        )
    come = Arrival(0, generated, prefill_chunk or None)
    most = None if beyond else room
    presets = presets_for(found, schemes, default)
    plans = [
        plan(found, name, what, weights, memory, tokens, batch, kind, spare, come, most)
        for name, what in presets.items()
    ]
    about = {
        "model": source.name,
        "dtype": str(kind).removeprefix("torch."),
        "gpu_memory": memory,
        "overhead": spare,
        "context": tokens,
        "batch": batch,
        "generated": generated,
        "prefill_chunk": prefill_chunk or None,
        "positions": room,
        "weights": asdict(weights),
    }
    return Computed(about, found, weights, presets, plans, most)


def presets_for(
    found: Outline, schemes: str | None = None, default: Sequence[str] | None = None
) -> dict[str, Preset | None]:
    """Presets by name; defaults only if they can hold the heads."""
    chosen: dict[str, Preset | None] = {}
    latents = latent_dims(text_config(found.config))
    usual = widest_first(listed("fit")) if default is None else default
    for name in split(schemes) or (STOCK[0], *usual):
        preset = None if name in STOCK else get_preset(name)
        by_layer = [] if preset is None else preset.by_layer(len(found.layers))
        try:
            for scheme in by_layer:
                if scheme.latents and not latents:
                    raise ValueError("it is for models with latent attention; choose another, e.g. best-4.3.")
                for layer in found.layers:
                    if layer.compressed or layer.window:
                        layout = scheme.layout(layer.key_dim, layer.value_dim)
                        layout.check(layer.key_dim, layer.value_dim)
        except ValueError as error:
            if schemes is not None:
                raise ValueError(f"{name}: {error}") from None
            continue
        # Latents in other formats are dequantized in each step.
        odd = latents is not None and any(latent_layout(scheme, *latents) is None for scheme in by_layer)
        if schemes is not None or default is None or not odd:
            chosen[name] = preset
    return chosen


def table(done: Computed) -> Table:
    """A row for each cache: its bytes, and the largest batch and context."""
    about = done.about
    title = (
        f"{escape(about['model'])}: {format_bytes(about['gpu_memory'])}, of which weights "
        f"{format_bytes(done.weights.total)}, {about['batch']} x {about['context']:,} tokens"
    )
    view = new_table(title)
    view.add_column("cache", no_wrap=True)
    for name in ("bytes", "bytes per token", "prompt's peak*", "left", "largest batch", "longest context"):
        view.add_column(name, justify="right")
    for each in done.plans:
        end = about["positions"]
        longest = f"{each.context:,}" + (" (all)" if end and each.context == end else "")
        view.add_row(
            each.name,
            format_bytes(each.cache),
            format_bytes(each.cache / about["batch"] / about["context"]),
            format_bytes(each.peak),
            format_bytes(each.left) if each.left >= 0 else f"[red]-{format_bytes(-each.left)}[/red]",
            f"{each.batch:,}" if each.batch else "[red]none[/red]",
            longest if each.context else "[red]none[/red]",
        )
    return view


def notes(done: Computed) -> list[str]:
    """Legend of the table, a sentence or two each."""
    about, found, weights, most = done.about, done.found, done.weights, done.most
    size = 4 if about["dtype"] == "float32" else 2
    whole = format_bytes(peak(found, about["batch"], about["context"] - about["generated"], size, None))
    how = f"in pieces of {about['prefill_chunk']}" if about["prefill_chunk"] else "in one piece"
    said = [
        f"Weights: {weights.parameters:,} parameters, {weights.source}. Overhead: "
        f"{format_bytes(about['overhead'])}, a guess (--overhead).",
        f"* An estimate of the prompt's activations, {how} (in one piece: {whole}): {PEAK}.",
        "Cache bytes are those that cache.memory() counts, for rows of equal length without padding. Largest batch: at "
        "this context. Longest context: at batch size 1.",
    ]
    names = {each.name for each in done.plans}
    evicting = [name for name in names if name in list_schemes() and get_scheme(name).evicts]
    if evicting:
        said.append(
            f"{', '.join(sorted(evicting))}: these keep a budget of tokens, 1,024 per KV head by default, and evict "
            "the others."
        )
    if "triaxial" in names:
        said.append("triaxial: the upper bound, with all tokens in 4 bits.")
    count = sum(layer.compressed or layer.window > 0 for layer in found.layers)
    if not count:
        said.append("This model has no layer of full attention: nothing is compressed.")
    elif count < len(found.layers):
        said.append(f"{count} of {len(found.layers)} cached layers are compressed; the others stay as they are.")
    if most is None and about["positions"] and about["context"] > about["positions"]:
        said.append(f"The config has {about['positions']:,} positions: load the model with RoPE scaling.")
    return said
