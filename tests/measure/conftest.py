"""A stand-in chat model: random weights, small enough for a test, with the reference tokenizer."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

# Before Transformers imports Triton, as in tests/kernels: `pytest tests/measure` loads this file before its plugins.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, T5Config

from hfkvq.measure.reference import reference_path


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(reference_path())


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Folder of the saved model. In f32, so that two ways of attending cannot differ in a token."""
    folder = tmp_path_factory.mktemp("stand-in")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the config of a model with an encoder."""
    folder = tmp_path_factory.mktemp("encoder-decoder")
    T5Config().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def keep_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line switches Transformers' progress bars off for the process; other tests keep theirs."""
    from transformers.utils import logging as transformers_logging

    monkeypatch.setattr(transformers_logging, "disable_progress_bar", lambda: logging.getLogger(__name__))
