"""Times whole models with random weights: prompts, decode steps and peak memory of caches, in turns in one process.

    PYTHONPATH=. python evals/generate.py --caches dynamic-nocudnn,kitty-pro,saw-int4 --cases 1x1k,1x32k --json FILE
    PYTHONPATH=. python evals/generate.py --caches kitty-pro,static-compiled --cases 1x1k --tokens 256 --no-steps
    PYTHONPATH=. python evals/generate.py --caches kitty-pro --cases 16x8k --tokens 256 --no-steps --peers vllm,vllm-fp8
    TRITON_CACHE_DIR=$(mktemp -d) PYTHONPATH=. python evals/generate.py --caches kitty-pro --cases 1x6 --tokens 9 --cold

A cache is one of Transformers' (dynamic, dynamic-nocudnn, dynamic-offloaded, static-compiled, quanto-2, quanto-4,
hqq-2, hqq-4) or a preset, also with options and a mode behind it: ``kitty-pro`` grows and captures its steps as CUDA
graphs, ``:fixed`` has ``max_cache_len`` too, ``:compiled`` goes through `torch.compile`, ``:eager`` launches operation
by operation, ``:offloaded`` keeps pages in the host's memory.

At each size every cache gets a random prompt, which is timed, and warms up; then all caches take turns with rounds of
greedy steps, so that a host whose speed changes is the same for all. All caches of a size are held at a time; with
--alone each cache is timed by itself, for sizes of which one cache alone fits. A failure, for lack of memory or another
reason, is a row with an error. Bytes are those of PyTorch's allocator: cache_bytes are those behind the prompt,
above_bytes the peak of prompt and warm-up, both beyond what was allocated before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.utils import logging

from evals.shapes import SHAPES, build, get_config
from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.compile import compile_ahead
from hfkvq.caches.named import TriAxialCache
from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.caches.tags import Tagger, parse_tag
from hfkvq.measure.records import clock, commit, device_name, now, versions
from hfkvq.sizes import parse_count

MODES = ("fixed", "compiled", "eager", "offloaded")
COMPILE: dict[str, Any] = {"mode": "reduce-overhead"}
MOST_TOKENS = 32768
"""Tokens of all rows that a forward of a prompt takes at most."""

Row = dict[str, Any]


class SpreadTags(Tagger):
    """Tags without a conversation: 70 % of the tokens, spread evenly, are old tool results."""

    def __init__(self) -> None:
        super().__init__(None)

    def tag(self, input_ids: Any, attention_mask: Any = None) -> Tensor:
        """(B, T) uint8 tags on the CPU."""
        rows, tokens = torch.as_tensor(input_ids).shape
        # Multiples of the golden ratio fill the unit interval evenly.
        narrow = (torch.arange(tokens).double() * 0.6180339887498949) % 1.0 < 0.7
        tags = torch.where(narrow, parse_tag("older|text|obs"), parse_tag("current|text|user"))
        return tags.to(torch.uint8).repeat(rows, 1)


@dataclass(frozen=True)
class Engine:
    """A cache, and how the model is run with it.

    Attributes:
        name: as typed.
        make: (model, tokens of room) to an empty cache.
        mode: graphs, or one of `MODES`.
        cudnn: whether PyTorch's attention may take cuDNN; None leaves it as it is.
        preset: of a cache of this library.
    """

    name: str
    make: Callable[[Any, int], Cache]
    mode: str = "eager"
    cudnn: bool | None = None
    preset: Preset | None = None

    @contextlib.contextmanager
    def running(self, cache: Cache | None) -> Iterator[None]:
        """Attention as this cache needs it, and as it was afterwards: the next cache may be a stock one."""
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(before if self.cudnn is None else self.cudnn)
        if isinstance(cache, MixedKVCache):
            cache.attach()
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
            if isinstance(cache, MixedKVCache):
                cache.detach()


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def quantized(model: Any, room: int, backend: str, bits: int, axis: int) -> Cache:
    return QuantizedCache(backend, text_config(model), nbits=bits, axis_key=axis, axis_value=axis)


STOCK = {
    "dynamic": Engine("dynamic", lambda model, room: DynamicCache(config=text_config(model)), cudnn=True),
    "dynamic-nocudnn": Engine(
        "dynamic-nocudnn", lambda model, room: DynamicCache(config=text_config(model)), cudnn=False
    ),
    "dynamic-offloaded": Engine(
        "dynamic-offloaded", lambda model, room: DynamicCache(config=text_config(model), offloading=True), "offloaded"
    ),
    "static-compiled": Engine(
        "static-compiled", lambda model, room: StaticCache(config=text_config(model), max_cache_len=room), "compiled"
    ),
    **{
        f"{backend}-{bits}": Engine(f"{backend}-{bits}", partial(quantized, backend=backend, bits=bits, axis=axis))
        # The axes that Transformers recommends for each.
        for backend, axis in (("quanto", 0), ("hqq", 1))
        for bits in (2, 4)
    },
}


def engine_of(text: str) -> Engine:
    """The engine of a typed name. Raises ValueError."""
    if text in STOCK:
        return STOCK[text]
    head, _, last = text.rpartition(":")
    name, mode = (head, last) if head and last in MODES else (text, "graphs")
    preset = get_preset(name)

    def make(model: Any, room: int) -> Cache:
        options: dict[str, Any] = {"max_cache_len": room} if mode in ("fixed", "compiled") else {}
        options |= {"offloading": True} if mode == "offloaded" else {}
        options |= {"graphs": False} if mode in ("compiled", "eager") else {}
        # Hooks of a model do not run in a compiled step.
        owner = model.config if mode == "compiled" else model
        if isinstance(preset.scheme, TriAxial):
            knobs = {name: value for name, value in preset.scheme.to_dict().items() if name != "scheme"}
            return TriAxialCache(owner, tagger=SpreadTags(), layers=dict(preset.layers), **options, **knobs)
        return MixedKVCache(owner, preset, **options)

    return Engine(text, make, mode, preset=preset)


def parse_cases(text: str) -> list[tuple[int, int]]:
    """Rows and tokens: ``64x8k,1x1k``. Raises ValueError."""
    pairs = [part.strip().partition("x") for part in text.split(",")]
    return [(parse_count(rows, "cases"), parse_count(tokens, "cases")) for rows, _, tokens in pairs]


def quantiles(times: Sequence[float], count: int = 1) -> dict[str, float]:
    """Milliseconds of one of ``count`` equal parts: 20 %, 50 % and 80 % of repeats, given in seconds."""
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else list(times) * 9
    return {name: 1e3 * tenths[at] / count for name, at in (("p20", 1), ("p50", 4), ("p80", 7))}


def random_ids(model: Any, batch: int, tokens: int) -> Tensor:
    """Token ids i64 (B, T)."""
    most = model.get_input_embeddings().num_embeddings
    return torch.randint(most, (batch, tokens), generator=torch.Generator().manual_seed(0)).to(model.device)


class Decoder:
    """A model, a cache with a context, and the newest token of each row; ``compiled`` as `generate` does it."""

    def __init__(self, model: Any, cache: Cache, batch: int, compiled: bool = False) -> None:
        self.forward = torch.compile(model.forward, fullgraph=True, **COMPILE) if compiled else None
        self.model, self.cache, self.ids = model, cache, random_ids(model, batch, 1)

    def step(self) -> Tensor:
        """Computes the next token of each row, and makes it the newest; waits for nothing. Logits (B, V)."""
        if self.forward is None:
            # The model itself is called: caches may see to its steps.
            logits = self.model(input_ids=self.ids, past_key_values=self.cache).logits
        else:
            if isinstance(self.cache, MixedKVCache):
                self.cache.between_steps()
            given = {"past_key_values": self.cache, "logits_to_keep": 1, "use_cache": True}
            logits = self.forward(input_ids=self.ids, **given).logits
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits[:, -1]

    def timed(self, steps: int) -> float:
        """Seconds of so many steps."""
        start = clock(self.model.device)
        for _ in range(steps):
            self.step()
        return clock(self.model.device) - start


@dataclass
class Held:
    """A cache with its prompt, warmed up, and the seconds of its rounds."""

    engine: Engine
    decoder: Decoder
    row: Row
    times: list[float] = field(default_factory=list)

    def round(self, steps: int) -> None:
        with self.engine.running(self.decoder.cache):
            self.times.append(self.decoder.timed(steps))


def allocated(device: torch.device, most: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if most else torch.cuda.memory_allocated(device)


def sweep(device: torch.device) -> None:
    """Gives back caches, graphs and their pools, and compiled code."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def attempt(row: Row, work: Callable[[], Any]) -> Any:
    """Result of work; an error is noted in the row, and None returned."""
    try:
        return work()
    except Exception as error:
        # The error's text is kept: its frames hold the tensors that memory was too small for.
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        row["oom"] = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
        return None


