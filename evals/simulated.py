"""Methods of others, simulated: everything is held in full precision and rounded as the method would round it.

    hfkvq kld --model smollm2 --schemes evals.simulated:Oscar,evals.simulated:TurboQuant:key_bits=3:value_bits=3

Run it from the root of a checkout. Only losses can be measured so, and bits are computed from the format: these caches
save no memory. Each token is rounded once, when it leaves the method's window.

    FP4          SGLang's FP4, the baseline of TriAxialKV's tables
    FP8          vLLM's fp8 cache
    LlamaCpp     llama.cpp's q4_0 and q8_0
    TurboQuant   arXiv 2504.19874, as vLLM has it
    OmniScaled   OScaR, "omni-scaled canalized rotation", arXiv 2605.19660
    Oscar        OSCAR, "offline spectral covariance-aware rotation", arXiv 2605.17757
    SawHessian   SAW-INT4's Hessian-aware rotation, arXiv 2604.19157, A.3
    SawKMeans    SAW-INT4's k-means codes, the same, A.2

The last three are calibrated, on texts of the package that are in no measured window.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from evals.capture import Capture, capture, compressed_layers
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.windows import tokens_due
from hfkvq.measure.divergence.naming import OtherCache
from hfkvq.measure.texts import KINDS, read_text

ROW = 1024
"""Tokens of a row of calibration text."""


@dataclass(frozen=True)
class LayerFormat:
    """Layer of a simulated method.

    Attributes:
        keys: tokens (B, H, n, D) of any dtype, in the model's basis, to what the method would read back, f32.
        values: the same for values.
        bits: per element of rounded tokens, keys and values, scales included.
        code_bits: of these, the codes.
        sink: first tokens that stay whole.
        recent: newest tokens that stay whole.
        unit: tokens are rounded in whole multiples of this number.
        step_reads_stored: a step of one token reads that token rounded.
    """

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    bits: float
    code_bits: float
    sink: int = 0
    recent: int = 0
    unit: int = 1
    step_reads_stored: bool = False


class SimulatedLayer(DynamicLayer):
    """A layer that rounds each token once, behind the forward in which it leaves the window."""

    def __init__(self, form: LayerFormat) -> None:
        super().__init__()
        self.form, self.rounded = form, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        form = self.form
        before = super().update(key_states, value_states, *args, **kwargs)
        due = tokens_due(before[0].shape[-2] - form.sink, self.rounded, form.recent, form.unit)
        if not due:
            return before
        first, last = form.sink + self.rounded, form.sink + self.rounded + due
        self.keys, self.values = (
            torch.cat([x[..., :first, :], rounds(x[..., first:last, :]).to(x.dtype), x[..., last:, :]], -2)
            for x, rounds in zip(before, (form.keys, form.values), strict=True)
        )
        self.rounded += due
        return (self.keys, self.values) if form.step_reads_stored and key_states.shape[-2] == 1 else before

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("A simulated cache cannot be cropped: rounded tokens cannot be given back.")


class SimulatedCache(Cache):
    """A `DynamicCache` whose layers of full attention round; ``forms`` are theirs, in order, None for none."""

    def __init__(self, config: Any, forms: Sequence[LayerFormat | None]) -> None:
        rest = iter(forms)
        layers = list(DynamicCache(config=config).layers)
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer and (form := next(rest)) is not None:
                layers[i] = SimulatedLayer(form)
        super().__init__(layers=layers)


def full_layers(config: Any) -> int:
    """Layers of a model with full attention."""
    return sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def head_dim(config: Any) -> int:
    text = config.get_text_config(decoder=True)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def rotated(x: Tensor) -> Tensor:
    """Channels multiplied by the Hadamard matrix of their number, f32; it is its own inverse."""
    return hadamard(x.float().contiguous(), x.shape[-1])


@dataclass(frozen=True, kw_only=True)
class Simulated(OtherCache, ABC):
    """A method that rounds as its paper says; its fields are its options."""

    simulated = True

    def to_dict(self) -> dict[str, Any]:
        return {"cache": type(self).__name__, "simulated": True, **dataclasses.asdict(self)}

    def check(self, config: Any) -> None:
        """Refuses heads that no Hadamard matrix rotates, as all of these methods but FP4 and FP8 do."""
        dim = head_dim(config)
        if dim & (dim - 1):
            raise ValueError(f"schemes: {type(self).__name__} takes heads of a power of two channels; got {dim}.")
        if not full_layers(config):
            raise ValueError(f"schemes: {type(self).__name__} takes layers of full attention; got none.")

    @abstractmethod
    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        """The formats of a model's layers of full attention; arguments as of `OtherCache.prepare`."""

    def prepare(self, model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Cache]:
        self.check(model.config)
        forms = self.forms(model, tokenizer, tokens)
        return lambda: SimulatedCache(model.config, forms)

    def held_bytes(self, cache: Cache) -> float:
        return math.nan

    def bits(self, cache: Cache) -> tuple[float, float]:
        total = codes = elements = rounded = 0.0
        for layer in cache.layers:
            if type(layer) in (DynamicLayer, SimulatedLayer):
                tokens, size = layer.keys.shape[-2], layer.keys[..., :1, :].numel() + layer.values[..., :1, :].numel()
                done = getattr(layer, "rounded", 0)
                # Tokens that stay whole count in the dtype that they have.
                total += size * (tokens - done) * 8 * layer.keys.element_size()
                if done:
                    total, codes = total + size * done * layer.form.bits, codes + size * done * layer.form.code_bits
                elements, rounded = elements + size * tokens, rounded + size * done
        return codes / rounded if rounded else math.nan, total / elements


