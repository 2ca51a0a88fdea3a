"""Images and videos end to end: real pixels, the families' own processors, every mode that stock generation has."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from transformers import DynamicCache

from hfkvq import MixedKVCache, TriAxialCache
from hfkvq.caches.base.recorded import is_recorded
from hfkvq.caches.tags import PAD, TAGS, Tagger, placeholders
from tests.caches.driver import assert_same_bits, stored
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.vision import (
    FAMILIES,
    build,
    config,
    film,
    picture,
    processor,
    prompts,
    says,
)

NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
VIDEOS = [family for family in FAMILIES if FAMILIES[family][4]]
# Qwen2-VL is Qwen2.5-VL's elder brother, with another vision tower.
USUAL = [pytest.param(family, marks=[pytest.mark.slow] * (family == "qwen2-vl")) for family in FAMILIES]
SHORT = {"group_size": 8, "page_size": 8, "seal_unit": 8, "sink_length": 0}


@functools.cache
def two_rows(family):
    """Rows of several lengths: two pictures and a second turn, and one picture; padding at the left."""
    first = [says("user", "ab", picture(0), "what?", picture(1, 48, 32)), says("assistant", "hm"), says("user", "ok?")]
    return prompts(family, first, [says("user", picture(2), "hi")])


@functools.cache
def one_row(family, seed=0):
    return prompts(family, [says("user", "ab", picture(seed), "what is it?")])


def generate(model, cache, inputs, **kwargs):
    # As a trained model would not: a placeholder without an image behind it.
    never = {"suppress_tokens": placeholders(model.config)}
    return model.generate(**inputs, past_key_values=cache, **(NEW | never | kwargs))


def second_turn(family, model, cache):
    """A cache is given all ids, and the pixels of new images."""
    inputs, more = one_row(family), prompts(family, [says("user", "and", picture(7), "?")])
    out = generate(model, cache, inputs)
    ids = torch.cat([out, more["input_ids"]], 1)
    turn = more | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in more:
            answered = out.shape[1] - inputs[name].shape[1]
            turn[name] = torch.cat([torch.nn.functional.pad(inputs[name], (0, answered)), more[name]], 1)
    if "image_grid_thw" in more:
        grids = torch.cat([inputs["image_grid_thw"], more["image_grid_thw"]])
        given = {"mm_token_type_ids": turn["mm_token_type_ids"], "image_grid_thw": grids}
        turn["position_ids"], _ = model.model.get_rope_index(ids, **given)
    return generate(model, cache, turn)


def sampled(family, model, cache):
    torch.manual_seed(1)
    return generate(model, cache, two_rows(family), do_sample=True, num_return_sequences=2)


MODES = {
    "greedy": lambda family, model, cache: generate(model, cache, two_rows(family)),
    "beams": lambda family, model, cache: generate(model, cache, two_rows(family), num_beams=2),
    "sequences": sampled,
    "chunks": lambda family, model, cache: generate(model, cache, one_row(family), prefill_chunk_size=7),
    "lookup": lambda family, model, cache: generate(model, cache, one_row(family), prompt_lookup_num_tokens=3),
    "assisted": lambda family, model, cache: generate(model, cache, one_row(family), assistant_model=build(family)),
    "turns": second_turn,
    "video": lambda family, model, cache: generate(
        model, cache, prompts(family, [says("user", film(0), "what?", picture(1))])
    ),
}


def runs(family, mode, make):
    """Tokens, or the error that stock generation raises."""
    model = build(family)
    logging.disable(logging.WARNING)
    try:
        return MODES[mode](family, model, make(model))
    except (RuntimeError, ValueError, StopIteration) as error:
        return error
    finally:
        logging.disable(logging.NOTSET)


OTHER_MODES = (("gemma3", "beams"), ("gemma3", "chunks"), ("internvl", "video"))


def cells():
    """Families and modes: all modes of one family, and of the others, whose text models are alike, a few.

    What is greedy without turns is a part of "turns".
    """
    for family in FAMILIES:
        for mode in (mode for mode in MODES if mode != "video" or family in VIDEOS):
            if (
                (family == "qwen3-vl" and mode != "greedy")
                or (mode == "turns" and family != "qwen2-vl")
                or (family, mode) in OTHER_MODES
            ):
                yield pytest.param(family, mode, id=f"{family}-{mode}")


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("family", "mode"), list(cells()))
def test_generate_gives_the_tokens_of_a_dynamic_cache(family, mode):
    """Growing with captured steps, and of fixed capacity without."""
    expected = runs(family, mode, lambda model: DynamicCache(config=model.config.get_text_config()))
    if isinstance(expected, Exception):
        # 5.17 does not cut Qwen's grids into pieces.
        assert mode == "chunks", expected
        pytest.skip(f"stock generation fails: {expected}")
    got = runs(family, mode, lambda model: MixedKVCache(model, "full"))
    assert torch.equal(got, expected), got
    # Drafts are made in steps too; beams in recorded ones need no graph of their own.
    assert TapeGraph.made > 0
    if mode in ("greedy", "video") or (family, mode) == ("qwen3-vl", "turns"):
        fixed = runs(family, mode, lambda model: MixedKVCache(model, "full", max_cache_len=160, graphs=False))
        assert torch.equal(fixed, expected), fixed


@pytest.mark.parametrize("family", USUAL)
def test_answers_are_about_the_pixels(family):
    """What the tests above compare depends on them."""
    model = build(family)
    with torch.no_grad():
        one, other = (model(**one_row(family, seed)).logits[0, -1] for seed in (0, 5))
    assert (one - other).abs().max() > 1e-2


@pytest.mark.usefixtures("captured")
def test_a_graph_serves_prompts_whose_images_move_positions():
    """M-RoPE: how far positions lag behind tokens is another number for each prompt, and the model's to remember."""
    family = "qwen3-vl"
    model, stock = build(family), build(family)
    deltas, ask = set(), model.model.compute_3d_position_ids

    def asked(**kwargs):
        # A graph would go on with the number of the prompt that it was recorded behind.
        assert not is_recorded()
        return ask(**kwargs)

    model.model.compute_3d_position_ids = asked
    for width in (32, 96):
        inputs = prompts(family, [says("user", picture(3, width, 32), "x" * (40 - width // 4), "what is it?")])
        expected = generate(stock, DynamicCache(config=stock.config.get_text_config()), inputs)
        assert torch.equal(generate(model, MixedKVCache(model, "full", graphs=True), inputs), expected)
        deltas.add(int(model.model.rope_deltas))
    assert len(deltas) == 2
    assert TapeGraph.made > 0


# The modal axis.


def tags_of(family, inputs):
    tagger = Tagger.from_tokenizer(processor(family), config=config(family))
    return tagger.tag(inputs["input_ids"], inputs["attention_mask"])


def placeholders_of(family, ids):
    """Where features go."""
    return torch.isin(ids, torch.tensor(placeholders(config(family))))


def modal(tags):
    return torch.tensor([[TAGS[tag].split("|")[1:2] == ["image"] for tag in row] for row in tags.tolist()])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_images_are_tagged_as_images(family):
    """In rows with padding, of several images, in older turns: the placeholders, and the marks around them."""
    inputs = two_rows(family)
    tags, ids = tags_of(family, inputs), inputs["input_ids"]
    assert bool((tags == PAD).eq(inputs["attention_mask"] == 0).all())
    images, features = modal(tags), placeholders_of(family, ids)
    assert bool((images | ~features).all())
    around = processor(family).tokenizer.convert_ids_to_tokens(ids[images & ~features])
    assert set(around) <= {
        "<|vision_start|>",
        "<|vision_end|>",
        "<img>",
        "</img>",
        "<start_of_image>",
        "<end_of_image>",
    }
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            # The processor's own word.
            assert bool((images | (inputs[name] == 0)).all())
    names = [{TAGS[tag] for tag in row.tolist()} for row in tags]
    assert "turn_m1|image|user" in names[0]
    assert "current|image|user" not in names[0]
    assert "current|image|user" in names[1]


def test_config_or_processor_name_what_the_chat_format_does_not():
    inputs = one_row("llava")
    features = placeholders_of("llava", inputs["input_ids"])
    assert int(features.sum()) == 17
    tokenizer = processor("llava").tokenizer
    for source, known in ((processor("llava"), None), (tokenizer, config("llava"))):
        tags = Tagger.from_tokenizer(source, config=known).tag(inputs["input_ids"])
        assert torch.equal(modal(tags), features)


@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_images_go_into_two_bits(family):
    """The model and its processor are all that it takes; a config is shown what the processor made."""
    model, inputs = build(family), two_rows(family)
    table = {tag: 2 for tag in TAGS if "|image|" in tag}
    # Of a config, keys would be smoothed by the prompt.
    hooked = TriAxialCache(model, processor(family), table=table, smooth_keys=False, **SHORT)
    shown = TriAxialCache(model.config, processor(family), table=table, smooth_keys=False, **SHORT)
    shown.see(**inputs)
    out = generate(model, hooked, inputs)
    assert torch.equal(generate(model, shown, inputs), out)
    # Layers with a window give tokens no widths of their own.
    held, same = (next(x for x in cache.compressed_layers if x.reads_tags) for cache in (hooked, shown))
    images = modal(tags_of(family, inputs))
    for row, mask in enumerate(inputs["attention_mask"]):
        own = images[row][mask.bool()].nonzero()[:, 0].tolist()
        narrow = stored(held, row).get("0 keys positions", torch.empty(0)).tolist()
        # In order, whole pages.
        assert narrow == own[: len(own) // 8 * 8]
        assert_same_bits(stored(held, row), stored(same, row))
    assert len(stored(held, 0)["0 keys positions"]) == 8


# Images that nobody expanded.


@pytest.mark.parametrize("family", FAMILIES)
def test_images_that_nobody_expanded_are_refused(family):
    """In the model's own words, before anything is cached: one placeholder for each image, as templates write it."""
    model, inputs = build(family), one_row(family)
    features = placeholders_of(family, inputs["input_ids"][0])
    keep = torch.ones_like(features)
    keep[1:] = ~(features[1:] & features[:-1])
    length = len(features)
    given = {k: x[:, keep] if x.dim() == 2 and x.shape[1] == length else x for k, x in inputs.items()}
    cache = TriAxialCache(model, processor(family), **SHORT)
    with pytest.raises(ValueError, match="tokens: 1, features"), torch.no_grad():
        model(**given, past_key_values=cache)
    assert cache.get_seq_length() == 0
    fresh = TriAxialCache(model, processor(family), **SHORT)
    assert torch.equal(generate(model, cache, inputs), generate(model, fresh, inputs))
