"""Models with attention of their own: it is followed, and done over the pages."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import BloomConfig, DynamicCache, FalconConfig, GPTNeoConfig, MptConfig, T5Config

from evals.families import build
from evals.matrix import examine, small
from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.attention import hfkvq_attention
from hfkvq.caches.layers import KVLayer
from hfkvq.caches.layers.followed import RECORDABLE, LazyScores
from hfkvq.kernels.arguments import AttentionArguments
from tests.caches.graph_recorder import PythonGraph, captured  # noqa: F401
from tests.caches.models import prompt

FAMILIES = ("bloom", "codegen", "gpt_neo", "gpt_neox_japanese", "gptj", "jetmoe", "mpt")
QUICK = ("bloom", "gpt_neo", "gptj", "jetmoe")
KEEP_DISTANCES = ("bloom", "gpt_neo", "mpt")
BATCH, HEADS, DIM, SEEN = 2, 4, 16, 60


@pytest.fixture
def dense_calls(monkeypatch):
    """Sides of layers that are dequantized."""
    calls, dense = [], KVLayer.dense

    def counted(layer, side):
        calls.append(side)
        return dense(layer, side)

    monkeypatch.setattr(KVLayer, "dense", counted)
    return calls


@torch.no_grad()
def logits(model, cache, ids, mask=None, cuts=(0, 60, 61, 62, 66)):
    found = []
    for a, b in itertools.pairwise(cuts):
        shown = None if mask is None else mask[:, :b]
        found.append(model(input_ids=ids[:, a:b], attention_mask=shown, past_key_values=cache).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_tokens_and_presets(family):
    """Tokens of `DynamicCache` in the modes that differ most, and presets' dequantized logits; the matrix has all."""
    row = examine(family, modes=("padding", "crop"))
    assert not row["what"]["dequantized"]
    assert set(row["modes"].values()) == {"equal"}
    expected = dict.fromkeys(("kitty-pro", "saw-int4-kv", "kvarn-k4v2"), "equal") | {"mixkvq": "runs"}
    evicting = {name: row["presets"].pop(name) for name in ("arkv", "snapkv")}
    assert row["presets"] == expected
    refused = "refused" if family in KEEP_DISTANCES else "runs"
    assert {found.split(":")[0] for found in evicting.values()} == {refused}


@pytest.mark.parametrize("family", ["gptj", "jetmoe"])
@pytest.mark.parametrize(
    "scheme", [get_scheme("arkv", budget_tokens=40, window=8, page_size=8), small("snapkv")], ids=lambda x: x.name
)
def test_a_budget_is_kept(family, scheme):
    """Of 180 tokens, steps included: those of a budget, or their bytes, and a window that fills."""
    model, ids = build(family), prompt(BATCH, 180)
    cache, whole = MixedKVCache(model, scheme), MixedKVCache(model, "full")
    logits(model, cache, ids, cuts=(0, 150, *range(151, 181)))
    logits(model, whole, ids, cuts=(0, 180))
    assert all(layer.evicted for layer in cache.layers)
    assert cache.get_seq_length() == 180
    assert cache.memory().total < 0.5 * whole.memory().total


