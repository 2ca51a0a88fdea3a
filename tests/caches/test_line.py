"""Steps of a growing cache in one call: what the operations do one by one, to the bit, wherever they can be taken."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch

from evals.generate import SpreadTags
from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.attention import hfkvq_attention, hfkvq_mask
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.routing import HostCounters
from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.store import sealing
from hfkvq.caches.store.growth import grow
from hfkvq.caches.token_record import TokenRecord
from hfkvq.kernels import append, decode_attention, use_interpreter
from hfkvq.kernels import fused_step as line
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, run_count
from hfkvq.kernels.pages import PageFormat, split_runs
from hfkvq.kernels.step import observe
from tests.caches.driver import cases, small
from tests.caches.models import build

MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=4)
HEADS, SHARE = 2, 4
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PRESETS = ("kitty-pro", "kivi-2", "mixkvq", "saw-int4", "int4", "full", "triaxial", "kvarn", "kivi-4", "arkv")


def layer_of(scheme, plainly=True):
    layer = KVLayer(scheme, PaddingReader())
    layer.fuses_steps = plainly
    return layer


def seal_one_by_one(layer):
    """From now on."""
    layer.store.__dict__ |= {"seals_plainly": False, "seals_widely": False}


def states(rows, tokens, dim, dtype, device, generator, odd=False):
    """Queries, keys and values; if odd, values that begin two bytes behind what a kernel would like."""
    made = [torch.randn(rows, n, tokens, dim, generator=generator) for n in (SHARE * HEADS, HEADS, HEADS)]
    queries, keys, values = (x.to(device, dtype) for x in made)
    if odd:
        wide = torch.empty(values.numel() + 1, device=device, dtype=dtype)[1:].view(values.shape)
        values = wide.copy_(values)
    return queries, keys, values


def padded(pads, columns, device):
    """The mask of a step, as models are given it: rows begin with padding."""
    visible = torch.arange(columns, device=device) >= torch.tensor(pads, device=device)[:, None]
    return hfkvq_mask(len(pads), 1, columns, q_offset=columns - 1, attention_mask=visible.long())


def padded_prompt(layer, given, pads):
    """A prompt of rows that begin with padding."""
    queries, keys, values = given
    tokens = keys.shape[2]
    visible = torch.arange(tokens, device=keys.device) >= torch.tensor(pads, device=keys.device)[:, None]
    mask = visible[:, None, None, :] & torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).tril()
    hfkvq_attention(MODULE, queries, *layer.update(keys, values), mask, scaling=0.1)


def step(layer, given, mask=None):
    queries, keys, values = given
    return hfkvq_attention(MODULE, queries, *layer.update(keys, values), mask, scaling=0.1)[0]


def assert_same(one, other, room=True):
    """The same tokens, and as much room for more if that is asked for."""
    assert one.store.states == other.store.states
    statistics = [[] if x.queries is None else x.queries.tensors() for x in (one, other)]
    for a, b in zip(one.store.tensors(), other.store.tensors(), strict=True):
        assert a.shape == b.shape or not room
    assert torch.equal(one.store.counters, other.store.counters)
    for side in ("keys", "values"):
        assert torch.equal(one.dense(side), other.dense(side))
    for a, b in zip(*statistics, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def taken(monkeypatch):
    """How often each line has been gone; on a CPU the operations stand for them."""
    counts = {"append_attend": 0, "sealed": 0, "observed": 0, "seal_tail": 0, "masked": 0}
    lines = line._launches() if torch.cuda.is_available() else None

    def append_attend(q, keys, values, held, scaling, softcap, sealing, observing, mask):
        if lines is not None:
            out = lines.append_attend(q, keys, values, held, scaling, softcap, sealing, observing, mask)
        else:
            counters, windows, runs, store = held.counters, held.windows, held.runs, held.store
            append(keys, values, counters, windows, store)
            out = decode_attention(q, counters, windows, runs, mask, None, scaling, softcap, store).transpose(1, 2)
            if sealing is not None:
                line.seal_tail(counters, windows, split_runs(store, runs)[0], *sealing, store)
            if observing is not None:
                observe(q, observing.sums, observing.counts, signed=observing.signed)
        counts["append_attend"] += out is not None
        counts["sealed"] += out is not None and sealing is not None
        counts["observed"] += out is not None and observing is not None
        counts["masked"] += out is not None and mask is not None
        return out

    def seal_tail(*given):
        done = lines is not None and lines.seal_tail(*given)
        counts["seal_tail"] += done
        return done

    monkeypatch.setattr(line, "_launches", lambda: SimpleNamespace(append_attend=append_attend, seal_tail=seal_tail))
    monkeypatch.setattr(line, "launches", lambda x: True)
    return counts


@pytest.mark.parametrize("name", cases())
def test_layers_do_the_same_in_one_call(name, taken):
    scheme, generator = cases()[name], torch.Generator().manual_seed(0)
    one, other = layer_of(scheme), layer_of(scheme, plainly=False)
    for tokens in (37, *[1] * 20, 5, *[1] * 9):
        given = states(2, tokens, 32, torch.float32, "cpu", generator)
        assert torch.equal(step(one, given), step(other, given))
    # Prompts and steps of several tokens go step by step, and all of a scheme that judges each.
    assert taken["append_attend"] == (0 if getattr(scheme, "asks_every_step", False) else 29)
    assert_same(one, other)


@pytest.mark.parametrize("pads", [None, [0, 9]])
@pytest.mark.parametrize("low_bits", [8, 4])
def test_evicting_layers_trim_between_such_steps(low_bits, pads, taken):
    """Of ARKV: every step in which no trim may be due, and after trims, tokens that each head has to itself."""
    scheme, generator = small("arkv", budget_tokens=40, low_bits=low_bits), torch.Generator().manual_seed(0)
    one, other = layer_of(scheme), layer_of(scheme, plainly=False)
    given = states(2, 37, 32, torch.float32, "cpu", generator)
    for layer in (one, other):
        padded_prompt(layer, given, pads or [0, 0])
    trims = set()
    for columns in range(38, 120):
        given, mask = states(2, 1, 32, torch.float32, "cpu", generator), pads and padded(pads, columns, "cpu")
        assert torch.equal(step(one, given, mask), step(other, given, mask))
        trims.add(one.eviction.trim_at)
    assert one.evicted
    assert len(trims) > 4
    # A trim looks at every step that may need one.
    assert 82 > taken["append_attend"] > 50
    assert taken["masked"] == (taken["append_attend"] if pads else 0)
    assert_same(one, other)


@pytest.mark.parametrize("name", ["triaxial", "arkv"])
def test_generated_tokens_are_sealed_without_a_question(name, monkeypatch):
    """They go to the widest run, which has room: the host knows. What a prompt left in the tail is looked at."""
    knobs = {"budget_tokens": 64} if name.startswith("arkv") else {"page_size": 8, "seal_unit": 32}
    scheme, generator = small(name, **knobs), torch.Generator().manual_seed(0)
    one, other, asked = layer_of(scheme), layer_of(scheme), {}

    def by_width(store, *given):
        asked[id(store)] = asked.get(id(store), 0) + 1
        return real(store, *given)

    real = sealing.seal_by_width
    monkeypatch.setattr(sealing, "seal_by_width", by_width)
    if name == "triaxial":
        one.tags.record, other.tags.record = TokenRecord(SpreadTags()), TokenRecord(SpreadTags())
    ids = torch.randint(100, (2, 300), generator=generator)
    for tokens in (60, *[1] * 100, 50, *[1] * 60):
        given, seen = states(2, tokens, 32, torch.float32, "cpu", generator), one.seen
        for layer in (one, other):
            own = ids[:, seen : seen + tokens]
            if layer.tags is not None and tokens > 1:
                layer.tags.record.tag_prompt(own, None, seen)
            elif layer.tags is not None:
                layer.tags.record.note_step(own, seen)
        # With other room, sums are rounded in other places.
        torch.testing.assert_close(step(one, given), step(other, given))
        seal_one_by_one(other)
    assert_same(one, other, room=False)
    # The second prompt. Of TriAxialKV both, and what their last tokens are sealed with: one page, and two.
    assert asked[id(one.store)] == (5 if name == "triaxial" else 1)
    assert asked[id(other.store)] > 6
    narrow, wide = (int(run_count(one.store.counters, run, "keys").max()) for run in (0, 1))
    assert one.store.state.wide_most >= wide > 0
    assert narrow > 0 or name == "arkv"


@pytest.mark.parametrize("name", ["triaxial", "arkv"])
def test_rows_that_seal_at_other_times_make_no_more_room(name):
    """Eight rows, of which nearly each is at another place within a unit."""
    scheme, generator = get_scheme(name), torch.Generator().manual_seed(0)
    layer, pads = layer_of(scheme), [0, 3, 7, 11, 14, 19, 23, 30]
    padded_prompt(layer, states(8, 40, 32, torch.float32, "cpu", generator), pads)
    for columns in range(41, 400):
        step(layer, states(8, 1, 32, torch.float32, "cpu", generator), padded(pads, columns, "cpu"))
    wide, page = int(run_count(layer.store.counters, 1, "keys").max()), scheme.layout(32, 32).keys.formats[1].page_size
    assert wide > 300
    room = layer.store.runs[1].table.shape[1] * page
    assert wide <= room <= 1.25 * (wide + 64) + 2 * page


def test_crops_of_what_is_no_whole_unit(monkeypatch):
    """What the host takes to be sealed is what is sealed, and a later crop takes its tokens away."""
    layer, generator = layer_of(get_scheme("triaxial", page_size=8, seal_unit=16, group_size=8)), torch.Generator()

    def take(tokens):
        for count in tokens:
            step(layer, states(1, count, 32, torch.float32, "cpu", generator.manual_seed(layer.seen)))

    for before, back in (([48], 9), ([1] * 6, 2), ([], 8), ([1] * 20, 30)):
        take(before)
        layer.crop(-back)
        (state,) = layer.store.states
        sealed = [int(run_count(layer.store.counters, run, "keys").sum()) for run in (0, 1)]
        assert int(layer.store.counters[LENGTH]) == state.length == layer.seen
        assert sum(sealed) == state.keys <= state.length
        assert sealed[1] <= layer.store.state.wide_most


@pytest.mark.parametrize("name", ["saw-int4", "triaxial", "arkv", "kivi-2"])
def test_pages_that_find_no_memory_are_not_counted_on(name, monkeypatch):
    """Those of keys were there, those of values were not: the next try makes both."""
    layer, other, failed = layer_of(get_scheme(name)), layer_of(get_scheme(name)), 0
    generator, allocate = torch.Generator(), PageFormat.allocate

    def fails(self, side, *rest):
        if side == "values":
            raise torch.OutOfMemoryError("none left")
        return allocate(self, side, *rest)

    for each in (layer, other):
        step(each, states(1, 250, 64, torch.float32, "cpu", generator.manual_seed(0)))
    for at in range(1, 140):
        given = states(1, 1, 64, torch.float32, "cpu", generator.manual_seed(at))
        expected = step(other, given)
        with monkeypatch.context() as patch:
            patch.setattr(PageFormat, "allocate", fails)
            try:
                assert torch.equal(step(layer, given), expected)
                continue
            except torch.OutOfMemoryError:
                failed += 1
        layer.settle()
    assert failed > 0
    assert_same(layer, other)


def test_a_scheme_that_looks_at_tokens_is_asked(monkeypatch):
    """Also of a scheme of somebody else's."""

    class Sizes(TriAxial):
        name = ""

        def token_bits(self, keys, values, position, tags=None):
            return torch.where(keys.float().norm(dim=-1).mean(1) > 5.6, 2, 4).to(torch.uint8)

    layer, generator = layer_of(Sizes(page_size=8, group_size=8)), torch.Generator().manual_seed(0)
    for tokens in (60, *[1] * 100):
        step(layer, states(2, tokens, 32, torch.float32, "cpu", generator))
    assert int(run_count(layer.store.counters, 0, "keys").min()) > 40


