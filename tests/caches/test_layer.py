"""The seam: traps of Transformers' masks, attention functions and calls, each met once by somebody."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from hfkvq import MixedKVCache
from hfkvq.caches.attention.interface import hfkvq_attention, hfkvq_mask
from hfkvq.caches.layers.handle import LazyKV
from hfkvq.kernels.arguments import AttentionArguments
from tests.caches.driver import (
    DIM,
    HEADS,
    SHARE,
    Module,
    assert_close,
    assert_same_bits,
    attention,
    feed,
    feed_as_is,
    forward,
    join,
    make,
    row,
    small,
    stored,
)
from tests.caches.models import build, config

SCALING = DIM**-0.5


def call(layer, queries, keys, values, mask=None, **kwargs):
    """One call of the registered attention, as a model makes it: (B, Hq, Q, D)."""
    handles = layer.update(keys, values)
    out, weights = hfkvq_attention(Module(), queries, *handles, mask, scaling=SCALING, **kwargs)
    assert weights is None
    return out.transpose(1, 2)


def lossless(tokens, **kwargs):
    """A lossless layer with tokens inside, and its two rows."""
    layer, rows = make(small("full"), **kwargs), [row(i + 1, 100) for i in range(2)]
    feed(layer, [x[:tokens] for x in rows], [tokens])
    return layer, rows


def expected(rows, stop, queries, mask=None):
    """Attention of the last ``queries`` of ``stop`` tokens."""
    q, k, v = join([x[:stop] for x in rows])
    return attention(q[:, :, stop - queries :], k, v, mask, SCALING)


# Masks.


@pytest.mark.parametrize("tokens", [1, 5, 30], ids=["step", "steps", "prompt"])
@pytest.mark.parametrize("low", ["min", "inf"])
def test_additive_masks(tokens, low):
    """finfo.min and -inf, also where a whole row is masked: padding is found, and nothing becomes NaN."""
    own, pad = row(1, 100), 9
    lowest = torch.finfo(torch.float32).min if low == "min" else -torch.inf
    layer, alone = make(small("kitty")), make(small("kitty"))
    at = 0
    junk = [torch.full_like(x, 1000.0) for x in join([own[:pad]])]
    whole = [torch.cat([j, x], 2) for j, x in zip(junk, join([own]), strict=True)]
    for chunk in (35, tokens, tokens):
        new = slice(at, at + chunk)
        at += chunk
        visible = torch.ones(chunk, at, dtype=torch.bool).tril(at - chunk)
        visible[:, :pad] = False
        mask = torch.zeros(1, 1, chunk, at).masked_fill(~visible, lowest)
        out = call(layer, *(x[:, :, new] for x in whole), mask)
        real = slice(max(pad - new.start, 0), None)
        assert torch.isfinite(out[:, :, real]).all()
    feed(alone, [own[: at - pad]], [35 - pad, tokens, tokens])
    assert_same_bits(stored(layer, 0), stored(alone, 0))
    q, k, v = join([own[at - pad - 1 : at - pad]])
    last = attention(q, alone.dense("keys"), alone.dense("values"), None, SCALING)
    assert_close(layer.attend(q, AttentionArguments(SCALING, mask[:, :, -1:])), last)
    assert k.shape == v.shape


@pytest.mark.parametrize("tokens", [4, 16, 30])
def test_fewer_queries_than_new_tokens(tokens):
    """Gemma 4 slices queries to the last positions after the masks are made."""
    for mask in (True, False):
        layer, rows = lossless(30)
        queries, keys, values = join([x[30 : 30 + tokens] for x in rows])
        shown = torch.ones(tokens, 30 + tokens, dtype=torch.bool).tril(30)[None, None, -2:] if mask else None
        out = call(layer, queries[:, :, -2:], keys, values, shown)
        assert_close(out, expected(rows, 30 + tokens, 2))
        assert layer.get_seq_length() == 30 + tokens
        assert_close(layer.dense("keys"), join([x[: 30 + tokens] for x in rows])[1])


def test_bidirectional_blocks_in_a_prompt():
    """Image tokens see each other; that is no padding."""
    layer, rows = make(small("full")), [row(1, 40)]
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    mask[10:20, 10:20] = True
    out = call(layer, *join(rows), mask[None, None])
    assert_close(out, expected(rows, 40, 40, mask[None, None]))
    assert layer.store.counters[:2, 0].tolist() == [0, 40]


@pytest.mark.parametrize("kind", ["softcap", "sinks", "s_aux", "position_bias"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_extras_of_attention(kind, tokens):
    """Softcap, sinks and biases, in steps over pages."""
    layer, rows = lossless(30)
    queries, keys, values = join([x[: 30 + tokens] for x in rows])
    bias = torch.randn(1, HEADS * SHARE, tokens, 30 + tokens)
    sinks = torch.randn(HEADS * SHARE) + 1
    out = call(
        layer,
        *join([x[30 : 30 + tokens] for x in rows]),
        torch.ones(tokens, 30 + tokens, dtype=torch.bool).tril(30)[None, None],
        **{"softcap": 2.0} if kind == "softcap" else {kind: bias if kind == "position_bias" else sinks},
    )
    keys, values = (x.repeat_interleave(SHARE, 1) for x in (keys, values))
    logits = queries[:, :, 30:] @ keys.transpose(-1, -2) * SCALING
    if kind == "softcap":
        logits = 2 * torch.tanh(logits / 2)
    if kind == "position_bias":
        logits = logits + bias
    logits = logits.masked_fill(torch.ones(tokens, 30 + tokens, dtype=torch.bool).triu(31), -torch.inf)
    if kind in ("sinks", "s_aux"):
        logits = torch.cat([logits, sinks[None, :, None, None].expand(2, -1, tokens, 1)], -1)
    assert_close(out, torch.softmax(logits, -1)[..., : 30 + tokens] @ values)


def test_plain_step_gets_the_padding_mask():
    """Masks of the next steps look as this one does to what is launched."""
    mask = torch.randint(0, 2, (2, 31)) * 256
    got = hfkvq_mask(2, 1, 31, q_offset=30, attention_mask=mask)
    assert got.shape == (2, 1, 1, 31)
    # Models tell by the dtype which masks are added.
    assert torch.equal(got[:, 0, 0], mask != 0)
    later = hfkvq_mask(2, 1, 700, q_offset=699, attention_mask=torch.ones(2, 900))
    assert (later.stride(), later.hfkvq_room) == (got.stride(), got.hfkvq_room)
    assert later.hfkvq_room * 2 == later.untyped_storage().nbytes()
    assert not hasattr(hfkvq_mask(2, 3, 31, q_offset=28, attention_mask=mask), "hfkvq_room")
    assert hfkvq_mask(2, 1, 31, q_offset=30) is None


@pytest.mark.parametrize(
    ("queries", "columns", "function", "padded"),
    [
        (20, 20, causal_mask_function, True),
        (5, 25, causal_mask_function, False),
        (5, 25, causal_mask_function, True),
        (1, 25, and_masks(causal_mask_function, lambda b, h, q, k: k > q - 8), True),
        (1, 25, and_masks(causal_mask_function, lambda b, h, q, k: k > q - 8), False),
        (1, 25, sliding_window_causal_mask_function(8), True),
        (1, 25, sliding_window_causal_mask_function(8), False),
    ],
)
def test_other_masks_are_those_of_sdpa(queries, columns, function, padded):
    mask = torch.ones(2, columns, dtype=torch.bool)
    mask[1, :4] = False
    arguments = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": columns,
        "q_offset": columns - queries,
        "mask_function": function,
        "attention_mask": mask if padded else None,
        # As Transformers says it for a window.
        "local_size": None if function is causal_mask_function else 8,
    }
    theirs = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(hfkvq_mask(**arguments), theirs)


@pytest.mark.parametrize("handles", [False, True])
@pytest.mark.parametrize("extra", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
def test_no_mask_in_a_module_that_is_not_causal(handles, extra, monkeypatch):
    """Cross-attention sees all of the other sequence."""
    monkeypatch.setattr(Module, "is_causal", False)
    monkeypatch.setattr(Module, "__module__", "transformers.models.gemma2.modeling_gemma2")
    build("gemma2")
    layer, rows = lossless(20)
    queries, keys, values = join([x[20:30] for x in rows])
    given = layer.update(keys, values) if handles else join([x[:30] for x in rows])[1:]
    out, _ = hfkvq_attention(Module(), queries, *given, None, scaling=SCALING, **extra)
    if extra:
        everything = expected(rows, 30, 10, torch.ones(1, 1, 10, 30, dtype=torch.bool))
        assert not torch.allclose(out.transpose(1, 2), expected(rows, 30, 10), atol=0.1)
        assert torch.allclose(out.transpose(1, 2), everything, atol=0.3)
    else:
        assert_close(out.transpose(1, 2), expected(rows, 30, 10, torch.ones(1, 1, 10, 30, dtype=torch.bool)))


def test_none_always_means_bottom_right():
    """Several queries on a longer cache: stock code would align them to the upper left."""
    padded = torch.ones(1, 64, dtype=torch.bool)
    padded[0, 3] = False
    # A step's; with columns behind the queries; with padding; of a window.
    for queries, columns, offset, more in (
        (5, 25, 20, {}),
        (20, 64, 30, {}),
        (20, 64, 44, {"attention_mask": padded}),
        (20, 64, 44, {"allow_is_causal_skip": False}),
        (20, 64, 44, {"config": SimpleNamespace(model_type="doge")}),
        (20, 64, 44, {"config": SimpleNamespace(model_type="gemma2", use_bidirectional_attention=True)}),
        (20, 64, 44, {"mask_function": and_masks(causal_mask_function, lambda b, h, q, k: k >= 0)}),
    ):
        got = hfkvq_mask(1, queries, columns, q_offset=offset, **more)
        assert got is not None
        expected = torch.ones(queries, columns, dtype=torch.bool).tril(offset)
        if "attention_mask" in more:
            expected &= padded
        assert got[0, 0].tolist() == expected.tolist()
    # A prompt alone: both corners are one. And behind a cache, where nothing is padding.
    assert hfkvq_mask(1, 20, 20) is None
    assert hfkvq_mask(1, 20, 64, q_offset=44) is None
    assert hfkvq_mask(1, 20, 64, q_offset=44, attention_mask=torch.ones(1, 64, dtype=torch.bool)) is None


# What schemes see of the queries.


def test_rows_that_share_a_page_weigh_its_keys_by_their_own_queries():
    """Its values are sealed and its keys are not when the rows part: then it is no page to share."""
    scheme = small("kitty", score="qk_abs", local_length=0, key_local_length=20, value_unit=1)
    scale, first = torch.linspace(-2, 2, DIM).exp(), row(1, 42)
    tails = [row(i, 40) for i in (2, 3)]
    tails = [type(x)(x.queries * scale.roll(11 * i), x.keys, x.values) for i, x in enumerate(tails)]
    layer = make(scheme)
    feed_as_is(layer, [first], [42])
    layer.batch_repeat_interleave(2)
    feed_as_is(layer, tails, [1] * 40)
    for i, tail in enumerate(tails):
        alone = make(scheme)
        feed_as_is(alone, [first], [42])
        feed_as_is(alone, [tail], [1] * 40)
        assert_same_bits(stored(layer, i), stored(alone, 0))


# Handles.


@pytest.mark.parametrize(("share", "masked"), [(1, False), (4, True)])
def test_packed_queries(share, masked):
    """5.23 packs a step's query heads where tokens are expected: (B, Hkv, n_rep, D)."""
    rows = [row(i + 1, 40, share=share) for i in range(2)]
    layer = make(small("full"))
    feed(layer, [x[:30] for x in rows], [30])
    queries, keys, values = join([x[30:31] for x in rows])
    packed = queries.view(2, HEADS, share, DIM)
    mask = torch.ones(2, 1, 1, 31, dtype=torch.bool)
    mask[1, ..., :5] = False
    handles = layer.update(keys, values)
    out = F.scaled_dot_product_attention(packed, *handles, attn_mask=mask if masked else None)
    q, k, v = join([x[:31] for x in rows])
    assert_close(out.view(2, HEADS * share, 1, DIM), attention(q[:, :, 30:], k, v, mask if masked else None, SCALING))
    assert layer.staged is None


