"""Key smoothing by a model's vectors and by a first prompt's: every way into a cache, and models that do not go."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import DynamicCache

from evals.reference.outliers import with_outliers
from hfkvq import MixedKVCache
from hfkvq.caches.base import warn_once
from hfkvq.caches.layer_state import smoothing
from hfkvq.measure.reference import evaluation_set, load_reference
from tests.caches.driver import make, small
from tests.caches.models import build, prompt

# 16 and 15 are one channel away from a slow pair's other half: pairs are (0, 16) to (15, 31).
BIASES = {15: 200.0, 29: -90.0, 0: 30.0, 17: 20.0}


def biased(dtype=torch.float32, scale=1.0, **changes):
    """A model with biases on its keys."""
    model = build("llama", attention_bias=True, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            keys = layer.self_attn.k_proj.bias.view(2, 32)
            for channel, bias in BIASES.items():
                keys[0, channel], keys[1, (channel + 16) % 32] = bias * scale, -bias * scale
    return model.to(dtype).requires_grad_(False)


def fed(model, cache, ids, *pieces, mask=None, **given):
    """Logits of tokens in pieces of these lengths, the last of which takes all that is left."""
    found, at = [], 0
    for piece in (*pieces, ids.shape[1] - sum(pieces)):
        own = {}
        if mask is not None:
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, at : at + piece]
            own = {"attention_mask": mask[:, : at + piece], "position_ids": places}
        with torch.no_grad():
            found.append(model(ids[:, at : at + piece], past_key_values=cache, **own, **given).logits)
        at += piece
    return torch.cat(found, 1)


def vectors(cache):
    return torch.stack([layer.smoothing.vectors for layer in cache.compressed_layers])


def by_prompt(cache):
    return [layer.smooths_by_prompt for layer in cache.compressed_layers] == [True] * len(cache.compressed_layers)


class Hook:
    """A user's forward hook: how many rows and tokens it was shown."""

    def __init__(self):
        self.shapes = []

    def __call__(self, module, inputs, output):
        self.shapes.append(tuple(output.shape[:2]))


@pytest.fixture(params=["measured", "by prompt"])
def model(request):
    """With biases; its hook of a user's keeps it from being measured."""
    made = biased()
    if request.param == "by prompt":
        made.model.embed_tokens.register_forward_hook(Hook())
    return made


def test_every_way_to_a_cache(model):
    """Growing, of fixed capacity, shown the model later, intercepted: the same vectors and bits."""
    ids = prompt(2, 60)
    ways = [
        MixedKVCache(model, small("saw-int4")),
        MixedKVCache(model, small("saw-int4"), max_cache_len=80),
        MixedKVCache(model.config, small("saw-int4")),
        MixedKVCache(model.config, small("saw-int4"), max_cache_len=80),
    ]
    for cache in ways[2:]:
        cache.attach(model)
    del cache
    logits = [fed(model, cache, ids, 50, 1, 1) for cache in ways]
    whole = vectors(ways[0])
    assert all(torch.equal(vectors(cache), whole) for cache in ways)
    # The last cache gone, the config is what it was.
    ways.clear()
    own = MixedKVCache(model, small("saw-int4"), attach=False)
    assert model.config._attn_implementation == "sdpa"
    logits.append(fed(model, own, ids, 50, 1, 1))
    assert torch.equal(vectors(own), whole)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-4)
    base = fed(model, DynamicCache(), ids, 50, 1, 1)
    assert (logits[0] - base).abs().mean() < 0.1 * base.std()


def test_keys_of_a_cache_are_the_models(model):
    """Who reads `layer.keys` gets keys; padding before a row's first has none."""
    ids, mask = prompt(2, 100), torch.ones(2, 100, dtype=torch.int64)
    mask[1, :20] = 0
    cache, whole = MixedKVCache(model, "saw-int4", sink_length=64), DynamicCache(config=model.config)
    for each in (cache, whole):
        fed(model, each, ids, 90, mask=mask)
    got, expected = cache.layers[0].keys, whole.layers[0].keys
    assert (got[1, :, :20] == 0).all()
    torch.testing.assert_close(got[0, :, :64], expected[0, :, :64], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got[1, :, 20:84], expected[1, :, 20:84], rtol=1e-5, atol=1e-4)


