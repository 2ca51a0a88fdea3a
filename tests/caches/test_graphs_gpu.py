"""Steps from CUDA graphs: those of eager steps, in every mode of `generate`, on streams and threads of their own."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import threading

import pytest
import torch
from rich.console import Console
from torch._dynamo.utils import counters
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hfkvq
from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import base
from hfkvq.caches.base import capture
from tests.caches import models, test_generate, test_sliding
from tests.caches.driver import distinct
from tests.caches.test_generate import MODES
from tests.caches.test_hybrids import model_of, states

pytestmark = pytest.mark.gpu

PROMPT, PAD = 600, 37
CAPTURED = [name for name in distinct() if get_scheme(name).limits(128, 128).captured is None]
# The second layer of two as these presets have one of thirty.
CAPTURED += ["best-2.5:wide_keys_to=1.0:wide_to=1.0"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=512,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


@pytest.fixture(autouse=True)
def unfused(monkeypatch):
    """Steps launch what steps in Python launch, to the bit: fused modules are those of `test_fused_modules`."""
    monkeypatch.setenv("HFKVQ_FUSION", "0")


@pytest.fixture
def made(monkeypatch):
    """How many graphs are captured."""
    count = []

    class Counted(capture.CapturedGraph):
        def __init__(self, *args):
            super().__init__(*args)
            count.append(self)

    monkeypatch.setitem(capture.RECORDERS, "cuda", Counted)
    base.warn_once.cache_clear()
    return count


def scheme_of(name):
    return get_scheme(name, budget_tokens=500) if name.startswith("arkv") else get_scheme(name)


def prompt(rows=2, length=PROMPT, seed=1):
    return torch.randint(1, 512, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


def steps(model, cache, count, strict=False, forward=None):
    """Greedy tokens after a left-padded prompt; no step from the tenth on may wait for the device if ``strict``."""
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[1, :PAD] = 0
    place, found = torch.tensor([[PROMPT], [PROMPT - PAD]], device="cuda"), []
    with torch.no_grad():
        token = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1:].argmax(-1)
        try:
            for i in range(count):
                if forward is not None:
                    cache.between_steps()
                own = forward or model
                token = own(input_ids=token, position_ids=place + i, past_key_values=cache).logits[:, -1:].argmax(-1)
                # Outputs of a compiled graph are overwritten by its next replay.
                found.append(token := token.clone())
                if i == 10:
                    torch.cuda.set_sync_debug_mode("error" if strict else "default")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return torch.cat(found, 1)


@pytest.mark.parametrize("whose", ["ours", "PyTorch's"])
@pytest.mark.parametrize("name", CAPTURED)
def test_fixed_capacity(model, name, whose, made):
    """One graph, whose steps are the same kernels over buffers of the same shape: tokens are those of eager steps."""
    torch._dynamo.reset()
    counters.clear()
    ours, scheme = whose == "ours", get_scheme(name)
    caches = [MixedKVCache(model, scheme_of(name), max_cache_len=PROMPT + 308, graphs=on) for on in (ours, False)]
    compiled = None if ours else torch.compile(model.forward, backend="cudagraphs", fullgraph=True)
    # A trim asks the device, once in hundreds of steps.
    got = steps(model, caches[0], 300, not scheme.evicts or scheme.interval is None, compiled)
    assert (len(made) if ours else counters["stats"]["unique_graphs"]) == 1
    expected = steps(model, caches[1], 300, forward=None if ours else model.forward)
    assert torch.equal(got, expected)
    assert expected.unique().numel() > 8
    assert caches[0].get_seq_length() == PROMPT + 300


@pytest.mark.parametrize("name", CAPTURED)
def test_growing(model, name, made):
    """The same tokens into a cache with graphs and one without: logits differ by rounding, in other splits of pages."""
    caches, count = [MixedKVCache(model, scheme_of(name), graphs=on) for on in (True, False)], 260
    ids = torch.cat([prompt(), prompt(2, count, seed=2)], 1)
    both = [test_sliding.logits_of(model, cache, [PROMPT, *[1] * count], ids)[:, PROMPT:] for cache in caches]
    got, expected = (x.float().log_softmax(-1) for x in both)
    captures = len(made)
    divergence = (expected.exp() * (expected - got)).sum(-1)
    assert divergence.mean() < 2e-3
    assert divergence[:, -50:].mean() < 4e-3
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
    assert [cache.get_seq_length() for cache in caches] == [PROMPT + count] * 2
    # Five in a thousand tokens.
    assert 1 <= captures <= 2 + 5 * count / 1000
    held = [cache.memory().total for cache in caches]
    # Where there is a budget, a quarter ahead is of 16-bit tokens, which wait for the next trim.
    ahead = 2 * 0.25 * (PROMPT + count) * 2 * 2 * 2 * 128 * 2 if name.startswith("arkv") else 0
    assert held[0] < 1.1 * held[1] + ahead + 2**19


# Mamba and attention in one layer; shared attention with Mamba of the second kind; Mamba of the first; delta rule.
RECURRENT = ("falcon_h1", "zamba2", "jamba", "qwen3_next")
# In other dtypes than bf16, Transformers asks the host where its experts' tokens are.
EXPERTS = ("gpt-oss", "jamba", "qwen3_next")


@pytest.mark.parametrize(
    ("family", "scheme"),
    [*itertools.product(test_sliding.FAMILIES, ("full", "saw-int4")), *((each, "saw-int4") for each in RECURRENT)],
)
def test_families(family, scheme, monkeypatch):
    """Windows beyond their rings, and recurrent states, which a graph reads and writes where they lie."""
    monkeypatch.setenv("HFKVQ_FUSION", "1")
    made = models.build(family) if family in models.FAMILIES else copy.deepcopy(model_of(family))
    model, near = made.to("cuda", torch.bfloat16 if family in EXPERTS else None), 0.05 if family in EXPERTS else 1e-3
    scheme = test_sliding.FULL if scheme == "full" else test_sliding.COMPRESSED[scheme]
    caches = [MixedKVCache(model, scheme, graphs=on) for on in (True, False)]
    ids = models.prompt(2, 290).cuda() % 100
    both = [test_sliding.logits_of(model, cache, [150, *[1] * 140], ids) for cache in caches]
    assert caches[0].graphs.sync.buffers.recordings
    held = [[x for layer in states(cache) for x in layer] for cache in caches]
    # Rounding goes from step to step through the states.
    for mine, theirs in ((both[0], both[1]), *zip(*held, strict=True)):
        assert (mine - theirs).float().norm() < near * theirs.float().norm()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [None, 200])
def test_modes_of_generate(mode, length, made, monkeypatch):
    """In float32, where the lossless scheme is DynamicCache."""
    model = models.build("llama").cuda()
    monkeypatch.setattr(test_generate, "prompt", lambda *args, **kwargs: models.prompt(*args, **kwargs).cuda())
    monkeypatch.setattr(test_generate, "build", lambda *args, **kwargs: models.build(*args, **kwargs).cuda())
    expected = MODES[mode](model, lambda: DynamicCache(config=model.config))
    got = MODES[mode](model, lambda: MixedKVCache(model, test_generate.FULL, max_cache_len=length))
    assert torch.equal(got, expected)
    assert made


def test_fused_steps_ask_the_host_nothing(model, made, monkeypatch):
    monkeypatch.setenv("HFKVQ_FUSION", "1")
    steps(model, MixedKVCache(model, max_cache_len=PROMPT + 40), 30, strict=True)
    assert len(made) == 1


class Asks(torch.nn.Module):
    """Asks the host in its forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        return out if bool(out.isfinite().all()) else out * 0


