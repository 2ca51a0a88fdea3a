"""A cache with a budget beside the presets: divergence on every rung, milliseconds a step, and the most memory taken.

    PYTHONPATH=. python evals/budget.py --model FILE.gguf --json FILE [--data DIR] [--order measure]

Parts, any of which may be left out (``--parts ladder steps fill``), into one JSON file:

- ``order`` measures each side of each layer a rung up and down (`tune_order`), if ``--order measure``, on
  ``--order-windows`` windows of their own; the order is written beside the JSON file, and the other parts go by it.
- ``ladder``: KL divergence from `DynamicCache` after a prompt that came in 16 bits and went down step by step, as a
  cache does that fills up, at so many points of the ladder (``--points``); and of the presets. ``ratio`` is that to
  the preset of least divergence among those that take no more bytes. Bytes are of buffers without room ahead.
  With ``--forget SHARE ...`` also of the ladder's end behind which the cache forgets (``evict="snapkv"``), so that such
  shares of the prompt's tokens stay, and of ``snapkv`` over pages of best-2.5 with the same shares.
- ``steps``: milliseconds of a captured step on the rungs that equal best-4.3 and best-2.5, beside these presets, in
  turns. With ``--forget`` also on the last of these rungs of a cache that may forget, and so keeps its newest queries.
- ``long`` (with ``--shape``): a long prompt, beside `DynamicCache`, on a device of which a part may be used.
- ``fill``: a short prompt and many steps within a budget that makes the cache go down the whole ladder, twice: the
  first cache of a process also compiles kernels and measures the model. ``above`` is the peak of PyTorch's allocator in
  the prompt, and in the steps behind it, above weights, less what each takes beside a cache with room (``beside``), and
  must not exceed the budget. ``changes`` has for each change seconds of its parts (`PARTS`), sides that went down, and
  blocks asked of the driver; ``share`` is the seconds' sum, of the whole. With ``--forget`` the budget is for half of
  the tokens, and the cache forgets the others.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from evals.layerwise import gain_of
from evals.shapes import build, get_config
from hfkvq import MixedKVCache
from hfkvq.caches.budget import ORDER_KIND, Budget, Rungs, Shape, layer_bytes
from hfkvq.caches.eviction.forgetting import page_size
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.caches.step_graphs import StepGraphs
from hfkvq.caches.store import SIDES
from hfkvq.kernels.pages import Side
from hfkvq.measure.divergence import measure
from hfkvq.measure.divergence.naming import OtherCache
from hfkvq.measure.divergence.run import as_record
from hfkvq.measure.divergence.windows import cut, find_texts
from hfkvq.measure.models import find_model, load_model, load_tokenizer
from hfkvq.measure.records import clock, commit, device_name, now, versions
from hfkvq.sizes import parse_size
from hfkvq.tuning.objectives import Objective, TextKLD

PRESETS = ("full", "best-4.3", "best-3.4", "best-2.8", "best-2.5")
MUCH = 2**50
Record = dict[str, Any]


class Stepping(Budget):
    """Takes its cache down step by step, to ``target``, once a prompt is there; a share of its tokens stays."""

    target: Rungs
    stays = 1.0

    def reserve(self, cache: Any, tokens: int, keys: Tensor | None = None) -> None:
        if cache._sync.seen and self.rungs != self.target:
            cache._catch_up()
            for layer in cache.compressed_layers:
                layer.settle()
            shape, room = self._shape(cache, None), max(x.buffer.room for x in cache.compressed_layers)
            for rungs in list(self.down()):
                self._go(cache, shape, rungs, room)
                if rungs == self.target:
                    break
            page = page_size(cache.compressed_layers[0].held().state)
            gone = int((1 - self.stays) * cache._sync.seen) // page * page
            if gone:
                self._go(cache, shape._replace(gone=gone), rungs, room)
        super().reserve(cache, tokens, keys)


def stepped(model: Any, target: Rungs, order: Any, stays: float | None = None) -> MixedKVCache:
    """An empty cache that goes down to these rungs behind its prompt; one that may forget if ``stays`` is given."""
    cache = MixedKVCache(model, memory=MUCH, order=order, evict=None if stays is None else "snapkv")
    budget: Any = cache.budget
    budget.__class__ = Stepping
    budget.target, budget.stays = target, 1.0 if stays is None else stays
    return cache


class OnRungs(OtherCache):
    """A cache on given rungs, for `hfkvq.measure.divergence`."""

    def __init__(self, target: Rungs, order: Any, stays: float | None = None) -> None:
        self.target, self.order, self.stays = target, order, stays

    def to_dict(self) -> Record:
        return {"rungs": self.target, "stays": self.stays}

    def check(self, config: Any) -> None:
        """Any model that a budget is for."""

    def prepare(self, model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Cache]:
        return lambda: stepped(model, self.target, self.order, self.stays)

    def held_bytes(self, cache: Any) -> float:
        return cache.memory().total

    def bits(self, cache: Any) -> tuple[float, float]:
        memory = cache.memory()
        return memory.code_bits, memory.total_bits


def states(model: Any, order: Any, count: int) -> list[Rungs]:
    """States of the ladder, so many, spread over its steps; its ends and those of its first rung are among them."""
    budget = MixedKVCache(model, memory=MUCH, order=order).budget
    assert budget is not None
    every = list(budget.down())
    first = next((n for n, own in enumerate(every) if all(min(pair) >= 1 for pair in own)), 0)
    picked = {0, first, len(every) - 1} | {round(n * (len(every) - 1) / max(count - 1, 1)) for n in range(count)}
    return [every[n] for n in sorted(picked)]


def shape_of(model: Any, rows: int) -> Shape:
    text = model.config.get_text_config(decoder=True)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = text.num_key_value_heads
    return Shape(rows, heads, dim, dim, str(model.dtype), False, 0)


def ladder(model: Any, tokens: Tensor, names: Any, given: argparse.Namespace, order: Any) -> list[Record]:
    """Divergence of states of the ladder, and of presets."""
    length, shape = tokens.shape[1], shape_of(model, 1)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    budget = MixedKVCache(model, memory=MUCH, order=order).budget
    assert budget is not None
    chosen: dict[str, Any] = {name: get_preset(name) for name in PRESETS}
    schemes = {name: preset.by_layer(layers) for name, preset in chosen.items()}
    for kind, own in {"ladder": order, "by depth": None}.items() if order else (("ladder", None),):
        for number, rungs in enumerate(states(model, own, given.points)):
            chosen[f"{kind} {number}"], schemes[f"{kind} {number}"] = OnRungs(rungs, own), budget.schemes(rungs)
            last = rungs
    rooms = {}
    for stays in given.forget:
        own, theirs = f"ladder's end, {stays:.0%} kept", f"snapkv of best-2.5, {stays:.0%} kept"
        chosen[own], schemes[own] = OnRungs(last, order, stays), budget.schemes(last)
        chosen[theirs] = get_preset("snapkv", pages="best-2.5", budget_share=stays)
        schemes[theirs] = chosen[theirs].by_layer(layers)
        rooms[own] = rooms[theirs] = length - int((1 - stays) * given.prompt)
    found = measure(model, tokens, chosen, prefill=given.prompt, chunk=8, batch_size=given.batch_size)
    record = as_record(found, 0, {}, names)
    rows = []
    for row in record["rows"]:
        room = rooms.get(row["name"], length)
        size = sum(layer_bytes(scheme, shape, room) for scheme in schemes[row["name"]])
        bits = 8 * size / (2 * shape.heads * shape.key_dim * layers * length)
        rows.append({"name": row["name"], "bytes": size, "bits": bits, "kld": row["kld"], "top1": row["top1"]})
    for row in rows:
        fitting = [x for x in rows if x["name"] in PRESETS and x["bytes"] <= row["bytes"] * 1.002]
        best = min(fitting, key=lambda x: x["kld"]["mean"], default=None)
        row["best"] = best and best["name"]
        row["ratio"] = best and row["kld"]["mean"] / best["kld"]["mean"]
    return rows


def order_gain(rows: list[Record]) -> float:
    """Mean ratio of divergences at equal bytes, of a measured order's ladder to that by depth; below 1 is better.

    Over the states by depth between the ends, which both orders share; divergences between states grow geometrically.
    """
    ours, theirs = (
        sorted((x["bytes"], math.log(x["kld"]["mean"])) for x in rows if x["name"].startswith(kind))
        for kind in ("ladder", "by depth")
    )
    ratios = []
    for size, value in theirs[1:-1]:
        at = next(n for n, (own, _) in enumerate(ours) if own >= size)
        (low, before), (high, after) = ours[max(at - 1, 0)], ours[at]
        share = (size - low) / (high - low) if high > low else 1.0
        ratios.append(before + share * (after - before) - value)
    return math.exp(sum(ratios) / len(ratios))


def feed(model: Any, cache: Any, ids: Tensor, chunk: int = 4096) -> None:
    with torch.no_grad():
        for part in ids.split(chunk, 1):
            model(part, past_key_values=cache, logits_to_keep=1)


def sweep(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def one_step(model: Any, cache: Any) -> None:
    with torch.no_grad():
        model(torch.full((1, 1), 7, device=model.device), past_key_values=cache)


def steps(model: Any, given: argparse.Namespace, order: Any) -> list[Record]:
    """Milliseconds of a step on rungs that equal presets, and of these."""
    every, found = states(model, order, 2), []
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 900, (1, given.context), generator=generator).to(model.device)
    for name, rungs in (("best-4.3", every[1]), ("best-2.5", every[-1])):
        caches = {name: MixedKVCache(model, name), f"as {name}": stepped(model, rungs, order)}
        if given.forget:
            caches[f"as {name}, evict"] = stepped(model, rungs, order, 1.0)
        times: dict[str, list[float]] = {key: [] for key in caches}
        for cache in caches.values():
            feed(model, cache, ids)
            for _ in range(8):
                one_step(model, cache)
        for _ in range(given.repeats):
            for key, cache in caches.items():
                start = clock(model.device)
                for _ in range(given.steps):
                    one_step(model, cache)
                times[key].append(1e3 * (clock(model.device) - start) / given.steps)
        medians = {key: sorted(own)[len(own) // 2] for key, own in times.items()}
        found.append({"preset": name, "milliseconds": medians, "ratio": medians[f"as {name}"] / medians[name]})
        del caches
        sweep(model.device)
    return found


PARTS = {
    "plan": (Budget, "choose"),
    "move": (Budget, "_go"),
    "compile": (Budget, "_compile"),
    "requantize": (Budget, "_move"),
    "python": (StepGraphs, "_first"),
    "capture": (StepGraphs, "_capture"),
}
"""Parts of a change, and the methods that do them: moves contain what is compiled and requantized; `_first` is a step
in Python, which comes before a capture only where kernels are not known to be loaded."""

WHOLE = ("plan", "move", "python", "capture")
"""Parts that are no part of another."""


@contextlib.contextmanager
def parts_timed(device: torch.device) -> Iterator[dict[str, float]]:
    """Within, seconds of each part of changes add up; the device is waited for around each."""
    seconds, before = dict.fromkeys(PARTS, 0.0), {name: getattr(*at) for name, at in PARTS.items()}

    def timed(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock(device)
            try:
                return before[name](*args, **kwargs)
            finally:
                seconds[name] += clock(device) - start

        return run

    try:
        for name, (kind, method) in PARTS.items():
            setattr(kind, method, timed(name))
        yield seconds
    finally:
        for name, (kind, method) in PARTS.items():
            setattr(kind, method, before[name])


def fill(model: Any, given: argparse.Namespace, order: Any) -> Record:
    """A cache that goes down the whole ladder, a token at a time."""
    device, layers = model.device, model.config.get_text_config(decoder=True).num_hidden_layers
    shape, gpu = shape_of(model, 1), model.device.type == "cuda"
    lowest = states(model, order, 2)[-1]
    probe = MixedKVCache(model, memory=MUCH, order=order).budget
    assert probe is not None
    prompt, tokens = given.context // 8, given.fill
    room = prompt + (tokens // 2 if given.forget else tokens) + 128
    limit = int(1.04 * probe.peak(lowest, shape._replace(captured=True), room, prompt))
    ids = torch.full((1, prompt), 5, device=device)

    def blocks() -> int:
        return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if gpu else 0

    def run(memory: int, count: int) -> Record:
        sweep(device)
        before = torch.cuda.memory_allocated(device) if gpu else 0

        def peak() -> int:
            found = torch.cuda.max_memory_allocated(device) - before if gpu else 0
            if gpu:
                torch.cuda.reset_peak_memory_stats(device)
            return found

        cache = MixedKVCache(model, memory=memory, order=order, evict="snapkv" if given.forget else None)
        budget: Any = cache.budget
        changes: list[Record] = []
        feed(model, cache, ids)
        peaks, held = {"prompt": peak()}, {"prompt": cache.memory().total}
        if memory == MUCH:
            # Layers move now, not in steps, so that what these take beside is the forward's alone.
            budget.reserve(cache, 1)
            peak()
        for _ in range(3):
            one_step(model, cache)
        most, start = 0, clock(device)
        with parts_timed(device) as parts:
            for step in range(count):
                rungs, preset, gone, first, asked = budget.rungs, cache.preset, cache.evicted, parts.copy(), blocks()
                one_step(model, cache)
                if cache.preset is not preset or cache.evicted != gone:
                    # The next one is captured, where this one could not be.
                    one_step(model, cache)
                    pairs = zip(itertools.chain(*rungs), itertools.chain(*budget.rungs), strict=True)
                    sides = sum(old != new for old, new in pairs)
                    changes.append({name: parts[name] - first[name] for name in parts})
                    changes[-1] |= {"step": step, "sides": sides, "blocks": blocks() - asked}
                    print(json.dumps(changes[-1]), flush=True)
                if changes and step % 64 == 0:
                    most = max(most, cache.memory().total)
        seconds = clock(device) - start
        peaks["steps"], held["steps"] = peak(), max(most, cache.memory().total)
        return {
            "tokens": int(cache.get_seq_length()), "peaks": peaks, "held": held, "seconds": seconds, "changes": changes,
            "share": sum(each[name] for each in changes for name in WHOLE) / seconds,
            "bits": cache.memory().total_bits, "rungs": [list(own) for own in budget.rungs], "forgotten": cache.evicted,
        }  # fmt: skip

    ample = run(MUCH, 100)
    beside = {phase: ample["peaks"][phase] - ample["held"][phase] for phase in ample["peaks"]}
    cold, tight = run(limit, tokens), run(limit, tokens)
    stock = 2 * 2 * shape.heads * shape.key_dim * layers * tight["tokens"]
    above = {phase: max(each["peaks"][phase] for each in (cold, tight)) - beside[phase] for phase in beside}
    return {
        "limit": limit, "bf16": stock, "beside": beside, "above": above, "within": max(above.values()) <= limit,
        "held_within": max(tight["held"].values()) <= limit, **tight,
        "cold": {"share": cold["share"], "changes": cold["changes"]},
    }  # fmt: skip


def long(given: argparse.Namespace) -> Record:
    """A long prompt of a published shape, with random weights, in pieces, on a device of limited memory."""
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(parse_size(given.device_memory) / total)
    model = build(get_config(given.shape), device, torch.bfloat16)
    ids = torch.randint(3, 900, (1, given.long), generator=torch.Generator().manual_seed(0)).to(device)
    found: Record = {"shape": given.shape, "device_memory": given.device_memory, "memory": given.memory}
    makers: dict[str, Callable[[], Any]] = {
        "budget": lambda: MixedKVCache(model, memory=given.memory),
        "DynamicCache": lambda: DynamicCache(config=model.config),
    }
    for name, make in makers.items():
        sweep(device)
        cache, start = make(), clock(device)
        row: Record = {}
        try:
            feed(model, cache, ids, 2048)
            for _ in range(16):
                one_step(model, cache)
            row["seconds"] = clock(device) - start
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).split(".")[0]
        row |= {"tokens": int(cache.get_seq_length()), "peak": torch.cuda.max_memory_allocated(device)}
        if isinstance(cache, MixedKVCache):
            row |= {"held": cache.memory().total, "bits": cache.memory().total_bits}
        found[name] = row
        del cache
    return found


def tune_order(objective: Objective, layers: int, dim: int) -> list[tuple[int, Side]]:
    """Sides of layers in the order in which a cache with a budget takes them down: least loss for each saved bit first.

    The middle of the ladder is measured, then it with one side of one layer a rung up or down.

    Args:
        objective: measures presets, e.g. `hfkvq.tuning.objectives.TextKLD`; 2 to 4 times a layer.
        layers: of the model.
        dim: of a head.
    """
    budget = Budget(1, layers, dim)
    middle = budget.scheme(0, (1, 1))
    start, own = objective(Preset(middle)), Preset(middle).by_layer(layers)
    # Layers in which a preset differs have rungs of their own; the middle rung is alike in all.
    last = {(layer, side): rung for layer, side, rung in budget.moves}
    near = max(range(layers), key=lambda layer: sum(last.get((layer, side), 0) for side in SIDES))
    prices: dict[tuple[int, Side, int], float] = {}
    for layer, side, rung in budget.moves:
        # A step to the middle rung is measured from above.
        other = 0 if rung == 1 else rung
        scheme = budget.scheme(near, (other, 1) if side == "keys" else (1, other))
        score = objective(Preset.of_layers(middle, [*own[:layer], scheme, *own[layer + 1 :]]))
        loss = gain_of(objective, score, start) * (1 if rung == 1 else -1)
        saved = budget.bits(layer, side, rung - 1) - budget.bits(layer, side, rung)
        # A side comes to a rung by the one above.
        prices[layer, side, rung] = max(loss / saved, prices.get((layer, side, rung - 1), 0.0))
    # Equal prices go by depth, as the moves do: sorting keeps their order.
    return [(layer, side) for layer, side, _ in sorted(budget.moves, key=lambda move: (prices[move], move[2]))]


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="reference, smollm2, FILE.gguf, a folder, or a name on the Hub")
    parser.add_argument("--data", type=Path, help="folder whose folder `texts` has the texts; the bundled ones without")
    parser.add_argument("--parts", nargs="+", help="ladder steps fill, all by default; of a shape long, or fill")
    parser.add_argument("--order", help="file of an order, or measure; by depth without")
    parser.add_argument("--points", type=int, default=12, help="states of the ladder")
    parser.add_argument("--forget", nargs="+", type=float, default=[], help="shares of tokens that stay, e.g. 0.75 0.5")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--order-windows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=3584)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=8192, help="tokens behind which steps are timed")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fill", type=int, default=6000, help="steps of the part fill")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", help="a shape of evals/shapes.py, with random weights")
    parser.add_argument("--long", type=int, default=131072, help="tokens of the part long")
    parser.add_argument("--memory", default="4GiB", help="budget of the part long")
    parser.add_argument("--device-memory", default="24GiB", help="of the part long")
    given = parser.parse_args()
    parts = given.parts or (["long"] if given.shape else ["ladder", "steps", "fill"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: Record = {
        "kind": "hfkvq budget", "date": now(), "commit": commit(), "device": device_name(device),
        "versions": versions("torch", "triton", "transformers"), "settings": vars(given).copy(),
    }  # fmt: skip
    paths = {name: getattr(given, name) for name in ("model", "json", "data")}
    record["settings"] |= {name: path and Path(path).name for name, path in paths.items()}

    def keep(part: str, found: Any) -> None:
        record[part] = found
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(part, json.dumps(found)[:2000], flush=True)

    order: Any = given.order
    if given.shape:
        if "long" in parts:
            keep("long", long(given))
        if "fill" in parts:
            keep("fill", fill(build(get_config(given.shape), device, torch.bfloat16), given, order))
        return
    source = find_model(given.model)
    model, tokenizer = load_model(source, device), load_tokenizer(source)
    record["model"] = source.name
    files = sorted((given.data / "texts").glob("*.*")) if given.data else None
    texts = find_texts(files or None, None, "", "text", source.reference, 0)
    apart = given.order_windows if order == "measure" else 0
    windows = cut(texts, tokenizer, given.prompt + given.scored, given.windows + apart)
    # Every few windows one is the order's, so that it is of all texts.
    own = torch.arange(apart) * len(windows.tokens) // max(apart, 1)
    rest = [n for n in range(len(windows.tokens)) if n not in own]
    if order == "measure":
        objective = TextKLD(model, windows.tokens[own], prefill=given.prompt, chunk=16, batch_size=given.batch_size)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        pairs = tune_order(objective, layers, shape_of(model, 1).key_dim)
        origin = {key: record[key] for key in ("date", "commit", "device", "model")}
        held = {"kind": ORDER_KIND, "order": pairs, "origin": origin}
        order = str(given.json.with_suffix(".order.json"))
        Path(order).write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        keep("order", pairs)
    if "ladder" in parts:
        rows = ladder(model, windows.tokens[rest], [windows.names[n] for n in rest], given, order)
        keep("ladder", rows)
        if order:
            keep("order_gain", order_gain(rows))
    if "steps" in parts:
        keep("steps", steps(model, given, order))
    if "fill" in parts:
        keep("fill", fill(model, given, order))


if __name__ == "__main__":
    main()
