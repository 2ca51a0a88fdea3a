"""Key smoothing in caches: attention is what it was, whatever vectors do, in every way that tokens come and go."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import smoothing
from hfkvq.caches.schemes import SawInt4

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TOKENS = 300


def model_with_outliers(device="cpu", dtype=torch.float64):
    """A tiny model whose key biases are a hundred times its keys, in channels that RoPE turns fast and slowly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
        attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        own = layer.self_attn
        own.q_proj.weight.data *= 8
        own.k_proj.weight.data *= 8
        own.k_proj.bias.data.normal_()
        for channel, size in ((2, 60.0), (31, -100.0), (63, 40.0), (64 + 8, 150.0)):
            own.k_proj.bias.data[channel] = size
    return model.to(device, dtype)


@pytest.fixture(scope="module")
def model():
    return model_with_outliers()


def ids(rows=2, tokens=TOKENS):
    return torch.randint(3, 256, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, cache, given, prompt=200, chunk=7, mask=None):
    """Of all tokens behind the prompt, a few at a time."""
    outs = []
    pieces = [slice(0, prompt), *(slice(i, i + chunk) for i in range(prompt, given.shape[1], chunk))]
    for piece in pieces:
        more = {} if mask is None else {"attention_mask": mask[:, : piece.stop]}
        outs.append(model(given[:, piece].to(model.device), past_key_values=cache, **more).logits)
    return torch.cat(outs, 1)[:, prompt:]


def divergence(model, cache, given, **more):
    expected = logits(model, DynamicCache(config=model.config), given, **more)
    got = logits(model, cache, given, **more)
    return float((expected.softmax(-1) * (expected.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize("name", ["saw-int4", "saw-int4-kv", "int4", "triaxial", "best-4.3", "kvarn"])
def test_wide_channels_cost_little(model, name):
    """Far less than without smoothing, where scales belong to tokens; never more."""
    given = ids()
    smoothed, plain = (divergence(model, MixedKVCache(model, name, smooth_keys=on), given) for on in (True, False))
    by_token = smoothing.rounds_by_token(get_scheme(name))
    assert smoothed < plain * (0.4 if by_token else 1.1)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 512}, {"attach": False}, {"graphs": False}])
def test_every_way_gives_the_same(model, options):
    """The same pages in a cache that grows, of fixed capacity, and behind sdpa; from a model and from its config."""
    given = ids()
    expected = logits(model, MixedKVCache(model, "saw-int4"), given)
    for source in (model, model.config):
        cache = MixedKVCache(source, "saw-int4", **options)
        got = logits(model, cache, given)
        cache.detach()
        assert cache.layers[0].smoothing is smoothing.measure(model, model.config)[0].smoothing(
            SawInt4().layout(64, 64)
        )
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_keys_of_a_cache_are_the_models(model):
    """Who reads `layer.keys` gets keys, in rows with padding zeros before them."""
    given = ids()
    mask = torch.ones_like(given)
    mask[1, :20] = 0
    cache, whole = MixedKVCache(model, "saw-int4", sink_length=64), DynamicCache(config=model.config)
    for each in (cache, whole):
        logits(model, each, given, mask=mask)
    got, expected = cache.layers[0].keys, whole.layers[0].keys
    assert (got[1, :, :20] == 0).all()
    torch.testing.assert_close(got[0, :, :64], expected[0, :, :64], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got[1, :, 20:84], expected[1, :, 20:84], rtol=1e-6, atol=1e-5)
    # The rest was rounded in steps of a fifteenth of a token's range once its channels are even, not as they are.
    assert (got[0] - expected[0]).abs().mean() < 0.3


