"""Caches in files: what comes back goes on as the cache did, and whatever is no such file is refused."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hfkvq import MixedKVCache, TriAxialCache
from hfkvq.caches import cache_file
from hfkvq.caches.tags import parse_tag
from tests.caches.driver import small
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt


def filled(model, scheme="kitty-pro", tokens=70, rows=1, **options):
    cache, ids = MixedKVCache(model, small(scheme), **options), prompt(rows, tokens)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache, ids


@pytest.fixture
def file(tmp_path):
    cache, ids = filled(build("llama"))
    cache.save(tmp_path / "prompt.safetensors", ids)
    return tmp_path / "prompt.safetensors"


@pytest.mark.parametrize("length", [None, 120])
def test_generate_goes_on_with_a_saved_prompt(length, tmp_path, captured):  # noqa: F811
    """From graphs, growing and at a fixed capacity; with tokens of steps in it."""
    model = build("llama")
    cache, ids = MixedKVCache(model, small("best-3.4"), max_cache_len=length), prompt(2, 50)
    options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 12, "max_new_tokens": 12}
    begun = model.generate(ids, past_key_values=cache, **options)
    assert cache.graphs.sync.members
    cache.save(tmp_path / "cache", begun[:, :-1])
    loaded = MixedKVCache.load(tmp_path / "cache", model)
    assert torch.equal(loaded.saved_ids, begun[:, :-1])
    expected = model.generate(begun, past_key_values=cache, **options)
    assert torch.equal(model.generate(begun, past_key_values=loaded, **options), expected)
    if length is not None:
        with pytest.raises(ValueError, match="max_cache_len"):
            model.generate(expected, past_key_values=loaded, **options | {"max_new_tokens": 60})


class ByAge:
    """Tags the newest 20 tokens as the user's, and all before them as an old observation."""

    def tag(self, ids, mask=None):
        tags = torch.full(ids.shape, parse_tag("current|text|user"), dtype=torch.uint8)
        tags[:, :-20] = parse_tag("older|text|obs")
        return tags


def test_tags_come_back(tmp_path):
    """The next prompt is tagged by the ids of all tokens before."""
    model, tagger = build("llama"), ByAge()
    options = {"group_size": 8, "page_size": 16, "seal_unit": 8}
    cache, ids = TriAxialCache(model, tagger=tagger, **options), prompt(1, 60)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = TriAxialCache.load(tmp_path / "cache", model, tagger=tagger)
    for name in ("ids", "tags"):
        theirs, own = (getattr(x.tokens, name)[:, : x.tokens.length] for x in (cache, loaded))
        assert torch.equal(theirs, own)
    with torch.no_grad():
        assert torch.equal(*[model(ids, past_key_values=x).logits for x in (cache, loaded)])
    assert loaded.memory().code_bits == cache.memory().code_bits < 4
    with pytest.raises(ValueError, match=r"TriAxialCache\.load"):
        MixedKVCache.load(tmp_path / "cache", model)


def test_layers_that_were_not_held_in_pages_are_refused(tmp_path):
    model, path = build("gemma2"), tmp_path / "cache"
    cache, _ = filled(model, tokens=50)
    cache.save(path)
    _rewritten(
        path, lambda _, description, __: description["layers"].__setitem__(0, {"came": 50, "record_past": False})
    )
    with pytest.raises(ValueError, match="cannot be loaded: a layer that is held in pages here was not in the file"):
        MixedKVCache.load(path, model)


def packed_alike(one, other):
    """Whether two caches hold the same bits; those of the second in memory of its own, tensor by tensor."""
    (numbers, own), (others, theirs) = one.packed(), other.packed()
    held = {x.untyped_storage().data_ptr(): x for layer in other.compressed_layers for x in layer.store.state.tensors()}
    assert all(x.untyped_storage().nbytes() <= x.nbytes for x in held.values())
    same = all(torch.equal(x, theirs[name].to(x.device)) for name, x in own.items())
    return same and numbers == others and own.keys() == theirs.keys()


