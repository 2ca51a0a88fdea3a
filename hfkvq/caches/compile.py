"""Kernels compiled before they are launched: which they are follows from a cache's schemes and its model's config."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers.configuration_utils import PreTrainedConfig

from hfkvq.kernels.compile import SEVERAL, Layer, compile_layers
from hfkvq.kernels.fused import Widths
from hfkvq.kernels.step import StepPlan

from .base.model_config import attention_shape, latent_dims, stock_layers, text_config, windows_of
from .layers import KVLayer, PaddingReader
from .layers.build import is_held_in_pages, scheme_for_window
from .schemes.base import Scheme, latent_layout
from .schemes.preset import Preset

logger = logging.getLogger(__name__)

FAILED = "Kernels were not compiled ahead (%s); each is compiled when it is launched first."


class LayerShape(NamedTuple):
    """Tokens that layers of one kind attend to.

    Attributes:
        kv_heads: KV heads; one, where the layers hold latents.
        head_dim: channels of keys and values, or of latents.
        window: tokens that a query sees; 0 for all.
        rope_dim: channels of the rotary parts beside latents; 0 for keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    rope_dim: int = 0


def shapes_of(config: PreTrainedConfig) -> list[LayerShape] | None:
    """The kinds of a model's layers; None if its config does not say."""
    text = text_config(config)
    latents, found = latent_dims(text), attention_shape(config)
    if latents is not None:
        return [LayerShape(text.num_attention_heads, 1, latents[0], rope_dim=latents[1])]
    if found is None:
        return None
    stock = stock_layers(text)
    windows = set(windows_of(text, stock).values())
    full = {0} if any(is_held_in_pages(layer, text) for layer in stock) else set()
    return [LayerShape(*found, window) for window in sorted(full | windows)]


def layer_plan(scheme: Scheme, shape: LayerShape, dtype: torch.dtype, several: bool = False) -> StepPlan:
    """Kind of a layer at a fixed capacity: all that its kernels depend on, whatever its rows and capacity.

    Args:
        scheme: of the layer; a window may take 16-bit pages instead, see `scheme_for_window`.
        shape: of the layer.
        several: whether steps may have several tokens, which may be taken back.

    Raises:
        ValueError: the scheme cannot hold heads of this dimension.
    """
    dims = shape.head_dim, shape.rope_dim or shape.head_dim
    scheme.layout(*dims).check(*dims)
    if shape.window:
        scheme = scheme_for_window(scheme, shape.window, dims)
    layer = KVLayer(scheme, PaddingReader(), 1, recordable=True, window=shape.window)
    layer.latents = shape.rope_dim > 0 and latent_layout(scheme, *dims) is not None
    layer.record_past = several
    assert layer.buffer is not None, "steps may be recorded"
    layer.buffer.queries_per_head = shape.heads // shape.kv_heads
    keys, values = (torch.empty(1, shape.kv_heads, 1, dim, dtype=dtype, device="cpu") for dim in dims)
    layer.lazy_initialization(keys, values)
    layer.buffer.bind()
    assert layer.buffer.plan is not None, "it is empty"
    return layer.buffer.plan


def layers_of(
    schemes: Iterable[Scheme], shapes: Sequence[LayerShape], dtype: torch.dtype, several: bool = False
) -> list[Layer]:
    """Cases that kernels are compiled for: each scheme, as of `Scheme.in_layer`, in each kind of layer."""
    found = []
    for scheme in dict.fromkeys(schemes):
        for shape in shapes:
            plan = layer_plan(scheme, shape, dtype, several)
            # Prompts raise channels by the rule of steps.
            found.append((plan, shape.heads, plan.rule or None, scheme.smooths_keys and not plan.format.latent))
    return found


def widths_of(config: PreTrainedConfig, shape: LayerShape, rows: int = 1) -> Widths | None:
    """Sizes of a model by which kernels around attention are compiled; None if its config does not say."""
    text = text_config(config)
    hidden, intermediate = getattr(text, "hidden_size", None), getattr(text, "intermediate_size", None)
    if not isinstance(hidden, int) or not isinstance(intermediate, int):
        return None
    return Widths(hidden, intermediate, shape.heads, shape.kv_heads, shape.head_dim, rows)


