"""Divergence of TriAxialKV from `DynamicCache` on an agent's turns, by the tags that get 2 bits.

    PYTHONPATH=. python evals/agent_turns.py DATA_FOLDER MODEL [--conversations 12] [--tokens 4000] [--json FILE]

Reads ``agent_traces/tau_bench_gpt-4o-airline.json.gz`` (sierra-research/tau-bench 59a200c, MIT). A conversation is
written by the model's chat template, its system prompt cut to the first 800 characters so that turns take the room, and
cut; all but its newest 64 tokens are the prompt, and these are scored, 8 at a time. A row is a table of bits: none (4
bits for all), the default, 2 bits for one role alone, and for tools' results and the assistant together; the first also
with keys as the model makes them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from evals.agent_capacity import TRACES, messages_of, rest_table
from hfkvq import TriAxialCache, get_scheme
from hfkvq.caches.tags import SEMANTIC, TAGS
from hfkvq.measure.models import find_model, load_model, load_tokenizer
from hfkvq.measure.records import commit, device_name, now, versions

SCORED, CHUNK, SYSTEM = 64, 8, 800


def tables() -> dict[str, dict[str, int]]:
    """Bits by tag, for each row."""
    found = {
        "4 bits": {},
        "default": dict(get_scheme("triaxial").knobs()["table"]),
        "tools and assistant": rest_table(),
    }
    for role in sorted(SEMANTIC):
        found[role] = {tag: 2 for tag in TAGS if tag.endswith(f"|{role}")}
    return found


@torch.no_grad()
def scored(model: torch.nn.Module, cache: Cache, ids: Tensor) -> Tensor:
    """Log-probabilities of the newest tokens, f64 (SCORED, V)."""
    first, outs = ids.shape[1] - SCORED, []
    model(ids[:, :first], past_key_values=cache, logits_to_keep=1)
    for start in range(first, ids.shape[1], CHUNK):
        outs.append(model(ids[:, start : start + CHUNK], past_key_values=cache).logits[0].double().log_softmax(-1))
    return torch.cat(outs)


def main(
    data: Path,
    model: str,
    conversations: Annotated[int, typer.Option(min=1)] = 12,
    tokens: Annotated[int, typer.Option(min=2 * SCORED)] = 4000,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Command line."""
    source = find_model(model)
    cuda = torch.cuda.is_available()
    subject = load_model(source, "cuda" if cuda else "cpu", None if cuda else torch.float32)
    tokenizer = load_tokenizer(source)
    traces = json.loads(gzip.decompress((data / TRACES).read_bytes()))
    rows = {(name, smooth): [] for name in tables() for smooth in (True, False) if smooth or name == "4 bits"}
    for trace in traces[:conversations]:
        messages = [
            {**each, "content": each["content"][:SYSTEM]} if each["role"] == "system" else each
            for each in messages_of(trace)
        ]
        ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)[:tokens]])
        ids = ids.to(next(subject.parameters()).device)
        expected = scored(subject, DynamicCache(config=subject.config), ids)
        for (name, smooth), found in rows.items():
            cache = TriAxialCache(subject, tokenizer, table=tables()[name], smooth_keys=smooth)
            got = scored(subject, cache, ids)
            kld = (expected.exp() * (expected - got)).sum(-1).mean()
            same = (expected.argmax(-1) == got.argmax(-1)).double().mean()
            found.append((float(kld), float(same), cache.memory().code_bits))
            print(f"{name}, {'smoothed' if smooth else 'plain'}: {found[-1]}", flush=True)
    record = {
        "kind": "agent turns", "model": source.name, "origin": source.origin, "conversations": conversations,
        "tokens": tokens, "scored": SCORED, "chunk": CHUNK, "date": now(), "commit": commit(),
        "device": device_name(subject.device), "versions": versions("torch", "triton", "transformers"),
        "rows": [
            {"two_bits": name, "smoothed": smooth, **dict(zip(("kld", "top1", "code_bits"), means, strict=True))}
            for (name, smooth), found in rows.items()
            for means in [[sum(x) / len(x) for x in zip(*found, strict=True)]]
        ],
    }  # fmt: skip
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
