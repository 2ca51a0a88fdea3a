"""KL divergence, top-1 agreement and perplexity of schemes against `DynamicCache`, through the compressed pages."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from hfkvq.caches.attention.interface import NAME, WITHOUT_CUDNN
from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.compile import compile_ahead
from hfkvq.caches.named import make_cache
from hfkvq.caches.schemes.base import Scheme
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.kernels.step import MAX_STEP

from ..records import BASELINE
from .naming import OtherCache


@dataclass(frozen=True)
class Bill:
    """Memory of the layers of a cache that schemes compress.

    Attributes:
        code_bits: payload bits per element of sealed pages; NaN if none is sealed.
        total_bits: bits per element, every byte counted.
        held_bytes: of codes, metadata, windows and tables; NaN if it is simulated, and total bits computed from its
            format. Of a measurement, those of one window's cache at its end, the mean over the windows.
        bf16_bytes: of the same tokens, without padding, in bf16.
        key_bits: mean width of the keys' channels, as raised; see `MemoryReport.key_bits`. NaN where that is not known.
    """

    code_bits: float
    total_bits: float
    held_bytes: float
    bf16_bytes: float
    key_bits: float = math.nan


def read_memory(cache: Cache, mask: Tensor) -> Bill:
    """Counts a cache's bytes; the mask (B, T) of the prompt tells tokens from padding."""
    if isinstance(cache, MixedKVCache):
        report = cache.memory()
        held, bf16 = report.compressed.total + report.staged, report.bf16
        code_bits, key_bits = report.code_bits, report.key_bits
    else:
        real = int(mask.sum()) + mask.shape[0] * (cache.get_seq_length() - mask.shape[1])
        # The exact type: sliding windows are its subclasses, which only caches of ours compress.
        stock: list[Any] = [layer for layer in cache.layers if type(layer) is DynamicLayer]
        pairs = [x for layer in stock for x in (layer.keys, layer.values)]
        held, bf16 = sum(x.nbytes for x in pairs), 2 * real * sum(x.shape[1] * x.shape[3] for x in pairs)
        # Models of sliding windows alone have nothing that a scheme would compress.
        code_bits = key_bits = 8 * held / sum(x.numel() for x in pairs) if pairs else math.nan
    return Bill(code_bits, 16 * held / bf16 if bf16 else math.nan, held, bf16, key_bits)


@dataclass(frozen=True)
class Perplexity:
    """The predictions of one cache.

    Attributes:
        nll: f32 (W, n), ``-log p`` of each scored token, in nats.
    """

    nll: Tensor
    bill: Bill

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean of ``nll``."""
        return math.exp(float(self.nll.double().mean()))


@dataclass(frozen=True)
class Divergence(Perplexity):
    """A scheme's predictions beside the baseline's; rows are windows, the independent units.

    Attributes:
        name: as it was asked for.
        kld: f32 (W, n), ``KL(baseline || scheme)`` of each scored token, in nats.
        agrees: bool (W, n), whether both have the same most likely token.
    """

    name: str
    preset: Preset | OtherCache
    kld: Tensor
    agrees: Tensor

    @property
    def mean(self) -> float:
        """Mean KLD."""
        return float(self.kld.double().mean())

    @property
    def top1(self) -> float:
        """Share of tokens where both have the same most likely token."""
        return float(self.agrees.double().mean())

    def quantile(self, share: float) -> float:
        """KLD that this share of the tokens does not exceed, interpolated."""
        values = self.kld.double().flatten().sort().values
        # `Tensor.quantile` refuses more than 2^24 values.
        at = share * (len(values) - 1)
        low, high = values[math.floor(at)], values[math.ceil(at)]
        return float(low + (high - low) * (at - math.floor(at)))


@dataclass(frozen=True)
class Measured:
    """Result of `measure`.

    Attributes:
        schemes: in the order they were given.
        scored: tokens scored of each, n.
    """

    baseline: Perplexity
    schemes: tuple[Divergence, ...]

    @property
    def windows(self) -> int:
        """Windows, W."""
        return self.baseline.nll.shape[0]

    @property
    def scored(self) -> int:
        """Scored tokens of a window, n."""
        return self.baseline.nll.shape[1]


KEEP_BYTES = 2**30
"""Most bytes of the baseline's logits that are kept while schemes are compared with them."""

