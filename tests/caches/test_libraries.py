"""A cache takes what DynamicCache takes, and shows libraries what DynamicCache shows them."""

from __future__ import annotations

import copy
import functools
import io
import zipfile

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion
from transformers import DynamicCache

from hfkvq import MixedKVCache
from hfkvq.caches.base import config_switch, warn_once
from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.base.model_config import _cached_attention
from tests.caches.models import build, prompt

ROWS = 4


@pytest.fixture(scope="module")
def model():
    return build("llama")


@functools.cache
def filled(model, capacity):
    """A DynamicCache and one of ours that hold the same tokens of four different rows."""
    caches = DynamicCache(config=model.config), MixedKVCache(model, "full", max_cache_len=capacity)
    for cache in caches:
        with torch.no_grad():
            model(prompt(ROWS, 30), past_key_values=cache)
    return caches


def pair(model, capacity=None):
    """Copies of `filled` caches."""
    return copy.deepcopy(filled(model, capacity))


def is_same(theirs, ours):
    return all(
        torch.equal(getattr(a, side), getattr(b, side))
        for a, b in zip(theirs.layers, ours.layers, strict=True)
        for side in ("keys", "values")
    )


SELECTED = (
    [0, 2], (3, 1), [-1], range(1, 3), slice(0, 2), slice(None, None, 2), slice(-2, None), ...,
    [True, False, True, False], np.array([2, 0]), np.array([True, False, False, True]), np.array([1], dtype=np.uint8),
    [np.int64(1)], [torch.tensor(2), torch.tensor(0)], torch.tensor([2, 0, 0]), torch.tensor([-1, 0]),
    torch.tensor([1], dtype=torch.int32),
    torch.tensor([False, True, True, False]), torch.tensor([0, 1, 0, 0], dtype=torch.uint8),
)  # fmt: skip
REPEATED = (1, 3, np.int64(2), torch.tensor(2), torch.tensor([2]), torch.tensor([1, 0, 2, 1]))
REORDERED = (torch.tensor([3, 0, 0, 1]), torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1, 2, 3, 3]))
CROPPED = (0, -3, np.int64(-3), torch.tensor(-3), torch.tensor([-3]))
TAKEN = [
    *(("batch_select_indices", given) for given in SELECTED),
    *(("batch_repeat_interleave", given) for given in REPEATED),
    *(("reorder_cache", given) for given in REORDERED),
    *(("crop", given) for given in CROPPED),
]


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("capacity", [None, 60])
@pytest.mark.parametrize(("verb", "given"), TAKEN, ids=lambda x: repr(x))
def test_arguments_that_a_dynamic_cache_takes(model, verb, given, capacity):
    theirs, ours = pair(model, capacity)
    # DynamicCache reads numbers of one byte as a mask, in arrays too.
    getattr(theirs, verb)(given.astype(int) if isinstance(given, np.ndarray) and given.dtype == np.uint8 else given)
    getattr(ours, verb)(given)
    assert is_same(theirs, ours)
    ours.integrity_check()
    one = getattr(pair(model, capacity)[1].layers[0], verb)
    one(given)


REFUSED = {
    "batch_select_indices": (
        *(1, None, "01", 0.5, [0.5], [4], [-5], [[0, 1]], [], slice(4, None), [True], [False] * 4),
        *(torch.tensor(x) for x in (1, [[0]], [0.0], [True], [1j], [4])),
    ),
    "batch_repeat_interleave": (
        *(0, -1, None, True, 1.5, "2", [1, 2], [0] * 4, [-1, 1, 1, 1]),
        *(torch.tensor(x) for x in (1.5, [1, 2], [-1, 1, 1, 1])),
    ),
    "reorder_cache": (0, None, "0", [0.5], [4], [-1], *(torch.tensor(x) for x in (0, [True] * 4, [0.0], [4]))),
    "crop": (1, None, "1", -1.5, [1], -31, *(torch.tensor(x) for x in (-1.5, [-1, -1]))),
}


