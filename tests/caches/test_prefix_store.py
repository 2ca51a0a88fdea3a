"""Prompts on disk: what a new prompt begins with comes back as it was, or not at all."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import pytest
import torch

from hfkvq import MixedKVCache, PrefixStore, get_scheme
from hfkvq.caches import cache_file
from tests.caches.driver import small
from tests.caches.models import build, prompt
from tests.caches.test_saved import ByAge, filled

PLAIN = get_scheme("int4", page_size=16, sink_length=0)
"""Without windows: every border of pages is matched."""


def fed(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def the(store):
    """Files of ends and of pages."""
    return [sorted(folder.iterdir()) if folder.exists() else [] for folder in (store._ends, store._pages)]


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def store(model, tmp_path):
    return PrefixStore(tmp_path / "store", model, small("kitty-pro"))


@pytest.mark.parametrize("name", ["saw-int4", "kvarn", "mixkvq", "arkv", "snapkv", "triaxial"])
def test_what_was_put_comes_back_bit_for_bit(name, model, tmp_path):
    options: dict[str, Any] = {"tagger": ByAge()} if name == "triaxial" else {}
    store, ids = PrefixStore(tmp_path, model, small(name), **options), prompt(1, 120)
    cache, known = store.match(ids)
    assert known == cache.get_seq_length() == 0
    fed(model, cache, ids[:, :90])
    assert store.put(cache, ids[:, :90]) == store.nbytes > 0
    loaded, known = store.match(ids)
    assert known == loaded.get_seq_length() == 90
    assert torch.equal(*[fed(model, x, ids[:, 90:93]) for x in (loaded, copy.deepcopy(cache))])
    # The caller's own: the next one finds it as it was, and nothing was written twice.
    assert torch.equal(*[fed(model, x, ids[:, 90:]) for x in (store.match(ids).cache, cache)])
    assert store.nbytes == PrefixStore(tmp_path, model, small(name), **options).nbytes


def test_a_conversation_goes_on(model, store):
    """Each turn finds the last one's end, and adds its own pages alone. An answer's last token was shown to nobody."""
    options = {"do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12, "pad_token_id": 0}
    ids, kept, new, length = prompt(1, 100), MixedKVCache(model, small("kitty-pro")), [], 0
    for turn in range(3):
        cache, known = store.match(ids)
        assert known == length
        answer = model.generate(ids, past_key_values=cache, **options)
        assert torch.equal(answer, model.generate(ids, past_key_values=kept, **options))
        length = answer.shape[1] - 1
        pages = len(the(store)[1])
        new.append((store.put(cache, answer), len(the(store)[1]) - pages))
        ids = torch.cat([answer, prompt(1, 20, seed=turn)], 1)
    # Of 111 tokens, then of 32 more and of 32 more.
    assert [count for _, count in new] == [5, 2, 2]
    assert max(new[1][0], new[2][0]) < new[0][0]


# What prompts share.


def test_prompts_with_a_common_beginning_share_its_pages(model, tmp_path):
    """Computed apart from each other; the second is matched up to a border."""
    store, ids = PrefixStore(tmp_path, model, PLAIN), prompt(2, 100)
    ids[1, :70] = ids[0, :70]
    first, second = (filled_with(model, row) for row in ids)
    alone = store.put(first, ids[0])
    loaded, known = store.match(ids[1:])
    assert known == 64
    first.crop(-36)
    assert torch.equal(*[fed(model, x, ids[1:, 64:]) for x in (loaded, first)])
    assert len(the(store)[1]) == 6
    assert store.put(second, ids[1]) < alone
    assert len(the(store)[1]) == 8
    assert store.match(torch.cat([ids[1], ids[0]])).tokens == 100


def filled_with(model, ids, scheme=PLAIN):
    cache = MixedKVCache(model, scheme)
    fed(model, cache, ids.reshape(1, -1))
    return cache


@pytest.mark.rounding
@pytest.mark.parametrize("name", ["full", "kvarn", "mixkvq-error-only"])
def test_borders_of_pages_behind_a_sink(name, model, tmp_path):
    """A cache at a border goes on as one that was given just so many tokens.

    In one forward: the sums of a longer one may end in other bits, and so in another code.
    """
    knobs = {"full": {}, "mixkvq-error-only": {"sink_length": 4, "group_size": 16}}.get(name, {"sink_length": 4})
    scheme, ids = get_scheme(name, page_size=16, **knobs), prompt(1, 100)
    store = PrefixStore(tmp_path, model, scheme)
    border = 48 if name == "full" else 52
    short = filled_with(model, ids[:, :border], scheme)
    cache = copy.deepcopy(short)
    fed(model, cache, ids[:, border:])
    store.put(cache, ids)
    loaded, known = store.match(ids[:, :60])
    assert known == border
    assert loaded.memory().code_bits == short.memory().code_bits
    for begin, end in ((known, known + 1), (known + 1, known + 30)):
        torch.testing.assert_close(*[fed(model, x, ids[:, begin:end]) for x in (loaded, short)])
    assert store.match(ids[:, :16]).tokens == 0


def test_the_same_prompt_again(model, store):
    """One token must be left to feed: the last one is taken back, unless it was quantized with others."""
    # Behind a sink of 4, the last of 68 tokens fills a page of keys.
    for length, tokens in ((67, 66), (68, 0), (69, 68)):
        ids = prompt(1, length, seed=length)
        cache = filled_with(model, ids, store.preset.scheme)
        store.put(cache, ids)
        loaded, known = store.match(ids)
        assert known == loaded.get_seq_length() == tokens
    cache.crop(-1)
    assert torch.equal(*[fed(model, x, ids[:, -1:]) for x in (loaded, cache)])


# What does not match.


def test_other_models_weights_and_schemes(model, store, tmp_path):
    cache, ids = filled(model)
    store.put(cache, ids)
    longer = torch.cat([ids, ids], 1)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3
    for other, scheme in (
        (build("llama", seed=1), small("kitty-pro")),
        (build("qwen3"), small("kitty-pro")),
        (changed, small("kitty-pro")),
        (copy.deepcopy(model).bfloat16(), small("kitty-pro")),
        (model, small("kitty")),
        (model, small("kitty-pro", page_size=32)),
    ):
        assert PrefixStore(store.path, other, scheme).match(longer).tokens == 0
    assert PrefixStore(store.path, model, small("kitty-pro"), layers={"0": "full"}).match(longer).tokens == 0
    assert PrefixStore(store.path, build("llama"), small("kitty-pro")).match(longer).tokens == 70


@pytest.mark.parametrize(
    ("which", "damage"),
    [("end", "a bit"), ("end", "empty"), ("end", "gone"), ("page", "cut off"), ("page", "another"), ("page", "gone")],
)
def test_damaged_files_are_not_found_and_go(which, damage, model, store, caplog):
    ids = prompt(1, 100)
    for length in (40, 90):
        store.put(filled_with(model, ids[:, :length], store.preset.scheme), ids[:, :length])
    ends, pages = the(store)
    # Only the longer prompt has it.
    file = next(x for x in ends if x.name.startswith("90-")) if which == "end" else own_page(store)
    whole = file.read_bytes()
    changed = {
        "a bit": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        "cut off": whole[: len(whole) // 2],
        "empty": b"",
        "another": next(x for x in (ends if which == "end" else pages) if x != file).read_bytes(),
    }
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert store.match(ids).tokens == 40
    warned = damage != "gone" or which == "page"
    assert ("was unusable and has been removed" in caplog.text) == warned
    assert not file.exists()
    # It can be put again.
    store.put(filled_with(model, ids[:, :90], store.preset.scheme), ids[:, :90])
    assert store.match(ids).tokens == 90


def own_page(store):
    """A page that the shorter prompt does not have."""
    short = next(x for x in the(store)[0] if x.name.startswith("40-"))
    needed = cache_file.read(short)[0]["pages"]
    return next(x for x in the(store)[1] if x.name.removesuffix(".safetensors") not in needed)


def test_files_that_say_something_else(model, store):
    """Their checksums are right."""
    cache, ids = filled(model)
    longer = torch.cat([ids, ids], 1)
    for change in (
        lambda about: about.pop("pages"),
        lambda about: about["pages"].pop(),
        lambda about: about["cache"]["layers"].pop(),
        lambda about: about["cache"]["layers"][0].update(dtype="Tensor"),
    ):
        store.put(cache, ids)
        assert store.match(longer).tokens == 70
        ((end,), _) = the(store)
        about, rest = cache_file.read(end)
        change(about)
        cache_file.write(end, about, rest)
        assert store.match(longer).tokens == 0
        assert not end.exists()


# The bound, and what fails.


def test_the_least_recently_used_go_first(model, tmp_path):
    """An end goes before its pages, and pages that a prompt in use shares stay."""
    ids, scheme = [prompt(1, 100, seed) for seed in range(4)], small("kitty-pro")
    caches = [filled_with(model, x, scheme) for x in ids]
    one = PrefixStore(tmp_path / "one", model, scheme).put(caches[0], ids[0])
    store = PrefixStore(tmp_path / "store", model, scheme, max_bytes=int(2.5 * one))
    longer = [torch.cat([x, x], 1) for x in ids]
    for i in (0, 1):
        store.put(caches[i], ids[i])
    assert store.match(longer[0]).tokens == 100
    store.put(caches[2], ids[2])
    assert [store.match(x).tokens for x in longer] == [100, 0, 100, 0]
    for i in range(4):
        store.put(caches[i], ids[i])
        assert store.nbytes <= store.max_bytes
        assert store.match(longer[i]).tokens == 100
    small_store = PrefixStore(tmp_path / "store", model, scheme, max_bytes=one // 2)
    before = store.nbytes
    with pytest.raises(
        ValueError, match=r"max_bytes: the prompt takes \d+ bytes, allowed \d+; make the store with more"
    ):
        small_store.put(caches[0], ids[0])
    assert store.nbytes == before


def test_a_full_disk(model, store, monkeypatch):
    ids, scheme, write = prompt(1, 150), store.preset.scheme, cache_file.save_file
    store.put(filled_with(model, ids[:, :60], scheme), ids[:, :60])
    written = []

    def full(tensors, path, metadata):
        if len(written) == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        written.append(path)
        write(tensors, path, metadata)

    monkeypatch.setattr(cache_file, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        store.put(filled_with(model, ids, scheme), ids)
    assert store.match(ids).tokens == 60
    assert not list(store.path.rglob("*.part"))
    monkeypatch.undo()
    store.put(filled_with(model, ids, scheme), ids)
    assert store.match(torch.cat([ids, ids], 1)).tokens == 150


def test_several_threads(model, tmp_path):
    """Writers of the same prompts, under a bound that some of them exceed."""
    scheme, ids = small("kitty-pro"), prompt(1, 160)
    caches = {n: filled_with(model, ids[:, :n], scheme) for n in (60, 110, 160)}
    store = PrefixStore(tmp_path, model, scheme, max_bytes=150_000)
    failures = []

    def work(lengths):
        try:
            for n in lengths * 3:
                store.put(caches[n], ids[:, :n])
        except Exception as error:
            failures.append(error)

    orders = ([60, 110, 160], [160, 60, 110], [60, 160, 110])
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert store.match(ids[:, :130]).tokens in (0, 60, 110)
    for thread in threads:
        thread.join()
    assert failures == []
    assert not list(tmp_path.rglob("*.part"))
    assert store.nbytes <= store.max_bytes
    store.put(caches[110], ids)
    loaded, known = store.match(ids[:, :130])
    assert known == 110
    assert torch.equal(*[fed(model, x, ids[:, 110:]) for x in (loaded, caches[110])])


# What is refused.


def test_caches_that_cannot_be_stored(model, store):
    ids = prompt(2, 70)
    cache, _ = filled(model)
    padded = MixedKVCache(model, small("kitty-pro"))
    with torch.no_grad():
        model(ids[:1], attention_mask=torch.tensor([[0] * 5 + [1] * 65]), past_key_values=padded)
    other = MixedKVCache(build("qwen3"), small("kitty-pro"))
    for given, tokens, words in (
        (filled(model, "kitty")[0], ids[:1], "cache: got one of .*kitty.*, allowed .*make it by store.match"),
        (other, ids[:1], "cache: its config is that of another model"),
        (MixedKVCache(model, small("kitty-pro")), ids[:1], "cache: got an empty one"),
        (filled(model, rows=2)[0], ids[:1], "cache: got 2 rows, allowed one; take each out of a copy"),
        (padded, ids[:1], "cache: it was given padding"),
        (cache, ids[:1, 1:], "token_ids: got 69, allowed 70 or more"),
        (cache, ids, r"token_ids: got torch.int64 of \(2, 70\), allowed whole numbers, \(1, n\) or \(n,\)"),
        (cache, ids[0].float(), "token_ids: got torch.float32"),
        ("prompt", ids[:1], "cache: got str, allowed a cache of kitty"),
    ):
        with pytest.raises(ValueError, match=words):
            store.put(given, tokens)
    assert not store.path.exists()
    with pytest.raises(ValueError, match="token_ids: got"):
        store.match(ids)


def test_images_are_no_tokens(model, tmp_path):
    model.config.image_token_id = 50
    cache, ids = filled(model)
    ids[0, 3] = 50
    with pytest.raises(ValueError, match="placeholders of images"):
        PrefixStore(tmp_path, model, small("kitty-pro")).put(cache, ids)


def test_stores_that_cannot_be(model, tmp_path):
    file = tmp_path / "file"
    file.touch()
    encoder = copy.deepcopy(model)
    encoder.config.is_encoder_decoder = True
    cases: Any = (
        ((tmp_path, model.config, "kitty-pro"), {}, "model: got LlamaConfig, allowed a Transformers model"),
        ((tmp_path, encoder, "kitty-pro"), {}, "model: got a llama, an encoder-decoder"),
        ((tmp_path, model, "zip"), {}, "zip"),
        ((tmp_path, model, "kitty-pro"), {"max_bytes": 0}, "max_bytes: got 0, allowed a positive number"),
        ((tmp_path, model, "kitty-pro"), {"max_bytes": 1e9}, "max_bytes: got 1000000000.0"),
        ((file, model, "kitty-pro"), {}, "path: .* is a file"),
        ((tmp_path, model, "triaxial"), {}, "tokenizer: got None"),
    )
    for arguments, options, words in cases:
        with pytest.raises(ValueError, match=words):
            PrefixStore(*arguments, **options)
