"""Load the reference model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM


def reference_path() -> Path:
    """Return the folder with the weights of the reference model.

    Looks for `checkpoint` beside this file (an installed package), then for `evals/reference/checkpoint` (a checkout).
    """
    here = Path(__file__).resolve().parent
    candidates = (here / "checkpoint", here.parents[2] / "evals" / "reference" / "checkpoint")
    for candidate in candidates:
        if (candidate / "model.safetensors").is_file():
            return candidate
    looked = " nor in ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(
        f"no model.safetensors of the reference model in {looked}; "
        "use a checkout of hfkvq, or train the model with evals/reference/train.py"
    )


def load_reference(
    dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """Return the reference model, ready for `generate`, and its tokenizer (left padding, with the chat template)."""
    path = reference_path()
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=dtype)
    # The wrapper around PreTrainedModel.to confuses type checkers.
    nn.Module.to(model, torch.device(device))
    return model.eval(), AutoTokenizer.from_pretrained(path)
