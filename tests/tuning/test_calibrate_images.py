"""Calibration with images: real pixels through tiny models, whose processors say how many tokens an image takes."""

from __future__ import annotations

import base64
import io
import json

import pytest
import torch

from hfkvq.caches import TriAxialCache
from hfkvq.caches.tags import TAGS, Tagger
from hfkvq.measure.capture import Capture, capture
from hfkvq.tuning import Conversation, Sensitivity, calibrate, parse_conversation
from hfkvq.tuning.conversations import data_hash, make_request
from tests.caches.chats import byte_tokenizer
from tests.caches.vision import FAMILIES, build, film, picture, says
from tests.caches.vision import processor as processor_of
from tests.command import assert_refused, invoke

IMAGE = "current|image|user"
TOKENS = 4
"""Of a picture of Qwen3-VL's: a token for two by two patches."""


@pytest.fixture(scope="module")
def processor():
    return processor_of("qwen3-vl")


@pytest.fixture(scope="module")
def model():
    return build("qwen3-vl")


def url(seed):
    """A file's content, as OpenAI's messages carry it."""
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def messages(seed=0):
    shown = [{"type": "image_url", "image_url": {"url": url(seed)}}, {"type": "text", "text": "what is it?"}]
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": shown},
        {"role": "assistant", "content": "noise"},
    ]


def talk(seed=0):
    return parse_conversation(messages(seed))


def test_an_image_has_the_tokens_that_the_model_sees(processor, model):
    request = make_request(talk(), processor)
    assert request.ids.count(model.config.image_token_id) == TOKENS
    assert {"pixel_values", "image_grid_thw"} <= set(request.inputs)
    # The first answer is in the cache; the image is new.
    assert 0 < request.first_new < request.ids.index(model.config.image_token_id)
    tags = Tagger.from_tokenizer(processor, config=model.config).tag(torch.tensor([request.ids]))[0]
    assert [TAGS[tag] for tag in tags.tolist()].count(IMAGE) >= TOKENS


def test_what_is_measured_is_the_pixels(processor, model):
    found = calibrate(model, processor, [talk()], group_size=8, layers=2)
    assert found.counts[IMAGE] >= TOKENS
    assert found.distortion[IMAGE][0] > found.distortion[IMAGE][1] > 0
    again = calibrate(model, processor, [talk()], group_size=8, layers=2)
    assert again.distortion == found.distortion
    other = calibrate(model, processor, [talk(1)], group_size=8, layers=2)
    # As many tokens, of another picture.
    assert other.counts == found.counts
    assert other.distortion[IMAGE] != found.distortion[IMAGE]


def test_keys_are_those_of_a_forward_with_pixels(processor, model):
    request = make_request(talk(), processor)
    captured = capture(model, request.ids, [0, 1], 0, request.inputs)
    with torch.no_grad():
        whole = model(
            input_ids=torch.tensor([request.ids]), use_cache=True, output_attentions=False, **request.inputs
        ).past_key_values
    for one, layer in zip(captured, whole.layers, strict=True):
        assert torch.allclose(one.keys, layer.keys[0], atol=1e-5)


def test_a_tokenizer_alone_is_refused(processor, model):
    with pytest.raises(ValueError, match="pass the model's processor"):
        calibrate(model, processor.tokenizer, [talk()])


