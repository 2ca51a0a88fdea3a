"""The backend for vLLM: batches over random block tables, tokens of `generate`, and refusals; vLLM is stood in for."""

import contextlib
import importlib
import itertools
import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface

import hfkvq.vllm
from hfkvq import MixedKVCache, get_scheme, kernels
from hfkvq.kernels import use_interpreter
from hfkvq.vllm import smoothing, windows
from tests.caches.models import build
from tests.vllm.stand_in import Spec, install

HEADS, QUERY_HEADS, DIM, BLOCKS = 2, 4, 64, 24
LAYER = "model.layers.1.self_attn.attn"
SCHEMES = ["saw-int4", "saw-int4-kv", "int4"]
WHOLE = ["kitty-pro", "best-4.3", "best-3.4", "best-2.5", "trellis-2.5", "best-2.0", "best-1.5", "kvarn-k4v2"]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def backend(monkeypatch):
    """The module, with nothing set; vLLM is stood in for."""
    install(monkeypatch)
    return load(monkeypatch)


@pytest.fixture
def real(monkeypatch):
    """The module on a GPU, with vLLM's own classes."""
    pytest.importorskip("vllm")
    monkeypatch.delitem(sys.modules, "hfkvq.vllm.backend", raising=False)
    module = load(monkeypatch)
    # A process of one rank, which has no groups.
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    # Kernels are compiled when they are launched.
    monkeypatch.setattr(module, "compile_prompts", lambda *_: None)
    return module


@pytest.fixture(params=["stand-in", pytest.param("vllm", marks=pytest.mark.gpu)])
def either(request):
    """Both, in turn."""
    return request.getfixturevalue("backend" if request.param == "stand-in" else "real")


def load(monkeypatch):
    monkeypatch.delenv("HFKVQ_SMOOTHING", raising=False)
    monkeypatch.setenv("HFKVQ_SCHEME", "saw-int4")
    return importlib.import_module("hfkvq.vllm.backend")


def config_of(dtype=torch.float32, **text):
    text = SimpleNamespace(**{"num_hidden_layers": 2, "model_type": "llama"} | text)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, max_model_len=1024, dtype=dtype),
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2], static_forward_context={}),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, use_ubatching=False, decode_context_parallel_size=1
        ),
    )


