"""Stores in known states, and attention over what they hold, written without the code under test."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hfkvq.kernels import PageFormat, RunView, StoreFormat, dequantize_pages, quantize_pages


@contextlib.contextmanager
def launch_parameters(kernel: str, **knobs: int) -> Iterator[None]:
    """Within this context all variants of a kernel have these launch parameters."""
    from hfkvq.kernels.triton import configs

    merged = configs._merged

    def changed(device: torch.device, name: str, key: str) -> dict[str, int]:
        return merged(device, name, key) | (knobs if name == kernel else {})

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(configs, "_merged", changed)
            configs.renew()
            yield
    finally:
        configs.renew()


def numbers(*values: int) -> Tensor:
    """Numbers, i32."""
    return torch.tensor(values, dtype=torch.int32)


def on(device: torch.device, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors on a device."""
    return [x.to(device) for x in tensors]


def poison(x: Tensor) -> Tensor:
    """Fills memory with the bits of NaN: what an uninitialized page may hold."""
    x.view(torch.uint8).fill_(0xFF)
    return x


def spoil(name: str, x: Tensor, fmt: PageFormat) -> Tensor:
    """Fills a page's tensor with what empty slots may hold: scales and zeros of single tokens are no NaN."""
    if name in ("scale", "zero") and fmt.bits < 8 and not fmt.whole:
        return x.fill_(6e4)
    return poison(x)


@functools.cache
def sylvester(order: int) -> Tensor:
    """Hadamard matrix over sqrt(order), by its definition: the sign is the parity of the common bits."""
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(order)] for i in range(order)]
    return torch.tensor(signs, dtype=torch.float64) / order**0.5


def rotate(x: Tensor, block: int) -> Tensor:
    """Blocks of the last axis times the Hadamard matrix, which is its own inverse."""
    return (x.double().unflatten(-1, (-1, block)) @ sylvester(block)).flatten(-2) if block else x.double()


@dataclass
class Case:
    """One layer in some state; every list has one entry a row."""

    runs: str = "2c32p32/2t64p32"
    heads: int = 2
    share: int = 2
    queries: int = 1
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    sink: int = 4
    tail: tuple[int, int] = (40, 40)
    pages: int = 4
    # Tokens stored, leading padding, keys and values sealed of each run.
    lengths: list[int] = field(default_factory=lambda: [4 + 64 + 17, 4 + 32 + 3])
    starts: list[int] = field(default_factory=lambda: [0, 11])
    keys: list[list[int]] = field(default_factory=lambda: [[64], [32]])
    values: list[list[int]] = field(default_factory=lambda: [[70], [32]])
    rotate_keys: int = 0
    rotate_values: int = 0
    # Tokens that a query sees, 0 for all.
    window: int = 0

    @property
    def store(self) -> StoreFormat:
        formats = tuple(tuple(PageFormat.parse(spec) for spec in pair.split("/")) for pair in self.runs.split("|"))
        return StoreFormat(formats, self.sink, self.rotate_keys, self.rotate_values, window=self.window)


@dataclass
class Layer:
    """The tensors of a case as operations take them, and the dense keys and values that they stand for."""

    case: Case
    q: Tensor
    counters: Tensor
    windows: list[Tensor]
    runs: list[Tensor]
    # (B, H, longest row, D), float64, rotated back; by row position.
    dense_keys: Tensor
    dense_values: Tensor

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Query, counters, windows and runs on a device."""
        q, counters = self.q.to(device), self.counters.to(device)
        return q, counters, [x.to(device) for x in self.windows], [x.to(device) for x in self.runs]


def _order(case: Case, row: int) -> list[Tensor]:
    """Row positions of each run's tokens: in order for one run, dealt out at random for several."""
    sealed = [max(k, v) for k, v in zip(case.keys[row], case.values[row], strict=True)]
    if len(sealed) == 1:
        return [torch.arange(sealed[0]) + case.sink]
    # What is sealed of keys only (or of values only) is the newest of all sealed tokens.
    both = [min(k, v) for k, v in zip(case.keys[row], case.values[row], strict=True)]
    old = torch.randperm(sum(both)).split(both)
    new = torch.randperm(sum(sealed) - sum(both)) + sum(both)
    new = new.split([a - b for a, b in zip(sealed, both, strict=True)])
    return [torch.cat([a.sort().values, b.sort().values]) + case.sink for a, b in zip(old, new, strict=True)]