@pytest.mark.parametrize(
    ("verb", "given"), [(verb, x) for verb, own in REFUSED.items() for x in own], ids=lambda x: repr(x)
)
def test_arguments_that_are_refused(model, verb, given):
    theirs, ours = pair(model)
    with pytest.raises(ValueError, match=rf"^{verb}: got .*(allowed|but only)"):
        getattr(ours, verb)(given)
    assert is_same(theirs, ours)
    ours.integrity_check()


# Attributes of a cache that Transformers 5.17 to 5.24, PEFT 0.21 and kvpress 0.5 read; TRL and lm-eval read none.
READ = """
activate_past_recording batch_repeat_interleave batch_select_indices batch_size crop early_initialization
get_conv_state get_mask_sizes get_max_cache_shape get_max_length get_query_offset get_recurrent_state
get_seq_length has_previous_state is_compileable is_croppable is_dummy is_initialized is_linear
is_recording_past is_sliding layer_class_to_replicate layers max_batch_size max_cache_len offload offloading
prefetch reorder_cache reset update update_conv_state update_indexer update_recurrent_state
""".split()
# Attributes of its layers that they read.
READ_OF_LAYERS = """
batch_repeat_interleave batch_select_indices crop device get_mask_sizes get_max_length get_seq_length
is_compileable is_croppable is_initialized is_sliding keys lazy_initialization offload prefetch reorder_cache
reset supports_early_init update values
""".split()


class Before:
    def forward(self, hidden_states, past_key_values=None):
        return past_key_values.update(hidden_states, hidden_states, 0)


class Now:
    """Attention of Transformers 5.24, which names its cache anew."""

    def forward(self, hidden_states, cache=None):
        return cache.update(hidden_states, hidden_states, 0)


@pytest.mark.parametrize(("kind", "name"), [(Before, "past_key_values"), (Now, "cache")])
def test_both_names_that_models_have_for_a_cache(kind, name):
    assert with_cache(kind(), "a cache") == {name: "a cache"}
    assert _cached_attention(kind) is kind.forward.__code__


def kind(x):
    """The use of an attribute: a method is called, a tensor or number is computed with."""
    if callable(x):
        return "method"
    return tuple(x.shape) if isinstance(x, torch.Tensor) else type(x)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("capacity", [None, 60])
def test_attributes_that_libraries_read(model, capacity):
    """Each is of the kind that DynamicCache has, and has its value where tokens are counted."""
    theirs, ours = pair(model, capacity)
    for one, other, read in ((theirs, ours, READ), (theirs.layers[0], ours.layers[0], READ_OF_LAYERS)):
        for name in read:
            if hasattr(one, name):
                assert hasattr(other, name), name
                assert kind(getattr(other, name)) == kind(getattr(one, name)) or name == "layer_class_to_replicate"
    assert ours.max_cache_len == (capacity or -1)
    for name in ("is_initialized", "is_sliding", "is_croppable"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_prefix_tuning(caplog):
    """PEFT asks every cache but DynamicCache for its capacity, and passes on a cache of its own: the user is told."""
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    tuned, ids = peft.get_peft_model(build("llama"), config).eval(), prompt(2, 20)
    found = [
        tuned.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=5, do_sample=False
        )
        for cache in (DynamicCache(config=tuned.config), MixedKVCache(tuned, "full"))
    ]
    assert torch.equal(*found)
    assert "prefix tuning puts a DynamicCache" in caplog.text


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="Dynamo of earlier releases wants a plain name")
@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_copies_of_a_model_are_the_users_own(family, attention):
    """While a cache is attached: what is pickled needs no hfkvq, and a copy is as the model was before."""
    model, plain = (build(family, attention=attention) for _ in range(2))
    cache = MixedKVCache(model, "full")
    with torch.no_grad():
        model(prompt(1, 30), past_key_values=cache)
    file = io.BytesIO()
    torch.save(model, file)
    with zipfile.ZipFile(file) as archive:
        assert not any(b"hfkvq" in archive.read(name) for name in archive.namelist())
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.config._attn_implementation == attention
        with torch.no_grad():
            assert torch.equal(other(prompt(1, 30)).logits, plain(prompt(1, 30)).logits)
    assert cache.attached


