"""What every scheme must do, with the smallest pages that cross borders; each test says what a user would lose."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.layer_state.base import ROLLBACK
from hfkvq.caches.store.accounting import nbytes
from hfkvq.kernels import PageFormat
from hfkvq.kernels.arguments import AttentionArguments
from tests.caches.driver import (
    ALIKE,
    DIM,
    OF_EACH_SCHEME,
    Row,
    assert_close,
    assert_same_bits,
    attention,
    by_layout,
    cases,
    counted,
    distinct,
    evicting,
    feed,
    forward,
    join,
    make,
    row,
    small,
    start_of,
    stored,
    tensors_of,
    unit,
)
from tests.caches.models import build, prompt

CASES = cases()

# Every score, every kind of pages, and both kinds of trims once; `test_token_eviction` has them all.
OVER_BUDGET = (
    "snapkv+kitty-pro",
    "h2o+full",
    "streaming-llm+kvarn",
    "tova+saw-int4",
    "expected-attention+full",
    "pyramidkv+kivi-2",
    "h2o+mixkvq",
    "tova+kitty, every step",
)

EVERYTHING = CASES | {f"{name} over budget": evicting()[name] for name in OVER_BUDGET}
EVERYTHING["arkv over budget"] = small("arkv", budget_tokens=40, window=8)

on_every_preset = pytest.mark.parametrize("name", distinct())

LAYOUTS = [name for name in by_layout() if name not in ALIKE]
IN_KERNELS = ("arkv", "kvarn-k4v2", "mixkvq-fractions")

# A preset of each scheme, with corners of windows, and over budget; in one, values are several pages behind keys.
OF_FAMILIES = {"kitty-wide": small("kitty", page_size=8, local_length=37)} | {
    name: EVERYTHING[name]
    for name in (
        *(
            "arkv",
            "full",
            "kitty-odd",
            "kvarn",
            "mixkvq-total",
            "saw-int4-odd",
            "triaxial-odd",
        ),
        *(f"{name} over budget" for name in ("tova+saw-int4", "h2o+mixkvq", "tova+kitty, every step", "arkv")),
    )
}
CASES_OF_FAMILIES = {name: scheme for name, scheme in OF_FAMILIES.items() if name in CASES}
on_every_case_of_families = pytest.mark.parametrize("scheme", CASES_OF_FAMILIES.values(), ids=CASES_OF_FAMILIES.keys())


def on_every_third(cases, first):
    """Cases of families, and of the others every third one: three tests of a kind have each case between them."""
    others = [name for name in cases if name not in OF_FAMILIES]
    chosen = {name: x for name, x in cases.items() if name in OF_FAMILIES or others.index(name) % 3 == first}
    return pytest.mark.parametrize("scheme", chosen.values(), ids=chosen.keys())


def in_turn(scheme, ways):
    """One way for each case."""
    at = list(EVERYTHING.values()).index(scheme) % len(ways)
    return ways[at : at + 1]


def assert_dense_agrees(layer, queries, mask=None):
    """`attend` is attention over `dense`: the fused road and the universal one."""
    scaling = queries.shape[-1] ** -0.5
    counted(layer)
    fused = layer.attend(queries, AttentionArguments(scaling, mask))
    plain = attention(queries, layer.dense("keys"), layer.dense("values"), mask, scaling)
    assert_close(fused, plain)


def sealed(layer):
    """(2, B): keys and values that each row has sealed, in all runs."""
    return counted(layer).counters[2:].unflatten(0, (-1, 2)).sum(0)


# Reading.


def test_reserved_memory_is_poisoned():
    """Guards every test here: what hfkvq allocates holds NaN and nonsense until it is written."""
    codes, scale, _, _, index = PageFormat(2, "channel", 8, 8, ((4, 8),)).allocate(
        "keys", 2, 1, 16, torch.float32, torch.device("cpu")
    )
    assert scale.isnan().all()
    assert (codes == 0x5A5A).all()
    assert (index == 255).all()
    (whole,) = PageFormat(16, "token", 1, 8).allocate("keys", 2, 1, 16, torch.bfloat16, torch.device("cpu"))
    assert whole.isnan().all()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "reference") for name in LAYOUTS),
        # Others are interpreted in `test_life_in_kernels`, and all formats in `tests/kernels`.
        *((name, "interpret") for name in ("full", "saw-int4", "trellis-2.5", "triaxial")),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in by_layout()),
    ],
    indirect=["backend"],
)
def test_fused_attention_is_attention_over_dense(name, backend, device):
    """Prompt, then decode over two page borders, one row padded; one border where each step takes a second."""
    scheme = small(name)
    page = unit(scheme)
    layer = make(scheme)
    start, steps = (21, 2 * page + 3) if backend == "reference" else (2 * page + 2, 4)
    rows, pads = [row(i, start + steps, device=device) for i in (1, 2)], [0, 6]
    valid = torch.arange(start + steps, device=device) >= torch.tensor(pads, device=device)[:, None]
    feed(layer, rows, [start], pads)
    before = sealed(layer)
    for i in range(start, start + steps):
        queries, keys, values = join([x[i - pad : i + 1 - pad] for x, pad in zip(rows, pads, strict=True)])
        out = forward(layer, queries, keys, values, valid[:, : i + 1])
        assert torch.isfinite(out).all()
        # Of the interpreter's few steps the last, behind a border.
        if (backend == "reference" and i % 8 == 0) or i == start + steps - 1:
            assert_dense_agrees(layer, queries, valid[:, None, None, : i + 1])
    crossed = sealed(layer) - before
    assert (crossed >= page).all() if backend == "reference" else crossed.any()


# Prompts of other schemes are cut in `test_chunks_do_not_matter`; here one of each family is enough.
@on_every_case_of_families
def test_prompts_of_every_length(scheme):
    """Lengths 1, S, S+G-1, S+G and several pages; each continues over a border, as if it had been decoded."""
    sink, page = max(scheme.layout(DIM, DIM).sink, 1), unit(scheme)
    lengths, steps = (1, sink, sink + page - 1, sink + page, 2 * page + 3), page + 2
    stepped, own, held = make(scheme), row(4, max(lengths) + steps), {}
    for at in range(len(own)):
        forward(stepped, *join([own[at : at + 1]]))
        if at + 1 - steps in lengths:
            held[at + 1 - steps] = stored(stepped, 0)
    for length in set(lengths):
        layer, mine = make(scheme), own[: length + steps]
        feed(layer, [mine], [length, 1, steps - 3, 1, 1])
        assert_same_bits(stored(layer, 0), held[length])
        assert_dense_agrees(layer, mine.queries[None, :, -1:])
        assert layer.get_seq_length() == len(mine)


@on_every_preset
def test_paper_defaults_hold_a_long_row(name):
    """Presets as published, over two borders of their own pages."""
    scheme = get_scheme(name)
    page = unit(scheme)
    layer = make(scheme)
    sink, local = scheme.layout(DIM, DIM).sink, scheme.layout(DIM, DIM).values.local
    # What stays whole beside a page and a sink of 32 is fed with the prompt.
    more = max(0, sink + local - page - 32)
    own = row(5, 2 * page + 60 + more)
    feed(layer, [own], [page + 50 + more, *[16] * ((page - 16) // 16), 10, 13, 1, 1, 1])
    assert_dense_agrees(layer, own.queries[None, :, -1:])
    assert int(sealed(layer)[0, 0]) >= page
    seen = layer.get_seq_length()
    # Sink and local window come back whole.
    torch.testing.assert_close(layer.dense("keys")[0, :, :sink], own.keys[:, :sink], rtol=1e-5, atol=1e-5)
    if local:
        whole = slice(seen - local, seen)
        torch.testing.assert_close(layer.dense("values")[0, :, whole], own.values[:, whole], rtol=1e-5, atol=1e-5)


@on_every_case_of_families
def test_dense_is_close_to_what_was_given(scheme):
    """No token is lost, swapped or doubled: every column is nearest to its own original."""
    layer = make(scheme)
    own = row(6, 90)
    feed(layer, [own], [70] + [1] * 20)
    for side in ("keys", "values"):
        dense, given = layer.dense(side)[0], getattr(own, side)
        distance = torch.cdist(dense.transpose(0, 1).flatten(1), given.transpose(0, 1).flatten(1))
        assert distance.argmin(1).tolist() == list(range(90))


# Rows and padding.


def _life(scheme):
    """One layer through all that happens to a cache; outputs, and what is stored after the prompt and at the end."""
    layer, outs = make(scheme), []
    outs += feed(layer, [row(1, 40), row(2, 40)], [30, 1], [0, 5])
    begun = [stored(layer, i) for i in range(2)]
    layer.reorder_cache(torch.tensor([1, 0]))
    outs += forward(layer, *join([row(11, 1), row(12, 1)]))
    layer.crop(-2)
    outs += forward(layer, *join([row(13, 20), row(14, 20)]))
    copied = copy.deepcopy(layer)
    layer.batch_repeat_interleave(2)
    outs += forward(layer, *join([row(15 + i, 1) for i in range(4)]))
    layer.batch_select_indices(torch.tensor([3, 0]))
    outs += forward(layer, *join([row(19, 3), row(20, 3)]))
    outs += forward(copied, *join([row(21, 1), row(22, 1)]))
    layer.reset()
    outs += feed(layer, [row(3, 30), row(4, 30)], [29, 1])
    return outs, begun + [stored(which, i) for which in (copied, layer) for i in range(2)]


@pytest.mark.parametrize("name", IN_KERNELS)
def test_life_in_kernels(name):
    """Reorder, crop, a second prompt, repeat, select, copy, reset: the kernels follow the reference to the bit."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, so they cannot be interpreted")
    from hfkvq.kernels import use_interpreter

    expected, bits = _life(small(name))
    with use_interpreter():
        got, kernel_bits = _life(small(name))
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)
    for a, b in zip(kernel_bits, bits, strict=True):
        assert_same_bits(a, b)


