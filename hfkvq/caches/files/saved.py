"""Caches in files: a prompt that was computed once comes back as it was, compressed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfkvq.bounded import DAMAGE
from hfkvq.version import __version__

from ..base.inference_mode import lasting
from ..layers.all_layers import WholeCache
from ..layers.packing import packed_layer, unpack_layer
from ..layers.recurrent import RecurrentLayer
from ..schemes.preset import Preset, get_preset
from ..store.packing import Packed
from ..tags.bit_table import config_hash
from .cache_file import read_file, write_file

if TYPE_CHECKING:
    from typing_extensions import Self

_STOCK = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Layers of Transformers that can be saved: their state is keys, values, and how many tokens came."""

STATES = "states"
"""Prefix of the names of a layer's recurrent states, among its numbers and tensors."""


class SavedCache(WholeCache):
    """A cache that can be saved and loaded.

    Attributes:
        saved_ids: i64 (B, n), token ids that a loaded cache was saved with; None without.
    """

    preset: Preset
    _known_architecture: dict[str, str] | None = None
    saved_ids: Tensor | None = None

    @classmethod
    def of_preset(cls, model_or_config: Any, preset: Preset, **options: Any) -> Self:
        """An empty cache of a preset; classes of one scheme take its knobs."""
        made = cls(model_or_config, preset, **options)  # type: ignore[call-arg]
        if made.preset != preset:
            raise ValueError(f"options: got {', '.join(options)}, allowed no knobs: the scheme is {preset.scheme}")
        return made

    def save(self, path: str | Path, token_ids: Tensor | None = None) -> None:
        """Writes the cache to a file: compressed bytes, windows, counters and statistics.

        An existing file is replaced only by a complete one. `load` returns a cache that continues as this one does.

        Args:
            path: of the file, ``prompt.safetensors`` for example.
            token_ids: (B, n), what the cache was given; they come back as ``saved_ids``.

        Raises:
            ValueError: token ids of another shape than the cache has, a scheme of your own without a name, or layers
                that cannot be saved: sliding windows of a fixed capacity that stay as Transformers makes them, and
                recurrent states that the model keeps in its own modules (RecurrentGemma).
            RuntimeError: a step was interrupted while it wrote recurrent states.
            OSError: the file cannot be written.
        """
        write_file(path, *self.packed(token_ids))

    def packed(self, token_ids: Tensor | None = None) -> Packed:
        """Contents that `save` writes: a description, plain data, and tensors by name, where they are."""
        self._catch_up()
        self._check_even()
        seen = int(self.get_seq_length())  # type: ignore[attr-defined]
        if token_ids is not None and (token_ids.dim() != 2 or token_ids.shape[1] != seen):
            raise ValueError(
                f"token_ids: got shape {tuple(token_ids.shape)}, allowed (batch, {seen}), an id for each cached token."
            )
        check_named(self.preset)
        layers, tensors = [], {}
        for i, layer in enumerate(self.layers):
            numbers, held = packed_layer(layer) if i in self._compressed else _packed_stock(i, layer)
            states = _states_of(layer)
            if states is not None:
                if seen and states.rows is None:
                    raise ValueError(
                        f"path: the model keeps the recurrent states of layer {i} in its own modules, so no file can "
                        "hold them; compute the prompt again."
                    )
                own, more = states.pack()
                numbers, held = numbers | {STATES: own}, held | {f"{STATES}.{name}": x for name, x in more.items()}
            layers.append(numbers | {"record_past": getattr(layer, "record_past", False)})
            tensors |= {f"layer{i}.{name}": x for name, x in held.items()}
        beside = self._packed_beside()
        for name, (_, held) in beside.items():
            tensors |= {f"{name}.{key}": x for key, x in held.items()}
        if token_ids is not None:
            tensors["token_ids"] = token_ids
        description = {
            "scheme": self.preset.to_dict(),
            "model": self.architecture(),
            "max_cache_len": self._capacity,
            "tokens": seen,
            "holes": any(layer.steps is not None and layer.steps.sync.holes for layer in self.compressed_layers),
            "layers": layers,
            "beside": {name: numbers for name, (numbers, _) in beside.items()},
        }
        return description, tensors

    @classmethod
    def load(
        cls, path: str | Path, model_or_config: Any, *, device: torch.device | str | None = None, **options: Any
    ) -> Self:
        """A cache from a file that `save` wrote.

        Scheme and capacity are the file's. Files of `TriAxialCache` are loaded by that class, with ``tokenizer=``.

        Args:
            path: of the file.
            model_or_config: the model, or its config; its architecture must be that of the cache's model. Weights are
                not compared.
            device: where to load it. None: the model's device, or the CPU if a config is passed.
            **options: of the constructor: ``graphs``, ``headroom``, ``offloading``, ``attach``, ``debug``.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a saved cache, is damaged, or comes from another model or version.
        """
        device = device_of(model_or_config) if device is None else torch.device(device)
        description, tensors = read_file(path, device)
        try:
            preset, capacity = get_preset(description["scheme"]), description["max_cache_len"]
            made = cls.of_preset(model_or_config, preset, max_cache_len=capacity, **options)
            theirs, own = description["model"], made.architecture()
            if theirs["config"] != own["config"]:
                raise ValueError(
                    f"its config is that of another model (a {theirs['type']}) than this one (a {own['type']}); "
                    "compute the prompt again"
                )
            made.unpack(description, tensors, device)
        except torch.OutOfMemoryError:
            raise
        except (*DAMAGE, RuntimeError) as error:
            release, reason = description["written"], str(error).rstrip(".")
            other = "" if release == __version__ else f" (hfkvq {release} wrote it, and this is {__version__})"
            raise ValueError(f"path: {path} cannot be loaded: {reason}{other}.") from error
        return made

    @lasting
    def unpack(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Gives an empty cache of the same preset and model what another one has `packed`; it takes tensors over.

        Raises:
            ValueError: it does not fit; damaged data may also raise something else of `hfkvq.bounded.DAMAGE`.
        """
        for i, (layer, numbers) in enumerate(zip(self.layers, description["layers"], strict=True)):
            own = _below(f"layer{i}", tensors)
            # This comes first: tails are longer, so that tokens can be taken back.
            layer.record_past = numbers["record_past"] is True
            states = _states_of(layer)
            if (states is None) == (STATES in numbers):
                raise ValueError(f"layer {i}: recurrent states in the file or in the model, not in both")
            if states is not None:
                states.record_past = layer.record_past
                states.unpack(numbers[STATES], _below(STATES, own), device)
                own = {name: x for name, x in own.items() if not name.startswith(f"{STATES}.")}
            if i in self._compressed:
                unpack_layer(layer, numbers, own, device)
            else:
                _unpack_stock(i, layer, numbers, own, device)
        rows = {layer.batch_size for layer in self.compressed_layers if layer.store is not None}
        if len({*rows, *(x.shape[0] for x in self.states.tensors())}) > 1:
            raise ValueError(f"recurrent states of other rows than keys and values have, which are {max(rows)}")
        self._unpack_beside(description["beside"], _beside_layers(tensors))
        for layer in self.compressed_layers:
            if layer.steps is not None:
                layer.steps.sync.holes = description["holes"] is True
            if layer.store is not None:
                layer.bind()
        token_ids = tensors.get("token_ids")
        self.saved_ids = None if token_ids is None else token_ids.cpu()
        try:
            self.integrity_check()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def _packed_beside(self) -> dict[str, Packed]:
        """Contents of the cache beside its layers, by name."""
        return {}

    def _unpack_beside(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if found:
            raise ValueError("it has tags of tokens; load it with TriAxialCache.load(path, model, tokenizer=tokenizer)")

    def architecture(self) -> dict[str, str]:
        """Type and config of the model; a cache from a pickle remembers them until it meets its model."""
        own = getattr(self.config, "model_type", "")
        known = None if own else self._known_architecture
        return known or {"type": own, "config": config_hash(self.config)}


def device_of(model_or_config: Any) -> torch.device:
    """The model's device, or the CPU for a config."""
    parameters = model_or_config.parameters() if isinstance(model_or_config, torch.nn.Module) else ()
    return next((x.device for x in parameters), torch.device("cpu"))


def check_named(preset: Preset) -> None:
    """Raises ValueError if a file could not say what the cache is made of."""
    unnamed = [type(scheme).__name__ for scheme in preset.schemes if not scheme.name]
    if unnamed:
        raise ValueError(
            f"scheme: {unnamed[0]} has no name under which a file could be read again; give the class a name "
            "(CONTRIBUTING.md says how), or keep the cache with pickle."
        )


def _states_of(layer: Any) -> RecurrentLayer | None:
    """A layer's recurrent states, or None: it is nothing else, or has attention beside."""
    states = getattr(layer, "states", layer)
    return states if isinstance(states, RecurrentLayer) else None


def _packed_stock(i: int, layer: Any) -> Packed:
    if isinstance(layer, RecurrentLayer) or type(layer).__name__ == "DummyLayer":
        return {}, {}
    if type(layer).__name__ not in _STOCK:
        raise ValueError(
            f"path: layer {i} is a {type(layer).__name__}, which cannot be saved; allowed are pages and layers that "
            "grow. Make the cache without max_cache_len, or compute the prompt again."
        )
    if not layer.is_initialized:
        return {}, {}
    count = getattr(layer, "cumulative_length", None)
    return {"came": None if count is None else int(count)}, {"keys": layer.keys, "values": layer.values}


def _unpack_stock(
    i: int, layer: Any, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> None:
    if isinstance(layer, RecurrentLayer) or type(layer).__name__ == "DummyLayer":
        return
    if type(layer).__name__ not in _STOCK:
        raise ValueError(f"layer {i} is a {type(layer).__name__} here, which cannot be loaded")
    if "came" in numbers:
        keys, values = (tensors[side].to(device) for side in ("keys", "values"))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if numbers["came"] is not None:
            layer.cumulative_length = int(numbers["came"])


def _below(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}


def _beside_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in tensors.items() if not name.startswith("layer")}
