"""The kernels of several presets, compiled together before caches of them are made one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hfkvq.kernels.warm import Layer, compile_missing

from .make import LayerShape, layer_plan, shapes_of
from .model_config import stock_layers, text_config
from .preset import Preset
from .scheme import Scheme

logger = logging.getLogger(__name__)

COMPILING = "compiling kernels"
"""What is told while it lasts."""


def layers_of(schemes: Iterable[Scheme], shapes: Sequence[LayerShape], dtype: torch.dtype) -> list[Layer]:
    """What kernels are compiled for: each scheme in each kind of layer.

    Args:
        schemes: of layers, see `Scheme.in_layer`.
        shapes: the kinds of layers of a model.
        dtype: of the model.

    Raises:
        ValueError: a scheme cannot hold heads of this dimension.
    """
    return [
        (layer_plan(scheme, shape, dtype), shape.heads, scheme.channel_rule)
        for scheme in dict.fromkeys(schemes)
        for shape in shapes
    ]


def compile_ahead(
    model: Any, presets: Iterable[Preset], steps: Sequence[int] = (1,), tell: Callable[[str], object] = lambda _: None
) -> None:
    """Compiles what caches of these presets will launch for a model on a GPU, all of it together, and waits for it.

    For whoever measures one preset after the other: each would wait for kernels of its own. Nothing is done on a CPU.
    What goes wrong is a warning, since the launch of a kernel compiles what is missing, and raises what is wrong.

    Args:
        model: of Transformers, on its device.
        presets: that its caches will have.
        steps: tokens of the steps that come, as far as they are known, up to 16; those of one token are compiled in
            any case.
        tell: is told `COMPILING` if anything has to be compiled.
    """
    device = model.device
    if device.type != "cuda":
        return
    try:
        count = len(stock_layers(text_config(model.config)))
        schemes = [scheme for preset in presets for scheme in preset.by_layer(count)]
        layers = layers_of(schemes, shapes_of(model.config) or (), model.dtype)
        # Caches wait for those of one token.
        compile_missing(layers, device, sorted({1, *steps}), lambda: tell(COMPILING))
    except Exception as error:
        logger.warning("Kernels were not compiled ahead (%s); each preset compiles its own.", error)
