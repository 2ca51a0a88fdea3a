"""What caches named after papers have in common: `MixedKVCache` with the scheme fixed and its knobs as arguments."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from .cache import DEFAULT_SCHEME, MixedKVCache
from .knob_texts import allowed_words, default_words, knob_texts
from .preset import Preset
from .registry import entry_of, in_order
from .scheme import Scheme, get_scheme

if TYPE_CHECKING:
    from typing_extensions import Self


class CacheOptions(TypedDict, total=False):
    """Arguments of every cache beside the knobs of its scheme; `MixedKVCache` tells what they are."""

    layers: Mapping[str | int, Any] | None
    max_cache_len: int | None
    graphs: bool | None
    headroom: float
    offloading: bool | int
    attach: bool
    debug: bool


OPTIONS = tuple(CacheOptions.__annotations__)


class NamedCache(MixedKVCache):
    """`MixedKVCache` of the scheme ``preset_name``, with all of its knobs as arguments.

    A derived class names its scheme and writes the knobs into its signature; here its docstring gets what the scheme
    says of them.

    Args:
        model_or_config: the model, or its config.
        **given: fields of the scheme, and the arguments of `MixedKVCache`.

    Raises:
        ValueError: unknown knob or one out of range; see `MixedKVCache`.
    """

    preset_name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Completes the docstring by the knobs and presets of the scheme."""
        super().__init_subclass__(**kwargs)
        # Python drops docstrings where it is told to.
        if cls.__doc__ and "preset_name" in vars(cls):
            cls.__doc__ = complete_docstring(cls.__doc__, entry_of(cls.preset_name)[0])

    def __init__(self, model_or_config: Any, **given: Any) -> None:
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        super().__init__(model_or_config, get_scheme(self.preset_name, **given), **options)

    @classmethod
    def of_preset(cls, model_or_config: Any, preset: Preset, **options: Any) -> Self:
        """See `SavedCache.of_preset`."""
        own, knobs = get_scheme(cls.preset_name), preset.scheme.to_dict()
        if knobs.pop("scheme") != own.name:
            raise ValueError(f"it is of the scheme {preset.scheme.name}, and {cls.__name__} of {own.name}")
        return cls(model_or_config, layers=dict(preset.layers), **knobs, **options)


def own_knobs(names: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs among the local names of a constructor that does nothing before."""
    return {name: x for name, x in names.items() if name not in ("self", "model_or_config", "options", "__class__")}


def complete_docstring(doc: str, scheme: type[Scheme]) -> str:
    """A docstring with the presets of a scheme, and each of its knobs that it does not tell of itself."""
    head, _, raises = inspect.cleandoc(doc).partition("\nRaises:\n")
    about, _, arguments = head.partition("\nArgs:\n")
    lines = [arguments.rstrip() or "    model_or_config: the model, or its config."]
    fields = {field.name: field for field in dataclasses.fields(scheme)}
    for name, text in knob_texts(scheme).items():
        if f"    {name}:" not in arguments:
            words = f"{name}: {text.rstrip('.')}. Default {default_words(fields[name])}"
            allowed = allowed_words(fields[name])
            words += f"; allowed {allowed}." if allowed else "."
            lines += textwrap.wrap(words, 112, initial_indent="    ", subsequent_indent="        ")
    lines.append(f"    **options: {', '.join(OPTIONS)}; see `MixedKVCache`.")
    refused = raises or "    ValueError: unknown knob or one out of range; see `MixedKVCache`."
    parts = [about.rstrip(), _preset_words(scheme), "Args:\n" + "\n".join(lines), "Raises:\n" + refused]
    return "\n\n".join(part for part in parts if part)


def _preset_words(scheme: type[Scheme]) -> str:
    """The presets of a scheme, and which of them is the default of `MixedKVCache`."""
    found = []
    for name in in_order():
        cls, entry = entry_of(name)
        if cls is scheme and entry.knobs:
            default = " (the default of `MixedKVCache`)" if name == DEFAULT_SCHEME else ""
            found.append(f"``{name}`` is {', '.join(f'{knob}={x!r}' for knob, x in entry.knobs.items())}{default}")
    return "\n".join(textwrap.wrap(f"Presets: {'; '.join(found)}.", 112)) if found else ""