class Engine:
    """Blocks of one layer, handed out at random, and its batches: on a GPU where vLLM is not stood in for."""

    def __init__(self, backend, monkeypatch, heads=HEADS, query_heads=QUERY_HEADS, dim=DIM, **text):
        self.told = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        self.device, self.dtype = (CPU, torch.float32) if self.told is SimpleNamespace else (GPU, torch.bfloat16)
        config = config_of(self.dtype, **text)
        config.model_config.get_num_attention_heads = lambda parallel: query_heads
        monkeypatch.setattr(backend, "get_current_vllm_config", lambda: config)
        self.heads, self.query_heads, self.dim = heads, query_heads, dim
        self.impl = backend.Attention(query_heads, dim, dim**-0.5, heads)
        spec = self.spec_of(config, backend.FullAttentionSpec)
        shape = backend.Backend.get_kv_cache_shape(BLOCKS, 128, heads, dim)
        self.cache = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.uint8, device=self.device).view(shape)
        self.builder = backend.Builder(spec, [LAYER], config, self.device)
        self.free = (torch.randperm(BLOCKS - 1) + 1).tolist()
        self.blocks, self.held, self.history = {}, {}, {}
        # Requests whose first page is read from the blocks.
        self.strangers = set()

    def spec_of(self, config, kind):
        """What vLLM is told of the layer's blocks, after weights are loaded."""
        layer = SimpleNamespace(impl=self.impl)
        own = {"block_size": 128, "num_kv_heads": self.heads, "head_size": self.dim, "dtype": torch.uint8}
        layer.get_kv_cache_spec = lambda _: kind(**own)
        config.compilation_config.static_forward_context[LAYER] = layer
        self.impl.process_weights_after_loading(self.dtype)
        return layer.get_kv_cache_spec(config)

    def batch(self, starts, known, table, tokens):
        """Metadata of requests, from tensors of the CPU, whose tokens begin at these places."""
        counts = [end - start for start, end in itertools.pairwise(starts)]
        begins = torch.tensor(starts, dtype=torch.int32)
        return self.told(
            query_start_loc=begins.to(self.device), query_start_loc_cpu=begins, seq_lens=known.to(self.device),
            seq_lens_cpu_upper_bound=known, num_reqs=len(known), num_actual_tokens=tokens,
            max_query_len=max(counts), max_seq_len=1024, block_table_tensor=table.to(self.device),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=self.device),
        )  # fmt: skip

    def forward(self, query, key, value, batch, name=LAYER):
        """Attention (n, Hq * D) of a batch's tokens."""
        out = torch.full((len(query), self.query_heads * self.dim), torch.nan, dtype=self.dtype, device=self.device)
        layer = SimpleNamespace(layer_name=name)
        self.impl.forward(layer, query, key, value, self.cache, self.builder.build(0, batch), out)
        return out

    def run(self, counts, query, key, value, padded=0):
        """Attention of new tokens, how many by request, and what it should be from dequantized pages."""
        starts = [0, *itertools.accumulate(counts.values())]
        lengths = [self.held.get(name, 0) + count for name, count in counts.items()]
        table = torch.zeros(len(counts) + padded, 8, dtype=torch.int32)
        for i, (name, length) in enumerate(zip(counts, lengths, strict=True)):
            own = self.blocks.setdefault(name, [])
            own += [self.free.pop() for _ in range(math.ceil(length / 128) - len(own))]
            table[i, : len(own)] = torch.tensor(own)
        known = torch.tensor(lengths + [0] * padded, dtype=torch.int32)
        batch = self.batch(starts + starts[-1:] * padded, known, table, len(query))
        given = [x.to(self.device, self.dtype) for x in (query, key, value)]
        out = self.forward(*given, batch).float().cpu()
        query, key, value = (x.float().cpu() for x in given)
        # Blocks hold what is stored in this batch, too.
        expected = self.expected(counts, starts, query, key, value, table)
        self.held |= dict(zip(counts, lengths, strict=True))
        for i, name in enumerate(counts):
            before = self.history.get(name, (key[:0], value[:0]))
            own = slice(starts[i], starts[i + 1])
            self.history[name] = [torch.cat([x, y[own]]) for x, y in zip(before, (key, value), strict=True)]
        return out.view(-1, self.query_heads, self.dim), expected

    def before(self, at, name, table, held):
        """Keys or values that a request attends to: its first page and the one that is being filled as they were."""
        stored, start = self.dense(at, table, held), held // 128 * 128
        if isinstance(self.impl._pages, windows.WindowPages):
            stored[start:] = self.history[name][at][start:]
            if name not in self.strangers:
                stored[:128] = self.history[name][at][:128]
        return stored

    def dense(self, at, table, tokens):
        """Keys or values (tokens, H, D) of a request's blocks, from the bytes, by plain PyTorch."""
        own = self.impl._pages
        fmt, side = own.form.runs[0][at], ("keys", "values")[at]
        ids = table[: math.ceil(tokens / 128)].long()
        parts = [part.cpu()[ids] for part in own.parts[at]]
        found = kernels.dequantize_pages(parts, fmt, side, self.dim).float()
        rotation = own.form.rotate_values if at else own.form.rotate_keys
        return kernels.hadamard(found.transpose(1, 2).flatten(0, 1)[:tokens], rotation)

    def expected(self, counts, starts, query, key, value, table):
        found, share = [], self.query_heads // self.heads
        for i, (name, count) in enumerate(counts.items()):
            own, held = slice(starts[i], starts[i + 1]), self.held.get(name, 0)
            before = [self.before(at, name, table[i], held) for at in (0, 1)] if held else [key[:0], value[:0]]
            keys, values = (torch.cat([x, y[own]]) for x, y in zip(before, (key, value), strict=True))
            keys, values = (x.repeat_interleave(share, 1) for x in (keys, values))
            logits = torch.einsum("qhd,khd->hqk", query[own], keys) * self.dim**-0.5
            unseen = torch.arange(len(keys)) > torch.arange(held, held + count)[:, None]
            found.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(unseen, -torch.inf).softmax(-1), values))
        return torch.cat(found)

    def random(self, counts, **given):
        n = sum(counts.values())
        shapes = (self.query_heads, self.heads, self.heads)
        # Parts of one projection, as vLLM hands them on.
        whole = torch.randn(n + given.get("padded", 0), sum(shapes) * self.dim)
        query, key, value = (
            x.unflatten(1, (-1, self.dim)) for x in whole.split([heads * self.dim for heads in shapes], 1)
        )
        return self.run(counts, query, key, value, **given)


