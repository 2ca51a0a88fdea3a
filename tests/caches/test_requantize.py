"""`requantize_on_turn_end`: what a new turn has made older gets the bits of its age, and loses no other token."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hfkvq import TriAxialCache, get_scheme
from hfkvq.caches.layer_state.tags import TokenRecord
from hfkvq.caches.store import requantize as requantizing
from hfkvq.caches.store.requantize import requantize_by_tags
from hfkvq.caches.tags import PAD, TEMPORAL, parse_tag
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.quantize import dequantize_pages, quantize_pages
from tests.caches import driver
from tests.caches.driver import DIM, assert_close, assert_same_bits, attention, join, mask_of, row, stored, tensors_of
from tests.caches.models import build, prompt

TURN = 3
"""Token that begins a turn."""

TABLE = {
    # Tool results one turn back, all else two.
    "turn_m1|text|obs": 2,
    **{f"{age}|text|{kind}": 2 for age in ("older", "turn_m2") for kind in ("obs", "user")},
}
PAGE, UNIT = 16, 8
SMALL = {"table": TABLE, "page_size": PAGE, "group_size": 8, "seal_unit": UNIT, "sink_length": 0}


class Aging:
    """Turns begin with token 3; even ids are tool results, odd ones the user's."""

    def tag(self, ids, mask=None):
        begins = (ids == TURN).long()
        turns_behind = begins.flip(1).cumsum(1).flip(1) - begins
        tags = torch.empty_like(ids, dtype=torch.uint8)
        for back, age in enumerate(reversed(TEMPORAL)):
            mine = turns_behind == back if age != "older" else turns_behind >= back
            for rest, kind in enumerate(("obs", "user")):
                tags[mine & (ids % 2 == rest)] = parse_tag(f"{age}|text|{kind}")
        return tags if mask is None else tags.masked_fill(mask == 0, PAD)


def make(model, requantize=True, **knobs):
    return TriAxialCache(model, tagger=Aging(), requantize_on_turn_end=requantize, **(SMALL | knobs))


def turn(tokens, seed, rows=1):
    """Ids of a turn: its beginning, and as many tokens in all."""
    ids = prompt(rows, tokens, seed)
    ids = torch.where(ids == TURN, 5, ids)
    ids[:, 0] = TURN
    return ids


@pytest.fixture
def model():
    return build("llama")


def forward(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits


def generate(model, cache, ids, steps, **kwargs):
    # No turn begins within an answer.
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=steps, do_sample=False, bad_words_ids=[[TURN]], **kwargs
    )


def widths_of(ids, table=TABLE, mask=None):
    """Bits of each column, as a conversation that ends here has them."""
    tags = Aging().tag(ids, mask)[0].tolist()
    bits = {parse_tag(name): width for name, width in table.items()}
    return [bits.get(tag, 4) for tag in tags]


def positions(layer, index=0):
    """Row positions of sealed tokens: (those of 2 bits, those of 4)."""
    held = stored(layer, index)
    return [held.get(f"{run} keys positions", torch.empty(0)).tolist() for run in (0, 1)]