@pytest.mark.parametrize("tokens", [1, 16, 25])
def test_intercepted_sdpa(tokens):
    """Stock sdpa on handles: enable_gqa, repeated heads, explicit masks and is_causal."""
    mask = torch.ones(tokens, 30 + tokens, dtype=torch.bool).tril(30)[None, None]
    for repeat in (False, True):
        layer, rows = lossless(30)
        queries, keys, values = join([x[30 : 30 + tokens] for x in rows])
        handles = layer.update(keys, values)
        if repeat:
            # repeat_kv
            length = 30 + tokens
            spread = [x[:, :, None, :, :].expand(2, HEADS, SHARE, length, DIM) for x in handles]
            handles = [x.reshape(2, HEADS * SHARE, length, DIM) for x in spread]
        assert all(isinstance(x, LazyKV) for x in handles)
        out = F.scaled_dot_product_attention(queries, *handles, attn_mask=mask, enable_gqa=not repeat)
        assert type(out) is torch.Tensor
        assert_close(out, expected(rows, 30 + tokens, tokens))
        assert layer.staged is None
    # Not the cache's own rule: no mask and not causal means that all see all.
    layer, rows = lossless(30)
    queries, keys, values = join([x[30 : 30 + tokens] for x in rows])
    out = F.scaled_dot_product_attention(queries, *layer.update(keys, values), enable_gqa=True)
    everything = torch.ones(1, 1, tokens, 30 + tokens, dtype=torch.bool)
    assert_close(out, expected(rows, 30 + tokens, tokens, everything))


