"""Pictures of searches, layers, channels and tags: each function returns a figure, and `save` writes it as PNG.

All need the extra ``hfkvq[plot]``, and leave nothing behind in pyplot. A notebook shows the figures after
``%matplotlib inline``.
"""

from __future__ import annotations

from .plot_channels import channels_by_layer, raised_channels
from .plot_figure import save
from .plot_layers import bits_by_layer, layer_sensitivity, layer_steps
from .plot_study import hypervolume, knob_importance, pareto_front
from .plot_tags import tag_sensitivity

__all__ = [
    "bits_by_layer",
    "channels_by_layer",
    "hypervolume",
    "knob_importance",
    "layer_sensitivity",
    "layer_steps",
    "pareto_front",
    "raised_channels",
    "save",
    "tag_sensitivity",
]
