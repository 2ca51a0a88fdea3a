"""Several queries of each row: steps of up to 16 tokens, as in speculative decoding, and prompts behind a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hfkvq.caches import behind

from .cases import Shape, bytes_read, fill
from .timing import Timing, first_line, time_calls

MOST_MASK = 1 << 28
"""Bytes of a mask of queries times columns up to which attention with one is timed."""

OPEN = "not causal: shows later tokens, too"
"""Remark of what is no baseline, since its result is another one, but a bound."""


def _lower_right(query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    bias = causal_lower_right(query.shape[2], keys.shape[2])
    return lambda: F.scaled_dot_product_attention(query, keys, values, bias, enable_gqa=True)


def _by(
    backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> Callable[[], Tensor]:
    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    return attend


AS_OURS = "SDPA, as we ask for it"

AGAIN = "{}, length again"
"""Name of a prompt's attention of a length that has come often enough for cuDNN's plan."""

MOST_AGAIN = 1024
"""Calls up to which a length is made to come often enough; a length that needs more is hardly ever one of them."""


def calls_until_again(shape: Shape) -> int:
    """Calls after which a prompt's length goes the other way; 0 where it does from the first on, or hardly ever."""
    work = shape.batch * shape.heads * shape.queries * shape.context
    calls = behind.LOST // work + 1
    return calls if work < behind.PAYS and calls <= MOST_AGAIN else 0


def _as_ours_again(calls: int, query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    attend = _as_ours(query, keys, values)
    for _ in range(calls):
        attend()
    return attend


def _as_ours(query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    return lambda: behind.attend_behind(query, keys, values, query.shape[3] ** -0.5)


def _packed(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    """The query heads of a KV head as more queries of one head."""
    return _by(backend, query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3), keys, values)


def measure_several(
    shape: Shape, query: Tensor, copies: Sequence[tuple[Tensor, Tensor]], replays: int
) -> Iterator[tuple[str, Timing | str, str]]:
    """What several queries are held against; see `baselines.measure_baselines`.

    cuDNN aligns its triangle to the upper left, so it is given a mask, or shows every token: the same work for a
    context that is long beside the queries, and the bar that no right result of its own would be above. So are a step's
    queries with the heads of a KV head packed, which keeps a kernel from reading keys once for each of them.
    """
    made: dict[str, tuple[Callable[..., Callable[[], Tensor]], str]] = {
        "flash SDPA": (_lower_right, "causal, lower right"),
        "cuDNN SDPA": (partial(_by, SDPBackend.CUDNN_ATTENTION), OPEN),
    }
    if shape.is_prompt:
        # Another shape may have asked for the same length.
        behind.forget()
        made[AS_OURS] = (_as_ours, "of dense keys and values")
        if calls := calls_until_again(shape):
            made[AGAIN.format(AS_OURS)] = (partial(_as_ours_again, calls), "of dense keys and values")
    else:
        made["flash SDPA, packed"] = (partial(_packed, SDPBackend.FLASH_ATTENTION), OPEN)
        made["cuDNN SDPA, packed"] = (partial(_packed, SDPBackend.CUDNN_ATTENTION), OPEN)
    columns = copies[0][0].shape[2]
    if shape.queries * columns <= MOST_MASK:
        mask = torch.ones(shape.queries, columns, dtype=torch.bool, device=query.device)
        mask = mask.tril(columns - shape.queries)[None, None]
        made["cuDNN SDPA, mask"] = (
            partial(_by, SDPBackend.CUDNN_ATTENTION, mask=mask),
            "a mask of queries times columns",
        )
    for name, (make, remark) in made.items():
        try:
            yield name, time_calls([make(query, *copy) for copy in copies], replays), remark
        except RuntimeError as error:
            # Not every GPU and build has all.
            yield name, first_line(error), remark


def measure_prompt(
    shape: Shape, name: str, data: tuple[Tensor, Tensor, Tensor], replays: int
) -> Iterator[tuple[str, Timing, int, str, str]]:
    """A prompt's attention behind a compressed context, as layers do it: dequantized once, then PyTorch's attention.

    Twice where a length that comes again goes another way.

    Args:
        shape: the shape.
        name: of the format.
        data: query, keys and values.
        replays: see `time_calls`.

    Yields:
        A name, the time, bytes read of the store, the store's format, and how much memory a call takes at most.
    """
    query, *sides = data
    store = fill(name, *(x[:, :, : shape.context] for x in sides))
    new = [x[:, :, shape.context :] for x in sides]

    def attend() -> Tensor:
        return behind.attend_store(store, query, (new[0], new[1]), shape.context, shape.scaling)

    def measured(title: str) -> tuple[str, Timing, int, str, str]:
        sizes = (peak_of(attend), query.nbytes, sum(x.nbytes for x in sides))
        peak, out, dense = (f"{size / 2**20:,.0f}" for size in sizes)
        remark = f"peak {peak} MiB with the output, which has {out}; dense keys and values {dense}"
        return title, time_calls([attend], replays), bytes_read(store, query), store.format.spec, remark

    # Other formats have asked for the same length.
    behind.forget()
    yield measured(name)
    calls = calls_until_again(shape)
    for _ in range(calls):
        attend()
    if calls:
        yield measured(AGAIN.format(name))


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that a call takes at most beyond what is there, its result included."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
