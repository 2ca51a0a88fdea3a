"""Key smoothing: the vectors by which a layer's key channels are centred and scaled before they are quantized.

A scale that all channels of a token share is set by the widest of them, and models with biases on their keys (Qwen2.5)
have channels a hundred times as wide as others; a rotation spreads these over all. So key channels lose their mean μ
and are divided by s, and queries are multiplied by s: ``q' · k' = (q s) · ((k - μ) / s) = q · k - q · μ``. Softmax
ignores the last term, which is the same for all keys of a query. Errors of size ε in every channel of k' then weigh
``ε² Σ s² q²``, while ε² grows with ``Σ σ² / s²``; their product is least for ``s = (σ / q)^½`` (σ the standard
deviation of a key channel, q the root mean square of what queries have there). Where nothing rotates keys, ε follows
the widest channel alone, and ``s = σ^¾ q^-¼`` is better. See also SageAttention (μ) and SmoothQuant (s).

The vectors belong to the model, not to the prompt: they are measured once, from token ids drawn at random, and any
others would be right, only less good. Where the model is not known, or must not be called within its own call, a layer
takes those of its first prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module
from transformers.cache_utils import DynamicCache

from hfkvq import kernels
from hfkvq.kernels.dispatch import exact
from hfkvq.kernels.pages import PageFormat

from ..base import outside_inference_mode, warn_once
from ..base.config_switch import temporarily_switched
from ..base.model_calls import forward_parameters, inside_call, is_known, with_cache
from ..base.model_config import head_dim_of, looks_attention_up, text_config
from ..base.recorded import is_recorded
from ..schemes.base import Layout, Scheme

OFFSETS = (0, 1536, 3584, 6144, 9216, 13312, 18432, 24576)
"""First position of each row that is measured: what RoPE turns slowly stands elsewhere in long contexts.

They are closer together where models with fewer positions end.
"""

TOKENS = 128
"""Tokens of a row."""

FIRST = 4
"""First tokens of a row that are left out: models keep keys like no others there (attention sinks)."""

RARE = 300
"""Ids that are not drawn: vocabularies begin with bytes and marks, which texts hardly have."""

FEW = 64
"""Tokens under which a first prompt does not show how wide channels are: see `of_keys`."""

FLOOR = 1e-2
"""Least width of a channel, as a share of the median of its head: channels may be constant."""

NOISY = 2.0
"""Root mean square over all heads of `Measured.logit_noise` from which a cache warns.

