"""vLLM's TurboQuant decode: keys rotated and rounded to Lloyd-Max centroids (or fp8), values to a grid, per token."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from evals.kernel_cases import Shape
from evals.other_kernels.peer import Peer, Prepared, check_multiple, imported

PAGE = 128
SPLITS = (32, 64, 128, 256)
"""Variants; vLLM's own default is the first."""


def rotation(dim: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix (D, D), orthonormal and symmetric, as vLLM rotates keys."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(dim)


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Codes (..., D) of bytes (..., D * bits / 8), the first in the lowest bits."""
    spread = (packed[..., None].int() >> torch.arange(8, device=packed.device)) & 1
    each = spread.flatten(-2)[..., : dim * bits].unflatten(-1, (dim, bits))
    return (each << torch.arange(bits, device=packed.device)).sum(-1)


def halves(packed: Tensor) -> Tensor:
    """The fp16 number (...) in two bytes (..., 2), as fp32."""
    return packed.contiguous().view(torch.float16).float()[..., 0]


class _TurboQuant(Peer):
    package = "vllm"
    remedy = "pip install vllm, 0.25.0 or newer"
    # Over its own dequantized tensors only the bf16 query and output are rounded.
    tolerance = 0.02
    preset: ClassVar[str]

    def load(self) -> None:
        quantization = "vllm.model_executor.layers.quantization.turboquant"
        (self._config,) = imported(f"{quantization}.config", "TurboQuantConfig")
        (self._centroids,) = imported(f"{quantization}.centroids", "get_centroids")
        operations = "vllm.v1.attention.ops.triton_turboquant"
        (self._decode,) = imported(f"{operations}_decode", "triton_turboquant_decode_attention")
        (self._store,) = imported(f"{operations}_store", "triton_turboquant_store")

    def variants(self, shape: Shape) -> tuple[str, ...]:
        return tuple(f"{splits} splits" for splits in SPLITS)

    def prepare(self, shape: Shape, query: Tensor, keys: Tensor, values: Tensor, variant: str) -> Prepared:
        check_multiple(shape, PAGE, self.name)
        config = self._config.from_cache_dtype(self.preset, shape.head_dim)
        device, pages = query.device, shape.context // PAGE
        matrix = rotation(shape.head_dim, device)
        centroids = self._centroids(shape.head_dim, config.centroid_bits).to(device, torch.float32)
        ordered = centroids.sort().values
        slots = torch.zeros(
            (shape.batch * pages, PAGE, shape.kv_heads, config.slot_size_aligned), dtype=torch.uint8, device=device
        )
        table = torch.arange(shape.batch * pages, dtype=torch.int32, device=device).view(shape.batch, pages)
        for row in range(shape.batch):
            # All rows at once would need several times their size in fp32.
            self._store(
                keys[row].transpose(0, 1).contiguous(),
                values[row].transpose(0, 1).contiguous(),
                slots[row * pages : (row + 1) * pages],
                torch.arange(shape.context, dtype=torch.int32, device=device),
                matrix,
                (ordered[1:] + ordered[:-1]) / 2,
                mse_bits=config.key_mse_bits,
                key_packed_size=config.key_packed_size,
                value_quant_bits=config.effective_value_quant_bits,
                key_fp8=config.key_fp8,
            )
        options: dict[str, Any] = {
            "block_table": table,
            "seq_lens": torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device),
            "Pi": matrix,
            "PiT": matrix,
            "centroids": centroids,
            "scale": shape.scaling,
            "mse_bits": config.key_mse_bits,
            "key_packed_size": config.key_packed_size,
            "value_quant_bits": config.effective_value_quant_bits,
            "key_fp8": config.key_fp8,
            "norm_correction": config.norm_correction,
            "max_num_kv_splits": int(variant.split()[0]),
        }
        attend = partial(self._call, query[:, :, 0].contiguous(), options)
        return Prepared((slots,), attend, slots.nbytes, partial(self._exact, shape, config, centroids, matrix, slots))

    def _call(self, query: Tensor, options: dict[str, Any], slots: Tensor) -> Tensor:
        return self._decode(query=query, kv_cache=slots, **options)

    def _exact(
        self, shape: Shape, config: Any, centroids: Tensor, matrix: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        dim = shape.head_dim
        rows = slots.view(shape.batch, shape.context, shape.kv_heads, -1).transpose(1, 2)
        packed, rest = rows[..., : config.key_packed_size], rows[..., config.key_packed_size : config.slot_size]
        if config.key_fp8:
            keys = packed.contiguous().view(torch.float8_e4m3fn).float()
        else:
            directions = centroids[unpack(packed[..., :-2], config.key_mse_bits, dim)]
            if config.norm_correction:
                directions = directions / directions.norm(dim=-1, keepdim=True)
            keys = halves(packed[..., -2:])[..., None] * (directions @ matrix)
        codes = unpack(rest[..., :-4], config.effective_value_quant_bits, dim)
        scale, zero = halves(rest[..., -4:-2]), halves(rest[..., -2:])
        return keys, codes * scale[..., None] + zero[..., None]


class TurboQuant4(_TurboQuant):
    """4-bit keys and values."""

    name = "turboquant-4"
    code_bits = (4, 4)
    preset = "turboquant_4bit_nc"


class TurboQuant3(_TurboQuant):
    """3-bit keys and values."""

    name = "turboquant-3"
    code_bits = (3, 3)
    preset = "turboquant_3bit_nc"


class TurboQuantK8V4(_TurboQuant):
    """Keys in fp8, 4-bit values."""

    name = "turboquant-k8v4"
    code_bits = (8, 4)
    preset = "turboquant_k8v4"