def test_a_processor_serves_conversations_of_text(processor):
    words = Conversation(({"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}))
    assert make_request(words, processor) == make_request(words, processor.tokenizer)
    assert make_request(words, processor).inputs == {}


def test_pictures_that_are_no_files_have_one_hash():
    def shown(seed):
        return Conversation((says("user", picture(seed)),))

    assert data_hash([shown(0)]) == data_hash([shown(0)]) != data_hash([shown(1)])


def test_placeholders_of_the_config_are_images(processor, model):
    """Whatever the chat format, and without one."""
    ids = torch.tensor([[5, model.config.image_token_id, model.config.video_token_id, 6]])
    tokenizer = byte_tokenizer("qwen3", None)
    assert {TAGS[tag] for tag in Tagger.from_tokenizer(tokenizer).tag(ids)[0].tolist()} == {"current|text|user"}
    cache = TriAxialCache(model, tokenizer, attach=False, group_size=8)
    tags = [TAGS[tag] for tag in cache.tokens.tagger.tag(ids)[0].tolist()]
    assert tags == ["current|text|user", IMAGE, IMAGE, "current|text|user"]
    named = Tagger.from_tokenizer(tokenizer, "chatml", config=model.config).tag(ids)[0]
    assert [TAGS[tag].split("|")[1] for tag in named.tolist()] == ["text", "image", "image", "text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_measured(family):
    """Several images, in an older turn too, and a video where the family takes one."""
    new = ["c", picture(1), *([film(1)] if FAMILIES[family][4] else [])]
    messages = (says("user", "a", picture(0)), says("assistant", "b"), says("user", *new), says("assistant", "d"))
    found = calibrate(build(family), processor_of(family), [Conversation(messages)], layers=2)
    assert found.counts["turn_m1|image|user"] >= 4
    assert found.counts[IMAGE] >= 4 * (1 + 2 * FAMILIES[family][4])
    assert all(found.distortion[tag][0] > 0 for tag in found.counts if "|image|" in tag)


# Bad input.


def test_a_processor_that_expands_no_images_is_refused(processor, model, monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr(type(processor), "replace_image_token", lambda self, *args, **kwargs: self.image_token)
    with pytest.raises(ValueError, match=r"got 1 placeholders .* shown, 1, need 4: they were not expanded"):
        calibrate(model, processor, [talk()])


def test_a_processor_that_makes_no_pixels_is_refused(processor, model, monkeypatch):
    plain = processor.tokenizer.apply_chat_template
    monkeypatch.setattr(type(processor), "apply_chat_template", lambda self, *args, **kwargs: plain(*args, **kwargs))
    with pytest.raises(ValueError, match=r"shows 1 images or videos, of which .* made 1 placeholders and no pixels"):
        calibrate(model, processor, [talk()])


def test_a_picture_that_is_no_file_is_refused(processor, model):
    shown = {"role": "user", "content": [{"type": "image", "path": "/nowhere/picture.png"}]}
    with pytest.raises(ValueError, match="nowhere"):
        calibrate(model, processor, [Conversation((shown, {"role": "assistant", "content": "noise"}))])


# The commands, with a model whose processor is loaded without torchvision.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llava")
    build("llava").save_pretrained(path)
    processor_of("llava").save_pretrained(path)
    (path / "talk.jsonl").write_text(json.dumps(messages()) + "\n", encoding="utf-8")
    return path


def test_the_command_measures_pixels(folder):
    out = folder / "sensitivity.json"
    done = invoke("calibrate", folder / "talk.jsonl", "--model", folder, "--out", out, "--device", "cpu")
    assert done.exit_code == 0, done.output
    found = Sensitivity.load(out)
    # Four by four patches and one for all.
    assert found.counts[IMAGE] == 17
    assert found.distortion[IMAGE][0] > found.distortion[IMAGE][1] > 0


def test_the_command_shows_tags_of_images(folder):
    done = invoke("tag", "--tokenizer", folder, "--messages", folder / "talk.jsonl", "--json")
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.output)["conversations"]
    assert one["counts"][IMAGE] == 17
    text = folder / "text.jsonl"
    text.write_text(json.dumps(messages()[:2]) + "\n", encoding="utf-8")
    plain = invoke("tag", "--tokenizer", folder, "--messages", text, "--json")
    assert not any("|image|" in tag for tag in json.loads(plain.output)["conversations"][0]["counts"])


def test_the_command_wants_a_processor_for_images(folder, tmp_path):
    byte_tokenizer("qwen3", processor_of("llava").chat_template).save_pretrained(tmp_path)
    done = invoke("tag", "--tokenizer", tmp_path, "--messages", folder / "talk.jsonl")
    assert_refused(done, "pass the model's processor")


def test_tokens_of_an_image_may_see_each_other():
    """A mask says who sees whom, where a model's images are not causal."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    causal = Capture(query, keys, values, 0.3).attend(keys, values)
    assert torch.equal(Capture(query, keys, values, 0.3, mask=mask).attend(keys, values), causal)
    mask[1, 2] = True
    seen = Capture(query, keys, values, 0.3, mask=mask).attend(keys, values)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3)
    assert torch.allclose(seen, expected, atol=1e-5)
    assert not torch.allclose(seen, causal)
