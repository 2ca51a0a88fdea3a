"""TriAxialKV: one test per equation, then what a conversation does to a cache whose tokens have tags."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle

import pytest
import torch

from hfkvq import MixedKVCache, TriAxialCache, get_scheme
from hfkvq.caches import BitTable
from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.schemes.base import UNTAGGED
from hfkvq.caches.tags import PAD, TAGS, parse_tag
from hfkvq.caches.tags.bit_table import config_hash, template_hash
from tests.caches.driver import assert_same_bits, stored
from tests.caches.models import build, config, prompt

OBS, USER = "older|text|obs", "current|text|user"
TABLE = {OBS: 2, USER: 4}
SMALL = {"table": TABLE, "page_size": 16, "group_size": 8, "seal_unit": 8, "sink_length": 0}


class EvenIsObs:
    """Even ids are old tool results, odd ones are the user's; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def tag(self, ids, mask=None):
        self.asked.append(ids.tolist())
        tags = torch.where(ids % 2 == 0, parse_tag(OBS), parse_tag(USER)).to(torch.uint8)
        return tags if mask is None else tags.masked_fill(mask == 0, PAD)


def make(model, **knobs):
    return TriAxialCache(model, tagger=EvenIsObs(), **(SMALL | knobs))


@pytest.fixture
def model():
    return build("llama")


def forward(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits


def positions(cache, row=0):
    """Row positions of sealed tokens: (those of 2 bits, those of 4)."""
    held = stored(cache.layers[0], row)
    return [held.get(f"{run} keys positions", torch.empty(0)).tolist() for run in (0, 1)]


def generate(model, cache, ids, steps, **kwargs):
    return model.generate(ids, past_key_values=cache, max_new_tokens=steps, do_sample=False, **kwargs)


# The scheme.


def test_layout_is_section_321():
    """INT2 keys per channel over 32 tokens; INT2 values, INT4 keys and values per token over 32 channels."""
    layout = get_scheme("triaxial").layout(128, 128)
    assert get_scheme("triaxial").limits(128, 128) == (None, None)
    # Bytes of a token and head of 128 channels: a scale and a minimum of 16 bits for 32 elements, twice.
    sizes = []
    for keys, values in layout.store.runs:
        parts = [*keys.allocate("keys", 1, 1, 128, torch.float32, torch.device("cpu"))]
        parts += values.allocate("values", 1, 1, 128, torch.float32, torch.device("cpu"))
        sizes.append(sum(part.nbytes for part in parts) / 32)
    assert sizes == [96, 160]


def test_token_bits_are_the_tables():
    """b*(s(t)); what the table leaves out, padding and untagged tokens get 4."""
    scheme = get_scheme("triaxial", table={OBS: 2, "turn_m1|text|obs": 2, USER: 4})
    tags = torch.tensor([[parse_tag(OBS), parse_tag(USER), parse_tag("turn_m2|text|obs"), PAD, UNTAGGED]])
    x = torch.zeros(1, 1, 5, 8)
    assert scheme.token_bits(x, x, torch.arange(5)[None], tags.to(torch.uint8)).tolist() == [[2, 4, 4, 4, 4]]
    assert scheme.token_bits(x, x, torch.arange(5)[None]) is None


def test_default_table_spares_what_is_copied_to_the_letter():
    table = dict(get_scheme("triaxial").table)
    assert table["older|text|obs"] == table["turn_m2|text|obs"] == table["current|image|obs"] == 2
    assert not any(axis in tag for tag in table for axis in ("text|inst", "text|tool_call", "text|user"))
    assert not any(tag.startswith(("current|text", "turn_m1|text")) for tag in table)


def test_scheme_is_hashable_and_comes_back_from_json():
    scheme = get_scheme("triaxial", table=TABLE)
    assert scheme == get_scheme("triaxial", table=list(TABLE.items())[::-1])
    assert hash(scheme) == hash(get_scheme("triaxial", table=TABLE))
    assert get_scheme(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert get_scheme(scheme, page_size=32).table == scheme.table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"older|text|observation": 2}, r"table: .*older\|text\|observation"),
        ({"pad": 2}, r"table: got 'pad'.*padding has none"),
        ({OBS: 3}, r"table: got 3 bits for 'older\|text\|obs', allowed 2 and 4"),
        ({OBS: True}, r"table: got True bits"),
        ([(OBS, 2), (OBS, 4)], r"table: the tag .* is given twice"),
        (7, r"table: got 7, allowed tags and their bits"),
        ("older", r"table: got 'older', allowed tags and their bits"),
        ({5: 2}, r"table: got 5, allowed temporal"),
    ],
)
def test_bad_tables(table, message):
    with pytest.raises(ValueError, match=message):
        TriAxial(table=table)


