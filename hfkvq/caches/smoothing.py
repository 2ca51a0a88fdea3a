"""Key smoothing: the vectors by which a layer's key channels are centred and scaled before they are quantized.

A scale that all channels of a token share is set by the widest of them, and models with biases on their keys (Qwen2.5)
have channels a hundred times as wide as others; a rotation spreads these over all. So key channels lose their mean μ and
are divided by s, and queries are multiplied by s: ``q' · k' = (q s) · ((k - μ) / s) = q · k - q · μ``. Softmax ignores
the last term, which is the same for all keys of a query. Errors of size ε in every channel of k' then weigh
``ε² Σ s² q²``, while ε² grows with ``Σ σ² / s²``; their product is least for ``s² = σ / q`` (σ the standard deviation of
a key channel, q the root mean square of what queries have there). See also SageAttention (μ) and SmoothQuant (s).

The vectors belong to the model, not to the prompt: they are measured once, from token ids drawn at random, and any
others would be right, only less good. Where the model is not known, or must not be called within its own call, a layer
takes those of its first prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hfkvq import kernels

from .lasting import lasting
from .model_calls import forward_parameters, inside_call
from .model_config import looks_attention_up, text_config
from .recorded import is_recorded
from .switched import NAME

ROWS, TOKENS = 4, 256
"""Rows of the text that is measured, and their tokens."""

OFFSETS = (0, 4096, 8192, 16384)
"""First position of each row: channels that RoPE turns slowly stand elsewhere in long contexts."""

FEW = 64
"""Tokens under which a first prompt does not show how wide channels are; their means have to do in part."""

FLOOR = 1e-2
"""Least width of a channel, as a share of the median of its head: channels may be constant."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeySmoothing:
    """A layer's vectors.

    Attributes:
        vectors: f32 (3, H, D), see `hfkvq.kernels.smooth`.
    """

    vectors: Tensor

    def keys(self, keys: Tensor) -> Tensor:
        """Keys (B, H, T, D), smoothed."""
        return kernels.smooth(keys[:, :, :0], keys, self.vectors)[1]

    def queries(self, query: Tensor) -> Tensor:
        """Queries (B, Hq, Q, D) for smoothed keys."""
        batch, heads, dim = query.shape[0], *self.vectors.shape[1:]
        return kernels.smooth(query, query.new_empty((batch, heads, 0, dim)), self.vectors)[0]

    def both(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, in one launch."""
        return kernels.smooth(query, keys, self.vectors)

    def raw(self, keys: Tensor, start: Tensor | None = None) -> Tensor:
        """Smoothed keys (B, H, T, D) as the model made them; columns before ``start`` (B, H) hold none, and stay 0."""
        found = kernels.unsmooth(keys, self.vectors)
        if start is None:
            return found
        empty = torch.arange(keys.shape[2], device=keys.device) < start[:, :, None]
        return found.masked_fill(empty[..., None], 0.0)

    @lasting
    def centred_at_zero(self) -> KeySmoothing:
        """The same without a mean, for attention whose logits must not move: those with a softcap, or sinks."""
        vectors = self.vectors.clone()
        vectors[0] = 0.0
        return KeySmoothing(vectors)

    @property
    def shifts(self) -> bool:
        """Whether logits are moved; asks the device."""
        return bool(self.vectors[0].any())

    def to(self, device: torch.device) -> KeySmoothing:
        """On a device."""
        return self if self.vectors.device == device else replace(self, vectors=self.vectors.to(device))


def vectors_of(mean: Tensor, deviation: Tensor, query: Tensor | None) -> Tensor:
    """The vectors f32 (3, H, D) of a layer.

    Args:
        mean: f32 (H, D), μ of each key channel.
        deviation: f32 (H, D), σ, likewise.
        query: f32 (H, D), root mean square of the queries of each KV head; None takes ``s = σ``.
    """

    def floored(x: Tensor) -> Tensor:
        least = (FLOOR * x.median(1, keepdim=True).values).clamp(min=1e-6)
        return torch.maximum(x, least)

    scale = floored(deviation)
    if query is not None:
        scale = (scale / floored(query)).sqrt()
    sound = (mean.isfinite() & scale.isfinite()).all(1, keepdim=True)
    mean, scale = mean.where(sound, torch.zeros_like(mean)), scale.where(sound, torch.ones_like(scale))
    return torch.stack([mean, 1 / scale, scale]).contiguous()


@lasting
def of_keys(keys: Tensor) -> KeySmoothing:
    """What a first prompt's keys (B, H, T, D) show."""
    x = keys.detach().float()
    tokens = x.shape[0] * x.shape[2]
    mean = x.mean((0, 2))
    variance = (x - mean[:, None]).square().mean((0, 2))
    few = max(0.0, 1 - tokens / FEW)
    return KeySmoothing(vectors_of(mean, (variance + few * mean.square()).sqrt(), None))


# A model's.

_MEASURED: weakref.WeakKeyDictionary[Any, Mapping[int, KeySmoothing]] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


class _Watch(threading.local):
    queries: dict[int, tuple[Tensor, bool]] | None = None


_WATCH = _Watch()


def note_queries(module: Any, query: Tensor, heads: int, keeps_logits: bool) -> None:
    """Takes note of the queries (B, Hq, Q, D) of a layer of ``heads`` KV heads, if a model is being measured.

    ``keeps_logits`` says that its attention has a softcap or sinks: see `LayerBase.keep_logits`.
    """
    if _WATCH.queries is not None:
        square = query.float().unflatten(1, (heads, -1)).square().mean((0, 2, 3))
        _WATCH.queries[module.layer_idx] = square.sqrt(), keeps_logits


class _Watched(DynamicCache):
    """Shows the keys that a model's layers make."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        x = key_states.float()
        self.keys[layer_idx] = x.mean((0, 2)), x.transpose(0, 1).flatten(1, 2).std(1)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def of_model(model: Any, config: Any) -> Mapping[int, KeySmoothing]:
    """The vectors of a model's layers, by layer; empty where it cannot be measured.

    Args:
        model: with the text config ``config``; called once, with `ROWS` x `TOKENS` token ids.
        config: of its decoder.
    """
    with _LOCK:
        found = _MEASURED.get(model)
        if found is None:
            reason = _hindrance(model, config)
            if reason is None:
                found, reason = _measured(model, config)
            if reason is not None:
                logger.info("%s: key channels are smoothed by the first prompt, since %s", type(model).__name__, reason)
                # What hinders may pass: hooks, training mode.
                return {}
            _MEASURED[model] = found
        return found


def digest_of_model(model: Any) -> str | None:
    """64 hex digits of a model's vectors, and None where it has none: by which files know whether they go together."""
    whole = hashlib.sha256()
    found = of_model(model, text_config(model.config))
    for layer, own in sorted(found.items()):
        whole.update(str(layer).encode() + own.vectors.cpu().numpy().tobytes())
    return whole.hexdigest() if found else None


def is_smoothed_by(cache: Any, model: Any) -> bool:
    """Whether a cache's keys are smoothed by nothing but the vectors of a model."""
    layers = {i: cache.layers[i] for i in cache._compressed if cache.layers[i].smooths}
    own = of_model(model, cache.config) if layers else {}
    return all(
        layer.smoothing is not None and i in own and torch.equal(layer.smoothing.vectors, own[i].vectors)
        for i, layer in layers.items()
    )


def _hindrance(model: Any, config: Any) -> str | None:
    """Why a model cannot be called just to look at its keys, if it cannot."""
    if is_recorded() or torch._C._len_torch_dispatch_stack():
        return "the call is being recorded"
    if model.config.is_encoder_decoder or config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if model.training:
        return "it is in training mode"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured"
    for module in model.modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            return "its weights are offloaded"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not str(getattr(hook, "__module__", "")).startswith(("transformers.", "torch.")) for hook in hooks):
            return "a forward hook would see tokens of nobody's"
    return None