On Qwen2.5-Coder-0.5B it is 6 for saw-int4 with keys as they are, which answers at random, and 0.4 with keys smoothed;
on SmolLM2 it is 1.1 for plain INT4 with keys as they are, which loses some per cent.
"""

_MOST = torch.finfo(torch.float16).max

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

    def raw(self, keys: Tensor, start: Tensor | None = None) -> Tensor:
        """Smoothed keys (B, H, T, D) as the model made them; columns before ``start`` (B, H) hold none, and stay 0."""
        found = kernels.unsmooth(keys, self.vectors)
        if start is None:
            return found
        empty = torch.arange(keys.shape[2], device=keys.device) < start[:, :, None]
        return found.masked_fill(empty[..., None], 0.0)

    @outside_inference_mode
    def centred_at_zero(self) -> KeySmoothing:
        """The same without a mean, for attention whose logits must not move: those with a softcap, or sinks."""
        vectors = self.vectors.clone()
        vectors[0] = 0.0
        return KeySmoothing(vectors)

    @cached_property
    def _elsewhere(self) -> dict[torch.device, KeySmoothing]:
        return {}

    @outside_inference_mode
    def to(self, device: torch.device) -> KeySmoothing:
        """The same vectors on a device, where a model has moved since it was measured: one object for all caches."""
        if self.vectors.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = KeySmoothing(self.vectors.to(device))
        return self._elsewhere[device]


@dataclass(frozen=True, eq=False)
class Measured:
    """Statistics of one layer's attention, f32 (H, D) each, after RoPE.

    Attributes:
        near: deviation of each key channel within `TOKENS` tokens, where RoPE turns slow channels hardly.
        query: root mean square of the queries of each KV head; None where attention did not show them.
        smoothings: vectors for keys as they are, and for those that are rotated.
    """

    mean: Tensor
    deviation: Tensor
    near: Tensor
    query: Tensor | None
    smoothings: list[KeySmoothing] = field(default_factory=list)

    def layout(self, scheme: Scheme) -> Layout:
        """The layout of a layer of this scheme."""
        return scheme.layout(self.mean.shape[1], self.mean.shape[1])

    def smoothing(self, scheme: Scheme) -> KeySmoothing:
        """The vectors for a layer of this scheme."""
        return self.smoothings[self.layout(scheme).keys.rotate > 0]

    def logit_noise(self, scheme: Scheme) -> Tensor | None:
        """Standard deviation of what rounding keys adds to a logit, by estimate: f32 (H,).

        A step is 1/15 (4 bits) of the range of what shares a scale, errors are even within it, and each is weighed by
        its query channel: ``sqrt(Σ step² / 12 · q² / D)``. None where channels are not mixed (`layers_that_mix`),
        or queries are not known.
        """
        layout = self.layout(scheme)
        own = _mixing(layout)
        if not own or self.query is None:
            return None
        mean, deviation, near, query = self.mean, self.deviation, self.near, self.query
        if scheme.smooths_keys:
            shift, factor, scale = self.smoothing(scheme).vectors
            mean, query = (mean - shift) * factor, query * scale
            deviation, near = deviation * factor, near * factor
        block, noises = layout.keys.rotate, []
        for fmt in own:
            # Where each channel has a least value of its own, constants are in it.
            energy = mean.square() + deviation.square() if fmt.axis == "token" else near.square()
            if block:
                energy = energy.unflatten(1, (-1, block)).mean(2).repeat_interleave(block, 1)
            if fmt.bits == 8:
                # Three bits behind the point, of each channel for itself: errors of up to 1/16, even on a log scale.
                square = energy / (16**2 * 3)
            elif block:
                # Normal numbers: the widest of some hundred are 2.7 deviations away.
                square = (2 * 2.7 / (2**fmt.bits - 1)) ** 2 * energy / 12
            else:
                upper, lower = ((mean + sign * 2 * deviation).unflatten(1, (-1, fmt.group_size)) for sign in (1, -1))
                step = (upper.amax(2) - lower.amin(2)) / (2**fmt.bits - 1)
                square = step.square().repeat_interleave(fmt.group_size, 1) / 12
            noises.append((square * query.square()).mean(1).sqrt())
        return torch.stack(noises).amax(0)


@outside_inference_mode
def vectors_of(mean: Tensor, deviation: Tensor, query: Tensor | None, rotated: bool) -> Tensor:
    """The vectors f32 (3, H, D) of a layer, by `Measured`'s; without queries ``s = σ``.

    ``rotated``: keys are rotated before they are rounded.
    """

    def floored(x: Tensor) -> Tensor:
        usual = x.median(1, keepdim=True).values
        usual = usual.where(usual > 0, x.mean(1, keepdim=True))
        # A constant head has no statistics.
        return torch.maximum(x, FLOOR * usual).where(usual > 1e-6, torch.ones_like(x))

    scale = floored(deviation)
    if query is not None:
        share = 0.5 if rotated else 0.75
        scale = scale**share * floored(query) ** (share - 1)
    sound = (mean.isfinite() & scale.isfinite()).all(1, keepdim=True)
    mean, scale = mean.where(sound, torch.zeros_like(mean)), scale.where(sound, torch.ones_like(scale))
    return torch.stack([mean, 1 / scale, scale]).contiguous()


@outside_inference_mode
def of_keys(keys: Tensor) -> KeySmoothing:
    """Vectors from a first prompt's keys (B, H, T, D), for a cache whose model cannot be measured."""
    x = keys.detach().float()
    # Tokens beyond f16 are left out, so that one of them does not spoil the rest.
    sound = (x.abs() <= _MOST).all(3, keepdim=True)
    x, tokens = x.where(sound, torch.zeros_like(x)), sound.sum((0, 2)).clamp(min=1)
    mean = x.sum((0, 2)) / tokens
    variance = (x - mean[:, None]).square().where(sound, torch.zeros_like(x)).sum((0, 2)) / tokens
    few, square = (1 - tokens / FEW).clamp(min=0), mean.square()
    # RoPE turns a channel into the one half a head away; and a token may have nothing where others have as much as
    # elsewhere. Whether a mean is a width cannot be told yet, so half of it (on a log scale) is taken.
    width = square + square.roll(square.shape[1] // 2, 1)
    width = width + width.median(1, keepdim=True).values
    deviation = (variance + few * width).sqrt() ** (1 - few / 2)
    return KeySmoothing(vectors_of(mean, deviation, None, True))


# A model's.

_MEASURED: weakref.WeakKeyDictionary[Any, Mapping[int, Measured]] = weakref.WeakKeyDictionary()
_JUDGED: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
"""Presets by model for which `warn_of_noise` has looked."""
_LOCK = threading.RLock()


class _Watch(threading.local):
    queries: dict[int, tuple[Tensor, bool]] | None = None


_WATCH = _Watch()


def note_queries(module: Any, query: Tensor, heads: int, keeps_logits: bool) -> None:
    """Takes note of the queries (B, Hq, Q, D) of a layer of ``heads`` KV heads, if a model is being measured.

    ``keeps_logits`` says that its attention has a softcap or sinks: see `KVLayer.forward`.
    """
    if _WATCH.queries is not None:
        square = query[:, :, FIRST:].float().unflatten(1, (heads, -1)).square().mean((0, 2, 3))
        _WATCH.queries[module.layer_idx] = square.sqrt(), keeps_logits


class _Watched(DynamicCache):
    """Shows the keys that a model's layers make."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.keys: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        x = key_states[:, :, FIRST:].float()
        near = x.var(2).mean(0).sqrt()
        self.keys[layer_idx] = x.mean((0, 2)), x.transpose(0, 1).flatten(1, 2).std(1), near
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@exact
def measure(model: Any, config: Any) -> Mapping[int, Measured]:
    """Statistics of a model's attention by layer; empty where it cannot be measured.

    A model is called once, with a row of `TOKENS` token ids for each of `OFFSETS`; ``config`` is its text config.
    """
    with _LOCK:
        known = _MEASURED.get(model)
        if known is not None:
            return known
        reason, found = _hindrance(model, config), {}
        if reason is None:
            found, reason = _measured(model, config)
        if reason is None:
            _MEASURED[model] = found
        else:
            # The hindrance may pass (hooks, training mode), so nothing is remembered.
            logger.info("%s: key channels are smoothed by the first prompt, since %s", type(model).__name__, reason)
        return found


def digest_of_model(model: Any) -> str | None:
    """64 hex digits of a model's vectors, and None where it has none: by which files know whether they go together."""
    whole = hashlib.sha256()
    found = measure(model, text_config(model.config))
    for layer, own in sorted(found.items()):
        for smoothing in own.smoothings:
            whole.update(str(layer).encode() + smoothing.vectors.cpu().numpy().tobytes())
    return whole.hexdigest() if found else None


def is_smoothed_by(cache: Any, model: Any) -> bool:
    """True if a cache's keys are smoothed by nothing but the vectors of a model."""
    layers = {i: cache.layers[i] for i in cache._compressed if cache.layers[i].smooths}
    own = measure(model, cache.config) if layers else {}
    if any(layer.smoothing is None or i not in own for i, layer in layers.items()):
        return False
    # Vectors that were measured before the model moved are on the former device.
    pairs = [(x.smoothing, own[i].smoothing(x.scheme).to(x.smoothing.vectors.device)) for i, x in layers.items()]
    return all(torch.equal(held.vectors, measured.vectors) for held, measured in pairs)


def warn_of_noise(name: str, schemes: Mapping[int, Scheme], model: Any, config: Any) -> None:
    """Warns, once for a model and preset, where rounding a model's keys would drown its attention.

    ``name`` is the main scheme's, ``schemes`` are those of the layers that hold keys and values.
    """
    mixing = layers_that_mix(schemes, head_dim_of(config))
    found, noises = measure(model, config) if mixing else {}, []
    if not found:
        # It may be measured later.
        return
    with _LOCK:
        judged, preset = _JUDGED.setdefault(model, set()), tuple(sorted(schemes.items(), key=lambda item: item[0]))
        if preset in judged:
            return
        judged.add(preset)
    for layer, scheme in schemes.items():
        if layer in found and layer in mixing:
            noise = found[layer].logit_noise(scheme)
            noises += [] if noise is None else [noise.cpu()]
    noise = float(torch.cat(noises).square().mean().sqrt()) if noises else 0.0
    if noise > NOISY:
        can = any(hasattr(scheme, "smooth_keys") and not scheme.smooths_keys for scheme in schemes.values())
        other = f"{'smooth_keys=True, or ' if can else ''}the preset 'best-4.3'"
        warn_once(
            f"{name}: rounding the keys of this {type(model).__name__} moves its attention logits by about {noise:.1f} "
            f"(standard deviation; it should be below {NOISY:g}), so answers may be wrong; take {other}."
        )


def layers_that_mix(schemes: Mapping[int, Scheme], head_dim: int | None) -> set[int]:
    """Layers in which wide key channels make others coarse: by scales of tokens alone, or by a rotation.

    A few rotated layers, as some presets have, are not worth a call of the model; nor are models whose config does not
    say how wide heads are.
    """
    if head_dim is None:
        return set()
    found = {layer: scheme.layout(head_dim, head_dim) for layer, scheme in schemes.items() if scheme.rounds_keys}
    by_token = {layer for layer, layout in found.items() if any(fmt.axis == "token" for fmt in _mixing(layout))}
    rotated = {layer for layer, layout in found.items() if _mixing(layout)} - by_token
    return by_token | (rotated if 2 * len(rotated) > len(schemes) else set())


def _mixing(layout: Layout) -> list[PageFormat]:
    return [fmt for fmt in layout.keys.formats if fmt.bits < 16 and (fmt.axis == "token" or layout.keys.rotate)]


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
    if not all(map(is_known, (*module._global_forward_hooks.values(), *module._global_forward_pre_hooks.values()))):
        return "a forward hook of all modules would see tokens of nobody's"
    for part in model.modules():
        if getattr(getattr(part, "_hf_hook", None), "offload", False):
            return "its weights are offloaded"
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if not all(map(is_known, hooks)):
            return "a forward hook would see tokens of nobody's"
    return None


@outside_inference_mode
def _measured(model: Any, config: Any) -> tuple[Mapping[int, Measured], str | None]:
    """Statistics by layer and None, or nothing and the reason."""
    try:
        embedding = model.get_input_embeddings().weight
        ids, positions = _tokens(embedding.shape[0], config)
        cache = _Watched(config)
        given: dict[str, Any] = {"input_ids": ids.to(embedding.device)}
        names = forward_parameters(type(model))
        if "logits_to_keep" in names:
            given["logits_to_keep"] = 1
        if "position_ids" in names and positions is not None:
            given["position_ids"] = positions.to(embedding.device)
        # Our own attention, which on plain tensors is sdpa, shows the queries, where the model takes it.
        before, queries = _WATCH.queries, dict[int, tuple[Tensor, bool]]()
        switched = temporarily_switched(config) if looks_attention_up(config) else contextlib.nullcontext()
        try:
            _WATCH.queries = queries
            with torch.no_grad(), inside_call(), switched:
                model(**given, **with_cache(model, cache), use_cache=True)
        finally:
            _WATCH.queries = before
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return {}, f"it cannot be called with token ids alone ({type(error).__name__}: {str(error)[:200]})"
    found = {}
    for layer, (mean, deviation, near) in cache.keys.items():
        query, keeps_logits = queries.get(layer, (None, False))
        if query is not None and query.shape != mean.shape:
            # Models may repeat heads before they attend (JetMoe: those of its experts), the cached ones in turn.
            fits = query.shape[1] == mean.shape[1] and query.shape[0] % mean.shape[0] == 0
            query = query.square().unflatten(0, (-1, mean.shape[0])).mean(0).sqrt() if fits else None
        if keeps_logits:
            mean, deviation = torch.zeros_like(mean), torch.hypot(mean, deviation)
        found[layer] = Measured(mean, deviation, near, query)
    # Heads of all layers alike together: a layer's operations by themselves are many.
    alike: dict[Any, list[Measured]] = {}
    for own in found.values():
        alike.setdefault((own.mean.shape[1], own.mean.device, own.query is None), []).append(own)
    for group in alike.values():
        mean, deviation = torch.cat([own.mean for own in group]), torch.cat([own.deviation for own in group])
        asked = [own.query for own in group if own.query is not None]
        for rotated in (False, True):
            made = vectors_of(mean, deviation, torch.cat(asked) if asked else None, rotated)
            for own, vectors in zip(group, made.split([len(own.mean) for own in group], 1), strict=True):
                own.smoothings.append(KeySmoothing(vectors.contiguous()))
    return found, None


def _tokens(vocabulary: int, config: Any) -> tuple[Tensor, Tensor | None]:
    """Ids i64 (rows, `TOKENS`) and their positions; None where frequencies of RoPE depend on the length.

    Logarithms of ids are drawn evenly, as those of ranks of words in a text are: frequent pieces come first.
    """
    generator, rows = torch.Generator().manual_seed(0), len(OFFSETS)
    draws = torch.rand(rows, TOKENS, generator=generator, dtype=torch.float64, device="cpu")
    least = RARE if vocabulary > 4 * RARE else 1
    ids = (least * (vocabulary / least) ** draws).long().clamp(0, vocabulary - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = str(rope)
    if "dynamic" in kinds or "longrope" in kinds:
        return ids, None
    most = (getattr(config, "max_position_embeddings", None) or TOKENS) - TOKENS
    share = min(1.0, max(0, most) / OFFSETS[-1])
    offsets = torch.tensor([int(offset * share) for offset in OFFSETS], device="cpu", dtype=torch.int64)
    return ids, offsets[:, None] + torch.arange(TOKENS, device="cpu")
