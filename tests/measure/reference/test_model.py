"""Loading the reference model, and the copy of it with outlier channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from evals.reference.outliers import with_outliers
from hfkvq.measure.reference import evaluation_set, load_reference, reference_path
from hfkvq.measure.reference import model as model_module


@torch.inference_mode()
def run(model: Qwen3ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits, and the range of each key channel, (layers, head_dim)."""
    cache = DynamicCache(config=model.config)
    logits = model(ids, past_key_values=cache).logits
    keys = [layer.keys for layer in cache.layers]
    return logits, torch.stack([key.abs().amax(dim=(0, 1, 2)) for key in keys])


def test_missing_weights_name_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hfkvq" / "measure" / "reference" / "model.py"
    monkeypatch.setattr(model_module, "__file__", str(file))
    with pytest.raises(FileNotFoundError) as caught:
        reference_path()
    assert str(file.parent / "checkpoint") in str(caught.value)
    checkout = tmp_path / "evals" / "reference" / "checkpoint"
    assert str(checkout) in str(caught.value)
    checkout.mkdir(parents=True)
    (checkout / "model.safetensors").touch()
    assert reference_path() == checkout


def test_reference_answers_also_with_outliers() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_reference(torch.float32)
    examples = evaluation_set("recall-24", 4)
    inputs = tokenizer([example.prompt for example in examples], return_tensors="pt", padding=True)
    width = inputs.input_ids.shape[1]
    logits, ranges = run(model, inputs.input_ids)
    changed = with_outliers(model)
    new_logits, new_ranges = run(changed, inputs.input_ids)
    torch.testing.assert_close(new_logits, logits, atol=1e-4, rtol=0)
    assert ((new_ranges / ranges).round() == 8).sum(dim=-1).tolist() == [4] * len(ranges)
    out = changed.generate(**inputs, max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    assert sum(example.score(text) for example, text in zip(examples, texts, strict=True)) >= 3