def test_steps_whose_scores_accumulate_go_one_by_one(taken):
    layer = layer_of(small("arkv", beta=0.5))
    generator = torch.Generator().manual_seed(0)
    for tokens in (37, 1, 1):
        step(layer, states(2, tokens, 32, torch.float32, "cpu", generator))
    assert taken["append_attend"] == 0
    assert layer.eviction.scores is not None


@pytest.mark.parametrize("name", ["saw-int4", "kitty", "mixkvq", "full", "triaxial", "kivi-2", "arkv"])
def test_masks_of_steps_are_no_hindrance(name, taken):
    """``generate`` hands steps a padding mask, which shows nothing of rows that begin with padding."""
    scheme, generator = cases()[name], torch.Generator().manual_seed(0)
    one, other, bare = layer_of(scheme), layer_of(scheme, plainly=False), layer_of(scheme)
    given = states(2, 37, 32, torch.float32, "cpu", generator)
    for layer in (one, other, bare):
        padded_prompt(layer, given, [0, 9])
    for columns in range(38, 70):
        given, mask = states(2, 1, 32, torch.float32, "cpu", generator), padded([0, 9], columns, "cpu")
        got = step(one, given, mask)
        assert torch.equal(got, step(other, given, mask))
        torch.testing.assert_close(got, step(bare, given))
    assert taken["masked"] == 32
    assert_same(one, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="models of tests are in f32, which kernels of steps are not for")