# Positions compared at a time: in f64 the whole of a large vocabulary could be larger than the model.
_PIECE = 64


def compare_logits(baseline: Tensor, other: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``KL(p || q) = Σ_v p_v (log p_v - log q_v)`` in nats, ``-log p`` and ``-log q`` of the labels, and agreement.

    Args:
        baseline: logits of p, (N, vocabulary), on any device.
        labels: the tokens that came, i64 (N,).

    Returns:
        KLD, ``-log p`` and ``-log q``, f32 (N,) each, and bool (N,), whether both have the same most likely token; all
        on the CPU.
    """
    found: list[tuple[Tensor, ...]] = []
    for p, q, label in zip(baseline.split(_PIECE), other.split(_PIECE), labels.split(_PIECE), strict=True):
        p, label = p.to(q.device), label.to(q.device)
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        # A model may rule tokens out; 0 · (log 0 - log q) is 0.
        difference = torch.where(log_p == -math.inf, 0.0, log_p - log_q)
        # Rounding leaves a few 1e-17 below zero.
        kld = (log_p.exp() * difference).sum(-1).clamp(min=0)
        nll_p, nll_q = (-log.gather(1, label[:, None])[:, 0] for log in (log_p, log_q))
        agrees = p.argmax(-1) == q.argmax(-1)
        found.append((*(x.float().cpu() for x in (kld, nll_p, nll_q)), agrees.cpu()))
    kld, nll_p, nll_q, same = (torch.cat(parts) for parts in zip(*found, strict=True))
    return kld, nll_p, nll_q, same


def _predictions(model: Any, tokens: Tensor, cache: Cache, prefill: int, chunk: int) -> Iterator[Tensor]:
    """Logits (B, up to chunk, vocabulary) of the tokens from ``prefill`` on, predicted through the cache.

    The last token of the prompt is fed with the first chunk: what the prompt's own forward predicts reads no cache.
    """
    # Logits of a whole prompt may be larger than its cache.
    short = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=tokens[:, : prefill - 1], **with_cache(model, cache), use_cache=True, **short)
    # Caches of others are longer by a chunk at each forward, and cuDNN would plan for each length, which takes longer
    # than the forward. Ours ask for it themselves, where it pays. A generator waits between forwards while other caches
    # are run, so each forward has a context of its own.
    chosen = contextlib.nullcontext() if isinstance(cache, MixedKVCache) else WITHOUT_CUDNN
    for part in tokens[:, prefill - 1 : -1].split(chunk, 1):
        with chosen:
            logits = model(input_ids=part, **with_cache(model, cache), use_cache=True).logits
        yield logits


def _maker(model: Any, preset: Preset | OtherCache, tokenizer: Any, tokens: Tensor) -> Callable[[], Cache]:
    if isinstance(preset, OtherCache):
        return preset.prepare(model, tokenizer, tokens)
    if tokenizer is None:
        # Roles cannot be read: tokens without tags get the wider format.
        return lambda: MixedKVCache(model, preset)
    return lambda: make_cache(model, preset, tokenizer)


class _Collected:
    """One cache's tokens and bills, a batch of windows after another."""

    def __init__(self) -> None:
        self.batches: list[list[Tensor]] = []
        self.bills: list[tuple[int, Bill]] = []

    def add(self, parts: Iterable[tuple[Tensor, ...]], rows: int) -> None:
        # Chunks come flat, (B · t,).
        columns = zip(*parts, strict=True)
        self.batches.append([torch.cat([x.view(rows, -1) for x in column], 1) for column in columns])

    def tensors(self, batches: int) -> list[Tensor]:
        return [torch.cat(column) for column in zip(*self.batches[:batches], strict=True)]

    def bill(self, batches: int) -> Bill:
        """Mean over windows."""
        bills = self.bills[:batches]
        count = sum(rows for rows, _ in bills)
        names = [field.name for field in fields(Bill)]
        return Bill(**{name: sum(rows * getattr(bill, name) for rows, bill in bills) / count for name in names})


def _bill(cache: Cache, rows: int, preset: Preset | OtherCache | None, base: Bill | None) -> Bill:
    """Memory of a window's cache in a batch; of a cache of others the baseline tells the bytes in bf16."""
    if isinstance(preset, OtherCache):
        assert base is not None
        (code_bits, total), held = preset.bits(cache), preset.held_bytes(cache) / rows
        # Simulated caches hold nothing that could be counted.
        counted = base.bf16_bytes and not math.isnan(held)
        return Bill(code_bits, 16 * held / base.bf16_bytes if counted else total, held, base.bf16_bytes)
    found = read_memory(cache, torch.ones(rows, 1, dtype=torch.float32, device="cpu"))
    return replace(found, held_bytes=found.held_bytes / rows, bf16_bytes=found.bf16_bytes / rows)


class NotNumbers(ValueError):
    """Logits with NaN.

    Attributes:
        cache: name of the cache that the model had.
    """

    def __init__(self, message: str, cache: str) -> None:
        super().__init__(message)
        self.cache = cache


class Stopped(KeyboardInterrupt):
    """Ctrl-C in the middle of a measurement.

    Attributes:
        measured: of the batches that all schemes had been measured on; None if there is none.
        record: of the same, for `hfkvq kld`.
    """

    def __init__(self, measured: Measured | None = None, record: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.measured, self.record = measured, record


def _measured(
    base: _Collected, collected: Mapping[str, _Collected], chosen: Mapping[str, Preset | OtherCache], batches: int
) -> Measured:
    """Result of so many batches."""
    found = []
    for name, one in collected.items():
        kld, loss, agrees = one.tensors(batches)
        found.append(Divergence(loss, one.bill(batches), name, chosen[name], kld, agrees))
    return Measured(Perplexity(base.tensors(batches)[0], base.bill(batches)), tuple(found))


def check_prompt(context: int, prefill: int) -> int:
    """Tokens of a window's prompt, given back; ValueError if nothing would be left to score, or nothing before it."""
    if not 2 <= prefill < context:
        raise ValueError(
            f"prefill: got {prefill}, allowed 2 to {context - 1}: windows have {context} tokens, and what follows the "
            "prompt is scored."
        )
    return prefill


def _check(model: Any, tokens: Tensor, prefill: int, chunk: int, batch_size: int) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise ValueError(f"tokens: got {tokens.dtype} of {tuple(tokens.shape)}, allowed token ids (windows, context).")
    check_prompt(tokens.shape[1], prefill)
    for name, value in (("chunk", chunk), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, allowed 1 or more.")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: {type(model).__name__} is an encoder-decoder model; choose a decoder-only one.")


def measure(
    model: Any,
    tokens: Tensor,
    schemes: Mapping[str, Preset | Scheme | OtherCache | str] | Sequence[str | Scheme],
    *,
    prefill: int,
    chunk: int = 16,
    batch_size: int = 1,
    tokenizer: Any = None,
    keep_bytes: int = KEEP_BYTES,
    on_progress: Callable[[str, float], Any] = lambda name, share: None,
) -> Measured:
    """Compares schemes with `DynamicCache` on windows of tokens.

    Each window's first ``prefill`` tokens are its prompt; they go into the cache in one piece, attended in full
    precision, and are not scored. The rest is fed ``chunk`` tokens at a time, and every prediction there is made
    through the compressed pages. Tokens of one chunk see each other unquantized; ``chunk=1`` is exactly what
    ``generate`` does. The baseline is fed in the same chunks, so ``full`` differs from it by rounding at most.

    A batch of windows is finished, for all schemes, before the next: the baseline runs once a batch as long as its
    logits take no more than ``keep_bytes``, and otherwise again, in step with each scheme. The model's attention is
    left as it was found.

    Args:
        model: a decoder-only model of Transformers, in eval mode.
        tokens: i64 (W, T), one window a row, without padding.
        schemes: presets, schemes or their names, by name, or a list of schemes and names; by name also caches of
            others (`hfkvq.measure.divergence.naming.OtherCache`).
        prefill: tokens of the prompt, 2 to T - 1.
        chunk: tokens fed at a time.
        batch_size: windows run together.
        tokenizer: the model's; the ``triaxial`` scheme reads roles by its chat template, and without it holds all
            tokens in 4 bits. Chunks of more than one token are tagged as parts of a prompt, single ones as generated.
        on_progress: called before each cache of each batch with its name and the share of the work done, and while
            kernels are compiled.

    Returns:
        Per-token values of every scheme, with W rows of T - prefill tokens.

    Raises:
        ValueError: wrong arguments, a scheme that cannot hold the model's heads, or logits that are not numbers.
        Stopped: Ctrl-C; it has what whole batches have brought.
    """
    _check(model, tokens, prefill, chunk, batch_size)
    if isinstance(schemes, Mapping):
        chosen = {name: x if isinstance(x, OtherCache) else get_preset(x) for name, x in schemes.items()}
    else:
        chosen: dict[str, Preset | OtherCache] = {x if isinstance(x, str) else repr(x): get_preset(x) for x in schemes}
    config = model.config.get_text_config(decoder=True)
    attached = config._attn_implementation == NAME
    # Refused heads are told before the first batch is run.
    makers = {name: _maker(model, preset, tokenizer, tokens) for name, preset in chosen.items()}
    caches = [make() for make in makers.values()]
    collected = {name: _Collected() for name in chosen}
    base = _Collected()
    element = torch.finfo(model.dtype).bits // 8
    kept_bytes = batch_size * (tokens.shape[1] - prefill) * config.vocab_size * element
    work, done = len(tokens) * (1 + len(chosen)), 0
    finished = 0

    def run(cache: Cache, batch: Tensor, name: str) -> Iterator[Tensor]:
        at = prefill
        try:
            for logits in _predictions(model, batch, cache, prefill, chunk):
                if bool(logits.isnan().any()):
                    raise NotNumbers(
                        f"model: its logits with {name} are not numbers, at a token from {at} on; use another --dtype "
                        "(bfloat16 or float32 in place of float16), or another scheme.",
                        name,
                    )
                yield logits.flatten(0, 1)
                at += chunk
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(chosen.get(name), OtherCache):
                raise
            raise ValueError(f"schemes: {name} failed in its own package: {error}.") from error

    def tell(name: str) -> None:
        on_progress(name, done / work)

    scored = tokens.shape[1] - prefill
    steps = [size for size in {min(chunk, scored), scored % chunk} if 0 < size <= MAX_STEP]
    try:
        compile_ahead(model, [preset for preset in chosen.values() if isinstance(preset, Preset)], steps, tell)
        with torch.inference_mode():
            for batch in tokens.to(model.device).split(batch_size):
                rows = len(batch)
                labels = [part.flatten() for part in batch[:, prefill:].split(chunk, 1)]
                stock = DynamicCache(config=model.config)
                tell(BASELINE)
                found = run(stock, batch, BASELINE)
                kept = list(found) if kept_bytes <= keep_bytes and chosen else None
                base.add(((nll(p, y),) for p, y in zip(kept or found, labels, strict=True)), rows)
                base.bills.append((rows, _bill(stock, rows, None, None)))
                del stock
                done += rows
                for name, preset in chosen.items():
                    tell(name)
                    cache = makers[name]()
                    # In step with a baseline of its own where the baseline's logits are too many.
                    source = kept if kept is not None else run(DynamicCache(config=model.config), batch, BASELINE)
                    trio = zip(source, run(cache, batch, name), labels, strict=True)
                    collected[name].add(((x[0], x[2], x[3]) for x in (compare_logits(*each) for each in trio)), rows)
                    collected[name].bills.append((rows, _bill(cache, rows, preset, base.bills[-1][1])))
                    done += rows
                finished += 1
    except KeyboardInterrupt:
        raise Stopped(_measured(base, collected, chosen, finished) if finished else None) from None
    finally:
        if not attached:
            for cache in caches:
                if isinstance(cache, MixedKVCache):
                    cache.detach()
    return _measured(base, collected, chosen, finished)


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """``-log p`` of each label, f32 (N,) on the CPU, of logits (N, vocabulary)."""
    pieces = zip(logits.split(_PIECE), labels.split(_PIECE), strict=True)
    return torch.cat([-p.double().log_softmax(-1).gather(1, y[:, None])[:, 0].float().cpu() for p, y in pieces])
