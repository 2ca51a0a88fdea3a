"""Packages of other decode kernels, as far as the benchmark calls them: each reads its own layout, in plain torch."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import torch
import torch.nn.functional as F


def attention(query, keys, values, scaling):
    """(B, Hq, D) of a query (B, Hq, D) over (B, H, T, D)."""
    out = F.scaled_dot_product_attention(
        query[:, :, None].float(), keys.float(), values.float(), scale=scaling, enable_gqa=True
    )
    return out[:, :, 0].to(query.dtype if query.element_size() > 1 else torch.bfloat16)


def install(monkeypatch, name, **names):
    """Puts a module of these names where `import` finds it, and its packages."""
    module = ModuleType(name)
    vars(module).update(names)
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, name, module)
    return module


# FlashAttention, as vLLM packages it.


def varlen(q, k, v, *, softmax_scale, block_table=None, seqused_k=None, cu_seqlens_k=None, fa_version, **options):
    """Rows of pages (N, page, H, D), or one row after the other; queries are the newest of a row."""
    ends, queries = options["cu_seqlens_q"].tolist(), options["max_seqlen_q"]
    assert ends == list(range(0, len(q) + 1, queries))
    outs = []
    for i in range(len(ends) - 1):
        query = q[ends[i] : ends[i + 1]]
        if block_table is None:
            first, end = cu_seqlens_k[i : i + 2]
            keys, values = k[first:end], v[first:end]
        else:
            assert fa_version == 2 or options["scheduler_metadata"] == "a plan"
            keys, values = (x[block_table[i].long()].flatten(0, 1)[: seqused_k[i]] for x in (k.float(), v.float()))
        scales = [options.get(f"{x}_descale", torch.ones(len(q), 1))[i, 0] for x in "qkv"]
        keys, values = keys.float() * scales[1], values.float() * scales[2]
        for at in range(queries):
            seen = (x[: len(x) - queries + at + 1].transpose(0, 1)[None] for x in (keys, values))
            outs.append(attention(query[at : at + 1].float() * scales[0], *seen, softmax_scale))
    return torch.cat(outs).to(q.dtype if q.element_size() > 1 else torch.bfloat16)


def flash(monkeypatch, **changes):
    """Both versions."""
    names = {
        "flash_attn_varlen_func": varlen,
        "get_scheduler_metadata": lambda **options: "a plan",
        "FA2_AVAILABLE": True,
        "FA3_AVAILABLE": True,
    }
    install(monkeypatch, "vllm.vllm_flash_attn.flash_attn_interface", **names | changes)


# FlashInfer.


class Wrapper:
    """Pages (N, H, page, D)."""

    def __init__(self, workspace, layout, use_tensor_cores=False):
        assert layout == "HND"
        assert not workspace.any()

    def plan(self, indptr, indices, last, heads, kv_heads, dim, page, *, q_data_type, kv_data_type, sm_scale):
        """Remembers where rows are."""
        self.rows = [
            (indices[first:end].long(), (end - first - 1) * page + int(own))
            for first, end, own in zip(indptr[:-1], indptr[1:], last, strict=True)
        ]
        self.scale, self.stored = sm_scale, kv_data_type

    def run(self, query, pair):
        """(B, Hq, D)."""
        assert {x.dtype for x in pair} == {self.stored}
        rows = [[x.float()[at].transpose(0, 1).flatten(1, 2)[:, :length] for x in pair] for at, length in self.rows]
        outs = [attention(q[None], k[None], v[None], self.scale) for q, (k, v) in zip(query, rows, strict=True)]
        return torch.cat(outs)


def xqa(query, pair, workspace, tables, lengths, longest, *, bmm1_scale, kv_layout):
    """The same pages, by a table."""
    assert kv_layout == "HND"
    assert lengths.dtype == torch.uint32
    rows = [
        [x.float()[table.long()].transpose(0, 1).flatten(1, 2)[:, : int(length)] for x in pair]
        for table, length in zip(tables, lengths, strict=True)
    ]
    return torch.cat([attention(q[None], k[None], v[None], bmm1_scale) for q, (k, v) in zip(query, rows, strict=True)])


def flashinfer(monkeypatch):
    """Wrapper and XQA."""
    names = {"BatchDecodeWithPagedKVCacheWrapper": Wrapper, "xqa_batch_decode_with_kv_cache": xqa}
    install(monkeypatch, "flashinfer.decode", **names)


# TurboQuant: attention is over what was rounded, not over the bytes, so bytes that are read wrongly show.


class TurboQuantConfig:
    """Sizes in bytes of what is kept of a token."""

    def __init__(self, key_bits, value_bits, dim):
        self.key_fp8, self.norm_correction = key_bits == 8, key_bits < 8
        self.key_mse_bits = 0 if self.key_fp8 else key_bits
        self.effective_value_quant_bits = value_bits
        self.centroid_bits = self.key_mse_bits or value_bits
        self.key_packed_size = dim if self.key_fp8 else dim * key_bits // 8 + 2
        self.slot_size = self.key_packed_size + dim * value_bits // 8 + 4
        self.slot_size_aligned = self.slot_size + self.slot_size % 2

    @classmethod
    def from_cache_dtype(cls, name, dim):
        """By preset."""
        bits = {"turboquant_k8v4": (8, 4), "turboquant_4bit_nc": (4, 4), "turboquant_3bit_nc": (3, 3)}
        return cls(*bits[name], dim)


def in_bytes(codes, bits):
    """Codes (..., D) as bytes: a number of D * bits bits, lowest first."""
    shape = codes.shape[:-1]
    rows = [
        sum(code << (bits * i) for i, code in enumerate(row)) for row in codes.reshape(-1, codes.shape[-1]).tolist()
    ]
    size = codes.shape[-1] * bits // 8
    return torch.tensor([list(row.to_bytes(size, "little")) for row in rows], dtype=torch.uint8).view(*shape, size)


def as_bytes(x):
    """fp16 numbers (...) as bytes (..., 2)."""
    return x.half()[..., None].contiguous().view(torch.uint8)


def turboquant(monkeypatch):
    """Store and decode."""
    rounded = []

    def centroids(dim, bits):
        return torch.linspace(-2, 2, 2**bits) / math.sqrt(dim)

    def store(key, value, cache, slots, matrix, midpoints, *, mse_bits, key_packed_size, value_quant_bits, key_fp8):
        dim = key.shape[-1]
        if key_fp8:
            first, keys = key.to(torch.float8_e4m3fn).view(torch.uint8), key.to(torch.float8_e4m3fn).float()
        else:
            norm = key.float().norm(dim=-1, keepdim=True)
            codes = torch.bucketize(key.float() / norm @ matrix, midpoints)
            near = centroids(dim, mse_bits)[codes]
            keys = norm.half().float() * (near / near.norm(dim=-1, keepdim=True)) @ matrix.T
            first = torch.cat([in_bytes(codes, mse_bits), as_bytes(norm[..., 0])], -1)
        least, most = value.float().amin(-1, keepdim=True), value.float().amax(-1, keepdim=True)
        scale = (most - least) / (2**value_quant_bits - 1)
        codes = ((value.float() - least) / scale).round().int()
        rest = [in_bytes(codes, value_quant_bits), as_bytes(scale[..., 0]), as_bytes(least[..., 0])]
        assert first.shape[-1] == key_packed_size
        line = torch.cat([first, *rest], -1)
        cache.view(-1, *cache.shape[2:])[slots.long(), :, : line.shape[-1]] = line
        rounded.append((keys.transpose(0, 1), (codes * scale.half() + least.half()).transpose(0, 1)))

    def decode(*, query, kv_cache, block_table, scale, max_num_kv_splits, **options):
        last = rounded[-len(query) :]
        return attention(query, *(torch.stack([pair[i] for pair in last]) for i in (0, 1)), scale)

    quantization = "vllm.model_executor.layers.quantization.turboquant"
    install(monkeypatch, f"{quantization}.config", TurboQuantConfig=TurboQuantConfig)
    install(monkeypatch, f"{quantization}.centroids", get_centroids=centroids)
    operations = "vllm.v1.attention.ops.triton_turboquant"
    install(monkeypatch, f"{operations}_decode", triton_turboquant_decode_attention=decode)
    install(monkeypatch, f"{operations}_store", triton_turboquant_store=store)


# Kitty: bytes by loops over what its kernels' addresses say.


class KittyLayer:
    """Buffers and counts of one layer."""

    def __init__(self, batch, tokens, heads, dim, boosted, low, high, page, sink):
        assert (low, high) == (2, 4)
        pages = -(-tokens // page)
        self.D_BOOSTED, self.S = boosted, sink
        self.KeyCache = torch.zeros(batch * pages, heads * (page // 4 * (dim + boosted) + dim), dtype=torch.uint8)
        self.KeyCache_metadata = torch.zeros(batch * pages, heads, dim, 2, dtype=torch.half)
        self.ValueCache = torch.zeros(batch * pages, heads * page * dim // 4, dtype=torch.uint8)
        self.ValueCache_metadata = torch.zeros(batch * pages, heads, page, 2, dtype=torch.half)
        self.PageTable_K = torch.arange(batch * pages).view(batch, pages)
        self.PageTable_V = self.PageTable_K.clone()
        for name, size in (("Sink_Buffer", sink), ("Q_Buffer", page), ("Local_Buffer", page)):
            for side in "KV":
                setattr(self, f"{name}_{side}", torch.zeros(batch, heads, size, dim, dtype=torch.half))


def kitty(monkeypatch):
    """Packing and attention, over what was rounded."""
    kept = {"keys": [], "values": []}

    def grid(x, most):
        least, top = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
        scale = ((top - least) / most).half().float()
        least = least.half().float()
        codes = ((x.float() - least) / scale).round().clamp(min=0)
        return torch.minimum(codes, most + torch.zeros_like(codes)).int(), scale, least

    def fours(codes):
        return (codes.unflatten(-1, (-1, 4)) << torch.tensor([0, 2, 4, 6])).sum(-1).to(torch.uint8)

    def pages_of(x, first, count, page):
        x = x[:, :, first : first + page * count]
        return x.unflatten(2, (count, page)).transpose(1, 2)[0]

    def pack_k(x, first, count, table, offset, cache, meta, page, boosted):
        # (pages, H, D, page)
        channels = pages_of(x, first, count, page).mT.contiguous()
        raised = channels.abs().float().mean(-1).topk(boosted).indices
        place = torch.full(channels.shape[:-1], boosted, dtype=torch.uint8)
        place.scatter_(-1, raised, torch.arange(boosted, dtype=torch.uint8).expand(raised.shape))
        most = torch.where(place < boosted, 15.0, 3.0)[..., None]
        codes, scale, least = grid(channels, most)
        high = fours((codes >> 2).gather(2, raised[..., None].expand(*raised.shape, page)))
        parts = [fours(codes & 3).flatten(2), high.flatten(2), place]
        for i, number in enumerate(table[0, offset : offset + count].tolist()):
            cache[number] = torch.cat([part[i] for part in parts], -1).flatten()
            meta[number] = torch.cat([scale, least], -1)[i].half()
        kept["keys"].append((codes * scale + least).permute(1, 0, 3, 2).flatten(1, 2))

    def pack_v(x, first, count, table, offset, cache, meta, page):
        codes, scale, least = grid(pages_of(x, first, count, page), torch.tensor(3.0))
        for i, number in enumerate(table[0, offset : offset + count].tolist()):
            cache[number] = fours(codes)[i].flatten()
            meta[number] = torch.cat([scale, least], -1)[i].half()
        kept["values"].append((codes * scale + least).transpose(0, 1).flatten(1, 2))

    def forward(module, query, layer, scaling):
        batch = len(query)
        keys, values = (torch.stack(kept[side][-batch:]) for side in ("keys", "values"))
        keys = torch.cat([layer.Sink_Buffer_K, keys, layer.Q_Buffer_K[:, :, : layer.Q_Buffer_Count_K]], 2)
        waiting = layer.Q_Buffer_V[:, :, : layer.Q_Buffer_Count_V]
        values = torch.cat([layer.Sink_Buffer_V, values, waiting, layer.Local_Buffer_V], 2)
        return attention(query[:, :, 0], keys, values, scaling)[:, None], None

    install(monkeypatch, "kitty.kvcache.utils_kv_per_layer", KVCache_Layer=KittyLayer)
    install(monkeypatch, "kitty.kvcache.kernels.kitty_attention", kitty_attention_forward=forward)
    install(monkeypatch, "kitty.kvcache.kernels.kitty_quant_pack", quantize_pack_k=pack_k, quantize_pack_v=pack_v)


# KIVI: the product of rows with a matrix of words, as its kernel states it.


def kivi(monkeypatch):
    """inputs (N, 1, IC), words (M, OC / per, IC), scales and zeros (M, OC / group, IC)."""

    def product(inputs, words, scales, zeros, bits, group, heads, kv_heads):
        per, share = 32 // bits, heads // kv_heads
        out = torch.zeros(len(inputs), 1, scales.shape[1] * group)
        for n, row in enumerate(inputs):
            m = n // share
            for i in range(per):
                codes = (words[m].long() >> (bits * i)) & (2**bits - 1)
                at = torch.arange(len(words[m])) * per + i
                weights = codes * scales[m].float()[at // group] + zeros[m].float()[at // group]
                out[n, 0, at] = weights @ row[0].float()
        return out.half()

    install(monkeypatch, "kivi_gemv", gemv_forward_cuda_outer_dim=product)


# BitDecoding.


def bitdecoding(monkeypatch):
    """Its fragments have no plain layout, so what was rounded is remembered."""
    kept = []

    def pack(bits):
        def run(k, k_pack, k_params, v, v_pack, v_params, table, ends, tokens, mode, group):
            assert (mode, group) == ("k-channel", 128)
            assert k_pack.shape[1] * 16 // bits == tokens == v_pack.shape[1]
            sides = []
            for x, axis in ((k, 2), (v, 3)):
                x = x.unflatten(0, (len(ends) - 1, tokens)).transpose(1, 2).float()
                groups = x.unflatten(axis, (-1, group))
                least, top = groups.amin(axis + 1, True), groups.amax(axis + 1, True)
                scale = (top - least) / (2**bits - 1)
                sides.append((((groups - least) / scale).round() * scale + least).flatten(axis, axis + 1))
            kept.append(sides)

        return run

    def forward(query, k_pack, k_params, v_pack, v_params, table, scaling, mode, group, *rest):
        return attention(query[:, 0], *kept[-1], scaling)[:, None]

    names = {f"kvcache_pack_i{bits}": pack(bits) for bits in (2, 4)}
    install(monkeypatch, "bit_decode_cuda", **names, fwd_kvcache_i2=forward, fwd_kvcache_i4=forward)