def test_a_forward_that_asks_the_host(model, made, caplog):
    """It runs eagerly after two tries, which leave streams, generators and memory as they were."""
    model = copy.deepcopy(model)
    model.model.layers[1].mlp = Asks(model.model.layers[1].mlp)
    ids = prompt(1, 50)
    torch.manual_seed(3)
    want = model.generate(
        ids, past_key_values=MixedKVCache(model, graphs=False), max_new_tokens=30, do_sample=True, top_k=3
    )
    torch.manual_seed(3)
    cache = MixedKVCache(model)
    got = model.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=True, top_k=3)
    assert torch.equal(got, want)
    assert not made
    assert sum("cannot be captured" in record.message for record in caplog.records) == 1
    assert cache.get_seq_length() == 79
    other = MixedKVCache(model, "saw-int4")
    model.model.layers[1].mlp = model.model.layers[1].mlp.inner
    model.generate(ids, past_key_values=other, max_new_tokens=10, do_sample=True)
    assert len(made) == 1


def test_streams_and_threads(model, made):
    """Each with its own cache."""
    want = [steps(model, MixedKVCache(model, name, graphs=False), 40) for name in ("full", "kitty-pro")]
    found = {}

    def run(name):
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(3):
                found[name, i] = steps(model, MixedKVCache(model, name), 40)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("full", "kitty-pro")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, expected in zip(("full", "kitty-pro"), want, strict=True):
        for i in range(3):
            assert (found[name, i] == expected).float().mean() > 0.8, name
            assert torch.equal(found[name, i], found[name, 0])


def test_memory_comes_back(model):
    """With the cache, without the garbage collector; and a growing cache holds no more than one without graphs."""
    peaks = []
    for on in (False, True, False, True):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gc.disable()
        try:
            cache = MixedKVCache(model, "kitty-pro", graphs=on)
            with torch.no_grad():
                model(prompt(4, 3000), past_key_values=cache, logits_to_keep=1)
                torch.cuda.reset_peak_memory_stats()
                for _ in range(900):
                    model(prompt(4, 1), past_key_values=cache)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del cache
            # A workspace of cuBLAS stays for each stream it has seen, that of the capture too.
            held = torch.cuda.memory_allocated()
            torch._C._cuda_clearCublasWorkspaces()
            assert torch.cuda.memory_allocated() <= before + 2**20
            peaks[-1] -= held - torch.cuda.memory_allocated()
        finally:
            gc.enable()
    assert peaks[3] <= 1.1 * peaks[2] + 2**22


def test_a_model_in_use_captures_once_and_frees_what_it_kept(model, made):
    """Calls one after another, watched; undone, no byte more is held than before."""
    ids, before = prompt(1), []
    options = {"max_new_tokens": 40, "do_sample": False}
    want = model.generate(ids, past_key_values=MixedKVCache(model, "best-3.4"), **options)
    made.clear()
    for _ in range(2):
        gc.collect()
        before.append(torch.cuda.memory_allocated())
        with hfkvq.use(model, "best-3.4") as used, hfkvq.watch(used, Console(file=io.StringIO())) as moments:
            for _ in range(4):
                assert torch.equal(model.generate(ids, **options), want)
            assert used.kept
            assert torch.cuda.memory_allocated() > before[-1]
        assert moments
        # The second use begins without the buffers of the first.
        assert len(made) == len(before)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before[-1] + 2**20
