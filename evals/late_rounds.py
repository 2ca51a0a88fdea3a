"""Late rounds of agents' conversations: time to first token and tokens/s once their caches no longer fit together.

    PYTHONPATH=. python evals/late_rounds.py [--json FILE]
    PYTHONPATH=. python evals/late_rounds.py --shape qwen3-8b --budget 6GiB --agents 8 --first 8k --turn 1k --chunk 2k

The first line plays the reference model, on a CPU in about a minute; the second one random weights, on a GPU, where the
way ``memory`` has not been run yet. A budget of 3GiB has no room for the agents' compressed caches either.
Agents take turns, one at a time, round by round. A turn brings new tokens behind the agent's history, and an answer is
generated. Between turns the caches of all agents may take ``--budget`` bytes; beyond it the ones used longest ago go.
Ways to live with that (``--ways``):

- ``dynamic``, or a preset: an agent whose cache is gone has its whole history computed again. ``full`` has 16 bits as
  `DynamicCache` has, and captured steps as presets have, so what lies between these two is not the bits' doing.
- a preset with ``+store``: every turn is put into a `PrefixStore` on disk, where a cache that is gone is found again.
- ``memory``: each agent's cache is given its share of the budget (``memory=``), so none goes, and all narrow in time.

``first_s`` is a turn's time until its first token: the search for a cache, what is computed again, and the new tokens.
``tokens_per_s`` is of whole rounds, with what is stored behind a turn. A way stops after its share of ``--seconds``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from evals.generate import random_ids
from evals.shapes import build, get_config
from hfkvq import MixedKVCache, PrefixStore
from hfkvq.measure.models import find_model, load_model
from hfkvq.measure.records import clock, commit, device_name, now, versions
from hfkvq.sizes import parse_count, parse_size

DYNAMIC, MEMORY, STORE = "dynamic", "memory", "+store"


class Caches:
    """Caches of agents within a budget, by one of the ways.

    Attributes:
        kept: by agent, the one used longest ago first.
        dropped: how often a cache had to go.
    """

    def __init__(self, model: Any, way: str, budget: int, agents: int, folder: Path) -> None:
        self.model, self.way, self.budget, self.share = model, way, budget, budget // agents
        self.preset = way.removesuffix(STORE)
        self.store = PrefixStore(folder, model, self.preset) if way.endswith(STORE) else None
        self.kept: OrderedDict[int, Any] = OrderedDict()
        self.dropped = 0

    def take(self, agent: int, history: Tensor) -> Any:
        """A cache that holds a beginning of the history, at best all that the model was shown of it."""
        cache = self.kept.pop(agent, None)
        if cache is not None:
            return cache
        if self.store is not None:
            return self.store.match(history).cache
        if self.way == DYNAMIC:
            return DynamicCache(config=self.model.config)
        return MixedKVCache(self.model, memory=self.share) if self.way == MEMORY else MixedKVCache(self.model, self.way)

    def give(self, agent: int, cache: Any, history: Tensor) -> None:
        """Keeps a cache behind its turn, and lets others go until all fit."""
        if self.store is not None:
            self.store.put(cache, history)
        self.kept[agent] = cache
        while self.kept and sum(map(held_bytes, self.kept.values())) > self.budget:
            self.kept.popitem(last=False)
            self.dropped += 1


def held_bytes(cache: Any) -> int:
    """Bytes of a cache."""
    if isinstance(cache, MixedKVCache):
        return cache.memory().total
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.no_grad()
def answer(model: Any, cache: Any, history: Tensor, new: int, chunk: int) -> tuple[Tensor, int, float]:
    """Greedy tokens (1, new) behind a history (1, T), how many tokens were computed for the first, and when it came."""
    known = cache.get_seq_length()
    for start in range(known, history.shape[1], chunk):
        logits = model(history[:, start : start + chunk], past_key_values=cache, logits_to_keep=1).logits
    found = [logits[:, -1:].argmax(-1)]
    first = clock(model.device)
    for _ in range(new - 1):
        found.append(model(found[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    return torch.cat(found, dim=1), history.shape[1] - known, first


def play(model: Any, way: str, args: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any]:
    """All rounds of a way; fewer where the seconds are over."""
    caches = Caches(model, way, args.budget, args.agents, folder)
    tokens = args.first + args.rounds * args.turn
    text, device = random_ids(model, args.agents, tokens), model.device
    histories = [text[agent : agent + 1, : args.first] for agent in range(args.agents)]
    # A short turn compiles kernels and captures a step.
    spare = Caches(model, way.removesuffix(STORE), args.budget, args.agents, folder)
    answer(model, spare.take(0, text), text[:1, : args.turn], 4, args.chunk)
    begin, rounds = clock(device), []
    for at in range(args.rounds):
        start, firsts, computed, gone = clock(device), [], 0, caches.dropped
        for agent in range(args.agents):
            coming = text[agent : agent + 1, args.first + at * args.turn :][:, : args.turn]
            histories[agent] = torch.cat([histories[agent], coming], dim=1)
            came = clock(device)
            cache = caches.take(agent, histories[agent])
            found, count, first = answer(model, cache, histories[agent], args.new, args.chunk)
            histories[agent] = torch.cat([histories[agent], found], dim=1)
            caches.give(agent, cache, histories[agent])
            firsts.append(first - came)
            computed += count
            del cache
        row = {"first_s": {"p50": statistics.median(firsts), "most": max(firsts)}, "computed": computed}
        row |= {"tokens_per_s": args.agents * args.new / (clock(device) - start), "dropped": caches.dropped - gone}
        row |= {"kept": len(caches.kept), "bytes": sum(map(held_bytes, caches.kept.values()))}
        rounds.append(row)
        print(f"{way}, round {at + 1}: {row}", flush=True)
        if clock(device) - begin > seconds:
            break
    return {"way": way, "rounds": rounds, "tokens": histories[0].shape[1], "whole": len(rounds) == args.rounds}


def main() -> None:
    """Plays all ways, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="a published shape with random weights, see evals/shapes.py")
    parser.add_argument("--layers", type=int, help="of the shape, fewer than published")
    parser.add_argument("--model", default="reference", help="in place of a shape: a name of docs/real_model.md")
    parser.add_argument("--ways", default="dynamic,full,best-3.4,best-3.4+store,memory")
    parser.add_argument("--budget", type=lambda text: parse_size(text, "budget"), default="48MiB")
    sizes = (("agents", 4), ("rounds", 4), ("first", 512), ("turn", 128), ("new", 8), ("chunk", 256))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=lambda text, name=name: parse_count(text, name), default=default)
    parser.add_argument("--seconds", type=float, default=110, help="for all ways, building and compiling aside")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.shape:
        model = build(get_config(args.shape, args.layers), device, torch.bfloat16)
    else:
        model = load_model(find_model(args.model), device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ways, rows = args.ways.split(","), []
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(play(model, way, args, Path(folder), args.seconds / len(ways)))
            except (ValueError, torch.OutOfMemoryError) as error:
                # The budget is too small for this way, or the device is.
                rows.append({"way": way, "error": str(error)})
                print(f"{way}: {error}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    record = {
        "kind": "late rounds", "gpu": device_name(device), "date": now(), "commit": commit(),
        "versions": versions("torch", "triton", "transformers"), "settings": settings, "rows": rows,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