def build(case: Case, seed: int = 0, change: Callable[[str, Tensor], Tensor] | None = None) -> Layer:
    """Puts random tokens where the case says they are; everything else holds NaN, or see `spoil`.

    So do pages that no query sees anything of.

    ``change`` may replace what a side ("keys" or "values") is given, f32 (B, H, L, D).
    """
    torch.manual_seed(seed)
    store, batch, longest = case.store, len(case.lengths), max(case.lengths)
    sides = {}
    for side, dim in (("keys", case.head_dim), ("values", case.value_dim)):
        x = torch.randn(batch, case.heads, longest, dim) * torch.rand(dim).mul(3).exp() / 4
        sides[side] = (x if change is None else change(side, x)).to(case.dtype)
    orders = [_order(case, row) for row in range(batch)]

    flat: list[Tensor] = []
    views: list[RunView] = []
    pool, device = batch * case.pages + 3, torch.device("cpu")
    for i, (fmt_k, fmt_v) in enumerate(store.runs):
        table = torch.randperm(pool)[: batch * case.pages].view(batch, case.pages).int()
        pos = poison(torch.empty(batch, case.pages * fmt_k.page_size, dtype=torch.int32))
        for row in range(batch):
            pos[row, : len(orders[row][i])] = orders[row][i]
        parts = [
            [
                spoil(name, x, fmt)
                for name, x in zip(
                    fmt.names, fmt.allocate(side, pool, case.heads, dim, case.dtype, device), strict=True
                )
            ]
            for side, fmt, dim in (("keys", fmt_k, case.head_dim), ("values", fmt_v, case.value_dim))
        ]
        views.append(RunView(table, None if store.ordered else pos, *parts))
        flat += views[-1].flat()

    dense, windows = {}, {}
    for at, (side, tail) in enumerate(zip(sides, case.tail, strict=True)):
        x = sides[side]
        known = x.float()
        sink = poison(torch.empty(batch, case.heads, case.sink, x.shape[-1], dtype=case.dtype))
        ring = poison(torch.empty(batch, case.heads, tail, x.shape[-1], dtype=case.dtype))
        for row in range(batch):
            length = case.lengths[row]
            sink[row, :, :length] = x[row, :, : min(length, case.sink)]
            counts = getattr(case, side)[row]
            newest = torch.arange(case.sink + sum(counts), max(length, case.sink + sum(counts)))
            assert len(newest) <= tail, "the case does not fit its tail"
            ring[row, :, (newest - case.sink) % tail] = x[row, :, newest]
            for i, count in enumerate(counts):
                _put(views[i], store.runs[i][at], side, row, orders[row][i][:count], x, known)
        windows[side] = (sink, ring)
        dense[side] = rotate(known, case.rotate_keys if side == "keys" else case.rotate_values)

    for row, length in enumerate(case.lengths):
        gone = max(length - case.queries - case.window + 1 - case.sink, 0) // store.runs[0][0].page_size
        for part in (*views[0].keys, *views[0].values) if case.window else ():
            own = part.view(torch.uint8) if part.element_size() == 1 else part
            own[views[0].table[row, :gone].long()] = poison(own[:1].clone())
    counters = [case.starts, case.lengths]
    for i in range(len(store.runs)):
        counters += [[row[i] for row in case.keys], [row[i] for row in case.values]]
    q = torch.randn(batch, case.queries, case.heads * case.share, case.head_dim).to(case.dtype).transpose(1, 2)
    return Layer(
        case,
        q,
        torch.tensor(counters, dtype=torch.int32),
        [windows["keys"][0], windows["values"][0], windows["keys"][1], windows["values"][1]],
        flat,
        dense["keys"],
        dense["values"],
    )


