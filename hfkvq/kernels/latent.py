"""Attention to latents, which are key and value at once: the contract and its torch reference.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) makes keys and values of all heads from one latent of each
token, and a rotary part that all keys share. With the matrices absorbed into queries and outputs, a step attends to
the latents themselves, as if all query heads had one KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .decode import ABSENT, column_positions, decode_attention, dense_columns, visible_probs
from .dispatch import Keep, call, define, triton_slot
from .hadamard import hadamard
from .pages import StoreFormat, split_runs


@define("latent_attention")
def _latent_attention(
    q: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    store: str,
) -> Tensor:
    form, dim = StoreFormat.parse(store), windows[0].shape[-1]
    views, (batch, heads, queries, _) = split_runs(form, runs), q.shape
    where = column_positions(form, counters, views, windows[2].shape[2], "keys")
    latents, rotary = (dense_columns(form, windows, views, side) for side in ("keys", "values"))
    own = hadamard(q[..., :dim].float(), form.rotate_keys).reshape(batch, 1, heads * queries, dim)
    turned = hadamard(q[..., dim:].float(), form.rotate_values).reshape(batch, 1, heads * queries, -1)
    logits = (own @ latents.transpose(-1, -2) + turned @ rotary.transpose(-1, -2)).mul(scaling)
    probs = visible_probs(logits.view(batch, 1, heads, queries, -1), where, counters, mask, sinks, softcap)
    out = probs @ latents.masked_fill((where == ABSENT)[:, None, :, None], 0.0)
    return hadamard(out, form.rotate_keys, back=True).view(batch, heads, queries, dim).to(q.dtype)


triton_slot("latent_attention", "latent:latent_attention_triton")


def latent_attention(
    q: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    store: StoreFormat,
) -> Tensor:
    """Attention over `sink | run | tail` of latents C and rotary parts R: ``softmax(scaling * (q Ĉ^T + r R̂^T)) Ĉ``.

    Args:
        q: (B, Hq, Q, D + R), queries of the newest Q tokens: what they ask of latents (after the keys' matrix has been
            absorbed) before their rotary parts (after RoPE); not scaled, not rotated.
        counters: i32 (4, B); see `decode_attention`. Latents and rotary parts leave the tail together.
        windows: latents (B, 1, S, D) and rotary parts (B, 1, S, R) of the sink, then of the tail (B, 1, W, D) and
            (B, 1, W, R).
        runs: flat tensors of the run (`RunView.flat`).
        mask: see `decode_attention`.
        sinks: see `decode_attention`.
        softcap: see `decode_attention`.
        store: the layer's format, which is `StoreFormat.latent`.

    Returns:
        (B, Hq, Q, D) in the dtype of q: means of latents, which the values' matrix is still to meet; 0 for queries that
        see nothing.
    """
    return call(_latent_attention, q, q, counters, list(windows), list(runs), mask, sinks, scaling, softcap, store.spec)


def store_attention(
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
) -> Tensor:
    """`latent_attention` of a store of latents, whose windows have the batch's rows; else `decode_attention`."""
    if store.latent:
        return latent_attention(q, counters, windows, runs, mask, sinks, scaling, softcap, store)
    return decode_attention(q, counters, windows, runs, mask, sinks, scaling, softcap, store, early, rows, keep)
