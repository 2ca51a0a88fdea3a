"""Launcher of attention to latents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..dispatch import reference
from ..hadamard import factor_of, hadamard
from ..masks import MaskKind, mask_kind
from ..pages import PageFormat, StoreFormat
from ._lib import capability, cdiv, multiprocessors, power
from .compile import Wanted
from .configs import edition, lookup
from .decode_formats import BLOCK, DTYPES, split_counts
from .decode_plan import Plan, Queries, Scoring
from .hadamard import turn_back_launch
from .latent_kernel import LatentShape, latent_kernel
from .launch import Launch, Nest
from .merge import SPLITS, mask_words, merge_launch, sinks_kind
from .pair_format import Factors, Row


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


def _turns_apart(rotate: int) -> bool:
    """True where a kernel of its own rotates back: the merge would need all channels of so long a block in one program.

    A row's splits would then be read by as many programs as it has queries, and most of a GPU would wait.
    """
    return rotate >= 256


def _tile(bits: int, warps: int) -> int:
    """Most words of a tile: what is unpacked at a time stands in registers until its products are done."""
    # Columns of a product over 4-bit words must suffice for all warps: eight each.
    return {16: 128, 8: 64}.get(bits, max(16, 8 * warps))


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
    edition: int,
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
    dependent, splits = capability(device)[0] >= 9, paged + loose
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
        TILE=_tile(latents.bits, warps),
        BR=BLOCK,
        STAGES=knobs["stages"],
        WARPS=warps,
        MASK=kind.kind,
        ROWS=kind.strides[1] != 0 or kind.strides[2] != 0,
        SOFTCAP=scoring.softcap > 0,
        DTYPE=DTYPES[query.model_dtype],
        ROTATE=rotate,
        PDL=dependent,
    )
    constants = {
        "SHAPE": shape,
        "num_warps": warps,
        **({"launch_pdl": True} if dependent else {}),
        **({"maxnreg": knobs["max_registers"]} if knobs["max_registers"] else {}),
    }
    grid = (batch, splits, tiles)
    launch = Launch(latent_kernel, grid, numbers, constants, device, _nest(store, scoring.mask is not None))
    part, apart = (batch, splits, rows, dim), _turns_apart(form.rotate_keys)
    back, merged = (0, torch.float32) if apart else (form.rotate_keys, query.model_dtype)
    merge = merge_launch(part, queries, scoring.sinks, back, dependent, device, merged)
    turns = batch * rows * dim // form.rotate_keys if apart else 0
    turn = turn_back_launch(turns, form.rotate_keys, dependent, device) if apart else None
    return Plan((launch,), merge, part, (batch, heads, queries, dim), query.model_dtype, turn)


@lru_cache(maxsize=256)
def _nest(store: str, masked: bool) -> Nest:
    """From queries, counters, four windows, the run's tensors, the mask if there is one, sums, tops and weights."""
    latents, rotary = StoreFormat.parse(store).runs[0]
    own = {name: 1 + at for at, name in enumerate(latents.names)}
    turned = {name: 1 + len(own) + at for at, name in enumerate(rotary.names)}
    # The table stands for what a format lacks.
    order = [0, *(own.get(name, 0) for name in ("codes", "scale", "zero"))]
    order += [turned.get(name, 0) for name in ("codes", "scale")]
    end = 6 + 1 + len(own) + len(turned)

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        run = [given[6 + at] for at in order]
        if isinstance(given[0], Tensor):
            # Words, where a byte is a number: not every GPU that Triton knows has an fp8 type.
            run = [x.view(torch.int16) if x.dtype == torch.float8_e4m3fn else x for x in run]
        mask = given[end] if masked else given[0]
        return given[0], Row(*given[1:6], None), tuple(run), mask, *given[-3:]

    return nest


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
    query = Queries((1, heads, queries, width), stride, own, dtype)
    scoring = Scoring(None, None, width**-0.5, 0.0)
    plan = _plan(form.spec, query, rope_dim, BLOCK, 1, scoring, device, rotate, edition())
    kinds = [own, torch.int32, *[dtype] * 4, torch.int32]
    for fmt, side, size in zip(form.runs[0], ("keys", "values"), (dim, rope_dim), strict=True):
        found = [kind or dtype for _, kind in fmt.shapes(side, 1, size).values()]
        kinds += [torch.int16 if kind == torch.float8_e4m3fn else kind for kind in found]
    sums = [torch.float32] * 3
    yield plan.launches[0].wanted([*kinds, *sums])
    dependent = plan.merge.constants["PDL"]
    back, merged = (form.rotate_keys, plan.dtype) if plan.turn is None else (0, torch.float32)
    for splits in SPLITS:
        part = (1, splits, heads * queries, dim)
        yield merge_launch(part, queries, None, back, dependent, device, merged).wanted([*sums, merged])
    if plan.turn is not None:
        yield plan.turn.wanted([torch.float32, plan.dtype])


def latent_attention(q: Tensor, *given: Any) -> Tensor:
    """Launcher of `hfkvq.kernels.decode_attention` for latents, whose windows have the batch's rows."""
    counters, windows, runs, mask, sinks, scaling, softcap, store, *_ = given
    dtype, dim, rope_dim = q.dtype, windows[0].shape[-1], windows[1].shape[-1]
    if not is_served(store, dim, rope_dim, dtype):
        return reference("decode_attention")(q, *given)
    form = StoreFormat.parse(store)
    rotate = _rotates(form)
    if rotate != form.rotate_keys:
        own = hadamard(q[..., :dim].float(), form.rotate_keys)
        q = torch.cat([own, q[..., dim:].float()], -1)
    elif q.stride(-1) != 1:
        q = q.contiguous()
    tensors = [q, counters, *windows, *runs]
    if not all([x.is_contiguous() for x in tensors[1:]]):
        tensors[1:] = [x.contiguous() for x in tensors[1:]]
    query = Queries(q.shape, q.stride(), q.dtype, dtype)
    scoring = Scoring(None if mask is None else mask_kind(mask), sinks_kind(sinks), scaling, softcap)
    tail, blocks = windows[2].shape[2], runs[0].shape[1]
    plan = _plan(store, query, rope_dim, tail, blocks, scoring, q.device, rotate, edition())
    last = [] if mask is None else [mask_words(mask)]
    return plan.run(plan.launches, tensors[0], tensors[1:], last, sinks)