# FP4.

BLOCK = 16
"""Channels of a token that share a scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes; a number in the middle between two becomes the greater."""


def fp4(x: Tensor) -> Tensor:
    """Tokens (B, H, n, D): each block over the least power of two by which it stays within 6, in E2M1."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    most = (blocks.abs().amax(-1, keepdim=True) / E2M1[-1]).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(most)))
    values = torch.tensor(E2M1, device=x.device)
    code = torch.bucketize((blocks / scale).abs(), (values[1:] + values[:-1]) / 2, right=True)
    return (values[code] * blocks.sign() * scale).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class FP4(Simulated):
    """Keys and values in 4-bit floats, all tokens at once: "SGLang FP4" of arXiv:2605.17170, Tables 2 and 3."""

    about = (
        "FP4: SGLang's cache, simulated; E2M1 with an 8-bit exponent for 16 channels of a token, keys and values, no "
        "window and no sink."
    )

    def check(self, config: Any) -> None:
        if head_dim(config) % BLOCK or not full_layers(config):
            dim = head_dim(config)
            raise ValueError(f"schemes: FP4 takes full attention, heads of multiples of {BLOCK} channels; got {dim}.")

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        return [LayerFormat(fp4, fp4, bits=4 + 8 / BLOCK, code_bits=4, step_reads_stored=True)] * full_layers(
            model.config
        )


# FP8.


def fp8(x: Tensor) -> Tensor:
    """Numbers in E4M3, without a scale; those beyond its 448 become 448."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


@dataclass(frozen=True, kw_only=True)
class FP8(Simulated):
    """Keys and values in 8-bit floats, all tokens at once: vLLM's ``--kv-cache-dtype fp8``, uncalibrated."""

    about = "FP8: vLLM's fp8 cache, simulated; E4M3 without scales, no window and no sink."

    def check(self, config: Any) -> None:
        if not full_layers(config):
            raise ValueError("schemes: FP8 takes layers of full attention; got none.")

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        return [LayerFormat(fp8, fp8, bits=8, code_bits=8, step_reads_stored=True)] * full_layers(model.config)


# llama.cpp.

Q_BLOCK = 32
"""Channels of a token that share a scale."""