def test_tokens_are_judged_as_in_the_attention_of_the_table(monkeypatch):
    """The same queries, masks and scaling are shown: the same tokens are evicted."""
    model, ids = build("gptj"), prompt(BATCH, 66)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    followed = logits(model, MixedKVCache(model, small("snapkv")), ids, mask)

    def attend(module, query, key, value, attention_mask=None):
        out, _ = hfkvq_attention(module, query, key, value, attention_mask, scaling=1 / float(module.scale_attn))
        return out.transpose(1, 2), None

    monkeypatch.setattr(type(model.transformer.h[0].attn), "_attn", attend)
    direct = logits(model, MixedKVCache(model, small("snapkv")), ids, mask)
    torch.testing.assert_close(followed[mask == 1], direct[mask == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [BloomConfig(), MptConfig(), GPTNeoConfig(), FalconConfig(alibi=True), T5Config()],
    ids=lambda config: config.model_type,
)
def test_eviction_is_refused_where_distances_count(config):
    for name in ("arkv", "snapkv"):
        with pytest.raises(ValueError, match=r"all of them stand, so none can be evicted; choose .*'kitty-pro'"):
            MixedKVCache(config, name)
    MixedKVCache(config, "kitty-pro")


def test_global_layers_and_plain_falcon_may_evict():
    MixedKVCache(GPTNeoConfig(attention_types=[[["global"], 24]]), "arkv")
    MixedKVCache(FalconConfig(), "arkv")


def test_attention_that_cannot_be_followed_keeps_no_budget_and_says_so(monkeypatch):
    """Before the second forward, of which nothing is cached then; schemes that keep every token go on."""
    model, ids = build("gptj"), prompt(1, 66)
    monkeypatch.setattr(F, "softmax", lambda x, dim: torch.exp(x - x.logsumexp(dim, True)))
    cache = MixedKVCache(model, small("arkv"))
    logits(model, cache, ids, cuts=(0, 60))
    with pytest.raises(ValueError, match=r"own attention of this model \(gptj\) could not be followed.*'kitty-pro'"):
        logits(model, cache, ids, cuts=(60, 61))
    assert [layer.seen for layer in cache.layers] == [60, 60]
    expected = logits(model, DynamicCache(config=model.config), ids)
    torch.testing.assert_close(logits(model, MixedKVCache(model, "full"), ids), expected, rtol=1e-4, atol=1e-4)


def test_a_bias_met_on_the_way_refuses_eviction(monkeypatch):
    model, ids = build("gptj"), prompt(1, 60)
    attention = type(model.transformer.h[0].attn)
    own = attention._attn

    def biased(self, query, key, value, attention_mask=None):
        heads = torch.arange(query.shape[1], dtype=torch.float32)[:, None, None]
        return own(self, query, key, value, attention_mask + heads * torch.arange(key.shape[2]))

    monkeypatch.setattr(attention, "_attn", biased)
    with pytest.raises(ValueError, match="adds a bias for each head and column"):
        logits(model, MixedKVCache(model, small("snapkv")), ids, cuts=(0, 60))


@pytest.mark.parametrize("family", ["gptj", "bloom"])
def test_probabilities_that_are_asked_for_are_given(family):
    model, ids = build(family), prompt(1, 40)
    both = []
    for cache in (DynamicCache(config=model.config), MixedKVCache(model, "full")):
        outs = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=3,
            do_sample=False,
            output_attentions=True,
            return_dict_in_generate=True,
        )
        both.append([each for step in outs.attentions for each in step])
    assert not any(isinstance(each, LazyScores) for each in both[1])
    for expected, found in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_without_attaching_steps_are_dequantized(dense_calls):
    """And nothing of a model is ever changed, so there is nothing to undo."""
    model, ids = build("gptj"), prompt(1, 66)
    attention = model.transformer.h[0].attn
    before = dict(vars(attention))
    expected = logits(model, DynamicCache(config=model.config), ids)
    for attach in (True, False):
        cache = MixedKVCache(model, "full", attach=attach)
        logits(model, cache, ids, cuts=(0, 60))
        dense_calls.clear()
        logits(model, cache, ids, cuts=(60, 61))
        assert dense_calls == ([] if attach else 2 * ["keys", "values"])
        cache.detach()
        torch.testing.assert_close(
            logits(model, MixedKVCache(model, "full", attach=attach), ids), expected, rtol=1e-4, atol=1e-4
        )
    assert dict(vars(attention)) == before
    assert model.config._attn_implementation == "eager"


def test_each_side_is_dequantized_once_a_step(dense_calls):
    """DiffLlama attends twice to the same keys."""
    model, ids = build("diffllama"), prompt(1, 66)
    cache = MixedKVCache(model, "kitty-pro")
    logits(model, cache, ids, cuts=(0, 60))
    dense_calls.clear()
    logits(model, cache, ids, cuts=(60, 61))
    assert sorted(dense_calls) == 2 * ["keys"] + 2 * ["values"]


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_bias_and_mask_are_joined_once_for_all_layers(family, monkeypatch):
    """A step's; models make views of their own of the bias in each layer."""
    joined, biased = [], AttentionArguments.biased

    def counted(arguments):
        joined.append(arguments.bias is not None)
        return biased(arguments)

    monkeypatch.setattr(AttentionArguments, "biased", counted)
    model, ids = build(family), prompt(1, 66)
    cache = MixedKVCache(model, "full")
    logits(model, cache, ids, cuts=(0, 60))
    for i in range(60, 64):
        logits(model, cache, ids, cuts=(i, i + 1))
    assert len(cache.layers) == 2
    assert sum(joined) == 4


@pytest.mark.usefixtures("captured")
def test_steps_with_repeated_heads_are_captured():
    """JetMoe repeats keys for its experts; a recorded step knows how often."""
    model, ids = build("jetmoe"), prompt(BATCH, 40)
    more = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    for capacity in (None, 96):
        cache = MixedKVCache(model, "full", max_cache_len=capacity)
        assert torch.equal(model.generate(ids, past_key_values=cache, **more), model.generate(ids, **more))
        assert PythonGraph.made