class Model:
    """Where tokens of one row must be, written down without any tensor."""

    def __init__(self, page=PAGE, unit=UNIT):
        self.page, self.unit = page, unit
        self.narrow, self.wide, self.widths, self.sealed = [], [], [], 0

    def _take(self, places):
        two = [p for p in places if self.widths[p] == 2]
        return two[: len(two) // self.page * self.page]

    def prompt(self, widths):
        """A prompt has come: ``widths`` of all columns, those before it included."""
        self.widths = list(widths)
        self.demote()
        self.seal()

    def step(self, tokens):
        for _ in range(tokens):
            self.widths.append(4)
            self.seal()

    def demote(self):
        gone = self._take(self.wide)
        self.narrow += gone
        self.wide = [p for p in self.wide if p not in gone]

    def seal(self):
        new = range(self.sealed, len(self.widths) // self.unit * self.unit)
        two = self._take(new)
        self.narrow += two
        self.wide += [p for p in new if p not in two]
        self.sealed += len(new)

    def check(self, cache, index=0):
        for layer in cache.compressed_layers:
            narrow, wide = positions(layer, index)
            assert sorted(narrow) == sorted(self.narrow)
            assert wide == self.wide
            newest = [max(narrow[at : at + self.page]) for at in range(0, len(narrow), self.page)]
            assert newest == sorted(newest)


# Widths.


def test_widths_are_the_tables_after_every_turn(model):
    """Through `generate`: prompts, answers and what they turn out to be, over five turns."""
    cache, expected = make(model), Model()
    ids = torch.empty(1, 0, dtype=torch.long)
    moved = []
    for number, (tokens, steps) in enumerate([(70, 30), (20, 30), (60, 3), (2, 9), (12, 16)]):
        ids = torch.cat([ids, turn(tokens, number)], 1)
        before = len(expected.narrow)
        expected.prompt(widths_of(ids))
        ids = generate(model, cache, ids, steps)
        # The last token of an answer is not cached.
        expected.step(steps - 1)
        expected.check(cache)
        moved.append(len(expected.narrow) - before)
    assert sum(n > 0 for n in moved) >= 3
    # Answers are among them: the table says nothing of a width that only prompts may have.
    assert any(70 <= p < 99 for p in expected.narrow)
    assert cache.memory().code_bits < 3


# Bytes.


@pytest.mark.parametrize("page", [16, 32])
def test_a_fixed_capacity_is_kept_and_used_again(model, page):
    """The freed pages take the tokens that come next; nothing is allocated beyond what there was.

    With pages that no step can fill, layers are those whose steps may be compiled: addresses stay as well.
    """
    cache, expected = make(model, max_cache_len=256, page_size=page), Model(page)
    assert (cache.layers[0].buffer is not None) == (page == 32)
    ids = turn(100, 0)
    expected.prompt(widths_of(ids))
    ids = generate(model, cache, ids, 2)
    expected.step(1)
    addresses = [x.data_ptr() for x in cache.layers[0].store.state.tensors()]
    size, free = sum(layer.store.nbytes().total for layer in cache.layers), cache.memory().compressed.reserved
    for number in (1, 2):
        ids = torch.cat([ids, turn(70, number)], 1)
        expected.prompt(widths_of(ids))
        ids = generate(model, cache, ids, 6)
        expected.step(5)
        expected.check(cache)
        assert len(expected.narrow) >= 32 * number
        assert sum(layer.store.nbytes().total for layer in cache.layers) == size
    assert cache.memory().compressed.reserved < free
    assert [view.table.shape[1] for view in cache.layers[0].store.runs] == [256 // page, 256 // page]
    if page == 32:
        assert [x.data_ptr() for x in cache.layers[0].store.state.tensors()] == addresses


# What is stored, and attention to it.


def test_moved_tokens_are_quantized_from_what_was_stored(model):
    """2-bit pages are those of the dequantized 4-bit tokens, bit for bit; all others are as they were."""
    # `dense` undoes smoothing, and rounds.
    cache = make(model, smooth_keys=False)
    forward(model, cache, turn(100, 0, rows=2))
    before = [[layer.dense(side) for side in ("keys", "values")] for layer in cache.layers]
    forward(model, cache, torch.tensor([[TURN, 5], [TURN, 7]]))
    for layer, dense in zip(cache.layers, before, strict=True):
        formats = layer.store.format.runs[0]
        for index in range(2):
            narrow, wide = positions(layer, index)
            assert len(narrow) >= 32
            for side, fmt, old in zip(("keys", "values"), formats, dense, strict=True):
                now = layer.dense(side)[index]
                pages = old[index][:, narrow].unflatten(1, (-1, PAGE)).transpose(0, 1)
                made = dequantize_pages(quantize_pages(pages, fmt, side), fmt, side, DIM)
                assert torch.equal(now[:, narrow], made.transpose(0, 1).flatten(1, 2))
                assert not torch.equal(now[:, narrow], old[index][:, narrow])
                rest = [p for p in range(100) if p not in narrow]
                assert set(wide) <= {*rest, 100, 101}
                assert torch.equal(now[:, rest], old[index][:, rest])


def layer_of(scheme, seed, lengths, columns):
    """A layer, its record and left-padded rows: (layer, rows, ids, valid); row b has ``lengths[b]`` real columns."""
    layer = driver.make(scheme)
    layer.tags.record = TokenRecord(Aging(), "turns" in scheme.needs)
    ids = torch.where(prompt(len(lengths), columns, seed) == TURN, 5, prompt(len(lengths), columns, seed))
    pads = torch.tensor([columns - length for length in lengths])
    valid = torch.arange(columns) >= pads[:, None]
    return layer, [row(seed + i, columns) for i in range(len(lengths))], ids, valid


def send(layer, rows, ids, valid, at, tokens):
    """One forward of columns ``at`` to ``at + tokens``: (what attention gave, what dense tensors would give)."""
    new = slice(at, at + tokens)
    mask2d = valid[:, : at + tokens]
    (layer.tags.record.tag_prompt if tokens > 1 else lambda ids, mask, seen: layer.tags.record.note_step(ids, seen))(
        ids[:, new], mask2d, at
    )
    queries, keys, values = join([x[new] for x in rows])
    mask = mask_of(layer, mask2d, len(rows), tokens)
    layer.update(keys, values)
    reference = attention(queries, layer.dense("keys"), layer.dense("values"), mask, DIM**-0.5)
    pages = layer.begin(mask, tokens)
    out = layer.attend(queries, AttentionArguments(DIM**-0.5, mask)) if pages else None
    layer.finish(queries, AttentionArguments(DIM**-0.5, mask))
    return out, reference


SCHEME = get_scheme("triaxial", requantize_on_turn_end=True, **SMALL)


def test_attention_is_that_of_the_dequantized_pages():
    """Rows of unequal lengths, left-padded: in the short prompts that end turns, and in steps behind them."""
    layer, rows, ids, valid = layer_of(SCHEME, 5, [150, 97, 31], 150)
    ids[:, [100, 120]] = TURN
    send(layer, rows, ids, valid, 0, 100)
    before = [positions(layer, i)[0] for i in range(3)]
    at, had = 100, []
    for tokens in (10, 1, 1, 5, 3, 9, 1, 1):
        out, reference = send(layer, rows, ids, valid, at, tokens)
        assert out is not None
        for i in range(3):
            first = max(int((~valid[i]).sum()) - at, 0)
            assert_close(out[i, :, first:], reference[i, :, first:])
        at += tokens
        had.append([len(positions(layer, i)[0]) for i in range(3)])
    assert before == [[], [], []]
    # In the first turn's end, and in the second's; the third row is too short for a page at first.
    assert had[0][0] >= 32
    assert had[5][0] > had[4][0]
    assert had[0][2] == 0


def test_a_padded_row_is_the_row_alone():
    """Bit for bit: neither padding nor other rows change what moves, or its bits."""
    prompts = (90, 3, 57)
    columns, lengths = sum(prompts), [150, 131, 77]
    layer, rows, ids, valid = layer_of(SCHEME, 9, lengths, columns)
    ids[:, [prompts[0], prompts[0] + prompts[1]]] = TURN
    at = 0
    for tokens in prompts:
        send(layer, rows, ids, valid, at, tokens)
        at += tokens
    assert positions(layer, 0)[0]
    for i, length in enumerate(lengths):
        alone, _, _, _ = layer_of(SCHEME, 9, [length], length)
        pad = columns - length
        own, mine, seen = rows[i][pad:], ids[i : i + 1, pad:], 0
        for tokens in (prompts[0] - pad, *prompts[1:]):
            send(alone, [own], mine, torch.ones(1, length, dtype=torch.bool), seen, tokens)
            seen += tokens
        assert_same_bits(stored(layer, i), stored(alone, 0))


# What fails loses nothing.


def held(cache):
    return [stored(layer, index) for layer in cache.layers for index in range(layer.batch_size)]


def same(a, b):
    for mine, theirs in zip(a, b, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("broken", "layer", "knobs"),
    [
        ("write_pages", 1, {"max_cache_len": 200, "page_size": 32}),
        ("as_pages", 1, {}),
        ("_pages_in_order", 0, {"max_cache_len": 200}),
    ],
)
def test_no_memory_for_a_move_is_no_loss(model, monkeypatch, broken, layer, knobs):
    """Whichever part of a move fails, its layer is as it was; asked again, all is as if nothing had failed."""
    cache, smooth = (make(model, **knobs) for _ in range(2))
    ids = torch.cat([turn(96, 0), turn(40, 1)], 1)
    for x in (cache, smooth):
        forward(model, x, ids[:, :96])
    forward(model, smooth, ids[:, 96:])
    before, size = held(cache), cache.memory().compressed.total
    calls, original = [], part_of(broken)

    def fails(*args):
        calls.append(1)
        # Keys and values need one each, but for the last.
        if len(calls) == (1 + layer if broken == "_pages_in_order" else 2 + 2 * layer):
            raise MemoryError("made up")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(f"hfkvq.caches.store.requantize.{broken}", fails)
        with pytest.raises(MemoryError):
            forward(model, cache, ids[:, 96:])
    assert_same_bits(stored(cache.layers[layer], 0), before[layer])
    assert cache.layers[layer].get_seq_length() == 96
    if layer:
        # Passed already, so it has the new tokens; the old ones are all there.
        cache.layers[0].crop(-40)
        assert sorted([*positions(cache.layers[0])[0], *positions(cache.layers[0])[1]]) == list(range(96))
    else:
        assert cache.memory().compressed.total == size
    forward(model, cache, ids[:, 96:])
    same(held(cache), held(smooth))


def part_of(name):
    found = requantizing
    for part in name.split("."):
        found = getattr(found, part)
    return found


# Afterwards.


@pytest.mark.parametrize("knobs", [{}, {"max_cache_len": 200, "page_size": 32}])
def test_rows_copies_and_files_go_on(model, knobs):
    """Reorder, repeat, select, deepcopy and pickle after a move: each goes on as the rows that it was made of."""
    ids = torch.cat([turn(100, 0, 2), turn(30, 1, 2), turn(50, 2, 2)], 1)
    cache = make(model, **knobs)
    for part in (ids[:, :100], ids[:, 100:130]):
        forward(model, cache, part)
    assert all(positions(cache.layers[0], index)[0] for index in range(2))
    twin, loaded, chosen = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)
    loaded.attach(model)
    chosen.batch_repeat_interleave(2)
    chosen.reorder_cache(torch.tensor([3, 2, 1, 0]))
    chosen.batch_select_indices(torch.tensor([3, 0]))
    for x in (cache, twin, loaded, chosen):
        forward(model, x, ids[:, 130:])
        if not knobs:
            assert x.memory().total == sum(t.nbytes for t in tensors_of(x.layers))
    expected = Model(cache.scheme.page_size)
    for end in (100, 130, 180):
        expected.prompt(widths_of(ids[:1, :end]))
    expected.check(cache)
    for x in (twin, loaded, chosen):
        same(held(x), held(cache))


def test_crop_takes_the_turn_back_or_refuses(model):
    """What came behind a move can be taken back, to the last page of it; a page is not cut."""
    cache = make(model, table={"current|text|obs": 2, "turn_m1|text|user": 2, "turn_m2|text|user": 2})
    forward(model, cache, torch.tensor([[TURN] + [5] * 39]))
    forward(model, cache, torch.tensor([[TURN] + [4] * 32 + [5] * 7]))
    # The words of the first turn have moved; the results of the second were narrow from the first.
    assert positions(cache.layers[0])[0] == [*range(32), *range(41, 73)]
    forward(model, cache, torch.tensor([[TURN] + [5] * 15]))
    # Pages by their newest tokens: those of the middle before what has moved last.
    narrow = [*range(32), *range(41, 73), *range(32, 41), *range(73, 80)]
    assert positions(cache.layers[0])[0] == narrow
    before, dense = held(cache), cache.layers[0].dense("keys")
    for tokens in (17, 36, 70, 90):
        with pytest.raises(NotImplementedError, match=r"crop: cannot remove tokens that are already sealed"):
            copy.deepcopy(cache).crop(-tokens)
    same(held(cache), before)
    for length, pages in ((80, 5), (32, 2)):
        cache.crop(length - cache.get_seq_length())
        assert cache.tokens.length == length
        assert torch.equal(cache.layers[0].dense("keys"), dense[:, :, :length])
        assert positions(cache.layers[0])[0] == narrow[: pages * PAGE]
    # The next turn tags what is left.
    forward(model, cache, torch.tensor([[TURN] + [5] * 9]))
    assert cache.tokens.tags[0, :32].tolist() == [parse_tag("turn_m1|text|user")] * 32


# Who shows the ids.


def test_without_all_ids_nothing_is_renewed(model):
    """What nobody showed cannot be tagged, and stays as it is, until somebody shows it."""
    cache, ids = make(model.config), torch.cat([turn(n, i) for i, n in enumerate((100, 40, 40, 40))], 1)
    forward(model, cache, ids[:, :100])
    cache.attach(model)
    before = stored(cache.layers[0], 0)
    forward(model, cache, ids[:, 100:140])
    forward(model, cache, ids[:, 140:180])
    assert cache.tokens.renewed == 0
    assert not positions(cache.layers[0])[0]
    assert torch.equal(stored(cache.layers[0], 0)["1 keys codes 0"], before["1 keys codes 0"])
    cache.see(ids)
    assert cache.tokens.ids[:, :220].tolist() == ids.tolist()
    forward(model, cache, ids[:, 180:])
    expected = Model()
    expected.widths = [4] * 180
    expected.seal()
    expected.prompt(widths_of(ids))
    expected.check(cache)
    assert min(expected.narrow) < 10


@pytest.mark.parametrize("shown", [50, 70])
def test_tokens_beyond_the_tags_stay(shown):
    """Tags of the first columns only, in a row that began with padding: no other token moves."""
    layer, rows, ids, valid = layer_of(SCHEME, 4, [80, 73], 80)
    send(layer, rows, ids, valid, 0, 80)
    assert requantize_by_tags(layer.store, torch.full((2, shown), parse_tag("older|text|obs"), dtype=torch.uint8))
    assert positions(layer, 0)[0] == list(range(shown // PAGE * PAGE))
    assert positions(layer, 1)[0] == list(range((shown - 7) // PAGE * PAGE))
    assert not requantize_by_tags(layer.store, torch.zeros(2, 0, dtype=torch.uint8))
