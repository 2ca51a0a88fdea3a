"""Seal on the GPU. Every program looks at its row's counters first and leaves at once if nothing is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from ...pages import PageFormat, Side
from ...seal import channel_widths, parse_rule
from .._lib import page_nest, side_kinds
from ..compile import Wanted
from ..launch import Launch
from .channel import channel_constants, ranks_in_kernel, seal_channel_kernel
from .token import seal_token_kernel, seal_unpacked_kernel, token_constants, unpacked_constants
from .trellis import measure_constants, measure_keys_kernel, seal_trellis_kernel, walk_constants


def seal_triton(*given: Any) -> None:
    """Launcher of `hfkvq.kernels.seal`."""
    source, index, parts, table, count, new, form, side, choose, q_abs, widths, norm, keep = given
    assert all([part.is_contiguous() for part in parts]), "pages are contiguous: they are written in place"
    batch, heads, _, head_dim = source.shape
    tokens = index.shape[1]
    if not tokens or not batch:
        return None
    rule = choose if form.raised else ""
    if rule and not _ranks(form, head_dim, rule):
        chosen = index.clamp(0, source.shape[2] - 1).long()[:, None, :, None]
        pages = source.gather(2, chosen.expand(-1, heads, -1, head_dim)).unflatten(2, (-1, form.page_size))
        widths, rule = channel_widths(pages, form, rule, q_abs), ""
    weight = q_abs.to(torch.float32) if q_abs is not None and rule else None
    more = [x.contiguous() for x in (widths if form.raised else None, weight, norm) if x is not None]
    has = widths is not None and bool(form.raised), weight is not None, norm is not None
    sizes = (batch, heads, head_dim), source.stride(), source.device, table.shape[1], tokens
    launches = _launches(form.spec, side, *sizes, rule, has)
    tensors = [*parts, table.contiguous(), count.contiguous(), new.contiguous(), source, index.contiguous(), *more]
    own = [*parts, table, count, new, source, index, *[x for x in (q_abs,) if x is not None]]
    if keep is not None and list(map(id, tensors)) == list(map(id, own)):
        bound = [launch.bound(*tensors) for launch in launches]
        keep(lambda: [launch() for launch in bound])
    for launch in launches:
        launch(*tensors)
    return None


def seal_wanted(
    fmt: PageFormat,
    side: Side,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    rule: str | None,
    weighed: bool,
) -> Iterator[Wanted]:
    """The variant for a source (B, H, D) of the model's dtype: raised by a rule, with weights or not, or by widths."""
    if rule and not _ranks(fmt, shape[2], rule):
        rule = None
    given = bool(fmt.raised) and not rule, weighed and bool(rule), fmt.normed
    kinds = [*side_kinds(fmt, side, *shape[1:], dtype), *[torch.int32] * 3, dtype, torch.int32]
    kinds += [kind for kind, has in zip((torch.uint8, torch.float32, torch.float16), given, strict=True) if has]
    for launch in _launches(fmt.spec, side, shape, stride, device, 1, tokens, rule or "", given):
        yield launch.wanted(kinds)


def _ranks(form: PageFormat, head_dim: int, rule: str) -> bool:
    """True where a kernel ranks channels by a rule."""
    return parse_rule(rule).name == "error" if form.trellis else ranks_in_kernel(form, head_dim)


@lru_cache(maxsize=1024)
def _launches(
    fmt: str,
    side: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: torch.device,
    blocks: int,
    tokens: int,
    rule: str,
    given: tuple[bool, bool, bool],
) -> list[Launch]:
    """Launches one after the other, which take the same tensors.

    They are a side's tensors, table, count, new, source, index, and what is given of widths, weights and factors.

    Args:
        side: "keys" or "values".
        shape: of the source, but for its tokens.
        blocks: pages of a row.
        rule: by which the kernel chooses raised channels, or "".
        given: whether there are widths, weights and factors.
    """
    form, is_keys, head_dim = PageFormat.parse(fmt), side == "keys", shape[2]
    slices = 1
    if form.bits >= 8:
        kernel, takes = seal_unpacked_kernel, ()
        tiles, constants = unpacked_constants(form, tokens, head_dim, device)
    elif form.trellis:
        kernel, takes = seal_trellis_kernel, ()
        tiles, constants = walk_constants(form, is_keys, False, tokens, head_dim)
    elif form.axis == "token":
        kernel, takes = seal_token_kernel, (2,)
        tiles, constants = token_constants(form, is_keys, tokens, head_dim)
    else:
        kernel, takes = seal_channel_kernel, (0, 1, 2)
        (tiles, slices), constants = channel_constants(form, is_keys, tokens, head_dim, rule)
    pages, end = page_nest((form,), 0), len(form.names) + 5

    def nest(takes: tuple[int, ...], tensors: Sequence[Any]) -> tuple[Any, ...]:
        # Tensors that may be given stand behind the index, where the kernel takes them.
        optional = [end + sum(map(bool, given[:i])) if given[i] else None for i in takes]
        return *pages(tensors), *tensors[end - 5 : end], *[None if i is None else tensors[i] for i in optional]

    numbers = {"strides": stride, "H": shape[1], "N": blocks, "M": tokens}

    def launch(kernel: Any, takes: tuple[int, ...], grid: tuple[int, ...], constants: dict[str, Any]) -> Launch:
        # A fused multiply-add would round once where the contract rounds twice, and move codes at ties.
        own = constants | {"enable_fp_fusion": False}
        return Launch(kernel, (grid[0], shape[0] * shape[1], *grid[1:]), numbers, own, device, partial(nest, takes))

    first = launch(kernel, takes, (tiles, slices), constants)
    if not form.trellis or not is_keys:
        return [first]
    tiles, constants = measure_constants(form, bool(rule), tokens, head_dim)
    launches = [launch(measure_keys_kernel, (0, 1), (tiles,), constants), first]
    if form.raised:
        tiles, constants = walk_constants(form, is_keys, True, tokens, head_dim)
        launches.append(launch(seal_trellis_kernel, (), (tiles,), constants))
    return launches
