"""Bytes of a whole cache, and the largest batch and context that a memory holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfkvq.caches.base.model_config import queries_per_head
from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.layer_state.tags import room_for_columns
from hfkvq.caches.layers.build import scheme_for_window
from hfkvq.caches.schemes.base import Scheme
from hfkvq.caches.schemes.eviction import TokenEviction
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.caches.step_graphs import graphs_enabled
from hfkvq.measure.models.outline import Outline, outline

from .layer import Arrival, layer_bytes

_METHOD_BITS = {"fp8": 8, "fbgemm_fp8": 8, "finegrained_fp8": 8, "mxfp4": 4.25, "bitnet": 2, "eetq": 8}
"""Bits of a weight where a quantization config names none."""

METADATA_BITS = 0.5
"""Bits of scales and zeros of a weight of 4 bits in groups of 64 to 128, generously."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights.

    Attributes:
        parameters: of the model, tied ones once.
        total: bytes.
        source: origin of the bytes, in words.
        exact: True if they are counted, not estimated.
    """

    parameters: int
    total: int
    source: str
    exact: bool


def _quantized_bits(config: Any) -> float | None:
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    values = stated if isinstance(stated, dict) else stated.to_dict()
    if values.get("load_in_4bit") or values.get("_load_in_4bit"):
        return 4 + METADATA_BITS
    if values.get("load_in_8bit") or values.get("_load_in_8bit"):
        return 8
    bits = values.get("bits", values.get("w_bit"))
    if isinstance(bits, (int, float)):
        return bits + (METADATA_BITS if bits < 8 else 0)
    return _METHOD_BITS.get(str(values.get("quant_method", "")).split(".")[-1].lower())


def weights_of(outline: Outline, dtype: torch.dtype, stored: int | None = None) -> Weights:
    """Bytes by parameters and dtype; of quantized checkpoints ``stored``, or an estimate by their bits.

    Args:
        dtype: of weights that are not quantized.
        stored: bytes of the checkpoint, if they are known.
    """
    full = outline.parameters * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    if getattr(outline.config, "quantization_config", None) is None:
        return Weights(outline.parameters, full, f"parameters in {name}", True)
    if stored is not None:
        return Weights(outline.parameters, stored, "the quantized checkpoint's size", True)
    bits = _quantized_bits(outline.config)
    if bits is None:
        return Weights(outline.parameters, full, f"{name}: the config states no bits of its quantization", False)
    total = round(outline.linear * bits / 8) + (outline.parameters - outline.linear) * dtype.itemsize
    return Weights(outline.parameters, total, f"estimate: linear layers in {bits:g} bits, the rest in {name}", False)


PEAK = (
    "tokens * itemsize * (4 hidden + 3 intermediate + 2 query heads * D) + 2 * context * itemsize * (K + V of the "
    "widest layer) + tokens * context bytes of mask + vocabulary * (itemsize + 4), times batch"
)
"""The estimate of `peak`, in words: ``tokens`` are those of a piece of the prompt."""


def peak(outline: Outline, batch: int, context: int, itemsize: int, chunk: int | None) -> int:
    """Estimated bytes that the forward of a prompt's last piece needs at its fullest; see `PEAK`.

    A prompt in one piece reads its own keys and values, and no mask; a later piece reads the layer dequantized, and
    once more joined to the piece. Experts count as one MLP of the widest size. No allocator is this exact.
    """
    text = outline.text
    tokens = context if chunk is None else min(chunk, context)
    hidden = text.hidden_size
    wide = [getattr(text, name, None) for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim")]
    inner = max([x for x in wide if isinstance(x, int)], default=4 * hidden)
    widest = max((x.heads * (x.key_dim + x.value_dim) for x in outline.layers), default=0)
    query = 2 * getattr(text, "num_attention_heads", 1) * max((x.key_dim for x in outline.layers), default=0)
    each = tokens * itemsize * (4 * hidden + 3 * inner + query)
    if tokens < context:
        each += 2 * context * itemsize * widest + tokens * context
    return batch * (each + text.vocab_size * (itemsize + 4))


MOST_TOKENS = 1 << 24
"""Longest context that is looked for."""


_EACH = 4096
"""Contexts up to which layers' budgets are compared one by one, and how many longer ones are."""

_OUTLINES: dict[str, Outline] = {}


def outline_of(config: Any) -> Outline:
    """The outline of a model or config; made once for equal configs."""
    if isinstance(config, Outline):
        return config
    config = getattr(config, "config", config)
    if not hasattr(config, "to_json_string"):
        raise ValueError(f"config: got {type(config).__name__}, allowed a Transformers model or its config.")
    key = config.to_json_string(use_diff=False)
    if key not in _OUTLINES:
        _OUTLINES[key] = outline(config)
    return _OUTLINES[key]


