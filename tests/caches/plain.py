"""What a cache must hold, in plain tensors, and a cache beside it that is held to that."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

from hfkvq import MixedKVCache, Scheme, kernels
from hfkvq.caches.attention.interface import hfkvq_attention
from hfkvq.caches.layer_state.smoothing import KeySmoothing
from hfkvq.caches.layers import KVLayer
from hfkvq.caches.schemes.arkv import Arkv
from hfkvq.caches.schemes.eviction import EvictionScheme
from hfkvq.caches.store import KVStore, StoreState
from hfkvq.caches.store.requantize import gather
from hfkvq.kernels.decode import ABSENT, LENGTH, RUNS, START, column_positions
from tests.caches.driver import Module, _stored_row, assert_same_bits, attention, steady, stored
from tests.caches.models import config

LAYERS, HEADS, SHARE, DIM = 2, 2, 2, 32
SIDES = ("keys", "values")

KINDS: dict[str, dict[str, Any]] = {
    "growing": {"graphs": False},
    "ahead": {"graphs": True},
    "fixed": {"graphs": False, "max_cache_len": True},
    "fixed ahead": {"graphs": True, "max_cache_len": True},
    "intercepted": {"attach": False, "graphs": False},
    "intercepted fixed": {"attach": False, "max_cache_len": True, "graphs": False},
    "debug": {"debug": True, "graphs": False},
    "offloaded": {"offloading": True, "graphs": False},
}


@dataclass
class New:
    """Tokens that come: queries (L, B, Hq, t, D), keys and values (L, B, H, t, D), and which are no padding."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    valid: Tensor

    @staticmethod
    def random(seed: int, rows: int, tokens: int, dtype: torch.dtype, plain: bool, valid: Tensor) -> New:
        """Random ones, with channels of unlike size; ``plain``: queries weigh channels alike, whenever they come."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int) -> Tensor:
            return torch.randn(LAYERS, rows, heads, tokens, DIM, generator=generator)

        size = torch.exp(torch.linspace(-1, 1, DIM))
        queries, keys, values = normal(HEADS * SHARE), normal(HEADS) * size + size.flip(0), normal(HEADS)
        # A look at padding shows. A first prompt's mean, which smoothing subtracts, counts the keys of padding.
        junk = ~valid[None, :, None, :, None]
        keys, values = keys.masked_fill(junk, 40.0), values.masked_fill(junk, 200.0)
        queries, keys, values = (x.to(dtype) for x in (steady(queries) if plain else queries, keys, values))
        return New(queries, keys, values, valid)

    @property
    def tokens(self) -> int:
        return self.keys.shape[3]


@dataclass
class Plain:
    """Rows of tokens in the basis in which they are stored.

    Attributes:
        schemes: of the layers.
        hold: newest tokens that stay unsealed.
        given: keys and values of each layer: (B, H, T, D).
        valid: (B, T), columns that are no padding.
        lead: columns of each row before its first token.
        sealed: of each layer and row, keys and values that are sealed.
    """

    schemes: tuple[Scheme, ...]
    hold: int = 0
    given: list[list[Tensor]] = field(default_factory=list)
    valid: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    lead: list[int] = field(default_factory=list)
    sealed: list[list[list[int]]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.valid.shape[0]

    @property
    def length(self) -> int:
        return self.valid.shape[1]

    def layout(self, layer: int) -> Any:
        return self.schemes[layer].layout(DIM, DIM)

    def append(self, new: New, smoothings: list[KeySmoothing | None]) -> None:
        """Leading padding of a row that has no token yet is left out; other padding is its neighbour."""
        rows, tokens = new.valid.shape
        if not self.length:
            self.given = [[new.keys[0, :, :, :0]] * 2 for _ in self.schemes]
            self.valid = torch.zeros(rows, 0, dtype=torch.bool)
            self.lead = [0] * rows
            self.sealed = [[[0, 0] for _ in range(rows)] for _ in self.schemes]
        source = torch.arange(tokens).repeat(rows, 1)
        for row in range(rows):
            real = new.valid[row].nonzero().flatten().tolist()
            if self.lead[row] == self.length:
                self.lead[row] += real[0] if real else tokens
            for at in range(tokens):
                if not new.valid[row, at] and real:
                    source[row, at] = max([x for x in real if x < at], default=real[0])
        for layer in range(len(self.schemes)):
            form = self.layout(layer).store
            for side, block in enumerate((form.rotate_keys, form.rotate_values)):
                x, smoothing = (new.keys, new.values)[side][layer], smoothings[layer]
                x = smoothing.keys(x) if smoothing is not None and side == 0 else x
                x = x.gather(2, source[:, None, :, None].expand_as(x))
                self.given[layer][side] = torch.cat([self.given[layer][side], kernels.hadamard(x, block)], 2)
        self.valid = torch.cat([self.valid, new.valid], 1)
        self.seal()

    def seal(self) -> None:
        """What has left the windows is sealed."""
        for layer in range(len(self.schemes)):
            layout = self.layout(layer)
            for row, sealed in enumerate(self.sealed[layer]):
                rest = max(self.length - self.lead[row] - layout.sink, 0)
                for side, own in enumerate((layout.keys, layout.values)):
                    out = max(rest - max(own.local, self.hold), 0)
                    sealed[side] = max(sealed[side], out - out % own.unit)

    def crop(self, tokens: int) -> None:
        left = self.length - tokens
        self.valid = self.valid[:, :left]
        self.lead = [min(lead, left) for lead in self.lead]
        for layer in range(len(self.schemes)):
            self.given[layer] = [x[:, :, :left] for x in self.given[layer]]
            layout = self.layout(layer)
            for row, sealed in enumerate(self.sealed[layer]):
                rest = max(left - self.lead[row] - layout.sink, 0)
                for side, own in enumerate((layout.keys, layout.values)):
                    sealed[side] = min(sealed[side], rest - rest % own.unit if layout.store.ordered else rest)
        self.seal()

    def take_rows(self, rows: Tensor) -> None:
        self.valid = self.valid[rows]
        self.lead = [self.lead[i] for i in rows.tolist()]
        self.given = [[x[rows] for x in sides] for sides in self.given]
        self.sealed = [[list(layer[i]) for i in rows.tolist()] for layer in self.sealed]

    def reset(self) -> None:
        self.given, self.valid, self.lead, self.sealed = [], torch.zeros(0, 0, dtype=torch.bool), [], []

    def copy(self) -> Plain:
        return replace(
            self,
            given=[list(sides) for sides in self.given],
            lead=list(self.lead),
            sealed=[[list(row) for row in layer] for layer in self.sealed],
        )


class Subject:
    """A cache and what it must hold.

    Attributes:
        exact: whether it must hold the bits that others hold: not once an interrupted forward has kept its queries.
    """

    def __init__(self, kind: str, schemes: tuple[Scheme, ...], capacity: int) -> None:
        self.kind, self.config = kind, config("llama", num_hidden_layers=LAYERS)
        # As of a model that has been loaded.
        self.config._attn_implementation = "sdpa"
        self.evicts = any(scheme.evicts for scheme in schemes)
        self.options = {**KINDS[kind]}
        self.capacity = capacity if self.options.pop("max_cache_len", False) else None
        if self.evicts:
            # Tokens leave pages on the device alone.
            self.options.pop("offloading", None)
        layers: dict[str | int, Any] = {i: scheme for i, scheme in enumerate(schemes) if i and scheme != schemes[0]}
        self.cache = MixedKVCache(self.config, schemes[0], layers=layers, max_cache_len=self.capacity, **self.options)
        own = tuple(scheme.in_layer(i, len(schemes)) for i, scheme in enumerate(schemes))
        self.plain, self.exact, self.module = Plain(own), True, Module()
        # Whether tokens have been taken back, or may be, and whether the last ones still wait, or what is due of them.
        self.cropped = self.waits = False
        self.module.config = self.config  # type: ignore[assignment]

    # A forward.

    def forward(self, new: New, watch: bool = False, seen: bool = True) -> None:
        """All layers, as a model calls them.

        Args:
            new: tokens.
            watch: compare what comes out with plain attention over what is held.
            seen: whether attention comes; else the next update does what is left.
        """
        plain = self.plain
        # What waits is stored, and what is due sealed, before the new tokens are attended to.
        held = self.settled().compressed_layers if watch else self.layers
        before = [[x.dense(side).clone() for side in SIDES] for x in held] if watch and plain.length else None  # type: ignore[arg-type]
        valid = torch.cat([plain.valid, new.valid], 1) if plain.length else new.valid
        mask2d = None if bool(valid.all()) else valid.long()
        embeds = torch.empty(valid.shape[0], new.tokens, 1, dtype=new.keys.dtype)
        mask = create_causal_mask(self.config, embeds, mask2d, self.cache)
        # Where tokens have been evicted, all but steps are stored, and what is due sealed, before they are attended to.
        within = (valid.cumsum(1) > 0)[:, plain.length :]
        quantized = new.tokens > 16 or bool((within & ~new.valid).any())
        hidden = [bool(layer.evicted) and quantized for layer in held]
        for i in range(LAYERS):
            keys, values = self.cache.update(new.keys[i], new.values[i], i)
            if not seen:
                continue
            out = self.attend(new.queries[i], keys, values, mask)
            if watch and not hidden[i]:
                self.check_output(i, out, new, None if before is None else before[i], valid)
        plain.append(new, [layer.smoothing for layer in self.layers])
        self.waits = not seen

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """(B, t, Hq, D)."""
        scaling = DIM**-0.5
        if self.kind.startswith("intercepted"):
            return sdpa_attention_forward(self.module, query, keys, values, mask, scaling=scaling)[0]
        return hfkvq_attention(self.module, query, keys, values, mask, scaling=scaling)[0]

    def check_output(self, layer: int, out: Tensor, new: New, before: Any, valid: Tensor) -> None:
        """What came out is attention over what was held, and the new tokens as they came."""
        given = new.keys[layer], new.values[layer]
        held = given if before is None else [torch.cat([a, b], 2) for a, b in zip(before, given, strict=True)]
        columns, tokens = valid.shape[1], new.tokens
        causal = torch.ones(tokens, columns, dtype=torch.bool).tril(columns - tokens)
        shown = causal & valid[:, None, None]
        if before is not None:
            # Evicted tokens are zeros.
            gone = (before[0] == 0).all(-1) & (before[1] == 0).all(-1)
            gone = torch.nn.functional.pad(gone, (0, tokens)).repeat_interleave(SHARE, 1)
            shown = shown & ~gone[:, :, None]
        expected = attention(new.queries[layer], held[0], held[1], shown, DIM**-0.5).transpose(1, 2)
        real = new.valid
        loose = 2e-5 if out.dtype == torch.float32 else 3e-2
        if self.layers[layer].smoothing is not None:
            # Padding of 200 moves the mean of a first prompt's keys, and numbers far from zero are rounded coarsely.
            loose *= 8
        torch.testing.assert_close(out[real], expected[real], rtol=loose, atol=loose)

    # What it holds.

    @property
    def layers(self) -> list[KVLayer]:
        return self.cache.compressed_layers

    def settled(self) -> MixedKVCache:
        """A copy with nothing left to do."""
        cache = copy.deepcopy(self.cache)
        for layer in cache.compressed_layers:
            layer.settle()
        return cache

    def bits(self) -> list[list[dict[str, Tensor]]]:
        """Of layers and rows."""
        layers = self.settled().compressed_layers
        return [[stored(layer, i) for i in range(layer.batch_size)] if layer.seen else [] for layer in layers]

    def check(self) -> None:
        """Lengths, masks and tokens are those of the plain tensors."""
        plain = self.plain
        assert int(self.cache.get_seq_length()) == plain.length
        if not plain.length:
            return
        cache = self.settled()
        cache.integrity_check()
        for i, layer in enumerate(cache.compressed_layers):
            assert layer.batch_size == plain.rows
            scheme = plain.schemes[i]
            if isinstance(scheme, EvictionScheme):
                self.check_evicting(i, layer, scheme)
            else:
                self.check_layer(i, layer)

    def check_layer(self, index: int, layer: KVLayer) -> None:
        """No token is gone, those in 16 bits are as they came, and the others within half a step of their page."""
        plain, store = self.plain, layer.held()
        counters = store.counters.tolist()
        assert counters[START] == plain.lead, "padding"
        assert counters[LENGTH] == [plain.length - lead for lead in plain.lead], "lengths"
        for side in (0, 1):
            sealed = [sum(row) for row in zip(*counters[RUNS + side :: 2], strict=True)]
            assert sealed == [row[side] for row in plain.sealed[index]], f"sealed {SIDES[side]}"
            where, got, step = _held(store.state, side)
            if any(pair[side].fit for pair in store.format.runs):
                # A fitted scale cuts off what is rare.
                step = step * 32
            column = (where + torch.tensor(plain.lead)[:, None]).clamp(0, plain.length - 1)
            expected = plain.given[index][side]
            expected = expected.gather(2, column.long()[:, None, :, None].expand(-1, HEADS, -1, DIM)).float()
            paged = torch.zeros(where.shape[1], dtype=torch.bool)
            paged[store.layout.sink : where.shape[1] - store.windows[2 + side].shape[2]] = True
            if any(pair[side].trellis for pair in store.format.runs):
                # Walks have no step: errors are bounded by twice the largest number of the channel.
                step = 4 * expected.abs().amax(2, keepdim=True) * paged[:, None]
            _assert_within(got, expected, step, (where > ABSENT)[:, None, :, None], paged[:, None])

    def check_evicting(self, index: int, layer: KVLayer, scheme: EvictionScheme) -> None:
        """Tokens held are some of those given, in order, the newest among them; none is gone without need."""
        plain, store = self.plain, layer.held()
        counters = store.counters.tolist()
        hold = plain.hold
        for row in range(store.batch):
            b = row // HEADS
            given = plain.length - plain.lead[b]
            held = counters[LENGTH][row]
            assert counters[START][row] == plain.length - held
            assert held <= given
            # The last trim may have been at any length, and budgets may have grown by more than a token for each since.
            at = torch.arange(given + 1)
            least = int((scheme.room(at, at, index, LAYERS, hold) + given - at).min())
            if not isinstance(scheme, Arkv) and not self.cropped:
                assert held >= least
            if held == given:
                assert int(store.state.dropped[row]) == 0
            if not held or not bool(plain.valid[b, plain.lead[b] :].all()):
                # Padding among tokens is like its neighbours.
                continue
            found = self.found(index, store.state, row, held)
            assert bool((found[1:] > found[:-1]).all()), "tokens are those given, in order"
            newest = 0 if self.cropped else min(scheme.window, held)
            assert found[held - newest :].tolist() == list(range(given - newest, given)), "the newest are there"

    def found(self, index: int, state: StoreState, row: int, held: int) -> Tensor:
        """Which of a row's tokens those are that a row of the store holds, oldest first."""
        b, head = divmod(row, HEADS)
        here, given = [], []
        for side in (0, 1):
            where, got, _ = _held(state, side)
            there = (where[row] > ABSENT).nonzero()[:, 0]
            order = there[where[row, there].argsort()]
            # Tiers keep the columns that tokens had.
            assert len(order) == held
            if state.format.ordered:
                assert where[row, order].tolist() == list(range(held))
            here.append(got[row, 0, order])
            given.append(self.plain.given[index][side][b, head, self.plain.lead[b] :].float())
        return torch.cdist(torch.cat(here, 1), torch.cat(given, 1)).argmin(1)

    def adopt(self) -> None:
        """After a crop: tokens that have come back from pages are what these had of them."""
        plain, self.cropped = self.plain, True
        if not plain.length:
            return
        for i, layer in enumerate(self.layers):
            if plain.schemes[i].evicts or not plain.layout(i).store.ordered:
                continue
            state = layer.held().state
            for side in (0, 1):
                where, got, _ = _held(state, side)
                ring = state.windows[2 + side].shape[2]
                x = plain.given[i][side] = plain.given[i][side].clone()
                for row, lead in enumerate(plain.lead):
                    own = where[row, -ring:] if ring else where[row, :0]
                    there = own > ABSENT
                    x[row, :, lead + own[there].long()] = got[row, :, -ring:][:, there].to(x.dtype)

    def check_rebuilt(self) -> None:
        """Each row's bits are those of its tokens, given at once to nobody but it."""
        plain = self.plain
        for i, layer in enumerate(self.settled().compressed_layers):
            if not plain.length or plain.schemes[i].evicts:
                continue
            layout, scheme = plain.layout(i), plain.schemes[i]
            bare = replace(layout, keys=replace(layout.keys, rotate=0), values=replace(layout.values, rotate=0))
            for row, lead in enumerate(plain.lead):
                keys, values = (x[row : row + 1, :, lead:] for x in plain.given[i])
                if not keys.shape[2]:
                    continue
                alone = KVStore(bare, scheme, keys, values)
                weights = None
                if "query" in scheme.needs:
                    weights = steady(torch.ones(1, HEADS, 1, DIM)).mean(2)
                alone.extend(keys, values, None, plain.hold, weights)
                expected, got = _stored_row(alone, 0), stored(layer, row)
                # After a crop more may be sealed than of these tokens at once.
                if got["counts"].tolist() == expected["counts"].tolist():
                    assert_same_bits(got, expected)