KINDS = {
    "steps": ({"a": 31, "b": 39}, {"a": 1, "b": 1}),
    "prompts": ({}, {"a": 31, "b": 140}),
    "chunks": ({"a": 24, "b": 32}, {"a": 8, "b": 8}),
    "steps and chunks": ({"a": 31, "b": 39, "c": 43, "d": 51}, {"a": 1, "b": 1, "c": 5, "d": 5}),
    "long steps": ({"a": 127, "b": 128, "c": 255, "d": 300}, dict.fromkeys("abcd", 1)),
    "long chunks": ({"a": 240, "b": 112, "c": 120}, {"a": 16, "b": 16, "c": 16}),
    "long steps and chunks": ({"a": 127, "b": 256, "c": 121, "d": 260}, {"a": 1, "b": 1, "c": 7, "d": 7}),
    "one step": ({"a": 129}, {"a": 1}),
    "one chunk": ({"a": 65}, {"a": 64}),
    "one prompt": ({}, {"a": 257}),
    "chunks and prompts": ({"a": 128, "c": 5}, {"a": 3, "b": 20, "c": 130, "d": 131}),
    "everything": ({"a": 128, "b": 1, "d": 130}, {"a": 1, "b": 1, "e": 1, "c": 2, "d": 9, "f": 40}),
    "first tokens": ({}, {"a": 1, "b": 1}),
}


def assert_near(engine, out, expected):
    """Float32 to rounding; bf16 by the norm of what differs."""
    if engine.device == CPU:
        torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)
    else:
        assert (out - expected).norm() < 0.004 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES + WHOLE)
def test_batches_attend_to_what_blocks_hold(either, monkeypatch, scheme, kind):
    monkeypatch.setenv("HFKVQ_SCHEME", scheme)
    engine = Engine(either, monkeypatch)
    before, counts = KINDS[kind]
    if before:
        engine.random(before)
    assert_near(engine, *engine.random(counts))


class Replays(Engine):
    """Steps of up to four requests in a captured graph, as vLLM's runner has them."""

    def capture(self):
        """From now on `forward` replays."""
        table, rows = torch.zeros(4, 8, dtype=torch.int32), [self.query_heads, self.heads, self.heads]
        self.held_batch = self.batch(range(5), torch.zeros(4, dtype=torch.int32), table, 4)
        self.inputs = [torch.zeros(4, heads, self.dim, dtype=self.dtype, device=self.device) for heads in rows]
        self.graph = torch.cuda.CUDAGraph()
        for wait in (contextlib.nullcontext(), torch.cuda.graph(self.graph)):
            made = self.builder.build_for_cudagraph_capture(self.held_batch)
            self.out = torch.zeros(4, self.query_heads * self.dim, dtype=self.dtype, device=self.device)
            with wait:
                self.impl.forward(SimpleNamespace(layer_name=LAYER), *self.inputs, self.cache, made, self.out)
            torch.cuda.synchronize()

    def forward(self, query, key, value, batch):
        if not hasattr(self, "graph"):
            return super().forward(query, key, value, batch)
        self.builder.build(0, batch)
        for held, new in (
            *zip(self.inputs, (query, key, value), strict=True),
            (self.held_batch.seq_lens, batch.seq_lens),
            (self.held_batch.block_table_tensor, batch.block_table_tensor),
        ):
            held.zero_()
            held[: len(new)] = new
        self.graph.replay()
        return self.out[: len(query)].clone()


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES + WHOLE)
def test_captured_steps_attend_to_what_blocks_hold(real, monkeypatch, scheme):
    """More steps than a page has tokens; requests wait, and one begins with its first token."""
    monkeypatch.setenv("HFKVQ_SCHEME", scheme)
    engine, rng = Replays(real, monkeypatch), random.Random(0)
    engine.random({"a": 100, "b": 127, "c": 300})
    engine.capture()
    for _ in range(170):
        names = sorted(rng.sample("abcd", rng.choice([2, 3, 4, 4])))
        assert_near(engine, *engine.random(dict.fromkeys(names, 1)))


