"""`use`: what the user's code gives without naming a cache is what it gives with one, and nothing of it stays."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    EncoderDecoderCache,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hfkvq
from hfkvq import KittyCache, MixedKVCache
from hfkvq.caches.base import warn_once
from hfkvq.caches.using import ENTRY
from tests.caches.driver import small
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_generate import MODES

SCHEME = small("kitty-pro")
LENGTH, NEW = 44, 8
OPTIONS = {"max_new_tokens": NEW, "do_sample": False}


def snapshot(model):
    """Everything that a model and its config hold beside weights, by module."""
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    for held in state.values():
        for key, value in held.items():
            held[key] = dict(value) if isinstance(value, dict) else value
    return state, model.config.to_dict(), model.config._attn_implementation_internal, type(model)


@pytest.fixture
def model():
    return copy.deepcopy(build("llama"))


def with_cache(model, ids, **options):
    return model.generate(ids, past_key_values=MixedKVCache(model, SCHEME), **{**OPTIONS, **options})


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("turns", "prefix")])
def test_generate_gives_what_it_gives_with_a_cache(model, mode):
    """In every mode, and from prompts of other numbers and lengths in between; the second is like the first."""
    want, short = MODES[mode](model, lambda: MixedKVCache(model, SCHEME)), prompt(1, 20)
    other, before = with_cache(model, short), snapshot(model)
    with hfkvq.use(model, SCHEME) as used:
        for _ in range(2):
            assert torch.equal(MODES[mode](model, lambda: None), want)
            out = model.generate(short, return_dict_in_generate=True, **OPTIONS)
            assert torch.equal(out.sequences, other)
            assert type(out.past_key_values) is MixedKVCache
            assert out.past_key_values in used.caches
    del out
    assert snapshot(model) == before


@pytest.mark.parametrize("graphs", [True, False])
def test_the_model_is_as_it_was(model, graphs):
    """Also after errors, and while a cache that was returned is alive, which goes on."""
    model.set_attn_implementation("eager")
    before = snapshot(model)
    with hfkvq.use(model, SCHEME, graphs=graphs):
        out = model.generate(prompt(1, LENGTH), return_dict_in_generate=True, **OPTIONS)
        assert model.config._attn_implementation == "hfkvq"
    assert snapshot(model) == before
    again = model.generate(out.sequences, past_key_values=out.past_key_values, **OPTIONS)
    assert again.shape[1] == LENGTH + 2 * NEW
    with pytest.raises(RuntimeError, match="stop"), hfkvq.use(model, SCHEME, graphs=graphs):
        model.generate(prompt(1, LENGTH), stopping_criteria=[stop], **OPTIONS)
    assert snapshot(model) == before
    used = hfkvq.use(model, SCHEME, graphs=graphs)
    used.undo()
    used.undo()
    assert snapshot(model) == before
    with pytest.raises(ValueError, match="use: got a use that was undone"), used:
        pass


def stop(*_):
    raise RuntimeError("stop")


def test_a_cache_of_the_users_keeps_what_it_needs(model):
    before = snapshot(model)
    with hfkvq.use(model, SCHEME):
        own = MixedKVCache(model, "full")
    assert model.config._attn_implementation == "hfkvq"
    assert model._compiled_call_impl is not None
    del own
    assert snapshot(model) == before


def scheme_of(model):
    out = model.generate(prompt(1, 12), max_new_tokens=2, return_dict_in_generate=True)
    cache = out.past_key_values
    return cache.scheme.name if isinstance(cache, MixedKVCache) else type(cache).__name__


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_the_newest_of_several_is_in_effect(model, order):
    """Undone in any order; a method that was there before comes back."""
    made = []
    vars(model)[ENTRY] = lambda *args: (made.append(1), getattr(type(model), ENTRY)(model, *args))
    before = snapshot(model)
    both = [hfkvq.use(model, "kivi-2"), hfkvq.use(model, KittyCache, boost_ratio=0.25)]
    assert scheme_of(model) == "kitty"
    with torch.no_grad():
        assert model(prompt(1, 9), use_cache=True).past_key_values.scheme.boost_ratio == 0.25
    both[order[0]].undo()
    assert scheme_of(model) == ("kivi" if order[0] else "kitty")
    both[order[1]].undo()
    assert scheme_of(model) == "DynamicCache"
    assert len(made) == 3
    assert snapshot(model) == before


def test_what_the_user_passes_prevails(model):
    with hfkvq.use(model, SCHEME):
        for kind, options in (
            ("DynamicCache", {"past_key_values": DynamicCache(config=model.config)}),
            ("StaticCache", {"cache_implementation": "static"}),
            ("DynamicCache", {"cache_implementation": "dynamic"}),
            ("NoneType", {"use_cache": False}),
        ):
            out = model.generate(prompt(1, LENGTH), return_dict_in_generate=True, **OPTIONS, **options)
            assert type(out.past_key_values).__name__ == kind
        with torch.no_grad():
            own = DynamicCache(config=model.config)
            assert model(prompt(1, 9), past_key_values=own, use_cache=True).past_key_values is own


def test_a_compiled_wrapper_stands_for_its_model(model):
    with hfkvq.use(torch.compile(model), SCHEME):
        assert scheme_of(model) == "kitty"
    assert scheme_of(model) == "DynamicCache"


def test_forwards_that_ask_for_a_cache_get_one(model, caplog):
    """Others are left alone, and in training all are."""
    ids = prompt(2, LENGTH)
    with torch.no_grad():
        want = MixedKVCache(model, SCHEME)
        logits = [model(ids, past_key_values=want).logits, model(ids[:, :1], past_key_values=want).logits]
        with hfkvq.use(model, SCHEME):
            out = model(ids, use_cache=True)
            assert torch.equal(out.logits, logits[0])
            assert torch.equal(model(ids[:, :1], past_key_values=out.past_key_values).logits, logits[1])
            assert type(model(ids).past_key_values) is DynamicCache
            assert type(model.train()(ids, use_cache=True).past_key_values) is DynamicCache
            model.eval()
            assert type(model.model(ids, use_cache=True).past_key_values) is DynamicCache
        with hfkvq.use(model.model, SCHEME):
            assert type(model.model(ids, use_cache=True).past_key_values) is MixedKVCache
    warn_once.cache_clear()
    with hfkvq.use(model, SCHEME):
        assert type(model(ids, use_cache=True).past_key_values) is DynamicCache
    assert "call the model within torch.no_grad()" in caplog.text


def test_encoder_decoders_get_both_caches():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "initializer_factor": 3.0}
    tokens = {"vocab_size": 128, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None}
    model, ids = T5ForConditionalGeneration(T5Config(**sizes, **tokens)).eval(), prompt(2, 20)
    both = EncoderDecoderCache(MixedKVCache(model, SCHEME), DynamicCache())
    want, before = model.generate(ids, past_key_values=both, **OPTIONS), snapshot(model)
    with hfkvq.use(model, SCHEME), torch.no_grad():
        assert torch.equal(model.generate(ids, **OPTIONS), want)
        made = model(ids, decoder_input_ids=ids[:, :3], use_cache=True).past_key_values
        assert type(made.self_attention_cache) is MixedKVCache
    assert snapshot(model) == before


def test_drafts_take_tokens_back(model):
    """Also those of the model's own earlier layers, which stay as they are."""
    target, ids = build("llama", seed=2), prompt(1, LENGTH)
    want = target.generate(ids, **OPTIONS)
    with hfkvq.use(model, SCHEME):
        assert torch.equal(target.generate(ids, assistant_model=model, **OPTIONS), want)
    want = model.generate(ids, **OPTIONS)
    with hfkvq.use(model, "full"):
        for _ in range(2):
            assert torch.equal(model.generate(ids, assistant_early_exit=1, **OPTIONS), want)