# What a model's attention may do, beside attention over plain tensors.


def flat(x):
    return x.reshape(BATCH * HEADS, -1, DIM)


def bias_of(columns):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    return (slopes[:, None, None] * torch.arange(columns)).repeat(BATCH, 1, 1)


def scaled(q, k, v, mask):
    return torch.matmul(F.softmax(q @ k.transpose(-1, -2) * 0.2 + mask, -1), v)


def masked_then_scaled(q, k, v, mask):
    probs = torch.nn.Softmax(dim=-1)((torch.matmul(q, k.transpose(2, 3)) + mask) / 4.0)
    return torch.matmul(F.dropout(probs, 0.1, training=False).to(v.dtype), v)


def in_single_precision(q, k, v, mask):
    logits = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2)) / torch.tensor(4.0)
    return torch.matmul(F.softmax(logits + mask, dim=-1, dtype=torch.float32).type_as(v), v)


def batched(q, k, v, mask):
    logits = torch.bmm(flat(q), flat(k).transpose(1, 2)).view(BATCH, HEADS, q.shape[2], -1) + mask
    logits = torch.max(logits, torch.tensor(torch.finfo(q.dtype).min)).view(BATCH * HEADS, q.shape[2], -1)
    return torch.bmm(F.softmax(logits, dim=-1), flat(v)).view(*q.shape)


def alibi(q, k, v, mask):
    logits = bias_of(k.shape[2]).baddbmm(batch1=flat(q), batch2=flat(k).transpose(-1, -2), beta=2.0, alpha=0.25)
    probs = F.softmax(logits.view(BATCH, HEADS, q.shape[2], -1) + mask, dim=-1).view(BATCH * HEADS, q.shape[2], -1)
    return torch.bmm(probs, flat(v)).view(*q.shape)


def hidden(q, k, v, mask):
    bias = bias_of(k.shape[2])[None, :HEADS].squeeze(2)[:, :, None]
    logits = (torch.matmul(q, k.transpose(-1, -2)) + bias).masked_fill(mask < 0, torch.finfo(q.dtype).min)
    return torch.matmul(logits.softmax(-1), v)


def windowed(q, k, v, mask):
    near = torch.arange(k.shape[2]) > k.shape[2] - 20
    logits = torch.where(near[None, None, None], torch.matmul(q, k.transpose(-1, -2)), torch.tensor(-1e30))
    return torch.matmul(F.softmax(logits + mask, -1), v)


def written_to(q, k, v, mask):
    logits = torch.matmul(q, k.transpose(-1, -2))
    logits += mask
    logits.masked_fill_(mask < 0, -1e9).mul_(0.5)
    return torch.matmul(F.softmax(logits, -1), v)


def bounded(q, k, v, mask):
    return torch.matmul(F.softmax((q @ k.transpose(-1, -2)).clamp(max=1.0) + mask, -1), v)


def fill_that_is_seen(q, k, v, mask):
    first = torch.arange(k.shape[2]) < 9
    return torch.matmul(F.softmax((q @ k.transpose(-1, -2)).masked_fill(first, 0.5), -1), v)


def weighed(q, k, v, mask):
    return torch.matmul(
        F.softmax(q @ k.transpose(-1, -2) + mask, -1) * torch.tensor([1.0, 0.0, 2.0, 1.0])[:, None, None], v
    )


def of_other_values(q, k, v, mask):
    return torch.matmul(F.softmax(q @ k.transpose(-1, -2), -1), v * 2)


def written_to_by_a_helper(q, k, v, mask):
    """`x += y` is the same tensor, also for who else holds it."""

    def hide(x):
        x += mask
        x *= 0.5

    logits = torch.matmul(q, k.transpose(-1, -2))
    hide(logits)
    return torch.matmul(F.softmax(logits, -1), v)


def written_to_in_a_view(q, k, v, mask):
    logits = torch.matmul(q, k.transpose(-1, -2))
    seen = logits.view(BATCH * HEADS, q.shape[2], -1)
    seen *= 0.1
    return torch.matmul(F.softmax(logits + mask, -1), v)


def given_by_name(q, k, v, mask):
    logits = torch.matmul(input=q, other=k.transpose(dim0=2, dim1=3))
    logits = torch.where(condition=mask >= 0, input=torch.reshape(logits, shape=logits.shape), other=torch.tensor(-1e9))
    return torch.matmul(torch.softmax(logits.to("cpu", torch.float32), -1, torch.float32), v)