def test_handles_have_shape_and_no_storage():
    layer, rows = lossless(30)
    _, keys, values = join([x[30:31] for x in rows])
    handle, other = layer.update(keys, values)
    assert handle.shape == other.shape == (2, HEADS, 31, DIM)
    assert (handle.dtype, handle.device, handle.ndim) == (torch.float32, keys.device, 4)
    assert not handle.requires_grad
    assert handle.to(torch.float32) is handle
    assert handle.contiguous() is handle
    assert repr(handle) == "LazyKV(keys, (2, 2, 31, 32))"
    # Anything else dequantizes.
    assert type(handle + 0) is torch.Tensor
    assert type(handle.to(torch.bfloat16)) is torch.Tensor
    dense = join([x[:31] for x in rows])[1]
    assert torch.equal(handle + 0, dense)
    assert torch.equal(handle[:, :, -3:], dense[:, :, -3:])
    assert torch.equal(torch.cat([handle, handle], 2), torch.cat([dense, dense], 2))
    assert torch.equal(handle.transpose(2, 3), dense.transpose(2, 3))


def test_shared_layers_attend_before_the_producer_seals():
    """KV sharing: a later layer attends to the same handles, so sealing waits for the next update."""
    layer, rows = lossless(30, defer=True, recordable=False)
    for i in range(30, 60):
        queries, keys, values = join([x[i : i + 1] for x in rows])
        handles = layer.update(keys, values)
        first, _ = hfkvq_attention(Module(), queries, *handles, None, scaling=SCALING)
        again, _ = hfkvq_attention(Module(), queries * 2, *handles, None, scaling=SCALING / 2)
        assert_close(again, first)
        assert layer.uncommitted
    layer.crop(0)
    plain = make(small("full"))
    feed(plain, [x[:60] for x in rows], [60])
    for i in range(2):
        assert_same_bits(stored(layer, i), stored(plain, i))