@on_every_third(CASES, 2)
def test_chunks_do_not_matter(scheme):
    """Odd chunks, shorter and longer than a step, and one that is padding only for two of the rows."""
    rows, pads, alone = [row(i, 80) for i in (1, 2, 3, 4)], [0, 3, 20, 38], [make(scheme) for _ in range(4)]
    for own, pad, layer in zip(rows, pads, alone, strict=True):
        feed(layer, [own[: 80 - pad]], [80 - pad])
    for chunks in in_turn(scheme, ([17, 20, 5, 1, 1, 9, 27], [3, 2, 1, 6, 8, 16, 16, 1, 27], [1] * 7 + [32, 41])):
        layer = make(scheme)
        feed(layer, rows, chunks, pads)
        assert [start_of(layer, i) for i in range(4)] == pads
        for i in range(4):
            assert_same_bits(stored(layer, i), stored(alone[i], 0))
        valid = torch.arange(80) >= torch.tensor(pads)[:, None]
        assert_dense_agrees(layer, torch.stack([x.queries[:, :1] for x in rows]), valid[:, None, None])


@pytest.mark.parametrize("name", ["arkv", "kitty-pro", "mixkvq", "saw-int4", "triaxial"])
def test_left_padding_in_a_model(name):
    """A padded prompt continues with the tokens that it continues with alone."""
    model = build("llama")
    scheme, ids = small(name), prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    together = _generate(model, scheme, input_ids=ids, attention_mask=mask)
    for i, pad in enumerate((0, 11)):
        alone = _generate(model, scheme, input_ids=ids[i : i + 1, pad:])
        assert together[i, 30:].tolist() == alone[0, 30 - pad :].tolist()