def llama_cpp(x: Tensor, bits: int, rotate: bool) -> Tensor:
    """Tokens (..., D) in q4_0 or q8_0: per block ``d q``, d in f16: the number farthest from 0 over -8, or over 127."""
    y = rotated(x) if rotate else x.float()
    blocks = y.unflatten(-1, (-1, Q_BLOCK))
    far = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = far / -8 if bits == 4 else far.abs() / 127
    ratio = torch.where(scale == 0, 0.0, blocks / torch.where(scale == 0, 1.0, scale))
    codes = (ratio + 8.5).floor().clamp(max=15) - 8 if bits == 4 else ratio.round()
    found = (codes * scale.half().float()).flatten(-2)
    return rotated(found) if rotate else found


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Simulated):
    """Keys and values in q4_0 or q8_0, all tokens at once.

    Differs from llama.cpp: a prompt attends to its own tokens as they came, there as they are stored.

    Attributes:
        bits_each: of a channel, 4 or 8.
        rotate: with a Hadamard matrix over the channels of a head; llama.cpp rotates since its pull request 21038.
    """

    about = (
        "LlamaCpp: llama.cpp's q4_0 or q8_0, simulated; a scale of 16 bits for 32 channels of a token, rotated, no "
        "window and no sink."
    )

    bits_each: int = 4
    rotate: bool = True

    def __post_init__(self) -> None:
        if self.bits_each not in (4, 8):
            raise ValueError(f"bits_each: got {self.bits_each}, allowed 4 and 8.")

    def check(self, config: Any) -> None:
        super().check(config)
        if head_dim(config) % Q_BLOCK:
            raise ValueError(
                f"schemes: LlamaCpp takes heads of multiples of {Q_BLOCK} channels; got {head_dim(config)}."
            )

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        rounds = partial(llama_cpp, bits=self.bits_each, rotate=self.rotate)
        form = LayerFormat(rounds, rounds, self.bits_each + 16 / Q_BLOCK, self.bits_each, step_reads_stored=True)
        return [form] * full_layers(model.config)


# TurboQuant.


@lru_cache(maxsize=8)
def levels(bits: int) -> tuple[float, ...]:
    """The ``2^bits`` levels of least mean squared error for a standard normal variable (Lloyd and Max)."""
    count = 2**bits
    found = [3.5 * ((2 * i + 1) / count - 1) for i in range(count)]
    for _ in range(2000):
        edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(found)), math.inf]
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in edges]
        below = [(1 + math.erf(x / math.sqrt(2))) / 2 for x in edges]
        # The mean of the variable between two edges.
        found = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(count)]
    return tuple(found)


def turboquant_keys(x: Tensor, bits: int) -> Tensor:
    """Keys (..., D), rotated, by direction and norm: ``n c / |c|``, c the nearest levels of N(0, 1/D)."""
    x, dim = x.float(), x.shape[-1]
    norm = x.norm(dim=-1, keepdim=True)
    table = torch.tensor(levels(bits), device=x.device) / math.sqrt(dim)
    near = torch.bucketize(rotated(x / (norm + 1e-8)), (table[1:] + table[:-1]) / 2, right=True)
    c = table[near]
    return norm.half().float() * rotated(c / c.norm(dim=-1, keepdim=True))


