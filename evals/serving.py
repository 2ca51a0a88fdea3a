"""Many users at once: Transformers' continuous batching, its own blocks beside compressed ones of as many bytes.

    PYTHONPATH=. python evals/serving.py [--shape qwen3-8b] [--layers N] [--blocks 256] [--batch-tokens 8192]
        [--schemes none,saw-int4,kitty-pro,best-2.5] [--rows long:all,chat:all,chat:8,chat:1,ask:8,ask:1]
        [--seconds 8] [--budget 600] [--json FILE]

A model of a real architecture with random weights, and users who ask again when they are answered. A row is a kind of
request and how many users there are; "all" is more than any cache holds. Kinds:

    long  prompts of 7,500 tokens, answers of 512
    chat  prompts of 500 to 2,000 tokens, answers of 1,000 to 2,000
    ask   prompts of 500 to 2,000 tokens, answers of 32: for the time to the first token

Users are met in the middle: the first request of each has a random part of its answer behind it, as a prompt. So work
is from the beginning what it is after hours. Counting begins when all users are served or no more can be, and goes on
for --seconds. Written are, for every scheme ("none" is the engine as it is, "memory" a budget that steps down): new
tokens per second, the time between two tokens of a request, the time to the first token of those that asked then, the
most requests at a time and the bits per element that they held at the end, and the attention: the engine takes
FlashAttention where there is one. All caches have as many bytes; those of schemes that keep tokens in 16 bits include
windows for as many requests of the kind's mean length as there is room for. A row is written to --json when it is done,
and none begins after --budget seconds.

`evals/docs.py --write` draws results/serving.svg and writes the tables of docs/serving.md.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from evals.shapes import build, get_config
from hfkvq import serving
from hfkvq.measure.records import commit, device_name, now, versions
from hfkvq.measure.tables import markdown_table
from hfkvq.serving.engine import windowed

RESULTS = Path(__file__).parent / "results"
ALL = 160
"""Users, where there shall be more than any cache holds."""
SETTLED = 4.0
"""Seconds without one request more at a time, after which no more are expected: more than a budget's first step down
takes, whose kernels are compiled."""


@dataclass(frozen=True)
class Kind:
    """Requests of a kind: the least and most tokens of prompts and answers, and whose engine they share."""

    prompt: tuple[int, int]
    new: tuple[int, int]
    engine: str

    @property
    def mean(self) -> int:
        """Tokens that a request holds, on average over its time."""
        return (sum(self.prompt) + sum(self.new) // 2) // 2

    @property
    def most(self) -> int:
        """The most tokens of a request."""
        return self.prompt[1] + self.new[1]

    def draw(self, rng: random.Random, middle: bool) -> tuple[int, int]:
        """Tokens of a prompt and of its answer; or, in the middle of the answer, what is there and what will come."""
        prompt, new = rng.randint(*self.prompt), rng.randint(*self.new)
        done = int(new * rng.random()) if middle else 0
        return prompt + done, new - done


KINDS = {
    "long": Kind((7500, 7500), (512, 512), "long"),
    "chat": Kind((500, 2000), (1000, 2000), "chat"),
    "ask": Kind((500, 2000), (32, 32), "chat"),
}


_NUMBERS = itertools.count()


class Users:
    """Users of an engine who ask again when they are answered.

    Attributes:
        asked: when each request was, by its number.
        middle: requests that began in the middle.
        seen: the engine's states of requests, by their address: one that is taken back gets a new one.
    """

    def __init__(self, manager: Any, kind: Kind, vocabulary: int, seed: int) -> None:
        self.manager, self.kind, self.vocabulary, self.rng = manager, kind, vocabulary, random.Random(seed)
        self.asked: dict[str, float] = {}
        self.middle: set[str] = set()
        self.seen: dict[int, Any] = {}
        self._open: set[str] = set()

    def ask(self, middle: bool = False) -> None:
        """Another request."""
        prompt, new = self.kind.draw(self.rng, middle)
        # New every time: one taken back when it has ended would take the next of its name back.
        name = str(next(_NUMBERS))
        ids = self.rng.choices(range(10, self.vocabulary), k=prompt)
        self.asked[name] = time.perf_counter()
        self._open.add(name)
        if middle:
            self.middle.add(name)
        self.manager.add_request(ids, request_id=name, max_new_tokens=new, record_timestamps=True)

    def look(self) -> int:
        """Asks for whoever was answered; how many requests the engine works on."""
        result = self.manager.get_result(timeout=0.02)
        if result is None and not self.manager.is_running():
            raise RuntimeError("the engine has stopped")
        while result is not None:
            if result.error:
                raise RuntimeError(result.error)
            self._open.discard(result.request_id)
            self.ask()
            result = self.manager.get_result(timeout=0.001)
        active = list(self._scheduler.active_requests.values())
        self.seen |= {id(state): state for state in active}
        return len(active)

    def leave(self) -> None:
        """Takes all requests back."""
        for name in self._open:
            self.manager.cancel_request(name)
        while self._scheduler.has_pending_requests():
            time.sleep(0.01)
        while self.manager.get_result(timeout=0.05) is not None:
            pass

    @property
    def _scheduler(self) -> Any:
        return self.manager.batch_processor.scheduler


def run(
    manager: Any,
    kind: Kind,
    vocabulary: int,
    count: int,
    seconds: float,
    limit: float,
    bits: Callable[[], float],
    seed: int = 0,
) -> dict[str, Any]:
    """Users at work for so many seconds behind the beginning, both within ``limit`` seconds."""
    users, most = Users(manager, kind, vocabulary, seed), 0
    start = risen = time.perf_counter()
    begin = None
    for _ in range(count):
        users.ask(middle=True)
    while True:
        held, at = users.look(), time.perf_counter()
        if held > most:
            most, risen = held, at
        if begin is None and most and (most == count or at - risen > SETTLED):
            begin = at
        if at - start > limit or (begin is not None and at - begin > seconds):
            break
    end, begin, found_bits = at, begin or risen, bits()
    users.leave()
    stamps = {state.request_id: sorted(state.timestamps or []) for state in users.seen.values()}
    every = [stamp for state in users.seen.values() for stamp in state.timestamps or []]
    within = [stamp for stamp in every if begin < stamp <= end]
    gaps = sorted(
        (later - earlier) * 1000
        for state in users.seen.values()
        for earlier, later in itertools.pairwise(state.timestamps or [])
        if begin < later <= end
    )
    first = sorted(
        own[0] - users.asked[name] for name, own in stamps.items() if own and own[0] <= end and name not in users.middle
    )
    return {
        "users": count,
        "seconds": end - begin,
        "seconds_before": begin - start,
        "tokens_per_s": len(within) / (end - begin),
        "new_tokens": len(within),
        "between_tokens_ms": spread(gaps),
        "first_token_s": spread(first),
        "first_tokens": len(first),
        "most_at_a_time": most,
        "bits": found_bits,
        "taken_back": sum(bool(state._true_initial_tokens) for state in users.seen.values()),
    }


def spread(found: list[float]) -> dict[str, float] | None:
    """The median and nine tenths of what is sorted."""
    return {"p50": statistics.median(found), "p90": found[int(len(found) * 0.9)]} if found else None


@contextlib.contextmanager
def engine(model: Any, scheme: str, kinds: list[Kind], users: int, args: argparse.Namespace) -> Iterator[Any]:
    """An engine that runs and has its graphs: its manager, and what says the bits per element."""
    settings = ContinuousBatchingConfig(
        num_blocks=args.blocks, max_batch_tokens=args.batch_tokens, allow_block_sharing=False
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=32)
    stock, typical = scheme == "none", max(kind.mean for kind in kinds)
    if stock:
        settings.max_requests_per_batch = users
        settings.max_blocks_per_request = -(-max(kind.most for kind in kinds) // settings.page_size) + 1
    if scheme == "memory":
        text = model.config.get_text_config()
        token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * model.dtype.itemsize
        settings.num_blocks = None
        own: Any = serving.enable(model, memory=args.blocks * settings.page_size * token, request_tokens=typical)
    else:
        own = contextlib.nullcontext() if stock else serving.enable(model, scheme, request_tokens=typical)
    with own as handle:
        if handle is not None and not windowed(model.config, handle.rungs[0]):
            settings.max_requests_per_batch = users
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings
        ) as manager:
            yield manager, (lambda: 16.0) if handle is None else (lambda: handle.usage().bits)


def measure(args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Rows of all schemes."""
    device, start = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.perf_counter()
    config = get_config(args.shape, args.layers)
    faulthandler.dump_traceback_later(args.tell, repeat=True)
    model = build(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32, seed=0)
    model.generation_config.eos_token_id = None
    found: dict[str, Any] = {
        "kind": "evals/serving",
        "date": now(),
        "device": device_name(device),
        "versions": versions("torch", "transformers", "triton"),
        "commit": args.commit or commit(),
        "layers": config.get_text_config().num_hidden_layers,
        "settings": {key: value for key, value in vars(args).items() if key not in ("json", "commit", "show")},
        "rows": [],
    }
    asked = [row.split(":") for row in args.rows.split(",")]
    for _, own in itertools.groupby(asked, lambda row: KINDS[row[0]].engine):
        rows = [(name, ALL if load == "all" else int(load), load) for name, load in own]
        for scheme in args.schemes.split(","):
            if time.perf_counter() - start > args.budget:
                return found
            kinds, made = [KINDS[name] for name, *_ in rows], time.perf_counter()
            with engine(model, scheme, kinds, max(row[1] for row in rows), args) as (manager, bits):
                attention, ready = model.config._attn_implementation, time.perf_counter() - made
                # Kernels are compiled or loaded, at sizes of prompts.
                vocabulary = config.get_text_config().vocab_size
                run(manager, kinds[0], vocabulary, min(4, rows[0][1]), 0.5, args.limit, bits, seed=1)
                for name, users, load in rows:
                    left = args.budget - (time.perf_counter() - start)
                    if left <= 0:
                        return found
                    seconds = args.seconds if load == "all" else args.seconds / 2
                    row = run(manager, KINDS[name], vocabulary, users, seconds, min(args.limit, left), bits)
                    about = {"scheme": scheme, "requests": name, "load": load, "attention": attention}
                    found["rows"].append({**about, "ready_s": ready, **row})
                    write(found)
                    print(json.dumps(found["rows"][-1]), flush=True)
    return found


