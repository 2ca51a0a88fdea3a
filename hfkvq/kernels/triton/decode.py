"""Launcher of decode attention: a plan, see `decode_plan`, then the launches and the merge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..dispatch import Keep
from ..hadamard import hadamard
from ..pages import StoreFormat
from .compile import Wanted
from .decode_formats import BLOCK, is_served
from .decode_plan import Queries, plan_of, rotates, scoring_of, table_places
from .dequantized import dequantized_decode
from .latent import latent_attention
from .merge import mask_words


def decode_wanted(
    form: StoreFormat,
    heads: int,
    query_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    queries: int = 1,
    mapped: bool = False,
) -> Iterator[Wanted]:
    """The variants for steps of so many tokens without mask and sinks, in any number of rows of any length.

    ``mapped``: whether a map says which row's windows are whose.
    """
    store = form.spec
    if not is_served(store, head_dim, value_dim, dtype):
        return
    rotate = rotates(store, head_dim)
    own = dtype if rotate == form.rotate_keys else torch.float32
    stride = (queries * query_heads * head_dim, head_dim, query_heads * head_dim, 1)
    query, scoring = Queries((1, query_heads, queries, head_dim), stride, dtype), scoring_of(None, None, head_dim**-0.5)
    # Rows of any length: variants do not depend on their pages.
    blocks = (1,) * len(form.runs)
    plan = plan_of(store, query, (heads, value_dim, BLOCK, BLOCK), blocks, scoring, device, rotate, False, mapped)
    yield from plan.wanted(form, own, heads, (head_dim, value_dim), device, mapped)


def decode_attention_triton(
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
    """Launcher of `hfkvq.kernels.decode_attention`."""
    head_dim, asked, spec = q.shape[-1], q, store.spec
    sink_k, sink_v, tail_k, tail_v = windows
    value_dim = sink_v.shape[-1]
    if store.latent or not is_served(spec, head_dim, value_dim, q.dtype):
        other = latent_attention if store.latent else dequantized_decode
        found = other(q, counters, windows, runs, mask, sinks, scaling, softcap, store, early, rows)
        return found if out is None else out.copy_(found)
    rotate = rotates(spec, head_dim)
    if not rotate and store.rotate_keys:
        q, early = hadamard(q.float(), store.rotate_keys), False
    elif q.stride(-1) != 1:
        q, early = q.contiguous(), False
    held = [counters, *windows, *runs]
    stays = q is asked and all([x.is_contiguous() for x in held])
    if not stays:
        held = [x.contiguous() for x in held]
    query = Queries(q.shape, q.stride(), asked.dtype)
    sizes = sink_k.shape[1], value_dim, tail_k.shape[2], tail_v.shape[2]
    blocks = tuple([runs[at].shape[1] for at in table_places(spec)])
    scoring = scoring_of(mask, sinks, scaling, softcap)
    plan = plan_of(spec, query, sizes, blocks, scoring, q.device, rotate, early, rows is not None)
    last = [*([] if mask is None else [mask_words(mask)]), *([] if rows is None else [rows])]
    if keep is not None and stays and rows is None:
        bound = [launch.bound(None, *held, *[None] * (3 if mask is None else 4)) for launch in plan.launches]

        def again(q: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
            return plan.run(bound, q, [], [] if mask is None else [mask_words(mask)], sinks)

        keep(again)
    return plan.run(plan.launches, q, held, last, sinks, out)
