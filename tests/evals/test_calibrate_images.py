"""Calibration with images: real pixels through tiny models, whose processors say how many tokens an image takes."""

from __future__ import annotations

import base64
import io

import pytest
import torch

from evals.capture import Capture
from evals.triaxial.calibration import calibrate
from evals.triaxial.conversations import make_request, parse_conversation
from hfkvq.caches.tags import TAGS, Tagger
from tests.caches.vision import build, picture
from tests.caches.vision import processor as processor_of

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


# The commands, with a model whose processor is loaded without torchvision.


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