def _held(state: StoreState, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row positions (B, N) of the columns of `sink | runs | tail`, what they hold, and the step of its codes."""
    name, tail = SIDES[side], state.windows[2 + side].shape[2]
    where = column_positions(state.format, state.counters, state.runs, tail, name)  # type: ignore[arg-type]
    columns = torch.arange(where.shape[1]).expand_as(where)
    runs = range(len(state.runs))

    def values(of: StoreState) -> Tensor:
        return gather(of, name, columns, runs).float()  # type: ignore[arg-type]

    return where, values(state), (values(_coded(state, side, 1)) - values(_coded(state, side, 0))).abs()


def _coded(state: StoreState, side: int, code: int) -> StoreState:
    """The same with one code in place of all."""
    runs = []
    for view, pair in zip(state.runs, state.format.runs, strict=True):
        fmt, parts = pair[side], []
        for name, part in zip(fmt.names, (view.keys, view.values)[side], strict=True):
            if name == "codes" and fmt.bits < 8 and not fmt.trellis:
                part = torch.full_like(part, code * {2: 0x5555, 4: 0x1111}[fmt.bits])
            elif name == "codes" and fmt.bits == 8:
                # Half a step of fp8 is 1/16 of the number, or of its least normal one.
                step = part.float().abs().clamp(min=2.0**-6) / 8
                part = (step * code).to(part.dtype) if code else torch.zeros_like(part)
            elif name == "high":
                part = torch.zeros_like(part)
            parts.append(part)
        runs.append(replace(view, **{SIDES[side]: tuple(parts)}))
    return state.replace(runs=runs)


def _assert_within(got: Tensor, expected: Tensor, step: Tensor, there: Tensor, paged: Tensor) -> None:
    """Half a step, and what rounding scale and minimum to float16 costs; in windows nothing."""
    rounded = torch.where(paged, 2.0**-10 * (expected.abs() + 16 * step), 1e-6 * (1 + expected.abs()))
    wrong = ((got - expected).abs() > step / 2 + rounded) | ~got.isfinite()
    wrong = wrong & there
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(wrong.sum())} numbers are wrong, the first at {at}: {float(got[tuple(at)])} for "
            f"{float(expected[tuple(at)])}, step {float(step[tuple(at)])}"
        )
