"""Captured steps give what steps without graphs give, in every mode of `generate`, and lose nothing when they fail.

On the CPU a stand-in replays a tape of the step's operations: all but the capture itself is what runs on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import weakref

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from hfkvq import MixedKVCache, use
from hfkvq.caches.steps import step_buffer
from hfkvq.caches.steps.step_buffer import StepBuffer
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_generate import FULL, MODES, _generate
from tests.caches.test_static import SCHEMES, padded

pytestmark = pytest.mark.usefixtures("captured")


@pytest.mark.parametrize(("mode", "length"), [*((mode, None) for mode in MODES), ("padding", 200), ("lookup", 200)])
def test_every_mode_of_generate(mode, length):
    model = build("llama")
    expected = MODES[mode](model, lambda: DynamicCache(config=model.config))
    assert torch.equal(MODES[mode](model, lambda: MixedKVCache(model, FULL, max_cache_len=length)), expected)
    assert TapeGraph.made


@pytest.mark.parametrize("name", SCHEMES)
def test_steps_of_every_scheme_are_those_without_graphs(name, monkeypatch):
    """Growing across several homes, with padding: the tokens of an eager cache."""
    # Fewer than by itself, so that fewer steps fill the first home.
    monkeypatch.setattr(step_buffer, "LEAST_HEADROOM", 16)
    # What two layers share they share whatever the scheme. A second one would quantize the last bits of attention over
    # a buffer, which are not those of attention over what has grown, and a code may be another.
    model, (ids, mask) = build("llama", num_hidden_layers=2 if name == "full" else 1), padded(2, 30)
    found = [
        _generate(
            model,
            MixedKVCache(model, SCHEMES[name], graphs=on, headroom=0.01),
            ids,
            attention_mask=mask,
            max_new_tokens=20,
        )
        for on in (True, False)
    ]
    assert torch.equal(*found)
    # The room of the first home is for 16 tokens more; a budget may have been outgrown before there was one.
    assert TapeGraph.made in ((1, 2, 3) if SCHEMES[name].evicts else (2,))


def steps(model, cache, count, ids=None, **kwargs):
    """Logits of a prompt's last token, then of steps of a loop of one's own."""
    out = []
    with torch.no_grad():
        logits = model(prompt(1, 20) if ids is None else ids, past_key_values=cache, **kwargs).logits[:, -1:]
        for _ in range(count):
            out.append(logits)
            found = model(out[-1].argmax(-1), past_key_values=cache)
            assert found.past_key_values is cache
            logits = found.logits
    return torch.cat([*out, logits], 1)


@pytest.mark.parametrize("placed", [True, False])
def test_a_mask_that_hides_more_than_padding_is_honoured(placed):
    """Masks of a step, where no prompt had hidden tokens; without positions, padding alone is hidden."""
    model, (ids, mask) = build("llama"), padded(2, 20)
    found = []
    for cache in (MixedKVCache(model, FULL), DynamicCache(config=model.config)):
        logits, now, at = [], mask, (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, **{"position_ids": at} if placed else {})
            for i in range(9):
                now = torch.cat([now, now.new_ones(2, 1)], 1)
                shown, at = now.clone(), at[:, -1:] + 1
                if i >= 4 and placed:
                    shown[0, 3:5] = 0
                more = {"position_ids": at} if placed else {}
                logits.append(model(ids[:, i : i + 1], attention_mask=shown, past_key_values=cache, **more).logits)
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert not placed or TapeGraph.made == 2


def test_one_capture_serves_a_reset_cache_and_the_next_one():
    model = build("llama")
    cache = MixedKVCache(model, SCHEMES["kitty"])
    expected = steps(model, MixedKVCache(model, SCHEMES["kitty"], graphs=False), 9)
    torch.testing.assert_close(steps(model, cache, 9), expected, rtol=1e-4, atol=1e-4)
    assert TapeGraph.made == 1
    for _ in range(2):
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(steps(model, cache, 9), expected, rtol=1e-4, atol=1e-4)
    # A second cache beside the first one has buffers and graphs of its own.
    other = MixedKVCache(model, SCHEMES["kitty"])
    torch.testing.assert_close(steps(model, other, 9), expected, rtol=1e-4, atol=1e-4)
    assert TapeGraph.made == 2
    token = torch.tensor([[5]])
    with torch.no_grad():
        one, two = (model(token, past_key_values=c).logits for c in (cache, other))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_a_step_that_was_captured_before_is_captured_at_once():
    """By another cache, which has left nothing: no step runs in Python first. With another preset, one does."""
    model = build("llama")
    found = []
    for name in ("full", "full", "kitty", "full"):
        before = TapeGraph.made
        for _ in range(2):
            gc.collect()
            # One step.
            logits = steps(model, MixedKVCache(model, SCHEMES[name]), 1)
            found.append(TapeGraph.made - before)
        expected = steps(model, MixedKVCache(model, SCHEMES[name], graphs=False), 1)
        torch.testing.assert_close(logits, expected)
        steps(model, MixedKVCache(model, SCHEMES[name]), 2)
    assert found == [0, 0, 1, 2, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("kitty", 16),
        ("kitty", 17),
        ("arkv", 16),
        ("tova+saw-int4", 11),
    ],
)
def test_what_the_last_owner_left_pending_is_not_the_next_ones(name, count):
    """A cache for each request, made before the last one goes: it moves into buffers whose last step has sealed."""
    model = build("llama", num_hidden_layers=1)
    for seed in range(2):
        cache = MixedKVCache(model, SCHEMES[name])
        got = _generate(model, cache, prompt(1, 40, seed), max_new_tokens=count)
        assert torch.equal(got, _without_graphs(name, seed)[:, : 40 + count])


@functools.cache
def _without_graphs(name, seed):
    """A prompt, and as many greedy tokens as any case asks for."""
    model = build("llama", num_hidden_layers=1)
    cache = MixedKVCache(model, SCHEMES[name], graphs=False)
    return _generate(model, cache, prompt(1, 40, seed), max_new_tokens=17)


@pytest.mark.parametrize("change", ["data", "parameter", "detach", "sdpa"])
def test_changes_of_the_model_are_noticed(change):
    """Weights that lie elsewhere, and another attention: the graphs of before are not replayed."""
    model = copy.deepcopy(build("llama"))
    cache, plain = MixedKVCache(model, FULL), DynamicCache(config=model.config)
    for each in (cache, plain):
        steps(model, each, 5)
    made = TapeGraph.made
    head = model.lm_head
    if change == "data":
        head.weight.data = head.weight.data * 2
    elif change == "parameter":
        head.weight = torch.nn.Parameter(head.weight.detach() * 2)
    elif change == "detach":
        cache.detach()
    else:
        model.set_attn_implementation("sdpa")
    found = [steps(model, each, 5, prompt(1, 1)) for each in (cache, plain)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert TapeGraph.made == made + (change in ("data", "parameter"))


def test_no_memory_for_buffers(monkeypatch):
    """The step runs as without graphs, and the cache goes on."""
    model = build("llama")
    cache, plain = (MixedKVCache(model, SCHEMES["kitty"], graphs=on) for on in (True, False))
    bind, count = StepBuffer.bind, []

    def full(buffer):
        count.append(buffer)
        if buffer.room and buffer.tensor is None and len(count) % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        bind(buffer)

    with monkeypatch.context() as patch:
        patch.setattr(StepBuffer, "bind", full)
        first = [steps(model, each, 3) for each in (cache, plain)]
    torch.testing.assert_close(*first, rtol=1e-4, atol=1e-4)
    second = [steps(model, each, 5, prompt(1, 30)) for each in (cache, plain)]
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)
    assert TapeGraph.made


def test_a_cache_that_is_gone_keeps_nothing():
    """Without the garbage collector; graphs and buffers go with the last cache of a family."""
    model = build("llama")
    cache = MixedKVCache(model, SCHEMES["arkv"])
    steps(model, cache, 12)
    found = [
        weakref.ref(x) for x in (cache.layers[0], cache.layers[0].buffer.tensor, cache.layers[0].buffer.sync.buffers)
    ]
    gc.disable()
    try:
        del cache
        assert [ref() for ref in found] == [None] * 3
    finally:
        gc.enable()


def test_the_capacity_is_kept():
    model = build("llama")
    cache = MixedKVCache(model, SCHEMES["kitty"], max_cache_len=24)
    with pytest.raises(ValueError, match="exceed the capacity of 24"):
        steps(model, cache, 30)
    assert cache.get_seq_length() == 24
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match="exceed the capacity of 24"):
        steps(model, cache, 1, prompt(1, 1))
    assert torch.equal(cache.layers[0].keys, before)


def reasons(caplog):
    return [r.message for r in caplog.records if "not captured" in r.message]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("hook", "the model has a forward hook"),
        ("grad", "gradients are recorded"),
        ("train", "training mode"),
        ("attentions", "returns attention weights"),
        ("object", "its argument extra is a list"),
        ("capture", "cannot be captured"),
        ("everywhere", "hooks for all modules"),
    ],
)
def test_what_cannot_be_captured_runs_without_and_says_why_once(change, reason, caplog):
    model = copy.deepcopy(build("llama"))
    expected = steps(model, DynamicCache(config=model.config), 12)
    kwargs, handles = {}, []
    if change == "hook":
        handles.append(model.model.layers[1].register_forward_hook(lambda *_: None))
    elif change == "everywhere":
        handles.append(torch.nn.modules.module.register_module_forward_hook(lambda *_: None))
    elif change == "attentions":
        kwargs["output_attentions"] = True
    elif change == "object":
        kwargs["extra"] = [1]
    elif change == "train":
        model.train()
    TapeGraph.failing = change == "capture"
    cache, logits = MixedKVCache(model, FULL), []
    try:
        with caplog.at_level(logging.WARNING), torch.set_grad_enabled(change == "grad"):
            logits.append(model(prompt(1, 20), past_key_values=cache).logits[:, -1:])
            for _ in range(12):
                logits.append(model(logits[-1].argmax(-1), past_key_values=cache, **kwargs).logits)
    finally:
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(torch.cat(logits, 1).detach(), expected, rtol=1e-4, atol=1e-4)
    assert len(reasons(caplog)) == 1
    assert reason in reasons(caplog)[0]
    assert TapeGraph.made == 0
    assert cache.get_seq_length() == 32


def test_a_hook_that_comes_later_is_heard():
    model = copy.deepcopy(build("llama"))
    cache, heard = MixedKVCache(model, FULL), []
    steps(model, cache, 5)
    handle = model.model.layers[0].register_forward_hook(lambda *_: heard.append(1))
    steps(model, cache, 3, prompt(1, 1))
    handle.remove()
    assert len(heard) == 4


@pytest.mark.parametrize("fails", ["first", "replay"])
def test_a_step_that_fails_leaves_the_cache_as_it_was(fails, monkeypatch):
    """In the model, when it runs in Python, or once a replay has written."""
    model = copy.deepcopy(build("llama"))
    cache, plain = (MixedKVCache(model, SCHEMES["kitty"], graphs=on) for on in (True, False))
    steps(model, cache, 0 if fails == "first" else 5)
    steps(model, plain, 0 if fails == "first" else 5)
    owner, name = (model.model.layers[-1].mlp, "forward") if fails == "first" else (TapeGraph, "replay")
    forward = getattr(owner, name)

    def broken(*given):
        forward(*given)
        raise torch.OutOfMemoryError("CUDA out of memory")

    seen = cache.get_seq_length()
    monkeypatch.setattr(owner, name, broken)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(torch.tensor([[3]]), past_key_values=cache)
    monkeypatch.setattr(owner, name, forward)
    assert cache.get_seq_length() == seen
    with torch.no_grad():
        found = [
            torch.cat([model(torch.tensor([[i]]), past_key_values=c).logits for i in range(4)], 1)
            for c in (cache, plain)
        ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_compile_config_leaves_captured_steps_as_they_are():
    model, (ids, mask) = build("llama"), padded(2, 30)
    config, used = CompileConfig(backend=lambda module, inputs: used.append(1) or module.forward, mode=None), []
    config._compile_all_devices = True
    want = _generate(model, MixedKVCache(model, SCHEMES["kitty"], graphs=False), ids, attention_mask=mask)
    cache = MixedKVCache(model, SCHEMES["kitty"], max_cache_len=80)
    assert torch.equal(_generate(model, cache, ids, attention_mask=mask, compile_config=config), want)
    assert TapeGraph.made
    assert not used


def test_a_cache_made_from_a_config_says_what_it_needs(caplog):
    """Its steps run in Python until it is shown the model."""
    model = build("llama")
    cache, want = MixedKVCache(model.config, FULL), steps(model, DynamicCache(config=model.config), 5)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(steps(model, cache, 5), want, rtol=1e-4, atol=1e-4)
    assert (
        "so steps are not captured; make it with MixedKVCache(model, ...), or call cache.attach(model)" in caplog.text
    )
    assert not TapeGraph.made
    cache.reset()
    cache.attach(model)
    torch.testing.assert_close(steps(model, cache, 5), want, rtol=1e-4, atol=1e-4)
    assert TapeGraph.made
    with pytest.raises(ValueError, match=r"model: got a LlamaForCausalLM of another config"):
        cache.attach(build("llama", num_hidden_layers=3))


def test_a_drafts_steps_are_captured_where_it_is_asked_for():
    """Within the context alone; tokens are those of the model without a draft."""
    model, draft, made = build("llama"), copy.deepcopy(build("llama", seed=1)), []
    want = model.generate(prompt(1, 30), max_new_tokens=12, do_sample=False)
    for context in (contextlib.nullcontext, lambda: use(draft, "full"), contextlib.nullcontext):
        before, cache = TapeGraph.made, MixedKVCache(model, FULL)
        with context():
            found = _generate(model, cache, prompt(1, 30), max_new_tokens=12, assistant_model=draft)
        assert torch.equal(found, want)
        made.append(TapeGraph.made - before)
    assert made[1] > made[0] >= made[2]


@pytest.mark.parametrize("value", ["0", "off"])
def test_the_environment_switches_off(value, monkeypatch):
    monkeypatch.setenv("HFKVQ_GRAPHS", value)
    model = build("llama")
    assert MixedKVCache(model).graphs is None
    assert MixedKVCache(model, graphs=True).graphs is not None
    monkeypatch.setenv("HFKVQ_GRAPHS", "perhaps")
    with pytest.raises(ValueError, match="HFKVQ_GRAPHS: got 'perhaps'"):
        MixedKVCache(model)


@pytest.mark.parametrize(("name", "value"), [("graphs", 1), ("headroom", -1), ("headroom", True), ("headroom", "much")])
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"{name}: got"):
        MixedKVCache(build("llama").config, **{name: value})


def test_models_are_not_kept_and_can_be_copied():
    model = copy.deepcopy(build("llama"))
    cache = MixedKVCache(model, FULL)
    want = steps(model, cache, 5)
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None
    cache.reset()
    torch.testing.assert_close(steps(twin, cache, 5), want, rtol=1e-4, atol=1e-4)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_model_that_its_user_compiled_stays_so():
    model = copy.deepcopy(build("llama"))
    model._compiled_call_impl = model._call_impl
    want = steps(model, DynamicCache(config=model.config), 5)
    torch.testing.assert_close(steps(model, MixedKVCache(model, FULL), 5), want, rtol=1e-4, atol=1e-4)
    assert TapeGraph.made == 0
