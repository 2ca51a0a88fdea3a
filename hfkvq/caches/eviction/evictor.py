"""Evictor of a layer, for any scheme that evicts: keeps the queries that judge tokens, and scores' history.

Two kinds of tokens are judged. Those that a store holds, by `stored_evidence`; and those of a first prompt beyond its
budget, of which `choose` names the ones that stay before anything is stored. These are handed to the store as if they
were the whole prompt, so any layout takes them, and they are quantized once, from what the model gave. The host knows
how many tokens a row keeps, and asks the device nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import ABSENT, LENGTH, START, column_positions, run_count
from hfkvq.kernels.masks import fold_mask
from hfkvq.kernels.pages import Side

from ..base.recorded import Group
from ..layer_state.base import LayerBase, Part, unchanged_on_error
from ..schemes.eviction import EvictionScheme
from ..schemes.score_inputs import ELEMENTS, Attention, Evidence, Kind, keep_columns, keep_mask, prompt_evidence
from ..store import MAX_STEP, SIDES, Padding, StoreState
from ..store.kvstore import KVStore
from ..store.packing import Packed
from ..store.requantize import gather


@dataclass(frozen=True, slots=True)
class QueryWindow:
    """The newest queries of an attention call, and what the call was given with them.

    Attributes:
        query: (B, Hq, Q, D), after RoPE, not scaled; their keys are in the store by the time it is looked at.
        real: bool (B, Q), queries that are no padding.
        arguments: of the call, as `kernels.decode_attention` takes them.
        prompt: bool (B,), rows for which the input was a prompt, by which layers are compared; None if for none.
    """

    query: Tensor
    real: Tensor
    arguments: AttentionArguments
    prompt: Tensor | None


def token_order(store: KVStore | StoreState, where: Tensor) -> Tensor:
    """Columns of each row's tokens, oldest first: i64 (B*H, n), n the longest row; anything behind a row's end.

    ``where`` is what `positions` says.
    """
    last = torch.iinfo(torch.int32).max
    return torch.where(where > ABSENT, where, last).argsort(1)[:, : store.longest]


def stored_evidence(
    kinds: Collection[Kind], store: KVStore, seen: QueryWindow, where: Tensor, order: Tensor
) -> Iterator[tuple[slice, Evidence]]:
    """Evidence of what is stored, the queries' own tokens included, a few folded rows at a time, and which rows.

    Nothing is computed but what is asked for. Keys, values and queries are in the basis of the store, which keeps
    products and norms; nobody pays a token that no query sees.
    """
    query, real = store.folded(seen.query), seen.real.repeat_interleave(store.fold, 0)
    if kinds:
        query = kernels.hadamard(query.float(), store.format.rotate_keys)
    # A step whose query nobody asks for has none.
    rows, (_, share, queries, _) = store.batch, query.shape
    length, columns = store.counters[LENGTH].long(), order.shape[1]
    tokens: dict[Side, Tensor] = {}
    for side in SIDES:
        if side in kinds:
            own = order
            if side == "values":
                form, tail = store.format, store.windows[3].shape[2]
                own = token_order(store, column_positions(form, store.counters, store.runs, tail, side))
            tokens[side] = gather(store.state, side, own, range(len(store.runs)))[:, 0]
    asks = bool({"attention", "received"} & set(kinds))
    # All queries of a long prompt would take too much memory at once.
    most = max(1, ELEMENTS // (share * where.shape[1])) if "received" in kinds else queries
    at_once = max(1, ELEMENTS // (share * min(queries, most) * where.shape[1])) if asks else rows
    for first in range(0, rows, at_once):
        own = slice(first, min(first + at_once, rows))
        paid = received = None
        if asks:
            paid, received = _paid(store, seen, query[own], real[own], where[own], order[own], own, most)
        yield (
            own,
            Evidence(
                length=length[own],
                columns=columns,
                scaling=seen.arguments.scaling,
                attention=paid,
                received=received if "received" in kinds else None,
                queries=query[own] if "queries" in kinds else None,
                real=real[own] if "queries" in kinds else None,
                keys=tokens["keys"][own] if "keys" in tokens else None,
                values=tokens["values"][own] if "values" in tokens else None,
            ),
        )


def _paid(
    store: KVStore,
    seen: QueryWindow,
    query: Tensor,
    real: Tensor,
    where: Tensor,
    order: Tensor,
    own: slice,
    most: int,
) -> tuple[Attention | None, Tensor]:
    """Attention of folded rows' queries, ``most`` queries at a time: as it is if at once, and the sum."""
    sinks, queries, total = seen.arguments.sinks, query.shape[2], None
    if sinks is not None:
        # f32 (B*H, r), of folded rows.
        sinks = sinks.float().view(store.fold, -1).repeat(store.batch // store.fold, 1)
    paid = None
    for first in range(0, queries, most):
        last = min(first + most, queries)
        x = _logits(store, seen, query[:, :, first:last], where, order, own, first - queries)
        paid = Attention.of(x, None if sinks is None else sinks[own], real[:, first:last])
        part = paid.mean * paid.count[:, None, None]
        total = part if total is None else total + part
    assert total is not None, "somebody asks"
    return paid if queries <= most else None, total


def _logits(
    store: KVStore, seen: QueryWindow, query: Tensor, where: Tensor, order: Tensor, own: slice, first: int
) -> Tensor:
    """Logits of some queries of folded rows, the first counted from the end, over all tokens: f32 (N, r, Q, n)."""
    count, share, queries, _ = query.shape
    q = query.mul(seen.arguments.scaling).flatten(1, 2)[:, None]
    logits = [q @ store.windows[0][own].float().transpose(-1, -2)]
    for i, (view, (fmt, _)) in enumerate(zip(store.runs, store.format.runs, strict=True)):
        sealed = run_count(store.counters, i, "keys")[own].contiguous()
        logits.append(kernels.qk_pages(q, view.table[own].contiguous(), sealed, view.keys, fmt))
    logits.append(q @ store.windows[2][own].float().transpose(-1, -2))
    x = torch.cat(logits, -1).view(count, share, queries, -1)
    x = x.gather(-1, order[:, None, None].expand(-1, share, queries, -1))
    if seen.arguments.softcap:
        x = torch.tanh(x / seen.arguments.softcap) * seen.arguments.softcap
    place = where.gather(1, order)
    visible = (place > ABSENT)[:, None, None]
    mask = fold_mask(seen.arguments.mask, seen.query.shape[0], store.fold)
    if mask is None:
        newest = store.counters[LENGTH, own, None] + first + torch.arange(queries, device=q.device)
        visible = visible & (place[:, None] <= newest[..., None])[:, None]
    else:
        column = (place + store.counters[START, own, None]).clamp(0, mask.shape[-1] - 1).long()
        shown = (mask if mask.shape[0] == 1 else mask[own]).expand(count, -1, -1, -1)
        if shown.shape[2] > 1:
            shown = shown[:, :, first:][:, :, :queries]
        shown = shown.gather(-1, column[:, None, None].expand(-1, *shown.shape[1:3], -1))
        if mask.is_floating_point():
            x = x + shown
        else:
            visible = visible & shown.bool()
    return x.masked_fill(~visible, -torch.inf)


class Choice(NamedTuple):
    """Choice of a first prompt's tokens, as `KVStore.extend` takes it.

    Attributes:
        keys: (B, H, n, Dk), each KV head's own tokens, in order; so are ``values``.
        columns: i64 (B*H, n), of the prompt, where these tokens stand.
        scores: f32 (B*H, n), of the same tokens.
        padding: rows that keep fewer than n tokens begin with padding; None where none does.
        shorter: columns by which every row is shorter than the prompt: ``start`` is to be greater by so many.
        evicted: i32 (B,), tokens of each row that are gone.
        rows: what rows may be like: tokens given, and tokens that stay.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor
    scores: Tensor
    padding: Padding | None
    shorter: int
    evicted: Tensor
    rows: frozenset[tuple[int, int]]


def choose(
    scheme: EvictionScheme,
    layer: int,
    layers: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    arguments: AttentionArguments,
    *,
    hold: int = 0,
    padding: Padding | None = None,
) -> Choice | None:
    """The tokens of a first prompt that stay; None where all do, or where padding stands among tokens.

    Where every step is judged, scores are wanted even if all tokens stay.

    Args:
        query: (B, Hq, Q, D), after RoPE: all queries, or the newest ``scheme.queries`` where nobody asks for more.
        keys: (B, H, T, Dk), as the model gave them; so are ``values``.
        hold: newest tokens that have to stay, beyond the scheme's window.
    """
    heads, tokens = keys.shape[1:3]
    if padding is not None and padding.source is not None:
        return None
    lengths = torch.tensor(
        [tokens - lead for lead in ([0] if padding is None else padding.amounts)], dtype=torch.int64, device="cpu"
    )
    rooms: list[int] = scheme.room(lengths, lengths, layer, layers, hold).tolist()
    # Rows of padding alone have nothing to choose from.
    if not max(rooms) or (rooms == lengths.tolist() and not scheme.asks_every_step):
        return None
    lead = None if padding is None else padding.lead.to(keys.device).long()
    parts = [
        scheme.scores(found)
        for _, found in prompt_evidence(scheme.evidence, scheme.queries, query, keys, values, arguments, lead)
    ]
    scores, most, newest = shared(scheme, torch.cat(parts), heads), max(rooms), max(scheme.window, hold)
    if lead is None:
        return keep(scores, keys, values, most, scheme.first, newest)
    length = tokens - lead
    room = scheme.room(length, length, layer, layers, hold)
    folded = [x.repeat_interleave(heads) for x in (length, room, lead)]
    stays = keep_mask(scores, folded[0], folded[1], scheme.first, newest)
    # Kept tokens come last, in order; columns before them in shorter rows are padding now.
    rank = stays.to(torch.int8).argsort(dim=1, stable=True)[:, -most:]
    columns = (rank + folded[2][:, None]).clamp(max=tokens - 1)
    after = Padding((most - room).int(), frozenset(most - own for own in rooms), None)
    rows = frozenset(zip(lengths.tolist(), rooms, strict=True))
    evicted = (length - room).int()
    return Choice(
        *_gathered(columns, keys, values), columns, scores.gather(1, rank), after, tokens - most, evicted, rows
    )


def keep(scores: Tensor, keys: Tensor, values: Tensor, room: int, first: int, newest: int) -> Choice:
    """The tokens of highest score (f32 (B*H, T)) of a prompt without padding; arguments as of `keep_columns`."""
    (batch, _, tokens, _), columns = keys.shape, keep_columns(scores, room, first, newest)
    evicted = torch.full((batch,), tokens - room, dtype=torch.int32, device=keys.device)
    sides, rows = _gathered(columns, keys, values), frozenset({(tokens, room)})
    return Choice(*sides, columns, scores.gather(1, columns), None, tokens - room, evicted, rows)


def _gathered(columns: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, n, D) of each head's columns, i64 (B*H, n)."""
    index = columns.view(*keys.shape[:2], -1, 1)
    keys, values = (x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (keys, values))
    return keys, values


def shared(scheme: EvictionScheme, scores: Tensor, heads: int) -> Tensor:
    """Scores (B*H, n) by which heads choose: the mean of all of a row where the scheme says that they are alike."""
    if not scheme.alike:
        return scores
    by_row = scores.unflatten(0, (-1, heads))
    return by_row.mean(1, keepdim=True).expand_as(by_row).flatten(0, 1)


S = TypeVar("S", bound=EvictionScheme)
E = TypeVar("E", bound="Eviction[Any]")


class Eviction(Part, Generic[S]):
    """Holds a layer to a budget of tokens, each KV head its own; `TokenEvictor` and `TierEvictor` say how.

    A prompt beyond the budget is cut to its best tokens in each layer as it passes, so only one layer at a time holds
    it whole. Later input of up to 16 tokens is a step: a trim is due when a row has outgrown its budget, and asks the
    newest queries. Attention functions that know no handles never show their queries; then nothing is evicted.

    Attributes:
        group: the cache's layers that evict in the same way.
        place: index of the layer in the model, and the model's layers.
        pending: queries by which tokens are to be judged once all of them are stored.
        scores: f32 (B*H, n), oldest token first, NaN where a token has none: while they are needed.
        trim_at: tokens seen at which the next trim is due; 0 where nobody has worked it out.
        arguments: of the newest attention call, without its mask.
        by_row: names of tensors that have an entry for each of the layer's rows.
        by_head: likewise for each of the store's.
    """

    by_row: ClassVar[tuple[str, ...]] = ()
    by_head: ClassVar[tuple[str, ...]] = ("scores",)
    group: EvictingGroup[Any]

    def __init__(self, layer: LayerBase) -> None:
        super().__init__(layer)
        self.policy = cast(S, layer.scheme)
        self.asks_every_step, self.place = self.policy.asks_every_step, (0, 1)
        self.arguments = AttentionArguments(1.0)
        self.forget()

    def forget(self) -> None:
        self.trim_at = 0
        # Running attention call: queries that are no padding (B, n), and rows for which it is a prompt (B,).
        self._real: Tensor | None = None
        self._fresh: Tensor | None = None
        self.pending: QueryWindow | None = None
        self.scores: Tensor | None = None

    def new_store(self, keys: Tensor, values: Tensor) -> KVStore:
        """An empty store for tensors of this shape, dtype and device.

        Raises:
            ValueError: the budget has no room for more than the window.
        """
        # A capacity bounds the tokens seen; pages go by the budget, and move.
        layout = self.policy.layout(keys.shape[-1], values.shape[-1])
        return KVStore(layout, self.layer.scheme, keys, values, headwise=True)

    @property
    def full_at(self) -> int:
        """Tokens seen at which a row may outgrow its budget."""
        raise NotImplementedError

    # Recorded steps read these.

    @property
    def trims_steps(self) -> bool:
        """True if trims are due between steps; else steps are like those of any layer."""
        return self.policy.interval is not None

    @property
    def keeps_query(self) -> bool:
        """True if steps keep their newest query, by which the next trim judges."""
        return self.trims_steps and bool(self.policy.evidence)

    def most_held(self, room: int) -> tuple[int, ...] | None:
        """Most tokens of a row in each run when a trim is due, of ``room`` given; None where steps trim nothing."""
        raise NotImplementedError

    # An attention call.

    def lets_step_pass(self) -> bool:
        """True if a step of one token needs no trim, and its queries nobody."""
        layer = self.layer
        return not self.asks_every_step and layer.seen < self.full_at and bool(layer.held().forecast(1).shortest)

    def before_begin(self) -> bool:
        """Notes for which rows the coming call is a prompt; whether its queries are to be kept."""
        layer, store, new = self.layer, self.layer.held(), self.layer.new_columns
        starts = any(state.length == 0 for state in store.states)
        asks = new > MAX_STEP or starts or self.asks_every_step or layer.seen >= self.full_at
        if not new or not asks:
            return False
        long = torch.full((layer.batch_size,), new > MAX_STEP, dtype=torch.bool, device=layer.device)
        self._fresh = long | (store.row_lengths == 0) if starts or new > MAX_STEP else None
        return True

    def after_begin(self) -> None:
        """Notes which of the queries that are to be kept are no padding."""
        layer, policy = self.layer, self.policy
        newest = layer.new_columns if "received" in policy.evidence else min(policy.queries, layer.new_columns)
        column = torch.arange(layer.new_columns - newest, layer.new_columns, device=layer.device)
        self._real = torch.ones(layer.batch_size, newest, dtype=torch.bool, device=layer.device)
        if layer.padding is not None:
            self._real = column >= layer.padding.lead[:, None]
            if layer.padding.source is not None:
                self._real = self._real & (layer.padding.source[:, column] == column)

    def note_queries(self, query: Tensor, arguments: AttentionArguments) -> None:
        """Keeps the newest queries (B, Hq, Q, D) of an attention call, if they are to be asked."""
        self.arguments = arguments._replace(mask=None, bias=None)
        if self._real is not None:
            if self.layer.new_columns == 1 and query.shape[2] > 1:
                # Heads where tokens are expected: see `hfkvq.caches.layers.handle`.
                query = query.reshape(query.shape[0], -1, 1, query.shape[3])
            # The newest may be all that are shown.
            newest = min(self._real.shape[1], query.shape[2])
            arguments = arguments.biased()
            mask = arguments.mask
            if mask is not None and mask.shape[2] > newest:
                arguments = arguments._replace(mask=mask[:, :, -newest:])
            query = query[:, :, -newest:].detach()
            self.pending = QueryWindow(query, self._real[:, -newest:], arguments, self._fresh)
        self._real = self._fresh = None

    def may_be_cut(self, seen: QueryWindow | None) -> bool:
        """True if what is staged is a first prompt, whole and alone, whose queries have been shown."""
        layer = self.layer
        if seen is None or seen.prompt is None or layer.staged is None or self.layer.held().longest:
            return False
        mask = seen.arguments.mask
        return layer.staged_length == layer.seen and (mask is None or mask.shape[-1] >= layer.seen)

    def cut_prompt(self) -> bool:
        """Cuts a staged first prompt to its best tokens, if it can be; whether it has. Nothing changes if it fails."""
        raise NotImplementedError

    # Judging.

    def judge_pending(self) -> None:
        """Judges what is stored by the queries that have been kept, and trims what has outgrown its budget."""
        seen, store = self.pending, self.layer.held()
        # Rows may hold nothing but padding so far.
        if seen is not None and store.longest:
            with unchanged_on_error([self, self.layer, store]):
                self._judge(seen)
        self.pending = None

    def judge_step(self, query: Tensor) -> None:
        """The same by the query (B, Hq, 1, D) of a step that the host did not see; of no rows where none is kept."""
        real = torch.ones(self.layer.batch_size, 1, dtype=torch.bool, device=self.layer.device)
        self._judge(QueryWindow(query, real, self.arguments, None))

    def _judge(self, seen: QueryWindow) -> None:
        raise NotImplementedError

    def _remember(self, scores: Tensor) -> None:
        """Keeps scores, NaN behind a row's last token: what comes there has no history."""
        rank = torch.arange(scores.shape[1], device=scores.device)
        self.scores = scores.masked_fill(rank >= self.layer.held().counters[LENGTH, :, None], torch.nan)

    # Files.

    def pack(self) -> Packed:
        """Contents between forwards, for a file."""
        given = self.arguments
        numbers = {"trim_at": self.trim_at, "arguments": [given.scaling, given.softcap, given.causal]}
        held = {name: getattr(self, name) for name in (*self.by_row, *self.by_head)} | {"sinks": given.sinks}
        return numbers, {name: tensor for name, tensor in held.items() if tensor is not None}

    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        scaling, softcap, causal = found["arguments"]
        self.arguments = AttentionArguments(
            float(scaling), None, float(softcap), tensors.get("sinks"), causal=causal is True
        )
        self.trim_at = int(found["trim_at"])
        for name in (*self.by_row, *self.by_head):
            setattr(self, name, tensors.get(name))

    # Rows and lengths change.

    def after_crop(self) -> None:
        if self.scores is not None:
            self._remember(self.scores)

    def take_rows(self, rows: Tensor) -> None:
        for name in (*self.by_row, *self.by_head):
            held = getattr(self, name)
            if held is not None:
                own = rows.to(held.device)
                setattr(self, name, held[own if name in self.by_row else self.layer.held().rows_of(own)])

    def notes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that it holds: with an entry for each of the layer's rows, and for each of the store's."""
        held = [[getattr(self, name) for name in names] for names in (self.by_row, self.by_head)]
        by_row, by_head = ([x for x in each if x is not None] for each in held)
        return by_row, by_head

    def tensors(self) -> list[Tensor]:
        by_row, by_head = self.notes()
        return [*by_row, *by_head]


class EvictingGroup(Group[E]):
    """The layers of a cache that evict in one way."""

    def __init__(self, members: Sequence[E]) -> None:
        super().__init__(members)
        for member in members:
            member.group = self


def store_choice(layer: LayerBase, choice: Choice, window: int, keeps_columns: bool = False) -> None:
    """Stores what stays of a staged first prompt as if it were all of it; it is staged still if that fails.

    Args:
        keeps_columns: whether sealed tokens keep their logical columns; else they move up to newer ones.
        window: newest tokens that always stay.
    """
    store, before = layer.held(), (layer.staged, layer.padding)
    layer.staged, layer.padding = (choice.keys, choice.values), choice.padding
    try:
        layer.store_staged()
    except BaseException:
        layer.staged, layer.padding = before
        raise
    if any(given > held for given, held in choice.rows):
        # Newer tokens have their columns still.
        settled, evicted = layer.seen - max(window, layer.hold), choice.evicted
        columns = choice.columns if keeps_columns else None
        store.note_evicted(choice.shorter, evicted.repeat_interleave(store.fold), settled, columns)
        layer.evicted = True
        layer.edition += 1