def turboquant_values(x: Tensor, bits: int) -> Tensor:
    """Values (..., D) per token: ``s q + m`` with s the range over ``2^bits - 1``, s and m stored in f16."""
    x, most = x.float(), 2**bits - 1
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / most).clamp(min=1e-8)
    codes = ((x - low) / scale + 0.5).floor().clamp(0, most)
    return codes * scale.half().float() + low.half().float()


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Simulated):
    """Every token is quantized at once, without sink or window; the first and last two layers stay whole.

    Paper: Zandieh et al., "TurboQuant", the variant for least squared error (its algorithm 1).
    Differs from the paper as vLLM's ``turboquant_4bit_nc`` and ``turboquant_3bit_nc`` do: a Hadamard matrix in place of
    a random rotation, no QJL residual, directions of unit norm, values by equal steps and unrotated. Without whole
    layers at the ends, 3-bit keys lose some 30 points of GSM8K.

    Attributes:
        key_bits: of a channel of keys.
        value_bits: of a channel of values.
        boundary: layers at each end of the model that stay whole.
    """

    about = (
        "TurboQuant (arXiv 2504.19874) as vLLM has it, simulated; norm correction, no QJL, the first and last two "
        "layers whole, no sink, no window."
    )

    key_bits: int = 4
    value_bits: int = 4
    boundary: int = 2

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            if not 1 <= (bits := getattr(self, name)) <= 8:
                raise ValueError(f"{name}: got {bits}, allowed 1 to 8.")

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        dim, layers = head_dim(model.config), full_layers(model.config)
        codes = (self.key_bits + self.value_bits) / 2
        keys, values = partial(turboquant_keys, bits=self.key_bits), partial(turboquant_values, bits=self.value_bits)
        # A norm for keys, scale and minimum for values, of 16 bits each.
        form = LayerFormat(keys, values, codes + (16 + 32) / (2 * dim), codes, step_reads_stored=True)
        ends = min(self.boundary, layers // 2)
        return [None if i < ends or i >= layers - ends else form for i in range(layers)]


# OScaR.


def _grouped(x: Tensor) -> Tensor:
    """Groups (..., g) in 2 bits with a whole zero point; scale, and scale times zero point, stored in f16."""
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / 3
    step = torch.where(scale > 0, scale, 1.0)
    zero = torch.round(-low / step)
    codes = (torch.round(x / step) + zero).clamp(0, 3)
    return torch.where(scale > 0, codes * scale.half().float() - (zero * scale).half().float(), low)


def omni_keys(x: Tensor, group: int) -> Tensor:
    """Keys (B, H, n, D): rotated, each token divided by its norm over all heads, then per channel of g tokens."""
    y = rotated(x)
    norm = y.square().sum((1, 3), keepdim=True).sqrt()
    norm = torch.where(norm > 0, norm, 1.0)
    parts = (y / norm).transpose(2, 3).unflatten(3, (-1, group))
    return rotated(_grouped(parts).flatten(3).transpose(2, 3) * norm)


def omni_values(x: Tensor, group: int) -> Tensor:
    """Values (B, H, n, D): rotated, then per token of g channels."""
    return rotated(_grouped(rotated(x).unflatten(3, (-1, group))).flatten(3))


@dataclass(frozen=True, kw_only=True)
class OmniScaled(Simulated):
    """Keys rotated and evened out by token norms, then KIVI's codes; whole blocks leave the window together.

    Paper: Su et al., "OScaR: The Occam's Razor for Extreme KV Cache Quantization": Canalized Rotation and Omni-Token
    Scaling, in INT2. Settings are those of the authors' evaluation on LongBench.
    Differs from the paper: norms and whole tokens are as their kernels have them, one f32 norm a token for all heads.

    Attributes:
        group: elements that share a scale: tokens of a channel of keys, channels of a token of values.
        unit: tokens that are quantized together; up to one less stay whole.
    """

    about = (
        "OmniScaled: OScaR (Omni-Scaled Canalized Rotation, arXiv 2605.19660, not OSCAR), simulated; INT2, groups of "
        "32, the newest up to 255 tokens whole, no sink."
    )

    group: int = 32
    unit: int = 256

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        dim, text = head_dim(model.config), model.config.get_text_config(decoder=True)
        group = min(self.group, dim)
        if not self.unit or self.unit % group:
            raise ValueError(f"unit: got {self.unit}, allowed multiples of the group of {group} tokens.")
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        # Scale and zero point of 16 bits each; norms of keys.
        bits = 2 + 32 / group + 32 / (heads * dim) / 2
        keys, values = partial(omni_keys, group=group), partial(omni_values, group=group)
        return [LayerFormat(keys, values, bits, 2, unit=self.unit)] * full_layers(model.config)


# Methods that calibrate.


def calibration_rows(tokenizer: Any, tokens: Tensor, count: int, room: int) -> list[list[int]]:
    """Rows of the package's texts, from their ends on, that occur in none of the measured windows.

    Args:
        tokenizer: the model's.
        tokens: i64 (W, T), the windows.
        count: tokens wanted.
        room: most tokens of a row.

    Raises:
        ValueError: there is too little text besides the windows.
    """
    size = min(ROW, room)
    windows = [bytes(row.cpu().to(torch.int32).numpy()) for row in tokens]
    texts = [tokenizer(read_text(kind), add_special_tokens=False, verbose=False).input_ids for kind in KINDS]
    found: list[list[int]] = []
    for last in range(0, max(map(len, texts)) - size, size):
        for ids in texts:
            row = ids[len(ids) - last - size : len(ids) - last] if len(ids) >= last + size else []
            # A part of a row is enough: windows may end within it.
            starts = range(0, len(row), size // 8)
            parts = [bytes(torch.tensor(row[i : i + 16], dtype=torch.int32).numpy()) for i in starts]
            if row and len(found) * size < count and not any(part in window for window in windows for part in parts):
                found.append(row)
    if len(found) * size < min(count, 4 * size):
        raise ValueError("text: nothing is left to calibrate with; measure fewer or shorter windows.")
    return found


@dataclass(frozen=True, kw_only=True)
class Calibrated(Simulated):
    """A method whose layers depend on queries, keys and values of ``calibration`` tokens of text."""

    calibration: int = 30_000

    @abstractmethod
    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        """The format of a layer, from its queries, keys and values in rows of calibration text."""

    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        if tokenizer is None:
            raise ValueError(f"tokenizer: got None, but {type(self).__name__} calibrates on text; give the model's.")
        room = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or ROW
        rows, which = calibration_rows(tokenizer, tokens, self.calibration, room), compressed_layers(model)
        captured: list[list[Capture]] = [[] for _ in which]
        for row in rows:
            for kept, one in zip(captured, capture(model, row, which), strict=True):
                query, keys, values = (x.to("cpu", copy=True) for x in (one.query, one.keys, one.values))
                kept.append(Capture(query, keys, values, one.scaling))
        forms = []
        while captured:
            forms.append(self.form(captured.pop(0)))
        return forms


# OSCAR.


def composed(covariance: Tensor) -> Tensor:
    """``R = U H P`` (D, D), f64: eigenvectors, Hadamard, and the order that spreads large eigenvalues over a row.

    P puts the column of the i-th largest eigenvalue where the bits of i, reversed, say.
    """
    size = len(covariance)
    eigenvalues, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    order = torch.empty(size, dtype=torch.long)
    width = size.bit_length() - 1
    reverse = torch.tensor([int(f"{i:0{width}b}"[::-1], 2) if width else 0 for i in range(size)])
    order[reverse] = eigenvalues.argsort(descending=True)
    return (vectors @ rotated(torch.eye(size)).double())[:, order]


def oscar_rotations(captured: Sequence[Capture]) -> tuple[Tensor, Tensor]:
    """``R_K`` and ``R_V`` of one layer, f64 (D, D), from several rows of calibration text.

    ``C_Q`` is the second moment of the queries, and ``C_S`` that of the values, each token weighted by ``k C_Q k`` of
    its own head; both are means over KV heads.
    """
    heads = captured[0].keys.shape[0]
    query, key, value = (
        torch.cat([getattr(x, name).cpu().double().unflatten(0, (heads, -1)) for x in captured], 2)
        for name in ("query", "keys", "values")
    )
    moments = torch.einsum("hsnd,hsne->hde", query, query) / (query.shape[1] * query.shape[2])
    key, value = key.squeeze(1), value.squeeze(1)
    weight = torch.einsum("hnd,hde,hne->hn", key, moments, key)
    weight = weight / weight.mean(1, keepdim=True).clamp(min=1e-12)
    spread = torch.einsum("hn,hnd,hne->de", weight, value, value) / (heads * value.shape[1])
    return composed(moments.mean(0)), composed(spread)


def oscar(x: Tensor, rotation: Tensor, clip: float) -> Tensor:
    """Tokens (..., D): rotated, clipped at the entry of rank ``floor(clip D)`` of its magnitudes, 2 bits a channel.

    Scale and zero point are a token's, and stored in f16.
    """
    rotation = rotation.to(x.device, torch.float32)
    y = x.float() @ rotation
    rank = min(int(clip * y.shape[-1]), y.shape[-1] - 1)
    limit = y.abs().sort(-1).values[..., rank, None]
    y = torch.minimum(torch.maximum(y, -limit), limit)
    low = y.amin(-1, keepdim=True)
    scale = ((y.amax(-1, keepdim=True) - low).clamp(min=1e-8) / 3).half().float().clamp(min=2**-24)
    zero = (-low / scale).half().float()
    codes = (y / scale + zero + 0.5).floor().clamp(0, 3)
    return (codes - zero) * scale @ rotation.T


@dataclass(frozen=True, kw_only=True)
class Oscar(Calibrated):
    """Rotations of queries' and weighted values' second moments, from calibration text, then INT2 per token, clipped.

    Paper: Zhou et al., "OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization", section 3;
    windows, clips and the order of columns as in the authors' settings.
    Differs from the paper: weights of values are those of the authors' ``compute_kv_rotation.py``; calibrated on the
    package's own texts, not on GPQA prompts; a group is a whole head; scale and zero point in 16 bits, as the paper's
    2.28 bits have it, where the authors' runs keep 32.

    Attributes:
        sink: first tokens that stay whole.
        recent: newest tokens that stay whole.
        key_clip: rank at which keys are clipped, as a share of the channels.
        value_clip: the same of values.
    """

    about = (
        "Oscar: OSCAR (arXiv 2605.17757), simulated; INT2, sink of 64, newest 256 whole, rotations per layer "
        "calibrated on text of the package that no window holds."
    )

    sink: int = 64
    recent: int = 256
    key_clip: float = 0.96
    value_clip: float = 0.92

    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        turns = zip(oscar_rotations(captured), (self.key_clip, self.value_clip), strict=True)
        keys, values = (partial(oscar, rotation=rotation, clip=clip) for rotation, clip in turns)
        # Scale and zero point of 16 bits each a token and head.
        return LayerFormat(keys, values, 2 + 32 / captured[0].keys.shape[-1], 2, self.sink, self.recent)


# SAW-INT4's calibrated variants, which its paper measures and leaves.


def int4(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Tokens (..., D) by INT4 a token (eqs. 3 and 4) in a rotated basis, and back; scale and minimum in f16."""
    turn = None if rotation is None else rotation.to(x.device, torch.float32)
    y = x.float() if turn is None else x.float() @ turn
    low = y.amin(-1, keepdim=True)
    scale = ((y.amax(-1, keepdim=True) - low) / 15).half().float()
    low = low.half().float()
    codes = ((y - low) / scale.clamp(min=2**-24) + 0.5).floor().clamp(0, 15)
    y = codes * scale + low
    return y if turn is None else y @ turn.T


def block_rotation(dim: int, block: int) -> Tensor:
    """Blocks of Hadamard matrices, f64 (D, D); the identity for 0."""
    size = min(block, dim)
    return torch.block_diag(*[rotated(torch.eye(size)).double()] * (dim // size)) if size else torch.eye(dim).double()


def hessian_rotation(captured: Sequence[Capture], damping: float) -> Tensor:
    """R, f64 (D, D): eigenvectors of the queries' second moment (eqs. 7, 9 and 10), largest eigenvalue first.

    The largest entry of each is positive.
    """
    query = torch.cat([one.query.cpu().double().flatten(0, 1) for one in captured])
    moment = query.T @ query / len(query)
    moment += damping * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    vectors = torch.linalg.eigh(moment).eigenvectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * largest.sign()


def kmeans(x: Tensor, count: int) -> Tensor:
    """Centroids of tokens (n, D), f32 (C, D): 20 rounds of Lloyd's algorithm from k-means++, with a fixed seed."""
    x, generator = x.float(), torch.Generator().manual_seed(0)
    far, first = torch.ones(len(x)), []
    for _ in range(min(count, len(x))):
        first.append(x[torch.multinomial(far.clamp(min=1e-12), 1, generator=generator)])
        own = (x - first[-1]).square().sum(1)
        far = own if len(first) == 1 else torch.minimum(far, own)
    centres = torch.cat(first)
    for _ in range(20):
        nearest = torch.cdist(x, centres).argmin(1)
        sums, sizes = torch.zeros_like(centres).index_add_(0, nearest, x), nearest.bincount(minlength=len(centres))
        # A centroid that no token is nearest to stays where it is.
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centres)
    return centres


def residual(x: Tensor, centres: Tensor, rotation: Tensor | None) -> Tensor:
    """Tokens (B, H, n, D) by the nearest centroid of their head (H, C, D), and the rest in INT4 (eqs. 5 and 6)."""
    centres, x = centres.to(x.device), x.float()
    batch, heads = x.shape[:2]
    each = centres[None].expand(batch, -1, -1, -1).flatten(0, 1)
    nearest = torch.cdist(x.flatten(0, 1), each).argmin(-1)
    near = each.gather(1, nearest[..., None].expand(-1, -1, x.shape[-1])).unflatten(0, (batch, heads))
    return near + int4(x - near, rotation)


@dataclass(frozen=True, kw_only=True)
class SawHessian(Calibrated):
    """Keys and values rotated by Hadamard blocks and then by eigenvectors of the queries, then INT4 a token.

    Paper: Jia et al., SAW-INT4, appendix A.3; equation 11 is taken as it stands, with eigenvectors of queries that are
    not rotated. Differs from the paper: scale and minimum in f16; calibrated on the package's texts.

    Attributes:
        block: order of the Hadamard blocks, at most that of a head; 0 for none.
        values: 1 rotates values likewise, 0 leaves them as they are.
        damping: α of equation 9.
    """

    about = "SawHessian: SAW-INT4's Hessian-aware rotation (arXiv 2604.19157, A.3), simulated; INT4, no window."

    block: int = 128
    values: int = 1
    damping: float = 0.01

    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        dim = captured[0].keys.shape[-1]
        turn = block_rotation(dim, self.block) @ hessian_rotation(captured, self.damping)
        values = partial(int4, rotation=turn if self.values else None)
        return LayerFormat(partial(int4, rotation=turn), values, 4 + 32 / dim, 4)


@dataclass(frozen=True, kw_only=True)
class SawKMeans(Calibrated):
    """Tokens by the nearest of C centroids and INT4 of the rest; keys are rotated by Hadamard blocks for that.

    Paper: Jia et al., SAW-INT4, appendix A.2. Differs from the paper: a codebook for each layer, KV head and side,
    which it leaves open and which is not counted; scale and minimum in f16; the package's texts.

    Attributes:
        centroids: C.
        block: order of the Hadamard blocks of keys, at most that of a head; 0 for none.
    """

    about = "SawKMeans: SAW-INT4's k-means codes (arXiv 2604.19157, A.2), simulated; INT4 of residuals, no window."

    calibration: int = 20_000
    centroids: int = 256
    block: int = 128

    def form(self, captured: Sequence[Capture]) -> LayerFormat:
        sides = []
        for name in ("keys", "values"):
            x = torch.cat([getattr(one, name).cpu().float() for one in captured], 1)
            sides.append(torch.stack([kmeans(own, max(1, self.centroids)) for own in x]))
        dim = captured[0].keys.shape[-1]
        turn = block_rotation(dim, self.block) if self.block else None
        keys = partial(residual, centres=sides[0], rotation=turn)
        values = partial(residual, centres=sides[1], rotation=None)
        index = 0 if self.centroids <= 1 else 8 if self.centroids <= 256 else 16
        return LayerFormat(keys, values, 4 + (32 + index) / dim, 4)