def poison_memory(monkeypatch, seed):
    """From now on memory on the CPU is full of something, where nobody has written."""
    made, dice = torch.empty, torch.Generator().manual_seed(seed)

    def poisoned(*args, **kwargs):
        found = made(*args, **kwargs)
        if found.is_cpu and found.numel() and not found.requires_grad:
            raw = found.view(-1).view(torch.uint8)
            raw.copy_(torch.randint(256, raw.shape, dtype=torch.uint8, generator=dice))
        return found

    monkeypatch.setattr(torch, "empty", poisoned)


TAKING_BACK = ["full", "saw-int4", "kitty-pro", "kivi-2", "kvarn"]
"""Of which nothing is left of a token that was taken back from its window."""
LAYOUTS = [*TAKING_BACK, "best-3.4", "mixkvq", "arkv", "snapkv", "streaming-llm"]


# These are like others, with further options.
ALIKE = ("kivi-2", "streaming-llm", "best-3.4")


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *(pytest.param(name, None, marks=[pytest.mark.slow] * (name in ALIKE)) for name in LAYOUTS),
        *(("kitty-pro", 150), ("arkv", 150), ("windows", None), ("windows", 300)),
    ],
)
def test_files_of_the_same_cache_are_equal(name, length, tmp_path, monkeypatch):
    """Whatever was in memory where no token stands, tokens that were taken back, and those out of sight, included."""
    windows = name == "windows"
    model, ids, found = build("gemma2" if windows else "llama"), prompt(2, 231 if windows else 98), []
    mask = torch.ones_like(ids[:, :-1])
    mask[1, :9] = 0
    for seed in (1, 2):
        with monkeypatch.context() as patch, torch.no_grad():
            poison_memory(patch, seed)
            cache = MixedKVCache(model, small("saw-int4" if windows else name), max_cache_len=length)
            model(ids[:, :-1], past_key_values=cache, attention_mask=mask)
            if name in TAKING_BACK:
                model((ids[:, -1:] + seed) % model.config.vocab_size, past_key_values=cache)
                cache.crop(-1)
        cache.save(tmp_path / "cache")
        found.append((tmp_path / "cache").read_bytes())
    loaded = MixedKVCache.load(tmp_path / "cache", model)
    loaded.save(tmp_path / "cache")
    assert found[0] == found[1] == (tmp_path / "cache").read_bytes()
    with torch.no_grad():
        assert torch.equal(*[model(ids[:, -1:], past_key_values=x).logits for x in (cache, loaded)])


@pytest.mark.gpu
def test_to_a_gpu_and_back(file, tmp_path):
    """From another stream, too."""
    model = build("llama")
    cache = MixedKVCache.load(file, model)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            loaded = MixedKVCache.load(file, model, device="cuda")
            assert loaded.compressed_layers[0].held().device.type == "cuda"
            assert not loaded.saved_ids.is_cuda
            assert packed_alike(cache, loaded)
            loaded.save(tmp_path / "again", loaded.saved_ids)
            assert packed_alike(cache, MixedKVCache.load(tmp_path / "again", model))


# What is refused.


def test_ids_of_other_tokens(tmp_path):
    cache, ids = filled(build("llama"))
    with pytest.raises(ValueError, match=r"token_ids: got shape \(1, 69\), allowed \(batch, 70\)"):
        cache.save(tmp_path / "cache", ids[:, 1:])
    assert list(tmp_path.iterdir()) == []


def test_other_models(file):
    with pytest.raises(
        ValueError, match=r"of another model \(a llama\) than this one \(a qwen3\), which differs in \w+"
    ):
        MixedKVCache.load(file, build("qwen3"))


