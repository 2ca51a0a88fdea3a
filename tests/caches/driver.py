"""Feeds a cache layer by hand, and looks at what it holds: random rows, a plain attention call, stored bits."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import causal_mask_function

from hfkvq import Scheme, get_scheme, list_schemes
from hfkvq.caches.attention.interface import hfkvq_mask
from hfkvq.caches.layer_state.smoothing import KeySmoothing
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.schemes import Kitty
from hfkvq.caches.schemes.eviction import TokenEviction
from hfkvq.caches.schemes.sides import Sides
from hfkvq.caches.store import KVStore
from hfkvq.kernels import channel_widths
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, RUNS, START

HEADS, SHARE, DIM = 2, 2, 32

# So small that a few dozen tokens cross many page borders.
# What only evicts, a scheme each.
EVICTING = ("snapkv", "h2o", "streaming-llm", "tova", "expected-attention", "pyramidkv")

SMALL = {"page_size": 16, "local_length": 16, "sink_length": 4, "group_size": 8, "seal_unit": 8, "window": 16}


def small(name: str | Scheme, **knobs: Any) -> Scheme:
    """A preset with small pages, windows and budgets, as far as it has these knobs."""
    scheme = get_scheme(name)
    own = {field.name for field in fields(scheme)}
    less: dict[str, Any] = {}
    if isinstance(scheme, TokenEviction):
        # Less than the prompts of most tests.
        less = {"pages": small(scheme.pages), "budget_tokens": 28, "trim_every": min(scheme.trim_every, 4)}
    if isinstance(scheme, Sides):
        less = {side: small(getattr(scheme, side)) for side in ("keys", "values")}
    # None takes the page.
    fewer = {key: value for key, value in SMALL.items() if key in own and getattr(scheme, key) is not None}
    if getattr(scheme, "key_local_length", 0):
        fewer["key_local_length"] = 6
    return get_scheme(scheme, **fewer | less | knobs)


def cases() -> dict[str, Scheme]:
    """Every preset with small pages, and the corners of its windows: none, and lengths that divide nothing.

    Budgets are such that nothing exceeds them; see `evicting`.
    """
    found: dict[str, Scheme] = {}
    for name in list_schemes():
        scheme = found[name] = within(small(name))
        own = {field.name for field in fields(scheme)}
        # The corners of "best-2.5" and its kin are those of "kitty-odd" below.
        if {"local_length", "sink_length", "page_size"} <= own and not name.startswith("best"):
            found[f"{name}-bare"] = get_scheme(scheme, sink_length=0, local_length=0)
            found[f"{name}-odd"] = get_scheme(scheme, sink_length=3, local_length=5)
    found["mixkvq-total"] = small("mixkvq", accumulate=True)
    # Two of the corners have fitted scales, and a window of keys is beside a page that fills.
    more = {"fit": 3, "fit_values": 4, "score": "q_error", "key_local_length": 3, "group_size": 8}
    found["kitty-odd"] = get_scheme(found["kitty-odd"], **more)
    found["kivi-k4v2"] = small("kivi", key_bits=4, rotate_values=True, key_local_length=5)
    found["kitty-units"] = small("kitty", key_local_length=3, fit=3, value_unit=1)
    found["saw-int4-odd"] = get_scheme(found["saw-int4-odd"], rotate="both")
    found["triaxial-odd"] = get_scheme(found["triaxial-odd"], fit=2, fit_values=4)
    found["snapkv+kitty-pro"] = within(small("snapkv+kitty-pro"))
    # Same code as their siblings; one corner of each is enough.
    alike = "latent-4-bare latent-8-bare latent-8-odd expected-attention h2o-prompt pyramidkv tova arkv-origin "
    alike += "arkv-window kitty-pro-bare kitty-pro-odd kivi saw-int4-kv-bare saw-int4-kv-odd int4-bare int4-odd "
    alike += "kvarn-k4v2 kvarn-k4v4 kvarn-k2v2 mixkvq-fractions mixkvq-r1-qwen-7b mixkvq-r1-qwen-14b mixkvq-r1-qwen-32b"
    for name in alike.split():
        found.pop(name)
    return found


def within(scheme: Scheme) -> Scheme:
    """The same with a budget that no test exceeds, where it only evicts."""
    return get_scheme(scheme, budget_tokens=1024) if isinstance(scheme, TokenEviction) else scheme


def evicting() -> dict[str, Scheme]:
    """Every scheme that only evicts, over pages of some kinds, with a budget that most prompts exceed."""
    pages = ("full", "kitty-pro")
    found = {f"{name}+{held}": small(f"{name}+{held}") for name in EVICTING for held in pages}
    for name in ("tova+saw-int4", "snapkv+mixkvq", "h2o+mixkvq", "streaming-llm+kvarn", "pyramidkv+kivi-2"):
        found[name] = small(name)
    found["h2o-prompt"] = small("h2o-prompt")
    found["tova+kitty, every step"] = small("tova+kitty", trim_every=1, sink_length=3)
    found["h2o, a share"] = small("h2o+int4", budget_tokens=None, budget_share=0.4)
    return found


def for_all_models() -> dict[str, Scheme]:
    """Every preset that is not for models with latent attention alone."""
    return {name: scheme for name, scheme in list_schemes().items() if not scheme.latents}


def distinct() -> list[str]:
    """A name of every such preset, without aliases: "kivi" is "kivi-2"."""
    return list({scheme: name for name, scheme in for_all_models().items()}.values())


def by_layout() -> list[str]:
    """A preset for each layout and rule of raising: presets that share both call the same kernels."""
    found: dict[Any, str] = {}
    for name in distinct():
        scheme = small(name)
        if isinstance(scheme, TokenEviction):
            continue
        found.setdefault((scheme.layout(DIM, DIM), scheme.channel_rule), name)
    return list(found.values())


OF_EACH_SCHEME = ("arkv", "full", "h2o", "kitty-pro", "kivi-2", "kvarn", "mixkvq", "saw-int4", "snapkv", "triaxial")
"""A preset of each scheme, where presets of one scheme differ in numbers alone."""

ALIKE = frozenset(
    {"kitty", "best-2.5", "best-2.8", "best-4.3", "kvarn-k4v4", "kvarn-k2v2", "kivi-4", "int4", "saw-int4-kv"}
)
"""Of `by_layout`, what differs from a sibling in numbers alone: `tests/kernels` has every format."""


@dataclass(frozen=True, kw_only=True)
class OwnChoice(Kitty):
    """Kitty whose channels are chosen by no rule that the sealing kernel knows."""

    name = ""
    presets: ClassVar[dict] = {}
    channel_rule = None

    def channel_bits(self, keys: Tensor, q_abs: Tensor | None) -> Tensor:
        """4 bits for the channels of greatest magnitude."""
        head_dim = keys.shape[-1]
        return channel_widths(keys, self.layout(head_dim, head_dim).keys.formats[0], "k_abs")


def unit(scheme: Scheme) -> int:
    """Tokens of a page."""
    return scheme.layout(DIM, DIM).keys.formats[0].page_size


def make(scheme: Scheme, **kwargs: Any) -> KVLayer:
    """A layer outside any cache, whose steps go over a buffer where the scheme's can."""
    steps = {"recordable": scheme.limits(DIM, DIM).captured is None}
    return KVLayer(scheme, PaddingReader(), **steps | kwargs)