def _generate(model, scheme, **inputs):
    cache = MixedKVCache(model, scheme)
    return model.generate(**inputs, past_key_values=cache, max_new_tokens=9, do_sample=False)


# Rows move.


PADS = (0, 9, 20)

# Twenty tokens.
CROSSING = (1, 1, 15, 1, 1, 1)

# Calls after rows have moved, by their tokens: every row crosses a border of its pages.
MOVED = (1, 8, 7, 1)


def _started(scheme):
    """A layer whose rows have different lengths, and the rows."""
    rows, layer = [row(i + 1, 90) for i in range(3)], make(scheme)
    feed(layer, rows, [49, 1], PADS)
    return layer, rows, list(PADS)


def _continue(layer, batch, pads, calls, at):
    """Decodes tokens of rows (each a `Row` of what comes next), so many a call, with ``at`` columns before."""
    outs, done = [], 0
    for count in calls:
        new = slice(done, done + count)
        done += count
        queries, keys, values = join([x[new] for x in batch])
        valid = torch.arange(at + done) >= torch.tensor(pads)[:, None]
        outs.append(forward(layer, queries, keys, values, valid))
    return torch.cat(outs, 2)


def _tail(source, nth):
    """What the ``nth`` descendant of a row is given: other tokens than any other's."""
    return row(100 + 10 * source + nth, sum(MOVED))