def test_models_of_the_same_type_differ_in_a_field(file, tmp_path):
    """All that compare configs say in which fields they differ."""
    other, cache = build("llama", rms_norm_eps=0.5), MixedKVCache(build("llama"), small("kitty-pro"))
    said = r"differs in rms_norm_eps \(1e-06, here 0\.5\)"
    with pytest.raises(ValueError, match=said):
        MixedKVCache.load(file, other)
    with pytest.raises(ValueError, match=said):
        cache.attach(other)


def test_files_that_are_cut_off_or_changed(file):
    model, whole = build("llama"), file.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is not a saved cache, or is truncated"):
            MixedKVCache.load(file, model)
    torch.manual_seed(0)
    for at in torch.randint(len(whole), (40,)).tolist():
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="path: "):
            MixedKVCache.load(file, model)


def _rewritten(file, change):
    """The file with another description, its checksum put right."""
    tensors = load_file(file)
    with cache_file.safe_open(file, framework="pt") as opened:
        head = json.loads(opened.metadata()["hfkvq"])
    description = json.loads(head["description"])
    change(head, description, tensors)
    head["description"] = json.dumps(description)
    digests = {name: cache_file.digest_of(name, x) for name, x in tensors.items()}
    head["sha256"] = cache_file.checksum(head["description"], digests)
    save_file(tensors, file, metadata={"hfkvq": json.dumps(head)})


def _cut_table(head, description, tensors):
    tensors["layer0.store.counters"] = tensors["layer0.store.counters"][:1].clone()


CHANGES = {
    "a later version": lambda head, _, __: head.update(version=6, hfkvq="9.9"),
    "an older version": lambda head, _, __: head.update(version=4, hfkvq="0.1"),
    "another kind": lambda head, _, __: head.update(kind="recipe"),
    "no version": lambda head, _, __: head.pop("version"),
    "no scheme": lambda _, description, __: description.pop("scheme"),
    "an unknown scheme": lambda _, description, __: description["scheme"].update(scheme="zip"),
    "fewer layers": lambda _, description, __: description["layers"].pop(),
    "rows of text": lambda _, description, __: description["layers"][0]["store"].update(rows="many"),
    "more tokens": lambda _, description, __: description["layers"][0].update(seen=71),
    "a dtype that is none": lambda _, description, __: description["layers"][0].update(dtype="Tensor"),
    "no counters": lambda _, __, tensors: tensors.pop("layer0.store.counters"),
    "other counters": lambda _, __, tensors: tensors["layer0.store.counters"].add_(1),
    "short counters": _cut_table,
    "codes of floats": lambda _, __, tensors: tensors.update(
        {name: x.float() for name, x in tensors.items() if name.endswith("keys.codes")}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_say_something_else(change, file):
    _rewritten(file, CHANGES[change])
    with pytest.raises(
        ValueError, match=r"path: .*(cannot be loaded|is of version [046], of hfkvq|is not a saved cache)"
    ):
        MixedKVCache.load(file, build("llama"))


def test_other_files(tmp_path):
    model = build("llama")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        MixedKVCache.load(tmp_path / "none", model)
    save_file({"x": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"is not a saved cache; cache\.save"):
        MixedKVCache.load(tmp_path / "weights", model)
    (tmp_path / "text").write_text("prompt")
    with pytest.raises(ValueError, match="is not a saved cache, or is truncated"):
        MixedKVCache.load(tmp_path / "text", model)


def test_pickle_names_the_way_to_keep_a_cache():
    with pytest.raises(TypeError, match=r"MixedKVCache: caches are not pickled; cache\.save\(path\)"):
        pickle.dumps(MixedKVCache(build("llama"), "full"))


def test_what_fails_leaves_the_file_that_was_there(file, monkeypatch):
    whole = file.read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(cache_file, "save_file", full)
    cache, _ = filled(build("llama"))
    with pytest.raises(OSError, match="No space left"):
        cache.save(file)
    assert file.read_bytes() == whole
    assert list(file.parent.iterdir()) == [file]