@lasting
def _measured(model: Any, config: Any) -> tuple[Mapping[int, KeySmoothing], str | None]:
    """The vectors, or nothing and why."""
    try:
        embedding = model.get_input_embeddings().weight
        ids, positions = _tokens(embedding.shape[0], config)
        cache, given = _Watched(config), {"input_ids": ids.to(embedding.device)}
        names = forward_parameters(type(model))
        if "logits_to_keep" in names:
            given["logits_to_keep"] = 1
        if "position_ids" in names and positions is not None:
            given["position_ids"] = positions.to(embedding.device)
        with torch.no_grad(), inside_call(), _watching(config) as queries:
            model(**given, past_key_values=cache, use_cache=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return {}, f"it cannot be called with token ids alone ({type(error).__name__}: {str(error)[:200]})"
    found = {}
    for layer, (mean, deviation) in cache.keys.items():
        query, keeps_logits = queries.get(layer, (None, False))
        if keeps_logits:
            mean, deviation = torch.zeros_like(mean), torch.hypot(mean, deviation)
        found[layer] = KeySmoothing(vectors_of(mean, deviation, query))
    return found, None


@contextlib.contextmanager
def _watching(config: Any) -> Iterator[dict[int, tuple[Tensor, bool]]]:
    """Queries by layer; shown by our own attention, which on plain tensors is sdpa, where the model takes it."""
    before, own = _WATCH.queries, config._attn_implementation_internal
    _WATCH.queries = {}
    try:
        if looks_attention_up(config):
            config._attn_implementation_internal = NAME
        yield _WATCH.queries
    finally:
        _WATCH.queries, config._attn_implementation_internal = before, own


def _tokens(vocabulary: int, config: Any) -> tuple[Tensor, Tensor | None]:
    """Ids i64 (`ROWS`, `TOKENS`) and their positions; None where frequencies of RoPE depend on the length.

    Their logarithms are drawn evenly, as ranks of words in a text are: vocabularies begin with frequent pieces.
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64, device="cpu")
    ids = (torch.exp(draws * math.log(vocabulary)) - 1).long().clamp(0, vocabulary - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = str(rope)
    if "dynamic" in kinds or "longrope" in kinds:
        return ids, None
    most = getattr(config, "max_position_embeddings", None) or TOKENS
    offsets = torch.tensor([min(offset, max(0, most - TOKENS)) for offset in OFFSETS], device="cpu")
    return ids, offsets[:, None] + torch.arange(TOKENS, device="cpu")