# Rows that are shown.


def table(rows: dict[tuple[str, str, str], dict[str, Any]]) -> str:
    """Rows in Markdown, each with its share of the engine's own."""
    lines = []
    for (kind, load, scheme), row in rows.items():
        between, first, stock = row["between_tokens_ms"], row["first_token_s"], rows.get((kind, load, "none"))
        held, speed, times = row["most_at_a_time"], row["tokens_per_s"], ["", ""]
        if stock and scheme != "none":
            times = [f" ({row[key] / stock[key]:.2f} times)" for key in ("most_at_a_time", "tokens_per_s")]
        lines.append(
            (
                kind,
                "more than fit" if load == "all" else load,
                "the engine's own" if scheme == "none" else f"`{scheme}`",
                f"{held}{times[0] if load == 'all' else ''}",
                f"{speed:,.0f}{times[1]}",
                f"{between['p50']:.1f}, {between['p90']:.1f} ms" if between else "",
                f"{1000 * first['p50']:,.0f} ms" if first and load != "all" else "",
                f"{row['bits']:.2f}",
            )
        )
    head = ("requests", "users", "blocks", "at a time", "tokens/s", "between tokens, 50, 90 %", "first token", "bits")
    return markdown_table(head, lines)


def picture(rows: dict[tuple[str, str, str], dict[str, Any]], path: Path) -> None:
    """Tokens per second by users, and requests at a time in the same bytes."""
    from evals.charts import BLUE, GREEN, GREY, ORANGE, PINK, RED, new_figure, save_figure

    schemes = list(dict.fromkeys(scheme for *_, scheme in rows))
    ours: tuple[str, ...] = (BLUE, RED, GREEN, ORANGE, PINK)
    colors = {"none": GREY} | dict(zip([name for name in schemes if name != "none"], ours, strict=False))
    label = {name: "the engine's own" if name == "none" else name for name in schemes}
    counts = sorted({row["users"] for row in rows.values() if row["requests"] == "chat"})
    # A line needs more than its ends.
    counts = counts if len(counts) > 3 else []
    figure, grid = new_figure(11.6 if counts else 8.0, 3.6, 3 if counts else 2)
    *lines, speeds, held = grid[0]
    for axes in lines:
        for name in schemes:
            own = sorted(
                (row["users"], row["tokens_per_s"])
                for (kind, _, scheme), row in rows.items()
                if kind == "chat" and scheme == name
            )
            if own:
                axes.plot(*zip(*own, strict=True), "o-", color=colors[name], markersize=4)
        axes.set(xscale="log", xlabel="users", ylabel="new tokens per second", ylim=0)
        axes.set_xticks(counts, [f"{count}" for count in counts])
        axes.minorticks_off()
        axes.set_title("chat", fontsize=9)
    kinds = [kind for kind in ("long", "chat") if any(row[0] == kind and row[1] == "all" for row in rows)]
    bars = (speeds, "tokens_per_s", "new tokens per second"), (held, "most_at_a_time", "requests in the same bytes")
    for axes, key, title in bars:
        for i, name in enumerate(schemes):
            for j, kind in enumerate(kinds):
                row = rows.get((kind, "all", name))
                if row:
                    at = j + (i - (len(schemes) - 1) / 2) * 0.8 / len(schemes)
                    axes.bar(at, row[key], 0.72 / len(schemes), color=colors[name], label=label[name])
                    axes.text(at, row[key], f"{row[key]:,.0f}", ha="center", va="bottom", fontsize=7)
        axes.set_xticks(range(len(kinds)), ["8k tokens" if kind == "long" else "chat" for kind in kinds])
        axes.set_title(f"{title}, more users than fit", fontsize=9)
    for axes in grid[0]:
        axes.grid(alpha=0.25, axis="y")
        axes.set_axisbelow(True)
    handles, labels = held.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    # Within the axes, the legend would lie on bars.
    held.legend(
        list(once.values()), list(once), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False
    )
    save_figure(figure, path)


def rows(files: Sequence[Path]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows of what was measured, by requests, load and scheme."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            found[row["requests"], row["load"], row["scheme"]] = row
    order = list(KINDS), list(dict.fromkeys(scheme for *_, scheme in found))

    def place(key: tuple[str, str, str]) -> tuple[int, int, int]:
        kind, load, scheme = key
        return order[0].index(kind), -(ALL if load == "all" else int(load)), order[1].index(scheme)

    return {key: found[key] for key in sorted(found, key=place)}


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--blocks", type=int, default=256, help="the engine's own blocks of 256 tokens in 16 bits")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--schemes", default="none,saw-int4,kitty-pro,best-2.5")
    parser.add_argument("--rows", default="long:all,chat:all,chat:8,chat:1,ask:8,ask:1")
    parser.add_argument("--seconds", type=float, default=8, help='counted in a row of "all"; half of it in others')
    parser.add_argument("--limit", type=float, default=60, help="seconds of a row with its beginning")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which nothing begins")
    parser.add_argument("--tell", type=int, default=600, help="seconds after which all stacks are printed")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def write(found: dict[str, Any]) -> None:
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    write(measure(args, write))


if __name__ == "__main__":
    main()