def test_measured_once(monkeypatch):
    """One call of the model for all its caches, whether they are given the model or its config."""
    model, calls = biased(), []
    forward = type(model).forward

    def counted(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    for source, name in ((model, "saw-int4"), (model.config, "int4"), (model.config, "saw-int4")):
        fed(model, MixedKVCache(source, name), prompt(1, 20), 19)
    assert len(calls) == 3 * 2 + 1


# Calls that measure.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_is_seen_of_the_call_that_measures(attention):
    """Not in what the model returns, of random numbers, of the config, or in inference mode."""
    model = biased(attention=attention)
    ids, asked = prompt(2, 30), {"output_hidden_states": True, "output_attentions": attention == "eager"}
    state, before = torch.random.get_rng_state(), model.config.to_dict()
    with torch.no_grad():
        base = model(ids, past_key_values=DynamicCache(), **asked)
        cache = MixedKVCache(model, small("saw-int4"), attach=False)
        found = model(ids, past_key_values=cache, **asked)
    assert not by_prompt(cache)
    assert len(found.hidden_states) == len(base.hidden_states) == 3
    assert [x.shape for x in found.hidden_states] == [x.shape for x in base.hidden_states]
    if attention == "eager":
        assert [x.shape for x in found.attentions] == [x.shape for x in base.attentions]
    torch.testing.assert_close(found.hidden_states[1], base.hidden_states[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == attention
    with torch.inference_mode():
        other = biased()
        other(ids, past_key_values=(kept := MixedKVCache(other, small("saw-int4"))))
    assert not vectors(kept).is_inference()
    fed(other, kept, ids[:, :1])


# Models that are not measured.


def test_training_mode_and_offloaded_weights():
    ids = prompt(1, 70)
    training, offloaded = biased().train(), biased()
    offloaded.model.layers[0]._hf_hook = type("Hook", (), {"offload": True})()
    for model in (training, offloaded):
        cache = MixedKVCache(model, small("saw-int4"))
        found, base = fed(model, cache, ids, 60), fed(model, DynamicCache(), ids, 60)
        assert by_prompt(cache)
        assert (found - base).abs().mean() < 0.2 * base.std()


# Attention that is not blind to a number added to all logits.


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
@pytest.mark.parametrize("measured", [True, False])
def test_softcap_and_sinks_keep_their_logits(name, measured):
    """Keys are scaled, and not centred: of keys in 16 bits nothing is left then, of logits that moved something was."""
    model, ids = build(name, attention_bias=True), prompt(1, 60)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.copy_(torch.linspace(-9, 9, 64))
    if not measured:
        model.get_input_embeddings().register_forward_hook(Hook())
    cache = MixedKVCache(model, small("saw-int4"))
    # Within the window of 16 bits.
    found, base = fed(model, cache, ids[:, :18], 10, 1), fed(model, DynamicCache(), ids[:, :18], 10, 1)
    # The other is a window's, in 16 bits.
    (layer,) = (each for each in cache.compressed_layers if each.smooths)
    assert layer.smooths_by_prompt != measured
    assert not layer.smoothing.vectors[0].any()
    assert layer.smoothing.vectors[1].unique().numel() > 2
    torch.testing.assert_close(found, base, rtol=1e-3, atol=1e-3)
    fed(model, cache, ids[:, 18:], 1, 30)
    cache.integrity_check()


# Benefit of smoothing.


@pytest.fixture(scope="module")
def outliers():
    """The reference model whose keys have channels a hundred times as wide, token ids, and what stock caches give."""
    model, tokenizer = load_reference(torch.float32)
    text = "".join(example.text for example in evaluation_set("recall-24", 3))
    model, ids = with_outliers(model, 100.0), torch.tensor([tokenizer(text).input_ids[-320:]])
    return model, ids, fed(model, DynamicCache(), ids, 288, 16)[:, 288:].double().log_softmax(-1)


# Per token, per token with widths of their own, and rotated with scales of channels; the others are in groups.
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("saw-int4", 0.001),
        ("kvarn-k2v2", 0.03),
        *(
            pytest.param(name, most, marks=pytest.mark.slow)
            for name, most in (("triaxial", 0.002), ("int4", 0.002), ("best-4.3", 0.001))
        ),
    ],
)
def test_wide_channels_do_little_harm_once_they_are_smoothed(name, most, outliers, caplog, monkeypatch):
    """Without smoothing, as papers have it, what comes out is garbage, and where keys have no scales that is said."""
    monkeypatch.setattr(smoothing, "_JUDGED", weakref.WeakKeyDictionary())
    warn_once.cache_clear()
    model, ids, expected = outliers
    divergence = []
    for smooth in (True, False):
        found = fed(model, MixedKVCache(model, name, smooth_keys=smooth), ids, 288, 16)[:, 288:]
        found = found.double().log_softmax(-1)
        divergence.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
        said = "moves its attention logits" in caplog.text and "smooth_keys=True" in caplog.text
        assert said == (not smooth and name != "best-4.3")
    assert divergence[0] < most < divergence[1] / 20


# Bad input.


def test_channels_that_are_constant():
    """Of a head, and of all of it."""
    for channels in ([15, 31], list(range(32))):
        model, ids = biased(), prompt(1, 80)
        with torch.no_grad():
            for layer in model.model.layers:
                weight, bias = layer.self_attn.k_proj.weight.view(2, 32, -1), layer.self_attn.k_proj.bias.view(2, 32)
                weight[:, channels] = 0
                bias[:, channels] = 0
        for hooked in (False, True):
            if hooked:
                model.model.embed_tokens.register_forward_hook(Hook())
            cache = MixedKVCache(model, small("saw-int4"))
            found, base = fed(model, cache, ids, 60, 1), fed(model, DynamicCache(), ids, 60, 1)
            assert vectors(cache).isfinite().all()
            assert vectors(cache).abs().max() < 1e4
            assert (found - base).abs().mean() < 0.1 * base.std()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("debug", [False, True])
def test_bad_keys_in_a_first_prompt(bad, debug):
    """They have no say in the vectors by which the others are kept, and are refused in debug mode."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, 100, 32, generator=generator) for _ in range(2))
    keys = keys + torch.linspace(-100, 100, 32)
    spoilt = keys.clone()
    spoilt[1, 0, 7, 3] = bad
    layer, sound = make(small("saw-int4"), debug=debug), make(small("saw-int4"))
    layer.smooths_by_prompt = sound.smooths_by_prompt = True
    if debug:
        with pytest.raises(ValueError, match=r"NaN or infinity|65504"):
            layer.update(spoilt, values)
        assert layer.smoothing is None
        layer.update(keys, values)
        return
    sound.update(keys, values)
    layer.update(spoilt, values)
    own, theirs = layer.smoothing.vectors, sound.smoothing.vectors
    assert own.isfinite().all()
    assert torch.equal(own[:, 1], theirs[:, 1])
    torch.testing.assert_close(own[1:, 0], theirs[1:, 0], rtol=0.1, atol=0)
    for each in (layer, sound):
        each.settle()
    error = (layer.dense("keys") - keys).abs()
    error[1, 0, 7] = 0
    assert error.max() < 1.5


# Captured steps.


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["saw-int4", "int4", "best-4.3", "kvarn"])
def test_captured_steps_are_eager_ones(name):
    """Graphs smooth as eager steps do; a cache of the same vectors takes the same graphs, one of others its own."""
    model, ids = biased(torch.bfloat16).cuda(), prompt(2, 320).cuda()
    for change in (0, 3):
        smoothing._MEASURED.clear()
        model.model.layers[0].self_attn.k_proj.bias.data += change
        caches = [MixedKVCache(model, name, graphs=on) for on in (False, None, None)]
        expected, *found = [fed(model, cache, ids, 200, *[1] * 119)[:, 200:] for cache in caches]
        for cache, each in zip(caches[1:], found, strict=True):
            assert cache.graphs.sync.buffers.recordings
            assert (each - expected).norm() < 0.05 * expected.norm()


@pytest.mark.gpu
def test_a_model_that_moves_after_it_was_measured():
    """Its caches take the vectors along, and share them."""
    model, ids = biased(), prompt(1, 60)
    expected = fed(model, MixedKVCache(model, "saw-int4"), ids, 50, 7)
    model.cuda()
    caches = [MixedKVCache(model, "saw-int4") for _ in range(2)]
    for cache in caches:
        assert (fed(model, cache, ids.cuda(), 50, 7).cpu() - expected).norm() < 0.05 * expected.norm()
    assert caches[0].layers[1].smoothing is caches[1].layers[1].smoothing


def test_a_step_without_graphs_smooths_in_one_launch(monkeypatch):
    """Queries and keys together, in each layer."""
    model, calls, smooth = biased(), [], smoothing.kernels.smooth
    cache = MixedKVCache(model, small("saw-int4"), graphs=False)
    fed(model, cache, prompt(1, 70))
    monkeypatch.setattr(
        smoothing.kernels,
        "smooth",
        lambda q, k, vectors: calls.append((q.shape[2], k.shape[2])) or smooth(q, k, vectors),
    )
    fed(model, cache, prompt(1, 1))
    assert calls == [(1, 1)] * len(cache.compressed_layers)