def test_shared_prompts_are_counted_once_and_keep_their_padding():
    """A later layer may bring one query and no mask (Gemma4); the producer's tokens are still those of its own mask."""
    scheme = small("kitty", score="qk_abs")
    queries, keys, values = join([row(1, 40), row(2, 40)])
    valid = torch.arange(40) >= torch.tensor([0, 7])[:, None]
    layers = [make(scheme, defer=True, recordable=False), make(scheme)]
    for layer in layers:
        mask = hfkvq_mask(2, 40, 40, attention_mask=valid)
        handles = layer.update(keys, values)
        hfkvq_attention(Module(), queries, *handles, mask, scaling=SCALING)
        if layer.defer:
            hfkvq_attention(Module(), queries * 5, *handles, mask, scaling=SCALING)
            hfkvq_attention(Module(), queries[:, :, -1:], *handles, None, scaling=SCALING)
        layer.crop(0)
    for i in range(2):
        assert_same_bits(stored(layers[0], i), stored(layers[1], i))


@pytest.mark.parametrize("passed", ["update", "crop", "reorder_cache", "reset"])
def test_a_handle_of_the_past_is_refused(passed):
    """It would show what the layer holds now, in the shape of then."""
    layer, rows = lossless(30)
    queries, keys, values = join([x[30:31] for x in rows])
    handles = layer.update(keys, values)
    arguments = {"update": (keys, values), "crop": (-1,), "reorder_cache": (torch.tensor([1, 0]),), "reset": ()}
    getattr(layer, passed)(*arguments[passed])
    for use in (
        lambda: handles[0] + 0,
        lambda: hfkvq_attention(Module(), queries, *handles, None, scaling=SCALING),
        lambda: F.scaled_dot_product_attention(queries, *handles, enable_gqa=True),
    ):
        with pytest.raises(RuntimeError, match="earlier update"):
            use()


def test_handles_are_not_changed_in_place():
    """What is written to a dequantized copy would be lost without a word."""
    layer, rows = lossless(30)
    _, keys, values = join([x[30:31] for x in rows])
    handle, _ = layer.update(keys, values)
    for change in (
        lambda: handle.mul_(2),
        lambda: handle.__setitem__(slice(None), 0),
        lambda: torch.add(keys, 1, out=handle),
        lambda: torch.nn.functional.relu(handle, inplace=True),
    ):
        with pytest.raises(RuntimeError, match="in place"):
            change()
    scaled = handle
    scaled *= 2
    assert torch.equal(scaled, layer.dense("keys") * 2)


# Cache verbs that Transformers calls.


def test_early_initialization():
    """Allocated by shape alone; then used, also by heads of other dims than foreseen."""
    cache = MixedKVCache(config("llama"), small("kitty"), max_cache_len=50)
    cache.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
    assert all(layer.is_initialized for layer in cache.layers)
    assert cache.get_seq_length() == 0
    fresh = make(small("kitty"), capacity=50)
    for layer in (cache.layers[0], fresh):
        feed(layer, [row(1, 40), row(2, 40)], [40], [0, 3])
    for i in range(2):
        assert_same_bits(stored(cache.layers[0], i), stored(fresh, i))
    forward(cache.layers[1], *(torch.randn(1, 4, 9, 24) for _ in range(3)))
    assert cache.layers[1].dense("keys").shape == (1, 4, 9, 24)