@functools.cache
def _replayed(scheme, source, nth):
    """A row of `_started` fed alone: its history, then a descendant's tokens."""
    alone, history, tail = make(scheme), row(source + 1, 90)[: 50 - PADS[source]], _tail(source, nth)
    whole = Row(*(torch.cat([getattr(history, s), getattr(tail, s)], 1) for s in ("queries", "keys", "values")))
    (out,) = feed(alone, [whole], [len(history) - 1, 1, *MOVED])
    return stored(alone, 0), out[:, len(history) :]


def _assert_moved(layer, scheme, order):
    """Rows of `_started` moved by ``order`` and then given tokens of their own are the rows fed alone."""
    descendants = [(source, order[:b].count(source)) for b, source in enumerate(order)]
    out = _continue(layer, [_tail(*each) for each in descendants], [PADS[i] for i in order], MOVED, 50)
    for b, each in enumerate(descendants):
        held, expected = _replayed(scheme, *each)
        assert_same_bits(stored(layer, b), held)
        assert_close(out[b], expected)


def _part(layer):
    layer.batch_repeat_interleave(3)
    layer.batch_select_indices(torch.tensor([1, 4, 8]))
    layer.reorder_cache(torch.tensor([2, 1, 1]))


MOVES = {
    "reorder": (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    "part": (_part, [2, 1, 1]),
}


@on_every_third(EVERYTHING, 0)
def test_moved_rows_are_the_rows_fed_alone(scheme):
    """Beams: rows of different lengths trade places, share their past, and part again without touching each other."""
    started, _, _ = _started(scheme)
    size = sum(x.nbytes for x in started.store.state.tensors())
    families = list(OF_FAMILIES.values())
    # "part" is all of it, one after the other.
    for how in ("part", *([list(MOVES)[families.index(scheme) % 3]] if scheme in families else [])):
        move, order = MOVES[how]
        layer = copy.deepcopy(started)
        move(layer)
        assert layer.batch_size == len(order)
        if how == "select":
            assert sum(x.nbytes for x in layer.store.state.tensors()) < size
        _assert_moved(layer, scheme, order)


@on_every_case_of_families
def test_full_pages_are_shared_not_copied(scheme):
    """Repeating rows adds tables, windows and room, but no page changes."""
    layer, _, _ = _started(scheme)
    (run,) = (run for run in layer.store.runs if run.table.shape[1])
    table = run.table[0, 0].item()
    full = [part[table].clone() for part in (*run.keys, *run.values)]
    layer.batch_repeat_interleave(2)
    (run,) = (run for run in layer.store.runs if run.table.shape[1])
    # Where heads are rows of the store, the copy stands behind all heads of its original.
    assert run.table[[0, getattr(layer.store, "fold", 1)], 0].tolist() == [table, table]
    for before, now in zip(full, (*run.keys, *run.values), strict=True):
        assert torch.equal(before.view(torch.uint8), now[table].contiguous().view(torch.uint8))


@on_every_case_of_families
def test_crop_into_shared_pages_parts_the_rows(scheme):
    """Rows that share a full page, cropped into it: each goes on in a page of its own."""
    layer, alone = make(scheme), [make(scheme), make(scheme)]
    own, tails = row(1, 90), [row(2, 20), row(3, 20)]
    for x in (layer, *alone):
        feed(x, [own], [60])
    layer.batch_repeat_interleave(2)
    layer.crop(-17)
    _continue(layer, tails, [0, 0], CROSSING, 43)
    for b in range(2):
        alone[b].crop(-17)
        _continue(alone[b], [tails[b]], [0], CROSSING, 43)
        assert_same_bits(stored(layer, b), stored(alone[b], 0))


# Taking tokens back.


@on_every_third(CASES, 1)
def test_crop_keeps_what_dense_showed(scheme):
    """Into sealed pages, and into the sink: what is left is what was there, dequantized."""
    rows, pads = [row(1, 90), row(2, 90)], [0, 9]
    layer = make(scheme)
    feed(layer, rows, [53, 1, 6, 1], pads)
    for tokens in in_turn(scheme, (5, 17, 60)):
        _assert_cropped(copy.deepcopy(layer), scheme, rows, pads, tokens)


def _assert_cropped(layer, scheme, rows, pads, tokens):
    before = [layer.dense(side) for side in ("keys", "values")]
    layer.crop(-tokens)
    left = 61 - tokens
    assert layer.get_seq_length() == left
    exact = scheme.layout(DIM, DIM).keys.formats[0].bits == 16
    for dense, side in zip(before, ("keys", "values"), strict=True):
        got = layer.dense(side)
        assert got.shape[2] == left
        if exact:
            assert torch.equal(got, dense[:, :, :left])
        else:
            assert_close(got, dense[:, :, :left])
    # What follows is attended with what is left.
    calls = [1, 1, 7] if tokens >= 9 else [1] * min(tokens, 3)
    steps = sum(calls)
    batch = [x[left - pad : 61 - pad] for x, pad in zip(rows, pads, strict=True)] if left > 9 else None
    if batch:
        kept = [layer.dense(side) for side in ("keys", "values")]
        valid = torch.arange(61) >= torch.tensor(pads)[:, None]
        first = join([x[:1] for x in batch])
        expected = attention(
            first[0],
            torch.cat([kept[0], first[1]], 2),
            torch.cat([kept[1], first[2]], 2),
            valid[:, None, None, : left + 1],
            DIM**-0.5,
        )
        out = _continue(layer, batch, pads, calls, left)
        assert_close(out[:, :, :1], expected)
        assert_dense_agrees(layer, first[0], valid[:, None, None, : left + steps])


@on_every_case_of_families
def test_crop_then_a_row_that_had_not_started(scheme):
    """Cropping back into one row's padding: it starts again where its first token comes."""
    rows, layer, never = [row(1, 60), row(2, 60)], make(scheme), make(scheme)
    feed(layer, rows, [40], [0, 30])
    layer.crop(-20)
    assert start_of(layer, 1) == 20
    valid = torch.arange(60) >= torch.tensor([0, 30])[:, None]
    junk = Row(*(torch.full_like(x[:, :10], 1000.0) for x in (rows[1].queries, rows[1].keys, rows[1].values)))
    for new in (slice(20, 30), slice(30, 50)):
        other = junk if new.start == 20 else rows[1][:20]
        queries, keys, values = join([rows[0][new], other])
        forward(layer, queries, keys, values, valid[:, : new.stop])
    feed(never, [rows[1]], [20])
    assert start_of(layer, 1) == 30
    assert_same_bits(stored(layer, 1), stored(never, 0))


@on_every_case_of_families
def test_recording_the_past_keeps_the_newest_unsealed(scheme):
    """Assisted decoding takes back up to 64 tokens exactly; sealing catches up when they are settled."""
    own, layer, plain = row(1, 200), make(scheme), make(scheme)
    layer.activate_past_recording()
    feed(layer, [own], [90] + [5] * 10)
    layer.crop(0)
    sink, most = scheme.layout(DIM, DIM).sink, max(stored(layer, 0)["counts"][1:].tolist())
    assert most <= 140 - sink - ROLLBACK
    assert most > 140 - sink - ROLLBACK - 2 * unit(scheme) - 16
    for side in ("keys", "values"):
        newest = slice(140 - ROLLBACK, 140)
        assert_close(layer.dense(side)[0, :, newest], getattr(own, side)[:, newest])
    # A rejected draft takes nothing with it: the tokens before it are still whole, and later pages those of a cache
    # that never waited.
    for _ in range(3):
        forward(layer, *join([row(9, 7)]))
        layer.crop(-7)
    for side in ("keys", "values"):
        newest = slice(140 - ROLLBACK + 7, 140)
        assert_close(layer.dense(side)[0, :, newest], getattr(own, side)[:, newest])
    _continue(layer, [own[140:200]], [0], [1, 15, *CROSSING, 16, 7, 1], 140)
    feed(plain, [own], [200])
    ours, theirs = stored(layer, 0), stored(plain, 0)
    count = int(ours["counts"][1])
    for side in ("keys", "values"):
        kept = slice(0, sink + min(count, int(ours["counts"][2])))
        assert torch.equal(layer.dense(side)[:, :, kept], plain.dense(side)[:, :, kept])
    assert count <= int(theirs["counts"][1])


# Size.


def held_bytes(cache):
    """Bytes of all memory that a cache's tensors are views of, each once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(cache.layers)}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in ("kitty", "kivi-4", "mixkvq", "saw-int4-kv", "triaxial")),
        *((family, "kitty") for family in ("gemma3", "qwen3-next", "deepseek-v3")),
        ("mistral-sliding", "full"),
    ],
)
def test_memory_is_the_sum_of_all_tensors(family, name):
    """Nothing is held that the report does not count, memory that a view does not show included."""
    model = build(family)
    cache, ids = MixedKVCache(model, small(name)), prompt(2, 50)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.no_grad():
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        for i in range(40, 50):
            model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache)
    assert cache.memory().total == held_bytes(cache)


def test_memory_counts_what_is_held_in_passing():
    """Staged tokens, the padding found in a mask, the query statistics."""
    model, ids = build("llama"), prompt(2, 50)
    staged = MixedKVCache(model, small("kitty"))
    staged.update(*(torch.randn(2, 2, 40, 32) for _ in range(2)), 0)
    assert staged.memory().staged == 2 * 2 * 2 * 40 * 32 * 4
    fed, mask = MixedKVCache(model, small("kitty", score="qk_abs")), torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    mask[0, :, :, :9] = False
    with torch.no_grad():
        model(ids[:, :40], attention_mask=mask, past_key_values=fed)
        model(ids[:, :1], past_key_values=fed)
    for cache in (staged, fed):
        assert cache.memory().total == held_bytes(cache)


# Bits per element of a page, codes, scale, zero and index: head dim 128, pages of 128.
#   kitty keys: 2 + (scale, zero of 128 tokens) 32/128 + (high) 2*16/128 + (index) 8*16/(128*128)
#   mixkvq keys: 2 + (scale, zero of 32 tokens) 32/32 + (full) 16*8/128 + (index) 8*8/(128*128) + high as kitty's.
#   kvarn: b + 32/128 + (factors) 16/128, so that a token and head has 16 * (4 + 0.375) + 16 * (2 + 0.375) = 108 bytes.
#   kitty values: 2 + 32/128.  saw: 4 + 32/128.  kivi (g = 32): b + 32/32.
TOTAL_BITS = {
    "kitty": (2 + 0.25 + 0.25 + 0.0078125, 2.25),
    "kitty-pro": (2 + 0.25 + 0.5 + 0.015625, 2.25),
    "saw-int4": (4.25, 4.25),
    "kivi-2": (3, 3),
    "kivi-4": (5, 5),
    "full": (16, 16),
    "kvarn": (4.375, 2.375),
    "kvarn-k2v2": (2.375, 2.375),
    "mixkvq": (3 + 1.00390625 + 0.515625, 3),
    # Room for twice as many at 16 bits, and half as many at 4.
    "mixkvq-r1-qwen-7b": (3 + 2.0078125 + 0.2578125, 3),
}


@pytest.mark.parametrize("name", TOTAL_BITS)
def test_total_bits_approach_the_layout(name):
    """Bytes of a long row: pages as computed by hand, and windows and tables that stop growing."""
    keys, values = TOTAL_BITS[name]
    layout = get_scheme(name).layout(128, 128)
    tokens = layout.sink + 48 * 128
    layer = make(get_scheme(name), capacity=tokens)
    states = [torch.randn(1, 1, tokens, 128, dtype=torch.bfloat16) for _ in range(2)]
    layer.update(*states)
    layer.begin(None, tokens)
    layer.finish(states[0], AttentionArguments(1.0))
    sizes = nbytes(layer.store.state)
    assert sizes.codes + sizes.metadata == 48 * 128 * 128 * (keys + values) / 8
    # Sink; tail of one unit (kitty, kivi: a page; else a token) less one, and 16 for a step; values: also the local
    # window.
    tails = sum(side.local + side.unit - 1 + 16 for side in (layout.keys, layout.values))
    assert sizes.windows == (2 * layout.sink + tails) * 128 * 2
    # One page number for 128 tokens, four counters, and the count of evicted tokens.
    assert sizes.tables == 48 * 4 + 5 * 4
    total = 8 * sizes.total / (2 * tokens * 128)
    assert (keys + values) / 2 < total < (keys + values) / 2 + 0.9
    if name == "kitty":
        assert sizes.reserved == 0 or sizes.reserved < 48 * 128 * 128 * (keys + values) / 8 / 48 + 1


@pytest.mark.parametrize("name", OF_EACH_SCHEME)
def test_growth_leaves_at_most_a_fifth_unused(name):
    """Eager growth: reserved room stays small beside what is held, once a few pages are full."""
    layer = make(small(name))
    own = row(1, 400)
    forward(layer, *join([own[:160]]))
    for at in range(160, 400, 15):
        forward(layer, *join([own[at : at + 15]]))
        sizes = nbytes(layer.store.state)
        assert sizes.reserved <= 0.35 * (sizes.codes + sizes.metadata)


# Static capacity.


@on_every_case_of_families
def test_fixed_capacity_never_moves(scheme):
    """The addresses of a step are those of every step, which CUDA graphs rely on."""
    layer = make(scheme, capacity=100)
    rows = [row(1, 100), row(2, 100)]
    first = [x[:30] for x in rows]
    feed(layer, first, [30], [0, 7])
    addresses = [x.data_ptr() for x in layer.store.state.tensors()]
    shapes = [x.shape for x in layer.store.state.tensors()]
    valid = torch.arange(100) >= torch.tensor([0, 7])[:, None]
    for at, t in [(30, 1), (31, 20), *((51 + i, 1) for i in range(17)), (68, 16), (84, 7), (91, 9)]:
        queries, keys, values = join([rows[0][at : at + t], rows[1][at - 7 : at - 7 + t]])
        forward(layer, queries, keys, values, valid[:, : at + t])
        if not scheme.evicts and scheme.limits(DIM, DIM).captured is None:
            # Schemes that evict give pages back and take new ones; for others without captured steps it is a limit.
            assert [x.data_ptr() for x in layer.store.state.tensors()] == addresses
            assert [x.shape for x in layer.store.state.tensors()] == shapes
    assert layer.get_max_length() == layer.get_seq_length() == 100
    grown = make(scheme)
    feed(grown, rows, [100], [0, 7])
    for i in range(2):
        assert_same_bits(stored(layer, i), stored(grown, i))