def compile_ahead(
    model: Any, presets: Iterable[Preset], steps: Sequence[int] = (1,), tell: Callable[[str], object] = lambda _: None
) -> None:
    """Compiles what caches of these presets will launch for a model on a GPU, all of it together, and waits for it.

    For commands that measure one preset after the other: each cache would compile its own kernels. Nothing is done on a
    CPU. A failure is a warning, since each launch compiles what it misses, and raises what is wrong.

    ``steps`` are tokens of the steps that come, as far as they are known, up to 16; those of one token are compiled in
    any case. ``tell`` is told that it begins.
    """
    if model.device.type != "cuda":
        return
    tell("compiling kernels")
    try:
        count = len(stock_layers(text_config(model.config)))
        schemes = [scheme for preset in presets for scheme in preset.by_layer(count)]
        shapes = shapes_of(model.config) or ()
        around = widths_of(model.config, shapes[0]) if shapes else None
        layers = layers_of(schemes, shapes, model.dtype)
        compile_layers(layers, model.device, sorted({1, *steps}), around=around and (around, model.dtype))
    except Exception as error:
        logger.warning(FAILED, error)


def compile_kernels(
    config: PreTrainedConfig,
    layers: Iterable[tuple[Scheme, int]],
    keys: torch.Tensor,
    several: bool = False,
    fused: bool = False,
    slots: bool = False,
    moves: bool = False,
) -> None:
    """Compiles what a cache on a GPU will launch, before its first layer does; once in a process for caches alike.

    Args:
        layers: scheme and window of each that holds pages.
        keys: (B, H, t, D) of the first layer: its heads are those of this process, where several share a model.
        several: see `layer_plan`.
        fused: whether steps are fused around attention.
        slots: whether layers are an engine's; see `hfkvq.kernels.compile.compile_layers`, and for ``moves``.
    """
    try:
        shapes = shapes_of(config)
        if not shapes:
            return
        shape, heads = shapes[0], keys.shape[1]
        if not shape.rope_dim:
            shape = shape._replace(heads=shape.heads // shape.kv_heads * heads, kv_heads=heads)
        kinds = tuple(dict.fromkeys((scheme, shape._replace(window=window)) for scheme, window in layers))
        around = widths_of(config, shape, keys.shape[0]) if fused else None
        _compile(kinds, keys.dtype, keys.device, several, around, slots, moves)
    except Exception as error:
        logger.warning(FAILED, error)


def compile_rungs(
    config: PreTrainedConfig,
    schemes: Iterable[Scheme],
    keys: torch.Tensor,
    several: bool = False,
    fused: bool = False,
    later: bool = False,
    slots: bool = False,
) -> None:
    """Compiles what layers launch on rungs of a ladder, a rung at a time, each once in a process; nothing on a CPU.

    ``later``: a thread does it, while the cache goes on. Other arguments are those of `compile_kernels`.
    """
    if keys.device.type != "cuda":
        return
    own, like = list(dict.fromkeys(schemes)), keys[:, :, :0].detach()

    def run() -> None:
        for scheme in own:
            compile_kernels(config, [(scheme, 0)], like, several, fused, slots, moves=not slots)

    if later:
        threading.Thread(target=run, name="hfkvq-rungs", daemon=True).start()
    else:
        run()


@lru_cache(maxsize=1024)
def _compile(
    kinds: tuple[tuple[Scheme, LayerShape], ...],
    dtype: torch.dtype,
    device: torch.device,
    several: bool,
    around: Widths | None,
    slots: bool,
    moves: bool,
) -> None:
    layers = [each for scheme, shape in kinds for each in layers_of([scheme], [shape], dtype, several)]
    steps, own = SEVERAL if several else (1,), around and (around, dtype)
    compile_layers(layers, device, steps, around=own, slots=slots, moves=moves)
