"""A cache with a budget: never a byte more, exactly 16 bits while there is room, then what the presets hold."""

from __future__ import annotations

import copy
import itertools
import os
import random
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import BloomConfig, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hfkvq import MixedKVCache
from hfkvq.caches import budget
from hfkvq.caches.eviction.forgetting import kept_pages, page_scores, page_size
from hfkvq.caches.layers.layer import KVLayer
from hfkvq.caches.layers.memory import held_bytes
from hfkvq.caches.schemes.eviction import SnapKV
from hfkvq.caches.schemes.sides import Sides
from hfkvq.caches.step_graphs import StepGraphs
from hfkvq.caches.store.requantize import keep_tokens
from hfkvq.kernels import seal as kernels_seal
from tests.caches.driver import assert_same_bits, same_bits, small, stored
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_faults import FailAt, Fault

LAYERS = 4


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations make within, while their memory lives.

    The reference that seals pages has temporary tensors that kernels do without; they do not count.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = {}
        self._seal = kernels_seal._seal

    def __enter__(self):
        kernels_seal._seal = _disable_current_modes()(self._seal)
        return super().__enter__()

    def __exit__(self, *error):
        kernels_seal._seal = self._seal
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.known:
                self.known[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage._cdata)
        return out

    def free(self, key):
        self.live -= self.known.pop(key, 0)


@pytest.fixture(autouse=True)
def small_ladder(monkeypatch):
    """Pages so small that a few hundred tokens go down the whole ladder."""
    monkeypatch.setattr(budget, "LADDER", tuple(small(name) for name in ("full", "best-4.3", "trellis-2.5")))


@pytest.fixture
def model():
    return build("llama", num_hidden_layers=LAYERS, max_position_embeddings=4096)


def held(cache):
    """All bytes that a cache holds, counted from its tensors; asks for nothing that changes it."""
    tensors = []
    for layer in cache.compressed_layers:
        tensors += [] if layer.store is None else layer.store.state.tensors()
        tensors += [*layer.tensors(), *(layer.staged or ())]
        tensors += layer.buffer.memory()
    return held_bytes(tensors)


