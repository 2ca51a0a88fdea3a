"""Agents' conversations that fit into the same memory: TriAxialKV, uniform INT4 and bf16 over tau-bench's turns.

    PYTHONPATH=. python evals/agent_capacity.py DATA_FOLDER TOKENIZER

Reads ``agent_traces/tau_bench_gpt-4o-airline.json.gz`` (sierra-research/tau-bench 59a200c, MIT) and a tokenizer with a
chat template, and writes results/agent-capacity.json. Each conversation goes through a cache turn by turn, as an
agent's does: what users and tools say comes as a prompt, what the assistant says as generated tokens. Bytes depend on
the tokens' number and tags alone, so keys and values are zeros, in one layer of the model's shape that counts for all.
A cache that grows has pages to spare, and they are counted.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer, LlamaConfig

from hfkvq import MixedKVCache, TriAxialCache
from hfkvq.caches.tags import PAD, TAGS, Tagger

RESULTS = Path(__file__).parent / "results"
TRACES = "agent_traces/tau_bench_gpt-4o-airline.json.gz"
BUDGET = 40 * 2**30
LAYERS, HEADS, DIM = 64, 8, 128
"""Shape of Qwen3-32B."""

SHAPE = LlamaConfig(num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=HEADS, head_dim=DIM)

LETTER = ("inst", "user", "tool_call", "delim")
"""Roles that keep 4 bits in the table "the rest": what has to be reproduced to the letter."""

Messages = list[dict[str, Any]]


def rest_table() -> dict[str, int]:
    """2 bits for all that tools and the assistant say: about the share that the paper's calibrated tables come to."""
    return {tag: 2 for tag in TAGS[:PAD] if tag.rpartition("|")[2] not in LETTER}


def messages_of(trace: dict[str, Any]) -> Messages:
    """A trace's messages, with the arguments of calls as chat templates want them."""
    found = []
    for message in trace["traj"]:
        calls = message.get("tool_calls") or []
        functions = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
        found.append(
            {
                "role": message["role"],
                "content": message.get("content") or "",
                **(
                    {"tool_calls": [{"type": "function", "function": function} for function in functions]}
                    if calls
                    else {}
                ),
            }
        )
    return found


def turns(tokenizer: Any, messages: Messages) -> Iterator[tuple[torch.Tensor, bool]]:
    """Token ids (1, t) of a conversation, piece by piece, and whether they are generated.

    Raises:
        ValueError: the template writes earlier messages anew as a conversation goes on.
    """
    text, count = "", 0
    for generated, part in groupby(messages, key=lambda message: message["role"] == "assistant"):
        for whole in [[each] for each in part] if generated else [list(part)]:
            count += len(whole)
            end = not generated and count < len(messages)
            longer = tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=end)
            if not longer.startswith(text):
                raise ValueError(
                    f"tokenizer: its template changes what it has written, at message {count}; take another."
                )
            ids = tokenizer(longer[len(text) :], add_special_tokens=False, return_tensors="pt").input_ids
            text = longer
            if ids.shape[1]:
                yield ids, generated


def replay(cache: MixedKVCache, pieces: list[tuple[torch.Tensor, bool]]) -> MixedKVCache:
    """Gives a cache a conversation."""
    for ids, generated in pieces:
        if isinstance(cache, TriAxialCache):
            if generated:
                cache.tokens.note_step(ids, cache.get_seq_length())
            else:
                cache.arrive(ids)
        keys = torch.zeros(1, HEADS, ids.shape[1], DIM, dtype=torch.bfloat16)
        cache.update(keys, keys, 0)
        cache.compressed_layers[0].settle()
    return cache


def makers(tagger: Tagger) -> dict[str, Callable[[], MixedKVCache]]:
    """A cache of each kind, by what a row calls it."""

    def triaxial(**knobs: Any) -> Callable[[], MixedKVCache]:
        return lambda: TriAxialCache(SHAPE, tagger=tagger, graphs=False, **knobs)

    return {
        "uniform INT4 (TriAxialKV's pages)": triaxial(table={}),
        "TriAxialKV, default table": triaxial(),
        "TriAxialKV, 2 bits for results and answers": triaxial(table=rest_table()),
    }


def measure(folder: Path, tokenizer: Any, samples: int) -> dict[str, Any]:
    """Bytes of conversations at their ends, and how many of them fit into the budget."""
    traces = json.loads(gzip.decompress((folder / TRACES).read_bytes()))[:samples]
    conversations = [list(turns(tokenizer, messages_of(trace))) for trace in traces]
    lengths = [sum(ids.shape[1] for ids, _ in pieces) for pieces in conversations]
    tagger = Tagger.from_tokenizer(tokenizer)
    bf16 = fmean(lengths) * 4 * HEADS * DIM * LAYERS
    rows = [{"name": "bf16", "total_bits": 16.0, "narrow": 0.0, "bytes": round(bf16), "fit": int(BUDGET / bf16)}]
    for name, make in makers(tagger).items():
        held, narrow = [], []
        for pieces in conversations:
            cache = replay(make(), pieces)
            store = cache.compressed_layers[0].held()
            narrow.append(int(store.counters[2]))
            held.append(LAYERS * cache.memory().total)
        size = fmean(held)
        rows.append(
            {
                "name": name,
                "total_bits": round(16 * size / bf16, 3),
                "narrow": round(sum(narrow) / sum(lengths), 4),
                "bytes": round(size),
                "fit": int(BUDGET / size),
            }
        )
    return {
        "what": "conversations of tau-bench (airline) that fit into 40 GiB of KV cache, held to their ends, Qwen3-32B",
        "tokenizer": Path(tokenizer.name_or_path).name,
        "conversations": len(lengths),
        "tokens": {"mean": round(fmean(lengths), 1), "longest": max(lengths)},
        "pieces": round(fmean(map(len, conversations)), 1),
        "budget_bytes": BUDGET,
        "layers": LAYERS,
        "rows": [row | {"times_bf16": round(bf16 / row["bytes"], 3)} for row in rows],
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Data, laid out as evals/tasks/README.md says.")],
    tokenizer: Annotated[str, typer.Argument(help="A tokenizer's folder or name; its template must know tools.")],
    samples: Annotated[int, typer.Option(min=1, help="Conversations.")] = 40,
    out: Annotated[Path, typer.Option(help="File of the results.")] = RESULTS / "agent-capacity.json",
) -> None:
    """Measures and writes the results."""
    found = measure(folder, AutoTokenizer.from_pretrained(tokenizer), samples)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found["rows"]:
        typer.echo(f"{row['name']}: {row['total_bits']:.2f} bits, {row['fit']} conversations, {row['times_bf16']:.2f}x")


if __name__ == "__main__":
    typer.run(main)
