"""Divergence of caches: by hand, and on tiny models."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hfkvq import MixedKVCache, get_scheme
from hfkvq.measure.divergence import Bill, Divergence, Measured, compare_logits, measure
from tests.caches.models import build, prompt

PREFILL = 160


@pytest.fixture(scope="module")
def model():
    return build("qwen3")


@pytest.fixture(scope="module")
def tokens():
    return prompt(3, 221)


@pytest.fixture(scope="module")
def measured(model, tokens) -> Measured:
    return measure(model, tokens, ["full", "kivi-2", "kivi-4"], prefill=PREFILL, batch_size=2)


def rows(measured: Measured) -> dict[str, Divergence]:
    return {row.name: row for row in measured.schemes}


def test_compared_by_hand() -> None:
    # p = (3/4, 1/4), q = (1/2, 1/2); then the same twice.
    p = torch.tensor([[math.log(3.0), 0.0], [1.0, 2.0]])
    q = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    kld, nll_p, nll_q, agrees = compare_logits(p, q, torch.tensor([1, 1]))
    assert kld.tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.0])
    assert nll_p.tolist() == pytest.approx([math.log(4.0), math.log(1 + math.exp(-1.0))])
    assert nll_q.tolist() == pytest.approx([math.log(2.0), math.log(1 + math.exp(-1.0))])
    assert agrees.tolist() == [True, True]
    assert not compare_logits(p[:1], -p[:1], torch.tensor([0]))[3].any()


def test_summaries_by_hand() -> None:
    bill = Bill(2.0, 3.0, 100.0, 500.0)
    kld = torch.tensor([[4.0, 1.0, 2.0], [3.0, 0.0, 5.0]])
    row = Divergence(torch.full((2, 3), math.log(7.0)), bill, "x", get_scheme("full"), kld, kld < 2)
    assert row.mean == 2.5
    assert row.quantile(0.5) == 2.5
    assert row.quantile(0.99) == pytest.approx(4.95)
    assert row.quantile(1.0) == 5.0
    assert row.top1 == pytest.approx(1 / 3)
    assert row.perplexity == pytest.approx(7.0)


def test_full_is_the_baseline(measured) -> None:
    full = rows(measured)["full"]
    assert (measured.windows, measured.scored) == (3, 221 - PREFILL)
    assert float(full.kld.max()) < 1e-6
    assert full.top1 == 1.0
    assert full.perplexity == pytest.approx(measured.baseline.perplexity, rel=1e-5)


def test_fewer_bits_diverge_more(measured) -> None:
    found = rows(measured)
    assert found["kivi-2"].mean > 2 * found["kivi-4"].mean > 0
    assert found["kivi-2"].top1 < 1
    two, four = found["kivi-2"].bill, found["kivi-4"].bill
    assert (two.code_bits, four.code_bits) == (2.0, 4.0)
    # The model is f32, its windows too.
    assert 2 < two.total_bits < four.total_bits < 32
    assert measured.baseline.bill.total_bits == 32.0
    assert two.held_bytes < four.held_bytes < measured.baseline.bill.held_bytes


def test_perplexity_is_that_of_a_plain_forward(model, tokens, measured) -> None:
    with torch.inference_mode():
        logits = model(tokens).logits
    expected = -logits.log_softmax(-1)[:, PREFILL - 1 : -1].gather(2, tokens[:, PREFILL:, None])[..., 0]
    torch.testing.assert_close(measured.baseline.nll, expected, rtol=1e-4, atol=1e-4)


class _Force(LogitsProcessor):
    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.logits = tokens, []

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -math.inf)
        forced.scatter_(1, self.tokens[:, len(self.logits), None], 0.0)
        self.logits.append(scores.clone())
        return forced


def test_chunks_of_one_are_generation(model, tokens) -> None:
    window = tokens[:1, :190]
    found = measure(model, window, ["kivi-2"], prefill=PREFILL, chunk=1).schemes[0]
    # The prompt but its last token, which the first scored prediction needs: `generate` predicts it from the prompt.
    force = _Force(window[:, PREFILL - 1 :])
    model.generate(
        window[:, : PREFILL - 1],
        past_key_values=MixedKVCache(model, "kivi-2"),
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=190 - PREFILL + 1, pad_token_id=0),
        logits_processor=LogitsProcessorList([force]),
    )
    logits = torch.cat(force.logits[1:])
    expected = -logits.log_softmax(-1).gather(1, window[0, PREFILL:, None])[:, 0]
    torch.testing.assert_close(found.nll[0], expected, rtol=1e-5, atol=1e-5)


def test_attention_is_left_as_it_was(tokens) -> None:
    model = build("llama", attention="sdpa")
    measure(model, tokens[:1, :40], ["kivi-2"], prefill=30)
    assert model.config._attn_implementation == "sdpa"
    cache = MixedKVCache(model, "kivi-2")
    measure(model, tokens[:1, :40], ["kivi-2"], prefill=30)
    assert model.config._attn_implementation == "hfkvq"
    cache.detach()


def test_sliding_windows_and_latent_attention(tokens) -> None:
    for name in ("mistral-sliding", "gemma3", "deepseek-v3"):
        full = measure(build(name), tokens[:1, :60], ["full"], prefill=40).schemes[0]
        assert float(full.kld.max()) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": 1}, "prefill: got 1, allowed 2 to 39"),
        ({"prefill": 40}, "prefill: got 40, allowed 2 to 39"),
        ({"chunk": 0}, "chunk: got 0, allowed 1 or more"),
        ({"batch_size": 0}, "batch_size: got 0, allowed 1 or more"),
        ({"schemes": ["kivvi"]}, "scheme: got 'kivvi'"),
        ({"tokens": torch.zeros(3)}, "tokens: got torch.float32 of \\(3,\\)"),
    ],
)
def test_wrong_arguments(model, tokens, changes, message) -> None:
    given = {"tokens": tokens[:1, :40], "schemes": ["full"], "prefill": 20} | changes
    with pytest.raises(ValueError, match=message):
        measure(model, given.pop("tokens"), given.pop("schemes"), **given)


def test_logits_that_are_no_numbers(tokens) -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    with pytest.raises(ValueError, match="its logits with DynamicCache are not numbers, at a token from 30 on"):
        measure(model, tokens[:1, :40], ["full"], prefill=30)
