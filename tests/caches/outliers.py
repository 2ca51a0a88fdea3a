"""The reference model, some of whose key channels are a hundred times as wide as others, and how far caches are off."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hfkvq.measure.reference import evaluation_set, load_reference

PROMPT, SCORED, CHUNK = 288, 32, 16

# By rotary pair (channels i and i + 64): a bias, and what queries are multiplied by there. Slow pairs turn by less than
# a degree in such a prompt, so their biases say little, however wide. Fast ones turn once in 26 tokens or fewer: they
# have no mean, and their biases say how far away a key is.
BIASES = {63: (300.0, 1.0), 58: (-120.0, 1.0), 8: (100.0, 0.1), 3: (-30.0, 0.3)}

# By rotary pair: what keys are multiplied by, and queries divided.
FACTORS = {63: 100.0, 60: 30.0, 20: 100.0, 5: 30.0, 0: 10.0}

Change = Callable[[Tensor, Tensor, Tensor], None]


class Grafted(nn.Module):
    """A norm whose heads (B, T, H, D) are scaled and shifted, each for itself.

    Biases of ``k_proj`` would be within the norm, and all of it; behind it they are what models without norms have.
    """

    def __init__(self, norm: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.norm, self.scale, self.shift = norm, nn.Parameter(scale), nn.Parameter(shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale + self.shift


def _grafted(model: Any, change: Change) -> Any:
    """A copy with norms that ``change`` has made out of key scales (H, D), key biases, and query scales (Hq, D)."""
    model, config = copy.deepcopy(model), model.config
    for layer in model.model.layers:
        own = layer.self_attn
        like, dim = own.k_norm.weight, config.head_dim
        keys = like.new_ones(config.num_key_value_heads, dim)
        biases, queries = torch.zeros_like(keys), like.new_ones(config.num_attention_heads, dim)
        change(keys, biases, queries)
        own.k_norm = Grafted(own.k_norm, keys, biases)
        own.q_norm = Grafted(own.q_norm, queries, torch.zeros_like(queries))
    return model.eval().requires_grad_(False)


def with_biases(model: Any) -> Any:
    """A copy whose keys have `BIASES`: it does something else than the model, to which every cache has to come close.

    They are in the pairs' first channels in one KV head, and of the other sign in their second ones in the next.
    """

    def change(keys: Tensor, biases: Tensor, queries: Tensor) -> None:
        half = keys.shape[1] // 2
        for pair, (bias, share) in BIASES.items():
            for head in range(len(keys)):
                biases[head, pair + half * (head % 2)] = bias * (-1) ** head
            queries[:, [pair, pair + half]] *= share

    return _grafted(model, change)


def with_factors(model: Any) -> Any:
    """A copy that does the same as the model, with `FACTORS` on its keys, and their inverse on its queries."""

    def change(keys: Tensor, biases: Tensor, queries: Tensor) -> None:
        half = keys.shape[1] // 2
        for pair, factor in FACTORS.items():
            keys[:, [pair, pair + half]] *= factor
            queries[:, [pair, pair + half]] /= factor

    return _grafted(model, change)


GRAFTS = {"biases": with_biases, "factors": with_factors}


@functools.cache
def reference() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    return load_reference(torch.float32)


@functools.cache
def grafted(kind: str) -> Any:
    """One of `GRAFTS` of it; nobody may change it."""
    return GRAFTS[kind](reference()[0])


@functools.cache
def text() -> Tensor:
    """Token ids (2, `PROMPT` + `SCORED`): records, some of which nobody can foretell, and sums that are worked out."""
    tokenizer = reference()[1]
    (*more, last), (sums,) = evaluation_set("recall-24", 3), evaluation_set("arithmetic-12", 1)
    records = tokenizer("".join(each.text for each in more)).input_ids[-PROMPT - SCORED :]
    before = tokenizer(last.text + sums.prompt).input_ids[-PROMPT:]
    return torch.tensor([records, before + tokenizer(sums.answer).input_ids[:SCORED]])


def scored(model: Any, cache: Any, first: int = PROMPT, ids: Tensor | None = None) -> Tensor:
    """Log probabilities (rows, `SCORED`, V), f64, of tokens that come `CHUNK` at a time behind a prompt.

    The prompt's first tokens come first, where ``first`` says how many.
    """
    ids = text() if ids is None else ids
    pieces = [ids[:, :first], ids[:, first:PROMPT], *ids[:, PROMPT:].split(CHUNK, 1)]
    with torch.no_grad():
        found = [model(each, past_key_values=cache).logits for each in pieces if each.shape[1]]
    return torch.cat(found, 1)[:, PROMPT - 1 : -1].double().log_softmax(-1)


@functools.cache
def expected(kind: str) -> Tensor:
    """What a grafted model gives with the stock cache."""
    return scored(grafted(kind), DynamicCache())


def divergence(base: Tensor, other: Tensor) -> float:
    """Mean of the KL divergence of log probabilities."""
    return float((base.exp() * (base - other)).sum(-1).mean())