# Where tokens go.


def test_int2_tokens_fill_pages_in_order_and_the_rest_gets_int4(model):
    """Section 3.2.1: of 38 tokens of 2 bits, sealed together, the first 32 fill two pages; six are promoted."""
    cache = make(model)
    ids = torch.tensor([[2] * 10 + [3] * 20 + [4] * 28 + [5] * 6])
    forward(model, cache, ids)
    narrow, wide = positions(cache)
    assert narrow == [*range(10), *range(30, 52)]
    assert wide == [*range(10, 30), *range(52, 64)]
    assert cache.memory().code_bits == 3
    assert all(layer.store.counters[2].tolist() == [32] for layer in cache.layers)


# A conversation.


def test_the_tagger_is_given_the_whole_conversation(model):
    """A new turn is tagged from all ids, generated ones included; what is stored keeps its bits."""
    cache = make(model)
    first = torch.full((1, 32), 2)
    out = generate(model, cache, first, 10)
    before = positions(cache)
    whole = torch.cat([out, torch.full((1, 40), 4)], 1)
    generate(model, cache, whole, 2)
    assert cache.tokens.tagger.asked[-1] == whole.tolist()
    assert len(cache.tokens.tagger.asked) == 2
    after = positions(cache)
    assert [new[: len(old)] for new, old in zip(after, before, strict=True)] == before
    # Of the second turn all 40 are narrow: 32 in pages.
    assert after[0] == [*range(32), *range(42, 74)]


def test_chunks_of_a_prompt_are_told_by_see(model):
    """Chunk by chunk the tagger would take each for the end of the conversation."""
    ids, cache = prompt(1, 64), make(model)
    cache.see(ids)
    for chunk in ids.split(24, 1):
        forward(model, cache, chunk)
    assert cache.tokens.tagger.asked == [ids.tolist()]


def test_a_config_and_see_are_the_model_and_its_hook(model):
    ids = prompt(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    # Of a config, keys would be smoothed by the prompt.
    shown, hooked = (make(each, smooth_keys=False) for each in (model.config, model))
    shown.see(ids, mask)
    for cache in (shown, hooked):
        forward(model, cache, ids, mask)
    for row in range(2):
        assert_same_bits(stored(shown.layers[1], row), stored(hooked.layers[1], row))
        assert positions(shown, row)[0]


def test_model_is_left_as_it_was(model):
    """The hook goes with the cache, neither keeps the other alive, and a hooked model can be copied and saved."""
    hooks = len(model._forward_pre_hooks)
    cache = make(model)
    forward(model, cache, prompt(1, 40))
    assert len(model._forward_pre_hooks) == hooks + 1
    other = copy.deepcopy(model)
    pickle.dumps(model)
    forward(other, MixedKVCache(other, "full"), prompt(1, 10))
    del cache
    gc.collect()
    assert len(model._forward_pre_hooks) == hooks


def test_other_caches_of_the_model_are_not_looked_at(model):
    cache = make(model)
    forward(model, MixedKVCache(model, "full"), prompt(1, 40))
    assert cache.tokens.length == 0


# What users get wrong.


def test_without_token_ids_everything_is_int4_and_a_warning_says_so_once(model, caplog):
    cache = make(model.config)
    with caplog.at_level(logging.WARNING, logger="hfkvq"):
        out = generate(model, cache, prompt(1, 40), 30)
    assert sum("not shown any token ids" in record.message for record in caplog.records) == 1
    assert positions(cache)[0] == []
    assert cache.memory().code_bits == 4
    # The next turn may be shown.
    more = torch.cat([out, torch.full((1, 40), 2)], 1)
    cache.see(more)
    generate(model, cache, more, 2)
    assert len(positions(cache)[0]) >= 32


def test_see_wants_the_conversation_that_is_cached(model):
    cache, ids = make(model), prompt(1, 60)
    forward(model, cache, ids[:, :40])
    other = ids.clone()
    other[0, 17] += 1
    with pytest.raises(ValueError, match=r"input_ids: the token in column 17 differs from the one that is cached"):
        cache.see(other)
    assert cache.tokens.length == 40


def test_the_model_must_be_given_what_was_shown(model):
    cache, ids = make(model), prompt(1, 60)
    cache.see(ids)
    forward(model, cache, ids[:, :40])
    held = stored(cache.layers[0], 0)
    with pytest.raises(ValueError, match=r"input_ids: the tokens from column 40 on differ from those shown to see\(\)"):
        forward(model, cache, ids[:, 40:] + 1)
    assert cache.get_seq_length() == 40
    assert_same_bits(stored(cache.layers[0], 0), held)
    forward(model, cache, ids[:, 40:])


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(60, dtype=torch.long), None, r"input_ids: got torch.int64 of \(60,\)"),
        (torch.zeros(1, 60), None, r"input_ids: got torch.float32"),
        (torch.zeros(3, 60, dtype=torch.long), None, r"input_ids: got 3 rows, but the cache holds 2"),
        (torch.zeros(2, 60, dtype=torch.long), torch.ones(2, 59), r"attention_mask: got \(2, 59\)"),
    ],
)
def test_see_refuses_other_shapes(model, ids, mask, message):
    cache = make(model)
    forward(model, cache, prompt(2, 40))
    with pytest.raises(ValueError, match=message):
        cache.see(ids, mask)
    assert cache.tokens.length == cache.get_seq_length() == 40


