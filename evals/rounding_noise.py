"""Divergence that rounding alone makes in decode steps: some outputs of norms move by one unit in the last place.

    PYTHONPATH=. python evals/rounding_noise.py MODEL TEXT_FILE [--presets dynamic,saw-int4] [--steps 300] [--json FILE]

A model reads the same tokens one by one, after a prompt, as it is and with a share of its RMS norms' outputs larger by
one unit (bf16). A kernel that keeps a formula, but not the order of its sums, cannot be held to less than this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import DynamicCache

from hfkvq import MixedKVCache
from hfkvq.measure.models import find_model, load_model, load_tokenizer
from hfkvq.measure.records import commit, device_name, now, versions

PROMPT = 512
SHARES = (0.001, 0.02)


def log_probabilities(model: Any, preset: str, ids: Tensor, share: float) -> Tensor:
    """Log-probabilities f64 (steps, V) after each token of ``ids`` (1, L) behind the prompt."""
    generator = torch.Generator(ids.device).manual_seed(0)

    def move(module: Any, given: Any, out: Tensor) -> Tensor | None:
        if not share or out.shape[1] > 1:
            return None
        hit = torch.rand(out.shape, generator=generator, device=out.device) < share
        return (out.view(torch.int16) + hit).view(torch.bfloat16)

    hooks = [m.register_forward_hook(move) for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    cache = DynamicCache(config=model.config) if preset == "dynamic" else MixedKVCache(model, preset, graphs=False)
    with torch.inference_mode():
        model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
        found = [model(x, past_key_values=cache).logits[0, -1] for x in ids[:, PROMPT:].split(1, dim=1)]
    for hook in hooks:
        hook.remove()
    return torch.stack(found).double().log_softmax(-1)


def main(
    model: str,
    text: Path,
    presets: Annotated[str, typer.Option(help="dynamic is DynamicCache")] = "dynamic,saw-int4,best-3.4",
    steps: int = 300,
    path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Prints a line for each preset and share, and writes them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = find_model(model)
    subject, tokenizer = load_model(source, device, torch.bfloat16), load_tokenizer(source)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : PROMPT + steps].to(device)
    rows = []
    for preset in presets.split(","):
        exact = log_probabilities(subject, preset, ids, 0.0)
        for share in SHARES:
            moved = log_probabilities(subject, preset, ids, share)
            kld = (exact.exp() * (exact - moved)).sum(-1)
            same = (exact.argmax(-1) == moved.argmax(-1)).double().mean()
            rows.append(
                {"preset": preset, "share": share, "steps": len(kld), "kld": float(kld.mean()), "top1": float(same)}
            )
            print(rows[-1])
    if path is not None:
        about = {
            "model": source.name,
            "text": text.name,
            "device": device_name(device),
            "commit": commit(),
            "date": now(),
        }
        record = about | {"versions": versions("torch", "triton", "transformers"), "rows": rows}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
