"""Calibration with images: real pixels through a tiny Qwen3-VL, whose processor says how many tokens an image takes."""

from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hfkvq.caches import TriAxialCache
from hfkvq.caches.tags import TAGS, Tagger
from hfkvq.measure.capture import Capture, capture
from hfkvq.tuning import Conversation, calibrate, parse_conversation
from hfkvq.tuning.conversations import data_hash, make_request
from tests.caches.chats import byte_tokenizer

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
IMAGE = "current|image|user"
SIDE, PATCH = 64, 8
TOKENS = (SIDE // (2 * PATCH)) ** 2
"""Of an image: a token for two by two patches."""


class Processor(Qwen3VLProcessor):
    """Without videos, which torchvision would be needed for."""

    def __init__(self, image_processor, tokenizer, chat_template=None):
        self.video_processor = None
        super().__init__(image_processor, tokenizer, None, chat_template)

    def check_argument_for_proper_class(self, name, value):
        return type(value) if name == "video_processor" else super().check_argument_for_proper_class(name, value)


@pytest.fixture(scope="module")
def processor():
    tokenizer = byte_tokenizer("qwen3", TEMPLATE)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]}
    )
    pixels = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, size={"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    )
    return Processor(pixels, tokenizer, TEMPLATE)


@pytest.fixture(scope="module")
def model(processor):
    token = processor.tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": PATCH,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config).eval()


def picture(seed):
    """A file's content, as OpenAI's messages carry it."""
    torch.manual_seed(seed)
    file = io.BytesIO()
    Image.fromarray(torch.randint(0, 256, (SIDE, SIDE, 3), dtype=torch.uint8).numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def talk(seed=0):
    shown = [{"type": "image_url", "image_url": {"url": picture(seed)}}, {"type": "text", "text": "what is it?"}]
    return parse_conversation(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "good day"},
            {"role": "user", "content": shown},
            {"role": "assistant", "content": "noise"},
        ]
    )


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
    with pytest.raises(ValueError, match="give the model's processor"):
        calibrate(model, processor.tokenizer, [talk()])


def test_a_processor_serves_conversations_of_text(processor):
    words = Conversation(({"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}))
    assert make_request(words, processor) == make_request(words, processor.tokenizer)
    assert make_request(words, processor).inputs == {}


def test_pictures_that_are_no_files_have_one_hash():
    def shown(seed):
        torch.manual_seed(seed)
        image = Image.fromarray(torch.randint(0, 256, (4, 4, 3), dtype=torch.uint8).numpy())
        return Conversation(({"role": "user", "content": [{"type": "image", "image": image}]},))

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
