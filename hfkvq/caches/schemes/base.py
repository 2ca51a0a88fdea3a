"""Base of schemes, from the bottom: names with knobs, presets, layouts, and `Scheme`.

A scheme has frozen knobs, a static layout, and at most one function that returns widths.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from hfkvq.bounded import parse_json
from hfkvq.kernels.hadamard import check_rotation, largest_block
from hfkvq.kernels.norms import BALANCE, Balance
from hfkvq.kernels.pages import PageFormat, StoreFormat
from hfkvq.kernels.step import MAX_STEP
from hfkvq.kernels.windows import most_due

_COLON = re.compile(r":(?=[^:=/\\]*=)")
"""The colon before a knob; not a drive's (``C:\\mine.json``)."""


def parse_value(text: str) -> Any:
    """A knob's value: a number, true, false, null, or the text itself."""
    try:
        return parse_json(text.lower() if text.lower() in ("true", "false", "none") else text)
    except ValueError:
        return None if text.lower() == "none" else text


def split_knobs(text: str, knobs: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and knobs of ``NAME:KNOB=VALUE:...``, and further ``knobs``, each of them once."""
    # Folders may have any name.
    name, *typed = [text] if Path(text).is_file() else _COLON.split(text)
    found: dict[str, Any] = {}
    pairs = [(knob.partition("=")[0].strip(), parse_value(knob.partition("=")[2].strip())) for knob in typed]
    for key, value in (*pairs, *(knobs or {}).items()):
        if key in found:
            raise ValueError(f"scheme: {text!r} gives {key} twice; write each knob once.")
        found[key] = value
    return name.strip(), found


LISTS = ("demo", "kld", "fit")
"""Commands that show presets, by the name of the list that each shows unless it is told otherwise."""

GROUPS = ("scheme", "eviction", "control", "baseline")
"""Role of a preset in a comparison: a scheme, one that evicts tokens and holds what stays in any other scheme's pages,
the lossless control, or a baseline that is expected to lose."""


@dataclass(frozen=True)
class Entry:
    """A preset as the class of its scheme declares it, under its name in ``presets``.

    Attributes:
        purpose: one sentence: who it is for.
        knobs: what differs from the scheme's defaults.
        lists: which of `LISTS` it stands in.
        group: which of `GROUPS` it is of.
    """

    purpose: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    group: str = "scheme"

    def __post_init__(self) -> None:
        for name in self.lists:
            if name not in LISTS:
                raise ValueError(f"lists: got {name!r}, which is unknown; {nearest(name, list(LISTS))}")
        if self.group not in GROUPS:
            raise ValueError(f"group: got {self.group!r}, allowed {', '.join(map(repr, GROUPS))}.")


_PRESETS: dict[str, tuple[type[Any], Entry]] = {}


def nearest(name: str, known: list[str]) -> str:
    """A sentence naming the nearest known names, then all of them."""
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def register(scheme: type[Any]) -> None:
    """Takes the name of a `Scheme`, which stands for its defaults, and its presets; or nothing, if one is taken."""
    # Inherited presets are the base's, and left out.
    declared = vars(scheme).get("presets", {})
    entries = {
        name: each if isinstance(each, Entry) else Entry(knobs=each)
        for name, each in ({scheme.name: Entry()} | dict(declared)).items()
    }
    for name in entries:
        owner = _PRESETS.get(name)
        # A class that is defined again, in a notebook for example, takes its own place.
        if owner is not None and owner[0].__qualname__ != scheme.__qualname__:
            raise ValueError(f"preset: {name!r} is taken by {owner[0].__name__}; choose another name.")
    _PRESETS.update({name: (scheme, entry) for name, entry in entries.items()})


def presets() -> list[str]:
    """The name of every preset, in the order in which lists and tables show them: by ``Scheme.place``."""
    return sorted(_PRESETS, key=lambda name: _PRESETS[name][0].place)


def entry_of(name: str) -> tuple[type[Any], Entry]:
    """The class and the declaration of a preset; of "snapkv+kitty-pro" those of "snapkv" over pages of "kitty-pro"."""
    name, plus, pages = name.partition("+") if isinstance(name, str) else (name, "", "")
    if plus:
        cls, entry = entry_of(name)
        return cls, replace(entry, knobs={**entry.knobs, "pages": pages}, lists=())
    if not isinstance(name, str) or name not in _PRESETS:
        raise ValueError(
            f"scheme: got {name!r}, which is unknown; {nearest(name, presets())} Options follow the name: "
            "'kitty:boost_ratio=0.2'."
        )
    return _PRESETS[name]


def listed(name: str) -> tuple[str, ...]:
    """The presets of one of `LISTS`."""
    return tuple(preset for preset in presets() if name in _PRESETS[preset][1].lists)


def rotation_block(dim: int) -> int:
    """The largest Hadamard block, up to 128 channels, of heads of ``dim``; 0 if it is one channel."""
    block = min(128, largest_block(dim))
    return block if block > 1 else 0


@dataclass(frozen=True, slots=True)
class SideLayout:
    """Layout of a layer's keys, or of its values.

    Attributes:
        formats: page format of each run, narrow to wide; several only if the scheme assigns token widths.
        local: newest tokens that stay unquantized.
        unit: tokens that are sealed together; a multiple of the page where pages are sealed whole.
        rotate: Hadamard block, 0 for none.
        balance: how `kernels.page_norms` balances pages of normed formats.
    """

    formats: tuple[PageFormat, ...]
    local: int = 0
    unit: int = 1
    rotate: int = 0
    balance: Balance = BALANCE


@dataclass(frozen=True, slots=True)
class Layout:
    """Static layout of one layer: both sides and the sink they share.

    Attributes:
        sink: first tokens of a row, never quantized.
        latent: whether the key side is of latents and the value side of rotary parts, to be attended to as they are.
        window: tokens that a query sees, see `hfkvq.kernels.pages.StoreFormat`; 0 for all.
    """

    keys: SideLayout
    values: SideLayout
    sink: int = 0
    latent: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        for name, side in (("keys", self.keys), ("values", self.values)):
            for fmt in side.formats:
                if fmt.whole and len(side.formats) == 1 and side.unit % fmt.page_size:
                    raise ValueError(
                        f"{name}: got a seal unit of {side.unit} tokens, which must be a multiple of the page of "
                        f"{fmt.page_size} tokens where scales are per channel, and in normed and trellis-coded pages."
                    )
        if len(self.keys.formats) > 1 and (self.keys.local, self.keys.unit) != (self.values.local, self.values.unit):
            raise ValueError("local, unit: keys and values must leave the tail together where tokens have widths.")
        if self.window and self.own_tokens() > self.window:
            raise ValueError(
                f"window: got {self.window} tokens, but the newest {self.own_tokens()} are held outside of pages; take "
                "shorter local windows and units, or another scheme in this layer."
            )

    @property
    def store(self) -> StoreFormat:
        runs = tuple(zip(self.keys.formats, self.values.formats, strict=True))
        return StoreFormat(runs, self.sink, self.keys.rotate, self.values.rotate, self.latent, self.window)

    @property
    def windowed(self) -> bool:
        """True if tokens wait in 16 bits, or pages are sealed whole."""
        sides = (self.keys, self.values)
        return bool(self.sink) or any(side.local or side.unit > 1 or side.formats[0].whole for side in sides)

    def own_tokens(self) -> int:
        """Most of the newest tokens that are not in pages yet."""
        return max(side.local + side.unit for side in (self.keys, self.values))

    def in_window(self, window: int) -> Layout:
        """The same for a layer whose queries see so many tokens: first tokens fall out of sight like any others."""
        return replace(self, sink=0, window=window)

    def of_latents(self) -> Layout | None:
        """The same for latents that are attended to as they are; None if they cannot be in pages like these."""
        keys, values = self.keys, self.values
        together = (keys.local, keys.unit) == (values.local, values.unit)
        single = len(keys.formats) == 1 and not keys.formats[0].whole and not values.formats[0].whole
        return replace(self, latent=True) if together and single else None

    def check(self, key_dim: int, value_dim: int) -> None:
        """Raises ValueError if heads of these dimensions cannot be held."""
        check_rotation("rotate (keys)", self.keys.rotate, key_dim)
        check_rotation("rotate (values)", self.values.rotate, value_dim)
        for side, dim in ((self.keys, key_dim), (self.values, value_dim)):
            for fmt in side.formats:
                fmt.check_head_dim(dim)


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
    """A dataclass field that knows its legal range or values, and what of it is worth searching.

    ``search`` is (low, high), or a list of values, for the tuner; None leaves the knob as it is.
    """
    return field(default=default, metadata={"low": low, "high": high, "choices": choices, "search": search})


class Limits(NamedTuple):
    """Limits of a scheme's steps, or None: why they can be neither captured nor compiled, or quantize tokens again."""

    captured: str | None = None
    requantized: str | None = None

    def words(self) -> list[str]:
        """A line for each thing that is lost."""
        said = ("steps are not captured", "tokens that stay are quantized again")
        return [f"{lost}: {why}" for lost, why in zip(said, self, strict=True) if why]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Policy of bits for channels and tokens. Stateless: fields are knobs, state is passed in.

    A subclass registers itself under ``name``, and its ``presets`` under their names. It defines ``layout`` and at most
    one of ``channel_rule``, ``channel_bits`` and ``token_bits``. Knobs that are described here mean the same in every
    scheme that has them, unless it says otherwise.

    Attributes:
        name: of the scheme, and of the preset of its defaults; without one a class registers nothing.
        evicts: whether it forgets tokens: see `hfkvq.caches.schemes.eviction.EvictionScheme`.
        latents: whether it is for latent attention alone: then keys are latents, and values rotary parts of keys.
        presets: what each preset is, by name, the scheme's own included: an `Entry`, or knobs alone.
        place: where lists and tables show its presets: low ones first.
        sink_length: S, first tokens kept in full precision.
        local_length: newest tokens kept in full precision.
        page_size: G, tokens per page.
        fit: 0 takes scale and minimum of keys from the extremes of each group, as in the papers; 2,
            3 or 4 chooses those with the least sum of |error| to this power. Without a sink it adds loss, and so it
            does in saw-int4 without a rotation. Memory and decoding stay the same.
        fit_values: the same for values.
        smooth_keys: whether key channels are centred and scaled before they are rotated and
            rounded, and queries scaled to match (not in the papers): see `hfkvq.caches.layer_state.smoothing`. Without
            it, token-wise keys of models with biases on them (Qwen2.5) lead to random answers.
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
            register(cls)

    def __post_init__(self) -> None:
        for own in fields(self):
            value, low, high = getattr(self, own.name), own.metadata.get("low"), own.metadata.get("high")
            choices = own.metadata.get("choices")
            if isinstance(value, Mapping) and "scheme" in value:
                object.__setattr__(self, own.name, get_scheme(value))
            # 4.0 and True equal choices that they are not, and files tell them apart.
            if choices is not None and not any(value == each and type(value) is type(each) for each in choices):
                raise ValueError(f"{own.name}: got {value!r}, allowed {', '.join(map(repr, choices))}.")
            if (value is None and own.default is None) or (low is None and high is None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{own.name}: got {value!r}, allowed a number.")
            # Where the default is None, the bounds tell what is counted.
            whole = isinstance(low if own.default is None else own.default, int)
            if whole and not isinstance(value, int):
                raise ValueError(f"{own.name}: got {value!r}, allowed a whole number.")
            if (low is not None and value < low) or (high is not None and value > high) or value != value:
                raise ValueError(
                    f"{own.name}: got {value!r}, allowed {'-inf' if low is None else low} to "
                    f"{'inf' if high is None else high}."
                )

    @property
    def needs(self) -> frozenset[str]:
        """Observations that the scheme needs: a subset of {"query", "history", "tags"}.

        Of queries, magnitudes are averaged, by which channels are weighed: of those since the last seal, with
        "history" of all since the first.
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
        return getattr(self, "smooth_keys", False)

    @property
    def channel_rule(self) -> str | None:
        """The rule of `step_rule`, where it is one for all heads, with queries and without."""
        return None

    def step_rule(self, head_dim: int, seen: bool = True) -> str | None:
        """Rule of `kernels.channel_widths` by which channels are raised; not ``seen``: attention shows no queries.

        None asks ``channel_bits``, which steps without the host cannot.
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
    def reads_tokens(self) -> bool:
        """True if `token_bits` looks at keys or values, or gives tokens without a tag other than the most bits.

        If not, it may be given anything of their shape, is asked once for all layers that hold their tokens alike, and
        not at all while generated tokens are sealed. Not true of schemes that leave `token_bits` as it is.
        """
        return type(self).token_bits is not Scheme.token_bits

    # Limits of steps.

    def seals_widely(self, layout: Layout) -> bool:
        """True if tokens without a tag go to the last of several runs, and nothing else has to be known of them."""
        plain = all(not fmt.normed and not fmt.raised and not fmt.whole for fmt in layout.store.runs[-1])
        return plain and not self.reads_tokens

    def limits(self, key_dim: int, value_dim: int) -> Limits:
        """Limits of steps by the scheme's choices, for heads of these dimensions."""
        keys = self.layout(key_dim, value_dim).keys
        if keys.formats[-1].raised and self.step_rule(key_dim) is None:
            return Limits("this choice of raised channels is no rule that the sealing kernel knows")
        if len(keys.formats) > 1 and type(self).token_bits is not Scheme.token_bits:
            most = most_due(MAX_STEP, keys.unit)
            if any(not fmt.whole or fmt.page_size <= most for fmt in keys.formats[:-1]):
                return Limits("tokens that a step seals may belong in several runs")
        return Limits()

    def searched(self) -> dict[str, tuple[float, float] | list[Any]]:
        """Search space of the tuner, unless told otherwise: ranges and choices by knob, as the knobs name them."""
        ranges = {own.name: own.metadata.get("search") for own in fields(self)}
        return {name: search for name, search in ranges.items() if search is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain description, ``{"scheme": name, knob: value, ...}``, which `get_scheme` takes."""
        return {"scheme": self.name, **self.knobs()}

    def knobs(self) -> dict[str, Any]:
        """Value of every knob, plain as JSON has it."""
        found = {own.name: getattr(self, own.name) for own in fields(self)}
        return {name: value.to_dict() if isinstance(value, Scheme) else value for name, value in found.items()}


def warn_of_limits(scheme: Scheme, key_dim: int, value_dim: int) -> None:
    """Warns the author of a scheme that is not this library's of what steps lose by its choices."""
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


def warn_of_unseen(scheme: Scheme) -> None:
    """Warns, once for a scheme, that channels are raised without the queries by which it would choose them."""
    # Warnings are shown once for each line that they come from, and each text.
    warnings.warn(
        f"{scheme.name}: this model's attention does not expose its queries to the cache, so key channels are raised "
        "without them (mixkvq, best-*: by their quantization error alone). Load the model with "
        "attn_implementation='sdpa', or choose a scheme that needs no queries (kitty, saw-int4).",
        stacklevel=3,
    )


def list_schemes() -> dict[str, Scheme]:
    """Every preset by name, with the scheme it stands for."""
    return {name: get_scheme(name) for name in presets()}


def get_scheme(name: str | Scheme | Mapping[str, Any], **knobs: Any) -> Scheme:
    """A scheme from a preset's name and knobs: ``get_scheme("kitty", boost_ratio=0.2)``, or "kitty:boost_ratio=0.2".

    Args:
        name: a preset (see `list_schemes`), also with knobs, one that evicts over another's pages
            ("snapkv+kitty-pro"), or a scheme, or its description (`Scheme.to_dict`), whose knobs are to be changed.

    Returns:
        The frozen scheme.

    Raises:
        ValueError: unknown preset or knob (the nearest names are shown), or a knob out of range.
    """
    if isinstance(name, Mapping):
        if not isinstance(name.get("scheme"), str):
            raise ValueError(f"scheme: got {name.get('scheme')!r} under 'scheme', allowed a name; see list_schemes().")
        described = dict(name)
        return get_scheme(described.pop("scheme"), **(described | knobs))
    if isinstance(name, Scheme):
        cls, base = type(name), {own.name: getattr(name, own.name) for own in fields(name)}
    else:
        name, knobs = split_knobs(name, knobs) if isinstance(name, str) else (name, knobs)
        cls, entry = entry_of(name)
        base = dict(entry.knobs)
    known = [own.name for own in fields(cls)]
    for knob_name in base | knobs:
        if knob_name not in known:
            raise ValueError(f"{cls.name}: knob {knob_name!r} is unknown; {nearest(knob_name, known)}")
    return cls(**(base | knobs))
