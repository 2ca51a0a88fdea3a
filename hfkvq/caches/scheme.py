"""What a scheme is: frozen knobs, a static layout, and at most one function that returns widths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hfkvq.kernels.hadamard import check_rotation
from hfkvq.kernels.pages import PageFormat, StoreFormat

from . import registry
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


@dataclass(frozen=True, slots=True)
class SideLayout:
    """How the keys, or the values, of a layer are held.

    Attributes:
        formats: page format of each run, narrow to wide; several only if the scheme assigns token widths.
        local: newest tokens that stay unquantized.
        unit: tokens that are sealed together; a multiple of the page where pages are sealed whole.
        rotate: Hadamard block, 0 for none.
        balance: rounds of `kernels.page_norms` for normed formats.
        clip: vectors are clipped, when they are sealed, at the entry of this rank among their magnitudes, as a share of
            the dimension; 1 clips nothing.
    """

    formats: tuple[PageFormat, ...]
    local: int = 0
    unit: int = 1
    rotate: int = 0
    clip: float = 1.0
    balance: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Static layout of one layer: both sides and the sink they share.

    Attributes:
        keys: the key side.
        values: the value side.
        sink: first tokens of a row, never quantized.
    """

    keys: SideLayout
    values: SideLayout
    sink: int = 0

    def __post_init__(self) -> None:
        """Checks what the store relies on."""
        for name, side in (("keys", self.keys), ("values", self.values)):
            for fmt in side.formats:
                if fmt.whole and len(side.formats) == 1 and side.unit % fmt.page_size:
                    raise ValueError(
                        f"{name}: got a seal unit of {side.unit} tokens, which must be a multiple of the page of "
                        f"{fmt.page_size} tokens where scales are per channel, or pages normed."
                    )
        if len(self.keys.formats) > 1 and (self.keys.local, self.keys.unit) != (self.values.local, self.values.unit):
            raise ValueError("local, unit: keys and values must leave the tail together where tokens have widths.")

    @property
    def store(self) -> StoreFormat:
        """The format that kernels see."""
        runs = tuple(zip(self.keys.formats, self.values.formats, strict=True))
        return StoreFormat(runs, self.sink, self.keys.rotate, self.values.rotate)

    def check(self, key_dim: int, value_dim: int) -> None:
        """Raises ValueError if heads of these dimensions cannot be held."""
        check_rotation("rotate (keys)", self.keys.rotate, key_dim)
        check_rotation("rotate (values)", self.values.rotate, value_dim)
        for side, dim in ((self.keys, key_dim), (self.values, value_dim)):
            for fmt in side.formats:
                fmt.check_head_dim(dim)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How many bits each channel and token deserves. Stateless: fields are knobs, state is passed in.

    A subclass registers itself under ``name``, and its ``presets`` under their names. It defines ``layout`` and at most
    one of ``channel_rule``, ``channel_bits`` and ``token_bits``.

    Attributes:
        name: of the scheme, and of the preset of its defaults; without one a class registers nothing.
        paper: where it comes from.
        presets: what each preset is, by name, the scheme's own included: an `Entry`, or knobs alone.
        place: where lists and tables show its presets: low ones first.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
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
            if choices is not None and value not in choices:
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
        """What the scheme must observe: a subset of {"query", "tags", "turns", "probs"}.

        A scheme that observes turns has ``tag_bits``, which is asked again for all cached tokens with every prompt: see
        `hfkvq.caches.demote`.
        A scheme that observes attention probabilities ("probs") evicts tokens and assigns tiers again: see
        `hfkvq.caches.layers.eviction.EvictingScheme` for the methods that it must have.
        """
        return frozenset()

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Static layout for heads of these dimensions."""
        raise NotImplementedError(f"{type(self).__name__} defines no layout.")

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
        """Whether `token_bits` gives tokens without a tag the most bits, whatever they hold.

        Then nothing is asked while generated tokens are sealed. True of schemes that leave `token_bits` as it is.
        """
        return type(self).token_bits is Scheme.token_bits

    @property
    def reads_tokens(self) -> bool:
        """Whether `token_bits` looks at keys or values.

        If not, it may be given anything of their shape, and is asked once for all layers that hold their tokens alike.
        Not true of schemes that leave `token_bits` as it is.
        """
        return type(self).token_bits is not Scheme.token_bits

    def searched(self) -> dict[str, tuple[float, float] | list[Any]]:
        """What the tuner searches unless told otherwise: ranges and choices by knob, as the knobs name them."""
        ranges = {field.name: field.metadata.get("search") for field in dataclasses.fields(self)}
        return {name: search for name, search in ranges.items() if search is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain description, ``{"scheme": name, knob: value, ...}``."""
        return {"scheme": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(description: Mapping[str, Any]) -> Scheme:
        """Inverse of `to_dict`; missing knobs take their defaults."""
        knobs = dict(description)
        return get_scheme(knobs.pop("scheme"), **knobs)


def list_schemes() -> dict[str, Scheme]:
    """Every preset by name, with the scheme it stands for."""
    return {name: get_scheme(name) for name in registry.presets()}


def get_scheme(name: str | Scheme, **knobs: Any) -> Scheme:
    """A scheme from a preset's name and overrides: ``get_scheme("kitty", boost_ratio=0.2)``.

    Args:
        name: a preset (see `list_schemes`), or a scheme whose knobs are to be changed.
        knobs: overrides.

    Returns:
        The frozen scheme.

    Raises:
        ValueError: unknown preset or knob (the nearest names are shown), or a knob out of range.
    """
    if isinstance(name, Scheme):
        cls, base = type(name), dataclasses.asdict(name)
    else:
        cls, entry = registry.entry_of(name)
        base = dict(entry.knobs)
    known = [field.name for field in dataclasses.fields(cls)]
    for knob_name in knobs:
        if knob_name not in known:
            raise ValueError(f"{cls.name}: knob {knob_name!r} is unknown; {nearest(knob_name, known)}")
    return cls(**(base | knobs))
