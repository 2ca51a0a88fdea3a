"""Launcher of attention to latents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..dispatch import reference
from ..hadamard import factor_of, hadamard
from ..masks import MaskKind
from ..pages import PageFormat, StoreFormat
from ._lib import cdiv, multiprocessors, overlap, power
from .compile import Wanted
from .configs import FORGET, lookup
from .decode_formats import BLOCK, DTYPES, split_counts
from .decode_plan import Plan, Queries, Scoring, nest_of, scoring_of
from .hadamard import turn_back_launch
from .latent_kernel import LatentShape, latent_kernel
from .launch import Launch
from .merge import mask_words, merge_launch
from .pair_format import Factors


@lru_cache(maxsize=1024)
def is_served(store: str, dim: int, rope_dim: int, dtype: torch.dtype) -> bool:
    """True where `latent_kernel` takes a store of this format; the reference takes the others."""
    form = StoreFormat.parse(store)
    (latents, rotary), page = form.runs[0], form.runs[0][0].page_size
    if dtype not in DTYPES or form.rotate_values or page not in (32, 64, 128, 256, 512):
        return False
    if any(power(x) != x or not 16 <= x <= 512 for x in (dim, rope_dim)):
        return False
    return _is_side_served(latents, dim) and rotary.bits >= 8 and _is_side_served(rotary, rope_dim)


def _is_side_served(fmt: PageFormat, dim: int) -> bool:
    """True where fields are tiles: at least sixteen elements, and whole groups of scales."""
    tile = min(dim * fmt.bits // 16, 128)
    if fmt.bits == 2 or fmt.whole or tile < 16:
        return False
    return fmt.bits == 16 or (fmt.group_size == dim if fmt.bits == 8 else fmt.group_size % tile == 0)


def key_of(latents: PageFormat, rotary: PageFormat, dim: int, rows: int) -> str:
    """Name of a kernel variant for the tuning file, e.g. ``"4t512/8,D512,N16"``."""
    return f"{latents.bits}t{latents.group_size if latents.bits < 8 else dim}/{rotary.bits},D{dim},N{rows}"


def _rotates(form: StoreFormat) -> int:
    """Rotation by which the kernel turns queries; 0 where fields are no blocks of channels in order."""
    return form.rotate_keys if form.runs[0][0].bits == 4 and form.rotate_keys <= 512 else 0


@lru_cache(maxsize=1024)
def _plan(
    store: str,
    query: Queries,
    rope_dim: int,
    tail: int,
    blocks: int,
    scoring: Scoring,
    device: torch.device,
    rotate: int,
) -> Plan:
    """Plan of a call: nothing here is asked again for another layer, or another step, of the same shape."""
    form = StoreFormat.parse(store)
    latents, rotary = form.runs[0]
    batch, heads, queries, width = query.shape
    dim, page, rows = width - rope_dim, latents.page_size, heads * queries
    columns = 16 if rows <= 16 else 32
    tiles = cdiv(rows, columns)
    kind = scoring.mask or MaskKind()
    knobs = lookup(device, "latent", key_of(latents, rotary, dim, columns))
    warps = knobs["warps"]
    # A product takes sixteen tokens a warp; of 8 and 16 bits shared memory holds no more, twice.
    step = min(knobs["step"] or (16 * warps if latents.bits == 4 else 64), page)
    loose = cdiv(form.sink, BLOCK) + cdiv(tail, BLOCK)
    # Registers let in eight warps, or twice as many with half of them each.
    resident = multiprocessors(device) * knobs["programs_per_sm"] * max(1, 8 // warps)
    paged = split_counts((blocks * (page // step),), batch * tiles, resident, loose)[0]
    splits = paged + loose
    numbers = {
        "strides": (*query.stride[:3], kind.strides[3]),
        **dict(zip(("s_mb", "s_mh", "s_mq"), kind.strides, strict=False)),
        "factor": factor_of(rotate),
        "factors": Factors(scoring.scaling, scoring.softcap),
        "B": batch,
        "L": kind.length,
        "W": tail,
        "SPLITS": splits,
        "PAGED": paged,
        "TABLE": blocks,
        "QUERIES": queries,
    }
    shape = LatentShape(
        HEADS=heads,
        SEVERAL=queries > 1,
        D=dim,
        R=rope_dim,
        S=form.sink,
        G=page,
        BITS=latents.bits,
        GROUP=latents.group_size if latents.bits < 8 else dim,
        ROPE_BITS=rotary.bits,
        BM=columns,
        BT=step,
        # Tiles stand unpacked in registers until their products are done. Columns of a product over 4-bit words must
        # suffice for all warps: eight each.
        TILE={16: 128, 8: 64}.get(latents.bits, max(16, 8 * warps)),
        BR=BLOCK,
        STAGES=knobs["stages"],
        WARPS=warps,
        MASK=kind.kind,
        ROWS=kind.strides[1] != 0 or kind.strides[2] != 0,
        SOFTCAP=scoring.softcap > 0,
        DTYPE=DTYPES[query.dtype],
        ROTATE=rotate,
        PDL=bool(overlap(device)),
    )
    constants = {"SHAPE": shape, "num_warps": warps, **overlap(device)}
    nest = nest_of(form, (0,), scoring.mask is not None, False)
    launch = Launch(latent_kernel, (batch, splits, tiles), numbers, constants, device, nest)
    # A kernel of its own rotates long blocks back: the merge would need all channels of one in one program, so that a
    # row's splits were read by as many programs as it has queries, and most of a GPU would wait.
    part, apart = (batch, splits, rows, dim), form.rotate_keys >= 256
    merge = merge_launch(part, queries, scoring.sinks, 0 if apart else form.rotate_keys, device)
    turn = turn_back_launch(batch * rows * dim // form.rotate_keys, form.rotate_keys, device) if apart else None
    return Plan((launch,), merge, part, (batch, heads, queries, dim), query.dtype, form.rotate_keys, turn)


FORGET.append(_plan.cache_clear)


def latent_wanted(
    form: StoreFormat,
    heads: int,
    dim: int,
    rope_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    queries: int = 1,
) -> Iterator[Wanted]:
    """The variants for steps of so many tokens without mask and sinks, in any number of rows of any length."""
    if not is_served(form.spec, dim, rope_dim, dtype):
        return
    rotate, width = _rotates(form), dim + rope_dim
    own = dtype if rotate == form.rotate_keys else torch.float32
    stride = (queries * heads * width, queries * width, width, 1)
    query, scoring = Queries((1, heads, queries, width), stride, dtype), scoring_of(None, None, width**-0.5)
    plan = _plan(form.spec, query, rope_dim, BLOCK, 1, scoring, device, rotate)
    yield from plan.wanted(form, own, 1, (dim, rope_dim), device, mapped=False)


def latent_attention(q: Tensor, *given: Any) -> Tensor:
    """Launcher of `hfkvq.kernels.decode_attention` for latents, whose windows have the batch's rows."""
    counters, windows, runs, mask, sinks, scaling, softcap, store, *_ = given
    dtype, dim, rope_dim = q.dtype, windows[0].shape[-1], windows[1].shape[-1]
    if not is_served(store.spec, dim, rope_dim, dtype):
        return reference("decode_attention")(q, *given)
    rotate = _rotates(store)
    if rotate != store.rotate_keys:
        own = hadamard(q[..., :dim].float(), store.rotate_keys)
        q = torch.cat([own, q[..., dim:].float()], -1)
    elif q.stride(-1) != 1:
        q = q.contiguous()
    held = [x.contiguous() for x in (counters, *windows, *runs)]
    query = Queries(q.shape, q.stride(), dtype)
    scoring = scoring_of(mask, sinks, scaling, softcap)
    tail, blocks = windows[2].shape[2], runs[0].shape[1]
    plan = _plan(store.spec, query, rope_dim, tail, blocks, scoring, q.device, rotate)
    return plan.run(plan.launches, q, held, [] if mask is None else [mask_words(mask)], sinks)