def test_a_refused_forward_leaves_no_trace(model):
    """Too long for the capacity: the ids of tokens that were never cached are forgotten again."""
    cache, ids = make(model, max_cache_len=50), prompt(1, 60)
    forward(model, cache, ids[:, :40])
    with pytest.raises(ValueError, match=r"max_cache_len: 40 tokens and 20 new ones"):
        forward(model, cache, ids[:, 40:])
    forward(model, cache, ids[:, 45:55])
    assert cache.tokens.tagger.asked[-1] == [ids[0, :40].tolist() + ids[0, 45:55].tolist()]
    with pytest.raises(ValueError, match=r"max_cache_len"):
        forward(model, cache, ids[:, :1])
    cache = make(model)
    forward(model, cache, ids)
    with pytest.raises(ValueError, match=r"got batch size 2"):
        forward(model, cache, prompt(2, 5))
    assert cache.tokens.length == cache.get_seq_length() == 60


def test_neither_tokenizer_nor_tagger(model):
    with pytest.raises(ValueError, match=r"tokenizer: got None, but roles and turns are read from token ids"):
        TriAxialCache(model)


def test_a_crop_through_a_page_of_2_bits_is_refused(model):
    """Its tokens share scales. Between pages a crop goes on."""
    cache, ids = make(model), torch.arange(88)[None] % 60 + 4
    forward(model, cache, ids)
    forward(model, cache, ids[:, :1])
    # Even tokens have 2 bits, and fill pages up to the tokens 30 and 62.
    with pytest.raises(NotImplementedError, match="crop: cannot remove tokens that are already sealed"):
        cache.crop(-39)
    assert cache.get_seq_length() == 89
    cache.crop(-26)
    assert cache.get_seq_length() == 63
    cache.integrity_check()
    forward(model, cache, ids[:, :9])
    cache.integrity_check()


# Tables as files.


class FakeTokenizer:
    chat_template = "{{ messages }}"


def table_of(model_config, bits=None):
    origin = {"model": "tiny", "config": config_hash(model_config), "template": template_hash(FakeTokenizer)}
    return BitTable(bits or {OBS: 2}, origin | {"layers": [0, 1]}, {"budget": 2.7, "counts": {OBS: 12.0}})


def test_table_comes_back_from_its_file(model, tmp_path):
    table = table_of(model.config)
    table.save(tmp_path / "table.json")
    assert BitTable.load(tmp_path / "table.json") == table
    for given in (table, tmp_path / "table.json", str(tmp_path / "table.json")):
        cache = TriAxialCache(model, tagger=EvenIsObs(), table=given)
        assert cache.scheme.table == ((OBS, 2),)


def test_table_of_another_model_or_template_is_refused(model):
    table = table_of(config("llama", num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"table: it was calibrated for another model \(tiny, .*triaxial calibrate"):
        TriAxialCache(model, tagger=EvenIsObs(), table=table)
    other = FakeTokenizer()
    other.chat_template = "something else"
    with pytest.raises(ValueError, match=r"table: it was calibrated for another chat template"):
        table_of(model.config).check(model.config, other)
    table_of(model.config).check(model.config, FakeTokenizer())
    # The same architecture loaded from elsewhere, in another dtype, with another attention.
    twin = copy.deepcopy(model.config)
    twin.dtype, twin._name_or_path = torch.float16, "/elsewhere"
    table_of(model.config).check(twin)


def test_every_tag_but_padding_may_stand_in_a_table():
    assert len(TriAxial(table={tag: 2 for tag in TAGS[:-1]}).table) == 56