def cache_bytes(
    config: Any,
    preset: Any,
    context: int,
    batch: int = 1,
    dtype: torch.dtype | None = None,
    *,
    generated: int = 0,
    chunk: int | None = None,
    graphs: bool | None = None,
    headroom: float = 0.25,
) -> int:
    """Bytes that a cache will hold, as ``cache.memory().total`` counts them on a GPU, without a model or a GPU.

    The cache's own growth is followed: one that a prompt of one piece fills has no room to spare, one that grows while
    tokens are generated keeps up to a quarter, in the buffers of captured steps or without them. Schemes that evict are
    counted with the greatest share of whole tokens that they allow; where tokens have widths by tags, all have the
    wider one.

    Args:
        config: of the model (or the model); its weights are not needed.
        preset: see `hfkvq.caches.get_preset`; None is Transformers' own cache.
        context: tokens of a row, generated ones included, no padding.
        batch: rows.
        dtype: of keys and values; the config's by default.
        generated: how many of them come one by one.
        chunk: the prompt comes in pieces of so many tokens (``prefill_chunk_size`` of ``generate``).
        graphs: whether steps are captured, see `hfkvq.MixedKVCache`; False counts caches on the CPU as well.
        headroom: see `hfkvq.MixedKVCache`.

    Raises:
        ValueError: unknown preset, heads that it cannot hold, or numbers out of range.
    """
    for name, count, least in (("context", context, 1), ("batch", batch, 1), ("generated", generated, 0)):
        if type(count) is not int or count < least:
            raise ValueError(f"{name}: got {count!r}, allowed a whole number from {least} on.")
    if generated > context:
        raise ValueError(f"generated: got {generated}, allowed no more than the context of {context} tokens.")
    if chunk is not None and chunk <= 16:
        raise ValueError(f"chunk: got {chunk}, allowed more than 16 tokens; use None for a prompt in one piece.")
    model = outline_of(config)
    size = (model.dtype if dtype is None else dtype).itemsize
    if preset is None:
        row = context * size * sum(x.heads * (x.key_dim + x.value_dim) for x in model.layers if x.compressed)
        return model.stock_bytes(batch, context, size, windows=True) + batch * row
    chosen = get_preset(preset)
    buffered, captured = _kind_of_steps(model, chosen)
    ahead = headroom if buffered else None
    come = Arrival(context - generated, generated, chunk, ahead, captured and graphs_enabled(graphs))
    held, share = model.stock_bytes(batch, context, size), queries_per_head(model.text)
    schemes = chosen.by_layer(len(model.layers))
    places = _places(schemes, context)
    for scheme, layer, place in zip(schemes, model.layers, places, strict=True):
        if layer.compressed or layer.window:
            dims = layer.key_dim, layer.value_dim
            own = scheme_for_window(scheme, layer.window, dims) if layer.window else scheme
            held += layer_bytes(own, layer.heads, *dims, size, batch, come, share, place, layer.window)
    if "tags" in chosen.needs:
        # Ids and tags of a row, see `hfkvq.caches.layer_state.tags`.
        room = 0
        for end in (*come.ends(), *range(come.prompt + 1, context + 1)):
            room = room_for_columns(room, end)
        held += 5 * room * batch
    return held


def _places(schemes: Sequence[Scheme], context: int) -> list[tuple[int, int]]:
    """A layer of the model in whose place each may be counted: the first of the same budgets for all contexts."""
    count, found = len(schemes), []
    first: dict[Any, tuple[int, int]] = {}
    # Contexts beyond the first are sampled: budgets differ most at the longest.
    given = torch.arange(1, min(context, _EACH) + 1, device="cpu")
    given = torch.cat([given, torch.linspace(1, context, _EACH, dtype=torch.float64, device="cpu").long()])
    for i, scheme in enumerate(schemes):
        own = (0, 1)
        if isinstance(scheme, TokenEviction):
            budgets = scheme.budget(given, i, count).numpy().tobytes()
            own = first.setdefault((scheme, budgets), (i, count))
        found.append(own)
    return found


def _kind_of_steps(model: Outline, preset: Preset) -> tuple[bool, bool]:
    """True if steps of such a cache have buffers, and whether they are captured on a GPU, by the cache's own rule."""
    if not any(layer.compressed or layer.window for layer in model.layers):
        return False, False
    if preset not in model.captured:
        # Configs are copied: a cache changes the one that it is made from.
        cache = MixedKVCache(copy.deepcopy(model.config), preset, graphs=True)
        model.captured[preset] = cache.compressed_layers[0].buffer is not None, cache.graphs is not None
    return model.captured[preset]


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of a cache, and of the memory beside it.

    Attributes:
        cache: bytes at the batch and context asked for.
        peak: estimated bytes of the prompt's last piece, beside the cache.
        left: bytes left, negative if it does not fit.
        batch: largest at the context asked for, 0 if none.
        context: longest of one row, 0 if none; `MOST_TOKENS` if none is too long.
    """

    name: str
    cache: int
    peak: int
    left: int
    batch: int
    context: int


def plan(
    config: Any,
    name: str,
    preset: Any,
    weights: Weights,
    memory: int,
    context: int,
    batch: int = 1,
    dtype: torch.dtype | None = None,
    overhead: int = 0,
    come: Arrival | None = None,
    most: int | None = None,
) -> Plan:
    """Plan of a cache: bytes, and the largest batch and context by bisection.

    Args:
        preset: see `cache_bytes`.
        memory: bytes of the device.
        overhead: other bytes on the device.
        come: lengths of tokens; its prompt is the context less the generated tokens.
        most: longest context that is looked for.
    """
    model, come = outline_of(config), come or Arrival(0)
    size = (model.dtype if dtype is None else dtype).itemsize

    def needs(tokens: int, rows: int) -> tuple[int, int]:
        generated = min(come.generated, tokens - 1)
        options = {"generated": generated, "chunk": come.chunk}
        held = cache_bytes(model, preset, tokens, rows, dtype, **options)
        return held, peak(model, rows, tokens - generated, size, come.chunk)

    room = memory - weights.total - overhead
    held, extra = needs(context, batch)
    longest = _largest(lambda tokens: sum(needs(tokens, 1)) <= room, most or MOST_TOKENS)
    rows = _largest(lambda rows: sum(needs(context, rows)) <= room, 1 << 20)
    return Plan(name, held, extra, room - held - extra, rows, longest)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that holds, 0 if 1 does not."""
    low, high = 0, 1
    while high < most and holds(high):
        low, high = high, min(2 * high, most)
    if high == most and holds(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