@pytest.mark.parametrize("name", ["kitty", "saw-int4", "mixkvq", "arkv"])
def test_generate_goes_in_one_call_a_step(name, taken, monkeypatch):
    """Of two rows, one of them padded: what its steps are given keeps none of them from it."""
    model = build("llama")
    ids = torch.arange(60).view(2, 30)
    padding = torch.ones_like(ids)
    padding[1, :7] = 0

    def tokens():
        cache = MixedKVCache(model.config, small(name), graphs=False)
        kwargs = {"attention_mask": padding, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, past_key_values=cache, **kwargs)

    got, layers = tokens(), model.config.num_hidden_layers
    assert taken["masked"] == 23 * layers
    monkeypatch.setattr(KVLayer, "fuses_steps", False)
    assert torch.equal(got, tokens())
    assert taken["masked"] == 23 * layers


def test_a_mask_that_hides_is_heeded(taken):
    """Also what its user hides of what is stored."""
    scheme, generator = get_scheme("saw-int4"), torch.Generator().manual_seed(0)
    one, other = layer_of(scheme), layer_of(scheme, plainly=False)
    given = states(2, 40, 64, torch.float32, "cpu", generator)
    step(one, given), step(other, given)
    visible = torch.ones(2, 41, dtype=torch.long)
    visible[0, 3:17] = 0
    # No bit of the lowest byte is set.
    visible[1] = 256
    mask = hfkvq_mask(2, 1, 41, q_offset=40, attention_mask=visible)
    given = states(2, 1, 64, torch.float32, "cpu", generator)
    got = step(one, given, mask)
    assert torch.equal(got, step(other, given, (visible != 0)[:, None, None, :]))
    assert taken["masked"] == 1


