"""A baseline that any quantized kernel has to beat: split-KV decode attention in plain Triton over dense keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

FAILURES = (RuntimeError, TritonError)
"""Errors of a kernel that does not fit this GPU, or of a full memory."""

BLOCK = 64
"""Tokens a step."""

MOST_SPLITS = 512

_DOT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOG2_E = 1.4426950408889634


class Tuning(NamedTuple):
    """Choices of a launch: programs to aim at a multiprocessor, loads in flight, warps a program."""

    programs_per_sm: int = 4
    stages: int = 3
    warps: int = 4


GRID = tuple(Tuning(programs, stages, 4) for stages in (2, 3, 4) for programs in (2, 4, 8, 16))
"""Variants that the benchmark tries at each shape; the fastest is the baseline."""


@triton.jit(do_not_specialize=["SPLITS"])
def split_kv_kernel(
    q, k, v, part, part_lse, scale, T, PER, SPLITS,
    SHARE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of a row's tokens against BM of the query heads that share a KV head; logits are to base 2."""
    i_s, i_bh, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_m = i_m * BM + tl.arange(0, BM)
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_m = o_m < SHARE
    m_q = m_m[:, None] & (o_d < D)[None, :]
    # [BM, BD]
    b_q = tl.load(q + (i_bh * SHARE + o_m)[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(DOT)
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_top = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    i_first = i_s * PER
    for i_t in tl.range(i_first, tl.minimum(i_first + PER, T), BT, num_stages=STAGES):
        # [BT, BD]
        p_kv = (i_bh * T + i_t + o_t)[:, None] * D + o_d[None, :]
        if EVEN:
            b_k = tl.load(k + p_kv)
            b_v = tl.load(v + p_kv)
        else:
            m_kv = (i_t + o_t < T)[:, None] & (o_d < D)[None, :]
            b_k = tl.load(k + p_kv, mask=m_kv, other=0.0)
            b_v = tl.load(v + p_kv, mask=m_kv, other=0.0)
        # [BM, BT]
        b_s = tl.dot(b_q, tl.trans(b_k.to(DOT)), input_precision="ieee") * scale
        if not EVEN:
            b_s = tl.where((i_t + o_t < T)[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_shrink = tl.exp2(b_top - b_new)
        b_p = tl.exp2(b_s - b_new[:, None])
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(DOT), b_v.to(DOT), b_acc * b_shrink[:, None], input_precision="ieee")
        b_top = b_new
    i_row = (i_bh * SPLITS + i_s) * SHARE + o_m
    tl.store(part + i_row[:, None] * D + o_d[None, :], b_acc / b_sum[:, None], mask=m_q)
    tl.store(part_lse + i_row, b_top + tl.log2(b_sum), mask=m_m)


@triton.jit(do_not_specialize=["SPLITS"])
def merge_kernel(
    part, part_lse, out, SPLITS,
    SHARE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One query head: the splits' outputs weighted by the share of the softmax that each has seen."""
    i_m, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row = i_bh * SPLITS * SHARE + i_m
    o_d = tl.arange(0, BD)
    o_s = tl.arange(0, BS)
    b_lse = tl.load(part_lse + i_row + o_s * SHARE, mask=o_s < SPLITS, other=float("-inf"))
    b_top = tl.max(b_lse, 0)
    b_total = tl.sum(tl.exp2(b_lse - b_top), 0)
    b_acc = tl.zeros([BD], tl.float32)
    for i_s in range(0, SPLITS, CHUNK):
        o_c = i_s + tl.arange(0, CHUNK)
        m_c = o_c < SPLITS
        b_weight = tl.exp2(tl.load(part_lse + i_row + o_c * SHARE, mask=m_c, other=float("-inf")) - b_top)
        p_part = part + (i_row + o_c * SHARE)[:, None] * D + o_d[None, :]
        # [CHUNK, BD]
        b_part = tl.load(p_part, mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)
        b_acc += tl.sum(b_weight[:, None] * b_part, 0)
    p_out = out + (i_bh * SHARE + i_m) * D + o_d
    tl.store(p_out, (b_acc / b_total).to(out.dtype.element_ty), mask=o_d < D)


def split_kv(q: Tensor, k: Tensor, v: Tensor, scaling: float, tuning: Tuning | None = None) -> Tensor:
    """Attention of one new token a row over dense keys and values.

    Args:
        q: (B, Hq, 1, D), contiguous.
        k: (B, H, T, D), contiguous; so is v.
        v: (B, H, T, D).
        scaling: factor on the logits.
        tuning: see `Tuning`.

    Returns:
        (B, Hq, 1, D) in the dtype of q.
    """
    tuning = tuning or Tuning()
    batch, query_heads, _, head_dim = q.shape
    heads, tokens = k.shape[1:3]
    share = query_heads // heads
    tiles = triton.cdiv(share, 16)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    blocks = triton.cdiv(tokens, BLOCK)
    splits = min(triton.cdiv(sms * tuning.programs_per_sm, batch * heads * tiles), blocks, MOST_SPLITS)
    per = triton.cdiv(blocks, splits) * BLOCK
    # No split without tokens: the merge relies on it.
    splits = triton.cdiv(tokens, per)
    part = torch.empty((batch * heads, splits, share, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((batch * heads, splits, share), dtype=torch.float32, device=q.device)
    # The interpreter has no bf16 arithmetic.
    out = torch.empty_like(q, dtype=q.dtype if q.is_cuda else torch.float32)
    wide = triton.next_power_of_2(head_dim)
    split_kv_kernel[(splits, batch * heads, tiles)](
        q,
        k,
        v,
        part,
        part_lse,
        scaling * _LOG2_E,
        tokens,
        per,
        splits,
        SHARE=share,
        D=head_dim,
        BM=16,
        BT=BLOCK,
        BD=wide,
        EVEN=tokens % BLOCK == 0 and wide == head_dim,
        DOT=_DOT_DTYPES[q.dtype] if q.is_cuda else tl.float32,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
    )
    merge_kernel[(share, batch * heads)](
        part,
        part_lse,
        out,
        splits,
        SHARE=share,
        D=head_dim,
        BD=wide,
        BS=triton.next_power_of_2(splits),
        CHUNK=16,
        num_warps=4,
    )
    return out.to(q.dtype)