@contextmanager
def watched(cache, monkeypatch, most=lambda: 0):
    """Within, checks the bytes held at each attention call, and at each operation of a layer that moves.

    ``most`` may be held although the limit is less.
    """
    move, begin, peaks = budget.Budget._move, KVLayer.forward, []

    def moving(self, cache, *args):
        before = held(cache)
        with Live() as live:
            move(self, cache, *args)
        peaks.append(before + live.peak)
        assert peaks[-1] <= max(self.limit, most()), "while a layer moves"

    def attending(layer, *args, **kwargs):
        peaks.append(held(cache))
        assert peaks[-1] <= cache.budget.limit, "while tokens are staged"
        return begin(layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(budget.Budget, "_move", moving)
        patch.setattr(KVLayer, "forward", attending)
        yield peaks


def forward(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits


def test_16_bits_while_there_is_room(model):
    """The tokens and logits of the model's own cache."""
    cache, own = MixedKVCache(model, memory="64MiB"), DynamicCache(config=model.config)
    for ids in (prompt(2, 90), prompt(2, 1), prompt(2, 40)):
        torch.testing.assert_close(forward(model, cache, ids), forward(model, own, ids), rtol=1e-4, atol=1e-4)
    assert cache.budget.rungs == ((0, 0),) * LAYERS
    for layer, theirs in zip(cache.compressed_layers, own.layers, strict=True):
        torch.testing.assert_close(layer.keys, theirs.keys, rtol=1e-5, atol=1e-5)


def test_buffers_move_once_for_many_tokens(model, monkeypatch):
    """Until the ladder ends, a move makes room for a page at least: tokens that come singly do not move all layers."""
    cache = MixedKVCache(model, memory=500_000, graphs=False)
    page = cache.budget.ladder[-1].layout(64, 64).keys.formats[0].page_size
    moved, move = [], budget.Budget._go

    def moving(self, *args):
        moved.append(cache.get_seq_length())
        move(self, *args)

    monkeypatch.setattr(budget.Budget, "_go", moving)
    forward(model, cache, prompt(1, 60))
    rungs = [cache.budget.rungs]
    while cache.budget.rungs != [*cache.budget.down()][-1]:
        forward(model, cache, prompt(1, 1))
        rungs.append(cache.budget.rungs)
    assert len(set(rungs)) > 4
    assert len(moved) > 4
    assert all(later - sooner >= page for sooner, later in itertools.pairwise(moved[:-1]))


def go(cache, *states):
    """The cache on other rungs, one state after another, in the room that it has."""
    shape = cache.budget._shape(cache, None)
    for rungs in states:
        cache.budget._go(cache, shape, rungs, cache.compressed_layers[0].buffer.room)


def test_operations_of_a_change_do_not_grow_with_tokens(model):
    """Pages are copied, or quantized anew, all together while there is memory for it."""
    counts = []
    # The first measures the model, by whose vectors keys are smoothed.
    for tokens in (30, 210, 2010):
        cache = MixedKVCache(model, memory="64MiB", graphs=False)
        forward(model, cache, prompt(1, tokens))
        cache.budget.reserve(cache, 1)
        for rungs, room in (((1, 1),) * LAYERS, 2100), (((1, 1),) * LAYERS, 2200), (((2, 2),) * LAYERS, 2200):
            with FailAt() as counted:
                cache.budget._go(cache, cache.budget._shape(cache, None), rungs, room)
            counts.append(counted.count)
    assert counts[3:6] == counts[6:]
    # A layer that only moves: most are views.
    assert counts[4] < 120 * LAYERS


@pytest.mark.usefixtures("captured")
def test_a_step_is_captured_at_once_after_a_change(model, monkeypatch):
    """One step in Python for the cache, none after its changes; each graph is there until the next one is captured."""
    graphs, alive, make = [], [], TapeGraph.__init__

    def noted(self, *args):
        make(self, *args)
        alive.append(sum(graph() is not None for graph in graphs))
        graphs.append(weakref.ref(self))

    monkeypatch.setattr(TapeGraph, "__init__", noted)
    monkeypatch.setattr(budget, "LEAST_STEPS", 40)
    firsts, first, moves, go = [], StepGraphs._first, [], budget.Budget._go
    monkeypatch.setattr(StepGraphs, "_first", lambda *args: firsts.append(1) or first(*args))
    monkeypatch.setattr(budget.Budget, "_go", lambda *args: moves.append(1) or go(*args))
    cache = MixedKVCache(model, memory=600_000)
    forward(model, cache, prompt(1, 150))
    for _ in range(500):
        forward(model, cache, prompt(1, 1))
    cache.integrity_check()
    assert max(map(max, cache.budget.rungs)) == 2
    assert (len(firsts), TapeGraph.made) == (1, 1 + len(moves))
    assert len(moves) > 2
    assert alive == [0, *[1] * len(moves)]


@pytest.mark.parametrize("name", ["best-4.3", "trellis-2.5"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_state_is_what_its_preset_would_hold(model, name, rows, monkeypatch):
    """Bit for bit: tokens that go down from 16 bits, and those that come later."""
    # A layer that the preset holds in more bits keeps the rung above.
    monkeypatch.setattr(budget, "LADDER", (small("full"), plain := small(name, **PLAIN.get(name, {})), plain))
    ids = prompt(rows, 150)
    cache, preset = MixedKVCache(model, memory="64MiB"), MixedKVCache(model, plain)
    forward(model, preset, ids)
    forward(model, cache, ids)
    go(cache, ((1, 1),) * LAYERS)
    cache.integrity_check()
    for ours, theirs in zip(cache.compressed_layers, preset.compressed_layers, strict=True):
        assert ours.held().layout == theirs.held().layout
        for row in range(rows):
            if name == "trellis-2.5":
                assert_same_bits(stored(ours, row), stored(theirs, row))
        for side in ("keys", "values"):
            # A rotation of fewer tokens at a time may round the last bit of a scale, or a number between two codes, in
            # another way.
            apart = (ours.dense(side) - theirs.dense(side)).abs()
            assert (apart > 0.01).float().mean() < 0.005
            assert apart.max() < 0.1
    # Later pages of trellis-2.5 are weighed by other queries: the cache has counted those of the prompt.
    for _ in range(20 if name == "best-4.3" and rows == 2 else 3):
        ours, theirs = (forward(model, x, prompt(rows, 1)) for x in (cache, preset))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_heads_that_trellis_codes_do_not_take_end_at_scalar_values():
    """Heads of 100 channels, as OpenLLaMA's 3B has them."""
    ladder = budget.Budget(2**20, LAYERS, 100).ladder
    assert ladder[-1] == budget.get_scheme("best-2.5")
    ladder[-1].layout(100, 100).check(100, 100)


PLAIN = {"trellis-2.5": {"wide_from": 0.0, "wide_to": 0.0, "wide_keys_from": 0.0, "wide_keys_to": 0.0}}


class History:
    """Random events of one cache, each within its budget, or refused with nothing changed."""

    def __init__(self, seed, patch, tmp_path):
        self.random, self.patch, self.path = random.Random(seed), patch, tmp_path / "cache.safetensors"
        self.model = build("llama", num_hidden_layers=2, max_position_embeddings=4096)
        pick = self.random
        self.options = {"graphs": pick.random() < 0.6, "headroom": pick.choice([0.0, 0.25])}
        if pick.random() < 0.25:
            self.options["max_cache_len"] = pick.choice([200, 400])
        elif pick.random() < 0.6:
            self.options["evict"] = "snapkv"
        owner = self.model if pick.random() < 0.8 else self.model.config
        self.seen, self.rows, self.most = 0, pick.choice([1, 1, 2, 3]), 0
        memory = pick.randrange(250_000, 800_000)
        if "evict" in self.options:
            # So little that a few prompts go down the whole ladder.
            memory = self.rows * pick.randrange(340_000, 400_000)
        self.cache = MixedKVCache(owner, memory=memory, **self.options)

    @property
    def limit(self):
        return self.cache.budget.limit

    def attempt(self, act, *words):
        """An event succeeds (True), or is refused and changes nothing (False)."""
        before = bits(self.cache) if self.seen else None
        rungs = self.cache.budget.rungs
        try:
            act()
        except (ValueError, NotImplementedError) as error:
            if not any(word in str(error) for word in (*words, "memory: ", "max_cache_len")):
                raise
            if before is not None and self.cache.budget.rungs == rungs:
                assert same_bits(before, bits(self.cache))
            return False
        return True

    def feed(self, tokens, mask=None):
        ids = torch.randint(3, 120, (self.rows, tokens), generator=torch.Generator().manual_seed(self.seen))
        more = {} if mask is None else {"attention_mask": mask}
        if self.attempt(lambda: forward(self.model, self.cache, ids, **more)):
            self.seen += tokens

    def prompt(self):
        if self.seen:
            return self.feed(self.random.choice([17, 40, 90, 180]))
        tokens, mask = self.random.choice([1, 5, 30, 90, 200]), None
        if self.rows > 1 and self.random.random() < 0.5:
            mask = torch.ones(self.rows, tokens, dtype=torch.long)
            mask[0, : tokens // 3] = 0
        self.feed(tokens, mask)

    def steps(self):
        for _ in range(self.random.randint(1, 6)):
            self.feed(1)

    def several(self):
        self.feed(self.random.randint(2, 16))

    def change(self, act, rows=None, copies=False, crops=0):
        """A change of rows or lengths: what it makes is counted while it is made."""

        def run():
            self.cache.budget.before_change(self.cache, rows, copies, crops)
            before = held(self.cache)
            with Live() as live:
                act()
            assert before + live.peak <= self.limit, "while rows or lengths change"

        return self.attempt(run, "crop")

    def crop(self):
        tokens = self.random.randint(0, min(self.seen, 60))
        if self.change(lambda: self.cache.crop(-tokens), crops=tokens):
            self.seen -= tokens

    def reorder(self):
        rows = torch.tensor([self.random.randrange(self.rows) for _ in range(self.rows)])
        self.change(lambda: self.cache.reorder_cache(rows), self.rows)

    def repeat(self):
        if self.rows < 3 and self.change(lambda: self.cache.batch_repeat_interleave(2), 2 * self.rows):
            self.rows *= 2

    def select(self):
        rows = sorted(self.random.sample(range(self.rows), self.random.randint(1, self.rows)))
        if self.change(lambda: self.cache.batch_select_indices(torch.tensor(rows)), len(rows), True):
            self.rows = len(rows)

    def copied(self):
        before = bits(self.cache)
        old, self.cache = self.cache, copy.deepcopy(self.cache)
        assert same_bits(before, bits(self.cache))
        assert self.cache.budget is not old.budget

    def saved(self):
        before, rungs, limit = bits(self.cache), self.cache.budget.rungs, self.limit
        self.cache.save(self.path)
        options = {name: x for name, x in self.options.items() if name != "max_cache_len"}
        self.cache = MixedKVCache.load(self.path, self.model, memory=limit, **options)
        assert (self.cache.budget.rungs, self.limit) == (rungs, limit)
        assert same_bits(before, bits(self.cache))

    def limited(self):
        """Another limit, which may be too small."""
        limit = int(self.limit * self.random.choice([0.5, 0.8, 0.95, 1.2]))
        # Until it is reached, the cache holds no more than before.
        self.most = self.limit
        if not self.attempt(lambda: setattr(self.cache, "memory_limit", limit)):
            assert self.limit != limit
        self.most = 0

    def reset(self):
        self.cache.reset()
        self.seen, self.rows = 0, self.random.choice([1, 2])

    def run(self, events):
        more = ("crop", "reorder", "repeat", "select", "copied", "saved", "limited", "reset")
        for _ in range(events):
            prompts = ["prompt"] * (6 if "evict" in self.options else 2)
            name = self.random.choice([*prompts, "steps", "several", "steps", *more])
            if name in more and not self.seen:
                continue
            with watched(self.cache, self.patch, lambda: self.most):
                getattr(self, name)()
            cache = self.cache
            cache.integrity_check()
            assert held(cache) <= self.limit, name
            assert int(cache.get_seq_length()) == self.seen, name


# A cache that forgets.


ROOM = 400_000
"""Bytes in which two layers hold 340 to 520 tokens on the last rung, beside what a change takes."""


@pytest.fixture
def shallow():
    return build("llama", num_hidden_layers=2, max_position_embeddings=4096)


def forgetting(model, **options):
    """A cache that has gone down the whole ladder and forgotten tokens."""
    cache = MixedKVCache(model, memory=ROOM, evict="snapkv", **options)
    while not cache.evicted:
        forward(model, cache, prompt(1, 60))
    return cache


def test_forgets_at_the_end_of_the_ladder_and_goes_on(shallow, monkeypatch, caplog):
    cache, rungs, kept = MixedKVCache(shallow, memory=ROOM, graphs=False, evict="snapkv"), set(), []
    with watched(cache, monkeypatch) as peaks:
        for n in range(16):
            logits = forward(shallow, cache, prompt(1, 60 if n % 4 else 1))
            assert logits.isfinite().all()
            assert held(cache) == cache.memory().total <= ROOM
            cache.integrity_check()
            rungs.add(cache.budget.rungs)
            kept.append(cache.get_seq_length() - cache.evicted)
    assert len(rungs) > 3
    assert max(peaks) > 0.75 * ROOM
    assert cache.get_seq_length() == 4 + 12 * 60
    # Tokens that just fit: the cache does not shrink.
    assert all(340 < each < 520 for each in kept[-6:])
    assert {layer.held().longest for layer in cache.compressed_layers} == {kept[-1]}
    assert "tokens evicted" in str(cache.memory())
    said = [record.message for record in caplog.records if "begins to forget" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_logits_are_those_of_snapkv_with_the_same_tokens(model, rows, monkeypatch):
    """A headwise cache of the preset's pages, which forgets the same tokens by a requantization."""
    plain, kept = small("trellis-2.5", **PLAIN["trellis-2.5"]), []
    monkeypatch.setattr(budget, "LADDER", (small("full"), plain, plain))
    monkeypatch.setattr(budget, "kept_pages", lambda *given: kept.append(kept_pages(*given)) or kept[-1])
    pages = Sides(keys=plain, values=plain, sink_length=plain.sink_length)
    ids, mask = prompt(rows, 300), torch.ones(rows, 300, dtype=torch.long)
    mask[1:, :50] = 0
    cache = MixedKVCache(model, memory="64MiB", evict="snapkv")
    own = MixedKVCache(model, SnapKV(pages=pages, budget_tokens=10_000))
    for each in (cache, own):
        forward(model, each, ids, attention_mask=mask)
    go(cache, ((1, 1),) * LAYERS)
    shape = cache.budget._shape(cache, None)
    scored = [page_scores(layer, layer.queries) for layer in cache.compressed_layers]
    cache.budget._go(cache, shape._replace(gone=96), cache.budget.rungs, 400)
    page, sink = plain.page_size, plain.sink_length
    layers = zip(cache.compressed_layers, own.compressed_layers, kept, scored, strict=True)
    for layer, theirs, (order, gone, *_), scores in layers:
        stays = torch.ones(rows, theirs.heads, 300, dtype=torch.bool)
        # A row is padded by half the pages and two tokens: it lets fewer go, so that none holds more than 204.
        assert gone.tolist() == [96, 48][:rows]
        assert layer.held().longest == 204
        for row, head in itertools.product(range(rows), range(theirs.heads)):
            left = order[row, head, : order.shape[2] - gone[row] // page].tolist()
            assert left == sorted(left)
            went = set(range(order.shape[2])) - set(left)
            # Pages of the newest 64 tokens were not to go.
            old = ((300, 250)[row] - sink - 64) // page
            assert max(went) < old
            assert max(scores[row, head, list(went)]) <= min(scores[row, head, sorted(set(range(old)) - went)])
            for block in went:
                stays[row, head, sink + block * page :][:page] = False
        keep_tokens(theirs.held(), stays.flatten(0, 1), 0, theirs.held().folded(theirs.queries.mean()))
        theirs.evicted = True
    mask = torch.cat([mask, mask[:, :1] * 0 + 1], 1)
    ours, theirs = (forward(model, x, prompt(rows, 1), attention_mask=mask) for x in (cache, own))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    cache.integrity_check()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_first_prompt_that_does_not_fit_is_cut_as_snapkv_cuts_it(shallow, rows, monkeypatch, caplog):
    # A prompt of two layers in float32 that fits before it is quantized does so all the more afterwards.
    monkeypatch.setattr(budget, "LADDER", (small("full"),))
    ids, mask = prompt(rows, 900), torch.ones(rows, 900, dtype=torch.long)
    mask[1:, :250] = 0
    limit = rows * 1_200_000
    cache = MixedKVCache(shallow, memory=limit, evict="snapkv", graphs=False)
    with watched(cache, monkeypatch):
        ours = [forward(shallow, cache, ids, attention_mask=mask)]
        assert "begins to forget" in caplog.text
        kept = 900 - cache.evicted
        assert 300 < kept < 650
        assert {layer.held().longest for layer in cache.compressed_layers} == {kept}
        cache.integrity_check()
        own = MixedKVCache(shallow, SnapKV(pages=small("full"), budget_tokens=kept))
        theirs = [forward(shallow, own, ids, attention_mask=mask)]
        for _ in range(2):
            mask = torch.cat([mask, mask[:, -1:]], 1)
            for found, each in ((ours, cache), (theirs, own)):
                found.append(forward(shallow, each, prompt(rows, 1), attention_mask=mask))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        # It goes on, and forgets pages then.
        while cache.evicted == 900 - kept:
            mask = torch.cat([mask, torch.ones(rows, 150, dtype=torch.long)], 1)
            assert forward(shallow, cache, prompt(rows, 150), attention_mask=mask).isfinite().all()
            assert held(cache) <= limit
            cache.integrity_check()


def cut_cache(model, monkeypatch, rows=1):
    """An empty cache in which a prompt of 900 tokens does not fit whole."""
    monkeypatch.setattr(budget, "LADDER", (small("full"),))
    return MixedKVCache(model, memory=rows * 1_200_000, evict="snapkv", graphs=False)


def test_a_detached_cache_cuts_where_sdpa_shows_queries_and_refuses_elsewhere(shallow, monkeypatch):
    ids, attached, cache = prompt(1, 900), *(cut_cache(shallow, monkeypatch) for _ in range(2))
    expected = forward(shallow, attached, ids)
    cache.detach()
    assert shallow.config._attn_implementation == "sdpa"
    with watched(cache, monkeypatch):
        torch.testing.assert_close(forward(shallow, cache, ids), expected, rtol=1e-4, atol=1e-4)
    assert cache.evicted == attached.evicted > 200
    assert same_bits(bits(cache), bits(attached))
    cache.reset()
    shallow.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"evict: .* detached and 'eager' attention .*nothing was changed"):
        forward(shallow, cache, ids)
    assert cache.get_seq_length() == 0
    assert held(cache) <= cache.memory_limit
    # A prompt that fits needs no queries.
    forward(shallow, cache, ids[:, :90])
    cache.reset()
    cache.attach(shallow)
    torch.testing.assert_close(forward(shallow, cache, ids), expected, rtol=1e-4, atol=1e-4)


def test_padding_within_rows_of_a_prompt_that_is_cut_changes_nothing(shallow, monkeypatch):
    ids, mask = prompt(2, 900), torch.ones(2, 900, dtype=torch.long)
    cache = cut_cache(shallow, monkeypatch, 2)
    expected = forward(shallow, cache, ids, attention_mask=mask)
    cache.reset()
    mask[1, 300:400] = 0
    with pytest.raises(ValueError, match=r"evict: .*padding within rows.*nothing was cached"):
        forward(shallow, cache, ids, attention_mask=mask)
    assert cache.get_seq_length() == cache.evicted == 0
    assert held(cache) <= cache.memory_limit
    # Without reset().
    torch.testing.assert_close(forward(shallow, cache, ids), expected, rtol=1e-5, atol=1e-5)
    cache.integrity_check()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_prompt_that_is_interrupted_while_it_is_cut_is_taken_back(shallow, monkeypatch, share):
    ids, cache = prompt(1, 900), cut_cache(shallow, monkeypatch)
    expected = forward(shallow, cache, ids)
    cache.reset()
    with FailAt() as counted:
        forward(shallow, cache, ids)
    cache.reset()
    with watched(cache, monkeypatch), pytest.raises(Fault), FailAt(int(counted.count * share)):
        forward(shallow, cache, ids)
    assert held(cache) <= cache.memory_limit
    cache.level()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(forward(shallow, cache, ids), expected, rtol=1e-5, atol=1e-5)
    cache.integrity_check()


def test_pages_are_scored_by_the_newest_queries(model):
    """The softmax of all logits, summed by page; queries of padding do not count."""
    cache, ids = MixedKVCache(model, memory="64MiB", evict="snapkv"), prompt(2, 90)
    asked, mask = [], torch.ones(2, 90, dtype=torch.long)
    mask[1, :40] = 0
    attention = model.model.layers[0].self_attn
    hook = attention.register_forward_pre_hook(lambda module, args, kwargs: asked.append(kwargs), with_kwargs=True)
    forward(model, cache, ids, attention_mask=mask)
    hook.remove()
    go(cache, ((1, 1),) * LAYERS)
    layer = cache.compressed_layers[0]
    shown, keys = layer.queries.shown, layer.dense("keys")
    x = attention.q_proj(asked[0]["hidden_states"]).unflatten(-1, (-1, keys.shape[3])).transpose(1, 2)
    x, _ = apply_rotary_pos_emb(x, x, *asked[0]["position_embeddings"])
    torch.testing.assert_close(shown, x[:, :, -64:])
    logits = shown.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT * attention.scaling
    column = torch.arange(90)
    first = torch.tensor([0, 40])[:, None]
    seen = (column <= column[-64:, None]) & (column >= first)[:, None]
    paid = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0)
    paid = (paid * (column[-64:] >= first)[:, None, None, :, None]).sum((2, 3))
    found, sink, page = page_scores(layer, layer.queries), layer.held().layout.sink, page_size(layer.held().state)
    for row, start in enumerate((0, 40)):
        for block in range(found.shape[2]):
            own = paid[row, :, start + sink + block * page :][:, :page].sum(-1)
            torch.testing.assert_close(found[row, :, block], own, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("captured")
def test_captured_steps_keep_their_queries(model):
    """Steps that are replayed from a tape, without the model's Python, and the same in Python."""
    caches = [MixedKVCache(model, memory="64MiB", evict="snapkv", graphs=graphs) for graphs in (True, False)]
    for cache in caches:
        forward(model, cache, prompt(1, 90))
        for token in prompt(1, 12)[0]:
            forward(model, cache, token[None, None])
    ours, theirs = ([layer.queries.shown for layer in cache.compressed_layers] for cache in caches)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("captured")
def test_a_prompt_in_chunks_and_steps_of_generate_forget(shallow):
    cache = MixedKVCache(shallow, memory=ROOM, evict="snapkv")
    ids = prompt(1, 640)
    out = shallow.generate(ids, past_key_values=cache, prefill_chunk_size=64, max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 648)
    assert cache.evicted > 100
    # A second turn.
    turn = torch.cat([out, prompt(1, 50)], 1)
    out = shallow.generate(turn, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.get_seq_length() == out.shape[1] - 1
    cache.integrity_check()


def test_a_step_that_fails_while_it_forgets(shallow):
    """Layers that have forgotten and others that have not yet: the next attempt finishes."""
    model, cache = shallow, forgetting(shallow, graphs=False)
    again = copy.deepcopy(cache)
    rooms = [layer.buffer.room for layer in cache.compressed_layers]
    before = [layer.gone for layer in cache.compressed_layers]
    cache.budget.reserve(cache, 1)
    again.budget.reserve(again, 1)
    with FailAt() as counted:
        cache.budget.reserve(cache, rooms[0] - cache.get_seq_length() + 1)
    with pytest.raises(Fault), FailAt(int(0.8 * counted.count)):
        again.budget.reserve(again, rooms[0] - again.get_seq_length() + 1)
    assert {layer.gone for layer in again.compressed_layers} == {before[0], cache.evicted}
    again.integrity_check()
    again.budget.reserve(again, rooms[0] - again.get_seq_length() + 1)
    assert same_bits(bits(cache), bits(again))
    forward(model, again, prompt(1, 60))
    again.integrity_check()


def bits(cache):
    """Bits of all layers and rows, of a copy with nothing left to do."""
    cache = copy.deepcopy(cache)
    for layer in cache.compressed_layers:
        layer.settle()
    layers = cache.compressed_layers
    return [[stored(layer, row) for row in range(layer.batch_size)] if layer.seen else [] for layer in layers]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("seed", [*range(6), 259, 1007180, 1007803, 20265895])
def test_histories(seed, monkeypatch, tmp_path):
    """The last seeds went over: more pages at a time than scratch counts, copies of tokens, a longer old tail."""
    History(seed, monkeypatch, tmp_path).run(14)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("captured")
def test_many_histories(monkeypatch, tmp_path):
    """HFKVQ_HISTORIES of them, from HFKVQ_SEED."""
    count, start = (int(os.environ.get(f"HFKVQ_{name}", x)) for name, x in (("HISTORIES", 10_000), ("SEED", 100)))
    for seed in range(start, start + count):
        try:
            with monkeypatch.context() as patch:
                History(seed, patch, tmp_path).run(14)
        except BaseException as error:
            raise AssertionError(f"history {seed}: {error}") from error


# Failures half-way, and refusals.


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_step_down_that_fails_half_way(model, share):
    """Every layer is what it was or what it was to be; the next attempt finishes."""
    whole = MixedKVCache(model, memory="64MiB")
    forward(model, whole, prompt(2, 120))
    target = ((1, 2), (0, 1), (2, 2), (1, 1))
    before, done = bits(whole), copy.deepcopy(whole)
    for cache in (whole, done):
        # Copies have no buffers yet.
        cache.budget.before_change(cache)
        cache.budget.reserve(cache, 1)
    with FailAt() as counted:
        go(done, target)
    after = bits(done)
    cache = copy.deepcopy(whole)
    cache.budget.reserve(cache, 1)
    with pytest.raises(Fault), FailAt(int(counted.count * share)):
        go(cache, target)
    cache.integrity_check()
    for i, left in enumerate(bits(cache)):
        assert same_bits([left], [before[i]]) or same_bits([left], [after[i]]), i
    assert cache.budget.schemes() == [layer.scheme for layer in cache.compressed_layers]
    go(cache, target)
    assert same_bits(bits(cache), after)


def test_less_memory_takes_it_down_at_once_or_not_at_all(model):
    cache = MixedKVCache(model, memory="64MiB", graphs=False)
    forward(model, cache, prompt(1, 400))
    before = bits(cache)
    with pytest.raises(ValueError, match=r"memory: 400 tokens in 1 rows need .*, but the budget is 97.66 KiB"):
        cache.memory_limit = 100_000
    assert cache.memory_limit == 64 * 2**20
    assert same_bits(before, bits(cache))
    cache.memory_limit = 700_000
    assert cache.memory().total <= 700_000
    assert cache.budget.rungs > ((0, 0),) * LAYERS
    forward(model, cache, prompt(1, 1))


@pytest.mark.parametrize("capacity", [None, 400])
def test_buffers_that_a_reset_leaves_are_freed_for_a_smaller_limit(model, capacity):
    cache = MixedKVCache(model, memory="64MiB", max_cache_len=capacity)
    forward(model, cache, prompt(2, 300))
    cache.reset()
    assert cache.memory().total > 600_000
    cache.memory_limit = 600_000
    assert cache.memory().total <= 600_000
    cache.memory_limit = "64MiB"
    forward(model, cache, prompt(2, 300))
    cache.integrity_check()


def test_too_little_is_refused_before_anything_is_held(model):
    cache = MixedKVCache(model, memory=120_000)
    with pytest.raises(ValueError, match=r"nothing was changed.*pass a long prompt in chunks.*evict='snapkv'"):
        forward(model, cache, prompt(1, 300))
    assert cache.get_seq_length() == 0
    assert all(layer.store is None for layer in cache.compressed_layers)
    cache.memory_limit = "64MiB"
    forward(model, cache, prompt(1, 300))
    assert cache.get_seq_length() == 300


def test_bad_input(model):
    other = MixedKVCache(model, memory="1MiB")
    for options, match in (
        ({"memory": other.budget}, "every cache has a budget of its own"),
        ({"memory": "six"}, "memory: got 'six', allowed a size"),
        ({"memory": True}, "memory: got True"),
        ({"memory": "auto"}, "memory: got 'auto' on cpu"),
        ({"memory": "1GiB", "debug": True}, "memory: not with attach=False, debug=True"),
        ({"memory": "1GiB", "offloading": True}, "memory: not with"),
        ({"memory": "1GiB", "scheme": "kitty"}, "no rung of the ladder"),
        ({"memory": "1GiB", "scheme": "best-3.4"}, "no rung of the ladder"),
        ({"memory": "1GiB", "layers": {0: "full"}}, "layers: not with memory="),
        ({"memory": "1GiB", "order": [(9, "keys")]}, "order: got .*allowed pairs of a layer from 0 to 3"),
        ({"memory": "1GiB", "order": "none.json"}, "order: none.json cannot be read"),
        *(({"memory": "1GiB", "order": x}, "order: got .*allowed .layer, side. pairs") for x in (5, [1], [(0,)], b"x")),
        ({"order": [(0, "keys")]}, "order: got one without memory="),
        ({"memory": "1GiB", "evict": "h2o"}, "evict: got 'h2o', allowed 'snapkv', or None"),
        ({"memory": "1GiB", "evict": True}, "evict: got True, allowed 'snapkv', or None"),
        ({"evict": "snapkv"}, "evict: got 'snapkv' without memory="),
        ({"memory": "1GiB", "evict": "snapkv", "max_cache_len": 99}, "evict: got 'snapkv' with max_cache_len"),
    ):
        with pytest.raises(ValueError, match=match):
            MixedKVCache(model, **options)
    with pytest.raises(ValueError, match=r"memory: not for .*, since layers have sliding windows"):
        MixedKVCache(build("mistral-sliding"), memory="1GiB")
    with pytest.raises(ValueError, match="evict: got 'snapkv' for bloom, which adds a bias"):
        MixedKVCache(BloomConfig(), memory="1GiB", evict="snapkv")
    with pytest.raises(ValueError, match="memory_limit: this cache was made without memory="):
        MixedKVCache(model).memory_limit = "1GiB"


def test_files_and_budgets(model, tmp_path):
    """A loaded cache stands where it stood, within a budget of its own or without one."""
    cache, path = MixedKVCache(model, memory=900_000, graphs=False), tmp_path / "cache.safetensors"
    for _ in range(6):
        forward(model, cache, prompt(1, 90))
    cache.save(path)
    with pytest.raises(ValueError, match=r"memory: the cache takes .* load it with more"):
        MixedKVCache.load(path, model, memory=200_000)
    ours, plain = MixedKVCache.load(path, model, memory=2_000_000), MixedKVCache.load(path, model)
    assert ours.budget.rungs == cache.budget.rungs
    assert plain.memory_limit is None
    expected = forward(model, cache, prompt(1, 1))
    for each in (ours, plain):
        torch.testing.assert_close(forward(model, each, prompt(1, 1)), expected, rtol=1e-5, atol=1e-5)


def test_an_order_is_followed(model):
    order = [(2, "keys"), (0, "values"), (2, "keys")]
    cache = MixedKVCache(model, memory="64MiB", order=order)
    # Layer 2 of 4 is the one that the preset holds in 4 bits.
    assert cache.budget.moves == [(2, "keys", 1), (0, "values", 1)]


def test_the_models_own_vectors_smooth_keys_that_go_down(model):
    """Measured before the first layer of the first prompt, and not in between layers."""
    calls = []
    cache = MixedKVCache(model, memory="64MiB")
    plain = MixedKVCache(model, small("best-4.3"))
    attention = model.model.layers[0].self_attn
    forward_of = attention.forward
    attention.forward = lambda *args, **kwargs: (calls.append("in"), forward_of(*args, **kwargs), calls.append("out"))[
        1
    ]
    try:
        forward(model, cache, prompt(1, 90))
    finally:
        attention.forward = forward_of
    assert calls == ["in", "out"] * 2, "no call within another"
    forward(model, plain, prompt(1, 90))
    go(cache, ((1, 1),) * LAYERS)
    for ours, theirs in zip(cache.compressed_layers, plain.compressed_layers, strict=True):
        assert torch.equal(ours.smoothing.vectors, theirs.smoothing.vectors)