class Module(torch.nn.Module):
    """Attention module with the fields that attention functions read."""

    is_causal, num_key_value_groups = True, SHARE


@dataclass(frozen=True)
class Row:
    """One sequence: queries (Hq, T, D), keys and values (H, T, D)."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def __getitem__(self, tokens: slice) -> Row:
        return Row(self.queries[:, tokens], self.keys[:, tokens], self.values[:, tokens])

    def __len__(self) -> int:
        return self.keys.shape[1]


def row(
    seed: int,
    tokens: int,
    *,
    heads: int = HEADS,
    share: int = SHARE,
    dim: int = DIM,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Row:
    """A random sequence whose key channels differ in size and sign, as real ones do."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size, offset = (normal(heads, 1, dim) * 0.7).exp(), normal(heads, 1, dim)
    made = (
        normal(heads * share, tokens, dim),
        normal(heads, tokens, dim) * size + offset,
        normal(heads, tokens, value_dim or dim),
    )
    return Row(*(x.to(device=device, dtype=dtype) for x in made))


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Plain attention in f32: (B, Hq, Q, D) over (B, H, T, D); None is causal, aligned to the newest token."""
    share = queries.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(share, 1) for x in (keys, values))
    logits = queries.float() @ keys.transpose(-1, -2) * scaling
    count, columns = logits.shape[-2:]
    if mask is None:
        mask = torch.ones(count, columns, dtype=torch.bool, device=logits.device).tril(columns - count)
    mask = mask.to(logits.device)
    logits = logits + mask if mask.is_floating_point() else logits.masked_fill(~mask.bool(), -torch.inf)
    return (torch.softmax(logits, -1).nan_to_num(0.0) @ values).to(queries.dtype)


def mask_of(layer: KVLayer, valid: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """The mask that the model would be given for ``tokens`` new columns; ``valid`` is the 2D mask of all columns."""
    length, offset = layer.get_mask_sizes(tokens)
    return hfkvq_mask(
        batch_size=batch,
        q_length=tokens,
        kv_length=length,
        q_offset=layer.get_seq_length(),
        kv_offset=offset,
        mask_function=causal_mask_function,
        attention_mask=valid,
        device="cpu" if valid is None else valid.device,
    )


def forward(layer: KVLayer, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> Tensor:
    """One attention call, in the order of the "hfkvq" attention: (B, Hq, t, D)."""
    mask = mask_of(layer, valid, keys.shape[0], keys.shape[2])
    arguments = AttentionArguments(queries.shape[-1] ** -0.5, mask)
    layer.update(keys, values)
    needs = layer.scheme.needs
    shown = steady(queries) if "query" in needs else queries
    if "query" not in needs:
        out = None if layer.buffer is None else layer.buffer.run(queries, arguments)
        if out is not None:
            return out
    if layer.begin(mask, queries.shape[2]):
        out = layer.attend(queries, arguments)
    else:
        out = attention(queries, layer.dense("keys"), layer.dense("values"), mask, arguments.scaling)
    layer.finish(shown, arguments)
    return out


def steady(queries: Tensor) -> Tensor:
    """Queries that weigh channels as all others do, whatever their window.

    What schemes that watch queries seal depends on those since the last seal, and so on how tokens come. Magnitudes
    that are the same for every token (and powers of two, of which sums are exact) leave the rest comparable.
    """
    channel = torch.arange(queries.shape[-1], device=queries.device) % 3
    return torch.where(queries < 0, -1.0, 1.0).to(queries.dtype) * torch.exp2(-channel.to(queries.dtype))


def feed(layer: KVLayer, rows: Sequence[Row], chunks: Iterable[int], pads: Sequence[int] | None = None) -> list[Tensor]:
    """Feeds left-padded rows in chunks; returns each row's outputs (Hq, T, D) at its real tokens.

    The padding holds large vectors, so that whoever looks at it is found out.

    Args:
        layer: the layer, empty.
        rows: the sequences; row b starts at column ``pads[b]`` and what stands behind the last chunk is not fed.
        chunks: columns of each call.
        pads: padding of each row; None for none, without a mask then.
    """
    leads = [0] * len(rows) if pads is None else list(pads)
    chunks = list(chunks)
    columns = sum(chunks)
    padded = [_padded(row, lead, columns) for row, lead in zip(rows, leads, strict=True)]
    queries, keys, values = (torch.stack([getattr(x, side) for x in padded]) for side in ("queries", "keys", "values"))
    valid = None
    if pads is not None:
        valid = torch.arange(columns, device=keys.device) >= torch.tensor(leads, device=keys.device)[:, None]
    outs, at = [], 0
    for chunk in chunks:
        new = slice(at, at + chunk)
        at += chunk
        seen = None if valid is None else valid[:, :at]
        outs.append(forward(layer, queries[:, :, new], keys[:, :, new], values[:, :, new], seen))
    out = torch.cat(outs, 2)
    return [out[b, :, lead:] for b, lead in enumerate(leads)]


def feed_as_is(layer: KVLayer, rows: Sequence[Row], chunks: Iterable[int]) -> None:
    """Feeds rows without padding, in chunks, and shows the layer their queries as they are."""
    at = 0
    for chunk in chunks:
        queries, keys, values = join([x[at : at + chunk] for x in rows])
        layer.update(keys, values)
        if layer.begin(None, chunk):
            layer.attend(queries, AttentionArguments(1.0))
        layer.finish(queries, AttentionArguments(1.0))
        at += chunk


def _padded(row: Row, lead: int, columns: int) -> Row:
    def pad(x: Tensor) -> Tensor:
        junk = torch.full((x.shape[0], lead, x.shape[2]), 1000.0, dtype=x.dtype, device=x.device)
        return torch.cat([junk * torch.linspace(-1, 1, x.shape[2], device=x.device).to(x.dtype), x], 1)[:, :columns]

    return Row(pad(row.queries), pad(row.keys), pad(row.values))


def join(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one length as a batch of queries, keys and values."""
    return tuple(torch.stack([getattr(x, side) for x in rows]) for side in ("queries", "keys", "values"))  # type: ignore[return-value]


