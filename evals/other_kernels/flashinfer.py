"""FlashInfer's paged decode, over bf16 (or fp16) and fp8: its CUDA-core, tensor-core and XQA kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from evals.kernel_cases import Shape
from evals.other_kernels.peer import Peer, Prepared, imported, page_table, paged

PAGE = 128
WORKSPACE = 256 << 20
XQA = "XQA"
WRAPPERS = {"CUDA cores": False, "tensor cores": True}


class FlashInfer(Peer):
    """Over 16-bit keys and values."""

    name = "flashinfer"
    package = "flashinfer-python"
    remedy = "pip install flashinfer-python (kernels are compiled when they are first used)"
    code_bits = (16, 16)
    stored: ClassVar[torch.dtype | None] = None

    def load(self) -> None:
        names = ("BatchDecodeWithPagedKVCacheWrapper", "xqa_batch_decode_with_kv_cache")
        self._wrapper, self._xqa = imported("flashinfer.decode", *names)

    def variants(self, shape: Shape) -> tuple[str, ...]:
        return (*WRAPPERS, XQA)

    def prepare(self, shape: Shape, query: Tensor, keys: Tensor, values: Tensor, variant: str) -> Prepared:
        stored = self.stored or keys.dtype
        cache = tuple(paged(x.to(stored), PAGE, heads_first=True) for x in (keys, values))
        given = query[:, :, 0].contiguous()
        table = page_table(shape.batch, shape.context, PAGE, query.device)
        # Semaphores in it have to be zero at first.
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=query.device)
        if variant == XQA:
            lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=query.device)
            attend = partial(self._call_xqa, shape, given, workspace, table, lengths.view(torch.uint32))
        else:
            wrapper = self._wrapper(workspace, "HND", use_tensor_cores=WRAPPERS[variant])
            pages = table.shape[1]
            wrapper.plan(
                torch.arange(shape.batch + 1, dtype=torch.int32) * pages,
                table.flatten(),
                torch.full((shape.batch,), shape.context - (pages - 1) * PAGE, dtype=torch.int32),
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                PAGE,
                q_data_type=query.dtype,
                kv_data_type=stored,
                sm_scale=shape.scaling,
            )
            attend = partial(self._call_wrapper, wrapper, given)
        # Where the last page is not full, the rest of it is not read.
        read = 2 * keys.numel() * cache[0].element_size()
        return Prepared(cache, attend, read, partial(self._exact, stored, keys, values))

    def _call_wrapper(self, wrapper: Any, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return wrapper.run(query, (keys, values))

    def _call_xqa(
        self,
        shape: Shape,
        query: Tensor,
        workspace: Tensor,
        table: Tensor,
        lengths: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        return self._xqa(
            query,
            (keys, values),
            workspace,
            table,
            lengths,
            shape.context,
            bmm1_scale=shape.scaling,
            kv_layout="HND",
        )

    def _exact(self, stored: torch.dtype, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.to(stored).float(), values.to(stored).float()


class FlashInferFP8(FlashInfer):
    """Over fp8 keys and values, with scales of 1."""

    name = "flashinfer-fp8"
    code_bits = (8, 8)
    # XQA rounds the query and the probabilities to fp8 too: each is off by 2.6 % root mean square.
    tolerance = 0.08
    stored = torch.float8_e4m3fn