@pytest.mark.parametrize("what", ["mask", "rollback", "sinks", "bias", "empty"])
def test_what_takes_more_goes_step_by_step(what, taken):
    layer, generator = layer_of(get_scheme("saw-int4")), torch.Generator().manual_seed(0)
    given = states(2, 1, 128, torch.float32, "cpu", generator)
    if what != "empty":
        step(layer, states(2, 20, 128, torch.float32, "cpu", generator))
    if what == "rollback":
        layer.activate_past_recording()
    queries, keys, values = given
    mask = torch.ones(2, 1, 1, 21, dtype=torch.bool) if what == "mask" else None
    more = {
        "sinks": {"s_aux": torch.zeros(SHARE * HEADS)},
        "bias": {"position_bias": torch.zeros(1, SHARE * HEADS, 1, 21)},
    }.get(what, {})
    hfkvq_attention(MODULE, queries, *layer.update(keys, values), mask, scaling=0.1, **more)
    assert taken["append_attend"] == 0


# What steps remember.


def lines_of(monkeypatch):
    """The launchers, on a machine that may have nothing to launch on."""
    lines = pytest.importorskip("hfkvq.kernels.triton.fused_step")
    monkeypatch.setattr(lines, "is_misrounded", lambda *_: False)
    return lines


OTHERS = [{"tokens": 2}, {"first": 2048}, {"dtype": torch.float16}]


