"""Launcher of decode attention: a plan, see `decode_plan`, then the launches and the merge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..dispatch import Keep
from ..hadamard import hadamard
from ..masks import mask_kind
from ..pages import StoreFormat
from .compile import Wanted
from .configs import edition
from .decode_formats import BLOCK, is_served
from .decode_plan import Queries, Scoring, plan_of, rotates, table_places
from .dequantized import dequantized_decode
from .latent import latent_attention
from .merge import SPLITS, mask_words, merge_launch, sinks_kind


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
    shape = (1, query_heads, queries, head_dim)
    stride = (queries * query_heads * head_dim, head_dim, query_heads * head_dim, 1)
    query, scoring = Queries(shape, stride, own, dtype), Scoring(None, None, head_dim**-0.5, 0.0)
    windows = (heads, value_dim, BLOCK, BLOCK, dtype)
    # Rows of any length: variants do not depend on their pages.
    blocks = (1,) * len(form.runs)
    plan = plan_of(store, query, windows, blocks, scoring, device, rotate, False, edition(), mapped)
    kinds = [own, torch.int32, *[dtype] * 4]
    for keys, values in form.runs:
        kinds += [torch.int32] * (1 if form.ordered else 2)
        for fmt, side, dim in ((keys, "keys", head_dim), (values, "values", value_dim)):
            found = [kind or dtype for _, kind in fmt.shapes(side, heads, dim).values()]
            # Bytes stand in for fp8, a type that some GPUs lack.
            kinds += [torch.int16 if kind == torch.float8_e4m3fn else kind for kind in found]
    kinds += [torch.int32] * mapped
    sums = [torch.float32] * 3
    for launch in plan.launches:
        yield launch.wanted([*kinds, *sums])
    rows, dependent = query_heads // heads * queries, plan.merge.constants["PDL"]
    for splits in SPLITS:
        part = (heads, splits, rows, value_dim)
        merge = merge_launch(part, queries, None, form.rotate_values, dependent, device, plan.dtype)
        yield merge.wanted([*sums, plan.dtype])


def decode_attention_triton(q: Tensor, *given: Any, out: Tensor | None = None, keep: Keep | None = None) -> Tensor:
    """Launcher of `hfkvq.kernels.decode_attention`, whose arguments it takes."""
    counters, windows, runs, mask, sinks, scaling, softcap, store, early, rows = given
    head_dim, asked = q.shape[-1], q
    sink_k, sink_v, tail_k, tail_v = windows
    value_dim = sink_v.shape[-1]
    if StoreFormat.parse(store).latent:
        return latent_attention(q, *given)
    if not is_served(store, head_dim, value_dim, q.dtype):
        return dequantized_decode(q, *given)
    rotate = rotates(store, head_dim)
    if not rotate and (outside := StoreFormat.parse(store).rotate_keys):
        q, early = hadamard(q.float(), outside), False
    elif q.stride(-1) != 1:
        q, early = q.contiguous(), False
    held = [counters, *windows, *runs]
    stays = q is asked and all([x.is_contiguous() for x in held])
    if not stays:
        held = [x.contiguous() for x in held]
    query = Queries(q.shape, q.stride(), q.dtype, asked.dtype)
    sizes = (sink_k.shape[1], value_dim, tail_k.shape[2], tail_v.shape[2], tail_k.dtype)
    blocks = tuple([runs[at].shape[1] for at in table_places(store)])
    scoring = Scoring(None if mask is None else mask_kind(mask), sinks_kind(sinks), scaling, softcap)
    made = edition()
    plan = plan_of(store, query, sizes, blocks, scoring, q.device, rotate, early, made, rows is not None)
    last = [] if rows is None else [rows]
    if keep is not None and stays and not last:
        bound = [launch.bound(None, *held, *[None] * (3 if mask is None else 4)) for launch in plan.launches]

        def again(q: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
            if made != edition():
                rest = mask, sinks, scaling, softcap, store, early, None
                return decode_attention_triton(q, counters, windows, runs, *rest)
            return plan.run(bound, q, [], [] if mask is None else [mask_words(mask)], sinks)

        keep(again)
    last = [*([] if mask is None else [mask_words(mask)]), *last]
    return plan.run(plan.launches, q, held, last, sinks, out)