def test_a_plain_name_where_dynamo_wants_one(monkeypatch):
    """Before PyTorch 2.13; a copy of the model attends as the model does."""
    monkeypatch.setattr(config_switch, "_SUBCLASSES_COMPILE", False)
    model, plain = build("llama"), build("llama")
    cache = MixedKVCache(model, "full")
    with torch.no_grad():
        model(prompt(1, 30), past_key_values=cache)
        assert type(model.config._attn_implementation) is str
        copied = copy.deepcopy(model)
        torch.testing.assert_close(copied(prompt(1, 30)).logits, plain(prompt(1, 30)).logits)
    del cache
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("subclass", [True, False], ids=["subclass of str", "plain name"])
def test_attention_weights_are_given_or_refused(subclass, caplog, monkeypatch):
    """Transformers' own sdpa warns, too, and gives none."""
    monkeypatch.setattr(config_switch, "_SUBCLASSES_COMPILE", subclass)
    warn_once.cache_clear()
    asked = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 3, "do_sample": False}
    eager, ids = build("llama", attention="eager"), prompt(1, 30)
    expected = eager.generate(ids, past_key_values=DynamicCache(config=eager.config), **asked).attentions
    found = eager.generate(ids, past_key_values=MixedKVCache(eager, "full", attach=False), **asked).attentions
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"output_attentions: got True, .* attach=False"):
        eager.generate(ids, past_key_values=MixedKVCache(eager, "full"), **asked)
    plain = build("llama")
    plain.generate(ids, past_key_values=MixedKVCache(plain, "full"), **asked)
    assert "output_attentions: attention over compressed pages gives no weights" in caplog.text


def _of(cache, model):
    """Tensors, by name, that a user may ask of a model and its `generate`."""
    ids, keep = prompt(1, 20), {"past_key_values": cache}
    given = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True} | keep

    def steps(**asked):
        with torch.no_grad():
            return [model(part, **keep, **asked) for part in ids.split([17, 1, 1, 1], 1)]

    def beams(found):
        return [found.sequences, found.sequences_scores, found.beam_indices, *found.scores]

    def checkpointed(train):
        model.gradient_checkpointing_enable()
        model.train(train)
        return steps()

    return {
        "hidden states": lambda: [x.hidden_states for x in steps(output_hidden_states=True)],
        "hidden states of generate": lambda: model.generate(ids, output_hidden_states=True, **given).hidden_states,
        "scores": lambda: (model.generate(ids, output_scores=True, **given).scores,),
        "logits": lambda: (model.generate(ids, output_logits=True, **given).logits,),
        "beams": lambda: beams(model.generate(ids, output_scores=True, num_beams=3, num_return_sequences=2, **given)),
        "tuples": lambda: [x[0] for x in steps(return_dict=False)],
        "use_cache=False": lambda: [x.logits for x in steps(use_cache=False)],
        "loss": lambda: model(ids, labels=ids, **keep).loss.detach(),
        "logits_to_keep": lambda: [x.logits for x in steps(logits_to_keep=torch.tensor([0]))],
        "checkpointing in training": lambda: [x.logits for x in checkpointed(True)],
        "checkpointing": lambda: [x.logits for x in checkpointed(False)],
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("asked", "attention"), [(asked, ("sdpa", "eager")[at % 2]) for at, asked in enumerate(_of(None, None))]
)
def test_what_a_user_asks_of_a_model(asked, attention):
    """Results equal those with DynamicCache, growing and fixed."""
    model = build("llama", attention=attention)
    expected = _of(DynamicCache(config=model.config), model)[asked]()
    for capacity in (None, 60):
        found = _of(MixedKVCache(model, "full", max_cache_len=capacity), model)[asked]()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_a_cache_cannot_give():
    """Gradients through pages, and the whole text in each step: one error that names the remedy."""
    model, ids = build("llama"), prompt(1, 20)
    with pytest.raises(RuntimeError, match=r"no gradient flows .*use_cache=False"):
        model(ids, labels=ids, past_key_values=MixedKVCache(model, "full")).loss.backward()
    with pytest.raises(ValueError, match=r"exceed the capacity of 80; with use_cache=False, .* leave that out"):
        model.generate(
            ids, past_key_values=MixedKVCache(model, "full", max_cache_len=80), use_cache=False, max_new_tokens=9
        )
