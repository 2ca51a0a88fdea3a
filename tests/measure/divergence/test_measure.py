"""Divergence of caches, by hand and on tiny models: windows of text, caches of others, and intervals."""

from __future__ import annotations

import importlib.util
import math
import random
import types

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import QuantizedCache, QuantizedLayer

from hfkvq import MixedKVCache, get_scheme
from hfkvq.measure.divergence import Bill, Divergence, Measured, compare_logits, measure
from hfkvq.measure.divergence.intervals import check_scipy, mean_interval
from hfkvq.measure.divergence.naming import find_other, parse_measured
from hfkvq.measure.divergence.windows import Text, cut, read_file, reference_documents
from tests.caches.models import build, prompt
from tests.command import assert_refused, invoke

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
        ({"prefill": 40}, "prefill: got 40, allowed 2 to 39"),
        ({"chunk": 0}, "chunk: got 0, allowed 1 or more"),
        ({"batch_size": 0}, "batch_size: got 0, allowed 1 or more"),
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


QUANTO = "transformers:QuantizedCache:backend=quanto:nbits=4"


class Bytes(QuantizedLayer):
    """A stand-in backend: 8 bits and a scale for all, in nested containers."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax() / 127
        return (tensor / scale).round().to(torch.int8), {"scale": scale, "shape": tensor.shape}

    def _dequantize(self, qtensor):
        codes, meta = qtensor
        return codes.float() * meta["scale"]


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr("transformers.cache_utils.QuantoQuantizedLayer", Bytes)


def test_a_real_cache_and_all_its_bytes(backend) -> None:
    model, tokens = build("qwen3"), prompt(2, 300)
    assert isinstance(find_other(QUANTO).prepare(model, None, tokens)(), QuantizedCache)
    found = measure(model, tokens, parse_measured(["full", QUANTO]), prefill=200, chunk=10, batch_size=2)
    row = found.schemes[1]
    assert 0 < row.mean < 0.1
    # Two layers, keys and values, of two rows, with a scale for both: 199 tokens of 2 heads of 32 in 8 bits, and 100 in
    # f32, which is fewer than what makes it quantize all anew.
    assert row.bill.held_bytes * 2 == 2 * 2 * (2 * (199 + 100 * 4) * 2 * 32 + 4)
    assert row.bill.total_bits == pytest.approx(16 * row.bill.held_bytes / row.bill.bf16_bytes)
    assert row.bill.code_bits == 4


def test_a_missing_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    with pytest.raises(ImportError, match="pip install optimum-quanto"):
        find_other(QUANTO).check(build("qwen3").config)


def test_an_import_path_with_options() -> None:
    found = find_other("evals.simulated:Oscar:recent=128:key_clip=0.9")
    assert found.to_dict()["recent"] == 128
    assert (found.to_dict()["key_clip"], found.to_dict()["simulated"]) == (0.9, True)
    assert find_other("kivi-2:local_length=32") is None


def test_any_cache_of_transformers() -> None:
    model, tokens = build("qwen3"), prompt(2, 60)
    (row,) = measure(model, tokens, parse_measured(["transformers:DynamicCache"]), prefill=40).schemes
    assert float(row.kld.max()) < 1e-6
    # The model is f32.
    assert row.bill.total_bits == 32
    with pytest.raises(ValueError, match="DynamicCache does not take these options"):
        find_other("transformers:DynamicCache:rooms=3").check(model.config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evals.simulated:Oscar:recnt=1", "evals.simulated:Oscar does not take these options"),
        ("evals.simulated:TurboQuant:key_bits=9", "key_bits: got 9, allowed 1 to 8"),
        ("evals.simulated:Oskar", "cannot be imported"),
        ("no_such_module:Oscar", "cannot be imported: No module named 'no_such_module'"),
        ("math:sqrt", "math:sqrt is neither a transformers.Cache nor an OtherCache"),
        ("transformers:QuantizedCache:backend=quanto:bits=4", "QuantizedCache does not take these options"),
    ],
)
def test_wrong_paths_and_options(text, message) -> None:
    assert_refused(invoke("kld", "--schemes", text), message)


class Letters:
    """A tokenizer of one token a letter; "^" begins a text, if it is told so."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True):
        ids = [ord(letter) for letter in text]
        if add_special_tokens and self.bos_token_id is not None:
            ids = [self.bos_token_id, *ids]
        return types.SimpleNamespace(input_ids=ids)


def text_of(tokens: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in tokens.tolist()]


def test_windows_follow_one_another() -> None:
    found = cut([Text("a", ["abcde", "fghij", "klmno"], "-")], Letters(), 4, 3)
    assert text_of(found.tokens) == ["abcd", "e-fg", "hij-"]
    assert found.first_token is None
    assert text_of(cut([Text("a", ["abcde"])], Letters(), 4, 3).tokens) == ["abcd"]


def test_every_window_begins_as_texts_do() -> None:
    found = cut([Text("a", ["abcdefgh"])], Letters(ord("^")), 4, 9)
    assert text_of(found.tokens) == ["^abc", "^def"]
    assert found.first_token == ord("^")


def test_texts_share_the_windows_and_take_turns() -> None:
    texts = [Text("small", ["abcdefghi"]), Text("large", ["ABCDEFGHI"])]
    found = cut(texts, Letters(), 2, 5)
    assert text_of(found.tokens) == ["ab", "AB", "cd", "CD", "ef"]
    assert found.names == ("small", "large", "small", "large", "small")
    # A text gives no more than it has, and only what is asked for is read.
    assert cut([*texts, Text("none", [])], Letters(), 2, 2).names == ("small", "large")
    assert cut(texts, Letters(), 4, 9).names == ("small", "large") * 2


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="text: a has 3 tokens, but a window needs 8; give more text, or smaller"):
        cut([Text("a", ["abc"])], Letters(), 8, 1)


def test_files(tmp_path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("Grüße", encoding="utf-8")
    lines.write_text('{"body": "one"}\n\n{"body": "two", "n": 1}\n', encoding="utf-8")
    assert read_file(plain, "body") == ["Grüße"]
    assert read_file(lines, "body") == ["one", "two"]


def test_the_reference_models_own_text() -> None:
    documents = reference_documents()
    first = [next(documents) for _ in range(6)]
    assert len(set(first)) == 6
    assert all(text.endswith("<|im_end|>\n") for text in first)
    assert next(reference_documents(seed=1)) not in first


def test_contains_the_mean_and_is_reproducible() -> None:
    random.seed(3)
    values = [random.gauss(2.0, 1.0) for _ in range(40)]
    low, high = mean_interval(values)
    assert low < sum(values) / 40 < high
    assert mean_interval(values) == (low, high)
    assert mean_interval(values, seed=1) != (low, high)
    # About twice 1.96 standard errors.
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(40), rel=0.25)


def test_without_spread_or_without_values() -> None:
    assert mean_interval([0.0, 0.0, 0.0]) == (0.0, 0.0)
    assert mean_interval([1.0]) is None
    assert mean_interval([]) is None
    assert mean_interval([1.0, math.inf]) is None


def test_missing_scipy_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"SciPy.*hfkvq\[eval\]"):
        check_scipy()