def counted(layer: KVLayer) -> KVStore:
    """The layer's store, whose counters count what the last step has sealed as well."""
    if layer.buffer is not None:
        layer.buffer.close()
    return layer.held()


def stored(layer: KVLayer, index: int) -> dict[str, Tensor]:
    """Everything a row holds, bit for bit, in the row's own order: counts, windows, codes, scales, positions."""
    store = counted(layer)
    fold = getattr(store, "fold", 1)
    held: dict[str, Tensor] = {}
    for head in range(fold):
        # Where heads are rows of the store, each has bits of its own.
        own = _stored_row(store, index * fold + head)
        held |= {name if not head else f"{name} of head {head}": x for name, x in own.items()}
    return held


def _stored_row(store: KVStore, index: int) -> dict[str, Tensor]:
    counters = store.counters[:, index].tolist()
    sink = store.layout.sink
    length = counters[LENGTH]
    held: dict[str, Tensor] = {"counts": torch.tensor([length, *counters[RUNS:]])}
    sealed = {"keys": 0, "values": 0}
    for run, (view, formats) in enumerate(zip(store.runs, store.format.runs, strict=True)):
        for side, fmt, parts in zip(("keys", "values"), formats, (view.keys, view.values), strict=True):
            count = counters[RUNS + 2 * run + (side == "values")]
            sealed[side] += count
            if view.pos is not None:
                held[f"{run} {side} positions"] = view.pos[index, :count].clone()
            for name, part in zip(fmt.names, parts, strict=True):
                pages = []
                for block in range(-(-count // fmt.page_size)):
                    page = part[view.table[index, block].long()]
                    axis = _token_axis(name, fmt, side)
                    used = min(count - block * fmt.page_size, fmt.page_size)
                    pages.append(page if axis is None else page.narrow(axis, 0, used))
                held |= {f"{run} {side} {name} {i}": page.clone() for i, page in enumerate(pages)}
    for side, whole, tail in zip(("keys", "values"), store.windows[:2], store.windows[2:], strict=True):
        held[f"{side} sink"] = whole[index, :, : min(length, sink)].clone()
        slots = torch.arange(sealed[side], max(length - sink, 0), device=tail.device) % tail.shape[2]
        held[f"{side} tail"] = tail[index][:, slots]
    return held


def _token_axis(name: str, fmt: Any, side: str) -> int | None:
    if name in ("scale", "zero"):
        return 2 if fmt.axis == "token" else None
    if fmt.trellis or name in ("norm", "high", "high_index", "full_index", "exact", "exact_index"):
        return None
    return 2 if name == "codes" and side == "values" and fmt.bits < 8 else 1


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal names, shapes and bits."""
    assert got["counts"].tolist() == expected["counts"].tolist()
    assert got.keys() == expected.keys()
    for name, x in got.items():
        assert x.shape == expected[name].shape, name
        ours, theirs = (t.cpu().contiguous().view(torch.uint8) for t in (x, expected[name]))
        assert torch.equal(ours, theirs), f"{name}: {(ours != theirs).sum()} bytes differ"


def same_bits(one: Any, other: Any) -> bool:
    """Layers' rows are equal to the bit: both are sequences of layers of sequences of rows."""
    try:
        for x, y in zip(one, other, strict=True):
            for p, q in zip(x, y, strict=True):
                assert_same_bits(p, q)
    except (AssertionError, ValueError):
        return False
    return True


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    """Equal but for the order of f32 sums."""
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def start_of(layer: KVLayer, index: int) -> int:
    """Padding that a row began with."""
    assert layer.store is not None
    row = index * getattr(layer.store, "fold", 1)
    return int(layer.store.counters[START, row] - layer.store.state.dropped[row])


def tensors_of(thing: Any) -> list[Tensor]:
    """Every tensor that an object reaches through attributes, lists, tuples and dicts; views of one memory once.

    But for vectors of smoothing, which all caches of a model share.
    """
    found: dict[tuple[Any, ...], Tensor] = {}
    met: set[int] = set()

    def walk(x: Any) -> None:
        if id(x) in met or isinstance(x, KeySmoothing):
            return
        met.add(id(x))
        if isinstance(x, Tensor):
            found[(x.data_ptr(), x.nbytes) if x.nbytes else (id(x),)] = x
        elif isinstance(x, dict):
            for value in x.values():
                walk(value)
        elif isinstance(x, (list, tuple, set, frozenset)):
            for value in x:
                walk(value)
        elif is_dataclass(x) and not isinstance(x, type):
            for field in fields(x):
                walk(getattr(x, field.name))
        elif hasattr(x, "__dict__") and not isinstance(x, type) and not callable(x):
            walk(vars(x))

    walk(thing)
    return list(found.values())


class Questions(TorchDispatchMode):
    """Operations by which the host asks the device: for a number, or for how many a mask has chosen.

    References of kernels may ask on a CPU, as the kernels themselves do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._asks(func.name(), args, kwargs or {}):
            files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
            if not any("/hfkvq/kernels/" in file for file in files):
                self.asked.append(func.name())
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _asks(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "::equal")):
            return True
        index = args[1] if name.startswith("aten::index") and isinstance(args[1], (list, tuple)) else ()
        # Copies to the host, as `tolist` and numbers need them.
        copied = name == "aten::_to_copy" and kwargs.get("device") == torch.device("cpu")
        return copied or any(x is not None and x.dtype == torch.bool for x in index)
