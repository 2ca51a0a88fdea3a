"""Agents whose caches do not fit together: what is computed again, by the way to live with it."""

import argparse

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from evals.late_rounds import answer, held_bytes, play


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, head_dim=64, **sizes)).eval()


def args(budget, agents=3):
    return argparse.Namespace(budget=budget, agents=agents, rounds=2, first=512, turn=64, new=4, chunk=256)


def computed(row):
    return [each["computed"] for each in row["rounds"]]


EACH, AGAIN, MORE = 512 + 64, 512 + 64 + 4 + 64, 64 + 1
"""Tokens of a first turn, a second one from nothing, one behind a cache (which lacks an answer's last token)."""


def test_caches_that_went_are_computed_again(model, tmp_path):
    """The budget holds the compressed caches, but two of the three others."""
    cache = DynamicCache(config=model.config)
    ids = torch.ones(1, AGAIN + 3, dtype=torch.int64)
    answer(model, cache, ids, 1, 512)
    budget = int(2.5 * held_bytes(cache))
    dynamic = play(model, "dynamic", args(budget), tmp_path, 100)
    assert computed(dynamic) == [3 * EACH, 3 * AGAIN]
    assert dynamic["rounds"][0]["dropped"] == 1
    assert all(each["bytes"] <= budget for each in dynamic["rounds"])
    assert computed(play(model, "saw-int4", args(budget), tmp_path, 100)) == [3 * EACH, 3 * MORE]