@pytest.mark.parametrize("kind", ["steps and chunks", "everything"])
@pytest.mark.parametrize("scheme", ["saw-int4", "best-4.3", "best-2.5"])
def test_kernels_attend_as_the_reference_does(backend, monkeypatch, scheme, kind):
    monkeypatch.setenv("HFKVQ_SCHEME", scheme)
    engine = Engine(backend, monkeypatch)
    before, counts = KINDS[kind]
    with use_interpreter():
        engine.random(before)
        out, expected = engine.random(counts)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_padding_writes_nothing_and_requests_share_blocks(backend, monkeypatch):
    engine = Engine(backend, monkeypatch)
    engine.random({"a": 130})
    before = engine.cache.clone()
    out, expected = engine.random({"a": 1}, padded=3)
    torch.testing.assert_close(out[:1], expected, atol=2e-5, rtol=2e-5)
    assert out.isfinite().all()
    # One token of keys and of values: codes, a scale and a minimum each.
    assert (engine.cache != before).sum() <= HEADS * (DIM + 8)
    # A request whose first block is another's.
    engine.blocks["b"], engine.held["b"] = [engine.blocks["a"][0]], 128
    out, expected = engine.random({"a": 1, "b": 9})
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_a_request_attends_to_what_another_stores_in_the_same_batch(backend, monkeypatch):
    """Blocks are shared from the moment that they are handed out: a prompt's, and one that a step fills."""
    engine = Engine(backend, monkeypatch)
    engine.random({"a": 127})
    shared = [engine.blocks["a"][0], engine.free[-1]]
    engine.blocks |= {"s": shared[:1], "b": shared[:1], "c": shared[1:], "d": shared[1:]}
    engine.held |= {"s": 128, "b": 128, "c": 128}
    engine.free.pop()
    # Request d stores the block of c, and a fills that of s and b.
    out, expected = engine.random({"a": 1, "s": 1, "b": 5, "c": 9, "d": 128})
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("scheme", WHOLE)
def test_pages_do_not_depend_on_batches(backend, monkeypatch, scheme):
    """Full blocks have the bytes of all tokens at once, whoever else is in a batch: so requests can share them."""
    monkeypatch.setenv("HFKVQ_SCHEME", scheme)
    parts, whole = Engine(backend, monkeypatch), Engine(backend, monkeypatch)
    given = [torch.randn(390, heads, DIM) for heads in (QUERY_HEADS, HEADS, HEADS)]
    parts.free, at = [5, 9, 2, 7, 11, 12, 13, 14], 0
    for number, count in enumerate((3, 1, 120, 1, 1, 1, 1, 1, 20, 106, 1, 1, 130, 3)):
        # Another request's steps beside it.
        own = [torch.cat([x[at : at + count], torch.randn(1, *x.shape[1:])]) for x in given]
        counts = {"a": count, "b": 1}
        if count > 1 and number:
            own, counts = [x.roll(1, 0) for x in own], {"b": 1, "a": count}
        if number:
            parts.run(counts, *own)
        else:
            parts.run({"a": count}, *(x[at : at + count] for x in given))
        at += count
    assert at == 390
    whole.free = [3, 4, 6, 8]
    whole.run({"a": 390}, *given)
    for own, other in zip(parts.impl._pages.parts, whole.impl._pages.parts, strict=True):
        for x, y in zip(own, other, strict=True):
            assert torch.equal(x[parts.blocks["a"][:3]], y[whole.blocks["a"][:3]])