def test_rows_crop_and_copies(model):
    """What becomes of rows and lengths is what becomes of the same tokens alone."""
    given = ids()
    cache = MixedKVCache(model, "saw-int4")
    logits(model, cache, given[:, :250])
    twin = copy.deepcopy(cache)
    twin.crop(-50)
    again = MixedKVCache(model, "saw-int4")
    logits(model, again, given[:, :200])
    torch.testing.assert_close(
        logits(model, twin, given[:, 200:260], prompt=1), logits(model, again, given[:, 200:260], prompt=1),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    cache.batch_select_indices(torch.tensor([1]))
    alone = MixedKVCache(model, "saw-int4")
    logits(model, alone, given[1:, :250])
    torch.testing.assert_close(
        logits(model, cache, given[1:, 250:], prompt=1), logits(model, alone, given[1:, 250:], prompt=1),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_saved_with_its_vectors(model, tmp_path):
    """A file has them, so it goes on as it was, whatever is measured where it is loaded."""
    given = ids()
    cache = MixedKVCache(model.float(), "saw-int4")
    try:
        logits(model, cache, given[:, :250])
        cache.save(tmp_path / "cache")
        smoothing._MEASURED.clear()
        loaded = MixedKVCache.load(tmp_path / "cache", model)
        assert torch.equal(loaded.layers[0].smoothing.vectors, cache.layers[0].smoothing.vectors)
        assert torch.equal(*(logits(model, each, given[:, 250:], prompt=1) for each in (cache, loaded)))
    finally:
        model.double()


def test_measured_once(model, monkeypatch):
    """A model is called once for all caches; another model again."""
    calls, forward = [], type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, *args, **kwargs: (calls.append(self), forward(self, *args, **kwargs))[1]
    )
    smoothing._MEASURED.clear()
    for name in ("saw-int4", "int4"):
        logits(model, MixedKVCache(model.config, name), ids()[:, :201])
    assert len(calls) == 2 * 2 + 1


def test_a_model_that_cannot_be_called_gives_its_first_prompt(model):
    """A user's hook sees no tokens but the user's."""
    seen = []
    handle = model.model.register_forward_hook(lambda *args: seen.append(1))
    smoothing._MEASURED.clear()
    try:
        given = ids()
        cache = MixedKVCache(model, "saw-int4")
        assert divergence(model, cache, given) < 0.05
        assert cache.layers[0].smoothing is not None
        assert len(seen) == 2 * (1 + -(-100 // 7))
    finally:
        handle.remove()


def test_noise_is_warned_of_once(model, caplog):
    """Where keys are rounded by token as they are: with the figure and what to take."""
    smoothing.say_once.cache_clear()
    smoothing._JUDGED.clear()
    for name in ("saw-int4", "best-4.3", "int4"):
        for _ in range(2):
            logits(model, MixedKVCache(model, name, smooth_keys=name != "int4"), ids()[:, :201])
    (record,) = [x for x in caplog.records if "rounding the keys" in x.message]
    assert record.message.startswith("saw-int4: ")
    assert "smooth_keys=True" in record.message
    assert "'best-4.3'" in record.message


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["saw-int4", "int4", "best-4.3:smooth_keys=true", "kvarn:smooth_keys=true"])
def test_captured_steps_are_eager_ones(name):
    """Graphs smooth as eager steps do; a cache of the same vectors takes the same graphs, one of others its own."""
    model = model_with_outliers("cuda", torch.bfloat16)
    given = ids(2, 320).cuda()
    eager, captured, second = (MixedKVCache(model, name, graphs=graphs) for graphs in (False, None, None))
    expected = logits(model, eager, given, chunk=1)
    for cache in (captured, second):
        torch.testing.assert_close(logits(model, cache, given, chunk=1), expected, rtol=0.05, atol=0.1)
        assert cache.graphs.sync.buffers.recordings
    smoothing._MEASURED.clear()
    model.model.layers[0].self_attn.k_proj.bias.data += 3
    other, again = (MixedKVCache(model, name, graphs=graphs) for graphs in (None, False))
    torch.testing.assert_close(
        logits(model, other, given, chunk=1), logits(model, again, given, chunk=1), rtol=0.05, atol=0.1
    )