def written_to_in_rows(q, k, v, mask):
    logits = torch.matmul(q, k.transpose(-1, -2))
    logits[:, 0].mul_(0.1)
    for row in logits:
        row.mul_(0.5)
    logits.unsqueeze(0).add_(mask)
    return torch.matmul(F.softmax(logits, -1), v)


def kept_before_writing(q, k, v, mask):
    """What was made of scores stays what it was when they are written to."""
    logits = torch.matmul(q, k.transpose(-1, -2)) + mask
    halves = logits * 0.5
    logits.mul_(0.1)
    return torch.matmul(F.softmax(halves.clamp(max=50.0), -1), v) + torch.matmul(F.softmax(logits, -1), v)


def written_to_from_below(q, k, v, mask):
    """As C++ does, which no function of Python's is told of."""
    logits = torch.matmul(q, k.transpose(-1, -2))
    with torch._C.DisableTorchFunctionSubclass():
        logits.mul_(0.5)
    return torch.matmul(F.softmax(logits + mask, -1), v)


def rounded(q, k, v, mask):
    logits = (torch.matmul(q, k.to(torch.int32).float().transpose(-1, -2)) * 3).to(torch.int32).float()
    return torch.matmul(F.softmax(logits + mask, -1), v)


def rounded_scores(q, k, v, mask):
    logits = torch.div((torch.matmul(q, k.transpose(-1, -2)) * 3).to(torch.int32), 2.0, rounding_mode="floor")
    return torch.matmul(F.softmax(logits + mask, -1), v)


def bound_that_is_seen(q, k, v, mask):
    logits = torch.max(torch.matmul(q, k.transpose(-1, -2)) + mask, torch.tensor(-1e4)) / 5e3
    return torch.matmul(F.softmax(logits, -1), v)


def in_buffers(q, k, v, mask):
    columns = k.shape[2]
    logits = torch.empty(BATCH * HEADS, q.shape[2], columns)
    torch.baddbmm(torch.zeros(1, 1, 1), flat(q), flat(k).transpose(1, 2), beta=0, out=logits)
    return torch.matmul(F.softmax(logits.view(BATCH, HEADS, -1, columns) + mask, -1), v)


def functional(q, k, v, mask):
    """PyTorch's own attention takes masks without axes for rows and heads."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[1, 0])


def dropping(q, k, v, mask):
    torch.manual_seed(3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5)


FOLLOWED = (
    scaled, masked_then_scaled, in_single_precision, batched, alibi, hidden, windowed, written_to_by_a_helper,
    written_to_in_a_view, functional,
)  # fmt: skip
COMPUTED = (
    written_to, bounded, fill_that_is_seen, weighed, of_other_values, given_by_name, written_to_in_rows,
    kept_before_writing, written_to_from_below, rounded, rounded_scores, bound_that_is_seen, in_buffers, dropping,
)  # fmt: skip


@pytest.mark.parametrize("queries", [1, 3, 30])
@pytest.mark.parametrize("own", [*FOLLOWED, *COMPUTED], ids=lambda f: f.__name__)
def test_arithmetic(own, queries, dense_calls):
    """What is followed dequantizes nothing in a step; whatever else is computed is as it was."""
    cache = MixedKVCache(build("gptj").config, "full")
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(BATCH, HEADS, SEEN + queries, DIM, generator=generator) for _ in range(2))
    q = torch.randn(BATCH, HEADS, queries, DIM, generator=generator)
    layer = cache.layers[0]
    layer.update(keys[:, :, :SEEN], values[:, :, :SEEN])
    layer.settle()
    dense_calls.clear()
    k, v = layer.update(keys[:, :, SEEN:], values[:, :, SEEN:])
    mask = torch.zeros(BATCH, 1, queries, SEEN + queries)
    mask[0, :, :, :7] = torch.finfo(torch.float32).min
    mask = mask.masked_fill(torch.ones(queries, SEEN + queries).triu(SEEN + 1) > 0, torch.finfo(torch.float32).min)
    found = own(q, k, v, mask)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, own(q, keys, values, mask), rtol=1e-4, atol=1e-5)
    assert bool(dense_calls) == (own in COMPUTED or queries > 16)


def updated(queries):
    """Handles of a layer that holds 60 tokens and is given some more."""
    cache = MixedKVCache(build("gptj").config, "full")
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(BATCH, HEADS, SEEN + queries, DIM, generator=generator) for _ in range(2))
    cache.layers[0].update(keys[:, :, :SEEN], values[:, :, :SEEN])
    cache.layers[0].settle()
    return cache, cache.layers[0].update(keys[:, :, SEEN:], values[:, :, SEEN:])


@pytest.mark.parametrize("changed", ["query", "mask"])
def test_what_is_noted_must_not_be_changed(changed):
    _, (k, v) = updated(1)
    given = {"query": torch.ones(BATCH, HEADS, 1, DIM), "mask": torch.zeros(BATCH, 1, 1, SEEN + 1)}
    probs = F.softmax(torch.matmul(given["query"], k.transpose(-1, -2)) + given["mask"], -1)
    given[changed].add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place while .* still followed; work on a copy"):
        torch.matmul(probs, v)


class OnDevice(torch.Tensor):
    """A number that seems to lie on a GPU."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def test_a_value_on_the_device_is_known_by_its_place():
    """That one value hides says nothing about others: here of a bound."""
    cache, (k, _) = updated(1)
    q, shown = torch.ones(BATCH, HEADS, 1, DIM), torch.arange(SEEN + 1) > 9
    below, zero = (torch.tensor(x).as_subclass(OnDevice) for x in (-1e9, 0.0))
    logits = torch.where(shown, torch.matmul(q, k.transpose(-1, -2)), below)
    assert isinstance(logits, LazyScores)
    assert cache.layers[0].hides_by_tensor
    assert not isinstance(torch.max(logits, zero), LazyScores)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("family", sorted(RECORDABLE))
