"""Evictor of a layer, for any scheme that evicts: keeps the queries that judge tokens, and scores' history.

Two kinds of tokens are judged. Those that a store holds, by `stored_evidence`; and those of a first prompt beyond its
budget, of which `choose` names the ones that stay before anything is stored. These are handed to the store as if they
were the whole prompt, so any layout takes them, and they are quantized once, from what the model gave. The host knows
how many tokens a row keeps, and asks the device nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import ABSENT, LENGTH, START, column_positions, run_count
from hfkvq.kernels.pages import Side

from ..base.recorded import Group
from ..layer_state.base import Part, unchanged_on_error
from ..schemes.eviction import EvictionScheme
from ..schemes.score_inputs import Candidates, Evidence, evidence_of, keep_mask, prompt_candidates
from ..store import MAX_STEP, SIDES, Padding, StoreState
from ..store.kvstore import KVStore
from ..store.packing import Packed


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
    scheme: EvictionScheme, store: KVStore, seen: QueryWindow, where: Tensor, order: Tensor
) -> Iterator[tuple[slice, Evidence]]:
    """Evidence of what is stored, the queries' own tokens included; nobody pays a token that no query sees.

    Keys, values and queries are in the basis of the store, which keeps products and norms.
    """

    def read(side: Side, own: slice) -> Tensor:
        at, own_order = SIDES.index(side), order
        if side == "values":
            tail = store.windows[3].shape[2]
            own_order = token_order(store, column_positions(store.format, store.counters, store.runs, tail, side))
        dense = [store.windows[at][own].float()]
        for i, (view, formats) in enumerate(zip(store.runs, store.format.runs, strict=True)):
            sealed, parts = run_count(store.counters, i, side)[own], (view.keys, view.values)[at]
            table, dim = view.table[own].contiguous(), store.dims[side]
            dense.append(kernels.run_pages(table, sealed.contiguous(), parts, formats[at], side, dim))
        x = torch.cat([*dense, store.windows[2 + at][own].float()], 2)[:, 0]
        return x.gather(1, own_order[own, :, None].expand(-1, -1, x.shape[2]))

    start, length = store.counters[START].long(), store.counters[LENGTH].long()
    candidates = Candidates(store.fold, where.gather(1, order), start, length, read)
    query = kernels.hadamard(seen.query.float(), store.format.rotate_keys)
    return evidence_of(candidates, scheme.evidence, scheme.queries, query, seen.arguments, seen.real)


class Choice(NamedTuple):
    """Choice of a first prompt's tokens, as `KVStore.extend` takes it.

    Attributes:
        keys: (B, H, n, Dk), each KV head's own tokens, in order; so are ``values``.
        columns: i64 (B*H, n), of the prompt, where these tokens stand.
        scores: f32 (B*H, n), of the same tokens.
        padding: rows that keep fewer than n tokens begin with padding; None where none does.
        evicted: i32 (B,), tokens of each row that are gone.
        rows: what rows may be like: tokens given, and tokens that stay.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor
    scores: Tensor
    padding: Padding | None
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
    candidates = prompt_candidates(keys, values, lead)
    found = evidence_of(candidates, scheme.evidence, scheme.queries, query, arguments)
    scores = shared(scheme, torch.cat([scheme.scores(evidence) for _, evidence in found]), heads)
    length = candidates.length[::heads]
    room = scheme.room(length, length, layer, layers, hold)
    rows, newest = frozenset(zip(lengths.tolist(), rooms, strict=True)), max(scheme.window, hold)
    return keep(scores, keys, values, length, room, rows, scheme.first, newest, padding is not None)


def keep(
    scores: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    room: Tensor,
    rows: frozenset[tuple[int, int]],
    first: int,
    newest: int,
    padded: bool = False,
) -> Choice:
    """The tokens of highest score (f32 (B*H, T)) of a prompt, ``room`` (i64 (B,)) of each row's ``length``.

    Args:
        rows: what `Choice` says, of which the device is not asked.
        first: first tokens that always stay.
        newest: newest tokens, likewise.
        padded: whether padding stands before rows.
    """
    heads, tokens = keys.shape[1:3]
    most = max(held for _, held in rows)
    stays = keep_mask(scores, length.repeat_interleave(heads), room.repeat_interleave(heads), first, newest)
    # Kept tokens come last, in order; columns before them in shorter rows are padding now.
    rank = stays.to(torch.int8).argsort(dim=1, stable=True)[:, -most:]
    columns = (rank + (tokens - length).repeat_interleave(heads)[:, None]).clamp(max=tokens - 1)
    padding = Padding((most - room).int(), frozenset(most - held for _, held in rows), None) if padded else None
    index = columns.view(*keys.shape[:2], -1, 1)
    keys, values = (x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (keys, values))
    evicted = (length - room).int()
    return Choice(keys, values, columns, scores.gather(1, rank), padding, evicted, rows)


def shared(scheme: EvictionScheme, scores: Tensor, heads: int) -> Tensor:
    """Scores (B*H, n) by which heads choose: the mean of all of a row where the scheme says that they are alike."""
    if not scheme.alike:
        return scores
    by_row = scores.unflatten(0, (-1, heads))
    return by_row.mean(1, keepdim=True).expand_as(by_row).flatten(0, 1)


class Eviction(Part):
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

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.policy: Any = layer.scheme
        self.asks_every_step, self.place = self.policy.asks_every_step, (0, 1)
        self.arguments, self.group = AttentionArguments(1.0), Group([self])
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
            query = query[:, :, -newest:].detach()
            self.pending = QueryWindow(query, self._real[:, -newest:], arguments.biased(), self._fresh)
        self._real = self._fresh = None

    def cut_prompt(self) -> bool:
        """Cuts what is staged, if it is a first prompt, whole and alone, whose queries have been shown; whether it has.

        Nothing changes if it fails.
        """
        layer, seen = self.layer, self.pending
        if seen is None or seen.prompt is None or layer.staged is None or layer.held().longest:
            return False
        mask = seen.arguments.mask
        whole = layer.staged_length == layer.seen and (mask is None or mask.shape[-1] >= layer.seen)
        return whole and self._cut(seen, *layer.staged)

    def _cut(self, seen: QueryWindow, keys: Tensor, values: Tensor) -> bool:
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


def store_choice(layer: Any, choice: Choice, window: int, keeps_columns: bool = False) -> None:
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
        # Columns by which every row is shorter than the prompt.
        shorter = before[0][0].shape[2] - choice.keys.shape[2]
        store.note_evicted(shorter, evicted.repeat_interleave(store.fold), settled, columns)
        layer.evicted = True
        layer.edition += 1
