"""Quantize and dequantize pages: the contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import exact
from .groups import F16_MAX, Groups
from .pages import WALK, PageFormat, Side
from .trellis import RATIO, as_i16, centre, decode, encode, encode_with, own_scale

FP8_MAX = 448.0


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes (..., D) of ``bits`` bits into i16 words (..., E); field f of word e holds channel f*E + e."""
    fields = 16 // bits
    words = -(-codes.shape[-1] // fields)
    codes = torch.nn.functional.pad(codes.to(torch.int32), (0, words * fields - codes.shape[-1]))
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=codes.device)
    return as_i16((codes.unflatten(-1, (fields, words)) << shifts[:, None]).sum(-2, dtype=torch.int32))


def unpack_words(words: Tensor, bits: int, head_dim: int) -> Tensor:
    """Inverse of `pack_words`: i16 words (..., E) to i16 codes (..., head_dim)."""
    shifts = torch.arange(0, 16, bits, dtype=torch.int16, device=words.device)
    # The arithmetic shift smears the sign bit into fields that the mask removes.
    codes = (words.unsqueeze(-2) >> shifts[:, None]) & (2**bits - 1)
    return codes.flatten(-2)[..., :head_dim]


def _affine(x: Tensor, levels: Tensor | float, dim: int, fit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of groups along ``dim``, computed against scale and zero as stored in f16.

    Elements that are not finite in f16 count for nothing; they take the nearest end of their group (NaN: the lower).
    """
    groups = Groups(x, levels, dim)
    scale, zero = groups.scales(fit)
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    code = torch.floor((x - zero.float()) * inverse + 0.5)
    # NaN compares false with everything, so it is replaced before the clamp.
    code = torch.where(torch.isnan(code), 0.0, code).clamp(min=0.0)
    code = torch.minimum(code, groups.levels)
    return code.to(torch.int32), scale, zero


def _marked(index: Tensor, used: Tensor, head_dim: int) -> Tensor:
    """True at the channels that are listed and used: bool (n, H, head_dim) from two (n, H, room)."""
    count = torch.zeros(*index.shape[:2], head_dim, dtype=torch.float32, device=index.device)
    return count.scatter_add_(-1, index, used.float()) > 0


def _ranks(widths: Tensor, width: int, count: int, room: int) -> tuple[Tensor, Tensor]:
    """Channels of ``width`` in a (N, H, D) map: indices (N, H, room), and which of these ranks are used."""
    chosen = widths == width
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)[..., :count]
    order = torch.nn.functional.pad(order, (0, room - order.shape[-1]))
    used = torch.arange(room, device=widths.device) < chosen.sum(-1, keepdim=True).clamp(max=count)
    return torch.where(used, order, 0), used


def quantize_pages(
    x: Tensor,
    fmt: PageFormat,
    side: Side,
    widths: Tensor | None = None,
    norm: Tensor | None = None,
) -> list[Tensor]:
    """Quantizes whole pages: ``code = floor((x - zero) / scale + 1/2)``, ``scale = (max - min) / (2^bits - 1)``.

    Or scale and zero are fitted, see `PageFormat`. In a normed format x is what remains of the tokens when they are
    divided by ``norm``.

    Args:
        x: (N, H, G, D), any float dtype, in the basis of the store.
        side: "keys" or "values"; decides which axis of the codes is contiguous.
        widths: u8 (N, H, D), bits of each channel, one of ``fmt.bits`` and the raised widths; None raises none. More
            channels of a width than the format has room for: the first (lowest channel) ones are raised.
        norm: f16, positive, of each token (N, H, G) or channel (N, H, D), where the format is normed; None is 1.

    Returns:
        Tensors in the order of ``fmt.names``, shaped as `PageFormat` says with P = N.
    """
    if fmt.bits == 16:
        return [x]
    n, heads, page, head_dim = x.shape
    source, x = x, x.float()
    if fmt.bits == 8:
        groups = x.unflatten(-1, (-1, fmt.group_size))
        magnitude = groups.abs()
        scale = torch.where(magnitude <= F16_MAX, magnitude, 0.0).amax(-1, keepdim=True) / FP8_MAX
        scale = scale.half()
        inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
        code = (torch.nan_to_num(groups, 0.0, F16_MAX, -F16_MAX) * inverse).clamp(-FP8_MAX, FP8_MAX)
        return [code.flatten(-2).to(torch.float8_e4m3fn), scale.squeeze(-1).transpose(-1, -2).contiguous()]

    out: dict[str, Tensor] = {}
    if fmt.normed:
        if norm is None:
            norm = x.new_ones((n, heads, page if fmt.axis == "channel" else head_dim), dtype=torch.float16)
        out["norm"] = norm
        # Multiplied by what is rounded once, as kernels do.
        x = x * (1.0 / norm.float()).unsqueeze(-1 if fmt.axis == "channel" else -2)
    if fmt.trellis and side == "values":
        out["codes"], out["scale"] = encode(x, fmt.bits)
        return [out[name] for name in fmt.names]
    if fmt.trellis:
        return _walk_keys(x, fmt, widths)
    if fmt.axis == "token":
        code, scale, zero = _affine(x.unflatten(-1, (-1, fmt.group_size)), float(2**fmt.bits - 1), -1, fmt.fit)
        code = code.flatten(-2)
        out["scale"], out["zero"] = (t.squeeze(-1).transpose(-1, -2).contiguous() for t in (scale, zero))
    else:
        levels: Tensor | float = float(2**fmt.bits - 1)
        if widths is None:
            widths = torch.full((n, heads, head_dim), fmt.bits, dtype=torch.uint8, device=x.device)
        raised = {width: _ranks(widths, width, count, fmt.raised_room(width)) for width, count in fmt.raised}
        if 4 in raised:
            index, used = raised[4]
            levels = torch.full((n, heads, head_dim), levels, dtype=torch.float32, device=x.device)
            levels = levels.masked_fill(_marked(index, used, head_dim), 15.0)[:, :, None, None, :]
        code, scale, zero = _affine(x.unflatten(2, (-1, fmt.group_size)), levels, 3, fmt.fit)
        code, scale, zero = code.flatten(2, 3), scale.squeeze(3), zero.squeeze(3)
        if 16 in raised:
            index, used = raised[16]
            whole = _marked(index, used, head_dim)
            code, scale, zero = (t.masked_fill(whole[:, :, None, :], 0) for t in (code, scale, zero))
            gathered = source.gather(-1, index[:, :, None, :].expand(n, heads, page, -1))
            out["full"] = gathered.masked_fill(~used[:, :, None, :], 0)
            out["full_index"] = index.to(fmt.index_dtype(head_dim))
        if 4 in raised:
            index, used = raised[4]
            upper = (code >> fmt.bits).gather(-1, index[:, :, None, :].expand(n, heads, page, -1))
            # Along tokens: field f of row t is token f*G/8 + t of the page.
            upper = upper.masked_fill(~used[:, :, None, :], 0)
            out["high"] = pack_words(upper.transpose(-1, -2), 2).transpose(-1, -2)
            out["high_index"] = index.to(fmt.index_dtype(head_dim))
            code = code & (2**fmt.bits - 1)
        out["scale"], out["zero"] = scale, zero
    words = pack_words(code, fmt.bits)
    out["codes"] = words if side == "keys" else words.transpose(-1, -2)
    return [out[name] for name in fmt.names]


def _walk_keys(x: Tensor, fmt: PageFormat, widths: Tensor | None) -> list[Tensor]:
    """Pages of keys in trellis codes; without ``widths`` the lowest channels are those raised."""
    rest, zero = centre(x.transpose(2, 3))
    scale = own_scale(rest)
    made = [scale.squeeze(3).unsqueeze(2), zero.squeeze(3).unsqueeze(2)]
    scale = scale.float()
    codes = encode_with(rest, scale, fmt.bits)
    again = fmt.raised_count(3)
    if not again:
        return [codes, *made]
    order = torch.zeros_like(scale[..., 0]) if widths is None else widths
    index = order.argsort(dim=-1, descending=True, stable=True)[..., :again]
    rest, chosen = rest - decode(codes, fmt.bits) * scale, index[..., None]
    rest, scale = rest.gather(2, chosen.expand(-1, -1, -1, rest.shape[3])), scale.gather(2, chosen)
    return [codes, *made, encode_with(rest, scale * RATIO, WALK), index.to(fmt.index_dtype(x.shape[-1]))]


def _walked_keys(named: dict[str, Tensor], fmt: PageFormat) -> Tensor:
    x = decode(named["codes"], fmt.bits)
    if "high" in named:
        # The clamp keeps what a reserved page holds, anything, from indexing past the head.
        index = named["high_index"].long().clamp(max=x.shape[2] - 1)[..., None]
        more = decode(named["high"], WALK) * RATIO
        x.scatter_add_(2, index.expand_as(more), more)
    scale, zero = (named[name].float().transpose(2, 3) for name in ("scale", "zero"))
    return (x * scale + zero).transpose(2, 3)


@exact
def dequantize_pages(parts: Sequence[Tensor], fmt: PageFormat, side: Side, head_dim: int) -> Tensor:
    """Dense values of pages: ``x̂ = code * scale + zero``, times ``norm`` if the format is normed.

    Args:
        parts: tensors of N pages, in the order of ``fmt.names``.
        side: "keys" or "values".

    Returns:
        f32 (N, H, G, D), in the basis of the store.
    """
    named = dict(zip(fmt.names, parts, strict=True))
    codes = named["codes"]
    if not codes.shape[0]:
        return codes.new_empty((0, codes.shape[1], fmt.page_size, head_dim), dtype=torch.float32)
    if fmt.bits == 16:
        return codes.to(torch.float32, copy=True)
    if fmt.bits == 8:
        scale = named["scale"].float().transpose(-1, -2)[..., None]
        return (codes.float().unflatten(-1, (-1, fmt.group_size)) * scale).flatten(-2)
    if fmt.trellis:
        if side == "values":
            return decode(codes, fmt.bits) * named["scale"].float().transpose(-1, -2)
        return _walked_keys(named, fmt)
    if side == "values":
        codes = codes.transpose(-1, -2)
    x = unpack_words(codes, fmt.bits, head_dim).float()
    page = x.shape[-2]
    if "high" in named:
        # The clamps keep what a reserved page holds, anything, from indexing past the head.
        index = named["high_index"].long()[:, :, None, :].clamp(max=head_dim - 1)
        upper = unpack_words(named["high"].transpose(-1, -2), 2, page).transpose(-1, -2).float()
        x.scatter_add_(-1, index.expand_as(upper), upper * 4.0)
    scale, zero = named["scale"].float(), named["zero"].float()
    # In place: a budget counts what a change of layers takes for a time.
    if fmt.axis == "channel":
        groups = x.unflatten(-2, (page // fmt.group_size, -1))
        groups.mul_(scale.unsqueeze(-2)).add_(zero.unsqueeze(-2))
    else:
        groups = x.unflatten(-1, (-1, fmt.group_size))
        groups.mul_(scale.transpose(-1, -2)[..., None]).add_(zero.transpose(-1, -2)[..., None])
    if "norm" in named:
        x *= named["norm"].float().unsqueeze(-1 if fmt.axis == "channel" else -2)
    if "full" in named:
        index = named["full_index"].long().clamp(max=head_dim - 1)[:, :, None, :]
        full = named["full"].float()
        x.scatter_add_(-1, index.expand_as(full), full)
    return x
