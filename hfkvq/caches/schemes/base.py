"""Base of schemes: frozen knobs, a static layout, and at most one function that returns widths."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from hfkvq.kernels.step import MAX_STEP
from hfkvq.kernels.windows import most_due

from ..base.spelling import split_knobs
from . import registry
from .layout import Layout as Layout
from .layout import SideLayout as SideLayout
from .registry import Entry, nearest

UNTAGGED = 255
"""Tag of tokens of which none is known: generated ones, and all where nobody showed the token ids."""


def knob(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    search: tuple[float, float] | list[Any] | None = None,
) -> Any:
    """A dataclass field that knows its legal range, and what of it is worth searching.

    Args:
        default: what it is unless given.
        low: least legal value.
        high: greatest one.
        choices: legal values, where they can be listed.
        search: (low, high), or a list of values, for the tuner; None leaves the knob as it is.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "choices": choices, "search": search})


class Limits(NamedTuple):
    """Limits of a scheme's steps: the reason for each, or None.

    Attributes:
        captured: why steps can be neither captured as CUDA graphs nor compiled.
        requantized: why tokens that stay are quantized again.
    """

    captured: str | None = None
    requantized: str | None = None

    def words(self) -> list[str]:
        """A line for each thing that is lost."""
        lines = []
        if self.captured:
            lines.append(f"steps are not captured: {self.captured}")
        if self.requantized:
            lines.append(f"tokens that stay are quantized again: {self.requantized}")
        return lines


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Policy of bits for channels and tokens. Stateless: fields are knobs, state is passed in.

    A subclass registers itself under ``name``, and its ``presets`` under their names. It defines ``layout`` and at most
    one of ``channel_rule``, ``channel_bits`` and ``token_bits``.

    Attributes:
        name: of the scheme, and of the preset of its defaults; without one a class registers nothing.
        paper: where it comes from.
        evicts: whether it forgets tokens: see `hfkvq.caches.schemes.eviction.EvictionScheme`.
        latents: whether it is for latent attention alone: then keys are latents, and values rotary parts of keys.
        presets: what each preset is, by name, the scheme's own included: an `Entry`, or knobs alone.
        place: where lists and tables show its presets: low ones first.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    evicts: ClassVar[bool] = False
    latents: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Entry | Mapping[str, Any]]] = {}
    place: ClassVar[int] = 100

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Registers the scheme and its presets; a name can be taken once."""
        super().__init_subclass__(**kwargs)
        if cls.name:
            registry.register(cls)

    def __post_init__(self) -> None:
        """Checks every knob against its range."""
        for field in dataclasses.fields(self):
            value, low, high = getattr(self, field.name), field.metadata.get("low"), field.metadata.get("high")
            choices = field.metadata.get("choices")
            # 4.0 and True equal choices that they are not, and files tell them apart.
            if choices is not None and not any(value == each and type(value) is type(each) for each in choices):
                raise ValueError(f"{field.name}: got {value!r}, allowed {', '.join(map(repr, choices))}.")
            if (value is None and field.default is None) or (low is None and high is None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{field.name}: got {value!r}, allowed a number.")
            # Where the default is None, the bounds tell what is counted.
            whole = isinstance(low if field.default is None else field.default, int)
            if whole and not isinstance(value, int):
                raise ValueError(f"{field.name}: got {value!r}, allowed a whole number.")
            if (low is not None and value < low) or (high is not None and value > high) or value != value:
                raise ValueError(
                    f"{field.name}: got {value!r}, allowed {'-inf' if low is None else low} to "
                    f"{'inf' if high is None else high}."
                )

    @property
    def needs(self) -> frozenset[str]:
        """Observations that the scheme needs: a subset of {"query", "history", "tags", "turns"}.

        Of queries, magnitudes are averaged, by which channels are weighed: of those since the last seal, with
        "history" of all since the first.
        A scheme that observes turns has ``tag_bits``, which is asked again for all cached tokens with every prompt: see
        `hfkvq.caches.store.requantize`.
        Schemes that evict say in `EvictionScheme.evidence` what they judge tokens by.
        """
        return frozenset()

    def in_layer(self, layer: int, layers: int) -> Scheme:
        """Scheme of one of a model's layers, counted from 0: the scheme itself, unless its layers differ."""
        return self

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Static layout for heads of these dimensions, of a layer: see `in_layer`."""
        raise NotImplementedError(f"{type(self).__name__} defines no layout.")

    @property
    def shared(self) -> Scheme:
        """The scheme of an engine's blocks, which requests can share if all their tokens are in pages."""
        return self

    @property
    def rounds_keys(self) -> bool:
        """True if any key is rounded to fewer bits, where the layout has pages of fewer."""
        return True

    @property
    def smooths_keys(self) -> bool:
        """True if key channels are centred and scaled before they are stored; see `KeySmoothing`."""
        return False

    @property
    def quantizes_first(self) -> bool:
        """True if prompts are sealed before they attend, and so attend to what pages hold of them."""
        return False

    @property
    def channel_rule(self) -> str | None:
        """Rule of `kernels.channel_widths` by which sealing raises channels itself; None asks `channel_bits`."""
        return None

    def step_rule(self, head_dim: int) -> str | None:
        """Rule of `kernels.channel_widths` that gives what ``channel_rule`` or ``channel_bits`` would; None for none.

        Steps without the host need one, where channels can be raised.
        """
        return self.channel_rule

    def channel_bits(self, keys: Tensor, q_abs: Tensor | None) -> Tensor | None:
        """Width of every channel of pages about to be sealed, where channels can be raised and no rule says which.

        Args:
            keys: (B, H, n, G, D) in the model's dtype; entries of rows with nothing due are arbitrary.
            q_abs: f32 (B, H, D), mean |query| of each channel since the last seal, if ``needs`` has "query" and the
                attention showed queries.

        Returns:
            u8 (B, H, n, D), or None to raise no channel.
        """
        return None

    def token_bits(self, keys: Tensor, values: Tensor, position: Tensor, tags: Tensor | None = None) -> Tensor | None:
        """Width of every token about to be sealed, for layouts with several runs.

        Args:
            keys: (B, H, m, Dk), entries beyond what a row has due are arbitrary.
            values: (B, H, m, Dv), likewise.
            position: i32 (B, m), row position of each token.
            tags: u8 (B, m), the code of each token's tag or `UNTAGGED`, if ``needs`` has "tags" and somebody showed the
                cache its token ids.

        Returns:
            u8 (B, m): one of the key formats' widths; None gives every token the widest.
        """
        return None

    @property
    def untagged_is_wide(self) -> bool:
        """True if `token_bits` gives tokens without a tag the most bits, whatever they hold.

        Then nothing is asked while generated tokens are sealed. True of schemes that leave `token_bits` as it is.
        """
        return type(self).token_bits is Scheme.token_bits

    @property
    def reads_tokens(self) -> bool:
        """True if `token_bits` looks at keys or values.

        If not, it may be given anything of their shape, and is asked once for all layers that hold their tokens alike.
        Not true of schemes that leave `token_bits` as it is.
        """
        return type(self).token_bits is not Scheme.token_bits

    # Limits of steps.

    def seals_widely(self, layout: Layout) -> bool:
        """True if tokens without a tag go to the last of several runs, and nothing else has to be known of them."""
        plain = all(not fmt.normed and not fmt.raised and not fmt.whole for fmt in layout.store.runs[-1])
        return plain and self.untagged_is_wide

    def limits(self, key_dim: int, value_dim: int) -> Limits:
        """Limits of steps by the scheme's choices, for heads of these dimensions."""
        layout = self.layout(key_dim, value_dim)
        return Limits(self._captured_limit(layout, key_dim))

    def _captured_limit(self, layout: Layout, key_dim: int) -> str | None:
        keys = layout.keys
        if keys.formats[-1].raised and self.step_rule(key_dim) is None:
            return "this choice of raised channels is no rule that the sealing kernel knows"
        if len(keys.formats) > 1 and type(self).token_bits is not Scheme.token_bits:
            most = most_due(MAX_STEP, keys.unit)
            if any(not fmt.whole or fmt.page_size <= most for fmt in keys.formats[:-1]):
                return "tokens that a step seals may belong in several runs"
        return None

    def searched(self) -> dict[str, tuple[float, float] | list[Any]]:
        """Search space of the tuner, unless told otherwise: ranges and choices by knob, as the knobs name them."""
        ranges = {field.name: field.metadata.get("search") for field in dataclasses.fields(self)}
        return {name: search for name, search in ranges.items() if search is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain description, ``{"scheme": name, knob: value, ...}``."""
        return {"scheme": self.name, **self.knobs()}

    def knobs(self) -> dict[str, Any]:
        """Value of every knob, plain as JSON has it."""
        return {
            name: value.to_dict() if isinstance(value, Scheme) else value for name, value in _fields_of(self).items()
        }

    @staticmethod
    def from_dict(description: Mapping[str, Any]) -> Scheme:
        """Inverse of `to_dict`; missing knobs take their defaults.

        Raises:
            ValueError: it names no scheme, an unknown one, or knobs that it does not take.
        """
        knobs = dict(description)
        if not isinstance(knobs.get("scheme"), str):
            raise ValueError(f"scheme: got {knobs.get('scheme')!r} under 'scheme', allowed a name; see list_schemes().")
        return get_scheme(knobs.pop("scheme"), **knobs)


def _fields_of(scheme: Scheme) -> dict[str, Any]:
    return {field.name: getattr(scheme, field.name) for field in dataclasses.fields(scheme)}


def warn_of_limits(scheme: Scheme, key_dim: int, value_dim: int) -> None:
    """Warns the author of a scheme that is not this library's of what steps lose by its choices.

    Once for each place that a cache is made in; of the library's own ``hfkvq schemes`` says it.
    """
    if type(scheme).__module__.partition(".")[0] != __name__.partition(".")[0]:
        for line in scheme.limits(key_dim, value_dim).words():
            warnings.warn(f"{scheme.name}: {line} (see Scheme.limits).", UserWarning, stacklevel=4)


def latent_layout(scheme: Scheme, rank: int, rope_dim: int) -> Layout | None:
    """Layout of latents of this rank with their rotary parts, for steps to attend to them as they are.

    None where steps cannot: latents are then dequantized and expanded in each.
    """
    if scheme.evicts or scheme.needs:
        return None
    return scheme.layout(rank, rope_dim).of_latents()


def list_schemes() -> dict[str, Scheme]:
    """Every preset by name, with the scheme it stands for."""
    return {name: get_scheme(name) for name in registry.presets()}


def get_scheme(name: str | Scheme, **knobs: Any) -> Scheme:
    """A scheme from a preset's name and knobs: ``get_scheme("kitty", boost_ratio=0.2)``, or "kitty:boost_ratio=0.2".

    Args:
        name: a preset (see `list_schemes`), also with knobs, one that evicts over another's pages
            ("snapkv+kitty-pro"), or a scheme whose knobs are to be changed.
        knobs: overrides.

    Returns:
        The frozen scheme.

    Raises:
        ValueError: unknown preset or knob (the nearest names are shown), or a knob out of range.
    """
    if isinstance(name, Scheme):
        cls, base = type(name), _fields_of(name)
    else:
        name, knobs = split_knobs(name, knobs) if isinstance(name, str) else (name, knobs)
        cls, entry = registry.entry_of(name)
        base = dict(entry.knobs)
    known = [field.name for field in dataclasses.fields(cls)]
    for knob_name in base | knobs:
        if knob_name not in known:
            raise ValueError(f"{cls.name}: knob {knob_name!r} is unknown; {nearest(knob_name, known)}")
    return cls(**(base | knobs))