def test_steps_of_another_kind_are_asked_about(monkeypatch):
    """Whatever is new of a step is found, and what was there in the step before is not looked up again."""
    lines, layer, asked = lines_of(monkeypatch), layer_of(get_scheme("saw-int4")), []
    generator = torch.Generator().manual_seed(0)
    step(layer, states(2, 20, 64, torch.bfloat16, "cpu", generator))
    monkeypatch.setattr(lines, "_step", lambda *given: asked.append(given))
    held = layer.store.held
    sealing = line.Sealing((32, 32), (1, 1), (1, 1))
    sums = line.Observing(torch.zeros(2, HEADS, 64, dtype=torch.float64), torch.zeros(HEADS, 2, dtype=torch.int32))
    short, whole = (padded([0, 3], columns, "cpu") for columns in (21, 1025))

    def new(heads, tokens=1, first=4096, dtype=torch.bfloat16):
        return torch.empty(1 << 14, dtype=dtype).as_strided((2, heads, tokens, 64), (first, 64, 64, 1))

    plain = {"q": new(SHARE * HEADS), "keys": new(HEADS), "values": new(HEADS), "scaling": 0.1, "softcap": 0.0}
    others = [{name: new(plain[name].shape[1], **how)} for name in ("q", "keys", "values") for how in OTHERS]
    others += [{"scaling": 0.2}, {"softcap": 1.0}, {"sealing": sealing}, {"observing": sums}]
    others += [{"mask": short}, {"mask": whole}, {"mask": torch.zeros(2, 1, 1, 21)}]
    for other in others:
        for knobs in (plain, plain, plain | other, plain | other):
            assert lines.append_attend(held=held, **knobs) is None
    # One after the other, and neither is looked up again at once.
    assert len(asked) == 2 * len(others)
    assert asked[::2] == [asked[0]] * len(others)
    assert len(set(asked)) == len(others) + 1
    more = plain | {"sealing": sealing}
    for knobs in (more, more | {"sealing": sealing._replace(most=(1, 0))}, plain, plain):
        lines.append_attend(held=held, **knobs)
    assert len(set(asked)) == len(others) + 2
    asked.clear()
    monkeypatch.setattr(lines, "edition", lambda: -1)
    for _ in range(2):
        lines.append_attend(held=held, **plain)
    assert len(asked) == 1
    # Other tensors of the store.
    layer.store.state = layer.store.state.with_window(2, layer.store.windows[2][:, :, :32].contiguous())
    layer.store.state = grow(layer.store.state, 0, 50)
    lines.append_attend(held=layer.store.held, **plain)
    assert len(set(asked)) == 2


def test_a_mask_says_once_what_it_is(monkeypatch):
    """All layers are given the same one, if it is a step's; what others are may change."""
    lines, asked = lines_of(monkeypatch), []
    real = lines.mask_kind
    monkeypatch.setattr(lines, "mask_kind", lambda mask: (asked.append(mask), real(mask))[1])
    own, other = padded([0, 3], 21, "cpu"), torch.zeros(2, 1, 1, 21, dtype=torch.bool)
    for mask in (own, own, other, other):
        assert lines._kind(mask) == real(mask)
    assert [mask is own for mask in asked] == [True, False, False]


def lie_of(store):
    return [x.data_ptr() for x in (store.counters, *store.windows, *[x for run in store.runs for x in run.flat()])]


@pytest.mark.parametrize("name", ["saw-int4", "kivi-2", "triaxial", "arkv"])
def test_what_is_remembered_of_tensors_is_of_those_that_are_there(name, monkeypatch):
    """Whatever gives a store other tensors."""
    lines = lines_of(monkeypatch)
    knobs = {"budget_tokens": 60} if name == "arkv" else {}
    layer, generator, seen = layer_of(small(name, **knobs)), torch.Generator().manual_seed(0), set()

    def take(*counts):
        for count in counts:
            step(layer, states(layer.batch_size if layer.seen else 2, count, 32, torch.float32, "cpu", generator))
            check()

    def check(store=None):
        store = layer.store if store is None else store
        lie = lie_of(store)
        assert lines._Noted(store.held).lie == lie
        assert store.held is store.held
        assert (store.held.tails, store.held.blocks) == (
            tuple(x.shape[2] for x in store.windows[2:]),
            store.runs[0].table.shape[1],
        )
        seen.add(tuple(lie))

    take(70, *[1] * 40)
    layer.crop(-3)
    check()
    take(1)
    layer.reorder_cache(torch.tensor([1, 0]))
    check()
    layer.batch_repeat_interleave(2)
    check()
    take(1)
    layer.batch_select_indices(torch.tensor([0, 2, 3]))
    check()
    take(1)
    layer.store.to("cpu")
    check()
    first = layer.store.held
    for store in (copy.deepcopy(layer.store), pickle.loads(pickle.dumps(layer.store))):
        assert store.held is not first
        assert not {*lie_of(store)} & ({*lie_of(layer.store)} - {0})
        check(store)
    assert layer.store.held is first
    layer.reset()
    take(30, 1)
    assert len(seen) > 6