@pytest.mark.parametrize(("scheme", "kernels"), [("kitty-pro", False), ("best-2.5", False), ("best-2.5", True)])
def test_prefixes_are_shared(backend, monkeypatch, scheme, kernels):
    """A request with another's blocks takes its first page from that one's slot, or from its page."""
    monkeypatch.setenv("HFKVQ_SCHEME", scheme)
    engine = Engine(backend, monkeypatch)
    with use_interpreter() if kernels else contextlib.nullcontext():
        share_prefixes(engine)


def share_prefixes(engine):
    engine.random({"a": 300})

    def join(name, count, stranger):
        engine.blocks[name], engine.held[name] = engine.blocks["a"][: count // 128], count
        engine.history[name] = [x[:count] for x in engine.history["a"]]
        engine.strangers |= {name} if stranger else set()

    # One that has the first page only, one with two and a single new token, beside the one that stored them.
    join("b", 128, False), join("c", 256, False)
    for _ in range(2):
        out, expected = engine.random({"a": 1, "c": 1, "b": 9})
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    # All slots are others' now, so the first page is read.
    for name in "efghijkl":
        engine.random({name: 3})
    join("d", 256, True)
    for counts in ({"d": 1}, {"d": 140}, {"d": 1}):
        out, expected = engine.random(counts)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("together", [32768, 700, 1])
@pytest.mark.parametrize("scheme", ["saw-int4", "kitty-pro", "best-2.5", "kvarn-k4v2"])
def test_requests_behind_prefixes_attend_together(backend, monkeypatch, scheme, together):
    """Prefix hits, chunks that begin in a page, prompts and steps in one batch: what is held is gathered at once."""
    monkeypatch.setenv("HFKVQ_SCHEME", scheme)
    monkeypatch.setattr("hfkvq.vllm.pages.TOGETHER", together)
    engine = Engine(backend, monkeypatch)
    engine.random({"a": 300, "b": 130, "c": 260})
    for name in ("p", "q"):
        engine.blocks[name], engine.held[name] = engine.blocks["a"][:2], 256
        engine.history[name] = [x[:256] for x in engine.history["a"]]
    gathered, gather = [], backend.kernels.gather_requests
    monkeypatch.setattr(backend.kernels, "gather_requests", lambda *given: gathered.append(given[6]) or gather(*given))
    # A chunk that fills two pages, one that fills a page to its end, one that does not; two hits, and a prompt.
    for counts in (
        {"c": 1, "a": 180, "p": 70, "b": 3, "n": 140, "q": 128},
        {"a": 1, "b": 123, "p": 2, "n": 116, "q": 9},
    ):
        out, expected = engine.random(counts)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        several = [count for name, count in counts.items() if count > 1]
        totals = [engine.held[name] for name, count in counts.items() if count > 1]
        if together == 32768:
            assert gathered == [sum(totals)]
        else:
            assert 1 < len(gathered) <= len(several)
            assert max(gathered) <= max(together, *totals)
        gathered.clear()
    for counts in ({"a": 1, "b": 1, "p": 1, "n": 1, "q": 1},):
        out, expected = engine.random(counts)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_a_request_shares_what_others_fill_in_the_same_batch(backend, monkeypatch):
    monkeypatch.setenv("HFKVQ_SCHEME", "best-2.5")
    engine = Engine(backend, monkeypatch)
    engine.random({"a": 127, "s": 130})
    for name, of in (("b", "a"), ("c", "d")):
        if of == "d":
            engine.blocks["d"] = [engine.free.pop()]
        engine.blocks[name], engine.held[name] = engine.blocks[of][:1], 128
    given = [torch.randn(1 + 1 + 5 + 9 + 128, heads, DIM) for heads in (QUERY_HEADS, HEADS, HEADS)]
    # Tokens of a and of d are those that b and c have.
    engine.history["b"] = [torch.cat([x, y[:1]]) for x, y in zip(engine.history["a"], given[1:], strict=True)]
    engine.history["c"] = [x[-128:] for x in given[1:]]
    out, expected = engine.run({"a": 1, "s": 1, "b": 5, "c": 9, "d": 128}, *given)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_slots_outlive_strangers(either, monkeypatch):
    """Requests come and go, and wait: those that run keep what they have in 16 bits; who loses it stops the engine."""
    monkeypatch.setenv("HFKVQ_SCHEME", "best-2.5")
    engine = Engine(either, monkeypatch)
    rng = random.Random(0)
    live = []
    for number in range(30):
        while len(live) < 8 and rng.random() < 0.7:
            live.append(f"{number}-{len(live)}")
        counts = {name: 1 if name in engine.held else rng.randrange(1, 150) for name in live}
        counts = dict(sorted(counts.items(), key=lambda x: x[1] > 1))
        if counts:
            assert_near(engine, *engine.random(counts))
        for name in [name for name in live if rng.random() < 0.2]:
            live.remove(name)
            engine.free += engine.blocks.pop(name)
    engine.builder._slots.check()
    for name in "abcdefghi":
        engine.random({name: 3})
    engine.random({"a": 1})
    engine.builder._slots.check()
    with pytest.raises(RuntimeError, match="newest tokens were lost"):
        engine.random({"a": 1})


def test_layers_have_blocks_of_their_own_widths(backend, monkeypatch):
    """A preset's wide layer asks vLLM for more bytes; vLLM takes the layer's word."""
    monkeypatch.setenv("HFKVQ_SCHEME", "best-2.5")
    sizes = {}
    for layer in range(36):
        config = config_of(num_hidden_layers=36)
        monkeypatch.setattr(backend, "get_current_vllm_config", lambda config=config: config)
        impl, name = backend.Attention(32, 128, 1.0, 8), f"model.layers.{layer}.self_attn.attn"
        own = SimpleNamespace(impl=impl)
        own.get_kv_cache_spec = lambda _: Spec(block_size=128, num_kv_heads=8, head_size=128)
        config.compilation_config.static_forward_context[name] = own
        impl.process_weights_after_loading(torch.bfloat16)
        sizes[layer] = own.get_kv_cache_spec(config)
    assert {layer: spec.page_size_bytes for layer, spec in sizes.items() if spec != sizes[0]} == {22: 139264}
    assert sizes[0].page_size_bytes == sizes[0].real_page_size_bytes == 82176
    assert sizes[0].merge([sizes[0], sizes[1]]) == sizes[0]
    with pytest.raises(AssertionError):
        sizes[0].merge([sizes[0], sizes[22]])


def test_formats_share_slots_and_batches(backend, monkeypatch):
    """Builders of two widths make one batch, which claims slots once, also for the second layer."""
    monkeypatch.setenv("HFKVQ_SCHEME", "best-2.5")
    one, other = Engine(backend, monkeypatch), Engine(backend, monkeypatch)
    count, claim = [], backend.kernels.claim
    monkeypatch.setattr(backend.kernels, "claim", lambda *given: count.append(given[2]) or claim(*given))
    lengths, query = torch.tensor([3, 5], dtype=torch.int32), torch.randn(2, QUERY_HEADS, DIM)
    for _ in range(2):
        given = SimpleNamespace(
            query_start_loc_cpu=torch.arange(3), seq_lens=lengths, seq_lens_cpu_upper_bound=None, num_reqs=2,
            num_actual_tokens=2, block_table_tensor=torch.tensor([[3, 0], [4, 0]], dtype=torch.int32),
        )  # fmt: skip
        made = [engine.builder.build(0, given) for engine in (one, other)]
        assert made[0] is made[1]
        for engine, batch in zip((one, other), made, strict=True):
            layer, new = SimpleNamespace(layer_name=LAYER), torch.randn(2, HEADS, DIM)
            engine.impl.forward(layer, query, new, new, engine.cache, batch, torch.empty(2, QUERY_HEADS * DIM))
        lengths += 1
    assert [id(tensors) for tensors in count] == [id(one.builder._slots.tensors)] * 2
    # Both layers have their tokens in the same slots.
    held = [engine.impl._windows[0][:, :, :6].flatten(1).any(1).tolist() for engine in (one, other)]
    assert held[0] == held[1]
    assert sum(held[0]) == 2


@pytest.mark.parametrize("name", ["saw-int4", "kitty-pro:sink_length=128:local_length=0"])
def test_tokens_are_those_of_generate(backend, monkeypatch, tmp_path, name):
    """A model of which each layer's attention is the backend's."""
    monkeypatch.setenv("HFKVQ_SCHEME", name)
    model = build("llama", num_attention_heads=2, num_key_value_heads=1, initializer_range=0.02)
    prompt = torch.randint(3, 128, (1, 250))
    scheme = get_scheme(name).shared
    expected = model.generate(
        prompt, past_key_values=MixedKVCache(model, scheme), max_new_tokens=12, do_sample=False, eos_token_id=None
    )[0, 250:].tolist()

    path = str(tmp_path / "smoothing.safetensors")
    assert smoothing.save(model, path) == 2
    monkeypatch.setenv("HFKVQ_SMOOTHING", path)
    engines, table = [Engine(backend, monkeypatch, 1, 2, 32) for _ in range(2)], torch.tensor([[3, 7, 0]])

    def attend(module, query, key, value, mask, **given):
        engine, given = engines[module.layer_idx], [x[0].transpose(0, 1) for x in (query, key, value)]
        tokens = query.shape[2]
        engine.held["a"] = engine.held.get("a", 0) + tokens
        batch = engine.batch([0, tokens], torch.tensor([engine.held["a"]], dtype=torch.int32), table.int(), tokens)
        out = engine.forward(*given, batch, f"model.layers.{module.layer_idx}.self_attn.attn")
        return out.view(1, tokens, 2, 32), None

    AttentionInterface.register("hfkvq_vllm_test", attend)
    model.set_attn_implementation("hfkvq_vllm_test")
    found, ids, at = [], prompt, 0
    for _ in range(12):
        places = torch.arange(at, at + ids.shape[1])[None]
        with torch.no_grad():
            logits = model(ids, position_ids=places, use_cache=False).logits
        at += ids.shape[1]
        ids = logits[:, -1:].argmax(-1)
        found.append(ids.item())
    assert found == expected


def test_wide_key_channels_are_smoothed(backend, monkeypatch, tmp_path):
    """Keys with a bias a hundred times as wide as they are: 4 bits hold them by the file's vectors alone."""
    monkeypatch.setenv("HFKVQ_SCHEME", "int4")
    query, key, value = torch.randn(64, QUERY_HEADS, DIM), torch.randn(64, HEADS, DIM), torch.randn(64, HEADS, DIM)
    bias = torch.zeros(DIM)
    bias[5] = 100.0
    step = torch.randn(1, QUERY_HEADS, DIM), torch.randn(1, HEADS, DIM) + bias, torch.randn(1, HEADS, DIM)

    def loss():
        engine = Engine(backend, monkeypatch)
        engine.run({"a": 64}, query, key + bias, value)
        whole = [torch.cat([x, y]) for x, y in zip((query, key + bias, value), step, strict=True)]
        exact = engine.expected({"b": 65}, [0, 65], *whole, torch.zeros(1, 1))
        out, _ = engine.run({"a": 1}, *step)
        return (out[0] - exact[-1]).norm().item()

    before = loss()
    vectors = smoothing.vectors_of(bias.expand(HEADS, DIM).clone(), torch.ones(HEADS, DIM), None, False)
    path = str(tmp_path / "smoothing.safetensors")
    smoothing.save_file({"1": torch.stack([vectors, vectors])}, path)
    monkeypatch.setenv("HFKVQ_SMOOTHING", path)
    assert loss() < before / 10
    with pytest.raises(ValueError, match="which has no layer 0"):
        smoothing.vectors_of_layer(0, HEADS, False)
    with pytest.raises(ValueError, match="with 2 heads, allowed 4"):
        smoothing.vectors_of_layer(1, 4, False)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("saw-int4:page_size=64", "its pages hold other than 128"),
        ("snapkv+saw-int4", "forgets tokens"),
        ("full", "more than 4 bits"),
        ("triaxial", "tags"),
        ("no-such", "no-such"),
    ],
)
def test_schemes_that_blocks_cannot_hold_are_refused(backend, monkeypatch, scheme, words):
    monkeypatch.setenv("HFKVQ_SCHEME", scheme)
    found = backend.reasons(config_of(), DIM, hfkvq.vllm.DTYPE, None)
    assert len(found) == 1
    assert words in found[0]