def test_steps_are_captured(family):
    """Masks and positions have room for more tokens then; padding that is not given positions stays without."""
    model, ids = build(family), prompt(BATCH, 40)
    more = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    for capacity in (None, 96):
        for shown in (None, mask):
            before = PythonGraph.made
            cache = MixedKVCache(model, "full", max_cache_len=capacity)
            found = model.generate(ids, attention_mask=shown, past_key_values=cache, **more)
            assert torch.equal(found, model.generate(ids, attention_mask=shown, **more))
            # A cache of the same size takes the graphs of the one before.
            assert shown is not None or PythonGraph.made == before + 1


@pytest.mark.rounding
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ["saw-int4-kv", "kitty-pro", "snapkv"])
def test_captured_steps_are_those_without_graphs(name):
    """Of one layer: a second one would quantize the last bits of attention over a buffer, which are its own."""
    model, ids = build("gptj", n_layer=1), prompt(BATCH, 90)
    both = []
    for graphs in (True, False):
        cache = MixedKVCache(model, small(name), graphs=graphs)
        steps = [cache.step(model, ids[:, :50]), *(cache.step(model, ids[:, i : i + 1]) for i in range(50, 90))]
        both.append(torch.cat([step.logits for step in steps], 1))
        assert PythonGraph.made or not graphs
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("captured")
def test_several_tokens_at_once_run_without_graphs(caplog):
    model, ids = build("gptj"), prompt(1, 10).repeat(1, 4)
    more = {"max_new_tokens": 10, "do_sample": False, "prompt_lookup_num_tokens": 4}
    found = model.generate(ids, past_key_values=MixedKVCache(model, "full"), **more)
    assert torch.equal(found, model.generate(ids, **more))
    assert "GPTJForCausalLM: steps are not captured, since the model itself adds masks" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(RECORDABLE))
def test_steps_are_captured_on_a_gpu(family):
    """Nothing in a model's own attention, its masks included, keeps a step from being a graph."""
    model, ids = build(family).to("cuda", torch.bfloat16), prompt(BATCH, 66).cuda()
    both = []
    for graphs in (True, False):
        cache = MixedKVCache(model, small("saw-int4-kv"), graphs=graphs)
        with torch.no_grad():
            cut = [ids[:, :50], *ids[:, 50:].split(1, 1)]
            both.append(torch.cat([model(input_ids=x, past_key_values=cache).logits for x in cut], 1))
        assert not graphs or cache.graphs.sync.buffers.recordings
    assert (both[0] - both[1]).float().norm() < 0.02 * both[1].float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family):
    """Kernels take the model's masks and biases as they come: logits are those of dequantized steps."""
    model, ids = build(family).to("cuda", torch.bfloat16), prompt(BATCH, 66).cuda()
    scheme = small("saw-int4-kv")
    expected = logits(model, MixedKVCache(model, scheme, attach=False), ids)
    found = logits(model, MixedKVCache(model, scheme), ids)
    # In bf16 a single logit may be 0.07 off, at a norm of 0.002 to 0.004; a mask or a bias left out is more by far.
    assert (found - expected).float().norm() < 0.02 * expected.float().norm()
