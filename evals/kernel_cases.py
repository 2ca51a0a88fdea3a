"""Cases of the kernel bench: shapes, formats with and without a preset, and the kernels that they launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfkvq.caches.compile import LayerShape, layer_plan
from hfkvq.caches.schemes.base import Layout, Scheme, SideLayout, get_scheme, list_schemes, nearest
from hfkvq.caches.store import MAX_STEP, SIDES, KVStore
from hfkvq.kernels.compile import normal
from hfkvq.kernels.decode import LENGTH, run_count, sealed_count
from hfkvq.kernels.pages import PageFormat
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton.compile import Wanted, compile_all
from hfkvq.kernels.triton.decode import decode_wanted
from hfkvq.kernels.triton.latent import latent_wanted
from hfkvq.kernels.triton.variants import wanted
from hfkvq.sizes import parse_count

PAGE = 128
GROUP = 32

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's decode step, a query token a row against its context; or several tokens, or a prompt behind it.

    Attributes:
        batch: rows.
        context: tokens of each row.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: channels of a head, or of a latent.
        dtype: of queries and of what is not quantized, a key of `DTYPES`.
        rope_dim: channels of the rotary parts beside latents; 0 for keys and values, not latents.
        queries: newest tokens of each row, which ask: the last of its context, or, if they are more than a step has, a
            prompt behind it.
    """

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    rope_dim: int = 0
    queries: int = 1

    @classmethod
    def of_latents(cls, batch: int, context: int, heads: int, dtype: str = "bfloat16") -> Shape:
        """The latents of DeepSeek's models, for so many query heads: 512 channels, and 64 of rotary parts."""
        return cls(batch, context, heads, 1, 512, dtype, 64)

    def __post_init__(self) -> None:
        """Checks what kernels and data rely on."""
        for field in ("batch", "context", "heads", "kv_heads", "head_dim", "queries"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: got {getattr(self, field)}, allowed 1 or more.")
        if not self.is_prompt and self.queries > self.context:
            raise ValueError(
                f"queries: got {self.queries}, allowed no more than the context's tokens ({self.context})."
            )
        if self.queries > 1 and self.rope_dim:
            raise ValueError(f"queries: got {self.queries}, allowed 1 of latents.")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: got {self.heads}, allowed multiples of kv_heads ({self.kv_heads}).")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, allowed {', '.join(DTYPES)}.")

    @property
    def scaling(self) -> float:
        """Factor on the logits."""
        return 1 / math.sqrt(self.head_dim + self.rope_dim)

    @property
    def is_prompt(self) -> bool:
        """True if there are more queries than a step has, so that pages are dequantized for them."""
        return self.queries > MAX_STEP

    @property
    def title(self) -> str:
        """E.g. ``32 x 32k tokens, 32/8 heads of 128, bfloat16``."""
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        if self.rope_dim:
            heads = f"{self.heads} heads, latents of {self.head_dim} + {self.rope_dim}"
        asked = f", {short(self.queries)} queries" if self.queries > 1 else ""
        asked += " behind them" if self.is_prompt else ""
        return f"{self.batch} x {short(self.context)} tokens{asked}, {heads}, {self.dtype}"

    def data(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Random query (B, Hq, Q, D), keys and values (B, H, T, D).

        Of latents the query is (B, Hq, 1, D + R), and values are their rotary parts (B, 1, T, R).
        """
        generator = torch.Generator(device).manual_seed(seed)
        kind = DTYPES[self.dtype]

        def normal(heads: int, tokens: int, dim: int) -> Tensor:
            return torch.randn((self.batch, heads, tokens, dim), generator=generator, device=device, dtype=kind)

        columns = self.context + (self.queries if self.is_prompt else 0)
        query = normal(self.heads, self.queries, self.head_dim + self.rope_dim)
        keys = normal(self.kv_heads, columns, self.head_dim)
        return query, keys, normal(self.kv_heads, columns, self.rope_dim or self.head_dim)


def short(tokens: int) -> str:
    """``32k`` for 32768."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}"


def parse_size(text: str) -> tuple[int, int]:
    """Rows and tokens of ``32x8k``. Raises ValueError if it is something else."""
    rows, by, tokens = text.lower().partition("x")
    if not by:
        raise ValueError(f"sizes: got {text!r}, allowed rows x tokens, like 32x8k.")
    return parse_count(rows.strip(), "sizes"), parse_count(tokens.strip(), "sizes")


DEFAULT_SHAPES = ((32, 32768), (1, 131072), (32, 8192), (1, 8192), (1, 1024))
LATENT_SHAPES = ((32, 32768), (1, 131072), (1, 8192))
LATENT_FORMATS = ("latent-4", "latent-8")
SWEEP_BATCHES = (1, 32)
SWEEP_CONTEXTS = tuple(1024 << i for i in range(8))


# Page layouts by themselves, for which there is no preset (yet). Their schemes have no name and so register nothing.


@dataclass(frozen=True, kw_only=True)
class MixedTokens(Scheme):
    """Tokens of two widths, scattered evenly over the context."""

    formats: tuple[tuple[PageFormat, PageFormat], tuple[PageFormat, PageFormat]]
    narrow: float

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Two runs; nothing stays whole but what does not fill a page."""
        keys, values = zip(*self.formats, strict=True)
        return Layout(SideLayout(keys, unit=PAGE), SideLayout(values, unit=PAGE))

    def token_bits(self, keys: Tensor, values: Tensor, position: Tensor, tags: Tensor | None = None) -> Tensor | None:
        """A share ``narrow`` of the tokens is narrow."""
        narrow, wide = (pair[0].bits for pair in self.formats)
        # Multiples of the golden ratio fill the unit interval evenly.
        where = (position.double() * 0.6180339887498949) % 1.0
        return torch.where(where < self.narrow, narrow, wide).to(torch.uint8)


def _triaxial() -> Scheme:
    two, four = ((PageFormat(bits, "channel", GROUP, PAGE), PageFormat(bits, "token", GROUP, PAGE)) for bits in (2, 4))
    return MixedTokens(formats=(two, four), narrow=0.7)


def _halves(head_dim: int) -> Scheme:
    eight, sixteen = PageFormat(8, "token", head_dim, PAGE), PageFormat(16, "token", 1, PAGE)
    return MixedTokens(formats=((eight, eight), (sixteen, sixteen)), narrow=0.5)


RAW: dict[str, tuple[str, Callable[[int], Scheme]]] = {
    "2-bit": (
        "2-bit pages without windows",
        lambda dim: get_scheme("kitty", boost_ratio=0.0, sink_length=0, local_length=0),
    ),
    # The strongest channels, which are any channels where keys are random: there is room for 16 and 8 of 128.
    "mixkvq-pages": (
        "2-bit keys, 12 % of the channels 4 bits, 4 % 16 bits",
        lambda dim: get_scheme("mixkvq-error-only", most_bf16=0.04, most_int4=0.12),
    ),
    "triaxial-pages": ("70 % of the tokens 2 bits, 30 % 4 bits", lambda dim: _triaxial()),
    "fp8+16": ("half of the tokens fp8, half 16 bits", _halves),
}
"""Formats that no preset has: description, and scheme for a head dim."""


FORMATS = (
    *("2-bit", "kitty", "kitty-pro", "kivi-2", "kivi-4", "saw-int4", "int4", "full"),
    *("mixkvq-pages", "triaxial-pages", "fp8+16"),
)
"""Formats that are timed by default: presets, the lossless control behind them, and `RAW`."""


def scheme_of(name: str, head_dim: int) -> Scheme:
    """The scheme of a format or preset. Raises ValueError if there is none of that name."""
    if name in RAW:
        return RAW[name][1](head_dim)
    presets = list(list_schemes())
    if name not in presets:
        raise ValueError(f"formats: got {name!r}, which is unknown; {nearest(name, [*RAW, *presets])}")
    return get_scheme(name)


def check(formats: Iterable[str], shapes: Iterable[Shape]) -> None:
    """Raises ValueError if a format is unknown or cannot hold a shape's heads."""
    formats, shapes = tuple(formats), tuple(shapes)
    for title, given in (("formats", formats), ("sizes", shapes)):
        if not given:
            raise ValueError(f"{title}: got none.")
    for name in formats:
        for dims in sorted({(shape.head_dim, shape.rope_dim) for shape in shapes}):
            layout_of(name, *dims)


def layout_of(name: str, head_dim: int, rope_dim: int) -> Layout:
    """Store of a format or preset for heads of this dimension, or latents with rotary parts.

    Raises:
        ValueError: it cannot.
    """
    scheme = scheme_of(name, head_dim)
    layout = scheme.layout(head_dim, rope_dim or head_dim)
    layout.check(head_dim, rope_dim or head_dim)
    found = layout.of_latents() if rope_dim else layout
    if found is None or (scheme.latents and not rope_dim):
        held = "latents with" if rope_dim else "keys and values without"
        allowed = "latent-4, latent-8, full or saw-int4" if rope_dim else "it with --latents"
        raise ValueError(f"formats: got {name!r}, which is not attended to as {held} rotary parts; allowed {allowed}.")
    return found


def fill(name: str, keys: Tensor, values: Tensor) -> KVStore:
    """A store of a format that holds these keys and values (B, H, T, D), or latents and rotary parts."""
    dim = keys.shape[-1]
    rope_dim = 0 if values.shape[-1] == dim else values.shape[-1]
    store = KVStore(layout_of(name, dim, rope_dim), scheme_of(name, dim), keys, values)
    store.extend(keys, values)
    return store


def bytes_read(store: KVStore, query: Tensor) -> int:
    """Bytes that attention cannot do without: pages and windows as far as they hold tokens, query and output.

    Reserved room, page tables and what splits write for the merge do not count.
    """
    total = 2 * query.nbytes
    length = store.counters[LENGTH]
    sink = store.layout.sink
    for side, tail in zip(SIDES, store.windows[2:], strict=True):
        whole = length.clamp(max=sink) + ((length - sink).clamp(min=0) - sealed_count(store.counters, side))
        total += int(whole.sum()) * store.heads * store.dims[side] * tail.element_size()
        for i, (view, formats) in enumerate(zip(store.runs, store.format.runs, strict=True)):
            parts, fmt = (view.keys, formats[0]) if side == "keys" else (view.values, formats[1])
            page = sum(part[:1].nbytes for part in parts)
            # Whole pages where scales are per channel, and otherwise whole tokens.
            total += page * int(run_count(store.counters, i, side).sum()) // fmt.page_size
    return total


def as_dict(shape: Shape) -> dict[str, int | str]:
    """Fields by name; none for rotary parts and for queries where they are as in files from before there were any."""
    usual = {"rope_dim": 0, "queries": 1}
    return {name: x for name, x in dataclasses.asdict(shape).items() if usual.get(name) != x}


# Kernels of the cases, compiled side by side before they are launched.

COMPILED_CONTEXT = 1024
"""Tokens that are compiled for: kernels take rows and contexts of any length."""


def attending(name: str, shape: Shape, device: torch.device) -> Iterator[Wanted]:
    """The variants that attend to a format at such shapes, with the launch parameters in force.

    Prompts' pages are dequantized, by a kernel that its launch compiles.
    """
    form, dtype = layout_of(name, shape.head_dim, shape.rope_dim).store, DTYPES[shape.dtype]
    if shape.is_prompt:
        return
    if form.latent:
        yield from latent_wanted(form, shape.heads, shape.head_dim, shape.rope_dim, dtype, device, shape.queries)
    else:
        dims = shape.kv_heads, shape.heads, shape.head_dim, shape.head_dim
        yield from decode_wanted(form, *dims, dtype, device, shape.queries)


def storing(name: str, shape: Shape, device: torch.device) -> Iterator[Wanted]:
    """The variants that store a format."""
    if not shape.rope_dim:
        scheme = scheme_of(name, shape.head_dim)
        plan = layer_plan(scheme, LayerShape(shape.heads, shape.kv_heads, shape.head_dim), DTYPES[shape.dtype])
        yield from wanted(normal(plan), shape.heads, plan.rule or None, (1,), device)


def compile_formats(names: Sequence[str], shapes: Sequence[Shape], device: torch.device) -> None:
    """Compiles all that storing formats, and attending to them at these shapes, launches on a GPU."""
    alike = list({dataclasses.replace(shape, batch=1, context=COMPILED_CONTEXT): None for shape in shapes})
    if device.type == "cuda":
        every = [each for name in names for each in storing(name, alike[0], device)]
        every += [each for name in names for shape in alike for each in attending(name, shape, device)]
        compile_all(every, device)


def compile_candidates(
    kernel: str, key: str, tried: Sequence[Mapping[str, int]], names: Sequence[str], shape: Shape, device: torch.device
) -> None:
    """Compiles what attending to formats launches on a GPU with each of these launch parameters of one kernel."""
    every: list[Wanted] = []
    for knobs in tried if device.type == "cuda" else ():
        configs.try_out(kernel, key, knobs)
        every += [each for name in names for each in attending(name, shape, device)]
    configs.try_out(kernel, key, None)
    compile_all(every, device)