def _put(view: RunView, fmt: PageFormat, side: str, row: int, positions: Tensor, x: Tensor, known: Tensor) -> None:
    """Quantizes tokens of a row into its pages, and notes in ``known`` what they have become."""
    parts = view.keys if side == "keys" else view.values
    page = fmt.page_size
    for block in range(-(-len(positions) // page)):
        chosen = positions[block * page : (block + 1) * page]
        tokens = x[row : row + 1, :, chosen]
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, page - len(chosen)))
        widths = None
        if fmt.raised:
            widths = torch.tensor([fmt.bits, *dict(fmt.raised)])[torch.randint(0, 1 + len(fmt.raised), x.shape[1::2])]
            widths = widths.to(torch.uint8)[None]
        norm = None
        if fmt.normed:
            size = page if fmt.axis == "channel" else x.shape[-1]
            norm = torch.rand(1, x.shape[1], size).add(0.5).half()
        made = quantize_pages(tokens, fmt, side, widths, norm)
        known[row, :, chosen] = dequantize_pages(made, fmt, side, x.shape[-1])[0, :, : len(chosen)]
        for name, part, new in zip(fmt.names, parts, made, strict=True):
            own = part[view.table[row, block].long()]
            # Slots that are not sealed keep their NaN; what has no token axis is written whole.
            axis = {"full_index": None, "high_index": None, "high": None, "norm": None, "full": 1}.get(name, 1)
            if name in ("scale", "zero"):
                axis = None if fmt.axis == "channel" else 2
            elif name == "codes" and side == "values" and fmt.bits < 8:
                axis = 2
            if axis is None or fmt.trellis:
                own.copy_(new[0])
            else:
                own.narrow(axis, 0, len(chosen)).copy_(new[0].narrow(axis, 0, len(chosen)))


def attend(
    layer: Layer,
    dtype: torch.dtype,
    scaling: float,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Plain attention in ``dtype`` over the dense keys and values, as an eager model computes it: (B, Hq, Q, Dv)."""
    case, q = layer.case, layer.q.to(dtype)
    keys = layer.dense_keys.to(dtype).repeat_interleave(case.share, 1)
    values = layer.dense_values.to(dtype).repeat_interleave(case.share, 1)
    wide = torch.promote_types(dtype, torch.float32)
    logits = (q @ keys.transpose(-1, -2)).mul(scaling)
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    rows = []
    for row, (length, start) in enumerate(zip(case.lengths, case.starts, strict=True)):
        own = logits[row, :, :, :length].to(wide)
        newest = length - case.queries + torch.arange(case.queries)
        if case.window:
            own = own.masked_fill(torch.arange(length) <= newest[:, None] - case.window, -torch.inf)
        if mask is None:
            own = own.masked_fill(torch.arange(length) > newest[:, None], -torch.inf)
        else:
            shown = mask.expand(len(case.lengths), -1, -1, -1)[row, :, :, start : start + length]
            own = own + shown.to(wide) if mask.is_floating_point() else own.masked_fill(shown == 0, -torch.inf)
        if sinks is not None:
            own = torch.cat([own, sinks.to(wide)[:, None, None].expand(-1, case.queries, 1)], -1)
        probs = torch.softmax(own, -1).nan_to_num(0.0)[..., :length].to(dtype)
        rows.append(probs @ values[row, :, :length])
    return torch.stack(rows)


def assert_as_good_as_torch(got: Tensor, exact: Tensor, plain: Tensor) -> None:
    """The error against float64 is at most twice that of plain torch attention in the same dtype."""
    got, exact, plain = got.double().cpu(), exact.double(), plain.double()
    assert torch.isfinite(got).all()
    floor = 1e-6 * exact.square().mean().sqrt()
    error, allowed = (got - exact).square().mean().sqrt(), 2 * (plain - exact).square().mean().sqrt() + floor
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