def test_other_configurations_are_refused(backend, monkeypatch):
    config = config_of()
    monkeypatch.setattr(backend, "get_current_vllm_config", lambda: config)
    refused = backend.Backend.validate_configuration
    assert refused(DIM, torch.bfloat16, hfkvq.vllm.DTYPE, None) == []
    assert refused(DIM, torch.bfloat16, hfkvq.vllm.DTYPE, 256) == []
    assert "got 'fp8', allowed 'int4_per_token_head'" in refused(DIM, torch.bfloat16, "fp8", None)[0]
    assert "block_size: got 16, allowed 128" in refused(DIM, torch.bfloat16, hfkvq.vllm.DTYPE, 16)[0]
    assert "head_size: got 80" in refused(80, torch.bfloat16, hfkvq.vllm.DTYPE, None)[0]
    config.speculative_config = object()
    assert "speculative_config" in refused(DIM, torch.bfloat16, hfkvq.vllm.DTYPE, None)[0]
    config.speculative_config = None
    config.parallel_config.pipeline_parallel_size, config.parallel_config.use_ubatching = 2, True
    assert refused(DIM, torch.bfloat16, hfkvq.vllm.DTYPE, None) == []
    monkeypatch.setenv("HFKVQ_SCHEME", "best-2.5")
    found = refused(DIM, torch.bfloat16, hfkvq.vllm.DTYPE, None)
    assert [words.split(":")[0] for words in found] == ["pipeline_parallel_size", "enable_dbo"]
    monkeypatch.setenv("HFKVQ_SCHEME", "saw-int4")
    with pytest.raises(ValueError, match="sliding_window: got 128"):
        backend.Attention(QUERY_HEADS, DIM, 1.0, HEADS, None, 128)
    with pytest.raises(ValueError, match="sinks: got"):
        backend.Attention(QUERY_HEADS, DIM, 1.0, HEADS, sinks=torch.zeros(4))
    for text in ({"model_type": "qwen2"}, {"attention_bias": True}):
        with pytest.raises(ValueError, match=r"keys of this model have biases.*hfkvq.vllm.smoothing"):
            Engine(backend, monkeypatch, **text)
    monkeypatch.setenv("HFKVQ_SCHEME", "saw-int4:smooth_keys=false")
    Engine(backend, monkeypatch, model_type="qwen2")


def test_the_plug_in_is_registered_where_a_scheme_is_named(monkeypatch):
    registered = install(monkeypatch)
    monkeypatch.delenv("HFKVQ_SCHEME", raising=False)
    hfkvq.vllm.register()
    assert registered == {}
    monkeypatch.setenv("HFKVQ_SCHEME", "saw-int4")
    hfkvq.vllm.register()
    assert registered == {"CUSTOM": "hfkvq.vllm.backend.Backend"}
    monkeypatch.setenv("HFKVQ_SCHEME", "saw-int5")
    with pytest.raises(ValueError, match=r"HFKVQ_SCHEME: .*saw-int4"):
        hfkvq.vllm.register()
    monkeypatch.setenv("HFKVQ_SCHEME", "saw-int4")
    install(monkeypatch, "0.33.0")
    with pytest.raises(ValueError, match=r"got version 0.33.0, allowed 0.25.x"):
        hfkvq.vllm.register()