# peft asks Transformers for names that are on their way out.
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::DeprecationWarning:transformers")
def test_models_within_pefts(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped, ids = peft.get_peft_model(model, config).eval(), prompt(2, LENGTH)
    want, before = with_cache(wrapped, ids), snapshot(wrapped)
    with hfkvq.use(wrapped, SCHEME), torch.no_grad():
        assert torch.equal(wrapped.generate(input_ids=ids, **OPTIONS), want)
        assert type(wrapped(ids, use_cache=True).past_key_values) is MixedKVCache
    assert snapshot(wrapped) == before


def test_threads_have_caches_of_their_own(model):
    prompts = [prompt(1, 20 + 9 * i, seed=i) for i in range(3)]
    want, found = [with_cache(model, ids) for ids in prompts], [None] * len(prompts)

    def run(i):
        found[i] = model.generate(prompts[i], **OPTIONS)

    with hfkvq.use(model, SCHEME) as used:
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
        for act in ("start", "join"):
            for thread in threads:
                getattr(thread, act)()
        assert used.caches == []
    assert all(map(torch.equal, found, want))


@pytest.mark.usefixtures("captured")
def test_a_call_takes_over_the_buffers_of_the_last(model):
    """Without capturing anew; until it is undone."""
    ids, used = prompt(1, LENGTH), hfkvq.use(model, "full")
    want = model.generate(ids, **OPTIONS)
    # Held on to, so that other buffers lie elsewhere.
    held = used.kept
    made, kept = TapeGraph.made, {x.data_ptr() for x in held}
    assert made
    assert kept
    for _ in range(2):
        assert torch.equal(model.generate(ids, **OPTIONS), want)
    assert TapeGraph.made == made
    assert {x.data_ptr() for x in used.kept} == kept
    model.generate(prompt(2, LENGTH), **OPTIONS)
    assert TapeGraph.made > made
    assert not kept & {x.data_ptr() for x in used.kept}
    spare = weakref.ref(used._spare)
    used.undo()
    assert used.kept == []
    assert spare() is None


@pytest.mark.usefixtures("captured")
def test_copies_are_not_in_use_and_nothing_is_kept_alive():
    model = copy.deepcopy(build("llama"))
    used = hfkvq.use(model, SCHEME)
    model.generate(prompt(1, LENGTH), **OPTIONS)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert scheme_of(twin) == "DynamicCache"
        with hfkvq.use(twin, SCHEME):
            assert scheme_of(twin) == scheme_of(model)
        assert scheme_of(twin) == "DynamicCache"
        assert used.model is model
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, twin
        assert gone() is None
    finally:
        gc.enable()
    used.undo()


BAD = {
    "model: got LlamaConfig, allowed a Transformers model": lambda model: (model.config,),
    "model: got NoneType, allowed a Transformers model": lambda model: (None,),
    "allowed a Transformers model, e.g. its .model": lambda model: (type("Pipeline", (), {"model": model})(),),
    "model: got Linear, allowed a Transformers model": lambda model: (torch.nn.Linear(1, 1),),
    # Mamba takes a cache in the newest releases.
    "MambaForCausalLM, which keeps no keys|MambaConfig has no attention layers": lambda _: (
        MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)),
    ),
    "model: got BertForMaskedLM, which keeps no keys": lambda _: (
        BertForMaskedLM(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)),
    ),
    "scheme: got 'nosuch'": lambda model: (model, "nosuch"),
    "boost_ratio: got 9": lambda model: (model, "kitty:boost_ratio=9"),
    "tokenizer: got None": lambda model: (model, hfkvq.TriAxialCache),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_arguments(model, said):
    before = snapshot(model)
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        hfkvq.use(*BAD[said](model))
    assert snapshot(model) == before
    with pytest.raises(ValueError, match="nosuch: neither an option"):
        hfkvq.use(model, SCHEME, nosuch=1)