@torch.no_grad()
def prepare(model: Any, engine: Engine, case: tuple[int, int], row: Row, asked: argparse.Namespace) -> Held:
    """A cache with a prompt, which is timed, and its first steps, which compile and capture."""
    (batch, context), device = case, model.device
    piece = min(context, asked.chunk or max(16, MOST_TOKENS // batch))
    ids, room = random_ids(model, batch, context), context + asked.warmup + asked.steps * asked.repeats

    def prompt(cache: Cache, tokens: int) -> None:
        for part in ids[:, :tokens].split(piece, 1):
            model(input_ids=part, past_key_values=cache, logits_to_keep=1, use_cache=True)

    first = engine.make(model, room)
    with engine.running(first):
        prompt(first, piece)
    del first
    gc.collect()
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cache = engine.make(model, room)
    with engine.running(cache):
        start = clock(device)
        prompt(cache, context)
        row |= {"prompt_ms": 1e3 * (clock(device) - start), "cache_bytes": allocated(device) - before}
        decoder = Decoder(model, cache, batch, engine.mode == "compiled")
        # Experts are switched to what is fast for few tokens, as `generate` does.
        with getattr(model, "_optimize_model_for_decode", contextlib.nullcontext)():
            row["first_step_s"] = decoder.timed(1)
            if not bool(torch.isfinite(decoder.step()).all()):
                raise RuntimeError("the logits are not finite; such steps are not worth timing.")
            decoder.timed(asked.warmup - 2)
    row |= {"above_bytes": allocated(device, True) - before, "peak_bytes": allocated(device, True)}
    return Held(engine, decoder, row)


def finish(held: Sequence[Held], asked: argparse.Namespace) -> None:
    """Times rounds of steps in turns, another cache first in each, and writes the rows' figures."""
    model = held[0].decoder.model if held else None
    with torch.no_grad(), getattr(model, "_optimize_model_for_decode", contextlib.nullcontext)():
        for i in range(asked.repeats if held else 0):
            for each in (*held[i % len(held) :], *held[: i % len(held)]):
                if "error" not in each.row:
                    attempt(each.row, lambda each=each: each.round(asked.steps))
    for each in held:
        if "error" in each.row:
            continue
        taken = each.row["context"] + asked.warmup + asked.steps * asked.repeats
        if (length := int(each.decoder.cache.get_seq_length())) != taken:
            each.row["error"] = f"RuntimeError: {taken} tokens were given, but the cache holds {length}."
            continue
        ms = quantiles(each.times, asked.steps)
        each.row |= {"ms": ms, "tokens_per_s": 1e3 * each.row["batch"] / ms["p50"]}
        each.row |= {"steps": asked.steps, "repeats": asked.repeats}


def measure_steps(model: Any, engines: Sequence[Engine], case: tuple[int, int], asked: argparse.Namespace) -> list[Row]:
    """Rows of kind "decode" of a size; ``times_as_long`` is against the first cache, round by round."""
    rows: list[Row] = []
    held: list[Held] = []
    sweep(model.device)
    for engine in engines:
        row = {"kind": "decode", "engine": engine.name, "mode": engine.mode, "batch": case[0], "context": case[1]}
        rows.append(row)
        ready = attempt(row, lambda engine=engine, row=row: prepare(model, engine, case, row, asked))
        if ready is not None and asked.alone:
            finish([ready], asked)
            del ready
            sweep(model.device)
        elif ready is not None:
            held.append(ready)
    finish(held, asked)
    if len(held) > 1 and "ms" in held[0].row:
        for each in (each for each in held if "ms" in each.row):
            ratios = [own / other for own, other in zip(each.times, held[0].times, strict=True)]
            each.row |= {"times_as_long": statistics.median(ratios), "than": held[0].engine.name}
    return rows


def measure_calls(model: Any, engine: Engine, case: tuple[int, int], asked: argparse.Namespace) -> Row:
    """A row of kind "whole": seconds of calls of `generate`, each with a new cache in the last one's variable."""
    batch, context = case
    row: Row = {"kind": "whole", "engine": engine.name, "mode": engine.mode, "batch": batch, "context": context}
    row["new_tokens"] = asked.tokens
    sweep(model.device)
    before, ids = allocated(model.device), random_ids(model, batch, context)
    compiled = engine.mode == "compiled"
    config = GenerationConfig(
        max_new_tokens=asked.tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        disable_compile=not compiled, compile_config=CompileConfig(**COMPILE) if compiled else None,
    )  # fmt: skip
    kept: list[Cache] = []
    last: list[Cache] = []

    def call(tokens: int) -> float:
        start = clock(model.device)
        if kept:
            # The graph of a compiled model is of this cache.
            kept[0].reset()
        cache = kept[0] if kept else engine.make(model, context + asked.tokens)
        kept.extend([cache] if compiled and not kept else [])
        # The last cache goes when the new one is there, as in `cache = MixedKVCache(model)` for each request.
        last[:] = [cache]
        with engine.running(cache), torch.no_grad():
            given = {"attention_mask": torch.ones_like(ids), "generation_config": config, "max_new_tokens": tokens}
            out = model.generate(ids, past_key_values=cache, **given)
        assert out.shape[1] == context + tokens
        return clock(model.device) - start

    times = attempt(row, lambda: [call(asked.tokens) for _ in range(asked.calls)])
    if times is not None:
        # Calls after the first two compile and capture nothing.
        warm = quantiles(times[2:] or times[-1:])
        row |= {"calls_s": times, "ms": warm, "tokens_per_s": 1e3 * batch * asked.tokens / warm["p50"]}
        ones = attempt(row, lambda: [] if asked.cold else [call(1) for _ in range(max(1, asked.calls - 2))])
        row |= step_of(times[2:] or times[-1:], ones, asked.tokens) if ones else {}
        row |= {"peak_bytes": allocated(model.device, True), "above_bytes": allocated(model.device, True) - before}
    return row


def step_of(calls: Sequence[float], ones: Sequence[float], tokens: int) -> Row:
    """Milliseconds of a step, from seconds of calls of so many tokens and of one, and seconds of a prompt."""
    one, whole = statistics.median(ones), statistics.median(calls)
    return {"prompt_s": one, "step_ms": 1e3 * (whole - one) / (tokens - 1)}


def line(row: Row) -> str:
    """A row for a reader."""
    head = f"{row['kind']:<7}{row['batch']} x {row['context']:<7}{row['engine']:<28}"
    if "error" in row:
        return head + row["error"]
    ms, more = row["ms"], []
    if "prompt_ms" in row:
        more = [f"prompt {row['prompt_ms']:,.0f} ms", f"cache {row['cache_bytes'] / 2**30:.2f} GiB"]
    if "times_as_long" in row:
        more.append(f"{row['times_as_long']:.2f} times {row['than']}")
    if "calls_s" in row:
        more = [f"calls {', '.join(f'{each:.2f}' for each in row['calls_s'])} s"]
    if "step_ms" in row:
        more.append(f"{row['step_ms']:.2f} ms a step, prompt {row['prompt_s']:.2f} s")
    if "above_bytes" in row:
        more.append(f"peak {row['above_bytes'] / 2**30:.2f} GiB above the weights")
    return f"{head}{ms['p50']:>9.2f} ms ({ms['p20']:.2f} to {ms['p80']:.2f}), {', '.join(more)}"


PEERS = {"vllm": "auto", "vllm-fp8": "fp8"}
"""Dtypes of other engines' caches, by the names that are typed."""


def measure_peers(names: Sequence[str], config: Any, asked: argparse.Namespace) -> list[Row]:
    """Rows of kind "whole" of vLLM's engine (`evals.vllm_peer`), in processes that have the GPU to themselves."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for name in names:
            options = ["--kv", PEERS[name], "--tokens", str(asked.tokens), "--calls", str(asked.calls)]
            command = [sys.executable, "-m", "evals.vllm_peer", folder, *options, "--cases", asked.cases]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            found = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
            failed = {"kind": "whole", "engine": name, "batch": 0, "context": 0, "error": f"exit {done.returncode}"}
            rows += [{"engine": name} | each for each in found] or [failed]
    return rows


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help=f"{', '.join(SHAPES)}, or a folder or name with a config")
    parser.add_argument("--layers", type=int, help="use only this many")
    parser.add_argument("--caches", default="dynamic-nocudnn,kitty-pro,saw-int4", help="the first is the baseline")
    parser.add_argument("--cases", default="1x1k,1x32k", help="ROWSxTOKENS")
    parser.add_argument("--chunk", type=int, help="tokens of a row in a forward of a prompt")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--warmup", type=int, default=8, help="steps before the first round, 4 or more")
    parser.add_argument("--no-steps", action="store_true", help="no decode steps; see --tokens")
    parser.add_argument("--alone", action="store_true", help="one cache at a time, not in turns")
    parser.add_argument("--tokens", type=int, help="also time calls of generate with so many new tokens")
    parser.add_argument("--calls", type=int, default=5, help="calls of generate")
    parser.add_argument("--cold", action="store_true", help="only --tokens, and compile nothing before the first call")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peers", default="", help=f"{', '.join(PEERS)}: after all caches, if vLLM is installed")
    parser.add_argument("--json", type=Path, help="written again after each row")
    found = parser.parse_args(given)
    if found.warmup < 4:
        parser.error("--warmup: 4 or more; the first steps compile, warm up and capture")
    found.peers = [name for name in found.peers.split(",") if name]
    if unknown := set(found.peers) - set(PEERS):
        parser.error(f"--peers: got {', '.join(sorted(unknown))}, allowed {', '.join(PEERS)}")
    if found.peers and not found.tokens:
        parser.error("--peers: they are timed by whole calls; give --tokens, too")
    if found.peers and importlib.util.find_spec("vllm") is None:
        parser.error("--peers: vLLM is not installed; pip install vllm")
    return found


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a line for each row, and returns the record."""
    asked = arguments(given)
    logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engines, config = [engine_of(name) for name in asked.caches.split(",")], get_config(asked.model, asked.layers)
    model = build(config, device, getattr(torch, asked.dtype))
    text = text_config(model)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    record: dict[str, Any] = {
        "kind": "hfkvq generate",
        "gpu": device_name(device),
        "versions": versions("torch", "triton", "transformers"),
        "commit": commit(),
        "date": now(),
        "model": {"name": asked.model, "type": text.model_type, **{name: getattr(text, name) for name in names}},
        "settings": {**vars(asked), "json": None, "HFKVQ_GRAPHS": os.environ.get("HFKVQ_GRAPHS")},
        "schemes": {engine.name: engine.preset.to_dict() for engine in engines if engine.preset is not None},
        "rows": [],
    }

    def keep(rows: Sequence[Row]) -> None:
        record["rows"] += rows
        print("\n".join(map(line, rows)), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    if not asked.cold:
        compile_ahead(model, [engine.preset for engine in engines if engine.preset is not None], (1,))
    for case in parse_cases(asked.cases):
        if not (asked.no_steps or asked.cold):
            keep(measure_steps(model, engines, case, asked))
        for engine in engines if asked.tokens else ():
            keep([measure_calls(model, engine, case, asked)])
    if asked.peers:
        config.architectures = [type(model).__name__]
        del model
        sweep(device)
        keep(measure_peers(asked.peers, config, asked))
    return record


if __name__ == "__main__":
    main()
