"""Attention of a few new queries over everything a layer holds: the contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import Keep, launched, reference
from .hadamard import hadamard
from .pages import RunView, Side, StoreFormat, split_runs
from .products import run_pages, table_pages

START, LENGTH, RUNS = 0, 1, 2
"""Rows of ``counters``: leading padding, stored tokens, then (keys, values) sealed in each run."""

ABSENT = -(2**30)
"""Row position of a column that holds no token; other negative ones are of rows that have forgotten tokens."""


def run_count(counters: Tensor, run: int, side: Side) -> Tensor:
    """i32 (B,): tokens of ``side`` that each row has sealed in a run."""
    return counters[RUNS + 2 * run + (side == "values")]


def sealed_count(counters: Tensor, side: Side) -> Tensor:
    """i32 (B,): tokens of ``side`` that each row has sealed in all runs."""
    return counters[RUNS + (side == "values") :: 2].sum(0, dtype=torch.int32)


def newest_pages(
    store: StoreFormat, counters: Tensor, runs: Sequence[RunView], tokens: int
) -> tuple[Sequence[RunView], Tensor | None]:
    """The run of a windowed store, cut to the blocks in which the newest ``tokens`` of a row may lie.

    Pages of older blocks may have been filled again.

    Returns:
        The runs, and i32 (B,), run tokens before the first block; None where there is no window, and all is as it was.
    """
    if not store.window:
        return runs, None
    (run,), page = runs, store.runs[0][0].page_size
    blocks = run.table.shape[1]
    first = (counters[LENGTH] - tokens - store.sink).clamp(min=0, max=max(blocks - 1, 0) * page) // page
    count = min(blocks, 1 + -(-max(tokens - 1, 0) // page))
    index = first[:, None] + torch.arange(count, dtype=torch.int32, device=counters.device)
    table = run.table.gather(1, index.clamp(max=max(blocks - 1, 0)).long())
    return [RunView(table, None, run.keys, run.values)], first * page


def column_positions(
    store: StoreFormat,
    counters: Tensor,
    runs: Sequence[RunView],
    tail_length: int,
    side: Side,
    before: Tensor | None = None,
) -> Tensor:
    """Row position of every column of `sink | runs | tail`: i32 (B, N), `ABSENT` where the row has no such token.

    ``before``: run tokens before the first block, see `newest_pages`.
    """
    length = counters[LENGTH, :, None]
    rest = (length - store.sink).clamp(min=0)

    def columns(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=counters.device)[None]

    sink = columns(store.sink)
    positions = [torch.where(sink < length, sink, ABSENT)]
    for i, (run, (fmt, _)) in enumerate(zip(runs, store.runs, strict=True)):
        slot = columns(run.table.shape[1] * fmt.page_size)
        if before is not None:
            slot = slot + before[:, None]
        where = slot + store.sink if run.pos is None else run.pos
        positions.append(torch.where(slot < run_count(counters, i, side)[:, None], where, ABSENT))
    sealed = sealed_count(counters, side)[:, None]
    newest = sealed + (columns(tail_length) - sealed) % tail_length
    positions.append(torch.where(newest < rest, newest + store.sink, ABSENT))
    return torch.cat(positions, 1)


def dense_columns(store: StoreFormat, windows: Sequence[Tensor], runs: Sequence[RunView], side: Side) -> Tensor:
    """Dequantized columns `sink | runs | tail` in the basis of the store: f32 (B, H, N, D)."""
    sink, tail = (windows[0], windows[2]) if side == "keys" else (windows[1], windows[3])
    parts = [sink.float()]
    for run, formats in zip(runs, store.runs, strict=True):
        fmt, tensors = (formats[0], run.keys) if side == "keys" else (formats[1], run.values)
        pages = table_pages(tensors, run.table, fmt, side, sink.shape[-1])
        parts.append(pages.transpose(1, 2).flatten(2, 3))
    return torch.cat([*parts, tail.float()], 2)


def visible_probs(
    logits: Tensor,
    where: Tensor,
    counters: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    window: int = 0,
) -> Tensor:
    """Probabilities (B, H, share*Q, N), f32, of logits (B, H, share, Q, N) of columns at row positions (B, N).

    For mask, sinks and softcap see `decode_attention`, for the window `StoreFormat`.
    """
    batch, heads, share, queries, _ = logits.shape
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    visible = (where > ABSENT)[:, None, None, None]
    newest = counters[LENGTH, :, None] - queries + torch.arange(queries, device=logits.device)
    if window:
        visible = visible & (where[:, None] > (newest - window)[..., None])[:, None, None]
    if mask is None:
        visible = visible & (where[:, None] <= newest[..., None])[:, None, None]
    else:
        column = where + counters[START, :, None]
        if window:
            column = column - (counters[:2].sum(0)[:, None] - mask.shape[-1]).clamp(min=0)
            visible = visible & (column >= 0)[:, None, None, None]
        column = column.clamp(0, mask.shape[-1] - 1).long()
        shown = mask.expand(batch, -1, queries, -1)
        shown = shown.gather(-1, column[:, None, None].expand(-1, shown.shape[1], queries, -1))
        shown = shown.unflatten(1, (heads, share)) if shown.shape[1] > 1 else shown[:, :, None]
        if mask.is_floating_point():
            logits = logits + shown
        else:
            visible = visible & shown.bool()
    logits = logits.masked_fill(~visible, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    extra = None
    if sinks is not None:
        extra = sinks.float().view(-1, heads, share, 1, 1)
        extra = extra.repeat(batch // extra.shape[0], 1, 1, 1, 1)
    if extra is not None:
        top = torch.maximum(top, extra)
    top = top.masked_fill(top == -torch.inf, 0.0)
    probs = torch.exp(logits - top)
    total = probs.sum(-1, keepdim=True)
    if extra is not None:
        total = total + torch.exp(extra - top)
    return (probs / total.clamp(min=1e-30)).flatten(2, 3)


def _latent_attention(
    q: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    views: Sequence[RunView],
    scaling: float,
    scoring: tuple[Tensor | None, Tensor | None, float],
    form: StoreFormat,
) -> Tensor:
    """The reference for latents; ``scoring``: mask, sinks and softcap."""
    dim, (batch, heads, queries, _) = windows[0].shape[-1], q.shape
    where = column_positions(form, counters, views, windows[2].shape[2], "keys")
    latents, rotary = (dense_columns(form, windows, views, side) for side in ("keys", "values"))
    own = hadamard(q[..., :dim].float(), form.rotate_keys).reshape(batch, 1, heads * queries, dim)
    turned = hadamard(q[..., dim:].float(), form.rotate_values).reshape(batch, 1, heads * queries, -1)
    logits = (own @ latents.transpose(-1, -2) + turned @ rotary.transpose(-1, -2)).mul(scaling)
    probs = visible_probs(logits.view(batch, 1, heads, queries, -1), where, counters, *scoring)
    out = probs @ latents.masked_fill((where == ABSENT)[:, None, :, None], 0.0)
    return hadamard(out, form.rotate_keys).view(batch, heads, queries, dim).to(q.dtype)


@launched("decode:decode_attention_triton")
def decode_attention(
    q: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    store: StoreFormat,
    early: bool = False,
    rows: Tensor | None = None,
    keep: Keep | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention over `sink | runs | tail`: ``softmax(scaling * q K̂^T + mask) V̂``, K̂ and V̂ as stored.

    A row's token x (0 = its first real token) stands in the sink if ``x < sink``, in a run if sealed, and else in slot
    ``(x - sink) mod W`` of the tail, whose W may differ between keys and values. Its logical column, by which masks
    are indexed, is ``start + x``. Tokens of runs that have positions may have negative ones: those of a row that has
    forgotten tokens between them and its tail, with as much added to ``start``.

    Of a store with a window the query at row position x sees tokens from ``x - window + 1`` on, whatever the mask
    shows, and pages before these are not read. A mask that has fewer columns than the row then ends with its newest
    token, and hides those before its first column.

    Or of a store of latents C and rotary parts R ``softmax(scaling * (q Ĉ^T + r R̂^T)) Ĉ``. Multi-head latent attention
    (DeepSeek-V2, arXiv:2405.04434) makes keys and values of all heads from one latent of each token, and a rotary part
    that all keys share. With the matrices absorbed into queries and outputs, a step attends to the latents themselves,
    as if all query heads had one KV head. Windows of latents have the batch's rows; the two sides leave the tail
    together, and of ``runs`` there is one.

    Args:
        q: (B, Hq, Q, D), after RoPE, not scaled, not rotated; the queries of the newest Q tokens, already appended. For
            latents (B, Hq, Q, D + R): what they ask of latents (after the keys' matrix has been absorbed), then their
            rotary parts.
        counters: i32 (2 + 2*runs, B): leading padding ``start``, stored tokens ``length``, then for each run the
            tokens sealed of keys and of values, of formats that are `PageFormat.whole` whole pages. Where there are
            several runs, the two are equal.
        windows: sink keys (B, H, S, D), sink values, tail keys (B, H, W, D), tail values; model dtype, store's basis.
        runs: flat tensors of all runs (`RunView.flat`).
        mask: (B or 1, Hq or 1, Q or 1, L) over logical columns: True or nonzero where visible, or float, added to the
            logits. None means causal over all stored tokens.
        sinks: (Hq,) logits that join the denominator only (gpt-oss), or None; (n * Hq,) for rows that take turns, row b
            having the Hq from ``b % n * Hq`` on.
        softcap: ``softcap * tanh(logit / softcap)`` before masking; 0 for none.
        early: whether q was there before `step.advance` was launched, since which it has not been written: then it is
            read while the launch before this one still runs.
        rows: i32 (B,), the row of the windows that each row has, of any number of them; None where row b has row b.
        keep: see `dispatch.Keep`; a call that takes queries, mask and sinks.
        out: (B, Hq, Q, Dv), in the dtype of q: written, and returned. Not with ``keep``.

    Returns:
        (B, Hq, Q, Dv) in the dtype of q; 0 for queries that see nothing. Means of latents, which the values' matrix is
        still to meet, are (B, Hq, Q, D).
    """
    if out is not None:
        given = counters, windows, runs, mask, sinks, scaling, softcap, store, early, rows
        return out.copy_(reference("decode_attention")(q, *given))
    views = split_runs(store, runs)
    if store.latent:
        return _latent_attention(q, counters, windows, views, scaling, (mask, sinks, softcap), store)
    windows = windows if rows is None else [window[rows.long()] for window in windows]
    sink_k, sink_v, tail_k, tail_v = windows
    batch, query_heads, queries, head_dim = q.shape
    heads, value_dim = sink_k.shape[1], sink_v.shape[-1]
    share = query_heads // heads
    longest = store.sink + views[0].table.shape[1] * store.runs[0][0].page_size + max(tail_k.shape[2], tail_v.shape[2])
    views, before = newest_pages(store, counters, views, store.window + queries - 1)

    def counted(run: int, side: Side) -> Tensor:
        count = run_count(counters, run, side)
        return count if before is None else count - before

    q_rows = hadamard(q.float(), store.rotate_keys).mul(scaling).reshape(batch, heads, share * queries, head_dim)

    where = column_positions(store, counters, views, tail_k.shape[2], "keys", before)
    logits = torch.cat(
        [
            q_rows @ sink_k.float().transpose(-1, -2),
            *(
                q_rows @ run_pages(run.table, counted(i, "keys"), run.keys, formats[0], "keys", head_dim).mT
                for i, (run, formats) in enumerate(zip(views, store.runs, strict=True))
            ),
            q_rows @ tail_k.float().transpose(-1, -2),
        ],
        -1,
    )
    logits = logits.view(batch, heads, share, queries, -1)
    probs = visible_probs(logits, where, counters, mask, sinks, softcap, store.window)

    alike = tail_k.shape[2] == tail_v.shape[2] and not counters.is_cuda
    if store.ordered and not (alike and torch.equal(counters[RUNS], counters[RUNS + 1])):
        # Keys and values leave the tail at different steps, so probabilities go through row positions.
        by_row = probs.new_zeros((*probs.shape[:-1], longest + 1))
        at = torch.where(where > ABSENT, where, longest).long()[:, None, None]
        by_row.scatter_(-1, at.expand_as(probs), probs)
        by_row[..., longest] = 0.0
        where = column_positions(store, counters, views, tail_v.shape[2], "values", before)
        at = torch.where(where > ABSENT, where, longest).long()[:, None, None]
        probs = by_row.gather(-1, at.expand(*probs.shape[:-1], -1))

    sizes = [store.sink, *(run.table.shape[1] * fmt.page_size for run, (fmt, _) in zip(views, store.runs, strict=True))]
    parts = probs.split([*sizes, tail_v.shape[2]], -1)
    has = (where > ABSENT)[:, None, :, None]
    last = has.shape[2] - tail_v.shape[2]
    found = parts[0] @ sink_v.float().masked_fill(~has[:, :, : store.sink], 0.0)
    found = found + parts[-1] @ tail_v.float().masked_fill(~has[:, :, last:], 0.0)
    for i, (run, formats) in enumerate(zip(views, store.runs, strict=True)):
        fmt = formats[1]
        dense, slot = table_pages(run.values, run.table, fmt, "values", value_dim), parts[1 + i]
        # Values are masked, not multiplied by 0: a reserved page may hold NaN.
        column = torch.arange(slot.shape[-1], device=q.device).view(-1, 1, fmt.page_size, 1)
        dense = dense.masked_fill(column >= counted(i, "values")[:, None, None, None, None], 0.0)
        slot = slot.unflatten(-1, (-1, fmt.page_size)).permute(0, 3, 1, 2, 4)
        found = found + (slot @ dense).sum(1)
    return hadamard(found, store.rotate_values).view(batch, query_heads, queries, value_dim).to(q.dtype)