def test_stores_are_given_tensors_in_one_place():
    """Elsewhere it would not be noticed."""
    layer, generator = layer_of(get_scheme("triaxial")), torch.Generator().manual_seed(0)
    step(layer, states(2, 200, 64, torch.float32, "cpu", generator))
    store = layer.store
    run, window = store.runs[0], store.windows[0]
    for name in ("table", "pos", "keys", "values"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(run, name, getattr(run, name))
    for parts, new in ((run.keys, window), (run.values, window), (store.runs, run), (store.windows, window)):
        with pytest.raises(TypeError):
            parts[0] = new
    for name in ("counters", "windows", "runs"):
        held = store.held
        with pytest.raises(AttributeError):
            setattr(store, name, getattr(store, name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(store.state, name, getattr(store, name))
        assert store.held is held
        store.state = store.state.replace(**{name: getattr(store, name)})
        assert store.held is not held


def test_what_the_host_knows_goes_with_what_it_is_of():
    """Tokens that change runs end the copy of the counters, and bound the last run anew; a step does neither."""
    layer, generator = layer_of(get_scheme("triaxial")), torch.Generator().manual_seed(0)
    step(layer, states(2, 200, 64, torch.float32, "cpu", generator))
    store = layer.store
    tally = HostCounters.empty(store.counters, store.states)
    store.state = store.state.replace(host_counters=tally)
    held, before = store.held, store.state
    store.state = store.state.replace(states=store.forecast(3).appended)
    assert store.state.host_counters is tally
    assert store.held is held
    assert store.longest == before.longest + 3
    assert store.state.wide_most == before.wide_most + 3
    store.state = store.state.replace(widest=7)
    assert store.state.host_counters is None
    assert store.state.wide_most == 7 + max(store.forecast().tail_slots)
    store.state = store.state.replace(widest=5, host_counters=tally)
    assert store.state.host_counters is tally
    # The value from before is as it was.
    assert before.host_counters is tally
    assert before.longest == store.longest - 3


def test_tensors_that_were_replaced_are_given_back():
    """Nothing that is remembered keeps them."""
    layer, generator = layer_of(get_scheme("saw-int4")), torch.Generator().manual_seed(0)
    step(layer, states(2, 200, 64, torch.float32, "cpu", generator))
    store = layer.store
    store.held.noted = "something"
    old = [weakref.ref(x) for x in (store.runs[0].table, *store.runs[0].keys, store.windows[2], store.counters)]
    store.state = grow(store.state, 0, store.runs[0].table.shape[1] + 5)
    store.grow_tail("keys", store.windows[2].shape[2] + 1)
    store.state = store.state.replace(counters=store.counters.clone())
    assert [x() for x in old] == [None] * len(old)
    assert store.held.noted is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are those of a GPU there")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["saw-int4", "kitty-pro", "mixkvq", "kivi-2", "full", "triaxial"])
def test_addresses_are_those_of_tensors(name, masked, monkeypatch):
    """Over steps that seal, grow and move tensors; and whether somebody watches or not."""
    lines, calls, told, watched = lines_of(monkeypatch), [], [], [False]
    launch_module = pytest.importorskip("hfkvq.kernels.triton.launch")

    class Compiled:
        function, packed_metadata = 5, (1, 1, 0)

        def _init_handles(self):
            """Nothing has to be loaded."""

        def __init__(self, launch):
            self.name = launch._kernel.__name__

        def run(self, *given):
            calls.append((self.name, given))

        def __getitem__(self, grid):
            told.append(self.name)
            return lambda *args: self.run(*grid, 0, 5, (1, 1, 0), None, None, None, *args)

    def prepare(launch, tensors):
        own = tuple(tensors) if launch._nest is None else launch._nest(tensors)
        launch._note(Compiled(launch), own, [0])

    def lie(x):
        return tuple(map(lie, x)) if isinstance(x, tuple) else x.data_ptr() if isinstance(x, torch.Tensor) else x

    def first(launch, *tensors):
        own = tensors if launch._nest is None else launch._nest(tensors)
        rest = (0, 5, (1, 1, 0), None, None, None, *lie(tuple(own)), *launch._rest)
        calls.append((launch._kernel.__name__, (*launch.grid, *rest)))

    active = SimpleNamespace(get_current_stream=lambda index: 0)
    for module in (lines, launch_module):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(module, "is_watched", lambda: watched[0])
    monkeypatch.setattr(launch_module.Launch, "prepare", prepare)
    monkeypatch.setattr(launch_module.Launch, "__call__", first)
    for make in (lines._step, lines.begin_launch, lines.end_launch, lines.append_launch):
        make.cache_clear()
    # The same memory for what each step makes, so that both ways can be compared.
    places, empty = {}, torch.empty
    fixed = SimpleNamespace(**vars(torch))
    fixed.empty = lambda *size, **more: places.setdefault((*map(repr, size), repr(more)), empty(*size, **more))
    monkeypatch.setattr(lines, "torch", fixed)
    layer, generator, columns = layer_of(get_scheme(name)), torch.Generator().manual_seed(0), 60
    step(layer, states(1, columns, 128, torch.bfloat16, "cpu", generator))
    store, sums = layer.store, None
    if layer.queries is not None:
        sums = line.Observing(layer.queries.sums.clone(), layer.queries.counts.clone())
    for at in range(30):
        columns += 1
        q, k, v = states(1, 1, 128, torch.bfloat16, "cpu", generator)
        mask = padded([2], columns, "cpu") if masked else None
        if at % 7 == 3:
            store.state = grow(store.state, 0, store.runs[0].table.shape[1] + 1)
        if at % 7 == 5:
            store.state = store.state.replace(counters=store.counters.clone())
        then = store.forecast(1)
        plain = any(then.due) and line.seals_with_steps(store.format, then.due)
        sealing = line.Sealing(store.sizes.local, store.sizes.unit, then.due) if plain else None
        given = (q, k, v, store.held, 0.1 if at % 3 else 0.2, 0.0, sealing, sums, mask)
        # The first may make ready.
        lines.append_attend(*given)
        calls.clear()
        got = []
        for watched[0] in (False, True, False):
            assert lines.append_attend(*given).shape == (1, 1, SHARE * HEADS, 128)
            got.append(calls[:])
            assert told == [x[0] for x in calls] * watched[0]
            calls.clear(), told.clear()
        # As the first time, of tensors.
        with monkeypatch.context() as patch:
            patch.setattr(launch_module.Launch, "ready", lambda *_: None)
            lines.append_attend(*given)
        assert got[0] == got[1] == got[2] == calls
        assert len(got[0]) == 3
        assert [x[0] for x in got[0]][1] == "decode_kernel"
    for make in (lines._step, lines.begin_launch, lines.end_launch, lines.append_launch):
        make.cache_clear()


def test_nothing_is_done_where_no_kernel_is(monkeypatch):
    """On the CPU, and where a kernel has not been launched for such tensors, the answer is None, and nothing else."""
    layer, generator = layer_of(get_scheme("kitty-pro")), torch.Generator().manual_seed(0)
    step(layer, states(1, 50, 128, torch.float32, "cpu", generator))
    before = [x.clone() for x in layer.store.tensors()]
    queries, keys, values = states(1, 1, 128, torch.float32, "cpu", generator)
    assert layer.store.step(queries, keys, values, AttentionArguments(0.1)) is None
    for a, b in zip(before, layer.store.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_failed_seal_leaves_tokens_in_the_windows(monkeypatch):
    layer, generator = layer_of(get_scheme("saw-int4")), torch.Generator().manual_seed(0)
    step(layer, states(1, 50, 128, torch.float32, "cpu", generator))
    other = layer_of(get_scheme("saw-int4"))
    generator.manual_seed(0)
    step(other, states(1, 50, 128, torch.float32, "cpu", generator))
    given = states(1, 1, 128, torch.float32, "cpu", generator)
    with monkeypatch.context() as patch:
        patch.setattr(line, "seal", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
        with pytest.raises(torch.OutOfMemoryError):
            step(layer, given)
    step(other, given)
    given = states(1, 1, 128, torch.float32, "cpu", generator)
    step(layer, given), step(other, given)
    assert_same(layer, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process: see the next test")
@pytest.mark.parametrize(("name", "prompt"), [("saw-int4", 20), ("full", 130), ("mixkvq", 20), ("kivi-2", 170)])
def test_kernels_of_steps_are_those_of_the_operations(name, prompt, monkeypatch):
    """Under the interpreter, with what layers ask of a step: to seal, to observe, or to seal one side."""
    pytest.importorskip("triton")
    generator, done = torch.Generator().manual_seed(0), []
    one, other = layer_of(get_scheme(name)), layer_of(get_scheme(name), plainly=False)
    real = line._launches().append_attend
    monkeypatch.setattr(line._launches(), "append_attend", lambda *given: (done.append(given[6:8]), real(*given))[1])
    for tokens in (prompt, 1, 1, 1):
        given = states(1, tokens, 64, torch.float16, "cpu", generator)
        with use_interpreter():
            assert torch.equal(step(one, given), step(other, given))
    assert_same(one, other)
    assert len(done) == 3
    for sealed, observing in done:
        assert (observing is not None) == (name == "mixkvq")
        assert (sealed is not None) == (name != "mixkvq")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_step_whose_launch_fails_can_be_taken_again(which, monkeypatch):
    """Its token is counted once, whichever launch it was."""
    pytest.importorskip("triton")
    generator, launches = torch.Generator().manual_seed(0), []
    one, other = layer_of(get_scheme("saw-int4")), layer_of(get_scheme("saw-int4"), plainly=False)
    Launch = line._launches().Launch
    real = Launch.__call__

    def fails(launch, *tensors):
        launches.append(launch)
        if len(launches) == which:
            raise RuntimeError("out of resources")
        real(launch, *tensors)

    with use_interpreter():
        for tokens in (20, 1, 1, 1):
            given = states(1, tokens, 64, torch.float16, "cpu", generator)
            expected = step(other, given)
            if tokens == 1 and not launches:
                monkeypatch.setattr(Launch, "__call__", fails)
                with pytest.raises(RuntimeError, match="out of resources"):
                    step(one, given)
                monkeypatch.setattr(Launch, "__call__", real)
                assert one.store.counters[1].item() == one.store.longest == 20
                # The update has staged it, and the next one stores it.
                continue
            got = step(one, given)
            assert torch.equal(got, expected)
    assert len(launches) == which
    assert_same(one, other)


@pytest.mark.parametrize(
    ("dtype", "pads"), [(torch.bfloat16, None), (torch.bfloat16, [0, 21]), (torch.float16, None)], ids=str
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=GPU) for name in PRESETS])
def test_launches_are_those_of_the_operations(name, dtype, pads, taken):
    """Over page borders, growing tables and tails, other strides and alignments, with masks or not: to the bit."""
    scheme, generator = get_scheme(name), torch.Generator().manual_seed(0)
    one, other, columns = layer_of(scheme), layer_of(scheme, plainly=False), 0
    for at, tokens in enumerate((300, *[1] * 200, 3, *[1] * 100)):
        # Not of prompts: other kernels attend to those.
        given = states(2, tokens, 128, dtype, "cuda", generator, odd=tokens == 1 and at % 17 == 0)
        if at % 2:
            # As models hand them over: (B, T, H, D) in memory.
            given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
        columns, mask = columns + tokens, None
        if pads and not at:
            padded_prompt(one, given, pads), padded_prompt(other, given, pads)
            seal_one_by_one(other)
            continue
        if pads and tokens == 1:
            mask = padded(pads, columns, "cuda")
        got, counts = step(one, given, mask), dict(taken)
        assert torch.equal(got, step(other, given, mask)), at
        assert taken == counts
        seal_one_by_one(other)
    assert taken["append_attend"] > 250
    assert (taken["masked"] > 250) == bool(pads)
    if name in ("saw-int4", "int4", "full", "kivi-2", "kivi-4"):
        assert taken["sealed"] > 200
    if name == "mixkvq":
        assert taken["observed"] > 250
    assert_same(one, other)


@pytest.mark.parametrize("rows", [pytest.param([1, 0], marks=GPU), pytest.param([0, 0, 1], marks=GPU)])
def test_rows_may_move_between_steps(rows, taken):
    generator = torch.Generator().manual_seed(0)
    one, other = layer_of(get_scheme("saw-int4")), layer_of(get_scheme("saw-int4"), plainly=False)
    for layer in (one, other):
        generator.manual_seed(1)
        step(layer, states(2, 200, 128, torch.bfloat16, "cuda", generator))
    for batch in (2, len(rows)):
        for _ in range(20):
            given = states(batch, 1, 128, torch.bfloat16, "cuda", generator)
            assert torch.equal(step(one, given), step(other, given))
        for layer in (one, other):
            if batch == 2:
                layer.reorder_cache(torch.tensor(rows, device="cuda"))
    assert taken["append_attend"] > 30
    assert_same(one, other)
